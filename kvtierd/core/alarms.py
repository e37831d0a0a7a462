"""Times at which tickets need attention: deadlines of loads and prefetches, expiries of pins."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Alarms:
    """A heap of (time, ticket id). Tickets that ended are passed over as they surface, or dropped in bulk.

    Args:
        is_open: whether a ticket still needs its alarm.
        open_count: tickets that do; the heap stays below twice as many.
    """

    def __init__(self, is_open: Callable[[int], bool], open_count: Callable[[], int]) -> None:
        self._is_open = is_open
        self._open_count = open_count
        self._heap: list[tuple[float, int]] = []

    def set(self, at_s: float, ticket_id: int) -> None:
        """Call for a ticket's attention at a time."""
        if len(self._heap) > 2 * self._open_count() + 64:
            self._heap = [alarm for alarm in self._heap if self._is_open(alarm[1])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at_s, ticket_id))

    def first(self) -> float | None:
        """The next time; None when there is none."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[int]:
        """Take the tickets whose time has come, in order."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            ticket_id = heapq.heappop(self._heap)[1]
            if self._is_open(ticket_id):
                due.append(ticket_id)
        return due
