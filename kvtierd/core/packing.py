"""Moving copies together within CPU memory, so that an extent empties that others need.

A reserve is memory, which comes in extents. What is left of a premium tenant's copies may lie in all of them, one slot here and
there; as nobody may take those copies, others would get no extent although the tier is nearly empty. So where an extent of a tenant
with a reserve is to go, its copies move into free slots of other extents of their groups, as far as there are any.

The target of such a move is a *place*: a :class:`Copy` that no block knows of, ABSENT, which owns the slots that were taken for it.
The source is pinned and stays readable where it is. When its bytes are in the place, and nobody has come to use it meanwhile, it
changes slots with the place; then the place is given up, as it is when anything else has happened. Shards that lie in extents that
stay do not move.

What does not fit goes as other tenants' copies do where the reserve does not keep it: what the tenant holds beyond its reserve, and
what lies in an extent that it holds beyond its reserve. The latter are few, as each namespace's shards need extents of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtierd.core.block import Copy, CopyState
from kvtierd.core.commands import Move
from kvtierd.core.realm import Tenant
from kvtierd.core.shares import Shares
from kvtierd.core.slots import Extent
from kvtierd.core.state import CoreState
from kvtierd.core.stats import StoryEvent
from kvtierd.model import Result, Tier, slot_extent


class Packer:
    """Decides what moves together over a :class:`CoreState`."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._pool = state.pools[Tier.CPU]

    def is_moving(self, tenant: Tenant | None = None) -> bool:
        """True while copies are being moved together: any, or those of a tenant."""
        within = (move.src.block.realm.tenant for move in self._state.moves.values() if move.is_within)
        return any(tenant in (None, owner) for owner in within)

    def can_empty(self, extent: Extent) -> bool:
        """True when all that is in an extent in CPU memory of a tenant with a reserve fits elsewhere, and nobody uses any of it."""
        if self._reserving(extent) is None:
            return False
        coming = sum(e.used for i in self._pool.leaving if (e := self._pool.extents[i]).group is extent.group)
        # Its own free slots are among those of the group.
        return extent.group.missing(extent.slot_count + coming) <= 0 and _is_unused(extent)

    def beyond(self) -> Callable[[Extent], bool]:
        """For one search: True when a tenant's other extents in CPU memory are as much as its reserve, and nobody uses anything in
        this one."""
        held: dict[int, int] = {}

        def is_beyond(extent: Extent) -> bool:
            tenant = self._reserving(extent)
            if tenant is None:
                return False
            if id(tenant) not in held:
                held[id(tenant)] = self._held_bytes(tenant)
            others_bytes = held[id(tenant)] - (0 if extent.draining else extent.size_bytes)
            return others_bytes >= tenant.limits.reserve_bytes[Tier.CPU] and _is_unused(extent)

        return is_beyond

    def packs(self, copy: Copy) -> bool:
        """True for a copy that moves within its tier when its extent has to go."""
        return copy.tier is Tier.CPU and copy.block.realm.tenant.limits.reserve_bytes[Tier.CPU] > 0

    def keeps(self, copy: Copy) -> bool:
        """True for a copy that must not go although there is no place for it."""
        realm = copy.block.realm
        tenant, size_bytes = realm.tenant, realm.tier_bytes[Tier.CPU]
        if not Shares.keeps(tenant, Tier.CPU, size_bytes + tenant.going_bytes[Tier.CPU]):
            return False
        return self._held_bytes(tenant) < tenant.limits.reserve_bytes[Tier.CPU]

    def place(self, copy: Copy) -> Copy | None:
        """A place for a copy, outside of extents that drain; None when a group has no free slot."""
        pool, realm = self._pool, copy.block.realm
        slots = list(copy.all_slots())
        moving = [shard for shard, slot in enumerate(slots) if pool.extents[slot_extent(slot)].draining]
        groups = [pool.extents[slot_extent(slots[shard])].group for shard in moving]
        if not all(group.open for group in groups):
            return None
        for shard, group in zip(moving, groups, strict=True):
            slots[shard] = pool.take(group)
        place = Copy(copy.block, Tier.CPU, slots[0] if len(realm.slot_bytes) == 1 else tuple(slots))
        place.pins = 1
        for shard in moving:
            pool.set_owner(slots[shard], place)
        return place

    def settle(self, now: float, move: Move, result: Result) -> None:
        """Take in the result of a move within the tier."""
        state, pool = self._state, self._pool
        source, place = move.src, move.dst
        changed = [(a, b) for a, b in zip(source.all_slots(), place.all_slots(), strict=True) if a != b]
        if result is Result.OK:
            state.counts.move_bytes[(source.tier, place.tier)] += move.size_bytes
        else:
            self.stay(source)
        if result is Result.OK and source.state is CopyState.READY and source.pins == 1 and not state.is_draining(place):
            source.slots, place.slots = place.slots, source.slots
            for old, new in changed:
                pool.hand_over(new, source)
                pool.free(old)
            changed = []
            state.story.append(StoryEvent(now, source.block.key, source.tier, source.state, source.state, move.why))
        for _, new in changed:
            pool.free(new)
        place.pins = 0
        state.take_pool_commands(Tier.CPU)
        # What was not used meanwhile is as old as it was before.
        unused = source.block.used_at_s <= move.started_s
        state.unpin(now, source, written=unused, sunk=unused)

    def stay(self, copy: Copy) -> None:
        """The extents that a copy is in do not go after all: there is no place for it."""
        for slot in copy.all_slots():
            extent = self._pool.extents[slot_extent(slot)]
            if extent.draining:
                self._pool.undrain(extent)

    def _reserving(self, extent: Extent) -> Tenant | None:
        """The tenant of an extent, if it has a reserve."""
        realm = self._state.realms.get(extent.group.realm_id)
        return realm.tenant if realm is not None and realm.tenant.limits.reserve_bytes[Tier.CPU] else None

    def _held_bytes(self, tenant: Tenant) -> int:
        """Memory of a tenant's extents, but for those that drain."""
        return sum(e.size_bytes for e in self._extents(tenant) if not e.draining)

    def _extents(self, tenant: Tenant) -> Iterator[Extent]:
        for realm in tenant.realms:
            yield from self._pool.extents_of(realm.realm_id, len(realm.slot_bytes))


def _is_unused(extent: Extent) -> bool:
    return all(o is None or (o.state is CopyState.READY and not o.pins) for o in extent.owners)
