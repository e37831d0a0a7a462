"""What one tenant may use: quotas, reserves, class, lives on each tier, scope, and its part of the write budget."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtierd.model import Tier

NEVER: Final = float("inf")
"""A TTL of a tenant's own that never runs out, whatever the tier's is."""
Triple = tuple[int, int, int]


class TenantClass(StrEnum):
    """Who gives way to whom when a tier is full."""

    PREMIUM = "premium"
    """May have a reserve, which others may borrow while it is idle and never take."""
    STANDARD = "standard"
    BASIC = "basic"
    """Not in HBM; the first to be written down, and the first to go for others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one tenant, by tier (HBM, CPU, NVMe) where there are three."""

    quota_bytes: tuple[int | None, int | None, int | None] = (None, None, None)
    """Most bytes; None for no limit, 0 for nothing at all."""
    reserve_bytes: Triple = (0, 0, 0)
    """Bytes that others never take; above 0 for PREMIUM only."""
    ttl_s: tuple[float | None, float | None, float | None] = (None, None, None)
    """Idle time on each tier; None means the tier's own, NEVER none at all."""
    tenant_class: TenantClass = TenantClass.STANDARD
    shared: bool = False
    """True for the scope "shared": what it saves from now on is found by all tenants that have it."""
    write_budget_share: float = 1.0
    """Most of the daily write budget that it may use, 0 to 1."""

    def quota(self, tier: Tier) -> int | None:
        """Quota on a tier in bytes; None for no limit. A basic tenant has none of HBM."""
        if tier is Tier.HBM and self.tenant_class is TenantClass.BASIC:
            return 0
        return self.quota_bytes[tier]


NO_LIMITS: Final = Limits()
"""Those of a tenant of whom nothing is said."""
