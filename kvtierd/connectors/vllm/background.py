"""Threads for what must not be waited for on the engine's own thread: calls to the daemon and copies."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

MAX_QUEUED: Final = 4096

log = logging.getLogger("vllm.kvtierd")


class Background:
    """A few daemon threads and one bounded queue. Thread-safe, but for ``submit`` and ``close``, which are one thread's.

    Args:
        threads: how many at most; one is there from the start, others when all are busy.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._closed = False
        self._limit, self._name = threads, name
        self._lock = threading.Lock()
        self._open = 0
        """Under the lock: tasks that were submitted and have not ended."""
        self._threads: list[threading.Thread] = []
        self._grow()

    def _grow(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def submit(self, task: Callable[[], None]) -> bool:
        """Run ``task`` soon, after those before it. False when there is no room or the threads have ended: it will not run."""
        if self._closed:
            return False
        try:
            self._queue.put_nowait(task)
        except queue.Full:
            return False
        with self._lock:
            self._open += 1
            busy = self._open > len(self._threads)
        if busy and len(self._threads) < self._limit:
            with contextlib.suppress(RuntimeError):  # the system has no more threads: those that are there do it
                self._grow()
        return True

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("a background task of the kvtierd connector failed")
            finally:
                with self._lock:
                    self._open -= 1

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the threads after what is queued, or give up after ``timeout_s``. Returns whether all have ended. Idempotent."""
        until_s = time.monotonic() + timeout_s
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                try:
                    self._queue.put(None, timeout=max(0.0, until_s - time.monotonic()))
                except queue.Full:
                    break  # daemon threads: they end with the process
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
