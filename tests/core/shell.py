"""A shell around the core that keeps real contents: every slot's bytes, every extent, the journal on disk.

It trusts nothing of the core: a slot has at most one writer and no reader meanwhile, extents exist before they are used,
what the disk would recover equals what the core calls readable on NVMe, and a load sees exactly what was saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvtierd.core.block import Block, Copy, CopyState
from kvtierd.core.commands import Forget, Move, Progress, StartMoves
from kvtierd.core.limits import Limits
from kvtierd.core.realm import Realm
from kvtierd.core.saves import WHOLE, Request
from kvtierd.core.settings import CoreConfig
from kvtierd.core.slots import NewExtent, RetireExtent
from kvtierd.core.tickets import GRANTED, Entry, PinTicket, ReadTicket, SaveGrant, Session
from kvtierd.core.tier_core import TierCore
from kvtierd.errors import Reason
from kvtierd.model import Namespace, Result, Tier, in_device, slot_extent, slot_index

KIB = 1024
Place = tuple[Tier, int]


def tier_of(slots: tuple[int, ...]) -> Tier:
    """The tier of memory that slots of a client are in."""
    assert len(set(map(in_device, slots))) == 1, "whole blocks only"
    return Tier.HBM if in_device(slots[0]) else Tier.CPU


def key_of(number: int) -> bytes:
    """A 32-byte key."""
    return number.to_bytes(32, "big")


def config(
    cpu: int = 1 << 20,
    nvme: int = 4 << 20,
    hbm: int = 0,
    extent: int = 64 * KIB,
    **changes: object,
) -> CoreConfig:
    """A small core: sizes in bytes, the same extent size on all tiers."""
    return CoreConfig(capacity_bytes=(hbm, cpu, nvme), extent_bytes=(extent, extent, extent), **changes)  # type: ignore[arg-type]


@dataclass
class OpenSave:
    """What a client still has to fill: index -> (key, slots, version)."""

    session: Session
    realm: Realm
    open: dict[int, tuple[bytes, tuple[int, ...], int]]


@dataclass
class OpenLoad:
    """What a client may see: index -> version, and what it was handed: index -> slots."""

    session: Session
    ticket: ReadTicket
    keys: list[bytes]
    versions: dict[int, int]
    taken: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Shell:
    """Runs the core's commands against contents held here."""

    def __init__(
        self,
        core_config: CoreConfig,
        limits: dict[str, Limits] | None = None,
        *,
        release_late: bool = False,
        into_hbm: bool = False,
    ) -> None:
        self.config = core_config
        self.into_hbm = into_hbm  # clients can open the memory of the first GPU
        self.blind: set[Session] = set()  # but for these
        self.core = TierCore(core_config, limits)
        self.now = 0.0
        self.release_late = release_late
        self.content: dict[Place, object] = {}
        self.extents: dict[tuple[Tier, int], NewExtent] = {}
        self.unreleased: dict[tuple[Tier, int], int] = {}
        self.writers: dict[Place, object] = {}
        self.readers: dict[Place, set[object]] = {}
        self.places: dict[object, set[Place]] = {}
        self.moves: dict[int, tuple[Move, list[object]]] = {}
        self.disk: dict[tuple[int, bytes, int], tuple[int, ...]] = {}
        self.disk_slots: dict[int, tuple[int, bytes, int]] = {}
        self.saves: dict[int, OpenSave] = {}
        self.loads: dict[int, OpenLoad] = {}
        self.version: dict[tuple[int, bytes], int] = {}
        self.evicted: set[tuple[int, bytes]] = set()
        self.progress: list[ReadTicket] = []
        self.written, self.next_session = 0, 1
        self.ttl_s: float | None = None  # of saves
        self.followed: set[tuple[Realm, bytes, Tier]] = set()
        self.core.state.changes = []
        self._watch_reserves()

    def _watch_reserves(self) -> None:
        """Whoever asks for room never gets what another tenant's reserve keeps."""
        space, state = self.core._space, self.core.state
        allocate, evict = space.allocate, state.evict
        asking: list[Realm] = []

        def allocate_for(now: float, tier: Tier, realm: Realm, source: Copy | None = None) -> tuple[int, ...] | Reason:
            asking.append(realm)
            try:
                return allocate(now, tier, realm, source)
            finally:
                asking.pop()

        def evict_for(now: float, copy: Copy, why: str) -> None:
            owner, tier = copy.block.realm.tenant, copy.tier
            if asking and why == "pressure" and owner is not asking[-1].tenant and owner.limits.reserve_bytes[tier]:
                left = owner.used_bytes[tier] - copy.block.realm.tier_bytes[tier]
                assert left >= owner.limits.reserve_bytes[tier], f"a copy of {owner.name}'s reserve on {tier.name} goes for another"
            evict(now, copy, why)

        space.allocate, state.evict = allocate_for, evict_for  # type: ignore[method-assign, assignment]

    # ---- who

    def realm(self, *shard_bytes: int, tenant: str = "t", model: str = "m") -> Realm:
        """A realm with shards of these sizes."""
        return self.core.open_realm(tenant, Namespace(shard_bytes=shard_bytes, model=model))[0]

    def devices(self, realm: Realm, session: Session) -> tuple[int, ...]:
        """What the clients of a session can open."""
        return (0,) * len(realm.slot_bytes) if self.into_hbm and session not in self.blind else ()

    def attach(self, realm: Realm) -> Session:
        """A new session."""
        self.next_session += 1
        return self.core.attach(self.next_session, realm)

    def detach(self, session: Session) -> None:
        """All processes of a session are gone: nobody writes or reads its slots any more."""
        for ticket_id, save in list(self.saves.items()):
            if save.session is session:
                self._stop_using(("save", ticket_id))
                del self.saves[ticket_id]
        for ticket_id, load in list(self.loads.items()):
            if load.session is session:
                self._stop_using(("load", ticket_id))
                del self.loads[ticket_id]
        self.core.detach(self.now, session)
        self.run()

    # ---- commands

    def run(self) -> None:
        """Run commands until there are none, checking each."""
        while commands := self.core.take_commands():
            for command in commands:
                if isinstance(command, NewExtent):
                    self._new_extent(command)
                elif isinstance(command, RetireExtent):
                    self._retire(command)
                elif isinstance(command, StartMoves):
                    self._start(command)
                elif isinstance(command, Forget):
                    self._forget(command)
                elif isinstance(command, Progress):
                    self.progress.append(command.ticket)
        if len(self.disk) < 500:  # it looks at everything
            self._check_disk()

    def _new_extent(self, new: NewExtent) -> None:
        place = (new.tier, new.extent_id)
        assert place not in self.extents and place not in self.unreleased, "extent ids are never used twice"
        self.extents[place] = new
        total = sum(e.slot_bytes * e.slot_count for (t, _), e in self.extents.items() if t is new.tier)
        total += sum(n for (t, _), n in self.unreleased.items() if t is new.tier)
        assert total <= self.config.capacity_bytes[new.tier], "the capacity holds at all times"

    def _retire(self, old: RetireExtent) -> None:
        extent = self.extents.pop((old.tier, old.extent_id))
        for index in range(extent.slot_count):
            place = (old.tier, old.extent_id << 32 | index)
            assert place not in self.writers and not self.readers.get(place), "nobody uses a retired extent"
            self.content.pop(place, None)
            if old.tier is Tier.NVME:
                assert place[1] not in self.disk_slots, "removals come before the segment goes"
        self.unreleased[(old.tier, old.extent_id)] = extent.slot_bytes * extent.slot_count
        if old.tier is Tier.NVME or not self.release_late:
            self.release_extent(old.tier, old.extent_id)

    def release_extent(self, tier: Tier, extent_id: int) -> None:
        """The last client let go of a retired extent. Inside :meth:`run` the commands follow in its loop."""
        del self.unreleased[(tier, extent_id)]
        self.core.extent_released(self.now, tier, extent_id)

    def release_all(self) -> None:
        """Every client let go of every retired extent."""
        for place in list(self.unreleased):
            self.release_extent(*place)
        self.run()

    def _start(self, command: StartMoves) -> None:
        assert command.moves
        for move in command.moves:
            assert (move.src.tier, move.dst.tier, move.priority) == (command.src_tier, command.dst_tier, command.priority)
            token = ("move", move.move_id)
            apart = {move.src.tier, move.dst.tier} == {Tier.HBM, Tier.NVME}
            assert not apart or self.core.state.direct, "by CPU memory where there is no direct way"
            seen = self._read(move.src.tier, move.src.all_slots(), token)
            assert _is_block(seen, move.src.block), "a move reads the bytes of its block"
            self._begin_write(move.dst.tier, _moved_slots(move), token)
            self.moves[move.move_id] = (move, seen)

    def _forget(self, gone: Forget) -> None:
        assert self.disk.pop((gone.realm_id, gone.key, gone.generation)) == gone.slots
        for slot in gone.slots:
            del self.disk_slots[slot]

    def _check_disk(self) -> None:
        """A crash now would recover exactly what is readable on NVMe."""
        known = {}
        for realm in self.core.state.realms.values():
            for realm_id, key, generation, slots, _ in self.core.nvme_entries(realm, list(realm.index)):
                known[(realm_id, key, generation)] = slots
        assert known == self.disk

    # ---- contents

    def _places(self, tier: Tier, slots: tuple[int, ...]) -> list[Place]:
        for slot in slots:
            assert slot_index(slot) < self.extents[(tier, slot_extent(slot))].slot_count
        return [(tier, slot) for slot in slots]

    def _read(self, tier: Tier, slots: tuple[int, ...], token: object) -> list[object]:
        places = self._places(tier, slots)
        for place in places:
            assert place not in self.writers, f"{place} is read while {self.writers[place]} writes it"
            self.readers.setdefault(place, set()).add(token)
            self.places.setdefault(token, set()).add(place)
        return [self.content.get(p) for p in places]

    def _begin_write(self, tier: Tier, slots: tuple[int, ...], token: object) -> None:
        for place in self._places(tier, slots):
            assert place not in self.writers and not self.readers.get(place), f"{place} is in use"
            self.writers[place] = token
            self.places.setdefault(token, set()).add(place)
            self.content[place] = ("half written", token)

    def _stop_using(self, token: object, slots: tuple[int, ...] | None = None) -> None:
        mine = self.places.get(token, set())
        for place in [p for p in mine if slots is None or p[1] in slots]:
            mine.discard(place)
            if self.writers.get(place) == token:
                del self.writers[place]
            else:
                self.readers[place].discard(token)
                if not self.readers[place]:
                    del self.readers[place]
        if not mine:
            self.places.pop(token, None)

    def finish(self, move_id: int, result: Result = Result.OK) -> None:
        """A move ends: bytes are copied now, or garbage is left behind."""
        move, seen = self.moves.pop(move_id)
        token = ("move", move_id)
        source, target = move.src, move.dst
        assert [self.content.get((source.tier, s)) for s in source.all_slots()] == seen, "a source stays as it was"
        for slot, value in zip(target.all_slots(), seen, strict=True):
            if slot not in _moved_slots(move):
                continue
            assert self.writers[(target.tier, slot)] == token
            self.content[(target.tier, slot)] = value if result is Result.OK else ("garbage", move_id)
        if result is Result.OK and target.tier is Tier.NVME:
            record = (target.block.realm.realm_id, target.block.key, target.generation)
            for slot in target.all_slots():
                assert slot not in self.disk_slots, "removals come before a slot is written again"
                self.disk_slots[slot] = record
            self.disk[record] = target.all_slots()
        self._stop_using(token)
        self.core.move_done(self.now, move_id, result)
        self.run()

    def finish_all(self, result: Result = Result.OK, limit: int = 100_000) -> int:
        """End moves, oldest first, until there are none. Returns how many."""
        done = 0
        while self.moves:
            self.finish(min(self.moves), result)
            done += 1
            assert done < limit, "moves go on for ever"
        return done

    # ---- what clients do

    def save(self, session: Session, realm: Realm, keys: list[bytes], request: Request = WHOLE) -> SaveGrant:
        """Ask for slots; granted ones are being written from now on."""
        grant = self.core.save(self.now, session, realm, keys, self.ttl_s, replace(request, devices=self.devices(realm, session)))
        self.run()
        width = len(realm.slot_bytes)
        granted = [i for i, o in enumerate(grant.outcomes) if o == GRANTED]
        assert len(grant.slots) == width * len(granted)
        assert len(grant.outcomes) == len(keys)
        if granted:
            opened = OpenSave(session, realm, {})
            for n, index in enumerate(granted):
                slots = tuple(grant.slots[n * width : (n + 1) * width])
                self.written += 1
                opened.open[n] = (keys[index], slots, self.written)
                self._begin_write(tier_of(slots), slots, ("save", grant.ticket_id))
            self.saves[grant.ticket_id] = opened
        else:
            assert grant.ticket_id == 0
        return grant

    def commit(self, ticket_id: int, indexes: list[int] | None = None) -> list[Block]:
        """Fill slots and publish them."""
        opened = self.saves[ticket_id]
        which = list(opened.open) if indexes is None else indexes
        filled = {}
        for index in which:
            key, slots, version = opened.open.pop(index)
            for shard, slot in enumerate(slots):
                assert self.writers[(tier_of(slots), slot)] == ("save", ticket_id)
                self.content[(tier_of(slots), slot)] = (opened.realm.realm_id, key, shard, version)
            self._stop_using(("save", ticket_id), slots)
            filled[key] = version
        published = self.core.commit(self.now, opened.session, ticket_id, indexes or ())
        for block in published:
            place = (opened.realm.realm_id, block.key)
            self.version[place] = filled[block.key]
            self.evicted.discard(place)
        if not opened.open:
            del self.saves[ticket_id]
        self.run()
        return published

    def abort(self, ticket_id: int, indexes: list[int] | None = None) -> None:
        """Give slots back half written."""
        opened = self.saves[ticket_id]
        for index in list(opened.open) if indexes is None else indexes:
            self._stop_using(("save", ticket_id), opened.open.pop(index)[1])
        self.core.abort(self.now, opened.session, ticket_id, indexes or ())
        if not opened.open:
            del self.saves[ticket_id]
        self.run()

    def put(self, session: Session, realm: Realm, keys: list[bytes], request: Request = WHOLE) -> SaveGrant:
        """Save and commit."""
        grant = self.save(session, realm, keys, request)
        if grant.ticket_id:
            self.commit(grant.ticket_id)
        return grant

    def load(
        self, session: Session, realm: Realm, keys: list[bytes], wait_s: float = 10.0, *, each: bool = False, keeps: bool = False
    ) -> ReadTicket:
        """Begin a load."""
        devices = self.devices(realm, session)
        ticket = self.core.load(self.now, session, realm, keys, self.now + wait_s, each=each, devices=devices, keeps=keeps)
        # In a shared realm a block may be another's, who saved it.
        owners = {i: copy.block.realm.realm_id for i, copy in enumerate(ticket.copies) if copy is not None}
        versions = {i: self.version[(owner, keys[i])] for i, owner in owners.items()}
        for index, owner in owners.items():
            assert (owner, keys[index]) not in self.evicted, "an evicted key is not found"
            assert owner == realm.realm_id or (realm.shared and self.core.state.realms[owner].shared)
        self.loads[ticket.ticket_id] = OpenLoad(session, ticket, keys, versions)
        self.run()
        return ticket

    def collect(self, ticket: ReadTicket) -> tuple[list[int], bool]:
        """Take what became readable and look at its bytes. Returns indexes and whether that was all."""
        opened = self.loads[ticket.ticket_id]
        indexes, slots, done = self.core.collect(self.now, ticket)
        self.run()
        assert indexes == sorted(indexes)
        assert not opened.taken or not indexes or indexes[0] > max(opened.taken), "in order, each once"
        if not ticket.each:
            first = len(opened.taken)
            assert indexes == list(range(first, first + len(indexes))), "a prefix without gaps"
        width = len(ticket.realm.slot_bytes)
        assert len(slots) == width * len(indexes)
        for n, index in enumerate(indexes):
            opened.taken[index] = tuple(slots[n * width : (n + 1) * width])
            self._look(opened, index)
        return indexes, done

    def _look(self, opened: OpenLoad, index: int) -> None:
        realm = opened.ticket.realm
        copy = opened.ticket.copies[index]
        assert copy is not None and copy.tier in ((Tier.HBM, Tier.CPU) if opened.ticket.devices else (Tier.CPU,))
        assert tier_of(opened.taken[index]) is copy.tier
        seen = self._read(copy.tier, opened.taken[index], ("load", opened.ticket.ticket_id))
        wanted = [
            (copy.block.realm.realm_id, opened.keys[index], shard, opened.versions[index]) for shard in range(len(realm.slot_bytes))
        ]
        assert seen == wanted, "a load sees what was saved, and nothing else"

    def release(self, ticket: ReadTicket, indexes: list[int] | None = None) -> None:
        """Look at the bytes once more, then let go."""
        opened = self.loads[ticket.ticket_id]
        still = [i for i in opened.taken if ticket.entries[i] == Entry.TAKEN]
        for index in still if indexes is None else indexes:
            self._look(opened, index)
            self._stop_using(("load", ticket.ticket_id), opened.taken[index])
        if not ticket.closed:
            self.core.release(self.now, opened.session, ticket.ticket_id, indexes or ())
        if ticket.closed:
            del self.loads[ticket.ticket_id]
        self.run()

    def get(self, session: Session, realm: Realm, keys: list[bytes], *, each: bool = False) -> list[int]:
        """Load, let every move succeed, release. Returns the indexes that were readable."""
        ticket = self.load(session, realm, keys, each=each)
        found: list[int] = []
        while True:
            indexes, done = self.collect(ticket)
            found += indexes
            if done:
                break
            if not self.moves:
                assert indexes, "a load that waits for nothing"
            self.finish_all()
        self.release(ticket)
        return found

    def prefetch(self, session: Session, realm: Realm, keys: list[bytes], wait_s: float = 10.0) -> ReadTicket:
        """Begin a prefetch."""
        ticket = self.core.prefetch(self.now, session, realm, keys, self.now + wait_s, self.devices(realm, session))
        self.run()
        return ticket

    def evict(self, realm: Realm, keys: list[bytes], tier: Tier | None = None) -> int:
        """Evict keys."""
        count = self.core.evict_keys(self.now, realm, keys, tier)
        if tier is None:
            self.evicted |= {(realm.realm_id, key) for key in keys}
        self.run()
        return count

    def pin(self, realm: Realm, keys: list[bytes], wait_s: float = 10.0) -> PinTicket:
        """Pin keys."""
        ticket = self.core.pin(self.now, [realm], keys, self.now + wait_s, tenant=realm.tenant)
        self.run()
        return ticket

    def put_hbm(self, realm: Realm, key: bytes) -> bool:
        """Put a block into HBM, as a save of an engine that can open that memory would. False when it has no room."""
        state = self.core.state
        if key in realm.index or state.draining:
            return False
        realm.devices = (0,) * len(realm.slot_bytes)
        slots = self.core._space.allocate(self.now, Tier.HBM, realm)
        if not isinstance(slots, tuple):
            self.run()
            return False
        copy = state.new_copy(self.now, Block(key, realm, self.now), Tier.HBM, slots, "save")
        self.run()
        self.written += 1
        self._begin_write(Tier.HBM, slots, "hbm")
        for shard, slot in enumerate(slots):
            self.content[(Tier.HBM, slot)] = (realm.realm_id, key, shard, self.written)
        self._stop_using("hbm")
        self.version[(realm.realm_id, key)] = self.written
        self.evicted.discard((realm.realm_id, key))
        state.set_state(self.now, copy, CopyState.READY, "commit")
        state.unpin(self.now, copy)
        self.core._mover.pump(self.now)
        self.run()
        return True

    # ---- time

    def set_direct(self, direct: bool) -> None:
        """Say whether blocks move between GPU memory and NVMe directly."""
        self.core.set_direct(self.now, direct)
        self.run()

    def drain(self, *, on: bool = True) -> None:
        """Switch draining."""
        self.core.drain(self.now, on=on)
        self.run()

    def wait(self, seconds: float) -> int:
        """Let time pass with a tick whenever one is due. Returns the number of ticks."""
        until_s = self.now + seconds
        ticks = 0
        while (due_s := self.core.next_deadline()) is not None and due_s <= until_s:
            self.now = max(self.now, due_s)
            self.core.tick(self.now)
            ticks += 1
            self.run()
        self.now = until_s
        return ticks

    def tiers(self, realm: Realm, key: bytes) -> str:
        """Tiers that hold a key, as letters: h, c, n."""
        mask = self.core.lookup(self.now, realm, [key], each=True)[1][0]
        return "".join(letter for tier, letter in zip(Tier, "hcn", strict=True) if mask & tier.bit)

    def check(self) -> None:
        """The core's own invariants and some that it does not know."""
        self.core.check()
        self._check_disk()
        state = self.core.state
        for realm in state.realms.values():
            for key, block in realm.index.items():
                place = (block.realm.realm_id, key)
                if block.mask:
                    assert place in self.version and place not in self.evicted
        for tier in Tier:
            reserved = sum(e.slot_bytes * e.slot_count for (t, _), e in self.extents.items() if t is tier)
            reserved += sum(n for (t, _), n in self.unreleased.items() if t is tier)
            assert reserved == state.pools[tier].reserved_bytes <= self.config.capacity_bytes[tier]
        assert set(state.moves) == set(self.moves)
        self._check_changes()

    def _check_changes(self) -> None:
        """Who follows the changes, each of which is one, knows which copies are readable."""
        changes = self.core.state.changes
        assert changes is not None
        for change in changes:
            copy = (change.realm, change.key, change.tier)
            assert (copy in self.followed) is not change.readable
            self.followed ^= {copy}
        changes.clear()
        blocks = [b for realm in self.core.state.realms.values() for b in realm.index.values()]
        assert self.followed == {(b.realm, b.key, tier) for b in blocks for tier in Tier if b.mask & tier.bit}


def _moved_slots(move: Move) -> tuple[int, ...]:
    """Slots that a move writes: within a tier, shards may stay where they are."""
    stay = move.src.all_slots() if move.src.tier is move.dst.tier else ()
    return tuple(slot for slot in move.dst.all_slots() if slot not in stay)


def _is_block(seen: list[object], block: Block) -> bool:
    """True when contents are all shards, in order, of one version of a block."""
    first = seen[0]
    if not isinstance(first, tuple) or len(first) != 4:
        return False
    return seen == [(block.realm.realm_id, block.key, shard, first[3]) for shard in range(len(block.realm.slot_bytes))]
