"""Who gives way to whom on a full tier. Everything here is O(1), or O(tenants above their share), of which there are few.

*Share*: ``fair_share`` of a tier (or a premium tenant's reserve, where that is more). A tenant may use all of a tier that nobody
else wants. Once there is no free room, one that is above its share (or basic) takes room only from itself and from idle tenants,
and one that is within its share takes it first from those that are above theirs, the furthest first.

*Wanting*: a tenant that was refused room, or had to evict something of its own for it, and has not grown since. What becomes free
meanwhile is not for those with a weaker claim: room that is made for one would be taken by whoever asks most often.

*Idle*: no load, save or prefetch for ``WANT_S``. A tenant that only ever finds its blocks keeps them just as one that
asks for more does.

*Reserve*: of a premium tenant. Copies within it go for nobody else. Others may use what of it is idle; as soon as the owner asks,
anybody who is not protected himself gives way, whatever the age of his copies.

*Basic*: goes first for all others, whatever the age of its copies.
"""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Final

from kvtierd.core.limits import TenantClass
from kvtierd.core.realm import Tenant
from kvtierd.core.settings import CoreConfig
from kvtierd.model import Tier

NOTHING_MORE: Final = 1 << 62
"""Bytes that nobody holds."""
MAX_BASIC: Final = 4
"""Basic tenants that are looked at for one that can give something up."""
WANT_S: Final = 60.0
"""A tenant that asked for nothing for so long is idle."""


class Claim(Enum):
    """By what right a tenant asks for room on a full tier."""

    RESERVED = "reserved"
    """Within its reserve: all who are not protected give way."""
    WITHIN = "within"
    """Within its share: those above theirs give way, then the oldest."""
    CONFINED = "confined"
    """Above its share, or basic: only itself and idle tenants give way."""


STRONGER: Final = {Claim.RESERVED: (), Claim.WITHIN: (Claim.RESERVED,), Claim.CONFINED: (Claim.RESERVED, Claim.WITHIN)}
"""Claims that come before each."""


class Shares:
    """Shares of all tiers, and who is above them."""

    def __init__(self, config: CoreConfig) -> None:
        self._share_bytes = tuple(int(config.fair_share * capacity) for capacity in config.capacity_bytes)
        self._above: tuple[dict[Tenant, None], ...] = ({}, {}, {})
        """By tier: tenants that were above their share when they last grew."""
        self._basic: tuple[dict[Tenant, None], ...] = ({}, {}, {})
        """By tier: basic tenants that hold something, or held it lately."""
        self._wanting: tuple[dict[Claim, dict[Tenant, float]], ...] = tuple({c: {} for c in Claim} for _ in Tier)
        """By tier and claim: who has been waiting for room since when, the latest last; none that is CONFINED."""
        self._reserved: tuple[set[Tenant], ...] = (set(), set(), set())
        """By tier: tenants that have a reserve."""

    def share_bytes(self, tenant: Tenant, tier: Tier) -> int:
        """A tenant's share of a tier when others want the rest."""
        return max(self._share_bytes[tier], tenant.limits.reserve_bytes[tier])

    def _listen(self, tenant: Tenant, tier: Tier) -> None:
        """Hear of a tenant's growth from where it matters on."""
        basic = tenant.limits.tenant_class is TenantClass.BASIC
        tenant.notable_bytes[tier] = -1 if basic else tenant.limits.reserve_bytes[tier] or self.share_bytes(tenant, tier)

    def limited(self, tenant: Tenant) -> None:
        """A tenant is new, or its limits have changed."""
        for tier in Tier:
            self._listen(tenant, tier)
            self._basic[tier].pop(tenant, None)
            self._above[tier].pop(tenant, None)
            self._reserved[tier].discard(tenant)
            if tenant.limits.reserve_bytes[tier]:
                self._reserved[tier].add(tenant)
            if tenant.used_bytes[tier]:
                self.grew(tenant, tier)

    def grew(self, tenant: Tenant, tier: Tier) -> None:
        """A tenant holds more than its ``notable_bytes`` of a tier."""
        limits = tenant.limits
        is_above = tenant.used_bytes[tier] > self.share_bytes(tenant, tier)
        is_basic = limits.tenant_class is TenantClass.BASIC
        if is_above:
            self._above[tier][tenant] = None
        if is_basic:
            self._basic[tier][tenant] = None
        if is_above and not limits.reserve_bytes[tier]:
            tenant.notable_bytes[tier] = NOTHING_MORE  # it is known wherever it has to be

    def claim(self, tenant: Tenant, tier: Tier, need_bytes: int) -> Claim:
        """By what right a tenant asks for so much more."""
        used = tenant.used_bytes[tier] + need_bytes
        if used <= tenant.limits.reserve_bytes[tier]:
            return Claim.RESERVED
        if tenant.limits.tenant_class is TenantClass.BASIC or used > self.share_bytes(tenant, tier):
            return Claim.CONFINED
        return Claim.WITHIN

    def wants(self, now: float, tenant: Tenant, tier: Tier, claim: Claim) -> None:
        """A tenant asks for room that is not there."""
        assert claim is not Claim.CONFINED, "nobody has to wait for those"
        self.has_grown(tenant, tier)
        self._wanting[tier][claim][tenant] = now

    def has_grown(self, tenant: Tenant, tier: Tier) -> None:
        """A tenant has got new room."""
        for waiting in self._wanting[tier].values():
            if tenant in waiting:
                del waiting[tenant]

    def may_grow(self, now: float, tenant: Tenant, tier: Tier, claim: Claim) -> bool:
        """False while free room is for another tenant, whose claim is stronger."""
        for stronger in STRONGER[claim]:
            waiting = self._wanting[tier][stronger]
            if not waiting:
                continue
            latest = next((other for other in reversed(waiting) if other is not tenant), None)
            if latest is not None:
                if waiting[latest] >= now - WANT_S:
                    return False
                waiting.clear()  # it was the latest, so the others have been silent for longer
        return True

    def furthest_above(self, tier: Tier, but: Tenant) -> Tenant | None:
        """The tenant that is furthest above its share of a tier, other than ``but``. Forgets those that are not any more."""
        found, most = None, 0
        for tenant in list(self._above[tier]):
            over = tenant.used_bytes[tier] - self.share_bytes(tenant, tier)
            if over <= 0:
                del self._above[tier][tenant]
                self._listen(tenant, tier)
            elif over > most and tenant is not but:
                found, most = tenant, over
        return found

    def basic(self, tier: Tier) -> list[Tenant]:
        """Some basic tenants that hold something on a tier, of those who came first. Forgets those that do not any more."""
        found: list[Tenant] = []
        if not self._basic[tier]:
            return found
        for tenant in list(itertools.islice(self._basic[tier], 2 * MAX_BASIC)):
            if not tenant.used_bytes[tier]:
                del self._basic[tier][tenant]
                self._listen(tenant, tier)
            elif len(found) < MAX_BASIC:
                found.append(tenant)
        return found

    def gone(self, tenant: Tenant) -> None:
        """A tenant is forgotten."""
        for tier in Tier:
            self._above[tier].pop(tenant, None)
            self._basic[tier].pop(tenant, None)
            self._reserved[tier].discard(tenant)
            self.has_grown(tenant, tier)

    def has_reserve(self, tier: Tier) -> bool:
        """True when any tenant that has been seen has a reserve on a tier."""
        return bool(self._reserved[tier])

    @staticmethod
    def is_idle(tenant: Tenant, now: float) -> bool:
        """True when a tenant has asked for nothing lately."""
        return tenant.used_at_s < now - WANT_S

    @staticmethod
    def keeps(tenant: Tenant, tier: Tier, size_bytes: int) -> bool:
        """True when so much of a tenant's must not go for others, as it would leave less than its reserve."""
        reserve = tenant.limits.reserve_bytes[tier]
        return reserve > 0 and tenant.used_bytes[tier] - size_bytes < reserve

    def check(self, tenants: list[Tenant]) -> None:
        """Assert that everybody who must be known is."""
        for tenant in tenants:
            for tier in Tier:
                if tenant.used_bytes[tier] > self.share_bytes(tenant, tier):
                    assert tenant in self._above[tier]
                if tenant.used_bytes[tier] and tenant.limits.tenant_class is TenantClass.BASIC:
                    assert tenant in self._basic[tier]
                assert not tenant.limits.reserve_bytes[tier] or tenant.limits.tenant_class is TenantClass.PREMIUM
        known = set(tenants)
        assert all(tenant in known for listed in (*self._above, *self._basic) for tenant in listed)
