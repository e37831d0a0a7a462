"""Making room: which slots a new copy gets, and who has to go for them.

Order of preference on a tier: a free slot; a new extent; an extent of another group that is empty; then what ``core/shares.py``
says must give way first; then by age, either the own least recently used copy that also exists below, or a whole extent of another
group when all of it is older than that; at last, in CPU memory, an extent whose copies a reserve keeps and that can move together
(``core/packing.py``). A copy that exists nowhere else is only taken when it cannot be written down (no lower tier, or the device
refuses writes): otherwise it is written down first and the caller is told to come back.

A copy that is written down never replaces one that is as new or newer and still has a copy above, by age: that one would only have
to be written down again, and where a lower tier is the smaller one this would go on for ever.

A tenant above its share, or basic, whose own copies are all in use or still to be written down waits for them; only when it has
nothing on the tier at all it takes the coldest extent of anybody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from kvtierd.core.block import Copy, CopyState
from kvtierd.core.limits import TenantClass
from kvtierd.core.packing import Packer
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.shares import WANT_S, Claim, Shares
from kvtierd.core.slots import Extent, Group
from kvtierd.core.state import CoreState
from kvtierd.errors import Reason
from kvtierd.model import Tier

_NOBODY: Final = (None, 0.0)
ANY_AGE_S: Final = float("inf")
IN_VAIN_S: Final = 0.1
"""How long a tenant that may take room of a few only does not look again after it found none of theirs."""
COMING_S: Final = 10.0
"""How long room that is on its way is waited for before copies within a reserve go whose tenant holds more memory than that."""
MAX_SCANNED: Final = 64
"""Extents, the coldest, that are looked at for one that may go, where there is another way."""
MAX_EVICTIONS_PER_GRANT: Final = 256
"""Copies that one allocation may push out; bounds the time of a call."""


class Space:
    """Allocation with eviction over a :class:`CoreState`."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self.packer = Packer(state)
        self.hungry: dict[int, Realm] = {}
        """Realms that were refused because nothing could be taken until something is written down."""
        self._nothing_packs_until_s = [0.0, 0.0]
        """Until when nobody looks again for an extent whose copies can move together: who has no other way, and who has one."""
        self._in_vain: dict[Tier, tuple[Realm, float]] = {}
        """Who was the last to find no extent although it may take those of a few only, and until when it need not look again."""

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
        quota = tenant.limits.quota(tier)
        if need > state.config.capacity_bytes[tier]:
            return Reason.TOO_LARGE
        fits_quota = quota is None or tenant.used_bytes[tier] + need <= quota
        if quota is not None and not fits_quota:
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
        if source is not None and not fits_quota:
            # Its tenant's older copies have gone in vain. They come down again, and would go again at once, for ever.
            state.turns.pause(now, realm)
        return Reason.BUSY

    def _take_all(self, now: float, tier: Tier, realm: Realm) -> tuple[int, ...] | Group:
        """One slot a shard, or a group that has too few; nothing is taken then."""
        pool = self._state.pools[tier]
        if len(realm.slot_bytes) == 1:
            size = realm.nvme_slot_bytes[0] if tier is Tier.NVME else realm.slot_bytes[0]
            group = pool.group(size, size, 0, -1) if tier is Tier.NVME else pool.group(*realm.group(tier, 0))
            if group.open:
                return (pool.take(group),)
        if tier is Tier.NVME:
            groups = [pool.group(size, size, 0, -1) for size in realm.nvme_slot_bytes]
        else:
            groups = [pool.group(*realm.group(tier, shard)) for shard in range(len(realm.slot_bytes))]
        wanted = Counter(groups) if len(groups) > 1 else {groups[0]: 1}
        short = [(group, missing) for group, count in wanted.items() if (missing := group.missing(count))]
        if short:
            first, count = short[0]
            is_full = pool.room_bytes(first) < first.slot_bytes * count  # most often, and then nothing else counts
            if is_full or not (self._may_grow(now, tier, realm) and pool.grow(short, now)):
                return first
            self._state.shares.has_grown(realm.tenant, tier)
        taken = tuple(pool.take(group) for group in groups)
        self._state.take_pool_commands(tier)
        return taken

    def _may_grow(self, now: float, tier: Tier, realm: Realm) -> bool:
        shares, tenant = self._state.shares, realm.tenant
        return shares.may_grow(now, tenant, tier, shares.claim(tenant, tier, realm.tier_bytes[tier]))

    def _make_quota(self, now: float, tier: Tier, tenant: Tenant, need: int, quota: int, source: Copy | None) -> Reason | None:
        """Push out the tenant's own oldest copies until a block fits its quota; None when it does."""
        if need > quota:
            return Reason.QUOTA
        state = self._state
        spare, dirty = state.turns.tails(tenant, tier)
        for _ in range(MAX_EVICTIONS_PER_GRANT):
            if tenant.used_bytes[tier] + need <= quota:
                return None
            first = spare.first()
            if first is not None:
                victim = first[1].orders[tier].next_spare()
            else:
                first = dirty.first()
                if first is None:
                    is_moving = tenant.leaving_bytes[tier] or (tier is Tier.CPU and self.packer.is_moving(tenant))
                    return Reason.BUSY if is_moving else Reason.QUOTA
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

    def _nvme_victim(self, now: float, realm: Realm, claim: Claim) -> tuple[Copy | None, bool]:
        """The copy on NVMe that goes for this realm, in whose slots a block of it fits, and whether it goes for its age."""
        state, turns, tenant = self._state, self._state.turns, realm.tenant
        if tenant.limits.tenant_class is not TenantClass.BASIC and state.shares.basic(Tier.NVME):
            first = turns.on_nvme(realm, basic=True).first()
            if first is not None:
                return self._victim(now, Tier.NVME, first[1]), False
        above = None if claim is Claim.CONFINED else state.shares.furthest_above(Tier.NVME, tenant)
        if above is not None and not Shares.keeps(above, Tier.NVME, realm.tier_bytes[Tier.NVME]):
            victim = self._oldest_of(now, above, realm)
            if victim is not None:
                return victim, False
        first = turns.on_nvme(realm).first()
        if first is not None:
            owner = first[1].tenant
            if claim is not Claim.CONFINED or owner is tenant or Shares.is_idle(owner, now):
                oldest = self._victim(now, Tier.NVME, first[1])
                if oldest is not None:
                    return oldest, claim is not Claim.RESERVED
        own = self._oldest_of(now, tenant, realm)
        if own is None and first is not None:
            own = self._victim(now, Tier.NVME, first[1])  # it holds nothing yet that it could give up
        return own, True

    def _oldest_of(self, now: float, tenant: Tenant, realm: Realm) -> Copy | None:
        """A tenant's oldest copy on NVMe in slots of the sizes of this realm's."""
        _, dirty = self._state.turns.tails(tenant, Tier.NVME, realm.nvme_slot_bytes)
        first = dirty.first()
        return None if first is None else self._victim(now, Tier.NVME, first[1])

    def _make_room(self, now: float, tier: Tier, realm: Realm, group: Group, source: Copy | None) -> Reason | None:
        """Free something that may serve the group. None when the allocation should be tried again."""
        state = self._state
        pool = state.pools[tier]
        claim = state.shares.claim(realm.tenant, tier, realm.tier_bytes[tier])
        if claim is not Claim.CONFINED:  # nobody has to wait for those
            state.shares.wants(now, realm.tenant, tier, claim)
        victim, by_age = self._nvme_victim(now, realm, claim) if tier is Tier.NVME else (self._victim(now, tier, realm), True)
        last, until_s = self._in_vain.get(tier, _NOBODY)
        in_vain = last is realm and now < until_s and not pool.empty
        if not in_vain and now >= pool.growth_blocked_until_s and pool.may_ask(now):
            self._ask_extent(now, tier, realm, group, victim, source, claim)
        if pool.retiring and tier is Tier.NVME:
            return Reason.BUSY  # files go at once: there is room as soon as the shell has run the command
        if victim is None or victim.state is not CopyState.READY:
            return Reason.BUSY
        if claim is Claim.RESERVED and by_age and (pool.leaving or pool.retiring):
            return Reason.BUSY  # what others have borrowed is on its way: nothing of its own has to go
        if by_age and _is_spared(victim, source):
            return Reason.LIMIT
        state.evict(now, victim, "pressure")
        return None

    def _ask_extent(
        self, now: float, tier: Tier, realm: Realm, group: Group, victim: Copy | None, source: Copy | None, claim: Claim
    ) -> None:
        """Send an extent away that serves others: an empty one, one of who must give way, or one colder than the victim."""
        state = self._state
        pool = state.pools[tier]

        def is_own(other: Group) -> bool:
            return other.slot_bytes in realm.nvme_slot_bytes if tier is Tier.NVME else other.realm_id == realm.realm_id

        if not state.shares.may_grow(now, realm.tenant, tier, claim):
            return
        empty = pool.empty_extent(group, is_own)
        if empty is not None:
            pool.asked(now)
            pool.retire(empty)
            state.take_pool_commands(tier)
            return
        before_s = float("inf") if victim is None else victim.block.used_at_s
        if source is not None and not (victim is None and not group.extents and pool.asked_long_ago(now)):
            before_s = min(before_s, source.block.used_at_s)
        if tier is Tier.NVME:
            if claim is Claim.CONFINED and victim is not None:
                before_s = min(before_s, now - WANT_S)
            foreign = pool.coldest_extent(now, before_s, lambda e: not is_own(e.group) and not self._holds_kept(e))
        else:
            foreign = self._foreign_extent(now, tier, realm, claim, before_s, has_victim=victim is not None)
            if foreign is None and tier is Tier.CPU:
                foreign = self._packed_extent(now, realm, group, before_s, has_victim=victim is not None)
        if foreign is not None:
            pool.asked(now)
            self.drain_extent(now, tier, foreign)

    def _foreign_extent(
        self, now: float, tier: Tier, realm: Realm, claim: Claim, before_s: float, *, has_victim: bool
    ) -> Extent | None:
        """The extent of another realm in memory that goes for this one: ``core/shares.py`` says whose, then age decides."""
        state, tenant = self._state, realm.tenant
        pool, shares = state.pools[tier], state.shares

        def may_go(extent: Extent) -> bool:
            return extent.group.realm_id != realm.realm_id and not self._is_kept_whole(tier, extent)

        def gives_way(extent: Extent) -> bool:
            owner = self._owner(extent)
            return (owner is None or owner is tenant or Shares.is_idle(owner, now)) and may_go(extent)

        def coldest_of(owner: Tenant) -> Extent | None:
            held = (e for r in owner.realms for e in pool.extents_of(r.realm_id, len(r.slot_bytes)))
            own = (e for e in held if not e.draining and may_go(e))
            return min(own, key=lambda e: e.used_at_s, default=None)

        found: Extent | None = None
        most = MAX_SCANNED if has_victim else None
        if tenant.limits.tenant_class is not TenantClass.BASIC:
            found = next((e for basic in shares.basic(tier) if (e := coldest_of(basic)) is not None), None)
        if found is None and claim is Claim.CONFINED:
            found = pool.coldest_extent(now, before_s, gives_way, most)
            if found is None and (has_victim or tenant.used_bytes[tier]):
                self._in_vain[tier] = (realm, now + IN_VAIN_S)
                return None
        if found is None and claim is Claim.RESERVED:
            found = pool.coldest_extent(now, ANY_AGE_S, lambda e: may_go(e) and _is_clean(e), MAX_SCANNED)
            before_s, most = ANY_AGE_S, None
        if found is None and claim is not Claim.CONFINED and (above := shares.furthest_above(tier, tenant)) is not None:
            found = coldest_of(above)
        return found or pool.coldest_extent(now, before_s, may_go, most)

    def _packed_extent(self, now: float, realm: Realm, group: Group, before_s: float, *, has_victim: bool) -> Extent | None:
        """The extent in CPU memory that goes although its tenant's reserve keeps what is in it, because that can move elsewhere.

        For a group that has nothing and can give up nothing, also one of a tenant whose other extents are as much as its reserve,
        where no other room is on its way.
        """
        pool, packer = self._state.pools[Tier.CPU], self.packer
        if not self._state.shares.has_reserve(Tier.CPU) or now < self._nothing_packs_until_s[has_victim]:
            return None

        def coldest(may_go: Callable[[Extent], bool]) -> Extent | None:
            most = MAX_SCANNED if has_victim else None
            return pool.coldest_extent(now, before_s, lambda e: e.group.realm_id != realm.realm_id and may_go(e), most)

        found = coldest(packer.can_empty)
        if found is None:
            is_coming = (pool.leaving or pool.retiring) and not pool.asked_long_ago(now, COMING_S)
            if not has_victim and not group.extents and not is_coming:
                found = coldest(packer.beyond())
        if found is None:
            self._nothing_packs_until_s[has_victim] = now + IN_VAIN_S
        return found

    def _owner(self, extent: Extent) -> Tenant | None:
        """The tenant of an extent in memory; None when its realm was forgotten."""
        realm = self._state.realms.get(extent.group.realm_id)
        return None if realm is None else realm.tenant

    def _is_kept_whole(self, tier: Tier, extent: Extent) -> bool:
        """True for an extent in memory whose loss would leave its tenant less than its reserve."""
        tenant = self._owner(extent)
        if tenant is None or not tenant.limits.reserve_bytes[tier]:
            return False
        pool = self._state.pools[tier]
        going = [e for i in pool.leaving if self._owner(e := pool.extents[i]) is tenant]
        # A block goes with all of its shards, whichever extents they are in.
        realms = self._state.realms
        lost_bytes = sum(e.used * realms[e.group.realm_id].tier_bytes[tier] for e in (extent, *going))
        return Shares.keeps(tenant, tier, lost_bytes)

    def _holds_kept(self, extent: Extent) -> bool:
        """True for an extent on NVMe whose loss would leave a tenant less than its reserve."""
        if not self._state.shares.has_reserve(Tier.NVME):
            return False
        pool = self._state.pools[Tier.NVME]
        lost_bytes: Counter[Tenant] = Counter()
        # A block goes with all of its shards, whichever extents they are in.
        for copy in {o for e in (extent, *(pool.extents[i] for i in pool.leaving)) for o in e.owners if o is not None}:
            lost_bytes[copy.block.realm.tenant] += copy.block.realm.tier_bytes[Tier.NVME]
        owners = {o.block.realm.tenant for o in extent.owners if o is not None}
        return any(Shares.keeps(tenant, Tier.NVME, lost_bytes[tenant]) for tenant in owners)

    def drain_extent(self, now: float, tier: Tier, extent: Extent) -> None:
        """Empty an extent, so that its room can go to another group: forget what exists below, move or write down the rest."""
        state = self._state
        state.pools[tier].drain(extent)
        for owner in list(extent.owners):
            if owner is None or owner.state is not CopyState.READY or owner.pins:
                continue  # comes back through unpin
            realm = owner.block.realm
            if not self.packer.packs(owner) and (owner.is_clean or not state.turns.can_demote(realm, tier, now)):
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


def _is_clean(extent: Extent) -> bool:
    """True when all of an extent can be forgotten at once."""
    return all(o is None or (o.state is CopyState.READY and o.is_clean and not o.pins) for o in extent.owners)
