"""Moving copies down: by TTL, watermark, drain, and where room is needed.

A copy goes down only when its realm may write, the tier below takes writes, and, on the way to NVMe, the block is admitted
(``core/admission.py``). One that is not admitted stays for as long as nobody needs its room.

Copies in GPU memory go to CPU memory. Where it is possible (``CoreState.direct``) they go to NVMe directly while draining, and when
CPU memory has no room for them and none is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvtierd.core.block import Copy, CopyState
from kvtierd.core.commands import Move, Priority, StartMoves
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.space import Space
from kvtierd.core.state import CoreState
from kvtierd.errors import Reason
from kvtierd.model import Tier

MAX_STEPS_PER_TICK: Final = 2048
"""Copies that one tick looks at; the rest follows in the next tick."""
MAX_SHRUNK_PER_TICK: Final = 256
"""Copies that one tick takes from tenants that hold more than their quota."""
FEED_BYTES: Final = 16 << 20
"""Written down at a time for a realm that was refused room."""


class _Starter(Protocol):
    """Starts writing a copy down; False when that is not possible now."""

    def __call__(self, copy: Copy, why: str, *, drop: bool) -> bool: ...


class Demoter:
    """Decides which copies go down.

    Args:
        state: is changed.
        space: makes room.
        begin: enters a move from a source to a target, with its reason.
    """

    def __init__(self, state: CoreState, space: Space, begin: Callable[[float, Copy, Copy, str], Move]) -> None:
        self._state = state
        self._space = space
        self._begin = begin
        self.down_bytes = 0
        """Payload on its way down, or to another extent."""
        self._leaving_bytes = [0, 0, 0]
        """By tier: dirty bytes that are being written down."""
        self._in_use: deque[Copy] = deque()
        """While draining: copies that were in use when it began, so that they are in no LRU list."""
        self.ttl_due = False
        """Set when a TTL has run out; the next :meth:`start` applies it."""
        self._over_quota: dict[tuple[Tenant, Tier], None] = {}
        """Tenants that hold more than their quota, which was more before."""
        self.shrinks = False
        """True when more of them can go at the next tick; else an event is waited for that lets something go."""

    def limited(self, tenant: Tenant) -> None:
        """A tenant may hold more than its quota: what is too much goes, a portion a tick."""
        for tier in self._state.tiers:
            quota = tenant.limits.quota(tier)
            if quota is not None and tenant.used_bytes[tier] > quota:
                self._over_quota[(tenant, tier)] = None
                self.shrinks = True

    @property
    def is_full(self) -> bool:
        """True when as much is on its way down as may be."""
        return self.down_bytes >= self._state.config.max_demote_bytes

    def drain_in_use(self, copies: Iterable[Copy]) -> None:
        """Write these down too while draining: they have users, which may read on meanwhile."""
        self._in_use = deque(copies)

    def start(self, now: float) -> None:
        """Start whatever may start."""
        state = self._state
        started: dict[tuple[Tier, Tier], list[Move]] = {}

        def note(move: Move) -> None:
            started.setdefault((move.src.tier, move.dst.tier), []).append(move)

        def start(copy: Copy, why: str, *, drop: bool) -> bool:
            move = self._demote(now, copy, why, drop=drop)
            if move is not None:
                note(move)
            return move is not None

        for _ in range(min(len(state.demote_wanted), MAX_STEPS_PER_TICK)):
            if self.is_full:
                break
            copy, why = state.demote_wanted.popleft()
            if copy.state is CopyState.READY and not copy.pins and state.is_draining(copy):
                self._leave(now, copy, why, start, note)
        while state.draining and self._in_use and not self.is_full:
            copy = self._in_use.popleft()
            if copy.state is CopyState.READY and not copy.is_clean and self._may_go(now, copy):
                start(copy, "drain", drop=False)
        for realm in list(self._space.hungry.values()):
            if self.is_full:
                break
            self._feed(now, realm, start)
        for tier in state.tiers:
            self._keep_free(now, tier, start)
        if self._over_quota and (self.ttl_due or not self.shrinks):
            self._shrink(now, start)
        if self.ttl_due and not self.is_full:
            self._expire_idle(now, start)
        for (src, dst), moves in started.items():
            state.commands.append(StartMoves(src, dst, Priority.DEMOTE, tuple(moves)))

    def _leave(self, now: float, copy: Copy, why: str, start: _Starter, note: Callable[[Move], None]) -> None:
        """A copy whose extent drains: move it to another extent, or keep both, where a reserve may keep it. Else forget it when it
        is clean or not admitted below, or write it down.
        """
        state, packer = self._state, self._space.packer
        if packer.packs(copy):
            place = packer.place(copy)
            if place is not None:
                move = self._begin(now, copy, place, "packed")
                self.down_bytes += move.size_bytes
                note(move)
                return
            if packer.keeps(copy):
                packer.stay(copy)
                return
        if copy.is_clean or not self._may_go(now, copy):
            state.evict(now, copy, "pressure")
        elif not start(copy, why, drop=True):
            if copy.tier is Tier.HBM and copy.block.realm not in state.turns.paused and self._is_worth_waiting(now, copy):
                state.demote_wanted.append((copy, why))
            else:
                state.evict(now, copy, "pressure")

    def _is_worth_waiting(self, now: float, copy: Copy) -> bool:
        """Whether the tier below may have room for a copy later: it writes down itself, its users let go, or a pause ends there."""
        lower = self._state.turns.lower(copy.tier)
        if lower is None:
            return False
        pool = self._state.pools[lower]
        is_paused = now < pool.growth_blocked_until_s or not pool.asked_long_ago(now)
        return is_paused or self._state.pinned_bytes[lower] > 0 or self._makes_room(lower)

    def _may_go(self, now: float, copy: Copy) -> bool:
        state = self._state
        return state.turns.can_demote(copy.block.realm, copy.tier, now) and not state.refusal(now, copy)

    def _feed(self, now: float, realm: Realm, start: _Starter) -> None:
        """A realm was refused room: write down some of its next copies that exist nowhere else."""
        state = self._state
        del self._space.hungry[realm.realm_id]
        for tier in (t for t in reversed(state.tiers) if t is not Tier.NVME):
            order = realm.orders[tier]
            if not state.turns.can_demote(realm, tier, now) or order.next_spare():
                continue
            for _ in range(max(1, FEED_BYTES // realm.tier_bytes[tier])):
                copy = order.next_dirty()
                if copy is None or self.is_full:
                    break
                if state.refusal(now, copy):
                    state.refuse(copy)
                    state.space_freed()
                elif not start(copy, "pressure", drop=False):
                    break

    def _keep_free(self, now: float, tier: Tier, start: _Starter) -> None:
        """Write copies down until enough of a tier is free or spare (or all of it, while draining)."""
        state = self._state
        turns = state.turns
        if turns.lower(tier) is None:
            return
        target = 0 if state.draining else (1 - state.config.free_target) * state.pools[tier].opened_bytes
        for _ in range(MAX_STEPS_PER_TICK):
            left = state.dirty_bytes[tier] - state.refused_bytes[tier] - self._leaving_bytes[tier]
            if self.is_full or left <= target:
                return
            realm = turns.next_dirty(tier)
            if realm is None or not turns.can_demote(realm, tier, now):
                return
            copy = realm.orders[tier].next_dirty()
            assert copy is not None
            if state.refusal(now, copy):
                state.refuse(copy)
            elif not start(copy, "drain" if state.draining else "watermark", drop=False) and realm not in turns.paused:
                return

    def _demote(self, now: float, source: Copy, why: str, *, drop: bool) -> Move | None:
        state = self._state
        lower = state.turns.lower(source.tier)
        block = source.block
        if lower is None or block.copies()[-1] is not source:
            return None  # a copy below that is being filled is another move's, whose result is waited for
        tier, slots = self._place(now, source, lower)
        if isinstance(slots, Reason):
            # A tier that is being emptied, or that writes down itself, has room soon: see _feed.
            soon = state.pools[tier].retiring or (slots is Reason.BUSY and state.turns.can_demote(block.realm, tier, now))
            if not soon:
                state.turns.pause(now, block.realm)
            return None
        target = state.new_copy(now, block, tier, slots, why)
        move = self._begin(now, source, target, why)
        move.drop_source = drop
        self.down_bytes += move.size_bytes
        self._leaving(move, 1)
        state.goes_down(now, target)
        return move

    def _place(self, now: float, source: Copy, lower: Tier) -> tuple[Tier, tuple[int, ...] | Reason]:
        """Where a copy goes down to, and its slots there; or which tier has none, and why: NVMe where that was asked."""
        state, block = self._state, source.block
        ways = [lower]
        if state.direct and (source.tier, lower) == (Tier.HBM, Tier.CPU) and state.turns.can_demote(block.realm, lower, now):
            ways.insert(0 if state.draining else 1, Tier.NVME)
        refused = lower, Reason.BUSY
        for tier in ways:
            is_direct = tier is not lower
            if is_direct and ((not state.draining and self._room_comes(lower)) or state.not_admitted(now, source)):
                continue
            slots = self._space.allocate(now, tier, block.realm, source)
            if not isinstance(slots, Reason):
                if is_direct:
                    self._space.hungry.pop(block.realm.realm_id, None)  # nothing else has to go for it
                return tier, slots
            if refused[0] is lower:
                refused = tier, slots
        return refused

    def _leaving(self, move: Move, sign: int) -> None:
        realm, tier = move.src.block.realm, move.src.tier
        self._leaving_bytes[tier] += sign * realm.tier_bytes[tier]
        realm.tenant.leaving_bytes[tier] += sign * realm.tier_bytes[tier]
        if move.drop_source:
            realm.tenant.going_bytes[tier] += sign * realm.tier_bytes[tier]

    def ended(self, move: Move) -> None:
        """A move down, or within its tier, has ended, well or not."""
        self.down_bytes -= move.size_bytes
        if not move.is_within:
            self._leaving(move, -1)

    def _expire_idle(self, now: float, start: _Starter) -> None:
        """Apply the TTLs: spare copies go, others are written down first."""
        state = self._state
        self.ttl_due = False
        for tier in state.tiers:
            order = state.turns.ttl[tier]
            for _ in range(MAX_STEPS_PER_TICK):
                first = order.first()
                if first is None or first[0] > now:
                    break
                if not self._expire_one(now, tier, first[1], start) and first[1] not in state.turns.paused:
                    break
            else:
                self.ttl_due = True

    def _expire_one(self, now: float, tier: Tier, realm: Realm, start: _Starter) -> bool:
        """Handle the idlest copy of a realm. False when nothing more can be done for it at present."""
        state = self._state
        copy = realm.orders[tier].oldest()
        assert copy is not None
        if copy.is_clean or state.turns.lower(tier) is None or state.refusal(now, copy):
            state.evict(now, copy, "ttl")
            return True
        if self.is_full:
            self.ttl_due = True
            return False
        return state.turns.can_demote(realm, tier, now) and start(copy, "ttl", drop=True)

    # ---- after a cut of a quota

    def _shrink(self, now: float, start: _Starter) -> None:
        """Take a portion of what tenants hold beyond their quotas."""
        self.shrinks = False
        left = MAX_SHRUNK_PER_TICK
        for tenant, tier in list(self._over_quota):
            while _excess_bytes(tenant, tier) > 0:
                if left <= 0:
                    self.shrinks = True
                    return
                left -= 1
                if not self._shrink_one(now, tenant, tier, start):
                    break
            else:
                if not tenant.leaving_bytes[tier]:
                    del self._over_quota[(tenant, tier)]

    def _shrink_one(self, now: float, tenant: Tenant, tier: Tier, start: _Starter) -> bool:
        """Forget or write down the oldest copy of a tenant that nobody uses. False when there is none, or it has to wait."""
        state = self._state
        spare, dirty = (heap.first() for heap in state.turns.tails(tenant, tier))
        if spare is not None and (dirty is None or spare[0] <= dirty[0]):
            copy = spare[1].orders[tier].next_spare()
            assert copy is not None
            state.evict(now, copy, "quota")
            return True
        if dirty is None:
            return False
        realm = dirty[1]
        copy = realm.orders[tier].next_dirty()
        assert copy is not None
        turns = state.turns
        may_go = realm.writable and realm not in turns.paused and turns.fits_below(realm, tier) and not state.refusal(now, copy)
        if may_go:
            if self.is_full or not turns.takes_writes(turns.lower(tier), now):
                return False
            if start(copy, "quota", drop=True):
                return True
            if realm not in turns.paused and self._makes_room(turns.lower(tier)):
                return False
        state.evict(now, copy, "quota")
        return True

    def _makes_room(self, tier: Tier | None) -> bool:
        """Whether room may come on a tier that has none: something is under way there, or can still be written down."""
        return tier is not None and (bool(self._state.moves) or self._room_comes(tier))

    def _room_comes(self, tier: Tier) -> bool:
        """Whether something leaves a tier, or can be written down from it."""
        pool = self._state.pools[tier]
        return bool(self._leaving_bytes[tier] or pool.leaving or pool.retiring or self._state.turns.next_dirty(tier))


def _excess_bytes(tenant: Tenant, tier: Tier) -> int:
    """Bytes beyond the quota that are not on their way down yet."""
    quota = tenant.limits.quota(tier)
    return 0 if quota is None else tenant.used_bytes[tier] - tenant.leaving_bytes[tier] - quota
