"""KV caches of all forms that engines register, made with torch alone, and a second way to find the bytes of a block.

The stand-ins for specs have the names and fields that matter here of the older engines' classes; tests that have vLLM use its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from kvtierd.connectors.vllm.layout import WorkerLayout


@dataclass(frozen=True)
class FullAttentionSpec:
    """Stand-in: K and V of every token."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    page_size_padded: int | None = None
    kv_quant_mode: Any = None

    @property
    def real_page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Stand-in: K and V of the last tokens."""

    sliding_window: int = 64


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """Stand-in: K and V of a chunk of tokens."""

    attention_chunk_size: int = 128


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    """Stand-in: one latent vector of every token."""

    @property
    def real_page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


@dataclass
class Cache:
    """One rank's KV cache as it is registered."""

    config: Any
    tensors: dict[str, torch.Tensor]
    spaces: list[torch.Tensor] = field(default_factory=list)
    """Storages as flat uint8."""


def vllm_config(*, tp_size: int = 1, cache_dtype: str = "auto", layers: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """What the layout reads of a VllmConfig."""
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "tensor_parallel_size": tp_size}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel | {k: v for k, v in changes.items() if k in parallel})),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, calculate_kv_scales=changes.get("calculate_kv_scales", False)),
        compilation_config=SimpleNamespace(static_forward_context=dict(layers or {})),
    )


def config(num_blocks: int, *groups: tuple[Sequence[str], Any], **changes: Any) -> Any:
    """What the layout reads of a KVCacheConfig."""
    made = [SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for names, spec in groups]
    return SimpleNamespace(num_blocks=num_blocks, kv_cache_groups=made, **changes)


def space(size_bytes: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """A storage full of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator).to(device)


def permuted(flat: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """A dense view of logical ``shape`` whose dimensions lie in memory in ``order``."""
    inverse = [order.index(d) for d in range(len(order))]
    return flat.view(dtype).view([shape[d] for d in order]).permute(inverse)


BLOCKS, TOKENS, HEADS, SIZE, LAYERS = 7, 16, 2, 8, 3
NAMES = [f"model.layers.{n}.attn" for n in range(LAYERS)]
BF16 = torch.bfloat16


def _per_layer(spec: Any, shape: Sequence[int], order: Sequence[int], device: str) -> Cache:
    page = spec.real_page_size_bytes
    spaces = [space(BLOCKS * page, seed, device) for seed in range(LAYERS)]
    tensors = {name: permuted(flat, spec.dtype, shape, order) for name, flat in zip(NAMES, spaces, strict=True)}
    return Cache(config(BLOCKS, (NAMES, spec)), tensors, spaces)


def _full(block_size: int = TOKENS, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, HEADS, SIZE, changes.pop("dtype", BF16), **changes)


def kv_first(device: str = "cpu") -> Cache:
    """(2, block, token, head, size), dense: K of all blocks, then V."""
    return _per_layer(_full(), (2, BLOCKS, TOKENS, HEADS, SIZE), (0, 1, 2, 3, 4), device)


def kv_first_flat(device: str = "cpu") -> Cache:
    """(2, block, token * head * size)."""
    return _per_layer(_full(), (2, BLOCKS, TOKENS * HEADS * SIZE), (0, 1, 2), device)


def block_first(device: str = "cpu") -> Cache:
    """(block, 2, token, head, size), dense."""
    return _per_layer(_full(), (BLOCKS, 2, TOKENS, HEADS, SIZE), (0, 1, 2, 3, 4), device)


def heads_first_in_block(device: str = "cpu") -> Cache:
    """(block, 2, token, head, size) whose heads lie outside of tokens in memory."""
    return _per_layer(_full(), (BLOCKS, 2, TOKENS, HEADS, SIZE), (0, 1, 3, 2, 4), device)


def packed(device: str = "cpu") -> Cache:
    """(block, head, token, K and V), as on CPUs."""
    return _per_layer(_full(), (BLOCKS, HEADS, TOKENS, 2 * SIZE), (0, 1, 2, 3), device)


def heads_outermost(device: str = "cpu") -> Cache:
    """(block, head, token, K and V) with all blocks of a head together."""
    return _per_layer(_full(), (BLOCKS, HEADS, TOKENS, 2 * SIZE), (1, 0, 2, 3), device)


def mla(device: str = "cpu") -> Cache:
    """(block, token, latent)."""
    return _per_layer(MLAAttentionSpec(TOKENS, 1, SIZE, BF16), (BLOCKS, TOKENS, SIZE), (0, 1, 2), device)


def mla_one_head(device: str = "cpu") -> Cache:
    """(block, 1, token, latent)."""
    return _per_layer(MLAAttentionSpec(TOKENS, 1, SIZE, BF16), (BLOCKS, 1, TOKENS, SIZE), (0, 1, 2, 3), device)


def fp8(device: str = "cpu") -> Cache:
    """8-bit floats kept in a tensor of uint8."""
    return _per_layer(_full(dtype=torch.uint8), (BLOCKS, 2, TOKENS, HEADS, SIZE), (0, 1, 2, 3, 4), device)


def kernel_blocks(device: str = "cpu") -> Cache:
    """A block is four kernel blocks of four tokens, K of all before V of all."""
    return _per_layer(_full(), (2, BLOCKS * 4, TOKENS // 4, HEADS, SIZE), (0, 1, 2, 3, 4), device)


def padded(device: str = "cpu") -> Cache:
    """(block, token, latent) with 48 bytes nobody uses behind each block."""
    page = MLAAttentionSpec(TOKENS, 1, SIZE, BF16).real_page_size_bytes + 48
    spec = MLAAttentionSpec(TOKENS, 1, SIZE, BF16, page_size_padded=page)
    spaces = [space(BLOCKS * page, seed, device) for seed in range(LAYERS)]
    tensors = {
        name: flat.view(BF16).as_strided((BLOCKS, TOKENS, SIZE), (page // 2, SIZE, 1))
        for name, flat in zip(NAMES, spaces, strict=True)
    }
    return Cache(config(BLOCKS, (NAMES, spec)), tensors, spaces)


def kv_first_by_block(device: str = "cpu") -> Cache:
    """(2, block, ...) laid out anew so that K and V of a block lie together, as next to Mamba layers."""
    made = kv_first(device)
    half = TOKENS * HEADS * SIZE
    for name, tensor in made.tensors.items():
        made.tensors[name] = tensor.as_strided(tensor.shape, (half, 2 * half, *tensor.stride()[2:]))
    return made


def _one_space(order: Sequence[int], device: str, lead_bytes: int = 0) -> Cache:
    """All layers in one storage; ``order`` of (layer, block, head, token, content) in memory."""
    spec = _full()
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * SIZE)
    flat = space(lead_bytes + LAYERS * BLOCKS * spec.real_page_size_bytes, 5, device)
    whole = permuted(flat[lead_bytes:], BF16, shape, order)
    return Cache(config(BLOCKS, (NAMES, spec)), {name: whole[n] for n, name in enumerate(NAMES)}, [flat])


def layers_in_block(device: str = "cpu") -> Cache:
    """[block, layer, head, token, content]: a block of all layers is one piece."""
    return _one_space((1, 0, 2, 3, 4), device)


def layers_in_head(device: str = "cpu") -> Cache:
    """[block, head, layer, token, content]: one piece as well, but layers are interleaved."""
    return _one_space((1, 2, 0, 3, 4), device)


def layers_outermost(device: str = "cpu") -> Cache:
    """[layer, head, block, token, content] behind 64 bytes of something else."""
    return _one_space((0, 2, 1, 3, 4), device, lead_bytes=64)


def overlaid_groups(device: str = "cpu") -> Cache:
    """Two groups, full and sliding window, whose layers lie over each other in the same storages."""
    made = packed(device)
    window = SlidingWindowSpec(TOKENS, HEADS, SIZE, BF16)
    local = [f"model.layers.{LAYERS + n}.attn" for n in range(LAYERS - 1)]
    for name, below in zip(local, NAMES[: LAYERS - 1], strict=True):
        made.tensors[name] = made.tensors[below].view(made.tensors[below].shape)
    made.config = config(BLOCKS, (NAMES, made.config.kv_cache_groups[0].kv_cache_spec), (local, window))
    return made


FORMS: dict[str, Callable[[str], Cache]] = {
    made.__name__: made
    for made in (
        kv_first,
        kv_first_flat,
        block_first,
        heads_first_in_block,
        packed,
        heads_outermost,
        mla,
        mla_one_head,
        fp8,
        kernel_blocks,
        padded,
        kv_first_by_block,
        layers_in_block,
        layers_in_head,
        layers_outermost,
        overlaid_groups,
    )
}
BLOCK_DIMS = {"kv_first": 1, "kv_first_flat": 1, "kernel_blocks": 1, "kv_first_by_block": 1}
"""The dimension that counts blocks where it is not the first."""
KERNEL_BLOCKS = {"kernel_blocks": 4}


def byte_places(tensor: torch.Tensor, block: int, block_dim: int = 0, ratio: int = 1) -> list[int]:
    """Where in the storage the bytes of one block lie, in rising order: every element is looked up by torch's own indexing."""
    itemsize = tensor.element_size()
    elements = tensor.untyped_storage().nbytes() // itemsize
    numbers = torch.arange(elements).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    own = numbers.narrow(block_dim, block * ratio, ratio).flatten().sort().values
    return [int(e) * itemsize + i for e in own for i in range(itemsize)]


def all_places(form: str, cache: Cache, group: int) -> dict[int, list[tuple[int, int]]]:
    """``slot_places`` of every block."""
    dim, ratio = BLOCK_DIMS.get(form, 0), KERNEL_BLOCKS.get(form, 1)
    return {block: slot_places(cache, group, block, dim, ratio) for block in range(BLOCKS)}


def slot_places(cache: Cache, group: int, block: int, block_dim: int = 0, ratio: int = 1) -> list[tuple[int, int]]:
    """(storage's address, byte) of each byte of a block in the order of a slot."""
    by_storage: dict[int, set[int]] = {}
    for name in cache.config.kv_cache_groups[group].layer_names:
        tensor = cache.tensors[name]
        by_storage.setdefault(tensor.untyped_storage().data_ptr(), set()).update(byte_places(tensor, block, block_dim, ratio))
    return [(storage, place) for storage, places in by_storage.items() for place in sorted(places)]


def read_places(cache: Cache, places: Sequence[tuple[int, int]]) -> bytes:
    """Bytes at those places."""
    spaces = {flat.untyped_storage().data_ptr(): flat.cpu().numpy() for flat in cache.spaces}
    return bytes(int(spaces[storage][place]) for storage, place in places)


def run_bytes(layout: WorkerLayout, group: int) -> list[int]:
    """Lengths of the runs of a group."""
    return [region.run_bytes for region in layout.regions[group]]
