"""Copies KV cache blocks between the engine's memory and slots.

A *chunk* is a slot's view and the engine blocks whose bytes it holds: block ``j`` of the chunk at ``[j * block_bytes, (j + 1) *
block_bytes)``. A block id of -1 leaves that part of both sides alone. Copies run in background threads, one for each direction;
they return only when no byte is under way any more, so that the caller may give a slot or a block back at once.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from kvtierd.connectors.vllm.layout import Region, WorkerLayout
from kvtierd.connectors.vllm.layout_layer import ADVICE, UnsupportedLayoutError
from kvtierd.cuda import Device, DeviceView
from kvtierd.memory import SharedMapping

View = memoryview | DeviceView
"""A slot's bytes, in host memory or on the GPU."""
Chunk = tuple[View, Sequence[int]]

OnQueued = Callable[[object, int], None]
"""Takes a mark of what is queued on a device, and how many chunks are whole once that is done."""

SKIP: Final = -1
"""In place of a block id: that part of the slot is neither written nor read."""


@dataclass(frozen=True)
class Batch:
    """``count`` runs of equal length a constant step apart, which follow each other in a slot.

    Attributes:
        step_bytes: from one run to the next in the storage.
        slot_offset: of the first run in the block's part of a slot.
    """

    storage: torch.Tensor
    offset_bytes: int
    block_stride_bytes: int
    run_bytes: int
    count: int
    step_bytes: int
    slot_offset: int


def batches(regions: Sequence[Region]) -> list[Batch]:
    """Regions put together, so that a copy takes few operations however many runs a block has."""
    found: list[Batch] = []
    slot_offset = 0
    for region in regions:
        last = found[-1] if found else None
        if last is not None and last.storage is region.storage:
            step = region.offset_bytes - last.offset_bytes - (last.count - 1) * last.step_bytes
            same = (last.block_stride_bytes, last.run_bytes) == (region.block_stride_bytes, region.run_bytes)
            if same and (last.count == 1 or step == last.step_bytes):
                found[-1] = Batch(
                    last.storage, last.offset_bytes, last.block_stride_bytes, last.run_bytes, last.count + 1, step, last.slot_offset
                )
                slot_offset += region.run_bytes
                continue
        found.append(Batch(region.storage, region.offset_bytes, region.block_stride_bytes, region.run_bytes, 1, 0, slot_offset))
        slot_offset += region.run_bytes
    return found


def stretches(block_ids: Sequence[int], num_blocks: int) -> Iterator[tuple[int, int, int]]:
    """(place in the chunk, first block, count) of stretches of consecutive blocks, without those to skip.

    Raises:
        ValueError: an id is no block of the engine.
    """
    place = 0
    while place < len(block_ids):
        first = block_ids[place]
        if first == SKIP:
            place += 1
            continue
        count = 1
        while place + count < len(block_ids) and block_ids[place + count] == first + count:
            count += 1
        if first < 0 or first + count > num_blocks:
            raise ValueError(f"blocks {first} to {first + count - 1} are not all among the engine's {num_blocks} blocks")
        yield place, first, count
        place += count


def check_slot(view: View, block_ids: Sequence[int], block_bytes: int) -> None:
    """Raises ValueError when a slot's view is shorter than its blocks."""
    if view.nbytes < len(block_ids) * block_bytes:
        raise ValueError(f"a view of {view.nbytes} bytes does not hold {len(block_ids)} blocks of {block_bytes} bytes")


class BlockCopier(abc.ABC):
    """Copies between blocks and slots. At most one thread saves and one loads at a time; both may do so together.

    Attributes:
        device: the GPU whose memory slots may be in too; None for host memory alone.
    """

    device: Device | None = None

    @abc.abstractmethod
    def fence(self) -> object | None:
        """Mark all work that the engine has queued so far; called in the engine's thread. None where nothing is queued."""

    @abc.abstractmethod
    def save(self, group: int, chunks: Iterable[Chunk], fence: object | None) -> None:
        """Copy blocks into slots, after the work that ``fence`` marks. All bytes are in place when it returns.

        Raises:
            ValueError: a block id or a view does not fit; chunks before it may be in place.
        """

    @abc.abstractmethod
    def load(
        self,
        group: int,
        chunks: Iterable[Chunk],
        fence: object | None,
        cancelled: Callable[[], bool],
        on_queued: OnQueued | None = None,
    ) -> int:
        """Copy slots into blocks, after the work that ``fence`` marks; ``cancelled`` is asked before each chunk.

        Args:
            group: the KV cache group.
            chunks: what to copy.
            fence: from :meth:`fence`.
            cancelled: whether to copy no more.
            on_queued: told, in this thread, once only a device has something left to do: a mark of that for :meth:`follow`, and
                how many chunks are whole then. Never where nothing is queued on a device.

        Returns:
            how many chunks, from the first on, are whole in the engine's memory. No write is under way any more.

        Raises:
            ValueError: a block id or a view does not fit. No write is under way any more.
        """

    def follow(self, mark: object) -> None:
        """Let nothing that the engine queues from now on begin before what ``mark`` marks. Called in the engine's thread."""
        raise NotImplementedError

    @abc.abstractmethod
    def on_mapped(self, extent_id: int, mapping: SharedMapping) -> None:
        """Get an extent ready for copies: a device registers the memory. Never raises for want of resources."""

    @abc.abstractmethod
    def on_revoked(self, extent_id: int, mapping: SharedMapping) -> None:
        """Take back what :meth:`on_mapped` did, after the copies that use the extent."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give all resources back. No copy is going on and none follows."""


class CpuBlockCopier(BlockCopier):
    """Copies in host memory. numpy lets other threads run while it copies 500 bytes or more at once."""

    def __init__(self, layout: WorkerLayout) -> None:
        self._num_blocks = layout.num_blocks
        self._block_bytes = [group.block_bytes for group in layout.groups]
        self._batches = [[(batch, batch.storage.numpy()) for batch in batches(regions)] for regions in layout.regions]

    def fence(self) -> None:
        """Nothing is queued: the engine computes in its own thread, and calls the connector afterwards."""
        return

    def save(self, group: int, chunks: Iterable[Chunk], fence: object | None) -> None:
        """See :meth:`BlockCopier.save`."""
        del fence
        for view, block_ids in chunks:
            for slot, blocks in self._pairs(group, view, block_ids):
                np.copyto(slot, blocks)

    def load(
        self,
        group: int,
        chunks: Iterable[Chunk],
        fence: object | None,
        cancelled: Callable[[], bool],
        on_queued: OnQueued | None = None,
    ) -> int:
        """See :meth:`BlockCopier.load`."""
        del fence, on_queued
        done = 0
        for view, block_ids in chunks:
            if cancelled():
                break
            for slot, blocks in self._pairs(group, view, block_ids):
                np.copyto(blocks, slot)
            done += 1
        return done

    def on_mapped(self, extent_id: int, mapping: SharedMapping) -> None:
        """Host memory needs no registration."""

    def on_revoked(self, extent_id: int, mapping: SharedMapping) -> None:
        """Nothing was registered."""

    def close(self) -> None:
        """Let go of the engine's memory."""
        self._batches = [[] for _ in self._batches]

    def _pairs(self, group: int, view: View, block_ids: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """Equal-shaped arrays (block, run, byte) over the slot and over the engine's memory; numpy checks their bounds."""
        assert isinstance(view, memoryview), "without a GPU no slot is in the memory of one"
        block_bytes = self._block_bytes[group]
        check_slot(view, block_ids, block_bytes)
        for place, first, count in stretches(block_ids, self._num_blocks):
            for batch, storage in self._batches[group]:
                shape = (count, batch.count, batch.run_bytes)
                slot = np.ndarray(shape, np.uint8, view, place * block_bytes + batch.slot_offset, (block_bytes, batch.run_bytes, 1))
                start = batch.offset_bytes + first * batch.block_stride_bytes
                yield slot, np.ndarray(shape, np.uint8, storage, start, (batch.block_stride_bytes, batch.step_bytes, 1))


def make_copier(layout: WorkerLayout) -> BlockCopier:
    """The copier for the device on which the KV cache lies.

    Raises:
        UnsupportedLayoutError: there is none for it.
    """
    if layout.device.type == "cpu":
        return CpuBlockCopier(layout)
    if layout.device.type == "cuda":
        from kvtierd.connectors.vllm.gpu_copying import CudaBlockCopier

        return CudaBlockCopier(layout)
    raise UnsupportedLayoutError(f"kvtierd copies KV blocks of CPU and CUDA devices, not of {layout.device.type}; {ADVICE}")


def self_test(layout: WorkerLayout, copier: BlockCopier, kv_caches: Mapping[str, torch.Tensor]) -> None:
    """Take one block of each group out and back in, and compare every byte; content is as before afterwards.

    Blocks are written and read through the registered tensors, so a mistake in offsets or strides cannot cancel out. To be called
    before the engine computes anything.

    Raises:
        UnsupportedLayoutError: a byte differs.
    """
    block = layout.num_blocks - 1 if layout.num_blocks < 3 else layout.num_blocks - 2  # with a neighbour on both sides
    around = range(max(block - 1, 0), min(block + 2, layout.num_blocks))
    for group in range(len(layout.groups)):
        with torch.inference_mode():  # the engine's tensors may have been made in it, and could not be written outside
            views = {b: _block_views(layout, group, kv_caches, b) for b in around}
            before = {b: [view.clone() for view in views[b]] for b in around}
            try:
                _round_trip(layout, copier, group, block, views)
            finally:
                for b in around:
                    for view, content in zip(views[b], before[b], strict=True):
                        view.copy_(content)


def _block_views(layout: WorkerLayout, group: int, kv_caches: Mapping[str, torch.Tensor], block: int) -> list[torch.Tensor]:
    return [
        kv_caches[layer.name].narrow(layer.block_dim, block * layer.kernel_blocks, layer.kernel_blocks)
        for layer in layout.layers[group]
    ]


def _round_trip(
    layout: WorkerLayout, copier: BlockCopier, group: int, block: int, views: Mapping[int, Sequence[torch.Tensor]]
) -> None:
    generator = torch.Generator().manual_seed(group)
    written = {b: [_write_noise(view, generator) for view in views[b]] for b in views}
    block_bytes = layout.groups[group].block_bytes
    slot = bytearray(b"\xa5" * (block_bytes + GUARD_BYTES))
    copier.save(group, [(memoryview(slot), [block])], copier.fence())
    for view in views[block]:
        view.zero_()
    whole = copier.load(group, [(memoryview(slot), [block])], copier.fence(), lambda: False)
    names = [layer.name for layer in layout.layers[group]]
    for b, contents in written.items():
        for name, view, content in zip(names, views[b], contents, strict=True):
            if whole != 1 or not torch.equal(_raw(view), content):
                raise UnsupportedLayoutError(
                    f"a copy of block {block} of KV cache group {group} out and back in changed block {b} of layer {name}; "
                    f"{ADVICE}, and report the model, the attention backend and the engine's version"
                )
    if slot[block_bytes:] != b"\xa5" * GUARD_BYTES:
        raise UnsupportedLayoutError(f"blocks of KV cache group {group} take more than {block_bytes} bytes; {ADVICE}")


GUARD_BYTES: Final = 4096
"""Bytes behind a block in the test's slot that must stay as they are."""


def _write_noise(view: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fill a view with random bytes, and return them."""
    noise = torch.randint(0, 256, (view.numel() * view.element_size(),), dtype=torch.uint8, generator=generator).to(view.device)
    view.copy_(noise.view(view.dtype).view(view.shape))
    return noise


def _raw(view: torch.Tensor) -> torch.Tensor:
    """The bytes of a view in logical order; a comparison of numbers would take a NaN for a difference."""
    return view.contiguous().flatten().view(torch.uint8)
