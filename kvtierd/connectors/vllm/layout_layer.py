"""One layer's part of a block, worked out from the view that the engine registers for the layer.

Two forms of views are known. Newer engines publish the page format in the layer's spec and give every layer the logical shape
[block, head, token, content]. Older ones leave the shape to the attention backend: the block comes first, or second behind a
dimension of size 2 for K and V. In both the engine may cut a block into several kernel blocks that follow each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

MAX_RUNS: Final = 65_536
"""Runs of one block and group, before they are merged; more would make a copy a walk of single cache lines."""
ADVICE: Final = "run this model without the connector"


class UnsupportedLayoutError(ValueError):
    """The KV cache has a form that this module does not know for sure. The message says what was found and what to do."""


@dataclass(frozen=True)
class LayerBlocks:
    """How a layer's tensor is indexed: block ``b`` is ``kernel_blocks`` entries of ``block_dim`` from ``b * kernel_blocks`` on."""

    name: str
    block_dim: int
    kernel_blocks: int


@dataclass(frozen=True)
class Layer:
    """One layer's view, taken apart.

    Attributes:
        spec: the engine's spec of this layer.
        dims: (size, stride in bytes) of the dimensions of one block, in logical order.
        offset_bytes: of block 0 in the storage.
        same_as: name of the layer whose bytes these are as well; then it has no runs of its own.
    """

    name: str
    spec: Any
    tensor: torch.Tensor
    blocks: LayerBlocks
    dims: tuple[tuple[int, int], ...]
    offset_bytes: int
    block_stride_bytes: int
    same_as: str | None = None


def take_apart(name: str, spec: Any, tensor: torch.Tensor, num_blocks: int, same_as: str) -> Layer:
    """Work out a layer's part of a block. Raises UnsupportedLayoutError unless there is exactly one way to read the view.

    Args:
        spec: the engine's spec of this layer.
        tensor: the view that the engine registered.
        num_blocks: blocks of the engine.
        same_as: the first layer of the group with the very same view; ``name`` itself when it is the first.
    """
    itemsize = tensor.element_size()
    block_dim, kernel_blocks = _find_blocks(name, spec, tensor, num_blocks)
    strides = [stride * itemsize for stride in tensor.stride()]
    dims = [(size, strides[d]) for d, size in enumerate(tensor.shape) if d != block_dim]
    if kernel_blocks > 1:
        dims.insert(0, (kernel_blocks, strides[block_dim]))
    layer = Layer(
        name=name,
        spec=spec,
        tensor=tensor,
        blocks=LayerBlocks(name, block_dim, kernel_blocks),
        dims=tuple(dims),
        offset_bytes=tensor.storage_offset() * itemsize,
        block_stride_bytes=strides[block_dim] * kernel_blocks,
        same_as=None if same_as == name else same_as,
    )
    _check_bounds(layer, num_blocks)
    return layer


def _find_blocks(name: str, spec: Any, tensor: torch.Tensor, num_blocks: int) -> tuple[int, int]:
    """The dimension that counts blocks, and kernel blocks per block. Raises UnsupportedLayoutError unless there is exactly one."""
    shape = tuple(tensor.shape)
    seen = f"the KV cache of layer {name} has shape {shape}, strides {tuple(tensor.stride())} and dtype {tensor.dtype}"
    page = page_bytes(spec)
    if tensor.numel() * tensor.element_size() != page * num_blocks:
        raise UnsupportedLayoutError(
            f"{seen}: not {num_blocks} blocks of {page} bytes; choose another attention backend, or {ADVICE}"
        )
    choices = _published_form(spec, shape, tensor.element_size(), num_blocks)
    if choices is None:
        places = [0, 1] if len(shape) > 2 and shape[0] == 2 else [0] if len(shape) > 1 else []
        choices = [(place, ratio) for place in places if (ratio := _kernel_blocks(spec, shape[place], num_blocks))]
    if len(choices) != 1:
        found = "no dimension counts" if not choices else "more than one dimension may count"
        raise UnsupportedLayoutError(
            f"{seen}: {found} its {num_blocks} blocks; choose another number of blocks (--num-gpu-blocks-override) or attention "
            f"backend, or {ADVICE}"
        )
    return choices[0]


def _published_form(spec: Any, shape: tuple[int, ...], itemsize: int, num_blocks: int) -> list[tuple[int, int]] | None:
    """What a spec that publishes its page format says: [block, head, state, content]; None from one that does not."""
    content = getattr(spec, "state_content_size_bytes", None)
    if content is None or not hasattr(spec, "get_num_kernel_states"):
        return None
    if len(shape) == 3:  # the same without a dimension for the one head of MLA
        shape = (shape[0], 1, *shape[1:])
    ratio = _kernel_blocks(spec, shape[0], num_blocks) if len(shape) == 4 else 0
    if not ratio:
        return []
    expected = (spec.num_heads, spec.get_num_kernel_states(spec.block_size // ratio), content)
    return [(0, ratio)] if (shape[1], shape[2], shape[3] * itemsize) == expected else []


def _kernel_blocks(spec: Any, size: int, num_blocks: int) -> int:
    """Kernel blocks of one block when a dimension of ``size`` counts kernel blocks; 0 when it cannot."""
    ratio, rest = divmod(size, num_blocks)
    return ratio if ratio and not rest and spec.block_size % ratio == 0 else 0


def page_bytes(spec: Any) -> int:
    """Bytes of one block of one layer without padding."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        size = getattr(spec, name, None)
        if size is not None:
            return int(size)
    raise UnsupportedLayoutError(f"{type(spec).__name__} does not say how many bytes a block has; {ADVICE}")


def _check_bounds(layer: Layer, num_blocks: int) -> None:
    """Every byte of every block lies inside the storage, and no two elements share one."""
    extent = layer.tensor.element_size()
    last = layer.offset_bytes + extent
    for size, stride in sorted([*layer.dims, (num_blocks, layer.block_stride_bytes)], key=lambda dim: (dim[1], dim[0])):
        if size == 1:
            continue
        if stride < extent:
            raise UnsupportedLayoutError(
                f"elements of the KV cache of layer {layer.name} overlap (strides {tuple(layer.tensor.stride())}, shape "
                f"{tuple(layer.tensor.shape)}); choose another attention backend, or {ADVICE}"
            )
        extent = stride * (size - 1) + extent
        last += stride * (size - 1)
    if last > layer.tensor.untyped_storage().nbytes():
        raise UnsupportedLayoutError(f"the KV cache of layer {layer.name} ends beyond its storage; {ADVICE}")


def runs_of(layer: Layer) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the runs of block 0, in memory order."""
    run = layer.tensor.element_size()
    outer: list[tuple[int, int]] = []
    for size, stride in sorted((dim for dim in layer.dims if dim[0] > 1), key=lambda dim: dim[1]):
        if stride == run and not outer:
            run *= size
        else:
            outer.append((size, stride))
    if math.prod(size for size, _ in outer) > MAX_RUNS:
        raise UnsupportedLayoutError(
            f"a block of layer {layer.name} is scattered over more than {MAX_RUNS} pieces; choose another attention backend"
        )
    for places in itertools.product(*(range(0, size * stride, stride) for size, stride in reversed(outer))):
        yield layer.offset_bytes + sum(places), run
