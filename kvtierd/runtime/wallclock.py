"""Expiries on two clocks: the core counts on a monotonic one, and what must hold over a restart is wall-clock time.

Times are translated when they are written or read, so a step of the wall clock while the daemon runs moves nothing in memory. It
does move what was written before: after a restart those blocks expire earlier or later by the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class WallClock:
    """Translates between the core's clock and the wall's. ``NO_END`` stays what it is.

    Args:
        now: the core's clock, in seconds.
        wall: seconds since 1970.
    """

    def __init__(self, now: Callable[[], float], wall: Callable[[], float] = time.time) -> None:
        self.now = now
        self._wall = wall

    def on_wall(self, at_s: float) -> float:
        """Seconds since 1970 of a time of the core's clock. Callable from any thread."""
        return at_s + (self._wall() - self.now())

    def on_core(self, wall_s: float) -> float:
        """The time of the core's clock at these seconds since 1970."""
        return wall_s - (self._wall() - self.now())
