"""Whose turn it is: what may go down from which tier now, and which realm gives something up first."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from kvtierd.core.block import Copy
from kvtierd.core.order import Order
from kvtierd.core.realm import Realm, TailHeap, Tenant
from kvtierd.core.settings import CoreConfig
from kvtierd.model import Tier


class Turns:
    """Tiers, TTLs and pauses, and the realms in order of age, each found in O(log realms)."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self.tiers = tuple(t for t in Tier if config.capacity_bytes[t] > 0)
        self._lower = tuple(next((t for t in self.tiers if t > tier), None) for tier in Tier)
        self.suspended: dict[Tier, tuple[float, str]] = {}
        """Tiers whose device has just refused a write: until when, and why."""
        self.paused: dict[Realm, float] = {}
        """Realms for which there was no room below, until when; the earliest first."""
        self.dirty = tuple(TailHeap(self._dirty_place(t)) for t in Tier)
        """By tier: realms by their oldest copy that can be written down."""
        self.ttl = tuple(TailHeap(self._ttl_place(t)) for t in Tier)
        """By tier: realms by the end of their next TTL."""
        self.nvme: dict[tuple[int, ...], TailHeap] = {}
        """By slot sizes: realms by the last use of their oldest copy."""
        self._quota: dict[tuple[str, Tier], tuple[TailHeap, TailHeap]] = {}
        """By tenant and tier, where there is a quota: realms by their oldest copy that is spare, and that is not."""

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
        own = realm.tenant.ttl_s[tier]
        return self._config.ttl_s[tier] if own is None else own

    def fits_below(self, realm: Realm, tier: Tier) -> bool:
        """True when the next lower tier could ever take a block of the realm."""
        lower = self._lower[tier]
        if lower is None:
            return False
        need = realm.tier_bytes[lower]
        quota = realm.tenant.quota_bytes[lower]
        return need <= self._config.capacity_bytes[lower] and (not quota or need <= quota)

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

    def _dirty_place(self, tier: Tier) -> Callable[[Realm], float | None]:
        def place(realm: Realm) -> float | None:
            order = realm.orders[tier]
            can_go = realm.writable and realm not in self.paused and self.fits_below(realm, tier)
            return _rank_s(order, order.oldest_dirty()) if can_go else None

        return place

    def changed(self, realm: Realm, tier: Tier) -> None:
        """Note that a realm's tail on a tier may come earlier than known."""
        self.dirty[tier].push(realm)
        self.ttl[tier].push(realm)
        if tier is Tier.NVME:
            self.on_nvme(realm).push(realm)
        if realm.tenant.quota_bytes[tier]:
            for heap in self.within_quota(realm.tenant, tier):
                heap.push(realm)

    def within_quota(self, tenant: Tenant, tier: Tier) -> tuple[TailHeap, TailHeap]:
        """A tenant's realms by their oldest copy that is spare, and by their oldest that is not."""
        heaps = self._quota.get((tenant.name, tier))
        if heaps is None:
            spare = TailHeap(lambda r: _rank_s(r.orders[tier], r.orders[tier].oldest_spare()))
            dirty = TailHeap(lambda r: _rank_s(r.orders[tier], r.orders[tier].oldest_dirty()))
            heaps = self._quota[(tenant.name, tier)] = spare, dirty
        return heaps

    def on_nvme(self, realm: Realm) -> TailHeap:
        """Realms whose NVMe slots have the sizes of this realm's, oldest tail first."""
        heap = self.nvme.get(realm.nvme_slot_bytes)
        if heap is None:
            heap = self.nvme[realm.nvme_slot_bytes] = TailHeap(lambda r: r.oldest_s(Tier.NVME))
        return heap

    def drop(self, realm: Realm) -> None:
        """Take a realm that is forgotten out of every order."""
        self.paused.pop(realm, None)
        owned = [heap for (name, _), pair in self._quota.items() if name == realm.tenant.name for heap in pair]
        for heap in (*self.dirty, *self.ttl, *self.nvme.values(), *owned):
            heap.drop(realm)


def _rank_s(order: Order, copy: Copy | None) -> float | None:
    return None if copy is None else order.rank_s(copy)
