"""What a replay measured: counted request by request, and written as JSON values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from kvtierd.core.block import fastest
from kvtierd.model import Tier
from kvtierd.replay.trace import Request, ideal_hits

MAX_SAMPLES: Final = 400
MAX_TENANTS: Final = 1000
"""Tenants that are told apart; the rest is counted together."""
OTHERS: Final = "(others)"


@dataclass
class TenantResult:
    """One tenant's part."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0


@dataclass(frozen=True)
class Sample:
    """One moment of a replay."""

    at_s: float
    """Seconds of the trace, scaled."""
    used_blocks: dict[Tier, int]
    hit_ratio: float
    """Of all requests so far."""


@dataclass
class Tally:
    """Counts requests as they arrive."""

    requests: int = 0
    blocks: int = 0
    hits: Counter[Tier] = field(default_factory=Counter)
    """Blocks of the prefix present at arrival, by the fastest tier that had them."""
    tenants: dict[str, TenantResult] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    @property
    def hit_ratio(self) -> float:
        """Hit blocks of all blocks so far."""
        return self.hits.total() / self.blocks if self.blocks else 0.0

    def arrived(self, request: Request, masks: bytes) -> None:
        """Count a request of which a prefix was held on the tiers of ``masks``."""
        self.requests += 1
        self.blocks += len(request.blocks)
        for mask, count in Counter(masks).items():
            self.hits[Tier(fastest(mask))] += count
        name = request.tenant or "default"
        if name not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            name = OTHERS
        tenant = self.tenants.setdefault(name, TenantResult())
        tenant.requests += 1
        tenant.blocks += len(request.blocks)
        tenant.hit_blocks += len(masks)

    def sample(self, at_s: float, used_blocks: dict[Tier, int]) -> None:
        """Remember a moment."""
        self.samples.append(Sample(at_s, used_blocks, self.hit_ratio))


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def figures(requests: list[Request], tally: Tally, tiers: list[Tier], parameters: dict[str, Any]) -> dict[str, Any]:
    """What every replay reports, as JSON values. Ratios are hit blocks of all blocks of all requests, to four digits.

    ``trace_seconds`` is when the last request arrives, as scaled by ``parameters["time_scale"]``; what it has begun may go on.
    """
    seen, asked = ideal_hits(requests)
    return {
        "parameters": parameters,
        "requests": tally.requests,
        "blocks": tally.blocks,
        "distinct_blocks": len({(r.tenant, b) for r in requests for b in r.blocks}),
        "hit_blocks": tally.hits.total(),
        "prefix_hit_ratio": _ratio(tally.hits.total(), tally.blocks),
        "ideal_prefix_hit_ratio": _ratio(seen, asked),
        "trace_seconds": round(max(r.at_s for r in requests) * parameters["time_scale"], 3),
        "hit_ratio_by_tier": {t.name.lower(): _ratio(tally.hits[t], tally.blocks) for t in tiers},
        "tenants": {
            name: {
                "requests": t.requests,
                "blocks": t.blocks,
                "hit_blocks": t.hit_blocks,
                "prefix_hit_ratio": _ratio(t.hit_blocks, t.blocks),
            }
            for name, t in tally.tenants.items()
        },
        "samples": [
            {
                "at_s": round(s.at_s, 3),
                "used_blocks": {t.name.lower(): n for t, n in s.used_blocks.items()},
                "prefix_hit_ratio": round(s.hit_ratio, 4),
            }
            for s in tally.samples
        ],
    }
