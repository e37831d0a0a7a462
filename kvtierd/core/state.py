"""The state of the core and its one mutator.

:meth:`CoreState.set_state` is the only place where a copy changes state; pins go through :meth:`pin` and :meth:`unpin`.
Everything that follows from a change (index, LRU lists, slots, usage, commands) happens there, so that no caller can forget
a part of it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvtierd.core.block import TRANSITIONS, Block, Copy, CopyState
from kvtierd.core.commands import Command, Forget, Move, Renew, SpaceFreed
from kvtierd.core.expiry import Expiries
from kvtierd.core.realm import Realm, TailHeap, Tenant
from kvtierd.core.slots import SlotPool
from kvtierd.model import NO_END, Tier, slot_extent

STORY_EVENTS: Final = 32_768
"""State changes remembered over all blocks."""


@dataclass(frozen=True)
class CoreConfig:
    """What the core needs to know. Bytes and seconds; a tier with capacity 0 is absent."""

    capacity_bytes: tuple[int, int, int]
    extent_bytes: tuple[int, int, int]
    ttl_s: tuple[float | None, float | None, float | None] = (30.0, 600.0, None)
    free_target: float = 0.15
    max_promote_bytes: int = 256 << 20
    """Most payload on its way up at one time; one block always may."""
    max_demote_bytes: int = 256 << 20
    max_tickets: int = 4096
    """Of one session."""
    max_ticket_share: float = 0.5
    """Of CPU memory, for one session's tickets; and for all pins together."""
    max_realms: int = 4096
    """Places for realms; those without blocks and sessions give theirs up when all are taken."""
    retry_s: float = 5.0
    """Pause after a device refused a write, or after no room was found below for a realm."""


class StoryEvent(NamedTuple):
    """One remembered change of a copy."""

    at_s: float
    key: bytes
    tier: Tier
    start: CopyState
    finish: CopyState
    why: str


@dataclass(slots=True)
class Counts:
    """Running totals since the start; names as in the metrics."""

    evictions: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    moves: Counter[tuple[Tier, Tier, str]] = field(default_factory=Counter)
    """By source, target and result."""
    move_bytes: Counter[tuple[Tier, Tier]] = field(default_factory=Counter)
    saves: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Keys by tenant and outcome."""
    failed_commands: Counter[str] = field(default_factory=Counter)
    """Commands that the shell could not run, by the name of their class."""


class CoreState:
    """Blocks, slots, tenants, moves and what the shell still has to be told."""

    def __init__(self, config: CoreConfig, quotas: Callable[[str], Tenant]) -> None:
        self.config = config
        self.pools = tuple(SlotPool(t, config.capacity_bytes[t], config.extent_bytes[t]) for t in Tier)
        self.tiers = tuple(t for t in Tier if config.capacity_bytes[t] > 0)
        self._lower = tuple(next((t for t in self.tiers if t > tier), None) for tier in Tier)
        self.realms: dict[int, Realm] = {}
        self.realm_ids: dict[tuple[str, bytes], int] = {}
        self.tenants: dict[str, Tenant] = {}
        self._new_tenant = quotas
        self.moves: dict[int, Move] = {}
        self.ids = itertools.count(1)
        self.next_generation = 1
        self.copies = [0, 0, 0]
        self.dirty_bytes = [0, 0, 0]
        self.pinned_bytes = [0, 0, 0]
        self.suspended: dict[Tier, tuple[float, str]] = {}
        self.paused: dict[Realm, float] = {}
        """Realms for which there was no room below, until when; the earliest first."""
        self.draining = False
        self.commands: list[Command] = []
        self.story: deque[StoryEvent] = deque(maxlen=STORY_EVENTS)
        self.counts = Counts()
        self.expiries = Expiries()
        self.demote_wanted: deque[tuple[Copy, str]] = deque()
        """Copies that must leave their tier because their extent drains; each is listed once, so its length is bounded."""
        self.dirty_order = tuple(TailHeap(self._dirty_place(t)) for t in Tier)
        self.ttl_order = tuple(TailHeap(self._ttl_place(t)) for t in Tier)
        self.nvme_order: dict[tuple[int, ...], TailHeap] = {}
        """By slot sizes: realms by the last use of their oldest copy."""
        self._quota_order: dict[tuple[str, Tier], tuple[TailHeap, TailHeap]] = {}
        """By tenant and tier, where there is a quota: realms by their oldest copy that exists below, and that does not."""

    # ---- who

    def tenant(self, name: str) -> Tenant:
        """The tenant of this name, made when it is new."""
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = self._new_tenant(name)
        return found

    def _ttl_place(self, tier: Tier) -> Callable[[Realm], float | None]:
        def place(realm: Realm) -> float | None:
            ttl_s = self.ttl_s(realm, tier) if realm not in self.paused else None
            oldest_s = realm.oldest_s(tier)
            return None if ttl_s is None or oldest_s is None else oldest_s + ttl_s

        return place

    def _dirty_place(self, tier: Tier) -> Callable[[Realm], float | None]:
        def place(realm: Realm) -> float | None:
            oldest = realm.lru[tier].dirty.oldest
            can_go = realm.writable and realm not in self.paused and self.fits_below(realm, tier)
            return oldest.block.used_at_s if oldest is not None and can_go else None

        return place

    def ttl_s(self, realm: Realm, tier: Tier) -> float | None:
        """Idle time after which a realm's copies leave a tier; None when they stay.

        Memory tiers have a TTL only where a lower tier takes the block: a TTL moves a block down, it does not lose it.
        """
        if tier is not Tier.NVME and not (realm.writable and self.fits_below(realm, tier)):
            return None
        own = realm.tenant.ttl_s[tier]
        return self.config.ttl_s[tier] if own is None else own

    def lower(self, tier: Tier) -> Tier | None:
        """The next lower tier that exists."""
        return self._lower[tier]

    def fits_below(self, realm: Realm, tier: Tier) -> bool:
        """True when the next lower tier could ever take a block of the realm."""
        lower = self.lower(tier)
        if lower is None:
            return False
        need = realm.tier_bytes[lower]
        quota = realm.tenant.quota_bytes[lower]
        return need <= self.config.capacity_bytes[lower] and (not quota or need <= quota)

    def takes_writes(self, tier: Tier | None, now: float) -> bool:
        """True when a tier exists and its device has not just refused a write."""
        return tier is not None and now >= self.suspended.get(tier, (0.0, ""))[0]

    def can_demote(self, realm: Realm, tier: Tier, now: float) -> bool:
        """True when a copy may be written down from a tier at present."""
        can_go = realm.writable and realm not in self.paused and self.fits_below(realm, tier)
        return can_go and self.takes_writes(self.lower(tier), now)

    def pause(self, now: float, realm: Realm) -> None:
        """Write nothing of a realm down for a while: there is no room for it. Others go on."""
        self.paused.pop(realm, None)
        self.paused[realm] = now + self.config.retry_s

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
                self.order_changed(realm, tier)

    def next_pause_end_s(self) -> list[float]:
        """When pauses end; of the realms' the first."""
        return [until for until, _ in self.suspended.values()] + list(itertools.islice(self.paused.values(), 1))

    # ---- the mutator

    def new_copy(self, now: float, block: Block, tier: Tier, slots: tuple[int, ...], why: str) -> Copy:
        """Start filling a copy in slots that were taken for it. The caller is its writer and holds its one pin."""
        copy = Copy(block, tier, slots[0] if len(slots) == 1 else slots)
        if tier is Tier.NVME:
            copy.generation = self.next_generation
            self.next_generation += 1
            copy.expires_s = block.expires_s
        self.set_state(now, copy, CopyState.FILLING, why)
        self.pin(copy)
        return copy

    def set_state(self, now: float, copy: Copy, finish: CopyState, why: str) -> None:
        """Change a copy's state, with everything that follows from it."""
        start, tier, block = copy.state, copy.tier, copy.block
        assert (start, finish) in TRANSITIONS, f"{tier.name} copy: {start.name} to {finish.name} ({why}) is not allowed"
        self.story.append(StoryEvent(now, block.key, tier, start, finish, why))
        copy.state = finish
        if start is CopyState.ABSENT:
            self._attach(copy)
        elif start is CopyState.READY:
            self._leave_ready(copy, why)
        if finish is CopyState.READY:
            self._become_ready(copy)
        elif finish is not CopyState.FILLING:
            self._detach(copy, free=finish is CopyState.ABSENT)

    def _attach(self, copy: Copy) -> None:
        block, tier = copy.block, copy.tier
        realm = block.realm
        assert block.copy_on(tier) is None
        block.set_copy(tier, copy)
        self.copies[tier] += 1
        realm.tenant.used_bytes[tier] += realm.tier_bytes[tier]
        pool = self.pools[tier]
        for slot in copy.all_slots():
            pool.set_owner(slot, copy)
        if realm.index.get(block.key) is not block:
            assert block.key not in realm.index
            realm.index[block.key] = block
            realm.tenant.blocks += 1

    def _become_ready(self, copy: Copy) -> None:
        block, tier = copy.block, copy.tier
        block.mask |= tier.bit
        block.realm.presence.changed(block.key)
        extents = self.pools[tier].extents
        for slot in copy.all_slots():
            extent = extents[slot >> 32]
            extent.used_at_s = max(extent.used_at_s, block.used_at_s)
        if not copy.is_clean:
            self.dirty_bytes[tier] += block.realm.tier_bytes[tier]
        if not copy.pins:
            self._link(copy)
        if tier is Tier.NVME and copy.expires_s != block.expires_s:
            # The block was saved again while it was written.
            copy.expires_s = block.expires_s
            self.commands.append(Renew(block.realm.realm_id, block.key, copy.generation, copy.all_slots(), block.expires_s))
        for upper in block.copies():
            # The first lower copy makes an upper one clean.
            if upper.tier >= tier or upper.state is not CopyState.READY:
                continue
            if block.mask >> (upper.tier + 1) == 1 << (tier - upper.tier - 1):
                self.dirty_bytes[upper.tier] -= block.realm.tier_bytes[upper.tier]
                if upper.lru is not None:
                    upper.lru.remove(upper)
                    self._link(upper)

    def _leave_ready(self, copy: Copy, why: str) -> None:
        block, tier = copy.block, copy.tier
        if not copy.is_clean:
            self.dirty_bytes[tier] -= block.realm.tier_bytes[tier]
        if copy.lru is not None:
            copy.lru.remove(copy)
        block.mask &= ~tier.bit
        block.realm.presence.changed(block.key)
        self.counts.evictions[(tier, why)] += 1
        if tier is Tier.NVME:
            self.commands.append(Forget(block.realm.realm_id, block.key, copy.generation, copy.all_slots()))
        for upper in block.copies():
            if upper.tier < tier and upper.state is CopyState.READY and not upper.is_clean:
                self.dirty_bytes[upper.tier] += block.realm.tier_bytes[upper.tier]
                if upper.lru is not None:
                    upper.lru.remove(upper)
                    # The lower copy was the oldest of its tier, so this one is old too.
                    self._link(upper, oldest=True)

    def _detach(self, copy: Copy, *, free: bool) -> None:
        block, tier = copy.block, copy.tier
        realm = block.realm
        if block.copy_on(tier) is copy:
            block.set_copy(tier, None)
            if not block.copies():
                del realm.index[block.key]
                realm.tenant.blocks -= 1
                if block.expires_s != NO_END:
                    self.expiries.gone(block)
        if free:
            assert copy.pins == 0
            self.copies[tier] -= 1
            realm.tenant.used_bytes[tier] -= realm.tier_bytes[tier]
            pool = self.pools[tier]
            for slot in copy.all_slots():
                pool.free(slot)
            self.take_pool_commands(tier)
            self.space_freed()

    # ---- LRU lists

    def _link(self, copy: Copy, *, oldest: bool = False, written: bool = False) -> None:
        """Put a READY copy that nobody uses into the list where it belongs."""
        realm, tier = copy.block.realm, copy.tier
        lists = realm.lru[tier]
        lru = lists.dirty if not copy.is_clean else lists.written if written else lists.clean
        if oldest:
            lru.append_oldest(copy)
        else:
            lru.append(copy)
        if lru.oldest is copy:
            self.order_changed(realm, tier)

    def order_changed(self, realm: Realm, tier: Tier) -> None:
        """Note that a realm's tail on a tier may come earlier than known."""
        self.dirty_order[tier].push(realm)
        self.ttl_order[tier].push(realm)
        if tier is Tier.NVME:
            self.nvme_heap(realm).push(realm)
        if realm.tenant.quota_bytes[tier]:
            for heap in self.quota_order(realm.tenant, tier):
                heap.push(realm)

    def quota_order(self, tenant: Tenant, tier: Tier) -> tuple[TailHeap, TailHeap]:
        """A tenant's realms by their oldest copy that exists below, and by their oldest that does not."""
        heaps = self._quota_order.get((tenant.name, tier))
        if heaps is None:
            clean = TailHeap(lambda r: _used_at_s(r.lru[tier].oldest_clean()))
            dirty = TailHeap(lambda r: _used_at_s(r.lru[tier].dirty.oldest))
            heaps = self._quota_order[(tenant.name, tier)] = clean, dirty
        return heaps

    def nvme_heap(self, realm: Realm) -> TailHeap:
        """Realms whose NVMe slots have the sizes of this realm's, oldest tail first."""
        heap = self.nvme_order.get(realm.nvme_slot_bytes)
        if heap is None:
            heap = self.nvme_order[realm.nvme_slot_bytes] = TailHeap(lambda r: r.oldest_s(Tier.NVME))
        return heap

    def drop_from_orders(self, realm: Realm) -> None:
        """Take a realm that is forgotten out of every order."""
        owned = [heap for (name, _), pair in self._quota_order.items() if name == realm.tenant.name for heap in pair]
        for heap in (*self.dirty_order, *self.ttl_order, *self.nvme_order.values(), *owned):
            heap.drop(realm)

    def touch(self, now: float, blocks: list[Block]) -> None:
        """Make a request's blocks the most recently used, from tail to head, so that leaves go before roots."""
        pools = self.pools
        for block in reversed(blocks):
            block.used_at_s = now
            for copy in (block.cpu, block.nvme, block.hbm):
                if copy is None:
                    continue
                extents = pools[copy.tier].extents
                for slot in copy.all_slots():
                    extents[slot_extent(slot)].used_at_s = now
                if copy.lru is None:
                    continue  # pinned: it is linked when its last user lets go
                lru = copy.lru
                lists = block.realm.lru[copy.tier]
                if lru is lists.written:
                    lru.remove(copy)
                    lists.clean.append(copy)
                    if lists.clean.oldest is copy:
                        self.order_changed(block.realm, copy.tier)
                elif lru.newest is not copy:
                    lru.remove(copy)
                    lru.append(copy)

    # ---- pins

    def pin(self, copy: Copy) -> None:
        """Keep a copy's slots until :meth:`unpin`; nobody evicts it for room meanwhile."""
        assert copy.state is not CopyState.ABSENT
        copy.pins += 1
        if copy.pins == 1:
            self.pinned_bytes[copy.tier] += copy.block.realm.tier_bytes[copy.tier]
            if copy.lru is not None:
                copy.lru.remove(copy)

    def unpin(self, now: float, copy: Copy, *, oldest: bool = False, written: bool = False) -> None:
        """Give a pin back; the last one frees a DOOMED copy.

        ``written`` and ``oldest`` say where a copy belongs that was pinned by a move and not by a use.
        """
        assert copy.pins > 0
        copy.pins -= 1
        if copy.pins:
            return
        self.pinned_bytes[copy.tier] -= copy.block.realm.tier_bytes[copy.tier]
        if copy.state is CopyState.DOOMED:
            self.set_state(now, copy, CopyState.ABSENT, "last user let go")
        elif copy.state is CopyState.READY:
            self._link(copy, oldest=oldest, written=written)
            if self.is_draining(copy):
                self.demote_wanted.append((copy, "extent"))
            self.space_freed()

    def is_draining(self, copy: Copy) -> bool:
        """True when a copy sits in an extent that drains."""
        pool = self.pools[copy.tier]
        if not pool.leaving:
            return False
        extents = pool.extents
        return any(extents[slot_extent(slot)].draining for slot in copy.all_slots())

    # ---- evicting

    def evict(self, now: float, copy: Copy, why: str) -> None:
        """Forget a copy; its slots come back at once or when its last user lets go."""
        self.set_state(now, copy, CopyState.DOOMED if copy.pins else CopyState.ABSENT, why)

    def evict_block(self, now: float, block: Block, why: str) -> int:
        """Forget every copy of a block. Returns how many there were."""
        copies = block.copies()
        for copy in copies:
            self.evict(now, copy, why)
        return len(copies)

    # ---- commands

    def space_freed(self) -> None:
        """Tell the shell once a batch that refused callers may try again."""
        if not self.commands or self.commands[-1] != _SPACE_FREED:
            self.commands.append(_SPACE_FREED)

    def take_pool_commands(self, tier: Tier) -> None:
        """Pass a pool's commands on, in order."""
        pool = self.pools[tier]
        if pool.commands:
            self.commands.extend(pool.commands)
            pool.commands.clear()

    def check_usage(self) -> None:
        """Assert that the counters equal what the slots say (visits every slot)."""
        used = {name: [0, 0, 0] for name in self.tenants}
        for pool in self.pools:
            pool.check()
            seen: dict[Copy, int] = {}
            for _, copy in pool.slots_in_use():
                seen[copy] = seen.get(copy, 0) + 1
            dirty = pinned = 0
            for copy, slots in seen.items():
                realm = copy.block.realm
                size = realm.tier_bytes[pool.tier]
                assert slots == len(copy.all_slots()) == len(realm.slot_bytes), "whole blocks only"
                used[realm.tenant.name][pool.tier] += size
                pinned += size * (copy.pins > 0)
                dirty += size * (copy.state is CopyState.READY and not copy.is_clean)
                assert copy.state is not CopyState.DOOMED or (copy.pins and copy.block.copy_on(pool.tier) is not copy)
            assert len(seen) == self.copies[pool.tier]
            assert dirty == self.dirty_bytes[pool.tier]
            assert pinned == self.pinned_bytes[pool.tier]
        for name, tenant in self.tenants.items():
            assert tenant.used_bytes == used[name]


def _used_at_s(copy: Copy | None) -> float | None:
    return None if copy is None else copy.block.used_at_s


_SPACE_FREED = SpaceFreed()
