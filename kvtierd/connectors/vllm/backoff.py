"""Pauses between attempts that fail one after the other."""

from __future__ import annotations


class Backoff:
    """After some failures in a row a pause, and after each further failure one twice as long. A success ends it all.

    The clock is an argument. Not thread-safe: its owner holds a lock, or has one thread.

    Args:
        threshold: failures in a row that begin the first pause.
        first_s: length of the first pause.
        longest_s: pauses grow no longer than this.
    """

    def __init__(self, threshold: int, first_s: float, longest_s: float) -> None:
        self._threshold = threshold
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s
        self._failures = 0
        self._since_s = self._until_s = float("-inf")

    def pausing(self, now: float) -> bool:
        """Whether nothing should be attempted now."""
        return now < self._until_s

    def failed(self, begun_s: float, now: float) -> None:
        """An attempt that began at ``begun_s`` has failed. One that was under way when the last pause began tells nothing new."""
        if begun_s < self._since_s:
            return
        self._failures += 1
        if self._failures >= self._threshold:
            self._since_s, self._until_s = now, now + self._next_s
            self._next_s = min(2 * self._next_s, self._longest_s)

    def succeeded(self) -> None:
        """An attempt went well."""
        self._failures = 0
        self._next_s = self._first_s
        self._since_s = self._until_s = float("-inf")
