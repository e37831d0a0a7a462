"""The state of the core and its one mutator.

:meth:`CoreState.set_state` is the only place where a copy changes state; pins go through :meth:`pin` and :meth:`unpin`.
Everything that follows from a change (index, LRU lists, slots, usage, commands) happens there, so that no caller can forget
a part of it.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Final

from kvtierd.core.admission import TOO_IDLE, Admission
from kvtierd.core.block import TRANSITIONS, Block, Copy, CopyState
from kvtierd.core.commands import Command, Forget, Move, Renew, SpaceFreed
from kvtierd.core.expiry import Expiries
from kvtierd.core.limits import NO_LIMITS, Limits
from kvtierd.core.order import Lane, ghost_of, policy_of
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.settings import CoreConfig
from kvtierd.core.shares import Shares
from kvtierd.core.slots import SlotPool
from kvtierd.core.stats import Change, Counts, Forgotten, StoryEvent
from kvtierd.core.turns import Turns
from kvtierd.model import NO_END, Tier, slot_extent

STORY_EVENTS: Final = 32_768
"""State changes remembered over all blocks."""
DEPTH_S: Final = 1e-8
"""By so much a block of a request counts as used before the one that it follows, so that their order is known in every list of
every tier. The 65,536 blocks of the largest call span less than a millisecond."""
FOR_ROOM: Final = frozenset(["pressure", "ttl", "quota"])
"""Reasons of evictions that policy decides; the others are requests and failures."""
NOT_ADMITTED: Final = "not_admitted"
"""Reason of an eviction for one of these, where the block went for good because NVMe did not take it."""


class CoreState:
    """Blocks, slots, tenants, moves and what the shell still has to be told."""

    def __init__(self, config: CoreConfig, limits: dict[str, Limits]) -> None:
        self.config = config
        sizes = list(zip(config.capacity_bytes, config.extent_bytes, strict=True))
        self.pools = (
            SlotPool(Tier.HBM, *sizes[Tier.HBM], config.devices, config.device_piece_bytes),
            *(SlotPool(tier, *sizes[tier]) for tier in (Tier.CPU, Tier.NVME)),
        )
        self.shares = Shares(config)
        self.turns = Turns(config, self.shares)
        self.tiers = self.turns.tiers
        self.policy = policy_of(config.eviction, config.turn_bonus_s)
        self._remembers = config.eviction == "arc"
        self.admission = Admission(
            second_use=config.second_use, window_s=config.second_use_window_s, budget_bytes=config.write_budget_bytes
        )
        self.realms: dict[int, Realm] = {}
        self.realm_ids: dict[tuple[str, bytes, bool], int] = {}
        """By tenant, fingerprint, and whether it is shared."""
        self.commons: dict[bytes, list[Realm]] = {}
        """Shared realms by fingerprint."""
        self.tenants: dict[str, Tenant] = {}
        self.limits = dict(limits)
        """By the name of a tenant, whether it has been seen or not; others have NO_LIMITS."""
        self.moves: dict[int, Move] = {}
        self.ids = itertools.count(1)
        self.next_generation = 1
        self.copies = [0, 0, 0]
        self.dirty_bytes = [0, 0, 0]
        self.pinned_bytes = [0, 0, 0]
        self.refused_bytes = [0, 0, 0]
        """By tier: dirty bytes that the tier below did not admit, and that may be forgotten at once."""
        self.draining = False
        self.direct = False
        """Whether blocks may move between GPU memory and NVMe without a copy in CPU memory."""
        self.commands: list[Command] = []
        self.story: deque[StoryEvent] = deque(maxlen=STORY_EVENTS)
        self.counts = Counts()
        self.changes: list[Change] | None = None
        """Which copies became readable and which ceased to be, in order, for the shell to take; None while nobody follows."""
        self.forgotten: Forgotten | None = None
        """What was forgotten, for the shell to take; None while nobody follows."""
        self.expiries = Expiries()
        self.demote_wanted: deque[tuple[Copy, str]] = deque()
        """Copies that must leave their tier because their extent drains; each is listed once, so its length is bounded."""

    # ---- who

    def tenant(self, name: str) -> Tenant:
        """The tenant of this name, made when it is new."""
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = Tenant(name, self.limits.get(name, NO_LIMITS))
            self.shares.limited(found)
        return found

    def limit(self, tenant: Tenant, limits: Limits) -> None:
        """Change a tenant's limits; what it holds beyond them is another's to take down."""
        tenant.limits = limits
        self.shares.limited(tenant)
        self.turns.limited(tenant)

    def is_shared(self, tenant: str) -> bool:
        """Whether a tenant's scope is shared at present."""
        return self.limits.get(tenant, NO_LIMITS).shared

    def grew(self, tenant: Tenant, tier: Tier, size_bytes: int) -> None:
        """A tenant holds more than its ``notable_bytes``, by a copy of this size."""
        self.shares.grew(tenant, tier)
        reserve = tenant.limits.reserve_bytes[tier]
        if reserve and reserve < tenant.used_bytes[tier] <= reserve + size_bytes + tenant.largest_bytes:
            # Some of its realms have just become such as may give something up.
            for realm in tenant.realms:
                self.turns.changed(realm, tier)

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
        tenant, size_bytes = realm.tenant, realm.tier_bytes[tier]
        used_bytes = tenant.used_bytes[tier] = tenant.used_bytes[tier] + size_bytes
        if used_bytes > tenant.notable_bytes[tier]:
            self.grew(tenant, tier, size_bytes)
        pool = self.pools[tier]
        for slot in copy.all_slots():
            pool.set_owner(slot, copy)
        if realm.index.get(block.key) is not block:
            assert block.key not in realm.index
            realm.index[block.key] = block
            realm.held += 1
            tenant.blocks += 1

    def _become_ready(self, copy: Copy) -> None:
        block, tier = copy.block, copy.tier
        block.mask |= tier.bit
        block.realm.presence.changed(block.key)
        if self.changes is not None:
            self.changes.append(Change(block.realm, block.key, tier, True))
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
                    self._unlink(upper)
                    self._link(upper)

    def _leave_ready(self, copy: Copy, why: str) -> None:
        block, tier = copy.block, copy.tier
        if not copy.is_clean:
            self.dirty_bytes[tier] -= block.realm.tier_bytes[tier]
        if copy.lru is not None:
            self._unlink(copy)
        block.mask &= ~tier.bit
        block.realm.presence.changed(block.key)
        if self.changes is not None:
            self.changes.append(Change(block.realm, block.key, tier, False))
        cause = (tier, why)
        self.counts.evictions[cause] += 1
        block.realm.tenant.evictions[cause] += 1
        if self.forgotten is not None:
            self.forgotten.evicted[block.realm.tenant.name, tier, why] += 1
        if tier is Tier.NVME:
            block.prefix = None  # writing it again is decided anew
            self.commands.append(Forget(block.realm.realm_id, block.key, copy.generation, copy.all_slots()))
        for upper in block.copies():
            if upper.tier < tier and upper.state is CopyState.READY and not upper.is_clean:
                self.dirty_bytes[upper.tier] += block.realm.tier_bytes[upper.tier]
                if upper.lru is not None:
                    self._unlink(upper)
                    # The lower copy was the oldest of its tier, so this one is old too.
                    self._link(upper, oldest=True)

    def _detach(self, copy: Copy, *, free: bool) -> None:
        block, tier = copy.block, copy.tier
        realm = block.realm
        if block.copy_on(tier) is copy:
            block.set_copy(tier, None)
            if not block.copies():
                del realm.index[block.key]
                realm.held -= 1
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

    def _link(self, copy: Copy, *, oldest: bool = False, written: bool = False, sunk: bool = False) -> None:
        """Put a READY copy that nobody uses into the list where it belongs."""
        realm, tier = copy.block.realm, copy.tier
        lane = realm.orders[tier].lane(copy)
        moved, used = (lane.written, lane.clean) if copy.is_clean else (lane.sunk, lane.dirty)
        lru = moved if (written if copy.is_clean else sunk) else used
        if oldest:
            lru.append_oldest(copy)
        else:
            lru.append(copy)
        if lru.oldest is copy:
            self.turns.changed(realm, tier)

    def _unlink(self, copy: Copy) -> None:
        lru = copy.lru
        assert lru is not None
        lru.remove(copy)
        if self.refused_bytes[copy.tier] and any(lru is lane.refused for lane in copy.block.realm.orders[copy.tier].lanes):
            self.refused_bytes[copy.tier] -= copy.block.realm.tier_bytes[copy.tier]

    def touch(self, now: float, blocks: list[Block]) -> None:
        """Make a request's blocks the most recently used, from tail to head, so that leaves go before roots.

        A block's lane may have been changed just before: its copies follow.
        """
        depth = len(blocks)
        used: tuple[set[int], ...] = (set(), set(), set())
        for block in reversed(blocks):
            depth -= 1
            block.used_at_s = now - depth * DEPTH_S
            for copy in (block.cpu, block.nvme, block.hbm):
                if copy is None:
                    continue
                tier = copy.tier
                if isinstance(copy.slots, int):  # a bare one, as all_slots() has it: a tuple for each would cost five times as much
                    used[tier].add(copy.slots >> 32)
                else:
                    used[tier].update(map(slot_extent, copy.slots))
                lru = copy.lru
                if lru is None:
                    continue  # pinned: it is linked when its last user lets go
                lane: Lane = block.realm.orders[tier].lanes[block.lane]
                target = lane.clean if copy.is_clean else lane.dirty
                if lru is not target:
                    self._unlink(copy)
                    target.append(copy)
                    if target.oldest is copy:
                        self.turns.changed(block.realm, tier)
                elif lru.newest is not copy:
                    lru.remove(copy)
                    lru.append(copy)
        for pool, extents in zip(self.pools, used, strict=True):
            for extent_id in extents:
                pool.extents[extent_id].used_at_s = now

    def use(self, now: float, realm: Realm, blocks: list[Block], known: list[Block] | None = None) -> None:
        """A request uses blocks of a realm: touch them, and let the policy know of those that were there before it.

        Args:
            now: the time.
            realm: theirs.
            blocks: root first.
            known: those that were there before the request; None means all.
        """
        realm.tenant.used_at_s = now
        known = blocks if known is None else known
        if known:
            if self.admission.enabled:
                self.admission.used(now, known, realm.tier_bytes[Tier.NVME])
            lane = self.policy.lane_of_used(len(known))
            for block in known:
                # Never back: a root that many requests share must not go before the leaves of one of them.
                block.lane = max(block.lane, lane)
        self.touch(now, blocks)

    def came_back(self, realm: Realm, key: bytes, tier: Tier | None = None) -> bool:
        """A request wants a block that has no copy on a tier (None: on any). True when one went from there not long ago."""
        if not self._remembers:
            return False
        ghost = ghost_of(key)
        known = [realm.orders[t].came_back(ghost) for t in (self.tiers if tier is None else (tier,))]  # each has to hear of it
        return any(known)

    # ---- admission to NVMe

    def refusal(self, now: float, copy: Copy) -> str:
        """Why NVMe does not take the block of a copy that is to be written down; "" when it does, or when it is not to go there."""
        return self.not_admitted(now, copy) if self.turns.lower(copy.tier) is Tier.NVME else ""

    def not_admitted(self, now: float, copy: Copy) -> str:
        """The same of a copy on any tier, whatever is between that and NVMe."""
        realm = copy.block.realm
        ttl_s = self.turns.ttl_s(realm, Tier.NVME)
        if ttl_s is not None and now - realm.orders[copy.tier].rank_s(copy) >= ttl_s:
            return TOO_IDLE  # it would be forgotten as soon as it is there
        if not self.admission.enabled:
            return ""
        pool = self.pools[Tier.NVME]
        room_bytes = pool.capacity_bytes - pool.used_bytes
        return self.admission.refusal(now, copy.block, realm.tier_bytes[Tier.NVME], room_bytes)

    def refuse(self, copy: Copy) -> None:
        """NVMe does not take this copy's block: keep it as long as nobody needs the room."""
        realm, tier = copy.block.realm, copy.tier
        assert copy.lru is not None and not copy.is_clean
        self._unlink(copy)
        refused = realm.orders[tier].lane(copy).refused
        refused.append(copy)
        self.refused_bytes[tier] += realm.tier_bytes[tier]
        if refused.oldest is copy:
            self.turns.changed(realm, tier)

    def goes_down(self, now: float, target: Copy) -> None:
        """A copy is being written down: account for it."""
        if target.tier is Tier.NVME:
            self.admission.spend(now, target.block.realm.tenant, target.block.realm.tier_bytes[Tier.NVME])
        if self._remembers:
            target.block.realm.orders[target.tier].sank(ghost_of(target.block.key))

    def _leaves_for_room(self, now: float, copy: Copy, why: str) -> str:
        """Remember a copy that goes for room, as far as the policy wants to. Returns the reason that is counted."""
        block = copy.block
        if self._remembers and why != "ttl":
            block.realm.orders[copy.tier].went(copy)
        if self.admission.enabled and block.mask == copy.tier.bit:
            self.admission.forgotten(block)
            refusal = "" if copy.tier is Tier.NVME else self.refusal(now, copy)
            if refusal:
                self.counts.not_admitted[refusal] += 1
                if self.forgotten is not None:
                    self.forgotten.not_admitted[block.realm.tenant.name, refusal] += 1
                return NOT_ADMITTED
        return why

    def readable(self, block: Block, devices: tuple[int, ...]) -> Copy | None:
        """The copy that a client may read in place, given the GPU of each shard whose memory it can open; () for none."""
        if block.hbm is not None and block.hbm.state is CopyState.READY and block.realm.is_open_to(devices):
            return block.hbm
        return block.cpu if block.cpu is not None and block.cpu.state is CopyState.READY else None

    # ---- pins

    def pin(self, copy: Copy) -> None:
        """Keep a copy's slots until :meth:`unpin`; nobody evicts it for room meanwhile."""
        assert copy.state is not CopyState.ABSENT
        copy.pins += 1
        if copy.pins == 1:
            self.pinned_bytes[copy.tier] += copy.block.realm.tier_bytes[copy.tier]
            if copy.lru is not None:
                self._unlink(copy)

    def unpin(self, now: float, copy: Copy, *, oldest: bool = False, written: bool = False, sunk: bool = False) -> None:
        """Give a pin back; the last one frees a DOOMED copy.

        ``written``, ``sunk`` and ``oldest`` say where a copy belongs that was pinned by a move and not by a use.
        """
        assert copy.pins > 0
        copy.pins -= 1
        if copy.pins:
            return
        self.pinned_bytes[copy.tier] -= copy.block.realm.tier_bytes[copy.tier]
        if copy.state is CopyState.DOOMED:
            self.set_state(now, copy, CopyState.ABSENT, "last user let go")
        elif copy.state is CopyState.READY:
            self._link(copy, oldest=oldest, written=written, sunk=sunk)
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
        if why in FOR_ROOM and (self._remembers or self.admission.enabled):
            why = self._leaves_for_room(now, copy, why)
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
        if not self.commands or self.commands[-1] is not _SPACE_FREED:
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
        places = {move.dst for move in self.moves.values() if move.is_within}
        for pool in self.pools:
            pool.check()
            tier = pool.tier
            owned = pool.owned()
            for copy in places & owned.keys():
                assert copy.state is CopyState.ABSENT and copy.pins == 1 and copy.block.copy_on(tier) is not copy
                del owned[copy]
            dirty = pinned = refused = 0
            for copy, slots in owned.items():
                realm, state = copy.block.realm, copy.state
                size = realm.tier_bytes[tier]
                assert len(slots) == len(copy.all_slots()) == len(realm.slot_bytes), "whole blocks only"
                used[realm.tenant.name][tier] += size
                if copy.pins > 0:
                    pinned += size
                if state is CopyState.READY and not copy.is_clean:
                    dirty += size
                if copy.lru is not None and copy.lru is realm.orders[tier].lane(copy).refused:
                    refused += size
                assert state is not CopyState.DOOMED or (copy.pins and copy.block.copy_on(tier) is not copy)
            assert len(owned) == self.copies[tier]
            assert dirty == self.dirty_bytes[tier]
            assert pinned == self.pinned_bytes[tier]
            assert refused == self.refused_bytes[tier]
        for name, tenant in self.tenants.items():
            assert tenant.used_bytes == used[name]
            assert tenant.limits == self.limits.get(name, NO_LIMITS)
        self.shares.check(list(self.tenants.values()))


_SPACE_FREED = SpaceFreed()
