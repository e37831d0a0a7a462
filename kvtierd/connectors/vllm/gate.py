"""Whether a hit is worth loading: how long it takes to load against how long it takes to compute again, both as measured."""

from __future__ import annotations

from collections import OrderedDict, deque
from statistics import median
from typing import Final

MEASUREMENTS: Final = 8
"""The last ones of each speed; their median counts."""
ENOUGH: Final = 3
"""Of fewer measurements than these none counts, or the best: what comes first is slowed down by much that comes only once."""
PROBE_EVERY: Final = 16
"""One in this many refused hits is loaded all the same: else what made loads look slow would never be seen to have passed."""
MAX_SESSIONS: Final = 64
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


class Speed:
    """The median of the last measurements.

    Args:
        from_first: whether the best of the first few counts; else the speed is unknown, 0, until there are enough.
    """

    def __init__(self, *, from_first: bool = False) -> None:
        self._last: deque[float] = deque(maxlen=MEASUREMENTS)
        self._from_first = from_first

    def add(self, value: float) -> None:
        """Take in a measurement."""
        self._last.append(value)

    @property
    def value(self) -> float:
        """The median; 0 while unknown."""
        if len(self._last) >= ENOUGH:
            return median(self._last)
        return max(self._last, default=0.0) if self._from_first else 0.0


class Gate:
    """Compares loading with computing. As long as a speed is not known, every hit is worth loading.

    A hit on NVMe that is not loaded costs what it costs to compute it, and one that is loaded in vain much more: so what computing
    and reading take is known from the first step and the first such hit on. A hit in CPU memory is nearly always worth it, and is
    refused only once several were slow.

    Attributes:
        prefill_tokens_per_s: of steps of the engine.
        load_bytes_per_s: of copies into the KV cache, over all ranks.
        load_overhead_s: seconds from a load's job to its end, beyond the copy.
        read_bytes_per_s: at which what is on NVMe only becomes readable.
    """

    def __init__(self) -> None:
        self.prefill_tokens_per_s = Speed(from_first=True)
        self.load_bytes_per_s = Speed()
        self.load_overhead_s = Speed()
        self.read_bytes_per_s = Speed(from_first=True)
        self._sessions: set[bytes] = set()
        self._refused = 0

    def step(self, tokens: int, seconds: float) -> None:
        """An engine step took this long for this many tokens."""
        if tokens >= MIN_STEP_TOKENS and seconds > 0:
            self.prefill_tokens_per_s.add(tokens / seconds)

    def load(self, sessions: set[bytes], nbytes: int, copy_s: float, whole_s: float) -> None:
        """A load out of these sessions copied so many bytes in ``copy_s``; it took ``whole_s`` from its job to its end.

        The first load out of a session is not counted: it joins, maps and pins memory that later ones find ready.
        """
        if not sessions <= self._sessions:
            self._sessions = sessions | (self._sessions if len(self._sessions) < MAX_SESSIONS else set())
            return
        if nbytes >= MIN_LOAD_BYTES and copy_s > 0:
            self.load_bytes_per_s.add(nbytes / copy_s)
        self.load_overhead_s.add(max(0.0, whole_s - copy_s))

    def read(self, nbytes: int, seconds: float) -> None:
        """So many bytes that were on NVMe only were readable after this time."""
        if nbytes >= MIN_LOAD_BYTES and seconds > 0:
            self.read_bytes_per_s.add(nbytes / seconds)

    def recompute_s(self, tokens: int) -> float:
        """Seconds that computing this many tokens takes; 0 while unknown."""
        speed = self.prefill_tokens_per_s.value
        return tokens / speed if speed else 0.0

    def worth(self, tokens: int, nbytes: int) -> bool:
        """Whether a hit in CPU memory is to be loaded: that is expected to be faster than computing it, or is to be measured."""
        speed = self.load_bytes_per_s.value
        return not speed or self._faster(tokens, nbytes / speed + self.load_overhead_s.value)

    def worth_reading(self, tokens: int, stored: int, nbytes: int) -> bool:
        """As ``worth``, for what is on NVMe only: ``stored`` bytes have to be read first."""
        speed, reading = self.load_bytes_per_s.value, self.read_bytes_per_s.value
        if not reading:
            return True
        return self._faster(tokens, stored / reading + (nbytes / speed if speed else 0.0) + self.load_overhead_s.value)

    def _faster(self, tokens: int, load_s: float) -> bool:
        recompute_s = self.recompute_s(tokens)
        if not recompute_s or load_s < recompute_s:
            return True
        self._refused += 1
        return self._refused % PROBE_EVERY == 0
