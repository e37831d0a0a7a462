"""Copies between a CUDA device's KV cache and slots, in host memory or in the device's own.

The runs of a block are scattered over device memory, and one DMA for each of them would be slow. So the device gathers the runs
of many blocks into a slab of its own memory, in the order of a slot, and DMA takes them from there to their slots; loads go the
other way. Slots on the device need no slab: blocks are gathered into them. Several portions are queued ahead, for the thread that
queues them shares the interpreter with a busy engine.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kvtierd.connectors.vllm.copying import SKIP, BlockCopier, Chunk, OnQueued, View, check_slot
from kvtierd.connectors.vllm.gpu_memory import HostMemory, border
from kvtierd.connectors.vllm.gpu_staging import DeviceBlocks, Lane, Transfer, can_move_rows
from kvtierd.connectors.vllm.layout import WorkerLayout
from kvtierd.cuda import CudaError, Device, DeviceView
from kvtierd.memory import SharedMapping

SLAB_BYTES: Final = 32 << 20
"""Device memory of one slab; as much as a block where that is larger."""
DIRECT_SAVE_BYTES: Final = 256 << 20
DIRECT_LOAD_BYTES: Final = 1 << 30
"""What one kernel moves between blocks and slots on the device: as long as it runs, it shares the device with the engine's. A load
is waited for, and launching a kernel takes about as long as moving 256 MiB."""
MAX_QUEUED_SAVES: Final = 8
MAX_QUEUED_LOADS: Final = 64
"""Portions that are queued on the device: some milliseconds of work, and of loads as much as a step may be begun early by. One that
is launched kernel by kernel takes 30 to 40 ms, in which 2 GB are loaded from host memory."""
SAVE_PRIORITY: Final = 0
LOAD_PRIORITY: Final = -1
"""Requests wait for loads, nobody waits for saves."""

log = logging.getLogger("vllm.kvtierd")


class CudaBlockCopier(BlockCopier):
    """Copies on streams of its own, beside the engine's work.

    Raises:
        UnsupportedLayoutError: the device has no memory left for staging.
    """

    def __init__(self, layout: WorkerLayout) -> None:
        self._device = layout.device
        self._num_blocks = layout.num_blocks
        self._groups = [DeviceBlocks(regions, layout.num_blocks, layout.device) for regions in layout.regions]
        self._slab_bytes = max(SLAB_BYTES, *(blocks.block_bytes for blocks in self._groups))
        self._saves = Lane(layout.device, self._slab_bytes, SAVE_PRIORITY, to_slots=True)
        self._loads = Lane(layout.device, self._slab_bytes, LOAD_PRIORITY, to_slots=False)
        self._memory = HostMemory(layout.device, self._loads.report_error)
        self.device = _of_driver(layout.device)

    def fence(self) -> object | None:
        """An event behind everything on the stream that is current in this thread."""
        event: object = torch.cuda.current_stream(self._device).record_event()
        return event

    def save(self, group: int, chunks: Iterable[Chunk], fence: object | None) -> None:
        """See :meth:`BlockCopier.save`."""
        self._run(self._saves, group, chunks, fence, lambda: False)

    def load(
        self,
        group: int,
        chunks: Iterable[Chunk],
        fence: object | None,
        cancelled: Callable[[], bool],
        on_queued: OnQueued | None = None,
    ) -> int:
        """See :meth:`BlockCopier.load`."""
        return self._run(self._loads, group, chunks, fence, cancelled, on_queued)

    def follow(self, mark: object) -> None:
        """See :meth:`BlockCopier.follow`."""
        assert isinstance(mark, tuple)
        stream = torch.cuda.current_stream(self._device)
        for event in mark:
            stream.wait_event(event)

    def on_mapped(self, extent_id: int, mapping: SharedMapping) -> None:
        """See :meth:`BlockCopier.on_mapped`."""
        self._memory.register(extent_id, mapping)

    def on_revoked(self, extent_id: int, mapping: SharedMapping) -> None:
        """See :meth:`BlockCopier.on_revoked`. Raises RuntimeError when the memory must stay mapped."""
        self._memory.unregister(mapping)

    def close(self) -> None:
        """See :meth:`BlockCopier.close`. Memory that is still registered is let go."""
        self._memory.close()
        self._saves.close()
        self._loads.close()

    # ---- one copy

    def _run(
        self,
        lane: Lane,
        group: int,
        chunks: Iterable[Chunk],
        fence: object | None,
        cancelled: Callable[[], bool],
        on_queued: OnQueued | None = None,
    ) -> int:
        """Move all chunks, and wait for the last."""
        blocks, gate = self._groups[group], self._memory.gate
        whole = 0
        queued: deque[Any] = deque()
        gate.enter()
        try:
            # Inference mode, since the engine's tensors may have been made in it, and could not be written outside.
            with torch.inference_mode(), torch.cuda.device(self._device):
                lane.wait_for(fence)
                direct_bytes = DIRECT_SAVE_BYTES if on_queued is None else DIRECT_LOAD_BYTES
                for portion in self._portions(blocks.block_bytes, direct_bytes, self._checked(blocks, chunks), cancelled):
                    if gate.wanted:
                        lane.synchronize()
                        gate.let_pass()
                    if portion.block_ids:
                        queued.append(lane.queue(blocks, portion.block_ids, portion.rows, portion.transfers))
                    while len(queued) > (MAX_QUEUED_SAVES if on_queued is None else MAX_QUEUED_LOADS):
                        queued.popleft().synchronize()
                    whole = portion.whole
                if on_queued is not None:
                    on_queued(lane.mark(), whole)
        finally:
            lane.synchronize()  # also after a failure: no byte may be under way when this returns
            gate.leave()
        return whole

    def _checked(self, blocks: DeviceBlocks, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Look at each chunk as it is due, while others are on their way."""
        for view, block_ids in chunks:
            check_slot(view, block_ids, blocks.block_bytes)
            if block_ids and not SKIP <= min(block_ids) <= max(block_ids) < self._num_blocks:
                raise ValueError(f"blocks {list(block_ids)} are not all among the engine's {self._num_blocks} blocks")
            yield view, block_ids

    def _portions(
        self, block_bytes: int, direct_bytes: int, chunks: Iterable[Chunk], cancelled: Callable[[], bool]
    ) -> Iterator[_Portion]:
        """Cut chunks into portions: what fits a slab, and what one kernel moves within the device."""
        portion = _Portion()
        for number, (view, block_ids) in enumerate(chunks):
            if cancelled():
                break
            direct = isinstance(view, DeviceView) and can_move_rows()
            limit = max(1, (direct_bytes if direct else self._slab_bytes) // block_bytes)
            if portion.block_ids and portion.direct is not direct:
                yield portion
                portion = _Portion(whole=number)
            portion.direct = direct
            address = _address(view)
            for place, count in _wanted(block_ids):
                start, left = place, count
                while left:
                    if len(portion.block_ids) >= limit:
                        yield portion
                        portion = _Portion(direct=direct, whole=number)
                    part = min(left, limit - len(portion.block_ids))
                    portion.add(view.obj, address + start * block_bytes, part, block_bytes)
                    portion.block_ids.extend(block_ids[start : start + part])
                    start, left = start + part, left - part
            portion.whole = number + 1
        yield portion


@dataclass
class _Portion:
    """What is moved together. ``whole`` chunks are done with it."""

    direct: bool = False
    """Blocks and slots are on one device, and need no slab."""
    block_ids: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Of what is direct: the address of each block in its slot."""
    transfers: list[Transfer] = field(default_factory=list)
    """Of what is staged."""
    whole: int = 0
    owner: object = None
    """Of the host memory of the last transfer."""

    def add(self, owner: object, address: int, count: int, block_bytes: int) -> None:
        """Add blocks that are one after the other in a slot."""
        if self.direct:
            self.rows.extend(range(address, address + count * block_bytes, block_bytes))
        else:
            self._transfer(owner, address, len(self.block_ids) * block_bytes, count * block_bytes)

    def _transfer(self, owner: object, address: int, slab_offset: int, nbytes: int) -> None:
        """Add bytes behind those that are here: one transfer with the last where host memory goes on, as slots of one save do.

        Memory of another owner may follow by chance, but is registered on its own.
        """
        while nbytes:
            size = min(nbytes, border(address) - address)
            last = self.transfers[-1] if self.transfers and owner is self.owner else None
            self.owner = owner
            if last is not None and last.address + last.nbytes == address and border(last.address) > address:
                self.transfers[-1] = Transfer(last.address, last.slab_offset, last.nbytes + size)
            else:
                self.transfers.append(Transfer(address, slab_offset, size))
            address, slab_offset, nbytes = address + size, slab_offset + size, nbytes - size


def _address(view: View) -> int:
    """Where a slot is: the driver tells host memory and GPU memory apart by their addresses."""
    if isinstance(view, DeviceView):
        return view.address
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0


def _of_driver(device: torch.device) -> Device | None:
    """A GPU as the driver has it; None where that cannot be used beside torch."""
    try:
        return Device(torch.cuda.current_device() if device.index is None else device.index)
    except CudaError as e:
        log.warning("kvtierd: slots in GPU memory cannot be used: %s", e)
        return None


def _wanted(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(place, count) of the stretches of a chunk that are not skipped."""
    place = 0
    while place < len(block_ids):
        end = place
        while end < len(block_ids) and block_ids[end] != SKIP:
            end += 1
        if end > place:
            yield place, end - place
        place = end + 1
