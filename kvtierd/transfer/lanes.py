"""Threads that take jobs from a queue: the most urgent next, and demotions never on all threads.

A thread that has ended a job takes the next one by itself. Were it to wait until the event loop gives it one, the device would be
idle for as long as the loop is busy with the results of others.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvtierd.core.commands import Priority, StartMoves
from kvtierd.errors import StartupError

Waiting = tuple[int, int, float, StartMoves]
"""Of a job in the queue: its priority, its number, when it was queued."""

_order: Final = itertools.count()


class Lane:
    """Jobs that share threads.

    Args:
        depth: jobs in progress at one time.
        spare: threads for other work.

    Raises:
        StartupError: the machine has no threads left.

    Attributes:
        threads: who has to run :meth:`take` until it gives None, once for each thread that :meth:`call` asks for.
        open: jobs that were put in and whose end was not told. Belongs to the event loop, as does ``idle``.
        idle: set while there are none.
    """

    def __init__(self, depth: int, spare: int = 0) -> None:
        self.threads = _started(depth + spare)
        self._depth = depth
        self._max_demotions = max(depth - max(depth // 4, 1), 1)
        self._lock = threading.Lock()
        # Under the lock:
        self._queue: list[Waiting] = []
        self._at_work = 0
        self._demotions = 0
        self.open = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def queued(self) -> int:
        """Jobs that no thread has taken."""
        with self._lock:
            return len(self._queue)

    # ---- in the event loop

    def put(self, jobs: Iterable[StartMoves], now: float) -> None:
        """Queue jobs."""
        self.add([(job.priority, next(_order), now, job) for job in jobs])

    def add(self, waiting: list[Waiting]) -> None:
        """Queue what has waited elsewhere."""
        with self._lock:
            for entry in waiting:
                heapq.heappush(self._queue, entry)
        self.open += len(waiting)
        if waiting:
            self.idle.clear()

    def clear(self) -> list[Waiting]:
        """Take everything out that no thread has taken."""
        with self._lock:
            waiting, self._queue = self._queue, []
        self.told(len(waiting))
        return waiting

    def told(self, count: int = 1) -> None:
        """So many jobs need no telling any more."""
        self.open -= count
        if not self.open:
            self.idle.set()

    def call(self) -> int:
        """How many more threads have to come to work; they count as working from here on."""
        with self._lock:
            more = min(self._depth - self._at_work, len(self._queue)) if self._next_may_begin() else 0
            self._at_work += more
            return more

    # ---- in its threads

    def take(self, ended: StartMoves | None = None) -> Waiting | None:
        """What the calling thread does next, after one that it has ended; None for nothing, then it counts as working no more."""
        with self._lock:
            if ended is not None:
                self._demotions -= ended.priority is Priority.DEMOTE
            if not self._next_may_begin():
                self._at_work -= 1
                return None
            waiting = heapq.heappop(self._queue)
            self._demotions += waiting[0] == Priority.DEMOTE
            return waiting

    def _next_may_begin(self) -> bool:
        return bool(self._queue) and (self._queue[0][0] != Priority.DEMOTE or self._demotions < self._max_demotions)


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
