"""What is not attempted for a while, after it has failed."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final

MAX_FAILED_KEYS: Final = 64


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


class FailedKeys:
    """Keys for which a load has failed. The clock is an argument. Not thread-safe.

    Args:
        seconds: how long each is remembered; of very many, the newest are.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._failed: OrderedDict[bytes, tuple[float, int]] = OrderedDict()

    def add(self, key: bytes, chunk: int, now: float) -> None:
        """Whoever has this key loads only what is before ``chunk``."""
        self._failed[key] = now + self._seconds, chunk
        self._failed.move_to_end(key)
        while len(self._failed) > MAX_FAILED_KEYS:
            self._failed.popitem(last=False)

    def clear(self) -> None:
        """Forget them all."""
        self._failed.clear()

    def limit(self, keys: Mapping[int, Iterable[bytes]], now: float) -> float:
        """Chunks that may be loaded for a request with these keys, given by group; infinity when none of them has failed."""
        while self._failed and next(iter(self._failed.values()))[0] <= now:
            self._failed.popitem(last=False)
        if not self._failed:
            return math.inf
        return min((self._failed[key][1] for some in keys.values() for key in some if key in self._failed), default=math.inf)
