"""Slots of one tier: extents, free lists, capacity. Pure bookkeeping; stores make the real memory or files.

A *group* is the set of slots that may replace each other: on CPU and HBM one realm's shard (memory is never shared between
realms), on NVMe one slot size. An extent belongs to one group for its whole life. Bytes of an extent count against the
capacity from its creation until :meth:`SlotPool.released`, so that the sum never exceeds the capacity, not even while a
client still maps memory that is on its way out.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvtierd.model import FIRST_DEVICE_EXTENT, Tier, round_up, slot_extent, slot_id, slot_index

if TYPE_CHECKING:
    from kvtierd.core.block import Copy

MAX_EXTENT_ID: Final = (1 << 31) - 1
MAX_LEAVING_EXTENTS: Final = 4
"""Extents of a pool that may be on their way out at one time because another group asked for room."""
PIECES: Final = 4
"""A pool has at most so many times the extents that fill its capacity. What is left over when an extent goes to another group makes
smaller and smaller ones otherwise, down to one slot, and each costs a descriptor here and a mapping in each client."""
MIN_EXTENTS: Final = 64
"""As many it may have in any case."""
UNMADE_PAUSE_S: Final = 1.0
"""How long no extent is made after one could not be made."""
DEVICE_PAUSE_S: Final = 30.0
"""The same of GPU memory: whoever has taken it gives it back late or never, and CPU memory serves meanwhile."""
LEAVING_PAUSE_S: Final = 1.0
"""How long an extent may take to go before a second one is asked for. Callers that were refused come back often."""


@dataclass(slots=True)
class Extent:
    """A region of slots of one size."""

    extent_id: int
    group: Group
    slot_count: int
    owners: list[Copy | None]
    """Who uses each slot; None when free."""
    next_fresh: int = 0
    """Slots from here on were never used."""
    freed: deque[int] = field(default_factory=deque)
    """Used and freed slots, oldest first, so that runs written together are reused together."""
    used: int = 0
    used_at_s: float = 0.0
    """Last use of any of its blocks."""
    draining: bool = False
    """True when it gets no new blocks and goes when it is empty."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.group.slot_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the extent."""
        return round_up(self.slot_count * self.group.slot_bytes, self.group.piece_bytes)

    @property
    def has_free(self) -> bool:
        """True when a slot can be taken."""
        return not self.draining and self.used < self.slot_count

    def take(self) -> int:
        """Take a free slot's index; fresh ones first, then the longest free."""
        if self.next_fresh < self.slot_count:
            index = self.next_fresh
            self.next_fresh += 1
        else:
            index = self.freed.popleft()
        self.used += 1
        return index


@dataclass(slots=True, eq=False)
class Group:
    """Slots that may replace each other."""

    key: Hashable
    slot_bytes: int
    shard: int
    realm_id: int
    """Owner on CPU and HBM; -1 on NVMe."""
    place: int = 0
    """The GPU that its extents are on; 0 on CPU and NVMe."""
    piece_bytes: int = 1
    """An extent takes whole pieces of so many bytes."""
    extents: dict[int, Extent] = field(default_factory=dict)
    open: dict[int, Extent] = field(default_factory=dict)
    """Extents that have a free slot; the first is filled first."""

    def missing(self, count: int) -> int:
        """How many of ``count`` slots the group does not have. Looks at ``count`` extents at most."""
        for extent in self.open.values():
            count -= extent.slot_count - extent.used
            if count <= 0:
                return 0
        return count


@dataclass(frozen=True, slots=True)
class NewExtent:
    """Tells the shell to make an extent before anything uses it, or to report that it cannot (``TierCore.extent_failed``)."""

    tier: Tier
    extent_id: int
    realm_id: int
    shard: int
    slot_bytes: int
    slot_count: int
    place: int = 0
    """The GPU; 0 on CPU and NVMe."""


@dataclass(frozen=True, slots=True)
class RetireExtent:
    """Tells the shell to take an extent away from clients and to report :meth:`SlotPool.released` when that is done.

    An extent that could not be made is retired too.
    """

    tier: Tier
    extent_id: int


class SlotPool:
    """All slots of one tier.

    Args:
        tier: the tier.
        capacity_bytes: of all its places together; each has the same.
        extent_bytes: of one extent, where nothing speaks for a smaller one.
        places: GPUs of the tier; 1 on CPU and NVMe.
        piece_bytes: an extent takes whole pieces of so many bytes.
    """

    def __init__(self, tier: Tier, capacity_bytes: int, extent_bytes: int, places: int = 1, piece_bytes: int = 1) -> None:
        self.tier = tier
        self.capacity_bytes = capacity_bytes
        self._place_bytes = capacity_bytes // places
        self._reserved_by_place = [0] * places
        self._piece_bytes = piece_bytes
        self.extent_bytes = extent_bytes
        self._max_extents = max(PIECES * capacity_bytes // max(extent_bytes, 1), MIN_EXTENTS)
        self.used_bytes = 0
        self.growth_blocked_until_s = 0.0
        """No new extents before this time: the device had no room."""
        self.extents: dict[int, Extent] = {}
        self.retiring: dict[int, Extent] = {}
        """Extents on their way out, by id; their bytes count as long."""
        self.groups: dict[Hashable, Group] = {}
        self.next_extent_id = FIRST_DEVICE_EXTENT if tier is Tier.HBM else 1
        self._last_extent_id = FIRST_DEVICE_EXTENT - 1 if tier is Tier.CPU else MAX_EXTENT_ID
        self.commands: list[NewExtent | RetireExtent] = []
        self.empty: dict[int, Extent] = {}
        """Extents that hold nothing, kept for their group until another group needs the room."""
        self.leaving: set[int] = set()
        """Extents that drain and still hold something."""
        self._asked_s = float("-inf")
        """When an extent was last sent away for another group."""
        self._made_since_order = False
        self._coldest: tuple[float, list[Extent]] = (float("-inf"), [])

    def group(self, key: Hashable, slot_bytes: int, shard: int, realm_id: int, place: int = 0) -> Group:
        """The group of this key, made when it is new."""
        found = self.groups.get(key)
        if found is None or (found.place != place and not found.extents):
            found = self.groups[key] = Group(key, slot_bytes, shard, realm_id, place, self._piece_bytes)
        return found

    def extents_of(self, realm_id: int, shards: int) -> Iterator[Extent]:
        """A realm's extents on CPU or HBM."""
        for shard in range(shards):
            group = self.groups.get((realm_id, shard))
            if group is not None:
                yield from group.extents.values()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all extents, those on their way out too."""
        return sum(self._reserved_by_place)

    def room_bytes(self, group: Group) -> int:
        """Bytes that no extent has taken where the extents of a group are."""
        return self._place_bytes - self._reserved_by_place[group.place]

    @property
    def opened_bytes(self) -> int:
        """Capacity of the places that have any extent: of a GPU that no engine uses nothing has to be kept free."""
        return self._place_bytes * sum(size > 0 for size in self._reserved_by_place)

    def take(self, group: Group) -> int:
        """Take a free slot of a group that has one. The caller sets the owner."""
        extent = next(iter(group.open.values()))
        index = extent.take()
        if extent.used == 1:
            self.empty.pop(extent.extent_id, None)
        if not extent.has_free:
            del group.open[extent.extent_id]
        self.used_bytes += group.slot_bytes
        return slot_id(extent.extent_id, index)

    def grow(self, wanted: list[tuple[Group, int]], now: float) -> bool:
        """Make an extent for each group that has so many slots too few. All or none: a shard alone is of no use.

        Where less than a whole extent each is left, the groups share the room in proportion, so that no shard takes the
        room of the others. None is made when the pool is in too many pieces, until others have gone.
        """
        if len(self.extents) + len(self.retiring) + len(wanted) > self._max_extents:
            return False
        rest: Counter[int] = Counter()
        for group, count in wanted:
            rest[group.place] += round_up(group.slot_bytes * count, group.piece_bytes)
        full = any(self._place_bytes - self._reserved_by_place[place] < size for place, size in rest.items())
        if full or now < self.growth_blocked_until_s or self.next_extent_id + len(wanted) > self._last_extent_id:
            return False
        for group, least in wanted:
            need = round_up(group.slot_bytes * least, group.piece_bytes)
            share = self.room_bytes(group) * need // rest[group.place]
            share -= share % group.piece_bytes
            count = max(min(self.extent_bytes, share) // group.slot_bytes, least)
            extent = self._add(group, self.next_extent_id, count)
            self.next_extent_id += 1
            extent.used_at_s = now
            self.commands.append(
                NewExtent(self.tier, extent.extent_id, group.realm_id, group.shard, group.slot_bytes, count, group.place)
            )
            rest[group.place] -= need
        return True

    def _add(self, group: Group, extent_id: int, slot_count: int) -> Extent:
        extent = Extent(extent_id, group, slot_count, [None] * slot_count)
        self.extents[extent_id] = group.extents[extent_id] = group.open[extent_id] = extent
        self._reserved_by_place[group.place] += extent.size_bytes
        self._made_since_order = True
        return extent

    def set_owner(self, slot: int, copy: Copy) -> None:
        """Note who uses a slot that was taken."""
        owners = self.extents[slot_extent(slot)].owners
        assert owners[slot_index(slot)] is None
        owners[slot_index(slot)] = copy

    def hand_over(self, slot: int, copy: Copy) -> None:
        """Give a slot that is in use to another owner."""
        extent = self.extents[slot_extent(slot)]
        extent.owners[slot_index(slot)] = copy
        extent.used_at_s = max(extent.used_at_s, copy.block.used_at_s)

    def free(self, slot: int) -> None:
        """Return a slot. An extent that drains and becomes empty is retired."""
        extent = self.extents[slot_extent(slot)]
        index = slot_index(slot)
        extent.owners[index] = None
        extent.freed.append(index)
        extent.used -= 1
        self.used_bytes -= extent.slot_bytes
        if not extent.draining:
            extent.group.open[extent.extent_id] = extent
            if extent.used == 0:
                self.empty[extent.extent_id] = extent
        elif extent.used == 0:
            self.retire(extent)

    def drain(self, extent: Extent) -> None:
        """Give an extent no new blocks; it goes when it is empty."""
        extent.draining = True
        extent.group.open.pop(extent.extent_id, None)
        if extent.used == 0:
            self.retire(extent)
        else:
            self.leaving.add(extent.extent_id)

    def undrain(self, extent: Extent) -> None:
        """An extent that drains stays after all."""
        extent.draining = False
        self.leaving.discard(extent.extent_id)
        if extent.has_free:
            extent.group.open[extent.extent_id] = extent

    def unmade(self, extent_id: int, now: float) -> set[Copy]:
        """Give up an extent that could not be made. Returns the copies in it; it goes when the last of them has gone."""
        pause_s = DEVICE_PAUSE_S if self.tier is Tier.HBM else UNMADE_PAUSE_S
        self.growth_blocked_until_s = max(self.growth_blocked_until_s, now + pause_s)
        extent = self.extents.get(extent_id)
        if extent is None:
            return set()  # it was retired already
        self.drain(extent)
        return {owner for owner in extent.owners if owner is not None}

    def retire(self, extent: Extent) -> None:
        """Take an empty extent out of use; its bytes count until :meth:`released`."""
        assert extent.used == 0
        extent.draining = True
        extent.group.open.pop(extent.extent_id, None)
        self.empty.pop(extent.extent_id, None)
        self.leaving.discard(extent.extent_id)
        del extent.group.extents[extent.extent_id]
        del self.extents[extent.extent_id]
        if not extent.group.extents:
            # Groups without extents are forgotten, so that realms that come and go leave nothing behind.
            self.groups.pop(extent.group.key, None)
        self.retiring[extent.extent_id] = extent
        self.commands.append(RetireExtent(self.tier, extent.extent_id))

    def released(self, extent_id: int) -> None:
        """The shell reports that nobody holds a retired extent any more."""
        extent = self.retiring.pop(extent_id)
        self._reserved_by_place[extent.group.place] -= extent.size_bytes

    def may_ask(self, now: float) -> bool:
        """True when an extent may be sent away for another group: the last ones have gone, or take long.

        Retired ones count only for a while: a client may keep them for ever, and others must get room all the same.
        """
        if not self.leaving and not self.retiring:
            return True
        return len(self.leaving) < MAX_LEAVING_EXTENTS and self.asked_long_ago(now)

    def asked_long_ago(self, now: float, pause_s: float = LEAVING_PAUSE_S) -> bool:
        """True when no extent was sent away for another group for a while."""
        return now >= self._asked_s + pause_s

    def asked(self, now: float) -> None:
        """Note that an extent was sent away for another group."""
        self._asked_s = now

    def empty_extent(self, other_than: Group, is_own: Callable[[Group], bool]) -> Extent | None:
        """An extent that holds nothing: somebody else's, or else one of the own groups but ``other_than``."""
        own = None
        for extent in self.empty.values():
            if not is_own(extent.group):
                return extent
            if own is None and extent.group is not other_than:
                own = extent
        return own

    def coldest_extent(
        self, now: float, before_s: float, may_go: Callable[[Extent], bool], most: int | None = None
    ) -> Extent | None:
        """The extent whose last use is the longest ago, and before ``before_s``, of those that may go; looks at ``most``."""
        for anew in (False, True):
            for extent in itertools.islice(self.by_coldness(now, anew=anew), most):
                if extent.used_at_s >= before_s:
                    return None
                if not extent.draining and extent.extent_id in self.extents and may_go(extent):
                    return extent
            if not self._made_since_order:
                break
            # The remembered order names none, but extents were made since: look at those too.
        return None

    def by_coldness(self, now: float, *, anew: bool = False) -> list[Extent]:
        """Extents, coldest first; unless ``anew``, worked out at most once a second of ``now``, so that it costs little."""
        at, order = self._coldest
        if anew or not at <= now < at + 1.0:
            order = sorted(self.extents.values(), key=lambda e: e.used_at_s)
            self._made_since_order = False
            self._coldest = (now, order)
        return order

    def adopt_extent(self, group: Group, extent_id: int, slot_count: int) -> Extent:
        """Take over an extent found after a restart. Its slots are free until they get owners and :meth:`adopted` is called."""
        extent = self._add(group, extent_id, slot_count)
        self.next_extent_id = max(self.next_extent_id, extent_id + 1)
        return extent

    def adopted(self) -> None:
        """Work out the free lists of adopted extents."""
        for extent in self.extents.values():
            extent.next_fresh = extent.slot_count
            extent.freed = deque(i for i, owner in enumerate(extent.owners) if owner is None)
            if not extent.has_free:
                extent.group.open.pop(extent.extent_id, None)
            if extent.used == 0:
                self.empty[extent.extent_id] = extent

    def check(self) -> None:
        """Assert the pool's invariants (visits every slot)."""
        used, reserved = 0, [0] * len(self._reserved_by_place)
        for extent in self.extents.values():
            owned = len(extent.owners) - extent.owners.count(None)
            assert owned == extent.used, f"extent {extent.extent_id}: {owned} owners, {extent.used} used"
            assert extent.used + len(extent.freed) + extent.slot_count - extent.next_fresh == extent.slot_count
            assert len(set(extent.freed)) == len(extent.freed)
            assert (extent.extent_id in extent.group.open) == extent.has_free
            assert (extent.extent_id in self.leaving) == extent.draining
            assert (extent.extent_id in self.empty) == (extent.used == 0), "an empty extent can be found"
            used += extent.used * extent.slot_bytes
        for extent in (*self.extents.values(), *self.retiring.values()):
            reserved[extent.group.place] += extent.size_bytes
        assert used == self.used_bytes
        assert self.leaving <= self.extents.keys() and self.empty.keys() <= self.extents.keys()
        assert reserved == self._reserved_by_place
        assert max(self._reserved_by_place) <= self._place_bytes, "the capacity holds at all times"

    def owned(self) -> dict[Copy, list[int]]:
        """Every copy that has slots, with these."""
        found: dict[Copy, list[int]] = {}
        for extent in self.extents.values():
            for slot, owner in enumerate(extent.owners, slot_id(extent.extent_id, 0)):
                if owner is None:
                    continue
                if owner in found:
                    found[owner].append(slot)
                else:
                    found[owner] = [slot]
        return found
