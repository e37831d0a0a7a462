"""Copying blocks between the caller's buffers and mapped slots, large amounts by several threads.

One core cannot use all of the memory's bandwidth. Every thread takes the next block that nobody has begun, so a helper that
gets no core holds up at most the one block that it is copying. The calling thread waits for all helpers, whatever happens,
before it says what was copied: no slot and no buffer is given back while a helper still uses it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeAlias

import numpy as np

from kvtierd.client.buffers import Bytes1D
from kvtierd.client.deadline import Deadline

MAX_COPY_THREADS: Final = 64
DEFAULT_COPY_THREADS: Final = min(4, len(os.sched_getaffinity(0)))
"""Four come close to the bandwidth of a socket; fewer cores than that are not asked for more."""
PARALLEL_BYTES: Final = 8 << 20
"""Fewer bytes than this are copied by the calling thread alone: waking helpers costs about 0.1 ms."""
GROUP_BYTES: Final = 64 << 20
"""Bytes that are copied between two looks at the session."""

Job: TypeAlias = tuple[int, list[tuple[Bytes1D, Bytes1D]]]
"""A number that stands for a block, and its (target, source) pairs."""


class Copier:
    """Copies for all calls of one client. Thread-safe.

    Args:
        threads: threads that copy for one call, the caller's own included.
    """

    def __init__(self, threads: int = DEFAULT_COPY_THREADS) -> None:
        if not 1 <= threads <= MAX_COPY_THREADS:
            raise ValueError(f"copy_threads is {threads}; it lies between 1 and {MAX_COPY_THREADS}")
        self._threads = threads
        self._idle = threading.Semaphore(threads - 1)
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    def run(self, jobs: Sequence[Job], size_bytes: int, deadline: Deadline) -> list[int]:
        """Copy.

        Args:
            jobs: what to copy.
            size_bytes: bytes in all.
            deadline: past it no further block is begun.

        Returns:
            Numbers of the blocks that were copied whole, in the order of ``jobs``.
        """
        helpers = 0
        if size_bytes >= PARALLEL_BYTES:
            # A helper that is busy with another call would only make this one wait.
            while helpers < min(self._threads, len(jobs)) - 1 and self._idle.acquire(blocking=False):
                helpers += 1
        if not helpers:
            return [jobs[i][0] for i in _copy(jobs, range(len(jobs)), deadline)]
        left = iter(range(len(jobs)))  # one for all: each of them takes the next number (atomic under the GIL)
        futures = [self._hand_over(jobs, left, deadline) for _ in range(helpers)]
        try:
            done = _copy(jobs, left, deadline)
        except BaseException:
            deadline.cancel()
            raise
        finally:
            _join([f for f in futures if f is not None])
        for future in futures:
            if future is not None:
                done += future.result()
        return [jobs[i][0] for i in sorted(done)]

    def _hand_over(self, jobs: Sequence[Job], left: Iterable[int], deadline: Deadline) -> Future[list[int]] | None:
        """Have a helper join in; None when the client is closed."""
        with self._lock:
            if self._closed:
                self._idle.release()
                return None
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="kvtierd-client-copy")
            return self._executor.submit(self._help, jobs, left, deadline)

    def _help(self, jobs: Sequence[Job], left: Iterable[int], deadline: Deadline) -> list[int]:
        try:
            return _copy(jobs, left, deadline)
        finally:
            self._idle.release()

    def close(self) -> None:
        """End the helpers, after what they are copying. Idempotent."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


def _copy(jobs: Sequence[Job], left: Iterable[int], deadline: Deadline) -> list[int]:
    """Copy the jobs of these numbers. Returns the numbers of those that were copied."""
    done: list[int] = []
    for number in left:
        if deadline.passed:
            break
        for target, source in jobs[number][1]:
            np.copyto(target, source)  # lets other threads run meanwhile
        done.append(number)
    return done


def _join(futures: Sequence[Future[list[int]]]) -> None:
    """Wait for helpers through interrupts: they use the caller's memory."""
    while not all(f.done() for f in futures):
        with contextlib.suppress(KeyboardInterrupt):
            wait(futures)
