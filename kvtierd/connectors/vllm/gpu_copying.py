"""Copies between a CUDA device's KV cache and slots.

The runs of a block are scattered over device memory, and one DMA for each of them would be slow. So the device gathers the runs
of many blocks into a slab of its own memory, in the order of a slot, and one DMA takes each chunk from there to its slot; loads
go the other way. Each direction has two slabs, each with a stream of its own: one is gathered while the other is transferred.
Several portions are queued ahead, for the thread that queues them shares the interpreter with a busy engine. Slots are pinned by
registering the memory of an extent when it is mapped.
"""

from __future__ import annotations

import abc
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from kvtierd.connectors.vllm.copying import SKIP, BlockCopier, Chunk, batches, check_slot
from kvtierd.connectors.vllm.layout import Region, WorkerLayout
from kvtierd.connectors.vllm.layout_layer import UnsupportedLayoutError
from kvtierd.memory import SharedMapping, can_populate

SLAB_BYTES: Final = 32 << 20
"""Device memory of one slab; as much as a block where that is larger."""
SLABS: Final = 2
"""Of each direction."""
MAX_QUEUED: Final = 8
"""Portions of a slab that are queued on the device: some milliseconds of work."""
REGISTER_BYTES: Final = 1 << 30
"""Host memory is registered in pieces that end at multiples of this address: one call for all of it fails when it is very large.
The driver refuses a copy over the border of two registrations, so copies are cut there as well."""
FAULT_IN_BYTES: Final = 32 << 20
FAULT_IN_THREADS: Final = 4
SAVE_PRIORITY: Final = 0
LOAD_PRIORITY: Final = -1
"""Requests wait for loads, nobody waits for saves."""
_PORTABLE: Final = 1
_UNITS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

log = logging.getLogger("vllm.kvtierd")


class CudaBlockCopier(BlockCopier):
    """Copies on streams of its own, beside the engine's work.

    Raises:
        UnsupportedLayoutError: the device has no memory left for staging.
    """

    def __init__(self, layout: WorkerLayout) -> None:
        self._device = layout.device
        self._num_blocks = layout.num_blocks
        self._block_bytes = [group.block_bytes for group in layout.groups]
        groups = [_DeviceBlocks(regions, layout.num_blocks) for regions in layout.regions]
        self._slab_bytes = max(SLAB_BYTES, *self._block_bytes)
        self._saves: _Lane = _SaveLane(layout.device, self._slab_bytes, SAVE_PRIORITY, groups)
        self._loads: _Lane = _LoadLane(layout.device, self._slab_bytes, LOAD_PRIORITY, groups)
        self._gate = _Gate()
        self._registered: dict[int, list[int]] = {}
        self._registered_lock = threading.Lock()
        self._told = False

    def fence(self) -> object | None:
        """An event behind everything on the stream that is current in this thread."""
        event: object = torch.cuda.current_stream(self._device).record_event()
        return event

    def save(self, group: int, chunks: Sequence[Chunk], fence: object | None) -> None:
        """See :meth:`BlockCopier.save`."""
        self._run(self._saves, group, chunks, fence, lambda: False)

    def load(self, group: int, chunks: Sequence[Chunk], fence: object | None, cancelled: Callable[[], bool]) -> int:
        """See :meth:`BlockCopier.load`."""
        return self._run(self._loads, group, chunks, fence, cancelled)

    # ---- staging

    def _check(self, group: int, chunks: Sequence[Chunk]) -> None:
        for view, block_ids in chunks:
            check_slot(view, block_ids, self._block_bytes[group])
            if block_ids and not SKIP <= min(block_ids) <= max(block_ids) < self._num_blocks:
                raise ValueError(f"blocks {list(block_ids)} are not all among the engine's {self._num_blocks} blocks")

    def _slabs(self, group: int, chunks: Sequence[Chunk], cancelled: Callable[[], bool]) -> Iterator[_Slab]:
        """Cut chunks into portions that fit the slab."""
        block_bytes = self._block_bytes[group]
        rows = self._slab_bytes // block_bytes
        slab = _Slab()
        for number, (view, block_ids) in enumerate(chunks):
            if cancelled():
                break
            for place, count in _wanted(block_ids):
                start, left = place, count
                while left:
                    if len(slab.block_ids) == rows:
                        yield slab
                        slab = _Slab(whole=number)
                    part = min(left, rows - len(slab.block_ids))
                    slab.moves.append(_Move(view, start * block_bytes, len(slab.block_ids) * block_bytes, part * block_bytes))
                    slab.block_ids.extend(block_ids[start : start + part])
                    start, left = start + part, left - part
            slab.whole = number + 1
        yield slab

    def _run(self, lane: _Lane, group: int, chunks: Sequence[Chunk], fence: object | None, cancelled: Callable[[], bool]) -> int:
        """Move all chunks, and wait for the last."""
        self._check(group, chunks)
        whole = 0
        queued: deque[Any] = deque()
        self._gate.enter()
        try:
            # Inference mode, since the engine's tensors may have been made in it, and could not be written outside.
            with torch.inference_mode(), torch.cuda.device(self._device):
                lane.wait_for(fence)
                for number, slab in enumerate(self._slabs(group, chunks, cancelled)):
                    if self._gate.wanted:
                        lane.synchronize()
                        self._gate.let_pass()
                    if slab.block_ids:
                        queued.append(lane.queue(number % SLABS, group, slab))
                    while len(queued) > MAX_QUEUED:
                        queued.popleft().synchronize()
                    whole = slab.whole
        finally:
            lane.synchronize()  # also after a failure: no byte may be under way when this returns
            self._gate.leave()
        return whole

    # ---- pinning

    def on_mapped(self, extent_id: int, mapping: SharedMapping) -> None:
        """Register an extent with the device. Where that fails, copies go through the driver's own buffers, and are slower."""
        _fault_in(mapping)
        runtime: Any = torch.cuda.cudart()
        done: list[int] = []
        address, end = mapping.address, mapping.address + mapping.size_bytes
        with torch.cuda.device(self._device):
            while address < end:
                size = min(end, _border(address)) - address
                error = runtime.cudaHostRegister(address, size, _PORTABLE)
                if int(error) != 0:
                    self._unregister(done)
                    self._not_pinned(extent_id, mapping.size_bytes, runtime.cudaGetErrorString(error))
                    return
                done.append(address)
                address += size
        with self._registered_lock:
            self._registered[mapping.address] = done

    def _not_pinned(self, extent_id: int, size_bytes: int, why: str) -> None:
        try:  # the error stays with this thread, and the next kernel that it launches reports it: let this one do so
            with torch.cuda.stream(self._loads.stages[0].stream):
                torch.empty(1, device=self._device).fill_(0)
        except RuntimeError:
            pass
        if self._told:
            return
        self._told = True
        log.warning(
            "kvtierd: %d MiB of extent %d could not be pinned (%s): KV blocks are copied several times slower. Raise the limit of "
            "locked memory (ulimit -l unlimited; in containers --ulimit memlock=-1)",
            size_bytes >> 20,
            extent_id,
            why,
        )

    def on_revoked(self, extent_id: int, mapping: SharedMapping) -> None:
        """Take the registration back, between two portions.

        Raises:
            RuntimeError: the device does not let go of the memory, so it must stay mapped.
        """
        with self._registered_lock:
            addresses = self._registered.pop(mapping.address, [])
        if addresses:
            with self._gate.alone(), torch.cuda.device(self._device):
                self._unregister(addresses)

    @staticmethod
    def _unregister(addresses: list[int]) -> None:
        runtime: Any = torch.cuda.cudart()
        errors = [error for error in map(runtime.cudaHostUnregister, addresses) if int(error) != 0]
        if errors:
            raise RuntimeError(f"memory could not be unregistered from the device: {runtime.cudaGetErrorString(errors[0])}")

    def close(self) -> None:
        """See :meth:`BlockCopier.close`. Memory that is still registered is let go."""
        with self._registered_lock:
            left, self._registered = self._registered, {}
        with self._gate.alone(), torch.cuda.device(self._device):
            for addresses in left.values():
                self._unregister(addresses)
        self._saves.close()
        self._loads.close()


# ---- parts


def _fault_in(mapping: SharedMapping) -> None:
    """Enter the pages in this process's page table by several threads: registering would do it by one, several times slower."""
    if not can_populate():
        return
    starts = range(0, mapping.size_bytes, FAULT_IN_BYTES)
    with ThreadPoolExecutor(FAULT_IN_THREADS, thread_name_prefix="kvtierd-pin") as pool:
        done = [pool.submit(mapping.populate, start, min(FAULT_IN_BYTES, mapping.size_bytes - start)) for start in starts]
    for future in done:
        if error := future.exception():  # registering then says so too
            log.debug("kvtierd: pages of an extent could not be faulted in: %s", error)
            return


def _border(address: int) -> int:
    """Where the piece of host memory that holds ``address`` ends."""
    return (address // REGISTER_BYTES + 1) * REGISTER_BYTES


@dataclass(frozen=True)
class _Move:
    """Bytes of one slot and where they lie in the slab."""

    view: memoryview
    slot_offset: int
    slab_offset: int
    nbytes: int

    def pieces(self, slab: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Equal parts of the slot and of the slab, none over the border of two registrations."""
        slot = torch.frombuffer(self.view, dtype=torch.uint8, count=self.nbytes, offset=self.slot_offset)
        start = 0
        while start < self.nbytes:
            end = min(self.nbytes, _border(slot.data_ptr() + start) - slot.data_ptr())
            yield slot[start:end], slab[self.slab_offset + start : self.slab_offset + end]
            start = end


@dataclass
class _Slab:
    """What is staged together: row ``n`` of the slab is block ``block_ids[n]``. ``whole`` chunks are done with it."""

    block_ids: list[int] = field(default_factory=list)
    moves: list[_Move] = field(default_factory=list)
    whole: int = 0


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


class _Stage:
    """One slab, its stream, and views of the engine's blocks and of the slab for each batch of each group."""

    def __init__(self, device: torch.device, slab_bytes: int, priority: int, groups: Sequence[_DeviceBlocks]) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)
        try:
            # On its own stream: memory from another stream's pool may still be in use there.
            with torch.cuda.device(device), torch.cuda.stream(self.stream):
                self.slab = torch.empty(slab_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as e:
            raise UnsupportedLayoutError(
                f"{device} has no {slab_bytes >> 20} MiB left to stage copies of KV blocks; lower --gpu-memory-utilization"
            ) from e
        self.parts = [blocks.parts(self.slab) for blocks in groups]


class _Lane(abc.ABC):
    """Slabs and streams of one direction. What is queued on one slab is done in order."""

    def __init__(self, device: torch.device, slab_bytes: int, priority: int, groups: Sequence[_DeviceBlocks]) -> None:
        self._device = device
        self.stages = [_Stage(device, slab_bytes, priority, groups) for _ in range(SLABS)]

    @abc.abstractmethod
    def move(self, stage: _Stage, group: int, slab: _Slab, block_ids: torch.Tensor) -> None:
        """Queue one portion on the current stream, which is the stage's. A faster kernel would go in here."""

    def queue(self, number: int, group: int, slab: _Slab) -> Any:
        """Queue one portion on a slab. Returns an event behind it."""
        stage = self.stages[number]
        with torch.cuda.stream(stage.stream):
            # Not made on the device right away: that would wait for the stream.
            block_ids = torch.tensor(slab.block_ids, dtype=torch.int64).to(self._device, non_blocking=True)
            self.move(stage, group, slab, block_ids)
            event: Any = torch.cuda.Event(blocking=True)  # sleeps, where a stream would be waited for in a busy loop
            event.record(stage.stream)
        return event

    def wait_for(self, fence: Any) -> None:
        """Queue nothing before ``fence``."""
        for stage in self.stages:
            if fence is not None:
                stage.stream.wait_event(fence)

    def synchronize(self) -> None:
        """Wait until nothing is under way."""
        for stage in self.stages:
            event: Any = torch.cuda.Event(blocking=True)
            event.record(stage.stream)
            event.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self.stages = []


class _SaveLane(_Lane):
    """From blocks into slots."""

    def move(self, stage: _Stage, group: int, slab: _Slab, block_ids: torch.Tensor) -> None:
        for blocks, rows in stage.parts[group]:
            torch.index_select(blocks, 0, block_ids, out=rows[: len(slab.block_ids)])
        for move in slab.moves:
            for slot, staged in move.pieces(stage.slab):
                slot.copy_(staged, non_blocking=True)


class _LoadLane(_Lane):
    """From slots into blocks."""

    def move(self, stage: _Stage, group: int, slab: _Slab, block_ids: torch.Tensor) -> None:
        for move in slab.moves:
            for slot, staged in move.pieces(stage.slab):
                staged.copy_(slot, non_blocking=True)
        for blocks, rows in stage.parts[group]:
            blocks.index_copy_(0, block_ids, rows[: len(slab.block_ids)])


class _DeviceBlocks:
    """The runs of one group's blocks as strided views (block, run, unit), in the largest unit that divides everything."""

    def __init__(self, regions: Sequence[Region], num_blocks: int) -> None:
        self._batches = batches(regions)
        self._num_blocks = num_blocks
        self._block_bytes = sum(region.run_bytes for region in regions)
        self._unit = math.gcd(
            8, *(n for b in self._batches for n in (b.offset_bytes, b.block_stride_bytes, b.run_bytes, b.step_bytes))
        )

    def parts(self, slab: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each batch all blocks of the engine, and its place in the rows of a slab, each of which is a block as in a slot."""
        rows = slab.numel() // self._block_bytes
        return [
            (
                self._view(b.storage, self._num_blocks, b.count, b.run_bytes, b.block_stride_bytes, b.step_bytes, b.offset_bytes),
                self._view(slab, rows, b.count, b.run_bytes, self._block_bytes, b.run_bytes, b.slot_offset),
            )
            for b in self._batches
        ]

    def _view(
        self, flat: torch.Tensor, blocks: int, runs: int, run_bytes: int, stride: int, step: int, offset: int
    ) -> torch.Tensor:
        unit = self._unit
        units = flat[: flat.numel() // unit * unit].view(_UNITS[unit])
        return units.as_strided((blocks, runs, run_bytes // unit), (stride // unit, step // unit, 1), offset // unit)


class _Gate:
    """Copies are inside together; who takes memory away is alone, and before copies that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = 0

    @property
    def wanted(self) -> bool:
        """Somebody waits to be alone."""
        return self._alone > 0

    def enter(self) -> None:
        """Begin to copy."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._inside += 1

    def leave(self) -> None:
        """No copy is under way any more."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def let_pass(self) -> None:
        """Between copies, none of them under way: let those who wait to be alone have their turn."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._alone)
            self._inside += 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no copy is inside."""
        with self._changed:
            self._alone += 1
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._alone -= 1
                self._changed.notify_all()
