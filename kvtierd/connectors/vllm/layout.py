"""Where the bytes of one KV cache block lie, worked out from the tensors that the engine registers, and nothing else.

The engine hands over one strided view per layer. From its shape, strides and place in its storage follow the *runs* of a block:
the longest stretches of contiguous bytes. A run of block ``b`` begins at ``offset_bytes + b * block_stride_bytes``. Runs of all
layers that belong to one group, in the order in which they lie in memory, make up a block in a slot. What cannot be shown to be
right is refused: a cache that is not there costs time, wrong bytes cost answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvtierd.connectors.vllm.layout_layer import (
    ADVICE,
    MAX_RUNS,
    Layer,
    LayerBlocks,
    UnsupportedLayoutError,
    runs_of,
    take_apart,
)
from kvtierd.connectors.vllm.layout_text import describe, dtype_name, quant_mode

__all__ = ["GroupLayout", "LayerBlocks", "Region", "UnsupportedLayoutError", "WorkerLayout", "is_selective", "worker_layout"]

KINDS: Final = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "mla",
    "SlidingWindowSpec": "swa",
    "SlidingWindowMLASpec": "swa_mla",
    "ChunkedLocalAttentionSpec": "chunked_local",
}
"""Spec classes whose blocks are known to depend on the tokens before their end only, by exact name."""
QUANT_MODES: Final = frozenset(["NONE", "FP8_PER_TENSOR", "NVFP4", "NVFP4_DS_MLA"])
"""Quantisation modes that keep all that changes with the tokens inside the page."""


@dataclass(frozen=True)
class GroupLayout:
    """The format of a block of one KV cache group on one rank.

    Attributes:
        index: id of the KV cache group.
        kind: one of the values of ``KINDS``.
        block_tokens: tokens of one engine block.
        window: sliding window or attention chunk in tokens; 0 for none.
        block_bytes: bytes of one engine block, all layers of this rank, without padding.
        num_layers: layers of this rank.
        kv_dtype: a name of ``kvtierd.model.DTYPE_BYTES``.
        replicated: every tensor-parallel rank holds the same bytes.
        description: canonical text of what a slot's bytes mean. Ranks of the same number whose texts are equal may exchange bytes;
            it does not depend on the number of blocks, nor on where in memory they are.
    """

    index: int
    kind: str
    block_tokens: int
    window: int
    block_bytes: int
    num_layers: int
    kv_dtype: str
    replicated: bool
    description: str


def is_selective(windows: Sequence[int]) -> bool:
    """Whether a hit needs not everything up to its end: there are several KV cache groups, or windows (one entry a group)."""
    return len(windows) > 1 or any(windows)


@dataclass(frozen=True)
class Region:
    """One run of every block: block ``b`` has ``run_bytes`` bytes at ``offset_bytes + b * block_stride_bytes``.

    Attributes:
        storage: the whole storage as flat uint8.
    """

    storage: torch.Tensor
    offset_bytes: int
    block_stride_bytes: int
    run_bytes: int


@dataclass(frozen=True)
class WorkerLayout:
    """Everything that copying blocks of this rank needs.

    Attributes:
        groups: formats, by KV cache group id.
        regions: runs of each group in the order of a slot.
        layers: distinct layers of each group.
        num_blocks: blocks of the engine; block ids are below it.
        device: where the KV cache lies.
    """

    groups: tuple[GroupLayout, ...]
    regions: tuple[tuple[Region, ...], ...]
    layers: tuple[tuple[LayerBlocks, ...], ...]
    num_blocks: int
    device: torch.device


@dataclass(frozen=True)
class Run:
    """One run of one layer; ``piece`` numbers the runs of the layer in memory order."""

    layer: int
    piece: int
    storage: int
    offset_bytes: int
    block_stride_bytes: int
    run_bytes: int


def worker_layout(kv_cache_config: Any, kv_caches: Mapping[str, Any], *, vllm_config: Any) -> WorkerLayout:
    """Work out the layout of this rank's KV cache.

    Args:
        kv_cache_config: vLLM's KVCacheConfig.
        kv_caches: what vLLM registers: the view of each layer by name.
        vllm_config: vLLM's VllmConfig; the parallel sizes, the quantisation and the layers' backends are taken from it.

    Raises:
        UnsupportedLayoutError: the layout is not one of those that are known for sure.
    """
    _check_engine(kv_cache_config, vllm_config)
    groups, regions, layers = [], [], []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        own = _group_layers(index, group, kv_caches, kv_cache_config.num_blocks)
        runs, storages = _ordered_runs(index, own)
        merged = _merge(runs)
        _check_disjoint(index, merged, kv_cache_config.num_blocks)
        views = [_flat_bytes(tensor) for tensor in storages]
        regions.append(tuple(Region(views[r.storage], r.offset_bytes, r.block_stride_bytes, r.run_bytes) for r in merged))
        groups.append(_group_layout(index, group, own, runs, kv_cache_config, vllm_config))
        layers.append(tuple(layer.blocks for layer in own if layer.same_as is None))
    _check_strangers(kv_cache_config, kv_caches)
    devices = {region.storage.device for group_regions in regions for region in group_regions}
    if len(devices) != 1:
        raise UnsupportedLayoutError(f"the KV cache lies on more than one device ({sorted(map(str, devices))}); {ADVICE}")
    return WorkerLayout(tuple(groups), tuple(regions), tuple(layers), kv_cache_config.num_blocks, devices.pop())


# ---- what the engine says


def _check_engine(kv_cache_config: Any, vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UnsupportedLayoutError(
                f"{name} is {size}, so a rank holds a part of a block's tokens, which kvtierd does not cache; set it to 1"
            )
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise UnsupportedLayoutError("HiSparse keeps KV blocks in host memory, which kvtierd does not cache; turn HiSparse off")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedLayoutError(
            "calculate_kv_scales takes the scales of the KV cache from an engine's first requests, so its bytes mean nothing to "
            "other engines; turn it off"
        )
    if kv_cache_config.num_blocks < 1 or not kv_cache_config.kv_cache_groups:
        raise UnsupportedLayoutError(f"the engine has no KV cache blocks, so there is nothing to cache; {ADVICE}")


def _kind(index: int, group: Any, specs: Sequence[Any]) -> str:
    names = {type(spec).__name__ for spec in specs}
    kinds = {KINDS.get(name, "") for name in names}
    if len(kinds) != 1 or "" in kinds:
        raise UnsupportedLayoutError(
            f"KV cache group {index} is of {', '.join(sorted(names))}; kvtierd caches groups of one of {', '.join(KINDS)}. {ADVICE}"
        )
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise UnsupportedLayoutError(f"KV cache group {index} is not meant to be transferred; {ADVICE}")
    for spec in specs:
        if not getattr(spec, "prefix_cacheable", True) or getattr(spec, "non_causal", False):
            raise UnsupportedLayoutError(
                f"blocks of KV cache group {index} depend on more than the tokens up to their end, so they cannot be reused; "
                f"{ADVICE}"
            )
        mode = quant_mode(spec)
        if mode not in QUANT_MODES:
            raise UnsupportedLayoutError(
                f"the KV cache quantisation {mode} keeps scales that kvtierd cannot follow; use --kv-cache-dtype auto or fp8"
            )
    return kinds.pop()


def _layer_specs(group: Any) -> dict[str, Any]:
    """The spec of each layer of a group: a group of several page formats has one each."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if per_layer is None:
        return dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return {name: per_layer[name] for name in group.layer_names}


def _group_layers(index: int, group: Any, kv_caches: Mapping[str, Any], num_blocks: int) -> list[Layer]:
    specs = _layer_specs(group)
    if not specs:
        raise UnsupportedLayoutError(f"KV cache group {index} has no layers; {ADVICE}")
    _kind(index, group, list(specs.values()))
    first: dict[tuple[object, ...], str] = {}
    layers = []
    for name, spec in specs.items():
        tensor = kv_caches.get(name)
        if not isinstance(tensor, torch.Tensor):
            what = "is missing" if tensor is None else f"is a {type(tensor).__name__}, not one tensor"
            raise UnsupportedLayoutError(f"the KV cache of layer {name} {what}; {ADVICE}")
        layers.append(take_apart(name, spec, tensor, num_blocks, first.setdefault(_identity(tensor), name)))
    return layers


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _check_strangers(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> None:
    """A registered layer outside all groups must share the bytes of one inside: else a part of the KV cache would be missed."""
    inside = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    known = {_identity(kv_caches[name]) for name in inside}
    for name, tensor in kv_caches.items():
        if name not in inside and not (isinstance(tensor, torch.Tensor) and _identity(tensor) in known):
            raise UnsupportedLayoutError(f"layer {name} has a KV cache but is in no KV cache group; {ADVICE}")


# ---- one group


def _ordered_runs(index: int, layers: Sequence[Layer]) -> tuple[list[Run], list[torch.Tensor]]:
    """Runs of a group in the order of a slot: storages as layers name them first, then as they lie in memory."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    runs: list[Run] = []
    for number, layer in enumerate(layers):
        if layer.same_as is not None:
            continue
        storage, _ = storages.setdefault(layer.tensor.untyped_storage().data_ptr(), (len(storages), layer.tensor))
        runs.extend(
            Run(number, piece, storage, offset, layer.block_stride_bytes, length)
            for piece, (offset, length) in enumerate(runs_of(layer))
        )
        if len(runs) > MAX_RUNS:
            raise UnsupportedLayoutError(f"a block of KV cache group {index} is scattered over more than {MAX_RUNS} pieces")
    runs.sort(key=lambda run: (run.storage, run.offset_bytes))
    return runs, [tensor for _, tensor in storages.values()]


def _merge(runs: Sequence[Run]) -> list[Run]:
    """Join runs that follow each other in every block. That never changes what a slot contains."""
    merged: list[Run] = []
    for run in runs:
        if merged:
            last = merged[-1]
            follows = (last.storage, last.block_stride_bytes) == (run.storage, run.block_stride_bytes)
            if follows and last.offset_bytes + last.run_bytes == run.offset_bytes:
                merged[-1] = Run(
                    last.layer, last.piece, last.storage, last.offset_bytes, last.block_stride_bytes, last.run_bytes + run.run_bytes
                )
                continue
        merged.append(run)
    return merged


def _check_disjoint(index: int, runs: Sequence[Run], num_blocks: int) -> None:
    """No byte belongs to two blocks or layers of a group. Runs are sorted by storage and offset."""
    shared = f"layers of KV cache group {index} share bytes, so a block cannot be copied alone; {ADVICE}"
    for number, run in enumerate(runs):
        if run.run_bytes > run.block_stride_bytes and num_blocks > 1:
            raise UnsupportedLayoutError(shared)
        end = run.offset_bytes + (num_blocks - 1) * run.block_stride_bytes + run.run_bytes
        for other in itertools.islice(runs, number + 1, None):
            if other.storage != run.storage or other.offset_bytes >= end:
                break
            if other.block_stride_bytes != run.block_stride_bytes or _meet(run, other, num_blocks):
                raise UnsupportedLayoutError(shared)


def _meet(run: Run, other: Run, num_blocks: int) -> bool:
    """Whether two runs of the same block stride share a byte in any two blocks; ``other`` does not begin before ``run``."""
    stride = run.block_stride_bytes
    blocks, rest = divmod(other.offset_bytes - run.offset_bytes, stride)
    # The blocks of ``run`` that begin right before and right after the first block of ``other``.
    return (blocks < num_blocks and rest < run.run_bytes) or (blocks + 1 < num_blocks and rest + other.run_bytes > stride)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _group_layout(
    index: int, group: Any, layers: Sequence[Layer], runs: Sequence[Run], config: Any, vllm_config: Any
) -> GroupLayout:
    specs = [layer.spec for layer in layers]
    kind = _kind(index, group, specs)
    windows = {getattr(s, "sliding_window" if kind in ("swa", "swa_mla") else "attention_chunk_size", None) or 0 for s in specs}
    window = 0 if kind in ("full", "mla") else windows.pop() if len(windows) == 1 else -1
    sizes = {spec.block_size for spec in specs}
    if window < 0 or (window == 0 and kind not in ("full", "mla")) or len(sizes) != 1:
        raise UnsupportedLayoutError(f"layers of KV cache group {index} differ in window or block size; {ADVICE}")
    names = {dtype_name(layer, vllm_config) for layer in layers}
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    whole = tp_size > 1 and getattr(config, "kv_tp_replicas", 1) == tp_size
    return GroupLayout(
        index=index,
        kind=kind,
        block_tokens=sizes.pop(),
        window=window,
        block_bytes=sum(run.run_bytes for run in runs),
        num_layers=len(layers),
        kv_dtype=names.pop() if len(names) == 1 else "uint8",
        replicated=whole or all(_one_shard(spec, kind) for spec in specs),
        description=describe(kind, window, layers, runs, vllm_config),
    )


def _one_shard(spec: Any, kind: str) -> bool:
    """Whether all tensor-parallel ranks hold this layer whole."""
    if hasattr(spec, "max_tp_shards"):
        return bool(spec.max_tp_shards == 1)
    return kind in ("mla", "swa_mla")
