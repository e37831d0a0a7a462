"""The core: every event of the daemon goes in here, with the time; answers and commands come out.

Pure state: no I/O, no clock, no threads, no randomness. The shell calls one method an event, then runs
:meth:`TierCore.take_commands` in order, calls :meth:`TierCore.move_done` and :meth:`TierCore.extent_released` for what it was
told to do (or :meth:`TierCore.extent_failed`), and :meth:`TierCore.tick` when :meth:`TierCore.next_deadline` has come. The
simulator does the same with a fake clock and fake tiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvtierd.core.adoption import Recovered, RecoveredCopy, adopt_blocks, adopt_copies
from kvtierd.core.alarms import Alarms
from kvtierd.core.block import Block, CopyState
from kvtierd.core.commands import Command
from kvtierd.core.expiry import expire_due
from kvtierd.core.inspection import check_all, take_snapshot
from kvtierd.core.limits import NO_LIMITS, Limits
from kvtierd.core.movement import Mover
from kvtierd.core.pins import Pins
from kvtierd.core.reads import Reads
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.saves import WHOLE, Request, Saves
from kvtierd.core.settings import CoreConfig
from kvtierd.core.space import Space
from kvtierd.core.state import CoreState
from kvtierd.core.stats import StatsSnapshot, StoryEvent
from kvtierd.core.tickets import PinTicket, ReadTicket, SaveGrant, SaveTicket, Session
from kvtierd.core.unused import forget_unused_realms
from kvtierd.errors import Reason, RequestError
from kvtierd.model import KEY_BYTES, Namespace, Result, Tier, split_keys

BULK_KEYS: Final = 128
"""From so many keys on, a vectorised lookup is faster."""
MIN_TICK_S: Final = 0.05
"""Least time between two ticks, so that work that cannot be done yet does not spin."""
RETRY_TICK_S: Final = 1.0
"""Time until a TTL is tried again that could not be applied when it ran out."""


class TierCore:
    """Policy and state of all tiers."""

    def __init__(self, config: CoreConfig, limits: dict[str, Limits] | None = None) -> None:
        """Make an empty core.

        Args:
            config: tiers and limits.
            limits: by the names of tenants that have limits of their own; others have none.
        """
        self.state = CoreState(config, limits or {})
        self._space = Space(self.state)
        self._saves = Saves(self.state, self._space)
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
        self,
        tenant: str,
        namespace: Namespace,
        realm_id: int | None = None,
        kept: Iterable[int] = (),
        *,
        shared: bool | None = None,
    ) -> tuple[Realm, bool]:
        """The realm of a tenant and namespace, and whether it is new.

        When all places are taken, realms without blocks and sessions are forgotten.

        Args:
            tenant: owner.
            namespace: layout of its blocks.
            realm_id: given when it is recovered; then it counts but is not refused.
            kept: ids of realms that are in use besides those of sessions.
            shared: its scope; None for the tenant's own at present.

        Raises:
            RequestError: LIMIT when there are too many realms in use.
        """
        state = self.state
        if shared is None:
            shared = state.is_shared(tenant)
        identity = (tenant, namespace.fingerprint(), shared)
        known = state.realm_ids.get(identity)
        if known is not None:
            return state.realms[known], False
        if realm_id is None:
            if len(state.realms) >= state.config.max_realms:
                self._make_place(kept)
            realm_id = self._next_realm_id
        self._next_realm_id = max(self._next_realm_id, realm_id + 1)
        owner = state.tenant(tenant)
        twins = state.commons.setdefault(identity[1], []) if shared else []
        orders = tuple(state.policy.order() for _ in Tier)
        realm = Realm(realm_id, owner, namespace, orders, shared=shared, twin=twins[0] if twins else None)
        if shared:
            twins.append(realm)
        owner.realms.append(realm)
        owner.largest_bytes = max(owner.largest_bytes, *realm.tier_bytes)
        state.realms[realm_id] = realm
        state.realm_ids[identity] = realm_id
        return realm, True

    def known_realm(self, tenant: str, fingerprint: bytes) -> Realm | None:
        """The realm that a tenant has at present for the namespace of a fingerprint; None when it has none."""
        known = self.state.realm_ids.get((tenant, fingerprint, self.state.is_shared(tenant)))
        return None if known is None else self.state.realms[known]

    def _make_place(self, kept: Iterable[int]) -> None:
        state = self.state
        forget_unused_realms(state, {*kept, *(s.realm.realm_id for s in self.sessions.values())})
        if len(state.realms) >= state.config.max_realms:
            raise RequestError(
                Reason.LIMIT,
                f"{len(state.realms)} namespaces hold blocks or have sessions, and no more may; evict the blocks of those that are "
                f"not needed any more (all blocks of one with `kvtierd evict --namespace`) or end their sessions",
            )

    def set_limits(self, now: float, name: str, limits: Limits | None) -> None:
        """Change the limits of a tenant, of one that has never been seen too; None takes them away.

        They hold at once for what is asked for from now on. What the tenant holds beyond them goes down or is forgotten bit by
        bit, its oldest first; what is pinned or in use stays until its last user lets go.
        """
        state = self.state
        if limits is None:
            state.limits.pop(name, None)
        else:
            state.limits[name] = limits
        tenant = state.tenants.get(name)
        if tenant is not None:
            state.limit(tenant, limits or NO_LIMITS)
            self._mover.limited(tenant)
        self._mover.pump(now)

    def attach(self, session_id: int, realm: Realm) -> Session:
        """Begin a session."""
        session = self.sessions[session_id] = Session(session_id, realm)
        return session

    def detach(self, now: float, session: Session) -> None:
        """End a session: all of its processes have gone, so its open slots and pins come back."""
        for ticket in list(session.tickets.values()):
            if isinstance(ticket, SaveTicket):
                self._saves.end(now, ticket)
            else:
                self._reads.close(now, ticket)
        del self.sessions[session.session_id]
        self._mover.pump(now)

    def leave_devices(self, now: float, realm: Realm) -> None:
        """No engine that reads a realm's blocks in GPU memory is left there: they move down, and the memory comes back."""
        pool = self.state.pools[Tier.HBM]
        for extent in [e for e in pool.extents_of(realm.realm_id, len(realm.slot_bytes)) if not e.draining]:
            self._space.drain_extent(now, Tier.HBM, extent)
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

    def expect(self, now: float, realm: Realm, key: bytes, count: int) -> bool:
        """Whether a load of ``count`` blocks from ``key`` on would find any. If not, it counts as made: its blocks as missed."""
        held, _ = self.lookup(now, realm, [key])
        if not held:
            realm.tenant.misses += count
        return bool(held)

    # ---- save

    def save(
        self, now: float, session: Session, realm: Realm, keys: list[bytes], ttl_s: float | None = None, request: Request = WHOLE
    ) -> SaveGrant:
        """See :meth:`Saves.grant`."""
        grant = self._saves.grant(now, session, realm, keys, ttl_s, request)
        self._mover.pump(now)
        return grant

    def commit(self, now: float, session: Session, ticket_id: int, indexes: Iterable[int] = ()) -> list[Block]:
        """See :meth:`Saves.commit`."""
        published = self._saves.commit(now, session, ticket_id, indexes)
        self._mover.pump(now)
        return published

    def abort(self, now: float, session: Session, ticket_id: int, indexes: Iterable[int] = ()) -> None:
        """See :meth:`Saves.abort`."""
        self._saves.abort(now, session, ticket_id, indexes)
        self._mover.pump(now)

    def settle(self, session: Session, grant: SaveGrant) -> SaveGrant:
        """See :meth:`Saves.settle`."""
        return self._saves.settle(session, grant)

    # ---- load and prefetch

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
        """See :meth:`Reads.load`."""
        return self._reads.load(now, session, realm, keys, deadline_s, each=each, devices=devices, keeps=keeps)

    def prefetch(
        self,
        now: float,
        session: Session,
        realm: Realm,
        keys: list[bytes],
        deadline_s: float,
        devices: tuple[int, ...] = (),
    ) -> ReadTicket:
        """See :meth:`Reads.prefetch`."""
        return self._reads.prefetch(now, session, realm, keys, deadline_s, devices)

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
        """Forget copies of keys, on one tier or all. Returns how many. Copies in use go when their last user lets go.

        Only blocks that the realm's tenant is billed for: of shared ones, those that it saved first.
        """
        evicted = 0
        for key in keys:
            block = realm.index.get(key)
            if block is None or block.realm is not realm or block.used_at_s > now - idle_s:
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
        own = ((key, block) for key, block in realm.index.items() if block.realm is realm)
        return [k for k, b in own if b.used_at_s <= now - idle_s and (tier is None or b.copy_on(tier) is not None)]

    @property
    def pins(self) -> dict[int, PinTicket]:
        """Open pins by ticket id."""
        return self._pins.open

    def pin(
        self, now: float, realms: list[Realm], keys: list[bytes], expires_s: float, *, tenant: Tenant | None = None
    ) -> PinTicket:
        """See :meth:`Pins.pin`."""
        return self._pins.pin(now, realms, keys, expires_s, tenant=tenant)

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
        self.moves_done(now, [(move_id, result)])

    def moves_done(self, now: float, results: Iterable[tuple[int, Result]]) -> None:
        """Several moves have ended at one time."""
        for move_id, result in results:
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
                    self._saves.unmade(now, ticket, lost)
        self._mover.pump(now)

    def next_deadline(self) -> float | None:
        """Time of the next :meth:`tick`; None when nothing is due."""
        state = self.state
        due = [first[0] for t in state.tiers if (first := state.turns.ttl[t].first()) is not None]
        if not self._mover.ttl_goes_on:
            due = [at if at > self._last_tick_s else self._last_tick_s + RETRY_TICK_S for at in due]
        due.extend(at for at in (self._alarms.first(), state.expiries.first(), self._mover.next_rise_s) if at is not None)
        due.extend(state.turns.next_pause_end_s())
        if self._mover.shrinks:
            due.append(self._last_tick_s + MIN_TICK_S)
        if self._mover.has_waiting or state.expiries.holds:
            due.append(self._last_tick_s + RETRY_TICK_S)
        return max(min(due), self._last_tick_s + MIN_TICK_S) if due else None

    def tick(self, now: float) -> None:
        """Let time pass: deadlines, expiries, TTLs, the end of pauses."""
        state = self.state
        self._last_tick_s = now
        state.turns.end_pauses(now)
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
        self._mover.expire()
        self._mover.pump(now)

    def drain(self, now: float, *, on: bool) -> None:
        """Stop granting slots and write everything down that exists only in memory; or go back to normal."""
        self.state.draining = on
        held = [c for t in self._reads.open.values() for c in t.copies] + [c for p in self.pins.values() for c in p.copies]
        self._mover.drain_in_use(dict.fromkeys(c for c in held if c is not None))
        self._mover.pump(now)

    def set_direct(self, now: float, direct: bool) -> None:
        """Say whether blocks may move between GPU memory and NVMe directly. What is on its way goes on."""
        self.state.direct = direct
        self._mover.pump(now)

    @property
    def undrained_bytes(self) -> int:
        """Bytes that exist only in memory while a lower tier could take them and has not refused to."""
        state = self.state
        left = 0
        for tier in (t for t in state.tiers if state.turns.lower(t) is not None):
            stuck = [r for r in state.realms.values() if not (r.writable and state.turns.fits_below(r, tier))]
            left += state.dirty_bytes[tier] - state.refused_bytes[tier]
            left -= sum(r.orders[tier].dirty_count * r.tier_bytes[tier] for r in stuck)
        return left

    @property
    def is_packing(self) -> bool:
        """True while copies are being moved together within CPU memory."""
        return self._space.packer.is_moving()

    # ---- recovery

    def recover_extent(self, extent_id: int, slot_bytes: int, slot_count: int) -> None:
        """Take over a segment found on NVMe, before its blocks."""
        pool = self.state.pools[Tier.NVME]
        pool.adopt_extent(pool.group(slot_bytes, slot_bytes, 0, -1), extent_id, slot_count)

    def recovered(self, next_generation: int, next_extent_id: int, next_realm_id: int = 1) -> None:
        """End the recovery: free lists are worked out, and ids go on where they were."""
        pool = self.state.pools[Tier.NVME]
        pool.adopted()
        pool.next_extent_id = max(pool.next_extent_id, next_extent_id)
        self.state.next_generation = max(self.state.next_generation, next_generation)
        self._next_realm_id = max(self._next_realm_id, next_realm_id)
        self._limits_may_be_less()

    def recover_blocks(self, now: float, rows: Iterable[Recovered]) -> list[Recovered]:
        """Take over blocks found on NVMe. Returns those whose key is there already: either copy has the same bytes.

        Args:
            now: counts as their last use, in the order given: oldest first.
            rows: (realm id, key, generation, slots, expiry on the core's clock).
        """
        return adopt_blocks(self.state, now, rows)

    def recover_memory(self, realm: Realm, extent_id: int, shard: int, slot_count: int) -> None:
        """Take over memory that was kept, before its blocks and after everything on NVMe."""
        pool = self.state.pools[Tier.CPU]
        group = pool.group((realm.realm_id, shard), realm.slot_bytes[shard], shard, realm.realm_id)
        pool.adopt_extent(group, extent_id, slot_count)

    def recover_copies(self, now: float, realm: Realm, rows: Iterable[RecoveredCopy]) -> int:
        """Take over blocks of a realm in memory that was kept; see :func:`adopt_copies`."""
        return adopt_copies(self.state, now, realm, rows)

    def memory_recovered(self) -> None:
        """End the recovery of memory, as :meth:`recovered` does that of NVMe."""
        self.state.pools[Tier.CPU].adopted()
        self._limits_may_be_less()

    def _limits_may_be_less(self) -> None:
        """Quotas may have been cut while nobody served."""
        for tenant in self.state.tenants.values():
            self._mover.limited(tenant)

    # ---- reading

    def snapshot(self, now: float = 0.0) -> StatsSnapshot:
        """All figures. The time matters for what refills by itself."""
        return take_snapshot(self.state, self.sessions, len(self.pins), self._mover.queue_depth, now)

    def story(self, prefix: bytes) -> list[StoryEvent]:
        """Remembered changes of blocks whose key begins with ``prefix``, oldest first."""
        return [event for event in self.state.story if event.key.startswith(prefix)]

    def nvme_entries(self, realm: Realm, keys: list[bytes]) -> list[Recovered]:
        """What :meth:`recover_blocks` takes, of the readable NVMe copies among keys, for a snapshot."""
        entries: list[Recovered] = []
        for key in keys:
            block = realm.index.get(key)
            copy = block.nvme if block is not None and block.realm is realm else None
            if copy is not None and copy.state is CopyState.READY:
                entries.append((realm.realm_id, key, copy.generation, copy.all_slots(), copy.block.expires_s))
        return entries

    def check(self) -> None:
        """Assert every invariant (visits everything)."""
        check_all(self.state, self.sessions)
