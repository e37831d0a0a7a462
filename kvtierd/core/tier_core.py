"""The core: every event of the daemon goes in here, with the time; answers and commands come out.

Pure state: no I/O, no clock, no threads, no randomness. The shell calls one method an event, then runs
:meth:`TierCore.take_commands` in order, calls :meth:`TierCore.move_done` and :meth:`TierCore.extent_released` for what it was
told to do (or :meth:`TierCore.extent_failed`), and :meth:`TierCore.tick` when :meth:`TierCore.next_deadline` has come. The
simulator does the same with a fake clock and fake tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvtierd.core.adoption import Recovered, adopt_blocks
from kvtierd.core.alarms import Alarms
from kvtierd.core.block import Block, Copy, CopyState
from kvtierd.core.commands import Command
from kvtierd.core.expiry import expire_due, extend
from kvtierd.core.inspection import check_all, take_snapshot
from kvtierd.core.movement import Mover
from kvtierd.core.pins import Pins
from kvtierd.core.reads import Reads
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.space import Space
from kvtierd.core.state import CoreConfig, CoreState, StoryEvent
from kvtierd.core.stats import StatsSnapshot
from kvtierd.core.tickets import GRANTED, PinTicket, ReadTicket, SaveGrant, SaveTicket, Session
from kvtierd.core.unused import forget_unused_realms
from kvtierd.errors import Reason, RequestError
from kvtierd.model import KEY_BYTES, NO_END, Namespace, Result, Tier, split_keys

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
BULK_KEYS: Final = 128
"""From so many keys on, a vectorised lookup is faster."""
MIN_TICK_S: Final = 0.05
"""Least time between two ticks, so that work that cannot be done yet does not spin."""
RETRY_TICK_S: Final = 1.0
"""Time until a TTL is tried again that could not be applied when it ran out."""


class TierCore:
    """Policy and state of all tiers."""

    def __init__(self, config: CoreConfig, limits: dict[str, Tenant] | None = None) -> None:
        """Make an empty core.

        Args:
            config: tiers and limits.
            limits: tenants that have limits of their own; others get none.
        """
        known = limits or {}
        self.state = CoreState(config, lambda name: known.get(name) or Tenant(name))
        self._space = Space(self.state)
        self._mover = Mover(self.state, self._space)
        self.sessions: dict[int, Session] = {}
        self._alarms = Alarms(
            lambda ticket_id: ticket_id in self._reads.open or ticket_id in self.pins,
            lambda: len(self._reads.open) + len(self.pins),
        )
        self._pins = Pins(self.state, self._alarms)
        self._reads = Reads(self.state, self._mover, self._alarms)
        self._last_tick_s = float("-inf")
        self._next_realm_id = 1

    # ---- realms and sessions

    def open_realm(
        self, tenant: str, namespace: Namespace, realm_id: int | None = None, kept: Iterable[int] = ()
    ) -> tuple[Realm, bool]:
        """The realm of a tenant and namespace, and whether it is new.

        When all places are taken, realms without blocks and sessions are forgotten.

        Args:
            tenant: owner.
            namespace: layout of its blocks.
            realm_id: given when it is recovered; then it counts but is not refused.
            kept: ids of realms that are in use besides those of sessions.

        Raises:
            RequestError: LIMIT when there are too many realms in use.
        """
        state = self.state
        identity = (tenant, namespace.fingerprint())
        known = state.realm_ids.get(identity)
        if known is not None:
            return state.realms[known], False
        if realm_id is None:
            if len(state.realms) >= state.config.max_realms:
                self._make_place(kept)
            realm_id = self._next_realm_id
        self._next_realm_id = max(self._next_realm_id, realm_id + 1)
        owner = state.tenant(tenant)
        realm = Realm(realm_id, owner, namespace)
        owner.realms.append(realm)
        state.realms[realm_id] = realm
        state.realm_ids[identity] = realm_id
        return realm, True

    def _make_place(self, kept: Iterable[int]) -> None:
        state = self.state
        forget_unused_realms(state, {*kept, *(s.realm.realm_id for s in self.sessions.values())})
        if len(state.realms) >= state.config.max_realms:
            raise RequestError(
                Reason.LIMIT,
                f"{len(state.realms)} namespaces hold blocks or have sessions, and no more may; evict the blocks of those that are "
                f"not needed any more (all blocks of one with `kvtierd evict --namespace`) or end their sessions",
            )

    def attach(self, session_id: int, realm: Realm) -> Session:
        """Begin a session."""
        session = self.sessions[session_id] = Session(session_id, realm)
        return session

    def detach(self, now: float, session: Session) -> None:
        """End a session: all of its processes have gone, so its open slots and pins come back."""
        for ticket in list(session.tickets.values()):
            if isinstance(ticket, SaveTicket):
                self._abort(now, ticket, range(len(ticket.open)), "session ended")
            else:
                self._reads.close(now, ticket)
        del self.sessions[session.session_id]
        self._mover.pump(now)

    # ---- lookup

    def lookup(self, now: float, realm: Realm, keys: list[bytes], *, each: bool = False) -> tuple[int, bytes]:
        """Keys held and a mask of tiers a key (up to the first miss, or with ``each`` for every key). Changes nothing."""
        blocks = list(map(realm.index.get, keys))
        if self.state.expiries.overdue(now):
            blocks = [None if block is None or block.expires_s <= now else block for block in blocks]
        if each:
            masks = bytes([0 if block is None else block.mask for block in blocks])
            return len(masks) - masks.count(0), masks
        end = blocks.index(None) if None in blocks else len(blocks)
        masks = bytes([block.mask for block in blocks[:end]])  # type: ignore[union-attr]
        first_hidden = masks.find(0)
        if first_hidden >= 0:
            masks = masks[:first_hidden]
        return len(masks), masks

    def lookup_packed(self, now: float, realm: Realm, packed: bytes, *, each: bool = False) -> tuple[int, bytes]:
        """Like :meth:`lookup`, for packed keys; many at once take the vectorised way, which does not know of expiries."""
        if len(packed) < BULK_KEYS * KEY_BYTES or self.state.expiries.overdue(now):
            return self.lookup(now, realm, split_keys(packed), each=each)
        masks = realm.presence.lookup(packed)
        if each:
            return len(masks) - masks.count(0), masks
        first_miss = masks.find(0)
        masks = masks if first_miss < 0 else masks[:first_miss]
        return len(masks), masks

    # ---- save

    def save(self, now: float, session: Session, realm: Realm, keys: list[bytes], ttl_s: float | None = None) -> SaveGrant:
        """Grant slots for keys that are held nowhere. Held ones count as used now.

        Blocks expire ``ttl_s`` after their commit (None: not at all); held ones not before that time from now.

        Raises:
            RequestError: LIMIT when the session has too many tickets.
        """
        session.check_tickets(self.state.config.max_tickets)
        state = self.state
        outcomes: list[int] = []
        copies: list[Copy | None] = []
        slots: list[int] = []
        size = realm.tier_bytes[Tier.CPU]
        limit = state.config.max_ticket_share * state.config.capacity_bytes[Tier.CPU]
        refused = DRAINING if state.draining else 0
        # Held ones first, so that room for the others is not made at their expense.
        held = [block for key in keys if (block := realm.index.get(key)) is not None and block.mask]
        state.touch(now, held)
        extend(state, now, held, NO_END if ttl_s is None else now + ttl_s)
        for key in keys:
            block = realm.index.get(key)
            if block is not None:
                outcomes.append(HELD if block.mask else IN_PROGRESS)
                continue
            if not refused and session.held_bytes and session.held_bytes + size > limit:
                refused = LIMIT
            if not refused:
                taken = self._space.allocate(now, Tier.CPU, realm)
                if isinstance(taken, Reason):
                    refused = _REFUSED[taken]
                else:
                    copies.append(state.new_copy(now, Block(key, realm, now), Tier.CPU, taken, "save"))
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
            session.tickets[ticket_id] = SaveTicket(ticket_id, session, realm, copies, len(copies), ttl_s)
        for outcome, count in Counter(outcomes).items():
            state.counts.saves[(realm.tenant.name, OUTCOME_NAMES[outcome])] += count
        self._mover.pump(now)
        return SaveGrant(ticket_id, outcomes, slots, held)

    def commit(self, now: float, session: Session, ticket_id: int, indexes: Iterable[int] = ()) -> list[Block]:
        """Publish filled blocks; all that are open without indexes. Returns those published, tail first.

        Raises:
            RequestError: UNKNOWN_TICKET for a ticket or index that is not open in this session.
        """
        ticket, which = self._open_save(session, ticket_id, indexes)
        state = self.state
        published = []
        # From tail to head, so that leaves are older than roots.
        for index in reversed(which):
            copy = self._close_index(ticket, index)
            copy.block.used_at_s = now
            if copy.state is CopyState.FILLING:
                state.expiries.begin(copy.block, NO_END if ticket.ttl_s is None else now + ticket.ttl_s)
                state.set_state(now, copy, CopyState.READY, "commit")
                published.append(copy.block)
            state.unpin(now, copy)
        self._mover.pump(now)
        return published

    def abort(self, now: float, session: Session, ticket_id: int, indexes: Iterable[int] = ()) -> None:
        """Return granted slots unused. Raises like :meth:`commit`."""
        ticket, which = self._open_save(session, ticket_id, indexes)
        self._abort(now, ticket, which, "abort")
        self._mover.pump(now)

    def _open_save(self, session: Session, ticket_id: int, indexes: Iterable[int]) -> tuple[SaveTicket, list[int]]:
        ticket = session.ticket(ticket_id)
        if not isinstance(ticket, SaveTicket):
            raise RequestError(Reason.UNKNOWN_TICKET, f"ticket {ticket_id} is no save's")
        which = sorted(set(indexes))
        for index in which:
            if index >= len(ticket.open) or ticket.open[index] is None:
                raise RequestError(Reason.UNKNOWN_TICKET, f"index {index} of ticket {ticket_id} is not open")
        return ticket, which or [i for i, copy in enumerate(ticket.open) if copy is not None]

    def _close_index(self, ticket: SaveTicket, index: int) -> Copy:
        copy = ticket.open[index]
        assert copy is not None
        ticket.open[index] = None
        ticket.left -= 1
        ticket.session.ticket_bytes -= ticket.realm.tier_bytes[Tier.CPU]
        if ticket.left == 0:
            del ticket.session.tickets[ticket.ticket_id]
        return copy

    def _abort(self, now: float, ticket: SaveTicket, indexes: Iterable[int], why: str) -> None:
        for index in indexes:
            if ticket.open[index] is None:
                continue
            copy = self._close_index(ticket, index)
            if copy.state is CopyState.FILLING:
                self.state.set_state(now, copy, CopyState.DOOMED, why)
            self.state.unpin(now, copy)

    # ---- load and prefetch

    def load(self, now: float, session: Session, realm: Realm, keys: list[bytes], deadline_s: float, *, each: bool) -> ReadTicket:
        """See :meth:`Reads.load`."""
        return self._reads.load(now, session, realm, keys, deadline_s, each=each)

    def prefetch(self, now: float, session: Session, realm: Realm, keys: list[bytes], deadline_s: float) -> ReadTicket:
        """See :meth:`Reads.prefetch`."""
        return self._reads.prefetch(now, session, realm, keys, deadline_s)

    def collect(self, now: float, ticket: ReadTicket) -> tuple[list[int], list[int], bool]:
        """See :meth:`Reads.collect`."""
        return self._reads.collect(now, ticket)

    def release(self, now: float, session: Session, ticket_id: int, indexes: Iterable[int] = ()) -> None:
        """See :meth:`Reads.release`."""
        self._reads.release(now, session, ticket_id, indexes)

    def abandon(self, now: float, ticket: ReadTicket) -> None:
        """See :meth:`Reads.abandon`."""
        self._reads.abandon(now, ticket)

    def cancel(self, now: float, session: Session, ticket_id: int) -> None:
        """See :meth:`Reads.cancel`."""
        self._reads.cancel(now, session, ticket_id)

    def progress(self, ticket: ReadTicket) -> tuple[int, int, bool]:
        """See :meth:`Reads.progress`."""
        return self._reads.progress(ticket)

    # ---- evict and pin

    def evict_keys(self, now: float, realm: Realm, keys: list[bytes], tier: Tier | None = None, idle_s: float = 0.0) -> int:
        """Forget copies of keys, on one tier or all. Returns how many. Copies in use go when their last user lets go."""
        evicted = 0
        for key in keys:
            block = realm.index.get(key)
            if block is None or block.used_at_s > now - idle_s:
                continue
            if tier is None:
                evicted += self.state.evict_block(now, block, "request")
            else:
                copy = block.copy_on(tier)
                if copy is not None:
                    self.state.evict(now, copy, "request")
                    evicted += 1
        self._mover.pump(now)
        return evicted

    def keys_to_evict(self, now: float, realm: Realm, tier: Tier | None = None, idle_s: float = 0.0) -> list[bytes]:
        """Keys of a realm that :meth:`evict_keys` would act on; the shell evicts them in portions."""
        return [k for k, b in realm.index.items() if b.used_at_s <= now - idle_s and (tier is None or b.copy_on(tier) is not None)]

    @property
    def pins(self) -> dict[int, PinTicket]:
        """Open pins by ticket id."""
        return self._pins.open

    def pin(self, now: float, realms: list[Realm], keys: list[bytes], expires_s: float) -> PinTicket:
        """See :meth:`Pins.pin`."""
        return self._pins.pin(now, realms, keys, expires_s)

    def unpin(self, now: float, ticket_id: int, tenant: str | None = None) -> None:
        """See :meth:`Pins.unpin`."""
        self._pins.unpin(now, ticket_id, tenant)
        self._mover.pump(now)

    # ---- the shell's reports

    def take_commands(self) -> list[Command]:
        """What the shell has to do, in order."""
        state = self.state
        for tier in state.tiers:
            state.take_pool_commands(tier)
        commands, state.commands = state.commands, []
        return commands

    def move_done(self, now: float, move_id: int, result: Result) -> None:
        """A move of :class:`StartMoves` has ended."""
        self._mover.done(now, move_id, result)
        self._mover.pump(now)

    def extent_released(self, now: float, tier: Tier, extent_id: int) -> None:
        """Nobody holds a retired extent any more."""
        self.state.pools[tier].released(extent_id)
        self.state.space_freed()
        self._mover.pump(now)

    def extent_failed(self, now: float, tier: Tier, extent_id: int) -> None:
        """An extent of :class:`NewExtent` could not be made: what was to be in it ends, and no other is made for a while.

        Moves into it have ended when this returns, and are not in ``state.moves`` any more. Of grants that nobody has heard
        of yet, :meth:`settle` says what is left.
        """
        lost = self.state.pools[tier].unmade(extent_id, now)
        self._mover.unmade(now, lost)
        for session in self.sessions.values():
            for ticket in list(session.tickets.values()):
                if isinstance(ticket, SaveTicket):
                    self._abort(now, ticket, [i for i, copy in enumerate(ticket.open) if copy in lost], "no memory")
        self._mover.pump(now)

    def settle(self, session: Session, grant: SaveGrant) -> SaveGrant:
        """A grant after its commands have run: keys whose slots could not be made are BUSY now. Call it before anybody commits."""
        ticket = session.tickets.get(grant.ticket_id)
        left = [i for i, copy in enumerate(ticket.open) if copy is not None] if isinstance(ticket, SaveTicket) else []
        settled = grant.keep(left, BUSY)
        if settled is not grant and isinstance(ticket, SaveTicket):
            ticket.open = [copy for copy in ticket.open if copy is not None]
        return settled

    def next_deadline(self) -> float | None:
        """Time of the next :meth:`tick`; None when nothing is due."""
        state = self.state
        due = [first[0] for t in state.tiers if (first := state.ttl_order[t].first()) is not None]
        if not self._mover.ttl_goes_on:
            due = [at if at > self._last_tick_s else self._last_tick_s + RETRY_TICK_S for at in due]
        alarm_s = self._alarms.first()
        due.extend(at for at in (alarm_s, state.expiries.first()) if at is not None)
        due.extend(state.next_pause_end_s())
        if self._mover.has_waiting or state.expiries.holds:
            due.append(self._last_tick_s + RETRY_TICK_S)
        return max(min(due), self._last_tick_s + MIN_TICK_S) if due else None

    def tick(self, now: float) -> None:
        """Let time pass: deadlines, expiries, TTLs, the end of pauses."""
        state = self.state
        self._last_tick_s = now
        state.end_pauses(now)
        for ticket_id in self._alarms.due(now):
            read = self._reads.open.get(ticket_id)
            if read is None:
                if ticket_id in self.pins:
                    self._pins.drop(now, self.pins[ticket_id])
            elif read.prefetch:
                self._reads.close(now, read)
            else:
                self._reads.miss_rest(now, read, Reason.DEADLINE)
        expire_due(state, now, self._reads.awaited)
        self._mover.ttl_due = True
        self._mover.pump(now)

    def drain(self, now: float, *, on: bool) -> None:
        """Stop granting slots and write everything down that exists only in memory; or go back to normal."""
        self.state.draining = on
        held = [c for t in self._reads.open.values() for c in t.copies] + [c for p in self.pins.values() for c in p.copies]
        self._mover.drain_in_use(dict.fromkeys(c for c in held if c is not None))
        self._mover.pump(now)

    @property
    def undrained_bytes(self) -> int:
        """Bytes that exist only in memory while a lower tier could take them."""
        state = self.state
        left = 0
        for tier in (t for t in state.tiers if state.lower(t) is not None):
            stuck = [r for r in state.realms.values() if not (r.writable and state.fits_below(r, tier))]
            left += state.dirty_bytes[tier] - sum(r.lru[tier].dirty.length * r.tier_bytes[tier] for r in stuck)
        return left

    # ---- recovery

    def recover_extent(self, extent_id: int, slot_bytes: int, slot_count: int) -> None:
        """Take over a segment found on NVMe, before its blocks."""
        pool = self.state.pools[Tier.NVME]
        pool.adopt_extent(pool.group(slot_bytes, slot_bytes, 0, -1), extent_id, slot_count)

    def recovered(self, next_generation: int, next_extent_id: int) -> None:
        """End the recovery: free lists are worked out, and ids go on where they were."""
        pool = self.state.pools[Tier.NVME]
        pool.adopted()
        pool.next_extent_id = max(pool.next_extent_id, next_extent_id)
        self.state.next_generation = max(self.state.next_generation, next_generation)

    def recover_blocks(self, now: float, rows: Iterable[Recovered]) -> list[Recovered]:
        """Take over blocks found on NVMe. Returns those whose key is there already: either copy has the same bytes.

        Args:
            now: counts as their last use, in the order given: oldest first.
            rows: (realm id, key, generation, slots, expiry on the core's clock).
        """
        return adopt_blocks(self.state, now, rows)

    # ---- reading

    def snapshot(self) -> StatsSnapshot:
        """All figures."""
        return take_snapshot(self.state, self.sessions, len(self.pins), self._mover.queue_depth)

    def story(self, prefix: bytes) -> list[StoryEvent]:
        """Remembered changes of blocks whose key begins with ``prefix``, oldest first."""
        return [event for event in self.state.story if event.key.startswith(prefix)]

    def nvme_entries(self, realm: Realm, keys: list[bytes]) -> list[Recovered]:
        """What :meth:`recover_blocks` takes, of the readable NVMe copies among keys, for a snapshot."""
        entries: list[Recovered] = []
        for key in keys:
            block = realm.index.get(key)
            copy = block.nvme if block is not None else None
            if copy is not None and copy.state is CopyState.READY:
                entries.append((realm.realm_id, key, copy.generation, copy.all_slots(), copy.block.expires_s))
        return entries

    def check(self) -> None:
        """Assert every invariant (visits everything)."""
        check_all(self.state, self.sessions)
