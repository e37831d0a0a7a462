"""What the core tells about itself: plain figures, read by status and metrics. Reading changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtierd.core.block import CopyState
from kvtierd.core.limits import Limits
from kvtierd.core.realm import Realm
from kvtierd.model import Tier


class StoryEvent(NamedTuple):
    """One remembered change of a copy."""

    at_s: float
    key: bytes
    tier: Tier
    start: CopyState
    finish: CopyState
    why: str


class Change(NamedTuple):
    """A copy became readable, or is readable no more."""

    realm: Realm
    key: bytes
    tier: Tier
    readable: bool


@dataclass(slots=True)
class Counts:
    """Running totals since the start; names as in the metrics."""

    evictions: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    moves: Counter[tuple[Tier, Tier, str]] = field(default_factory=Counter)
    """By source, target and result."""
    move_bytes: Counter[tuple[Tier, Tier]] = field(default_factory=Counter)
    demotions: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    """Copies written down from a tier, by why: "ttl", "watermark", "pressure", "extent" or "drain"."""
    saves: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Keys by tenant and outcome."""
    not_admitted: Counter[str] = field(default_factory=Counter)
    """Blocks forgotten because NVMe did not take them, by why."""
    not_in_hbm: Counter[str] = field(default_factory=Counter)
    """Blocks that got slots in CPU memory although their engine can open that of its GPU, by why."""
    failed_commands: Counter[str] = field(default_factory=Counter)
    """Commands that the shell could not run, by the name of their class."""


@dataclass(slots=True)
class Forgotten:
    """Copies that were forgotten, for whoever follows them."""

    evicted: Counter[tuple[str, Tier, str]] = field(default_factory=Counter)
    """By tenant, tier and reason."""
    not_admitted: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Blocks that NVMe did not take, by tenant and why."""


@dataclass(slots=True)
class TierStats:
    """Occupancy of one tier, in bytes and copies."""

    tier: Tier
    capacity_bytes: int
    reserved_bytes: int
    """Bytes of extents that exist; never above the capacity."""
    used_bytes: int
    """Bytes of slots in use."""
    copies: int
    dirty_bytes: int
    """Bytes of readable copies that exist on no lower tier."""
    pinned_bytes: int
    """Bytes of copies with at least one pin."""
    suspended: str = ""
    """Why the tier takes nothing at present; empty when it does."""


@dataclass(slots=True)
class TenantStats:
    """Usage of one tenant."""

    tenant: str
    blocks: int
    used_bytes: tuple[int, int, int]
    """By tier: HBM, CPU, NVMe."""
    limits: Limits
    hits: tuple[int, int, int]
    """Blocks that loads found, by the tier they were found on."""
    misses: int
    evictions: Mapping[tuple[Tier, str], int] = field(default_factory=dict)
    """Copies forgotten, by tier and reason."""

    @property
    def quota_bytes(self) -> tuple[int | None, int | None, int | None]:
        """By tier; None means no limit."""
        return self.limits.quota(Tier.HBM), self.limits.quota(Tier.CPU), self.limits.quota(Tier.NVME)


@dataclass(slots=True)
class StatsSnapshot:
    """All figures at one moment."""

    tiers: list[TierStats]
    tenants: list[TenantStats]
    blocks: int
    sessions: int
    tickets: int
    queue_depth: dict[str, int] = field(default_factory=dict)
    """Moves waiting, by class: load, prefetch, demote."""
    nvme_budget_bytes: int = 0
    """Bytes a day that NVMe may be written; 0 for no limit."""
    nvme_budget_left_bytes: int = 0
    """What is left of them; below 0 when written on credit."""
