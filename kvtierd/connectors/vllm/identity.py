"""Who the blocks are: from vLLM's configuration and the ranks' layouts to namespaces of kvtierd.

Everything that changes the bytes of a block or their meaning is in the namespace; two engines that differ in any of it never
share. What makes one request's block differ from another's (tokens, salt, LoRA, images) is in the keys instead.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtierd.connectors.vllm.chunks import GroupSize, choose_chunk
from kvtierd.connectors.vllm.layout import GroupLayout, UnsupportedLayoutError, is_selective
from kvtierd.connectors.vllm.metadata import Rank, RankLayout
from kvtierd.connectors.vllm.settings import Settings
from kvtierd.connectors.weights import name_weights
from kvtierd.model import MAX_SHARD_BYTES, Namespace

log = logging.getLogger("vllm.kvtierd")


@dataclass(frozen=True)
class GroupPlan:
    """How one KV cache group is cut into blocks of kvtierd.

    Attributes:
        index: the KV cache group.
        kind: as in ``GroupLayout``.
        block_tokens: tokens in one of the engine's blocks.
        window: tokens that attention looks back, itself included (sliding window), or the size of an attention chunk; 0 for all.
        blocks_per_chunk: the engine's blocks in one of kvtierd's.
        pool: which namespace the group's chunks belong to.
    """

    index: int
    kind: str
    block_tokens: int
    window: int
    blocks_per_chunk: int
    pool: int

    def first_needed(self, hit_tokens: int) -> int:
        """First token whose KV a request needs that continues after ``hit_tokens``."""
        if not self.window:
            return 0
        if self.kind == "chunked_local":
            return hit_tokens // self.window * self.window
        return max(0, hit_tokens - self.window + 1)


@dataclass(frozen=True)
class EnginePlan:
    """All of an engine's groups.

    Attributes:
        groups: one plan a group.
        chunk_tokens: tokens in one block of kvtierd, for every group.
        namespaces: one for each pool, that is for each distinct size of a block.
        replicated: for each pool, whether one shard stands for all tensor parallel ranks.
        ranks: workers that report each job.
    """

    groups: tuple[GroupPlan, ...]
    chunk_tokens: int
    namespaces: tuple[Namespace, ...]
    replicated: tuple[bool, ...]
    ranks: int

    @property
    def selective(self) -> bool:
        """See ``is_selective``."""
        return is_selective([g.window for g in self.groups])

    def shards(self, group: GroupPlan) -> int:
        """Slots of one chunk of a group."""
        return len(self.namespaces[group.pool].shard_bytes)

    def block_bytes(self, pool: int) -> int:
        """Bytes of one block over all shards."""
        return self.namespaces[pool].block_bytes


def engine_plan(vllm_config: Any, layouts: Mapping[Rank, RankLayout], settings: Settings, hash_algorithm: str) -> EnginePlan:
    """The plan of an engine whose ranks have all told their layout.

    Raises:
        UnsupportedLayoutError: the engine cannot be served; the text says why and what to do.
    """
    tp, pp = _sizes(vllm_config)
    expected = {(p, t) for p in range(pp) for t in range(tp)}
    if set(layouts) != expected:
        raise UnsupportedLayoutError(f"layouts of ranks {sorted(layouts)} arrived, of {sorted(expected)} expected")
    for rank, layout in sorted(layouts.items()):
        if layout.error:
            raise UnsupportedLayoutError(f"rank {rank}: {layout.error}")
    by_group = list(zip(*(layouts[rank].groups for rank in sorted(layouts)), strict=True))
    chunk_tokens = _chunk_tokens(by_group, settings)
    sizes: dict[tuple[tuple[int, ...], bool], int] = {}
    plans = []
    for ranks in by_group:
        group = ranks[0]
        per_chunk = chunk_tokens // group.block_tokens
        replicated = all(g.replicated for g in ranks) and tp > 1
        shard_bytes = tuple(g.block_bytes * per_chunk for g in (ranks[::tp] if replicated else ranks))
        if max(shard_bytes) > MAX_SHARD_BYTES:
            raise UnsupportedLayoutError(
                f"{chunk_tokens} tokens take {max(shard_bytes)} bytes a rank, more than one block may: lower kvtierd.chunk_tokens"
            )
        pool = sizes.setdefault((shard_bytes, replicated), len(sizes))
        plans.append(GroupPlan(group.index, group.kind, group.block_tokens, group.window, per_chunk, pool))
    base = _namespace(vllm_config, settings, by_group, chunk_tokens, hash_algorithm)
    return EnginePlan(
        tuple(plans),
        chunk_tokens,
        tuple(replace(base, shard_bytes=shard_bytes) for shard_bytes, _ in sizes),
        tuple(replicated for _, replicated in sizes),
        tp * pp,
    )


def _sizes(vllm_config: Any) -> tuple[int, int]:
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size), int(parallel.pipeline_parallel_size)


def _chunk_tokens(by_group: Sequence[tuple[GroupLayout, ...]], settings: Settings) -> int:
    choice = choose_chunk([GroupSize(g.block_tokens, g.block_bytes, ranks[0].window) for ranks in by_group for g in ranks])
    if not settings.chunk_tokens:
        return choice.tokens
    if settings.chunk_tokens % choice.unit:
        raise UnsupportedLayoutError(
            f"kvtierd.chunk_tokens is {settings.chunk_tokens}, but has to be a multiple of {choice.unit} (this engine's block size)"
        )
    if choice.narrowest and settings.chunk_tokens > choice.widest:
        log.warning(
            "kvtierd: kvtierd.chunk_tokens is %d, more than this model's smallest attention window of %d tokens: chunks that "
            "are computed in several steps cannot be saved. Leave it out, or make it %d.",
            settings.chunk_tokens,
            choice.narrowest,
            choice.widest,
        )
    return settings.chunk_tokens


def _namespace(
    vllm_config: Any,
    settings: Settings,
    by_group: Sequence[tuple[GroupLayout, ...]],
    chunk_tokens: int,
    hash_algorithm: str,
) -> Namespace:
    model = vllm_config.model_config
    tp, pp = _sizes(vllm_config)
    dtypes = {g.kv_dtype for ranks in by_group for g in ranks}
    descriptions = [g.description for ranks in by_group for g in ranks]
    return Namespace(
        shard_bytes=(1,),
        model=str(model.model)[-512:],
        revision=_revision(vllm_config, settings)[:512],
        kv_dtype=dtypes.pop() if len(dtypes) == 1 else "opaque",
        block_tokens=chunk_tokens,
        tp_size=tp,
        pp_size=pp,
        dcp_size=int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) or 1),
        hash_algorithm=hash_algorithm,
        extra={
            "engine": f"vllm {_release()}",  # releases have changed what lies where inside a page without changing its shape
            "layout": _digest("\n".join(descriptions)),
            "model": _digest(_model_identity(vllm_config)),
        },
    )


def _revision(vllm_config: Any, settings: Settings) -> str:
    if settings.revision:
        return settings.revision
    model = vllm_config.model_config
    revision = str(getattr(model, "revision", None) or "")
    found = _weights(vllm_config, model)
    if not found and not _dummy_weights(vllm_config):
        log.warning(
            "kvtierd: nothing names the weights of %s: once they have changed, KV of the old ones would still be found. "
            "Set kvtierd.revision to a text that changes with them.",
            model.model,
        )
    return found if found.startswith("commit:") else revision + found


def _weights(vllm_config: Any, model: Any) -> str:
    """Name of a model's weights; see ``name_weights``."""
    place = str(getattr(model, "model_weights", None) or model.model)  # those in object storage are not where the configuration is
    cache = str(getattr(getattr(vllm_config, "load_config", None), "download_dir", None) or "")
    commit = str(getattr(getattr(model, "hf_config", None), "_commit_hash", None) or "")
    try:
        return name_weights(place, str(getattr(model, "revision", None) or ""), cache, commit)
    except OSError as e:
        log.warning("kvtierd: the weights of %s cannot be read: %s", place, e)
        return ""


def _model_identity(vllm_config: Any) -> str:
    """What decides on KV values besides the weights: types, scales, quantisation, positions, attention."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    hf = getattr(model, "hf_text_config", None)
    overrides = getattr(model, "hf_overrides", None)
    described = {
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "cache_dtype": str(cache.cache_dtype),
        "calculate_kv_scales": str(getattr(cache, "calculate_kv_scales", None)),
        "sliding_window": str(getattr(cache, "sliding_window", None)),
        "config": "" if hf is None else repr(sorted((k, repr(v)) for k, v in hf.to_dict().items() if k != "transformers_version")),
        "overrides": "a function" if callable(overrides) else repr(overrides),
        "speculative": _speculative(vllm_config),
        "lora": str(getattr(vllm_config, "lora_config", None) is not None),
        "long": _long_positions(model, hf),
        "dummy": _dummy_weights(vllm_config),
        "code": str(getattr(model, "code_revision", None)),
    }
    return repr(sorted(described.items()))


def _long_positions(model: Any, hf: Any) -> str:
    """Some models turn positions in one way or another, by the longest request that the engine takes."""
    original = getattr(hf, "original_max_position_embeddings", None)
    for rope in (getattr(hf, "rope_scaling", None), getattr(hf, "rope_parameters", None)):
        if isinstance(rope, Mapping):
            original = original or rope.get("original_max_position_embeddings")
    longest = getattr(model, "max_model_len", None)
    return "" if not original or not longest else str(int(longest) > int(original))


def _dummy_weights(vllm_config: Any) -> str:
    """Random weights under a model's name must not be taken for the model's."""
    load_format = str(getattr(getattr(vllm_config, "load_config", None), "load_format", ""))
    return f"{load_format}:{vllm_config.model_config.seed}" if load_format == "dummy" else ""


def _speculative(vllm_config: Any) -> str:
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return ""
    draft = getattr(speculative, "draft_model_config", None)
    named = f"{getattr(speculative, 'method', '')}:{getattr(draft, 'model', '')}:{getattr(draft, 'revision', '')}"
    own = draft is not None and draft.model != vllm_config.model_config.model  # else its weights are the model's
    return f"{named}:{_weights(vllm_config, draft)}" if own else named


def _release() -> str:
    import vllm

    return ".".join(str(vllm.__version__).split(".")[:2])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
