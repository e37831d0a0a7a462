"""From bytes a token to sizes of tiers: the formulas of docs/sizing.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from kvtierd.connectors.vllm.chunks import GroupSize, choose_chunk
from kvtierd.errors import ConfigError
from kvtierd.model import MAX_SHARD_BYTES, PAGE_BYTES, round_up
from kvtierd.sizing.shape import Layers, ModelShape

__all__ = ["Drive", "Holding", "Layout", "Loading", "drive_wear", "holding", "layout_of", "loading", "needed_bytes"]

DAY_S: Final = 86_400
SECOND_GROUP_SHARE: Final = 1.5
"""vLLM pads groups to the larger kind of layers where that has fewer than so many times the layers of the smaller one."""


@dataclass(frozen=True)
class Layout:
    """How an engine's KV cache is cut into blocks of kvtierd.

    Attributes:
        shape: of the model.
        dtype: of the cache, as asked for.
        tp: tensor parallel ranks.
        rank_layer_bytes: bytes of one token and layer on one rank.
        shards: ranks whose bytes are kept; 1 for MLA, as all ranks have the same.
        groups: vLLM's KV cache groups, each of layers of one kind.
        chunk_tokens: tokens in one block of kvtierd.
    """

    shape: ModelShape
    dtype: str
    tp: int
    rank_layer_bytes: int
    shards: int
    groups: tuple[Layers, ...]
    chunk_tokens: int

    @property
    def rank_bytes_per_token(self) -> int:
        """Bytes of one token on one rank, in the engine."""
        return self.rank_layer_bytes * self.shape.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token that kvtierd keeps, all ranks."""
        return self.rank_bytes_per_token * self.shards

    def slot_bytes(self, header_bytes: int = 0) -> int:
        """Bytes that one chunk of tokens takes on a tier, all groups and ranks: whole pages, and a header for each slot."""
        return self.shards * sum(
            round_up(group.count * self.rank_layer_bytes * self.chunk_tokens, PAGE_BYTES) + header_bytes for group in self.groups
        )

    def loaded_bytes(self, tokens: int) -> int:
        """Bytes that a hit of so many tokens brings back, all ranks: of a window, only what the next token looks at."""
        hit = tokens // self.chunk_tokens * self.chunk_tokens
        total = 0
        for group in self.groups:
            first = 0
            if group.kind == "chunked":
                first = hit // group.window * group.window
            elif group.kind == "swa":
                first = max(0, hit - group.window + 1)
            total += group.count * (hit - first // self.chunk_tokens * self.chunk_tokens)
        return total * self.rank_layer_bytes * self.shards


def layout_of(shape: ModelShape, *, dtype: str = "auto", tp: int = 1, block_tokens: int = 16) -> Layout:
    """The layout of an engine.

    Args:
        shape: of the model.
        dtype: vLLM's ``--kv-cache-dtype``.
        tp: vLLM's ``--tensor-parallel-size``.
        block_tokens: vLLM's ``--block-size``.

    Raises:
        ConfigError: the type does not fit the model, its heads cannot be split over so many ranks, or a block gets too large.
    """
    if shape.attention == "MLA":
        rank_heads, shards = 1, 1
    else:
        whole = max(shape.kv_heads, tp) % min(shape.kv_heads, tp) == 0 and (not shape.heads or shape.heads % tp == 0)
        if not whole:
            raise ConfigError(
                f"{shape.heads} heads with {shape.kv_heads} KV heads cannot be split over {tp} ranks; choose a --tp that divides "
                "the heads, and divides the KV heads or is a multiple of them"
            )
        rank_heads, shards = max(1, shape.kv_heads // tp), tp
    layer_bytes = rank_heads * shape.head_bytes(dtype)
    groups = _groups(shape.layers)
    choice = choose_chunk([GroupSize(block_tokens, block_tokens * g.count * layer_bytes, g.window) for g in groups])
    if (largest := max(g.count for g in groups) * layer_bytes * choice.tokens) > MAX_SHARD_BYTES:
        raise ConfigError(f"{choice.tokens} tokens take {largest} bytes a rank, more than one block may; lower --block-tokens")
    return Layout(shape, dtype if dtype != "auto" else shape.dtype, tp, layer_bytes, shards, groups, choice.tokens)


def _groups(kinds: tuple[Layers, ...]) -> tuple[Layers, ...]:
    """vLLM's KV cache groups: about as many layers in each, of one kind."""
    counts = [layers.count for layers in kinds]
    size = max(counts) if max(counts) < SECOND_GROUP_SHARE * min(counts) else min(counts)
    groups = []
    for layers in kinds:
        parts = -(-layers.count // size)
        groups += [replace(layers, count=len(range(i, layers.count, parts))) for i in range(parts)]
    return tuple(groups)


@dataclass(frozen=True)
class Holding:
    """What a tier holds.

    Attributes:
        tokens: in whole blocks.
        contexts: of so many tokens as asked for.
    """

    tokens: int
    contexts: int


def holding(layout: Layout, capacity_bytes: int, context_tokens: int, *, nvme: bool) -> Holding:
    """What a tier of a capacity holds; on NVMe each slot has a header page."""
    blocks = capacity_bytes // layout.slot_bytes(PAGE_BYTES if nvme else 0)
    return Holding(blocks * layout.chunk_tokens, blocks // max(1, context_tokens // layout.chunk_tokens))


def needed_bytes(layout: Layout, contexts: int, context_tokens: int, *, nvme: bool) -> int:
    """Bytes of a tier that holds so many contexts of so many tokens; tokens past the last whole block are not kept."""
    blocks = contexts * (context_tokens // layout.chunk_tokens)
    return blocks * layout.slot_bytes(PAGE_BYTES if nvme else 0)


@dataclass(frozen=True)
class Drive:
    """Wear of the NVMe tier's drives.

    Attributes:
        written_bytes_per_day: when every new token is written once.
        drive_writes_per_day: that against the drives' capacity.
        budget_bytes_per_day: what the rating allows, for ``nvme.write_budget``.
    """

    written_bytes_per_day: int
    drive_writes_per_day: float
    budget_bytes_per_day: int

    @property
    def fits(self) -> bool:
        """Whether the rating allows it."""
        return self.written_bytes_per_day <= self.budget_bytes_per_day


def drive_wear(layout: Layout, tokens_per_day: float, drive_bytes: int, rated_dwpd: float) -> Drive:
    """Wear by so many new tokens (computed, not hit) a day; drives are rated in drive writes per day (DWPD)."""
    written = math.ceil(tokens_per_day / layout.chunk_tokens) * layout.slot_bytes(PAGE_BYTES)
    return Drive(written, written / drive_bytes, int(drive_bytes * rated_dwpd))


@dataclass(frozen=True)
class Loading:
    """Loading a context against computing it.

    Attributes:
        bytes: that are loaded.
        seconds: that takes, at the speed of the slower link.
        break_even_tokens_per_s: prefill rate of the engine below which loading is faster; 0 where no whole block is loaded.
    """

    bytes: int
    seconds: float
    break_even_tokens_per_s: float


def loading(layout: Layout, tokens: int, memory_bytes_per_s: float, nvme_bytes_per_s: float = math.inf) -> Loading:
    """The time to load so many tokens; what no whole block holds is computed either way.

    Args:
        layout: of the engine.
        tokens: of the context.
        memory_bytes_per_s: of the copies from CPU memory to all ranks together.
        nvme_bytes_per_s: of reads; left out for what is in CPU memory. Reads and copies go on at the same time.
    """
    size = layout.loaded_bytes(tokens)
    copied = size * layout.tp // layout.shards  # what is kept once goes to every rank
    seconds = max(copied / memory_bytes_per_s, size / nvme_bytes_per_s)
    hit = tokens // layout.chunk_tokens * layout.chunk_tokens
    return Loading(size, seconds, hit / seconds if size else 0.0)
