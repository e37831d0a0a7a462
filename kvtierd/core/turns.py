"""Whose turn it is: what may go down from which tier now, and which realm gives something up first."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kvtierd.core.block import Copy
from kvtierd.core.limits import NEVER, TenantClass
from kvtierd.core.order import Order
from kvtierd.core.realm import Realm, TailHeap, Tenant
from kvtierd.core.settings import CoreConfig
from kvtierd.core.shares import Shares
from kvtierd.model import Tier


class Turns:
    """Tiers, TTLs and pauses, and the realms in order of age, each found in O(log realms)."""

    def __init__(self, config: CoreConfig, shares: Shares) -> None:
        self._config = config
        self._shares = shares
        self.tiers = tuple(t for t in Tier if config.capacity_bytes[t] > 0)
        self._lower = tuple(next((t for t in self.tiers if t > tier), None) for tier in Tier)
        self.suspended: dict[Tier, tuple[float, str]] = {}
        """Tiers whose device has just refused a write: until when, and why."""
        self.paused: dict[Realm, float] = {}
        """Realms for which there was no room below, until when; the earliest first."""
        self.dirty = tuple(TailHeap(self._dirty_place(t, basic=False)) for t in Tier)
        """By tier: realms by their oldest copy that can be written down."""
        self.basic_dirty = tuple(TailHeap(self._dirty_place(t, basic=True)) for t in Tier)
        """The same of basic tenants, who come first."""
        self.ttl = tuple(TailHeap(self._ttl_place(t)) for t in Tier)
        """By tier: realms by the end of their next TTL."""
        self.nvme: dict[tuple[tuple[int, ...], bool], TailHeap] = {}
        """By slot sizes: realms by the last use of their oldest copy, but for those whose tenants keep them; and the basic ones."""

    # ---- what may go down

    def lower(self, tier: Tier) -> Tier | None:
        """The next lower tier that exists."""
        return self._lower[tier]

    def ttl_s(self, realm: Realm, tier: Tier) -> float | None:
        """Idle time after which a realm's copies leave a tier; None when they stay.

        Memory tiers have a TTL only where a lower tier takes the block: a TTL moves a block down, it does not lose it.
        """
        if tier is not Tier.NVME and not (realm.writable and self.fits_below(realm, tier)):
            return None
        own = realm.tenant.limits.ttl_s[tier]
        if own == NEVER:
            return None
        return self._config.ttl_s[tier] if own is None else own

    def fits_below(self, realm: Realm, tier: Tier) -> bool:
        """True when the next lower tier could ever take a block of the realm."""
        lower = self._lower[tier]
        if lower is None:
            return False
        need = realm.tier_bytes[lower]
        quota = realm.tenant.limits.quota(lower)
        return need <= self._config.capacity_bytes[lower] and (quota is None or need <= quota)

    def takes_writes(self, tier: Tier | None, now: float) -> bool:
        """True when a tier exists and its device has not just refused a write."""
        return tier is not None and now >= self.suspended.get(tier, (0.0, ""))[0]

    def can_demote(self, realm: Realm, tier: Tier, now: float) -> bool:
        """True when a copy may be written down from a tier at present."""
        can_go = realm.writable and realm not in self.paused and self.fits_below(realm, tier)
        return can_go and self.takes_writes(self._lower[tier], now)

    def pause(self, now: float, realm: Realm) -> None:
        """Write nothing of a realm down for a while: there is no room for it. Others go on."""
        self.paused.pop(realm, None)
        self.paused[realm] = now + self._config.retry_s

    def end_pauses(self, now: float) -> None:
        """Go on with what was paused long enough."""
        for tier, (until, _) in list(self.suspended.items()):
            if now >= until:
                del self.suspended[tier]
        while self.paused:
            realm, until = next(iter(self.paused.items()))
            if until > now:
                break
            del self.paused[realm]
            for tier in self.tiers:
                self.changed(realm, tier)

    def next_pause_end_s(self) -> list[float]:
        """When pauses end; of the realms' the first."""
        return [until for until, _ in self.suspended.values()] + list(itertools.islice(self.paused.values(), 1))

    # ---- who is first

    def _ttl_place(self, tier: Tier) -> Callable[[Realm], float | None]:
        def place(realm: Realm) -> float | None:
            ttl_s = self.ttl_s(realm, tier) if realm not in self.paused else None
            oldest_s = realm.oldest_s(tier)
            return None if ttl_s is None or oldest_s is None else oldest_s + ttl_s

        return place

    def _dirty_place(self, tier: Tier, *, basic: bool) -> Callable[[Realm], float | None]:
        def place(realm: Realm) -> float | None:
            if (realm.tenant.limits.tenant_class is TenantClass.BASIC) is not basic:
                return None
            order = realm.orders[tier]
            can_go = realm.writable and realm not in self.paused and self.fits_below(realm, tier)
            return _rank_s(order, order.oldest_dirty()) if can_go else None

        return place

    def _nvme_place(self, *, basic: bool) -> Callable[[Realm], float | None]:
        def place(realm: Realm) -> float | None:
            if basic and realm.tenant.limits.tenant_class is not TenantClass.BASIC:
                return None
            kept = self._shares.keeps(realm.tenant, Tier.NVME, realm.tier_bytes[Tier.NVME])
            return None if kept else realm.oldest_s(Tier.NVME)

        return place

    def changed(self, realm: Realm, tier: Tier) -> None:
        """Note that a realm's tail on a tier may come earlier than known."""
        basic = realm.tenant.limits.tenant_class is TenantClass.BASIC
        (self.basic_dirty if basic else self.dirty)[tier].push(realm)
        self.ttl[tier].push(realm)
        if tier is Tier.NVME:
            self.on_nvme(realm).push(realm)
            if basic:
                self.on_nvme(realm, basic=True).push(realm)
        for (of, sizes), heaps in realm.tenant.tails.items():
            if of is tier and sizes in ((), realm.nvme_slot_bytes):
                for heap in heaps:
                    heap.push(realm)

    def limited(self, tenant: Tenant) -> None:
        """A tenant's limits have changed, or its reserve has become less than what it holds: its realms may come earlier."""
        for realm in tenant.realms:
            for tier in self.tiers:
                self.changed(realm, tier)

    def next_dirty(self, tier: Tier) -> Realm | None:
        """Whose oldest copy is written down next: basic tenants' first."""
        first = self.basic_dirty[tier].first() or self.dirty[tier].first()
        return first[1] if first else None

    def tails(self, tenant: Tenant, tier: Tier, sizes: tuple[int, ...] = ()) -> tuple[TailHeap, TailHeap]:
        """A tenant's realms by their oldest copy that is spare, and by their oldest that is not.

        With ``sizes`` only those whose slots on NVMe have these sizes. Made when it is first asked for, and kept from then on.
        """
        heaps = tenant.tails.get((tier, sizes))
        if heaps is None:
            spare = TailHeap(lambda r: _rank_s(r.orders[tier], r.orders[tier].oldest_spare()))
            dirty = TailHeap(lambda r: _rank_s(r.orders[tier], r.orders[tier].oldest_dirty()))
            heaps = tenant.tails[(tier, sizes)] = spare, dirty
            for realm in tenant.realms:
                if sizes in ((), realm.nvme_slot_bytes):
                    spare.push(realm)
                    dirty.push(realm)
        return heaps

    def on_nvme(self, realm: Realm, *, basic: bool = False) -> TailHeap:
        """Realms whose NVMe slots have the sizes of this realm's, oldest tail first; all that may go, or the basic ones."""
        heap = self.nvme.get((realm.nvme_slot_bytes, basic))
        if heap is None:
            heap = self.nvme[(realm.nvme_slot_bytes, basic)] = TailHeap(self._nvme_place(basic=basic))
        return heap

    def drop(self, realm: Realm) -> None:
        """Take a realm that is forgotten out of every order."""
        self.paused.pop(realm, None)
        of_tenant = [heap for pair in realm.tenant.tails.values() for heap in pair]
        for heap in (*self.dirty, *self.basic_dirty, *self.ttl, *self.nvme.values(), *of_tenant):
            heap.drop(realm)


def _rank_s(order: Order, copy: Copy | None) -> float | None:
    return None if copy is None else order.rank_s(copy)
