"""Runs the core's moves on worker threads: loads before prefetches before demotions, a bounded number at one time.

Moves that leave CPU memory out, between GPU memory and NVMe, have threads of their own while the direct way is open: one that hangs
there holds up none that go another way, nor the end of the daemon.

The core bounds the bytes that are in flight, so the queue here is bounded by them; this module only orders them, puts small
blocks together so that a store sees large I/Os, and keeps some threads free of demotions so that a load never waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np

from kvtierd.core.commands import Move, Priority, StartMoves
from kvtierd.cuda import Device
from kvtierd.model import Result, Tier
from kvtierd.tiers.base import BlockIo, BlockStore, DeviceRange
from kvtierd.transfer.lanes import Lane

log = logging.getLogger(__name__)
T = TypeVar("T")

BATCH_BYTES: Final = 4 << 20
"""Payload that one job gathers from small blocks."""
BATCH_BLOCKS: Final = 512
"""Most blocks of one job."""


class Memory(Protocol):
    """CPU memory by slot."""

    def view(self, slot: int) -> memoryview:
        """The whole slot."""


class DeviceMemory(Protocol):
    """GPU memory by slot."""

    def address(self, slot: int) -> tuple[Device, int]:
        """Where a slot is."""


@dataclass(frozen=True, slots=True)
class MoveReport:
    """How one job ended."""

    src_tier: Tier
    dst_tier: Tier
    priority: Priority
    results: list[tuple[Move, Result]]
    waited_s: float
    """Time in the queue."""
    took_s: float


class Executor:
    """Moves blocks between CPU memory and the stores around it, and within CPU memory. Belongs to one event loop."""

    def __init__(
        self,
        memory: Memory,
        stores: dict[Tier, BlockStore],
        depth: int,
        report: Callable[[MoveReport], None],
        on_wall: Callable[[float], float],
        devices: DeviceMemory | None = None,
    ) -> None:
        """Make an executor.

        Args:
            memory: the CPU tier.
            stores: the other tiers.
            depth: jobs in progress at one time; at least 2.
            report: called in the event loop once a job.
            on_wall: seconds since 1970 of a time of the core's clock; called from worker threads.
            devices: the HBM tier.

        Raises:
            StartupError: the machine has no threads left.
        """
        self._memory = memory
        self._stores = stores
        self._devices = devices
        self._report = report
        self._on_wall = on_wall
        self._depth = max(depth, 2)
        self._main = Lane(self._depth)
        self._direct: Lane | None = None
        self._uses_direct = False
        self._closed = False

    def submit(self, command: StartMoves) -> None:
        """Queue moves; returns at once. After :meth:`close` they are dropped, like those that were queued then."""
        if self._closed:
            log.debug("%d moves were dropped: the daemon is going", len(command.moves))
            return
        lane = self._direct if self._direct is not None and self._uses_direct and _is_direct(command) else self._main
        lane.put(_split(command), time.monotonic())
        self._start(lane)

    def in_direct_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run work that may hang in a thread of the direct way. Raises StartupError as :class:`Executor` does."""
        if self._direct is None:
            self._direct = Lane(self._depth, spare=1)  # or a move would wait for a thread
        return asyncio.get_running_loop().run_in_executor(self._direct.threads, work)

    def use_direct(self, use: bool) -> None:
        """Whether moves between GPU memory and NVMe have their own threads. Those that have not begun change over too."""
        assert self._direct is not None, "the way was tried out before"
        self._uses_direct = use
        if not use:
            self._main.add(self._direct.clear())
            self._start(self._main)

    @property
    def running(self) -> int:
        """Jobs in progress."""
        return sum(lane.open - lane.queued for lane in self._lanes())

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return sum(lane.queued for lane in self._lanes())

    def _lanes(self) -> list[Lane]:
        return [self._main] if self._direct is None else [self._main, self._direct]

    def _start(self, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(lane.call()):
            loop.run_in_executor(lane.threads, self._work, loop, lane)

    def _work(self, loop: asyncio.AbstractEventLoop, lane: Lane) -> None:
        """In a thread: run jobs while there are any."""
        ended: StartMoves | None = None
        while (taken := lane.take(ended)) is not None:
            _, _, queued_s, ended = taken
            report = self._run(ended, queued_s)
            with contextlib.suppress(RuntimeError):  # one that hung ends when the event loop has gone
                loop.call_soon_threadsafe(self._ended, lane, report)

    def _ended(self, lane: Lane, report: MoveReport) -> None:
        lane.told()
        self._report(report)

    def _run(self, job: StartMoves, queued_s: float) -> MoveReport:
        began_s = time.monotonic()
        try:
            results = self._moved(job)
        except Exception:  # a store answers with results; an exception is a bug. The blocks stay where they are.
            log.exception("moving %d blocks failed", len(job.moves))
            results = [Result.IO_ERROR] * len(job.moves)
        moved = list(zip(job.moves, results, strict=True))
        return MoveReport(job.src_tier, job.dst_tier, job.priority, moved, began_s - queued_s, time.monotonic() - began_s)

    def _moved(self, job: StartMoves) -> list[Result]:
        if job.src_tier is job.dst_tier:
            for move in job.moves:
                self._copy(move)
            return [Result.OK] * len(job.moves)
        reads = job.dst_tier is Tier.CPU or (_is_direct(job) and job.src_tier is Tier.NVME)
        store = self._stores[job.src_tier if reads else job.dst_tier]
        blocks = [self._block_io(move, reads=reads) for move in job.moves]
        results = store.read(blocks) if reads else store.write(blocks)
        assert len(results) == len(blocks)
        return results

    def _copy(self, move: Move) -> None:
        """Copy a block within CPU memory, but for shards that stay where they are."""
        sizes = move.src.block.realm.namespace.shard_bytes
        for src, dst, size in zip(move.src.all_slots(), move.dst.all_slots(), sizes, strict=True):
            if src != dst:
                source, target = (np.frombuffer(self._memory.view(slot)[:size], np.uint8) for slot in (src, dst))
                np.copyto(target, source)  # lets other threads run meanwhile

    def _block_io(self, move: Move, *, reads: bool) -> BlockIo:
        """What a store needs; ``reads`` says that it is the source."""
        outer, inner = (move.src, move.dst) if reads else (move.dst, move.src)
        block = outer.block
        found = BlockIo(block.realm.realm_id, block.key, outer.generation, outer.all_slots(), (), self._on_wall(outer.expires_s))
        places = list(zip(inner.all_slots(), block.realm.namespace.shard_bytes, strict=True))
        if inner.tier is Tier.HBM:
            assert self._devices is not None
            found.ranges = [DeviceRange(*self._devices.address(slot), size) for slot, size in places]
        else:
            found.buffers = [self._memory.view(slot)[:size] for slot, size in places]
        return found

    async def idle(self) -> None:
        """Wait until nothing is queued or running."""
        for lane in self._lanes():
            await lane.idle.wait()

    async def close(self, direct_timeout_s: float = 0.0) -> bool:
        """Take nothing more, drop what is queued and wait for what is running; for what goes directly so long at most.

        Returns:
            Whether all has ended. If not, what the moves use has to stay as it is for as long as the process lives.
        """
        self._closed = True
        for lane in self._lanes():
            lane.clear()
        await asyncio.to_thread(self._main.threads.shutdown)
        if self._direct is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._direct.idle.wait(), direct_timeout_s)
            self._direct.threads.shutdown(wait=False)
        return self._direct is None or not self._direct.open


def _is_direct(command: StartMoves) -> bool:
    return {command.src_tier, command.dst_tier} == {Tier.HBM, Tier.NVME}


def _split(command: StartMoves) -> list[StartMoves]:
    """Cut a command into jobs of about ``BATCH_BYTES``, in order."""
    jobs: list[StartMoves] = []
    batch: list[Move] = []
    size = 0
    for move in command.moves:
        if batch and (size + move.size_bytes > BATCH_BYTES or len(batch) >= BATCH_BLOCKS):
            jobs.append(_job(command, batch))
            batch, size = [], 0
        batch.append(move)
        size += move.size_bytes
    jobs.append(_job(command, batch))
    return jobs


def _job(command: StartMoves, moves: Sequence[Move]) -> StartMoves:
    return StartMoves(command.src_tier, command.dst_tier, command.priority, tuple(moves))
