"""Staging memory on a device: blocks are gathered there in the order of a slot, and DMA moves them to slots; or the other way.

The engine's thread shares the interpreter with the thread that queues all this, so that one does little for each portion: one
kernel and as few transfers as the slots allow. Without Triton the runs of a portion take one torch operation for each layer.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from kvtierd.connectors.vllm.copying import batches
from kvtierd.connectors.vllm.layout import Region
from kvtierd.connectors.vllm.layout_layer import UnsupportedLayoutError

SLABS: Final = 2
"""Of each direction: one is gathered while the other is transferred."""
_UNITS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

log = logging.getLogger("vllm.kvtierd")


class Transfer(NamedTuple):
    """Bytes between host memory and a slab."""

    address: int
    slab_offset: int
    nbytes: int


class DeviceBlocks:
    """The runs of one group's blocks, in the largest unit that divides everything.

    Args:
        regions: runs, in the order of a slot.
        num_blocks: blocks of the engine.
        device: where they are.
    """

    def __init__(self, regions: Sequence[Region], num_blocks: int, device: torch.device) -> None:
        self.block_bytes = sum(region.run_bytes for region in regions)
        self._batches = batches(regions)
        self._num_blocks = num_blocks
        self._unit = math.gcd(
            8, *(n for b in self._batches for n in (b.offset_bytes, b.block_stride_bytes, b.run_bytes, b.step_bytes))
        )
        rows, place = [], 0
        for region in regions:
            address = region.storage.data_ptr() + region.offset_bytes
            rows.append((address, region.block_stride_bytes, place // self._unit, region.run_bytes // self._unit))
            place += region.run_bytes
        self._runs = torch.tensor(rows, dtype=torch.int64).to(device)
        self._one_unit = torch.zeros(1, dtype=_UNITS[self._unit], device=device)

    def move(self, block_ids: torch.Tensor, rows: torch.Tensor, slab: torch.Tensor, *, to_rows: bool) -> None:
        """Queue on the current stream: blocks into rows, or back.

        Args:
            block_ids: (row,) int64 on the device.
            rows: (row,) int64 on the device, the address of each block's row there.
            slab: flat uint8; its rows are what is meant where :func:`can_move_rows` is False.
            to_rows: gather; else scatter.
        """
        if (kernels := _kernels()) is not None:
            kernels.move_runs(self._runs, block_ids, rows, self._one_unit, to_rows=to_rows)
            return
        count = block_ids.numel()
        for b in self._batches:
            blocks = self._view(
                b.storage, self._num_blocks, b.count, b.run_bytes, b.block_stride_bytes, b.step_bytes, b.offset_bytes
            )
            staged = self._view(slab, count, b.count, b.run_bytes, self.block_bytes, b.run_bytes, b.slot_offset)
            if to_rows:
                torch.index_select(blocks, 0, block_ids, out=staged)
            else:
                blocks.index_copy_(0, block_ids, staged)

    def _view(
        self, flat: torch.Tensor, blocks: int, runs: int, run_bytes: int, stride: int, step: int, offset: int
    ) -> torch.Tensor:
        unit = self._unit
        units = flat[: flat.numel() // unit * unit].view(_UNITS[unit])
        return units.as_strided((blocks, runs, run_bytes // unit), (stride // unit, step // unit, 1), offset // unit)


class _Stage:
    """One slab and its stream."""

    def __init__(self, device: torch.device, slab_bytes: int, priority: int) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)
        try:
            # On its own stream: memory from another stream's pool may still be in use there.
            with torch.cuda.device(device), torch.cuda.stream(self.stream):
                self.slab = torch.empty(slab_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as e:
            raise UnsupportedLayoutError(
                f"{device} has no {slab_bytes >> 20} MiB left to stage copies of KV blocks; lower --gpu-memory-utilization"
            ) from e


class Lane:
    """Slabs and streams of one direction. What is queued on one slab is done in order. Its caller has made the device current.

    Args:
        device: a CUDA device.
        slab_bytes: of one slab.
        priority: of the streams.
        to_slots: blocks go into slots; else slots into blocks.

    Raises:
        UnsupportedLayoutError: the device has no memory left.
    """

    def __init__(self, device: torch.device, slab_bytes: int, priority: int, *, to_slots: bool) -> None:
        self._device = device
        self._to_slots = to_slots
        self._stages = [_Stage(device, slab_bytes, priority) for _ in range(SLABS)]
        self._next = 0

    def queue(self, blocks: DeviceBlocks, block_ids: Sequence[int], rows: Sequence[int], transfers: Sequence[Transfer]) -> Any:
        """Queue one portion. Returns an event behind it.

        Args:
            blocks: where the engine's blocks are.
            block_ids: which of them.
            rows: the address of each in slots on the device; empty when block ``n`` goes through row ``n`` of the slab.
            transfers: between the slab and slots.

        Raises:
            RuntimeError: the device refused.
        """
        stage = self._stages[self._next]
        self._next = (self._next + 1) % SLABS
        slab, count = stage.slab.data_ptr(), len(block_ids)
        where = rows or range(slab, slab + count * blocks.block_bytes, blocks.block_bytes)
        even = [0] * (count % 2)  # kernels are compiled for the alignment of what they get
        with torch.cuda.stream(stage.stream):
            # Not made on the device right away: that would wait for the stream.
            both = torch.tensor([[*block_ids, *even], [*where, *even]], dtype=torch.int64).to(self._device, non_blocking=True)
            ids, places = both[0, :count], both[1, :count]
            if self._to_slots:
                blocks.move(ids, places, stage.slab, to_rows=True)
            self._transfer(stage, transfers)
            if not self._to_slots:
                blocks.move(ids, places, stage.slab, to_rows=False)
            event: Any = torch.cuda.Event(blocking=True)  # sleeps, where a stream would be waited for in a busy loop
            event.record(stage.stream)
        return event

    def _transfer(self, stage: _Stage, transfers: Sequence[Transfer]) -> None:
        slab, stream, copy = stage.slab.data_ptr(), stage.stream.cuda_stream, _driver().cuMemcpyAsync
        for address, offset, nbytes in transfers:
            target, source = (address, slab + offset) if self._to_slots else (slab + offset, address)
            status = copy(target, source, nbytes, stream)
            if status:
                raise RuntimeError(f"the CUDA driver refused a copy of {nbytes} bytes (error {status})")

    def wait_for(self, fence: Any) -> None:
        """Queue nothing before ``fence``."""
        if fence is not None:
            for stage in self._stages:
                stage.stream.wait_event(fence)

    def mark(self) -> tuple[Any, ...]:
        """Events behind everything that is queued."""
        events = tuple(torch.cuda.Event(blocking=True) for _ in self._stages)
        for event, stage in zip(events, self._stages, strict=True):
            event.record(stage.stream)
        return events

    def synchronize(self) -> None:
        """Wait until nothing is under way."""
        for event in self.mark():
            event.synchronize()

    def report_error(self) -> None:
        """Have an error that the device keeps for this thread reported now, and forget it."""
        with torch.cuda.stream(self._stages[0].stream):
            torch.empty(1, device=self._device).fill_(0)

    def close(self) -> None:
        """Give the memory back."""
        self._stages = []


@functools.cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver: torch would take a tensor on each side, made anew for each copy."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return driver


def can_move_rows() -> bool:
    """Whether blocks and slots on one device can be moved without staging memory."""
    return _kernels() is not None


@functools.cache
def _kernels() -> Any:
    """The module of kernels, or None where they cannot be made."""
    try:
        from kvtierd.connectors.vllm import gpu_kernels

        ids = torch.zeros(1, dtype=torch.int64, device="cuda")
        source, target = torch.arange(1, 5, dtype=torch.int64, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
        runs = torch.tensor([[source.data_ptr(), 32, 0, 4]], dtype=torch.int64).to("cuda")
        rows = torch.tensor([target.data_ptr()], dtype=torch.int64).to("cuda")
        gpu_kernels.move_runs(runs, ids, rows, target, to_rows=True)
        if target.tolist() != [1, 2, 3, 4]:
            raise RuntimeError("the kernel moved other bytes")
    except Exception as e:
        log.warning("kvtierd: blocks are gathered by torch, which takes more of the engine's time: %s", e)
        return None
    return gpu_kernels
