"""What is known of a demo while it runs, and what it comes to at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvtierd.demo.content import BLOCK_BYTES, SHAPE
from kvtierd.demo.worker import Outcome
from kvtierd.model import Tier
from kvtierd.replay.trace import Request, ideal_hits

TIERS: Final = (Tier.CPU, Tier.NVME)
MAX_SAMPLES: Final = 4096
"""Past it every second sample is dropped, and from then on only every second one is kept, and so on."""
MAX_EVENTS: Final = 1000
"""Further events are not noted."""
_GB: Final = BLOCK_BYTES / 1e9


@dataclass(frozen=True)
class Sample:
    """The tiers at one moment."""

    at_s: float
    used_bytes: dict[Tier, int]
    dirty_bytes: dict[Tier, int]
    capacity_bytes: dict[Tier, int]


@dataclass
class Progress:
    """All that is known while the demo runs, and at its end.

    Args:
        requests: what is to be replayed.
        clients: number of clients.
    """

    requests: list[Request]
    clients: int
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """(seconds after the begin, what happened)."""
    attached: list[bool] = field(default_factory=list)
    """Whether each client had a session after its last request."""
    killed_at_s: float | None = None
    back_at_s: float | None = None
    recovered_blocks: int = 0
    restarts: int = 0
    cut_short: bool = False
    """True when the time limit ended the replay."""
    failure: str = ""
    took_s: float = 0.0
    _past: dict[str, float] = field(default_factory=dict)
    _now: dict[str, float] = field(default_factory=dict)
    _every: int = 1
    _seen: int = 0

    def __post_init__(self) -> None:
        self.attached = [True] * self.clients

    @property
    def total(self) -> int:
        """Requests to replay."""
        return len(self.requests)

    def say(self, at_s: float, text: str) -> None:
        """Note an event."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((at_s, text))

    def fail(self, why: str) -> None:
        """Note why the run proves nothing; the first reason stays."""
        self.failure = self.failure or why

    def add_sample(self, sample: Sample) -> None:
        """Add a look at the tiers."""
        self._seen += 1
        if self._seen % self._every:
            return
        self.samples.append(sample)
        if len(self.samples) >= MAX_SAMPLES:
            del self.samples[::2]
            self._every *= 2

    def lose_memory(self, at_s: float) -> None:
        """The daemon was killed: what is in memory is gone, what is on NVMe is not."""
        if self.samples:
            last = self.samples[-1]
            used = {tier: used if tier is Tier.NVME else 0 for tier, used in last.used_bytes.items()}
            self.samples.append(Sample(at_s, used, {}, last.capacity_bytes))

    # ---- the daemon's counters, over all its boots

    def set_counters(self, counters: Mapping[str, float]) -> None:
        """Counters of the boot that runs."""
        self._now = dict(counters)

    def end_boot(self) -> None:
        """The daemon has ended: its next boot counts from zero."""
        for name, value in self._now.items():
            self._past[name] = self._past.get(name, 0.0) + value
        self._now = {}

    def counter(self, name: str) -> int:
        """A counter over all boots."""
        return int(self._past.get(name, 0.0) + self._now.get(name, 0.0))

    # ---- sums over the outcomes

    def hits(self, tier: Tier, after_s: float = float("-inf")) -> int:
        """Blocks that were loaded from a tier by requests that began at ``after_s`` or later."""
        return sum(o.hits.get(tier, 0) for o in self.outcomes if o.at_s >= after_s)

    @property
    def asked(self) -> int:
        """Blocks that the replayed requests consist of."""
        return sum(o.asked for o in self.outcomes)

    @property
    def saved_gb(self) -> float:
        """GB that the clients have saved."""
        return sum(o.saved for o in self.outcomes) * _GB

    @property
    def loaded_gb(self) -> float:
        """GB that the clients have loaded."""
        return sum(map(self.hits, TIERS)) * _GB

    @property
    def save_gb_per_s(self) -> float:
        """Speed of one client inside its save calls."""
        return _ratio(self.saved_gb, sum(o.save_s for o in self.outcomes))

    @property
    def load_gb_per_s(self) -> float:
        """Speed of one client inside its load calls, waiting for NVMe included."""
        return _ratio(self.loaded_gb, sum(o.load_s for o in self.outcomes))

    @property
    def wrong_bytes(self) -> int:
        """Bytes that were not what their key holds."""
        return sum(o.wrong_bytes for o in self.outcomes)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def summary(progress: Progress) -> dict[str, Any]:
    """The figures of a run, for JSON and for the table. Ratios are of the blocks that the replayed requests consist of."""
    outcomes = progress.outcomes
    ideal, total = ideal_hits([progress.requests[o.number] for o in sorted(outcomes, key=lambda o: o.number)])
    hits = {tier.name.lower(): progress.hits(tier) for tier in TIERS}
    return {
        "shape": SHAPE,
        "requests": len(outcomes),
        "requests_in_trace": progress.total,
        "blocks_asked": progress.asked,
        "prefix_hit_ratio": _ratio(sum(hits.values()), progress.asked),
        "hit_ratio_by_tier": {name: _ratio(count, progress.asked) for name, count in hits.items()},
        "ideal_prefix_hit_ratio": _ratio(ideal, total),
        "saved_gb": progress.saved_gb,
        "loaded_gb": progress.loaded_gb,
        "save_gb_per_s": progress.save_gb_per_s,
        "load_gb_per_s": progress.load_gb_per_s,
        "demotions": progress.counter("demotions"),
        "promotions": progress.counter("promotions"),
        "evictions": progress.counter("kvtierd_evictions_total"),
        "rejected": sum(o.rejected for o in outcomes),
        "restarts_survived": progress.restarts,
        "recovered_blocks": progress.recovered_blocks,
        "nvme_hits_after_restart": 0 if progress.back_at_s is None else progress.hits(Tier.NVME, progress.back_at_s),
        "wrong_bytes": progress.wrong_bytes,
        "cut_short": progress.cut_short,
        "seconds": progress.took_s,
    }


def verdict(progress: Progress, figures: dict[str, Any], *, kill: bool, nvme: bool) -> str:
    """Empty when the run proves what it should, else why not.

    Args:
        progress: the run.
        figures: its summary.
        kill: the daemon was to be killed half-way.
        nvme: there is an NVMe tier.
    """
    if progress.wrong_bytes:
        return f"{progress.wrong_bytes:,} wrong bytes were loaded"
    if progress.failure:
        return progress.failure
    if len(progress.outcomes) < progress.total and not progress.cut_short:
        return f"only {len(progress.outcomes)} of {progress.total} requests were replayed"
    if kill and not progress.restarts:
        return "the daemon was not restarted"
    if kill and nvme and not figures["nvme_hits_after_restart"]:
        return "nothing was loaded from NVMe after the restart"
    return ""
