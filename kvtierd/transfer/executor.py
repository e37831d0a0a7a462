"""Runs the core's moves on worker threads: loads before prefetches before demotions, a bounded number at one time.

Moves that leave CPU memory out, between GPU memory and NVMe, have threads of their own while the direct way is open: one that hangs
there holds up none that go another way, nor the end of the daemon.

The core bounds the bytes that are in flight, so the queue here is bounded by them; this module only orders them, puts small
blocks together so that a store sees large I/Os, and keeps some threads free of demotions so that a load never waits for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np

from kvtierd.core.commands import Move, Priority, StartMoves
from kvtierd.cuda import Device
from kvtierd.errors import StartupError
from kvtierd.model import Result, Tier
from kvtierd.tiers.base import BlockIo, BlockStore, DeviceRange

log = logging.getLogger(__name__)
T = TypeVar("T")

BATCH_BYTES: Final = 4 << 20
"""Payload that one job gathers from small blocks."""
BATCH_BLOCKS: Final = 512
"""Most blocks of one job."""


_Done = tuple[list[Result], float, float]
"""Results of a job, and when it began and ended."""


class Memory(Protocol):
    """CPU memory by slot."""

    def view(self, slot: int) -> memoryview:
        """The whole slot."""


class DeviceMemory(Protocol):
    """GPU memory by slot."""

    def address(self, slot: int) -> tuple[Device, int]:
        """Where a slot is."""


class _Lane:
    """Jobs that share threads: the first of the queue next, demotions never on all threads."""

    def __init__(self, threads: ThreadPoolExecutor, depth: int) -> None:
        self.threads = threads
        self.depth = depth
        self.max_demotions = max(depth - max(depth // 4, 1), 1)
        self.queue: list[tuple[int, int, float, StartMoves]] = []
        self.running = 0
        self.demotions = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def next(self) -> tuple[StartMoves, float] | None:
        """Take the job that may begin now, and when it was queued."""
        if not self.queue or self.running >= self.depth:
            return None
        demotes = self.queue[0][0] == Priority.DEMOTE
        if demotes and self.demotions >= self.max_demotions:
            return None
        _, _, queued_s, job = heapq.heappop(self.queue)
        self.demotions += demotes
        self.running += 1
        return job, queued_s

    def ended(self, job: StartMoves) -> None:
        """It has ended."""
        self.running -= 1
        self.demotions -= job.priority is Priority.DEMOTE

    def look(self) -> None:
        """Tell whoever waits for it to be idle."""
        if not self.running and not self.queue:
            self.idle.set()


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
        self._order = itertools.count()
        self._depth = max(depth, 2)
        self._main = _Lane(_started(self._depth), self._depth)
        self._direct: _Lane | None = None
        self._uses_direct = False
        self._closed = False

    def submit(self, command: StartMoves) -> None:
        """Queue moves; returns at once. After :meth:`close` they are dropped, like those that were queued then."""
        if self._closed:
            log.debug("%d moves were dropped: the daemon is going", len(command.moves))
            return
        now = time.monotonic()
        lane = self._direct if self._direct is not None and self._uses_direct and _is_direct(command) else self._main
        for job in _split(command):
            heapq.heappush(lane.queue, (job.priority, next(self._order), now, job))
        lane.idle.clear()
        self._start(lane)

    def in_direct_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run work that may hang in a thread of the direct way. Raises StartupError as :class:`Executor` does."""
        if self._direct is None:
            self._direct = _Lane(_started(self._depth + 1), self._depth)  # one for such work, or a move would wait for a thread
        return asyncio.get_running_loop().run_in_executor(self._direct.threads, work)

    def use_direct(self, use: bool) -> None:
        """Whether moves between GPU memory and NVMe have their own threads. Those that have not begun change over too."""
        assert self._direct is not None, "the way was tried out before"
        self._uses_direct = use
        if not use:
            for entry in self._direct.queue:
                heapq.heappush(self._main.queue, entry)
                self._main.idle.clear()
            self._direct.queue.clear()
            self._direct.look()
            self._start(self._main)

    @property
    def running(self) -> int:
        """Jobs in progress."""
        return sum(lane.running for lane in self._lanes())

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return sum(len(lane.queue) for lane in self._lanes())

    def _lanes(self) -> list[_Lane]:
        return [self._main] if self._direct is None else [self._main, self._direct]

    def _start(self, lane: _Lane) -> None:
        while (found := lane.next()) is not None:
            job, queued_s = found
            future = asyncio.get_running_loop().run_in_executor(lane.threads, self._run, job)
            future.add_done_callback(functools.partial(self._ended, lane=lane, job=job, queued_s=queued_s))

    def _ended(self, future: asyncio.Future[_Done], lane: _Lane, job: StartMoves, queued_s: float) -> None:
        lane.ended(job)
        error = future.exception()
        if error is not None:
            # A store answers with results; an exception is a bug. The blocks stay where they are.
            log.error("moving %d blocks failed", len(job.moves), exc_info=error)
            results, began_s, ended_s = [Result.IO_ERROR] * len(job.moves), queued_s, queued_s
        else:
            results, began_s, ended_s = future.result()
        self._start(lane)
        lane.look()
        self._report(
            MoveReport(
                job.src_tier,
                job.dst_tier,
                job.priority,
                list(zip(job.moves, results, strict=True)),
                began_s - queued_s,
                ended_s - began_s,
            )
        )

    def _run(self, job: StartMoves) -> _Done:
        began_s = time.monotonic()
        if job.src_tier is job.dst_tier:
            for move in job.moves:
                self._copy(move)
            return [Result.OK] * len(job.moves), began_s, time.monotonic()
        reads = job.dst_tier is Tier.CPU or (_is_direct(job) and job.src_tier is Tier.NVME)
        store = self._stores[job.src_tier if reads else job.dst_tier]
        blocks = [self._block_io(move, reads=reads) for move in job.moves]
        results = store.read(blocks) if reads else store.write(blocks)
        assert len(results) == len(blocks)
        return results, began_s, time.monotonic()

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
            lane.queue.clear()
        await asyncio.to_thread(self._main.threads.shutdown)
        if self._direct is not None:
            self._direct.look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._direct.idle.wait(), direct_timeout_s)
            self._direct.threads.shutdown(wait=False)
        return self._direct is None or not self._direct.running


def _is_direct(command: StartMoves) -> bool:
    return {command.src_tier, command.dst_tier} == {Tier.HBM, Tier.NVME}


def _started(count: int) -> ThreadPoolExecutor:
    """Threads that all run from the start: a job never waits for one that the machine cannot start. Raises StartupError."""
    threads = ThreadPoolExecutor(count, thread_name_prefix="kvtierd-move")
    all_run = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            threads.submit(all_run.wait)
    except RuntimeError as e:
        all_run.abort()
        threads.shutdown()
        raise StartupError(
            f"{count} threads for moving blocks cannot be started ({e}): raise the limit of threads (ulimit -u) or lower nvme.depth"
        ) from e
    all_run.wait()
    return threads


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
