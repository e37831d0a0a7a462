"""Moving copies between tiers: promotion for loads and prefetches, and what the results of moves, up or down, mean.

A promotion goes to CPU memory; from NVMe it goes to GPU memory directly where that is possible (``CoreState.direct``), the reader
can open it and it has room.

A demotion never takes the upper copy away before the lower one is readable; a failed move leaves everything as it was, except
that a source which cannot be read is forgotten (one that the machine has no room to read just now is not). Of a demotion to NVMe
CORRUPT says that it was the source. A promotion keeps its source, so that demoting the block again writes nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Final

from kvtierd.core.block import Block, Copy, CopyState
from kvtierd.core.commands import Forget, Move, Priority, Progress, StartMoves
from kvtierd.core.demotion import Demoter
from kvtierd.core.device_slots import DeviceSlots
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.rising import Riser
from kvtierd.core.space import Space
from kvtierd.core.state import CoreState
from kvtierd.core.tickets import Entry, ReadTicket
from kvtierd.errors import Reason
from kvtierd.model import Result, Tier

GROWTH_PAUSES: Final = 4
"""Pauses for which a tier that has extents does not grow after its device had no room."""

_MISS_REASONS: Final = {Result.CORRUPT: Reason.CORRUPT, Result.NO_SPACE: Reason.BUSY}


class _Step(Enum):
    """How far a waiting key got without a move of its own."""

    DONE = "done"
    SESSION_FULL = "session_full"
    """Its session holds as much memory as it may; other sessions go on."""
    REALM_FULL = "realm_full"
    """Nothing can be freed for its realm at present, where its reader can read it; others go on."""
    TIER_FULL = "tier_full"
    """As much is on its way up as may be; nobody gets further, and nobody overtakes."""


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
        self._down = Demoter(state, space, lambda now, source, target, why: self._begin(now, source, target, Priority.DEMOTE, why))
        self._riser = Riser(
            state, space, lambda now, source, target: self._begin(now, source, target, Priority.PREFETCH, "prefetch")
        )

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
    def next_rise_s(self) -> float | None:
        """When what a prefetch has brought to CPU memory may go on to GPU memory."""
        return self._riser.next_s()

    @property
    def ttl_goes_on(self) -> bool:
        """True when the next tick can apply more TTLs at once; while writes are in flight their results bring it on."""
        return self._down.ttl_due and not self._down.is_full

    @property
    def shrinks(self) -> bool:
        """True when the next tick can bring tenants further below what they hold too much."""
        return self._down.shrinks

    def limited(self, tenant: Tenant) -> None:
        """A tenant may hold more than it may: take it down."""
        self._down.limited(tenant)

    def want(self, ticket: ReadTicket, indexes: list[int]) -> None:
        """Queue keys of a ticket that are WAITING; those of a prefetch that are READY may go on to GPU memory."""
        if ticket.prefetch:
            for index, entry in enumerate(ticket.entries):
                if entry == Entry.READY:
                    self._riser.want(ticket, index)
        if indexes:
            self._queue(ticket).extend(indexes)

    def _queue(self, ticket: ReadTicket) -> deque[int]:
        """Keys of a ticket that wait for a promotion."""
        return self._queues[Priority.PREFETCH if ticket.prefetch else Priority.LOAD].setdefault(ticket, deque())

    def drain_in_use(self, copies: Iterable[Copy]) -> None:
        """Write these down too while draining: they have users, which may read on meanwhile."""
        self._down.drain_in_use(copies)

    def expire(self) -> None:
        """Time has passed: the next :meth:`pump` applies TTLs that have run out."""
        self._down.ttl_due = True

    def pump(self, now: float) -> None:
        """Start whatever may start. Called at the end of every event."""
        self._start_promotions(now)
        self._riser.start(now)
        self._down.start(now)

    # ---- up

    def _start_promotions(self, now: float) -> None:
        full: set[tuple[Realm, tuple[int, ...]]] = set()
        step = _Step.DONE
        for priority, queue in self._queues.items():
            if step is _Step.TIER_FULL:
                break
            moves: dict[tuple[Tier, Tier], list[Move]] = {}
            for ticket in list(queue):
                reader = ticket.realm, ticket.devices
                if reader in full and not ticket.closed:
                    continue
                step = self._advance_ticket(now, ticket, queue[ticket], priority, moves)
                if not queue[ticket]:
                    del queue[ticket]
                if step is _Step.REALM_FULL:
                    full.add(reader)
                if step is _Step.TIER_FULL:
                    break
            for (src, dst), group in moves.items():
                self._state.commands.append(StartMoves(src, dst, priority, tuple(group)))

    def _advance_ticket(
        self, now: float, ticket: ReadTicket, indexes: deque[int], priority: Priority, moves: dict[tuple[Tier, Tier], list[Move]]
    ) -> _Step:
        devices: dict[Realm, DeviceSlots] = {}
        while indexes:
            if ticket.entries[indexes[0]] == Entry.WAITING:
                step = self._advance(now, ticket, indexes[0], priority, devices)
                if isinstance(step, Move):
                    moves.setdefault((step.src.tier, step.dst.tier), []).append(step)
                elif step is _Step.SESSION_FULL and not _is_worth_waiting(ticket):
                    # Nobody gives room back for it, as the reader of another load does: what fits is what it gets.
                    for index in indexes:
                        if ticket.entries[index] == Entry.WAITING:
                            self.miss(now, ticket, index, Reason.LIMIT)
                    indexes.clear()
                    return _Step.DONE
                elif step is not _Step.DONE:
                    return step
            indexes.popleft()
        return _Step.DONE

    def _advance(
        self, now: float, ticket: ReadTicket, index: int, priority: Priority, devices: dict[Realm, DeviceSlots]
    ) -> Move | _Step:
        """Bring one WAITING key further: a move to start, or how far it got."""
        state = self._state
        source = ticket.copies[index]
        assert source is not None
        block = source.block
        realm = block.realm
        held = ticket.session.held_bytes
        if held and held + realm.tier_bytes[Tier.CPU] > state.config.ticket_limit_bytes(Tier.CPU):
            return _Step.SESSION_FULL
        readable = state.readable(block, ticket.devices)
        if readable is not None:
            self._fulfil(now, ticket, index, readable)
            return _Step.DONE
        coming = self._coming(block, ticket.devices)
        if coming is not None:
            self._wait(coming, ticket, index)
            return _Step.DONE
        if source.state is not CopyState.READY:
            self.miss(now, ticket, index, Reason.UNSPECIFIED)
            return _Step.DONE
        size = realm.namespace.block_bytes
        if self.up_bytes and self.up_bytes + size > state.config.max_promote_bytes:
            return _Step.TIER_FULL
        # What is in neither memory is on NVMe.
        slots: tuple[int, ...] | Reason = () if block.hbm is not None else self._in_device(now, ticket, block, devices)
        tier = Tier.HBM if slots else Tier.CPU
        if not slots:
            state.came_back(realm, block.key, Tier.CPU)
            slots = self._space.allocate(now, Tier.CPU, realm)
        if isinstance(slots, Reason):
            if slots is Reason.BUSY:
                return _Step.REALM_FULL
            self.miss(now, ticket, index, slots)
            return _Step.DONE
        target = state.new_copy(now, block, tier, slots, priority.name.lower())
        move = self._begin(now, source, target, priority, priority.name.lower())
        self._wait(move, ticket, index)
        self.up_bytes += size
        if tier is Tier.HBM:
            ticket.risen_bytes += realm.tier_bytes[tier]
        return move

    def _coming(self, block: Block, devices: tuple[int, ...]) -> Move | None:
        """The move that brings a block to where who can open the memory of these GPUs reads it; None when there is none."""
        if block.hbm in self._promoting and block.realm.is_open_to(devices):
            return self._promoting[block.hbm]
        # A FILLING copy in CPU memory has a move: clients get slots only for blocks that are held nowhere.
        return None if block.cpu is None else self._promoting[block.cpu]

    def _in_device(self, now: float, ticket: ReadTicket, block: Block, devices: dict[Realm, DeviceSlots]) -> tuple[int, ...]:
        """Slots in GPU memory, to which a block comes up from NVMe directly; () where it has to come by CPU memory.

        Args:
            devices: by realm, who gives slots to this ticket; nobody asks again where it was refused.
        """
        state = self._state
        if not (state.direct and ticket.devices) or state.draining:
            return ()
        giver = devices.get(block.realm)
        if giver is None:
            giver = devices[block.realm] = DeviceSlots(state, self._space, block.realm, ticket.devices)
        state.came_back(block.realm, block.key, Tier.HBM)
        return giver.take(now, ticket.risen_bytes)

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
        self._riser.want(ticket, index)
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
        if target.tier is not Tier.NVME and not move.rises:
            self._promoting[target] = move
        return move

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
        if move.rises:
            self._riser.ended(move)
        elif move.priority is not Priority.DEMOTE:
            self.up_bytes -= move.size_bytes
        else:
            self._down.ended(move)
        state.counts.moves[(move.src.tier, move.dst.tier, result.value)] += 1
        if move.is_within:
            self._space.packer.settle(now, move, result)
        elif result is Result.OK:
            state.counts.move_bytes[(move.src.tier, move.dst.tier)] += move.size_bytes
            if move.priority is Priority.DEMOTE:
                state.counts.demotions[(move.src.tier, move.why)] += 1
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
        # What was written down and not used meanwhile is as old as it was before.
        unused = move.priority is Priority.DEMOTE and source.block.used_at_s <= move.started_s
        state.unpin(now, target, sunk=unused)
        state.unpin(now, source, written=unused)
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
        if move.rises:
            if result is not Result.NO_SPACE:
                self._write_refused(now, target, result)
        elif demoted and result is not Result.CORRUPT and (target.tier is Tier.NVME or result is Result.NO_SPACE):
            self._write_refused(now, target, result)
        elif source.state is CopyState.READY and result is not Result.NO_SPACE:
            state.evict(now, source, result.value)
        goes_on = target.tier is Tier.HBM and not move.rises and result is Result.NO_SPACE
        if goes_on:  # by CPU memory, like what comes after it for a while
            state.turns.suspended[Tier.HBM] = (now + state.config.retry_s, result.value)
        reason = _MISS_REASONS.get(result, Reason.IO)
        for ticket, index in move.waiters:
            if ticket.entries[index] == Entry.WAITING:
                if goes_on:
                    insort(self._queue(ticket), index)
                else:
                    self.miss(now, ticket, index, reason)
        state.unpin(now, source, oldest=demoted)

    def _write_refused(self, now: float, target: Copy, result: Result) -> None:
        """The device refused a write: stop growing, or stop using the extent, and pause."""
        state = self._state
        pool = state.pools[target.tier]
        until = now + state.config.retry_s
        state.turns.suspended[target.tier] = (until, result.value)
        for slot in target.all_slots():
            extent = pool.extents.get(slot >> 32)
            if extent is not None and (result is Result.IO_ERROR or extent.used == 0):
                pool.drain(extent)
        if result is Result.NO_SPACE:
            # What exists is used again for a while before more is tried, or a tier on a disk that others filled takes nothing.
            pool.growth_blocked_until_s = now + state.config.retry_s * (GROWTH_PAUSES if pool.extents else 1)
        state.take_pool_commands(target.tier)


def _is_worth_waiting(ticket: ReadTicket) -> bool:
    """True when room may come back to the session of a ticket that lacks it: from its own reader, or, for a load, another one's."""
    if ticket.gives_back:
        return True
    others = (t for t in ticket.session.tickets.values() if t is not ticket)
    return not ticket.prefetch and any(not isinstance(t, ReadTicket) or t.gives_back for t in others)
