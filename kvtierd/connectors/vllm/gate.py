"""Whether a hit is worth loading: how long it takes to load against how long it takes to compute again, both as measured."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

WEIGHT: Final = 0.2
"""Share of a new measurement in the running mean."""
MIN_STEP_TOKENS: Final = 256
"""Steps with fewer tokens say nothing about the speed of prefill."""
MIN_LOAD_BYTES: Final = 1 << 20
MAX_OPEN_STEPS: Final = 64


class Steps:
    """How long engine steps take, where several may be under way: one begins only when the one before it has ended.

    The clock is an argument. A step is named by a number that travels with it.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._next = 1
        self._last_end_s = 0.0

    def begin(self, tokens: int, now: float) -> int:
        """A step of this many tokens is handed out. Returns its number; 0 when it is too small to measure."""
        if tokens < MIN_STEP_TOKENS:
            return 0
        number, self._next = self._next, self._next + 1
        self._open[number] = tokens, now
        while len(self._open) > MAX_OPEN_STEPS:
            self._open.popitem(last=False)
        return number

    def end(self, number: int, now: float) -> tuple[int, float]:
        """A step has ended; 0 stands for one that is not measured. Returns its tokens and seconds; 0 tokens when not known."""
        tokens, begun_s = self._open.pop(number, (0, now))
        seconds = now - max(begun_s, self._last_end_s)
        self._last_end_s = now
        return tokens, seconds


class Gate:
    """Running means of two speeds. Until both are measured every hit is worth loading.

    Attributes:
        prefill_tokens_per_s: measured speed of prefill; 0 while unknown.
        load_bytes_per_s: measured speed of loads; 0 while unknown.
        load_overhead_s: measured time of a load from its promise to its end, beyond the copy.
    """

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.load_bytes_per_s = 0.0
        self.load_overhead_s = 0.0

    def step(self, tokens: int, seconds: float) -> None:
        """An engine step took this long for this many tokens."""
        if tokens >= MIN_STEP_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, tokens / seconds)

    def load(self, nbytes: int, copy_s: float, whole_s: float) -> None:
        """A load copied this many bytes in ``copy_s``; it took ``whole_s`` from promise to end."""
        if nbytes >= MIN_LOAD_BYTES and copy_s > 0:
            self.load_bytes_per_s = _mean(self.load_bytes_per_s, nbytes / copy_s)
        self.load_overhead_s = _mean(self.load_overhead_s, max(0.0, whole_s - copy_s))

    def recompute_s(self, tokens: int) -> float:
        """Seconds that computing this many tokens takes; 0 while unknown."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0

    def worth(self, tokens: int, nbytes: int) -> bool:
        """Whether loading is expected to be faster than computing."""
        if not self.prefill_tokens_per_s or not self.load_bytes_per_s:
            return True
        return nbytes / self.load_bytes_per_s + self.load_overhead_s < self.recompute_s(tokens)


def _mean(old: float, new: float) -> float:
    return new if not old else old + WEIGHT * (new - old)
