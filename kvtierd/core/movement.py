"""Moving copies between tiers: promotion for loads and prefetches, demotion by TTL, watermark, drain and need of room.

A demotion never takes the upper copy away before the lower one is readable; a failed move leaves everything as it was, except
that a source which cannot be read is forgotten (one that the machine has no room to read just now is not). A promotion keeps
its source, so that demoting the block again writes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Final, Protocol

from kvtierd.core.block import Copy, CopyState
from kvtierd.core.commands import Forget, Move, Priority, Progress, StartMoves
from kvtierd.core.realm import Realm
from kvtierd.core.space import Space
from kvtierd.core.state import CoreState
from kvtierd.core.tickets import Entry, ReadTicket
from kvtierd.errors import Reason
from kvtierd.model import Result, Tier

GROWTH_PAUSES: Final = 4
"""Pauses for which a tier that has extents does not grow after its device had no room."""
MAX_STEPS_PER_TICK: Final = 2048
"""Copies that one tick looks at; the rest follows in the next tick."""


_MISS_REASONS: Final = {Result.CORRUPT: Reason.CORRUPT, Result.NO_SPACE: Reason.BUSY}


class _Step(Enum):
    """How far a waiting key got without a move of its own."""

    DONE = "done"
    SESSION_FULL = "session_full"
    """Its session holds as much memory as it may; other sessions go on."""
    REALM_FULL = "realm_full"
    """Nothing can be freed for its realm at present; other realms go on."""
    TIER_FULL = "tier_full"
    """As much is on its way up as may be; nobody gets further, and nobody overtakes."""


class _Starter(Protocol):
    """Starts writing a copy down; False when that is not possible now."""

    def __call__(self, copy: Copy, why: str, *, drop: bool) -> bool: ...


class Mover:
    """Decides which moves start, and what their results mean."""

    def __init__(self, state: CoreState, space: Space) -> None:
        self._state = state
        self._space = space
        self._queues: dict[Priority, dict[ReadTicket, deque[int]]] = {Priority.LOAD: {}, Priority.PREFETCH: {}}
        """Keys that wait for a promotion, by ticket; bounded by the limits on tickets and keys."""
        self._promoting: dict[Copy, Move] = {}
        """Moves in flight that somebody waits for, by their target."""
        self.up_bytes = 0
        self.down_bytes = 0
        self._leaving_bytes = [0, 0, 0]
        """By tier: dirty bytes that are being written down."""
        self._in_use: deque[Copy] = deque()
        """While draining: copies that were in use when it began, so that they are in no LRU list."""
        self.ttl_due = False
        """Set when a TTL has run out; the next :meth:`pump` applies it."""

    @property
    def queue_depth(self) -> dict[str, int]:
        """Blocks that wait for a promotion or are being written down."""
        demoting = sum(m.priority is Priority.DEMOTE for m in self._state.moves.values())
        return {
            "load": sum(map(len, self._queues[Priority.LOAD].values())),
            "prefetch": sum(map(len, self._queues[Priority.PREFETCH].values())),
            "demote": demoting + len(self._state.demote_wanted),
        }

    @property
    def has_waiting(self) -> bool:
        """True when keys wait for a promotion that has not started; they are tried again at every tick too."""
        return any(self._queues.values())

    @property
    def ttl_goes_on(self) -> bool:
        """True when the next tick can apply more TTLs at once; while writes are in flight their results bring it on."""
        return self.ttl_due and not self._down_is_full()

    def want(self, ticket: ReadTicket, indexes: list[int]) -> None:
        """Queue keys of a ticket that are WAITING."""
        if indexes:
            self._queues[Priority.PREFETCH if ticket.prefetch else Priority.LOAD][ticket] = deque(indexes)

    def drain_in_use(self, copies: Iterable[Copy]) -> None:
        """Write these down too while draining: they have users, which may read on meanwhile."""
        self._in_use = deque(copies)

    def pump(self, now: float) -> None:
        """Start whatever may start. Called at the end of every event."""
        self._start_promotions(now)
        self._start_demotions(now)

    # ---- up

    def _start_promotions(self, now: float) -> None:
        full: set[Realm] = set()
        step = _Step.DONE
        for priority, queue in self._queues.items():
            if step is _Step.TIER_FULL:
                break
            moves: dict[Tier, list[Move]] = {}
            for ticket in list(queue):
                if ticket.realm in full and not ticket.closed:
                    continue
                step = self._advance_ticket(now, ticket, queue[ticket], priority, moves)
                if not queue[ticket]:
                    del queue[ticket]
                if step is _Step.REALM_FULL:
                    full.add(ticket.realm)
                if step is _Step.TIER_FULL:
                    break
            for src_tier, group in moves.items():
                self._state.commands.append(StartMoves(src_tier, Tier.CPU, priority, tuple(group)))

    def _advance_ticket(
        self, now: float, ticket: ReadTicket, indexes: deque[int], priority: Priority, moves: dict[Tier, list[Move]]
    ) -> _Step:
        while indexes:
            if ticket.entries[indexes[0]] == Entry.WAITING:
                step = self._advance(now, ticket, indexes[0], priority)
                if isinstance(step, Move):
                    moves.setdefault(step.src.tier, []).append(step)
                elif step is _Step.SESSION_FULL and ticket.prefetch:
                    # Nobody gives room back for a prefetch, as the reader of a load does: what fits is what it gets.
                    for index in indexes:
                        if ticket.entries[index] == Entry.WAITING:
                            self.miss(now, ticket, index, Reason.LIMIT)
                    indexes.clear()
                    return _Step.DONE
                elif step is not _Step.DONE:
                    return step
            indexes.popleft()
        return _Step.DONE

    def _advance(self, now: float, ticket: ReadTicket, index: int, priority: Priority) -> Move | _Step:
        """Bring one WAITING key further: a move to start, or how far it got."""
        state = self._state
        source = ticket.copies[index]
        assert source is not None
        block = source.block
        realm = block.realm
        held = ticket.session.held_bytes
        if held and held + realm.tier_bytes[Tier.CPU] > state.config.max_ticket_share * state.config.capacity_bytes[Tier.CPU]:
            return _Step.SESSION_FULL
        if block.cpu is not None and block.cpu.state is CopyState.READY:
            self._fulfil(now, ticket, index, block.cpu)
            return _Step.DONE
        if block.cpu is not None:
            # FILLING, so a move is on its way: clients get slots only for blocks that are held nowhere.
            self._wait(self._promoting[block.cpu], ticket, index)
            return _Step.DONE
        if source.state is not CopyState.READY:
            self.miss(now, ticket, index, Reason.UNSPECIFIED)
            return _Step.DONE
        size = realm.namespace.block_bytes
        if self.up_bytes and self.up_bytes + size > state.config.max_promote_bytes:
            return _Step.TIER_FULL
        slots = self._space.allocate(now, Tier.CPU, realm)
        if isinstance(slots, Reason):
            if slots is Reason.BUSY:
                return _Step.REALM_FULL
            self.miss(now, ticket, index, slots)
            return _Step.DONE
        target = state.new_copy(now, block, Tier.CPU, slots, priority.name.lower())
        move = self._begin(now, source, target, priority, priority.name.lower())
        self._wait(move, ticket, index)
        self.up_bytes += size
        return move

    @staticmethod
    def _wait(move: Move, ticket: ReadTicket, index: int) -> None:
        move.waiters.append((ticket, index))
        ticket.session.moving_bytes += ticket.realm.tier_bytes[Tier.CPU]

    def _fulfil(self, now: float, ticket: ReadTicket, index: int, copy: Copy) -> None:
        """A WAITING key became readable in ``copy``."""
        state = self._state
        old = ticket.copies[index]
        assert old is not None
        state.pin(copy)
        state.unpin(now, old)
        ticket.copies[index] = copy
        ticket.entries[index] = Entry.READY
        ticket.waiting -= 1
        ticket.session.ticket_bytes += copy.block.realm.tier_bytes[Tier.CPU]
        state.commands.append(Progress(ticket))

    def miss(self, now: float, ticket: ReadTicket, index: int, reason: Reason) -> None:
        """A key of a ticket that was WAITING or READY becomes a miss."""
        state = self._state
        copy = ticket.copies[index]
        assert copy is not None
        if ticket.entries[index] == Entry.WAITING:
            ticket.waiting -= 1
        else:
            ticket.session.ticket_bytes -= copy.block.realm.tier_bytes[Tier.CPU]
        ticket.entries[index] = Entry.MISSING
        ticket.copies[index] = None
        ticket.open -= 1
        ticket.reason = ticket.reason or reason
        state.unpin(now, copy)
        state.commands.append(Progress(ticket))

    def _begin(self, now: float, source: Copy, target: Copy, priority: Priority, why: str) -> Move:
        state = self._state
        size = source.block.realm.namespace.block_bytes
        state.pin(source)
        move = Move(next(state.ids), source, target, priority, now, why, size)
        state.moves[move.move_id] = move
        if target.tier is Tier.CPU:
            self._promoting[target] = move
        return move

    # ---- down

    def _start_demotions(self, now: float) -> None:
        state = self._state
        started: dict[tuple[Tier, Tier], list[Move]] = {}

        def start(copy: Copy, why: str, *, drop: bool) -> bool:
            move = self._demote(now, copy, why, drop=drop)
            if move is not None:
                started.setdefault((copy.tier, move.dst.tier), []).append(move)
            return move is not None

        for _ in range(min(len(state.demote_wanted), MAX_STEPS_PER_TICK)):
            if self._down_is_full():
                break
            copy, why = state.demote_wanted.popleft()
            self._leave(now, copy, why, start)
        while state.draining and self._in_use and not self._down_is_full():
            copy = self._in_use.popleft()
            if copy.state is CopyState.READY and not copy.is_clean and state.can_demote(copy.block.realm, copy.tier, now):
                start(copy, "drain", drop=False)
        for realm in list(self._space.hungry.values()):
            if self._down_is_full():
                break
            self._feed(now, realm, start)
        for tier in state.tiers:
            self._keep_free(now, tier, start)
        if self.ttl_due and not self._down_is_full():
            self._expire_idle(now, start)
        for (src, dst), moves in started.items():
            state.commands.append(StartMoves(src, dst, Priority.DEMOTE, tuple(moves)))

    def _down_is_full(self) -> bool:
        return self.down_bytes >= self._state.config.max_demote_bytes

    def _leave(self, now: float, copy: Copy, why: str, start: _Starter) -> None:
        """A copy whose extent drains: forget it when it is clean, else write it down."""
        state = self._state
        if copy.state is not CopyState.READY or copy.pins:
            return
        realm = copy.block.realm
        if copy.is_clean or not state.can_demote(realm, copy.tier, now) or not start(copy, why, drop=True):
            state.evict(now, copy, "pressure")

    def _feed(self, now: float, realm: Realm, start: _Starter) -> None:
        """A realm was refused room: write down some of its oldest copies that exist nowhere else."""
        state = self._state
        del self._space.hungry[realm.realm_id]
        for tier in (t for t in state.tiers if t is not Tier.NVME):
            if not state.can_demote(realm, tier, now) or realm.lru[tier].oldest_clean():
                continue
            batch = max(1, (16 << 20) // realm.tier_bytes[tier])
            for _ in range(batch):
                copy = realm.lru[tier].dirty.oldest
                if copy is None or self._down_is_full():
                    break
                if not start(copy, "pressure", drop=False):
                    break

    def _keep_free(self, now: float, tier: Tier, start: _Starter) -> None:
        """Write the oldest copies down until enough of a tier is free or clean (or all of it, while draining)."""
        state = self._state
        lower = state.lower(tier)
        if lower is None:
            return
        target = 0 if state.draining else (1 - state.config.free_target) * state.config.capacity_bytes[tier]
        order = state.dirty_order[tier]
        for _ in range(MAX_STEPS_PER_TICK):
            if self._down_is_full() or state.dirty_bytes[tier] - self._leaving_bytes[tier] <= target:
                return
            first = order.first()
            if first is None or not state.can_demote(first[1], tier, now):
                return
            copy = first[1].lru[tier].dirty.oldest
            assert copy is not None
            if not start(copy, "drain" if state.draining else "watermark", drop=False) and first[1] not in state.paused:
                return

    def _demote(self, now: float, source: Copy, why: str, *, drop: bool) -> Move | None:
        state = self._state
        lower = state.lower(source.tier)
        block = source.block
        if lower is None:
            return None
        # A copy below that is being filled is another move's, whose result is waited for.
        slots = Reason.BUSY if block.copy_on(lower) is not None else self._space.allocate(now, lower, block.realm, source)
        if isinstance(slots, Reason):
            if not state.pools[lower].retiring:
                state.pause(now, block.realm)
            return None
        target = state.new_copy(now, block, lower, slots, why)
        move = self._begin(now, source, target, Priority.DEMOTE, why)
        move.drop_source = drop
        self.down_bytes += move.size_bytes
        self._leaving(source, 1)
        return move

    def _leaving(self, source: Copy, sign: int) -> None:
        realm = source.block.realm
        self._leaving_bytes[source.tier] += sign * realm.tier_bytes[source.tier]
        realm.tenant.leaving_bytes[source.tier] += sign * realm.tier_bytes[source.tier]

    def _expire_idle(self, now: float, start: _Starter) -> None:
        """Apply the TTLs: clean copies go, others are written down first."""
        state = self._state
        self.ttl_due = False
        for tier in state.tiers:
            order = state.ttl_order[tier]
            for _ in range(MAX_STEPS_PER_TICK):
                first = order.first()
                if first is None or first[0] > now:
                    break
                if not self._expire_one(now, tier, first[1], start) and first[1] not in state.paused:
                    break
            else:
                self.ttl_due = True

    def _expire_one(self, now: float, tier: Tier, realm: Realm, start: _Starter) -> bool:
        """Handle the idlest copy of a realm. False when nothing more can be done for it at present."""
        state = self._state
        copy = realm.lru[tier].oldest()
        assert copy is not None
        if copy.is_clean or state.lower(tier) is None:
            state.evict(now, copy, "ttl")
            return True
        if self._down_is_full():
            self.ttl_due = True
            return False
        return state.can_demote(realm, tier, now) and start(copy, "ttl", drop=True)

    # ---- results

    def unmade(self, now: float, targets: set[Copy]) -> None:
        """There is no memory for these copies: end the moves that were to fill them. Their sources stay."""
        for move in [m for m in self._state.moves.values() if m.dst in targets]:
            self.done(now, move.move_id, Result.NO_SPACE)

    def done(self, now: float, move_id: int, result: Result) -> None:
        """Take in the result of a move."""
        state = self._state
        move = state.moves.pop(move_id)
        self._promoting.pop(move.dst, None)
        for ticket, _ in move.waiters:
            ticket.session.moving_bytes -= ticket.realm.tier_bytes[Tier.CPU]
        if move.priority is not Priority.DEMOTE:
            self.up_bytes -= move.size_bytes
        else:
            self.down_bytes -= move.size_bytes
            self._leaving(move.src, -1)
        state.counts.moves[(move.src.tier, move.dst.tier, result.value)] += 1
        if result is Result.OK:
            state.counts.move_bytes[(move.src.tier, move.dst.tier)] += move.size_bytes
            self._succeeded(now, move)
        else:
            self._failed(now, move, result)

    def _succeeded(self, now: float, move: Move) -> None:
        state = self._state
        target, source = move.dst, move.src
        if target.state is CopyState.FILLING:
            state.set_state(now, target, CopyState.READY, move.why)
        elif target.tier is Tier.NVME:
            # Evicted while it was written: what the store has recorded must go again.
            block = target.block
            state.commands.append(Forget(block.realm.realm_id, block.key, target.generation, target.all_slots()))
        for ticket, index in move.waiters:
            if ticket.entries[index] == Entry.WAITING:
                if target.state is CopyState.READY:
                    self._fulfil(now, ticket, index, target)
                else:
                    self.miss(now, ticket, index, Reason.UNSPECIFIED)
        state.unpin(now, target)
        state.unpin(now, source, written=move.priority is Priority.DEMOTE)
        if (
            move.drop_source
            and source.state is CopyState.READY
            and not source.pins
            and target.state is CopyState.READY
            and source.block.used_at_s <= move.started_s
        ):
            state.evict(now, source, "ttl" if move.why == "ttl" else "pressure")

    def _failed(self, now: float, move: Move, result: Result) -> None:
        state = self._state
        target, source = move.dst, move.src
        if target.state is CopyState.FILLING:
            state.set_state(now, target, CopyState.DOOMED, result.value)
        state.unpin(now, target)
        demoted = move.priority is Priority.DEMOTE
        if demoted:
            self._write_refused(now, target, result)
        elif source.state is CopyState.READY and result is not Result.NO_SPACE:
            state.evict(now, source, result.value)
        reason = _MISS_REASONS.get(result, Reason.IO)
        for ticket, index in move.waiters:
            if ticket.entries[index] == Entry.WAITING:
                self.miss(now, ticket, index, reason)
        state.unpin(now, source, oldest=demoted)

    def _write_refused(self, now: float, target: Copy, result: Result) -> None:
        """The device refused a write: stop growing, or stop using the extent, and pause."""
        state = self._state
        pool = state.pools[target.tier]
        until = now + state.config.retry_s
        state.suspended[target.tier] = (until, result.value)
        for slot in target.all_slots():
            extent = pool.extents.get(slot >> 32)
            if extent is not None and (result is Result.IO_ERROR or extent.used == 0):
                pool.drain(extent)
        if result is Result.NO_SPACE:
            # What exists is used again for a while before more is tried, or a tier on a disk that others filled takes nothing.
            pool.growth_blocked_until_s = now + state.config.retry_s * (GROWTH_PAUSES if pool.extents else 1)
        state.take_pool_commands(target.tier)
