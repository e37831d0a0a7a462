"""What the core tells about itself: plain figures, read by status and metrics. Reading changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtierd.model import Tier


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
    quota_bytes: tuple[int, int, int]
    """By tier; 0 means none."""
    hits: tuple[int, int, int]
    """Blocks that loads found, by the tier they were found on."""
    misses: int


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
