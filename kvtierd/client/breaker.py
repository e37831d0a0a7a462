"""A circuit breaker, pure: the clock and the jitter are passed in.

``CLOSED``: calls may go. ``OPEN``: they may not; the caller answers "no cache" at once. ``HALF_OPEN``: one trial is under
way, and its end decides.

::

    CLOSED --threshold failures in a row, or trip()--> OPEN --begin_trial() once retry_at has come--> HALF_OPEN
    HALF_OPEN --success--> CLOSED          HALF_OPEN --failure--> OPEN, with twice the back-off up to its maximum

Only ``success`` resets the back-off. Not thread-safe: its owner holds a lock.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum
from typing import Final

FAILURE_THRESHOLD: Final = 3
"""Failures in a row that open the circuit."""
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 5.0


class BreakerState(Enum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Decides whether a call may go and when the next trial is due.

    Args:
        threshold: failures in a row that open the circuit.
        backoff_min_s: first back-off.
        backoff_max_s: longest back-off.
        jitter: returns a number in [0, 1); the wait is the back-off times 0.5 to 1, so that clients do not come back in step.
    """

    def __init__(
        self,
        *,
        threshold: int = FAILURE_THRESHOLD,
        backoff_min_s: float = BACKOFF_MIN_S,
        backoff_max_s: float = BACKOFF_MAX_S,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        if threshold < 1 or not 0 < backoff_min_s <= backoff_max_s:
            raise ValueError("threshold is at least 1 and 0 < backoff_min_s <= backoff_max_s")
        self._threshold = threshold
        self._backoff_min_s = backoff_min_s
        self._backoff_max_s = backoff_max_s
        self._jitter = jitter
        self._backoff_s = backoff_min_s
        self._failures = 0
        self._retry_at = 0.0
        self.state = BreakerState.CLOSED

    @property
    def admits(self) -> bool:
        """True when calls may go."""
        return self.state is BreakerState.CLOSED

    @property
    def retry_at(self) -> float | None:
        """When the next trial is due, on the caller's clock in seconds; None unless the circuit is open."""
        return self._retry_at if self.state is BreakerState.OPEN else None

    def success(self) -> None:
        """A call or trial was answered. A late answer to an ordinary call closes an open circuit too: the peer lives."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._backoff_s = self._backoff_min_s

    def failure(self, now: float) -> None:
        """A call or trial was not answered in time.

        Failures of calls that were already under way when the circuit opened change nothing.
        """
        if self.state is BreakerState.HALF_OPEN:
            self._open(now)
        elif self.state is BreakerState.CLOSED:
            self._failures += 1
            if self._failures >= self._threshold:
                self._open(now)

    def trip(self, now: float) -> None:
        """The peer is gone: open at once."""
        if self.state is not BreakerState.OPEN:
            self._open(now)

    def begin_trial(self, now: float) -> bool:
        """Begin the one trial if it is due. Mutates: at most one caller gets True until the trial ends."""
        if self.state is not BreakerState.OPEN or now < self._retry_at:
            return False
        self.state = BreakerState.HALF_OPEN
        return True

    def _open(self, now: float) -> None:
        self.state = BreakerState.OPEN
        self._failures = 0
        self._retry_at = now + self._backoff_s * (0.5 + 0.5 * self._jitter())
        self._backoff_s = min(self._backoff_s * 2, self._backoff_max_s)
