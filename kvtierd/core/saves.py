"""Saves: granting slots for what is held nowhere, publishing what was filled, taking back what was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtierd.core.admission import Prefix
from kvtierd.core.block import Block, Copy, CopyState
from kvtierd.core.device_slots import DeviceSlots
from kvtierd.core.expiry import extend
from kvtierd.core.realm import Realm
from kvtierd.core.space import Space
from kvtierd.core.state import DEPTH_S, CoreState
from kvtierd.core.tickets import GRANTED, SaveGrant, SaveTicket, Session
from kvtierd.errors import Reason, RequestError
from kvtierd.model import NO_END, Tier

HELD: Final = 2
IN_PROGRESS: Final = 3
BUSY: Final = 4
QUOTA: Final = 5
TOO_LARGE: Final = 6
DRAINING: Final = 7
LIMIT: Final = 8
"""Outcomes of a Save, a key; values of ``kvtierd.v1.SaveOutcome``."""

_REFUSED: Final = {Reason.BUSY: BUSY, Reason.QUOTA: QUOTA, Reason.TOO_LARGE: TOO_LARGE}
OUTCOME_NAMES: Final = ("", "granted", "held", "in_progress", "busy", "quota", "too_large", "draining", "limit")
REQUEST_S: Final = 1.0
"""Saves of one request that name its earlier blocks again follow each other within this time: no second use of those. It is a
guess, for callers that do not say what their request has matched."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a Save tells of the request that it is a portion of."""

    before: Sequence[bytes] = ()
    """Keys of the request's earlier blocks, root first. They need not be held."""
    matched: int | None = None
    """Blocks, from the root on, that were there when it came; None when that is not known."""
    devices: tuple[int, ...] = ()
    """The GPU of each shard whose memory the caller can open: its blocks get slots there as far as they may; () for none."""


WHOLE: Final = Request()
"""Nothing is told."""


class Saves:
    """Grants over a :class:`CoreState`. Callers pump the mover afterwards."""

    def __init__(self, state: CoreState, space: Space) -> None:
        self._state = state
        self._space = space

    def grant(
        self, now: float, session: Session, realm: Realm, keys: list[bytes], ttl_s: float | None = None, request: Request = WHOLE
    ) -> SaveGrant:
        """Grant slots for keys that are held nowhere. Held ones, and those before them, count as used now.

        Blocks expire ``ttl_s`` after their commit (None: not at all); held ones not before that time from now.

        Raises:
            RequestError: LIMIT when the session has too many tickets.
        """
        session.check_tickets(self._state.config.max_tickets)
        state = self._state
        outcomes: list[int] = []
        copies: list[Copy | None] = []
        slots: list[int] = []
        size = realm.tier_bytes[Tier.CPU]
        limit = state.config.ticket_limit_bytes(Tier.CPU)
        refused = DRAINING if state.draining else 0
        device = DeviceSlots(state, self._space, realm, request.devices)
        # Held ones first, so that room for the others is not made at their expense.
        held = [block for key in keys if (block := realm.index.get(key)) is not None and block.mask]
        before = [block for key in request.before if (block := realm.index.get(key)) is not None]
        matched = self._use(now, realm, before, held, request)
        extend(state, now, held, NO_END if ttl_s is None else now + ttl_s)
        fresh = _Fresh(state, realm, matched)
        for key in keys:
            block = realm.index.get(key)
            if block is not None:
                outcomes.append(HELD if block.mask else IN_PROGRESS)
                continue
            if not refused and session.held_bytes and session.held_bytes + size > limit:
                refused = LIMIT
            if not refused:
                fresh.wanted(key)
                in_device = device.take(now, session.held_bytes)
                if device.refused:
                    state.counts.not_in_hbm[device.refused] += 1
                tier = Tier.HBM if in_device else Tier.CPU
                taken = in_device or self._space.allocate(now, Tier.CPU, realm)
                if isinstance(taken, Reason):
                    refused = _REFUSED[taken]
                else:
                    why = f"save, not in hbm: {device.refused}" if device.refused else "save"
                    copies.append(state.new_copy(now, fresh.block(now, key), tier, taken, why))
                    slots.extend(taken)
                    session.ticket_bytes += size
            outcomes.append(refused or GRANTED)
        if not all(block.mask for block in held):
            # In a small tier they had to go for keys that came later all the same.
            held = [block for block in held if block.mask]
            outcomes = [BUSY if o == HELD and k not in realm.index else o for k, o in zip(keys, outcomes, strict=True)]
        ticket_id = 0
        if copies:
            ticket_id = next(state.ids)
            session.tickets[ticket_id] = SaveTicket(ticket_id, session, realm, copies, len(copies), ttl_s, before + held, now)
        for outcome, count in Counter(outcomes).items():
            state.counts.saves[(realm.tenant.name, OUTCOME_NAMES[outcome])] += count
        return SaveGrant(ticket_id, outcomes, slots, held)

    def _use(self, now: float, realm: Realm, before: list[Block], held: list[Block], request: Request) -> int:
        """A request uses what it found. Returns how many blocks it has matched."""
        if request.matched is None:
            known = [block for block in before + held if block.mask and (block.lane or block.used_at_s <= now - REQUEST_S)]
        else:
            index = realm.index
            first = [block for key in request.before[: request.matched] if (block := index.get(key)) is not None and block.mask]
            known = first + held
        self._state.use(now, realm, [block for block in before if block.mask] + held, known)
        return max(len(known), request.matched or 0)

    def commit(self, now: float, session: Session, ticket_id: int, indexes: Iterable[int] = ()) -> list[Block]:
        """Publish filled blocks; all that are open without indexes. Returns those published, tail first.

        Raises:
            RequestError: UNKNOWN_TICKET for a ticket or index that is not open in this session.
        """
        ticket, which = self._open(session, ticket_id, indexes)
        state = self._state
        published = []
        # From tail to head, so that leaves are older than roots.
        for index in reversed(which):
            copy = self._close_index(ticket, index)
            copy.block.used_at_s = now - (len(ticket.held) + index) * DEPTH_S
            if copy.state is CopyState.FILLING:
                state.expiries.begin(copy.block, NO_END if ticket.ttl_s is None else now + ticket.ttl_s)
                state.set_state(now, copy, CopyState.READY, "commit")
                published.append(copy.block)
            state.unpin(now, copy)
        # What the request found held lies before what it saved; it must not be the older part now.
        state.touch(now, ticket.held)
        return published

    def abort(self, now: float, session: Session, ticket_id: int, indexes: Iterable[int] = ()) -> None:
        """Return granted slots unused. Raises like :meth:`commit`."""
        ticket, which = self._open(session, ticket_id, indexes)
        self._give_up(now, ticket, which, "abort")

    def end(self, now: float, ticket: SaveTicket) -> None:
        """The session of a ticket has ended."""
        self._give_up(now, ticket, range(len(ticket.open)), "session ended")

    def unmade(self, now: float, ticket: SaveTicket, lost: Collection[Copy]) -> None:
        """There is no memory for these copies."""
        self._give_up(now, ticket, [i for i, copy in enumerate(ticket.open) if copy in lost], "no memory")

    def settle(self, session: Session, grant: SaveGrant) -> SaveGrant:
        """A grant after its commands have run: keys whose slots could not be made are BUSY now. Call it before anybody commits."""
        ticket = session.tickets.get(grant.ticket_id)
        left = [i for i, copy in enumerate(ticket.open) if copy is not None] if isinstance(ticket, SaveTicket) else []
        settled = grant.keep(left, BUSY)
        if settled is not grant and isinstance(ticket, SaveTicket):
            ticket.open = [copy for copy in ticket.open if copy is not None]
        return settled

    @staticmethod
    def _open(session: Session, ticket_id: int, indexes: Iterable[int]) -> tuple[SaveTicket, list[int]]:
        ticket = session.ticket(ticket_id)
        if not isinstance(ticket, SaveTicket):
            raise RequestError(Reason.UNKNOWN_TICKET, f"ticket {ticket_id} is no save's")
        which = sorted(set(indexes))
        for index in which:
            if index >= len(ticket.open) or ticket.open[index] is None:
                raise RequestError(Reason.UNKNOWN_TICKET, f"index {index} of ticket {ticket_id} is not open")
        return ticket, which or [i for i, copy in enumerate(ticket.open) if copy is not None]

    @staticmethod
    def _close_index(ticket: SaveTicket, index: int) -> Copy:
        copy = ticket.open[index]
        assert copy is not None
        ticket.open[index] = None
        ticket.left -= 1
        ticket.session.ticket_bytes -= ticket.realm.tier_bytes[Tier.CPU]
        if ticket.left == 0:
            del ticket.session.tickets[ticket.ticket_id]
        return copy

    def _give_up(self, now: float, ticket: SaveTicket, indexes: Iterable[int], why: str) -> None:
        for index in indexes:
            if ticket.open[index] is None:
                continue
            copy = self._close_index(ticket, index)
            if copy.state is CopyState.FILLING:
                self._state.set_state(now, copy, CopyState.DOOMED, why)
            self._state.unpin(now, copy)


class _Fresh:
    """Makes the new blocks of one Save, with what the policy wants to know of them."""

    def __init__(self, state: CoreState, realm: Realm, matched: int) -> None:
        self._state = state
        self._realm = realm
        self._matched = matched
        self._lane = 0
        self._again: Prefix | None = None
        self._first: Prefix | None = None
        if state.admission.enabled:
            self._again, self._first = Prefix(again=True), Prefix(again=False)

    def wanted(self, key: bytes) -> None:
        """A key that is held nowhere is to get room: what the policy remembers of it counts before others go for it."""
        self._lane = self._state.policy.lane_of_new(self._matched, returns=self._state.came_back(self._realm, key))

    def block(self, now: float, key: bytes) -> Block:
        """The block of the key of :meth:`wanted`, which has got room."""
        state, realm = self._state, self._realm
        block = Block(key, realm, now)
        block.lane = self._lane
        if self._first is not None:
            # From the first block on that was not forgotten lately, nothing is a second use.
            if self._again is not None and not state.admission.saved_again(now, block):
                self._again = None
            block.prefix = self._again or self._first
            block.prefix.size_bytes += realm.tier_bytes[Tier.NVME]
        return block
