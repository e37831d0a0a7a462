"""Loads and prefetches: pinning what is held, handing it out in order, letting it go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvtierd.core.alarms import Alarms
from kvtierd.core.block import Block, Copy, CopyState, fastest, flat_slots, ready_copy
from kvtierd.core.movement import Mover
from kvtierd.core.realm import Realm
from kvtierd.core.state import CoreState
from kvtierd.core.tickets import Entry, ReadTicket, Session
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier

_READY: Final = bytes([Entry.READY])


class Reads:
    """Open loads and prefetches over a :class:`CoreState`."""

    def __init__(self, state: CoreState, mover: Mover, alarms: Alarms) -> None:
        self._state = state
        self._mover = mover
        self._alarms = alarms
        self.open: dict[int, ReadTicket] = {}
        """By ticket id."""

    def load(
        self,
        now: float,
        session: Session,
        realm: Realm,
        keys: list[bytes],
        deadline_s: float,
        *,
        each: bool,
        devices: tuple[int, ...] = (),
        keeps: bool = False,
    ) -> ReadTicket:
        """Pin what is held of the keys; :meth:`collect` hands it out as it becomes readable, from the memory of these GPUs too.

        Raises:
            RequestError: LIMIT when the session has too many tickets.
        """
        ticket = self._read_ticket(now, session, realm, keys, deadline_s, each=each, prefetch=False, devices=devices, keeps=keeps)
        tenant = realm.tenant
        for mask in set(ticket.found_on) - {0}:
            tenant.hits[fastest(mask)] += ticket.found_on.count(mask)
        tenant.misses += len(keys) - len(ticket.found_on) + ticket.found_on.count(0)
        self._take_over_prefetches(now, session, ticket)
        self._mover.pump(now)
        return ticket

    def _take_over_prefetches(self, now: float, session: Session, load: ReadTicket) -> None:
        """End the prefetch that this load pins itself now, and others where they would keep the load from its memory."""
        limit = self._state.config.ticket_limit_bytes(Tier.CPU)
        wanted = load.waiting * load.realm.tier_bytes[Tier.CPU]
        for other in list(session.tickets.values()):
            if not isinstance(other, ReadTicket) or not other.prefetch:
                continue
            if _covers(load, other) or (wanted and session.held_bytes + wanted > limit):
                self.close(now, other)

    def prefetch(
        self,
        now: float,
        session: Session,
        realm: Realm,
        keys: list[bytes],
        deadline_s: float,
        devices: tuple[int, ...] = (),
    ) -> ReadTicket:
        """Start promoting the prefix that is held, to the memory of these GPUs too; it stays pinned in CPU memory, or where its
        reader can read it already, until the deadline, a load or :meth:`cancel`.
        """
        ticket = self._read_ticket(now, session, realm, keys, deadline_s, each=False, prefetch=True, devices=devices)
        self._mover.pump(now)
        return ticket

    def _read_ticket(
        self,
        now: float,
        session: Session,
        realm: Realm,
        keys: list[bytes],
        deadline_s: float,
        *,
        each: bool,
        prefetch: bool,
        devices: tuple[int, ...] = (),
        keeps: bool = False,
    ) -> ReadTicket:
        session.check_tickets(self._state.config.max_tickets)
        state = self._state
        size, limit = realm.tier_bytes[Tier.CPU], state.config.ticket_limit_bytes(Tier.CPU)
        held = session.held_bytes
        copies: list[Copy | None] = []
        entries = bytearray()
        found_on = bytearray()
        blocks: list[Block] = []
        waiting: list[int] = []
        rising, waits, reason = False, False, Reason.UNSPECIFIED
        for index, key in enumerate(keys):
            block = realm.index.get(key)
            copy: Copy | None = None
            if block is not None and block.mask and block.expires_s > now:
                # What its session has no room for waits, as what its reader cannot read does.
                copy = None if held + size > limit and held > 0 else state.readable(block, devices)
                waits = copy is None
                if waits or rising:
                    copy = self._source(block, copy, rising=rising)
                    reason = reason if copy is not None else Reason.BUSY
            if block is None or copy is None:
                if not each:
                    break
                copies.append(None)
                entries.append(Entry.MISSING)
                found_on.append(0)
                continue
            blocks.append(block)
            held += size
            if waits:
                waiting.append(index)
                rising = rising or copy.tier is not Tier.CPU
            state.pin(copy)
            copies.append(copy)
            entries.append(Entry.WAITING if waits else Entry.READY)
            found_on.append(block.mask & -block.mask)
        session.ticket_bytes += (len(blocks) - len(waiting)) * size
        state.use(now, realm, blocks)
        ticket = ReadTicket(
            next(state.ids), session, realm, prefetch, each, deadline_s, copies, entries, bytes(found_on), devices, keeps
        )
        ticket.waiting, ticket.open, ticket.reason, ticket.began_s = len(waiting), len(blocks), reason, now
        if not blocks:
            ticket.closed = True
        else:
            session.tickets[ticket.ticket_id] = ticket
            self.open[ticket.ticket_id] = ticket
            self._alarms.set(deadline_s, ticket.ticket_id)
            self._mover.want(ticket, waiting)
        return ticket

    def _source(self, block: Block, copy: Copy | None, *, rising: bool) -> Copy | None:
        """The copy of a held block that a load pins.

        What lies behind must leave room for what comes first, as keys are handed out in order: a load that kept a key of its own
        from coming up would wait for itself until its deadline.

        Args:
            block: of which there is a readable copy.
            copy: the one that its reader can read now; None when it has to wait.
            rising: a key before has to come up from another tier. None is returned where the copy would then be the last of memory.
        """
        state = self._state
        if copy is None:
            lowest = block.nvme
            copy = lowest if lowest is not None and lowest.state is CopyState.READY else ready_copy(block)
        if rising and copy.tier is Tier.CPU and not copy.pins:
            size, capacity = block.realm.tier_bytes[Tier.CPU], state.config.capacity_bytes[Tier.CPU]
            if state.pinned_bytes[Tier.CPU] + 2 * size > capacity:
                return None
        return copy

    def awaited(self) -> set[Block]:
        """Blocks that loads have found and that still have to come up."""
        waiting = [t for t in self.open.values() if t.waiting and not t.prefetch]
        pairs = (pair for t in waiting for pair in zip(t.copies, t.entries, strict=True))
        return {copy.block for copy, entry in pairs if entry == Entry.WAITING and copy is not None}

    def collect(self, now: float, ticket: ReadTicket) -> tuple[list[int], list[int], bool]:
        """Hand out the keys of a load that became readable, in order: their indexes, their slots, and whether that was all.

        Past a miss nothing more is handed out unless the load wants each key.
        """
        indexes: list[int] = []
        slots: list[int] = []
        entries, copies = ticket.entries, ticket.copies
        rest = entries[ticket.cursor :]
        ready = len(rest) - len(rest.lstrip(_READY))
        if ready:  # most often all of them are, and what follows would take four times as long
            begin, ticket.cursor = ticket.cursor, ticket.cursor + ready
            entries[begin : ticket.cursor] = bytes([Entry.TAKEN]) * ready
            indexes.extend(range(begin, ticket.cursor))
            slots.extend(flat_slots(copies[begin : ticket.cursor]))
        while ticket.cursor < len(entries):
            state = entries[ticket.cursor]
            if state == Entry.WAITING:
                return indexes, slots, False
            if state == Entry.MISSING and not ticket.each:
                self.miss_rest(now, ticket, Reason.UNSPECIFIED)
                self._mover.pump(now)
                break
            if state == Entry.READY:
                copy = copies[ticket.cursor]
                assert copy is not None
                entries[ticket.cursor] = Entry.TAKEN
                indexes.append(ticket.cursor)
                slots.extend(copy.all_slots())
            ticket.cursor += 1
        if ticket.open == 0 and not ticket.closed:
            self._end_read(now, ticket)
        return indexes, slots, True

    def miss_rest(self, now: float, ticket: ReadTicket, reason: Reason) -> None:
        """What was not handed out becomes a miss."""
        for index in range(ticket.cursor, len(ticket.entries)):
            if ticket.entries[index] in (Entry.WAITING, Entry.READY):
                self._mover.miss(now, ticket, index, reason)
        if not ticket.each:
            ticket.cursor = len(ticket.entries)
        if ticket.open == 0:
            self._end_read(now, ticket)

    def release(self, now: float, session: Session, ticket_id: int, indexes: Iterable[int] = ()) -> None:
        """Unpin loaded keys; without indexes everything, which ends the load.

        Raises:
            RequestError: UNKNOWN_TICKET for a ticket that is not open in this session; BAD_REQUEST for an index that was not
                handed out.
        """
        ticket = session.ticket(ticket_id)
        if not isinstance(ticket, ReadTicket) or ticket.prefetch:
            raise RequestError(Reason.UNKNOWN_TICKET, f"ticket {ticket_id} is no load's")
        which = sorted(set(indexes))
        for index in which:
            if index >= len(ticket.entries) or ticket.entries[index] not in (Entry.TAKEN, Entry.RELEASED):
                raise RequestError(Reason.BAD_REQUEST, f"index {index} of ticket {ticket_id} was not handed out")
        if which:
            for index in which:
                if ticket.entries[index] == Entry.TAKEN:
                    self._let_go(now, ticket, index)
            if ticket.open == 0:
                self._end_read(now, ticket)
        else:
            self.close(now, ticket)
        self._mover.pump(now)

    def abandon(self, now: float, ticket: ReadTicket) -> None:
        """The caller of a load asks no more: what it was not given becomes a miss, what it was given stays until release."""
        if not ticket.closed:
            self.miss_rest(now, ticket, Reason.UNSPECIFIED)
            self._mover.pump(now)

    def cancel(self, now: float, session: Session, ticket_id: int) -> None:
        """Drop a prefetch. Raises RequestError UNKNOWN_TICKET."""
        ticket = session.ticket(ticket_id)
        if not isinstance(ticket, ReadTicket) or not ticket.prefetch:
            raise RequestError(Reason.UNKNOWN_TICKET, f"ticket {ticket_id} is no prefetch's")
        self.close(now, ticket)
        self._mover.pump(now)

    def _let_go(self, now: float, ticket: ReadTicket, index: int) -> None:
        copy = ticket.copies[index]
        assert copy is not None
        ticket.entries[index] = Entry.RELEASED
        ticket.open -= 1
        ticket.session.ticket_bytes -= copy.block.realm.tier_bytes[Tier.CPU]
        self._state.unpin(now, copy)

    def close(self, now: float, ticket: ReadTicket) -> None:
        """End a load or prefetch whatever its state: everything is unpinned."""
        for index, entry in enumerate(ticket.entries):
            if entry == Entry.TAKEN:
                self._let_go(now, ticket, index)
            elif entry in (Entry.WAITING, Entry.READY):
                self._mover.miss(now, ticket, index, Reason.UNSPECIFIED)
        self._end_read(now, ticket)

    def _end_read(self, now: float, ticket: ReadTicket) -> None:
        ticket.closed = True
        ticket.cursor = len(ticket.entries)
        ticket.session.tickets.pop(ticket.ticket_id, None)
        self.open.pop(ticket.ticket_id, None)
        # Blocks were linked as they were let go, in any order; leaves must be older than roots.
        self._state.touch(now, [c.block for c in ticket.copies if c is not None])

    def progress(self, ticket: ReadTicket) -> tuple[int, int, bool]:
        """Keys held, keys ready in memory, and whether nothing more will come."""
        return len(ticket.entries), ticket.ready, ticket.closed or ticket.waiting == 0


def _covers(load: ReadTicket, prefetch: ReadTicket) -> bool:
    """True when a load is the one that a prefetch was for: it reads all of it, or all but the last block.

    The blocks are compared at the end, because many requests begin with the same ones.
    """
    common = min(len(load.copies), len(prefetch.copies))
    if not common or common < len(prefetch.copies) - 1:
        return False
    mine, other = load.copies[common - 1], prefetch.copies[common - 1]
    return mine is not None and other is not None and mine.block is other.block
