"""Runs the core's moves on worker threads: loads before prefetches before demotions, a bounded number at one time.

The core bounds the bytes that are in flight, so the queue here is bounded by them; this module only orders them, puts small
blocks together so that a store sees large I/Os, and keeps some threads free of demotions so that a load never waits for one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from kvtierd.core.commands import Move, Priority, StartMoves
from kvtierd.errors import StartupError
from kvtierd.model import Result, Tier
from kvtierd.tiers.base import BlockIo, BlockStore

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 4 << 20
"""Payload that one job gathers from small blocks."""
BATCH_BLOCKS: Final = 512
"""Most blocks of one job."""


class Memory(Protocol):
    """CPU memory by slot."""

    def view(self, slot: int) -> memoryview:
        """The whole slot."""


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
    ) -> None:
        """Make an executor.

        Args:
            memory: the CPU tier.
            stores: the other tiers.
            depth: jobs in progress at one time; at least 2.
            report: called in the event loop once a job.
            on_wall: seconds since 1970 of a time of the core's clock; called from worker threads.

        Raises:
            StartupError: the machine has no threads left.
        """
        self._memory = memory
        self._stores = stores
        self._depth = max(depth, 2)
        self._max_demotions = max(self._depth - max(self._depth // 4, 1), 1)
        self._report = report
        self._on_wall = on_wall
        self._queue: list[tuple[int, int, float, StartMoves]] = []
        self._order = itertools.count()
        self._running = 0
        self._demotions = 0
        self._threads = _started(self._depth)
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, command: StartMoves) -> None:
        """Queue moves; returns at once. After :meth:`close` they are dropped, like those that were queued then."""
        if self._closed:
            log.debug("%d moves were dropped: the daemon is going", len(command.moves))
            return
        now = time.monotonic()
        for job in _split(command):
            heapq.heappush(self._queue, (job.priority, next(self._order), now, job))
        self._idle.clear()
        self._start()

    @property
    def running(self) -> int:
        """Jobs in progress."""
        return self._running

    @property
    def queued(self) -> int:
        """Jobs that wait for a thread."""
        return len(self._queue)

    def _start(self) -> None:
        while self._queue and self._running < self._depth:
            if self._queue[0][0] == Priority.DEMOTE:
                if self._demotions >= self._max_demotions:
                    return
                self._demotions += 1
            _, _, queued_s, job = heapq.heappop(self._queue)
            self._running += 1
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._run, job)
            future.add_done_callback(lambda f, job=job, queued_s=queued_s: self._ended(f, job, queued_s))  # type: ignore[misc]

    def _ended(self, future: asyncio.Future[tuple[list[Result], float, float]], job: StartMoves, queued_s: float) -> None:
        self._running -= 1
        self._demotions -= job.priority is Priority.DEMOTE
        error = future.exception()
        if error is not None:
            # A store answers with results; an exception is a bug. The blocks stay where they are.
            log.error("moving %d blocks failed", len(job.moves), exc_info=error)
            results, began_s, ended_s = [Result.IO_ERROR] * len(job.moves), queued_s, queued_s
        else:
            results, began_s, ended_s = future.result()
        self._start()
        if not self._running and not self._queue:
            self._idle.set()
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

    def _run(self, job: StartMoves) -> tuple[list[Result], float, float]:
        began_s = time.monotonic()
        if job.src_tier is job.dst_tier:
            for move in job.moves:
                self._copy(move)
            return [Result.OK] * len(job.moves), began_s, time.monotonic()
        fills = job.dst_tier is Tier.CPU
        store = self._stores[job.src_tier if fills else job.dst_tier]
        blocks = [self._block_io(move, fills=fills) for move in job.moves]
        results = store.read(blocks) if fills else store.write(blocks)
        assert len(results) == len(blocks)
        return results, began_s, time.monotonic()

    def _copy(self, move: Move) -> None:
        """Copy a block within CPU memory, but for shards that stay where they are."""
        sizes = move.src.block.realm.namespace.shard_bytes
        for src, dst, size in zip(move.src.all_slots(), move.dst.all_slots(), sizes, strict=True):
            if src != dst:
                source, target = (np.frombuffer(self._memory.view(slot)[:size], np.uint8) for slot in (src, dst))
                np.copyto(target, source)  # lets other threads run meanwhile

    def _block_io(self, move: Move, *, fills: bool) -> BlockIo:
        """What a store needs; ``fills`` says that CPU memory is the target."""
        outer, inner = (move.src, move.dst) if fills else (move.dst, move.src)
        block = outer.block
        sizes = block.realm.namespace.shard_bytes
        buffers = [self._memory.view(slot)[:size] for slot, size in zip(inner.all_slots(), sizes, strict=True)]
        expires_s = self._on_wall(outer.expires_s)
        return BlockIo(block.realm.realm_id, block.key, outer.generation, outer.all_slots(), buffers, expires_s)

    async def idle(self) -> None:
        """Wait until nothing is queued or running."""
        await self._idle.wait()

    async def close(self) -> None:
        """Take nothing more, drop what is queued and wait for what is running."""
        self._closed = True
        self._queue.clear()
        await asyncio.to_thread(self._threads.shutdown)


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
