"""Deadlines that another thread can bring forward."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import Any, Final

WAKE: Final = object()
"""Put into the queue that a thread waits on, so that it looks at its deadline again."""


class Deadline:
    """A point in time up to which one operation of one thread may wait.

    ``cancel`` (any thread) brings it forward to now and wakes the operation. An operation waits on one queue at a time.

    Args:
        seconds: from now.
    """

    __slots__ = ("_at", "_waiting", "cancelled")

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._waiting: SimpleQueue[Any] | None = None
        self.cancelled = False

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 when it has passed or was cancelled."""
        return 0.0 if self.cancelled else max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        """True when it has passed or was cancelled."""
        return self.cancelled or time.monotonic() >= self._at

    def cancel(self) -> None:
        """End the operation's waiting now. Thread-safe."""
        # The order matters: take() announces its queue before it looks at the flag.
        self.cancelled = True
        waiting = self._waiting
        if waiting is not None:
            waiting.put(WAKE)

    def take(self, queue: SimpleQueue[Any]) -> Any:
        """Take the next item of a queue.

        Raises:
            queue.Empty: nothing came in time.
        """
        self._waiting = queue
        try:
            while (item := queue.get(timeout=self.remaining_s)) is WAKE:
                pass
            return item
        finally:
            self._waiting = None

    def sleep(self, seconds: float) -> None:
        """Wait that long, or up to the deadline if that comes first."""
        queue: SimpleQueue[Any] = SimpleQueue()
        self._waiting = queue
        try:
            queue.get(timeout=min(seconds, self.remaining_s))
        except Empty:
            return
        finally:
            self._waiting = None
