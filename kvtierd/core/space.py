"""Making room: which slots a new copy gets, and who has to go for them.

Order of preference on a tier: a free slot; a new extent; an extent of another group that is empty; then by age, either the
own least recently used copy that also exists below, or a whole extent of another group when all of it is older than that.
A copy that exists nowhere else is only taken when it cannot be written down (no lower tier, or the device refuses writes):
otherwise it is written down first and the caller is told to come back.

A copy that is written down never replaces one that is as new or newer and still has a copy above: that one would only have to
be written down again, and where a lower tier is the smaller one this would go on for ever.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvtierd.core.block import Copy, CopyState
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.slots import Extent, Group
from kvtierd.core.state import CoreState
from kvtierd.errors import Reason
from kvtierd.model import Tier

MAX_EVICTIONS_PER_GRANT: Final = 256
"""Copies that one allocation may push out; bounds the time of a call."""


class Space:
    """Allocation with eviction over a :class:`CoreState`."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self.hungry: dict[int, Realm] = {}
        """Realms that were refused because nothing could be taken until something is written down."""

    def allocate(self, now: float, tier: Tier, realm: Realm, source: Copy | None = None) -> tuple[int, ...] | Reason:
        """Take one slot a shard; the caller attaches a copy to them at once.

        Args:
            now: the time.
            tier: where.
            realm: for whom.
            source: the copy that is to be written down, if that is what the slots are for.

        Returns:
            The slots, or why there are none: TOO_LARGE or QUOTA for a block that cannot be there, BUSY when there may be room
            later, LIMIT when the tier holds only what is newer than ``source``.
        """
        state = self._state
        need = realm.tier_bytes[tier]
        tenant = realm.tenant
        quota = tenant.quota_bytes[tier]
        if need > state.config.capacity_bytes[tier]:
            return Reason.TOO_LARGE
        if quota and tenant.used_bytes[tier] + need > quota:
            refused = self._make_quota(now, tier, tenant, need, quota, source)
            if refused is not None:
                return refused
        for _ in range(MAX_EVICTIONS_PER_GRANT):
            missing = self._take_all(now, tier, realm)
            if isinstance(missing, tuple):
                return missing
            refused = self._make_room(now, tier, realm, missing, source)
            if refused is Reason.LIMIT:
                return refused
            if refused is not None:
                break
        self.hungry[realm.realm_id] = realm
        return Reason.BUSY

    def _take_all(self, now: float, tier: Tier, realm: Realm) -> tuple[int, ...] | Group:
        """One slot a shard, or a group that has too few; nothing is taken then."""
        pool = self._state.pools[tier]
        if len(realm.slot_bytes) == 1:
            size = realm.nvme_slot_bytes[0] if tier is Tier.NVME else realm.slot_bytes[0]
            group = pool.group(size, size, 0, -1) if tier is Tier.NVME else pool.group((realm.realm_id, 0), size, 0, realm.realm_id)
            if group.open:
                return (pool.take(group),)
        if tier is Tier.NVME:
            groups = [pool.group(size, size, 0, -1) for size in realm.nvme_slot_bytes]
        else:
            groups = [pool.group((realm.realm_id, i), size, i, realm.realm_id) for i, size in enumerate(realm.slot_bytes)]
        wanted = Counter(groups) if len(groups) > 1 else {groups[0]: 1}
        short = [(group, missing) for group, count in wanted.items() if (missing := group.missing(count))]
        if short and not pool.grow(short, now):
            return short[0][0]
        taken = tuple(pool.take(group) for group in groups)
        self._state.take_pool_commands(tier)
        return taken

    def _make_quota(self, now: float, tier: Tier, tenant: Tenant, need: int, quota: int, source: Copy | None) -> Reason | None:
        """Push out the tenant's own oldest copies until a block fits its quota; None when it does."""
        if need > quota:
            return Reason.QUOTA
        state = self._state
        spare, dirty = state.turns.within_quota(tenant, tier)
        for _ in range(MAX_EVICTIONS_PER_GRANT):
            if tenant.used_bytes[tier] + need <= quota:
                return None
            first = spare.first()
            if first is not None:
                victim = first[1].orders[tier].next_spare()
            else:
                first = dirty.first()
                if first is None:
                    return Reason.BUSY if tenant.leaving_bytes[tier] else Reason.QUOTA
                victim = first[1].orders[tier].next_dirty()
                assert victim is not None
                if self._is_kept(now, victim):
                    self.hungry[first[1].realm_id] = first[1]
                    return Reason.BUSY
            assert victim is not None
            if _is_spared(victim, source):
                return Reason.QUOTA
            state.evict(now, victim, "quota")
        return Reason.BUSY

    def _victim(self, now: float, tier: Tier, realm: Realm) -> Copy | None:
        """The realm's next copy that may be forgotten at once."""
        order = realm.orders[tier]
        victim = order.next_spare()
        if victim is None:
            dirty = order.next_dirty()
            return None if dirty is None or self._is_kept(now, dirty) else dirty
        return victim

    def _is_kept(self, now: float, copy: Copy) -> bool:
        """True when a copy that exists on no lower tier can be written down, so that it must not be forgotten before."""
        return self._state.turns.can_demote(copy.block.realm, copy.tier, now) and not self._state.refusal(now, copy)

    def _class_victim(self, now: float, tier: Tier, realm: Realm) -> Copy | None:
        """The oldest copy whose slots would do for this realm."""
        if tier is not Tier.NVME:
            return self._victim(now, tier, realm)
        first = self._state.turns.on_nvme(realm).first()
        oldest = self._victim(now, tier, first[1]) if first else None
        return oldest or self._victim(now, tier, realm)

    def _make_room(self, now: float, tier: Tier, realm: Realm, group: Group, source: Copy | None) -> Reason | None:
        """Free something that may serve the group. None when the allocation should be tried again."""
        state = self._state
        pool = state.pools[tier]
        victim = self._class_victim(now, tier, realm)
        if now >= pool.growth_blocked_until_s and pool.may_ask(now):
            self._ask_extent(now, tier, realm, group, victim, source)
        if pool.retiring and tier is Tier.NVME:
            return Reason.BUSY  # files go at once: there is room as soon as the shell has run the command
        if victim is None or victim.state is not CopyState.READY:
            return Reason.BUSY
        if _is_spared(victim, source):
            return Reason.LIMIT
        state.evict(now, victim, "pressure")
        return None

    def _ask_extent(self, now: float, tier: Tier, realm: Realm, group: Group, victim: Copy | None, source: Copy | None) -> None:
        """Send an extent away that serves others: an empty one, or a colder one than what would be evicted."""
        state = self._state
        pool = state.pools[tier]

        def is_own(other: Group) -> bool:
            return other.slot_bytes in realm.nvme_slot_bytes if tier is Tier.NVME else other.realm_id == realm.realm_id

        empty = pool.empty_extent(group, is_own)
        if empty is not None:
            pool.asked(now)
            pool.retire(empty)
            state.take_pool_commands(tier)
            return
        before_s = float("inf") if victim is None else victim.block.used_at_s
        if source is not None and not (victim is None and not group.extents and pool.asked_long_ago(now)):
            before_s = min(before_s, source.block.used_at_s)
        foreign = pool.coldest_extent(now, before_s, is_own)
        if foreign is not None:
            pool.asked(now)
            self.drain_extent(now, tier, foreign)

    def drain_extent(self, now: float, tier: Tier, extent: Extent) -> None:
        """Empty an extent, so that its room can go to another group: forget what exists below, write down the rest."""
        state = self._state
        state.pools[tier].drain(extent)
        for owner in list(extent.owners):
            if owner is None or owner.state is not CopyState.READY or owner.pins:
                continue  # comes back through unpin
            realm = owner.block.realm
            if owner.is_clean or not state.turns.can_demote(realm, tier, now):
                state.evict(now, owner, "pressure")
            else:
                state.demote_wanted.append((owner, "extent"))
        state.take_pool_commands(tier)


def _is_spared(victim: Copy, source: Copy | None) -> bool:
    """True when a copy that is written down must not replace this one."""
    has_upper = victim.block.mask & (victim.tier.bit - 1)
    if source is None or not has_upper or victim.is_clean:
        return False
    return victim.block.used_at_s >= source.block.used_at_s
