"""Refuses calls at once when the daemon cannot keep up, before any work is done for them.

Whatever calls ask for is done in one event loop, so a call waits for all others that are ready. How long that is, is measured all
the time. While it is longer than :data:`BACKLOG_S`, a growing share of the calls that begin something is refused, with a hint how
long to wait, until the rest can be served in that time. Calls that end something (Commit, Release, ...) are always served: they are
what makes room. What a session sends beyond the window of its stream stays with its sender.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from kvtierd.errors import Reason, RequestError

BACKLOG_S: Final = 0.025
"""Longest time that calls may wait for each other for long."""
INTERVAL_S: Final = 0.02
STEP: Final = 0.1
"""How much the share of refused calls changes with each look, at the most."""
RESERVE: Final = 0.5
"""What must have come together before the first call is refused: a burst of a few tenths of a second is served."""
MOST: Final = 0.95
"""Some are always served, or nobody would learn that there is room again."""
HINT_S: Final = (0.1, 1.0)
"""Advice how long to wait, from a little to a lot of overload."""
BEGINNING: Final = frozenset(["lookup", "save", "load", "prefetch", "pin", "savebytes", "loadbytes"])
"""Calls that may be refused."""


class Admission:
    """Whether the daemon takes a call.

    Args:
        max_waiting: calls of all sessions that may wait at one time.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self.waiting = 0
        """Calls inside streams that wait, for NVMe or for room; whoever makes one wait counts it."""
        self._level = -RESERVE
        self._owed = 0.0

    async def watch(self) -> None:
        """Measure for ever. Run it as a supervised task; it ends only by cancellation."""
        while True:
            began_s, worked_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(INTERVAL_S)
            self.note(time.monotonic() - began_s - INTERVAL_S, time.thread_time() - worked_s)

    def note(self, late_s: float, worked_s: float) -> None:
        """Take in one look: how late it came, and how long the loop has computed since the one before.

        One that is late although the loop was idle for a part of the time tells of a machine that was busy or stopped.
        """
        backlog_s = late_s if worked_s >= INTERVAL_S else 0.0
        excess = max(min(backlog_s / BACKLOG_S - 1, 1.0), -1.0)
        self._level = max(min(self._level + STEP * excess, MOST), -RESERVE)

    @property
    def refused_share(self) -> float:
        """Share of calls that is refused, 0 to 1."""
        return max(self._level, 0.0)

    def check(self, kind: str) -> None:
        """Raise RequestError OVERLOADED for a call that is not to be served now. ``kind`` is its name in lower case."""
        share = self.refused_share
        if not share or kind not in BEGINNING:
            return
        self._owed += share
        if self._owed < 1:
            return
        self._owed -= 1
        raise self._overloaded("more calls come than this daemon can serve")

    def check_waiting(self) -> None:
        """Raise RequestError OVERLOADED when no more calls may wait."""
        if self.waiting >= self._max_waiting:
            raise self._overloaded(f"{self._max_waiting} calls are waiting (server.max_concurrent_calls)")

    def _overloaded(self, why: str) -> RequestError:
        least_s, most_s = HINT_S
        hint_s = least_s + (most_s - least_s) * self.refused_share
        return RequestError(Reason.OVERLOADED, f"{why}; retry in {hint_s:.1f} s or go on without", retry_after_s=hint_s)
