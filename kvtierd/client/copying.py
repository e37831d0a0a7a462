"""Copying blocks between the caller's buffers and mapped slots; if asked to, large amounts by several threads.

Helpers pay off only where cores are idle: with every core busy they make a copy slower, so there are none by default. They only
copy: the calling thread waits for all of them, whatever happens, before it says what was copied, so that no slot and no buffer
is given back while a helper still uses it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeAlias

import numpy as np

from kvtierd.client.buffers import Bytes1D
from kvtierd.client.deadline import Deadline

MAX_COPY_THREADS: Final = 64
DEFAULT_COPY_THREADS: Final = 1
PARALLEL_BYTES: Final = 8 << 20
"""Fewer bytes than this are copied by the calling thread alone: waking helpers costs about 0.1 ms."""
GROUP_BYTES: Final = 32 << 20
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
            return _copy(jobs, deadline)
        bounds = [len(jobs) * i // (helpers + 1) for i in range(helpers + 2)]
        chunks = [jobs[a:b] for a, b in itertools.pairwise(bounds)]
        futures = [self._hand_over(chunk, deadline) for chunk in chunks[1:]]
        try:
            done = _copy(chunks[0], deadline)
        except BaseException:
            deadline.cancel()
            raise
        finally:
            _join([f for f in futures if f is not None])
        for chunk, future in zip(chunks[1:], futures, strict=True):
            done += _copy(chunk, deadline) if future is None else future.result()
        return done

    def _hand_over(self, chunk: Sequence[Job], deadline: Deadline) -> Future[list[int]] | None:
        """Give a chunk to a helper; None when the client is closed."""
        with self._lock:
            if self._closed:
                self._idle.release()
                return None
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="kvtierd-client-copy")
            return self._executor.submit(self._help, chunk, deadline)

    def _help(self, chunk: Sequence[Job], deadline: Deadline) -> list[int]:
        try:
            return _copy(chunk, deadline)
        finally:
            self._idle.release()

    def close(self) -> None:
        """End the helpers, after what they are copying. Idempotent."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


def _copy(jobs: Sequence[Job], deadline: Deadline) -> list[int]:
    done: list[int] = []
    for number, pairs in jobs:
        if deadline.passed:
            break
        for target, source in pairs:
            np.copyto(target, source)  # lets other threads run meanwhile
        done.append(number)
    return done


def _join(futures: Sequence[Future[list[int]]]) -> None:
    """Wait for helpers through interrupts: they use the caller's memory."""
    while not all(f.done() for f in futures):
        with contextlib.suppress(KeyboardInterrupt):
            wait(futures)
