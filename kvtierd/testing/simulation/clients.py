"""Engines: each a session that saves, loads, prefetches, pins and evicts, checks every byte it is given, and may die any time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Final, Protocol

from kvtierd.core.realm import Realm
from kvtierd.core.saves import BUSY
from kvtierd.core.tickets import GRANTED, ReadTicket
from kvtierd.errors import Reason, RequestError
from kvtierd.model import KEY_BYTES, Namespace, Tier
from kvtierd.runtime.runtime import Runtime
from kvtierd.runtime.sessions import Attached
from kvtierd.testing.simulation.contents import Contents, Version, pattern, place_of
from kvtierd.testing.simulation.threads import World

KEYS: Final = 20
"""Keys of each realm that clients use."""
SHORT_TTL_S: Final = 3.0
LATE_S: Final = 1.5
"""By so much a call may end after its deadline: the daemon looks about once a second when nothing happens."""


class Stage(Protocol):
    """What clients share."""

    world: World
    contents: Contents
    runtime: Runtime
    slow_s: float
    """Longest pause of a client between two steps of a copy."""

    def evicted(self) -> None:
        """An eviction was confirmed."""


def key_of(number: int) -> bytes:
    """A 32-byte key."""
    return number.to_bytes(KEY_BYTES, "big")


class Client:
    """One engine's session.

    Args:
        stage: the daemon and what clients share.
        number: for the story.
        tenant: its name.
        namespace: what it saves.
    """

    def __init__(self, stage: Stage, number: int, tenant: str, namespace: Namespace) -> None:
        self._stage = stage
        self._world = stage.world
        self._contents = stage.contents
        self._runtime = stage.runtime
        self._name = f"client {number}"
        self._tenant = tenant
        self._namespace = namespace
        self.attached: Attached | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._prefetches: list[int] = []
        self._pins: list[int] = []

    async def live(self, operations: int) -> None:
        """Attach, do so many things, and leave, in good order or not."""
        draw = self._world.random
        try:
            attached = await self._runtime.attach(self._namespace, self._tenant, self._name, 1)
        except RequestError as e:
            self._refused("attach", e)
            return
        self.attached = attached
        attached.processes.update({1, 2})
        self._note(f"attached to realm {attached.core.realm.realm_id}")
        try:
            for _ in range(operations):
                await asyncio.sleep(draw.expovariate(20.0))
                self._raise_failed()
                if draw.random() < 0.3 and len(self._background) < 3:
                    self._background.add(asyncio.get_running_loop().create_task(self._one(attached)))
                else:
                    await self._one(attached)
            if draw.random() < 0.5:
                await asyncio.gather(*self._background)
        finally:
            if self._world.alive:
                self._leave(attached)

    def _raise_failed(self) -> None:
        done = {task for task in self._background if task.done()}
        self._background -= done
        for task in done:
            task.result()

    def _leave(self, attached: Attached) -> None:
        """All processes die, one after the other; the last one takes the session along."""
        for task in self._background:
            task.cancel()
        attached.stream_open = False
        attached.processes.discard(1)
        self._runtime.end_if_over(attached)
        assert self._runtime.sessions.by_id(attached.session_id) is attached, "a session lives as long as any process"
        attached.processes.clear()
        open_tickets = len(attached.core.tickets)
        self._runtime.end_if_over(attached)
        self._note(f"gone with {open_tickets} open tickets")

    def _note(self, text: str) -> None:
        self._world.note(f"{self._name}: {text}")

    def _refused(self, what: str, error: RequestError) -> None:
        """An answer that the world may give; anything else is a fault."""
        allowed = (Reason.LIMIT, Reason.DRAINING, Reason.UNKNOWN_TICKET, Reason.IO)
        assert error.reason in allowed, f"{what} is refused with {error.reason.name}: {error}"
        self._note(f"{what} refused: {error.reason.name}")

    async def _one(self, attached: Attached) -> None:
        kinds = {self._save: 9, self._load: 10, self._prefetch: 3, self._cancel: 1, self._pin: 1, self._unpin: 1, self._evict: 3}
        kinds[self._lookup] = 2
        kind = self._world.random.choices(list(kinds), list(kinds.values()))[0]
        try:
            await kind(attached)
        except RequestError as e:
            self._refused(kind.__name__.strip("_"), e)

    def _some_keys(self) -> list[bytes]:
        draw = self._world.random
        first, count = draw.randrange(KEYS), draw.randint(1, 8)
        return [key_of((first + i) % KEYS) for i in range(count)]

    async def _pause(self) -> None:
        await asyncio.sleep(self._world.random.random() * self._stage.slow_s)

    # ---- saves

    async def _save(self, attached: Attached) -> None:
        draw = self._world.random
        realm, keys = attached.core.realm, self._some_keys()
        ttl_s = draw.choice([None, None, draw.uniform(0.1, SHORT_TTL_S), draw.uniform(SHORT_TTL_S, 20.0)])
        wait_s = draw.choice([0.0, 0.2, 1.0, 3.0])
        began_s = self._world.now
        grant = await self._runtime.save(attached, realm, keys, wait_s, ttl_s)
        assert self._world.now <= began_s + wait_s + LATE_S, "a save ends in time"
        self._note(f"save {_span(keys)} ttl {ttl_s}: ticket {grant.ticket_id} {grant.outcomes}")
        granted = [key for key, outcome in zip(keys, grant.outcomes, strict=True) if outcome == GRANTED]
        if not granted:
            return
        filled = [(key, self._contents.new_number(), slots) for key, slots in _by_block(granted, grant.slots, realm)]
        for _, number, slots in filled:
            self._fill(realm, number, slots)
            await self._pause()
            if draw.random() < 0.02:
                return  # forgotten: the session's end takes it back
        for _, number, slots in filled:
            # Whoever else wrote there would have had the slot too.
            seen = self._views(realm, slots)
            whole = all(bytes(s) == pattern(number, i, s.nbytes) for i, s in enumerate(seen))
            assert whole, f"somebody else wrote to a slot that was granted to {self._name}"
        await self._commit(attached, grant.ticket_id, filled, ttl_s)
        if ttl_s is not None and ttl_s < SHORT_TTL_S and draw.random() < 0.3:
            # Just past its end a block must not be found, whatever the daemon has come to do about it.
            await asyncio.sleep(ttl_s + draw.random() * 0.05)
            self._look(realm, granted)
            await self.read(attached, granted, 0.5)

    async def _commit(
        self, attached: Attached, ticket_id: int, filled: list[tuple[bytes, int, tuple[int, ...]]], ttl_s: float | None
    ) -> None:
        """Publish all, or some and give the others back."""
        draw = self._world.random
        realm = attached.core.realm
        which = list(range(len(filled)))
        chance = draw.random()
        some = which if chance < 0.8 else [i for i in which if draw.random() < 0.5]
        if some:
            published = {b.key for b in self._runtime.commit(attached, ticket_id, [] if some == which else some)}
            for index in some:
                key, number, _ = filled[index]
                if key in published:
                    self._contents.committed(place_of(realm, key), number, ttl_s)
            self._note(f"commit of ticket {ticket_id}: {_span([filled[i][0] for i in some])}, {len(published)} published")
        rest = [i for i in which if i not in some]
        if rest:
            await self._pause()
            self._runtime.abort(attached, ticket_id, rest)
            self._note(f"abort of ticket {ticket_id}: {_span([filled[i][0] for i in rest])}")

    def _fill(self, realm: Realm, number: int, slots: tuple[int, ...]) -> None:
        for shard, view in enumerate(self._views(realm, slots)):
            view[:] = pattern(number, shard, view.nbytes)

    def _views(self, realm: Realm, slots: Sequence[int]) -> list[memoryview]:
        """The memory of one block. A slot that a client may use is there, whatever else happens."""
        sizes = realm.namespace.shard_bytes
        return [self._runtime.cpu.view(slot)[:size] for slot, size in zip(slots, sizes, strict=True)]

    # ---- loads

    async def _load(self, attached: Attached) -> None:
        await self.read(attached, self._some_keys(), self._world.random.choice([0.0, 0.01, 0.5, 5.0]))

    async def read(self, attached: Attached, keys: list[bytes], deadline_s: float, *, patient: bool = False) -> int:
        """Load keys, and check every byte twice. Returns how many were readable. Who is not patient may leave early."""
        draw = self._world.random
        realm = attached.core.realm
        began_s = self._world.now
        among = [self._contents.possible(place_of(realm, key)) for key in keys]
        ticket = self._runtime.load(attached, realm, keys, deadline_s, each=draw.random() < 0.3)
        taken: dict[int, tuple[Version, tuple[int, ...]]] = {}
        leaves_early = not patient and draw.random() < 0.1
        while True:
            indexes, slots, done = self._runtime.collect(ticket)
            for index, (_, mine) in zip(indexes, _by_block(indexes, slots, realm), strict=True):
                place = place_of(realm, keys[index])
                taken[index] = (self._contents.check(place, among[index], self._views(realm, mine)), mine)
            if done:
                break
            if leaves_early:
                self._runtime.abandon(ticket)
                break
            await self._runtime.wait_progress(ticket)
        assert self._world.now <= began_s + deadline_s + LATE_S, "a load ends in time"
        self._note(f"load {_span(keys)} ticket {ticket.ticket_id}: {[keys[i][-1] for i in taken]} {ticket.reason.name}")
        await self._hold(attached, ticket, taken)
        if patient and ticket.ticket_id in attached.core.tickets:
            self._runtime.release(attached, ticket.ticket_id, [])
        return len(taken)

    async def _hold(self, attached: Attached, ticket: ReadTicket, taken: dict[int, tuple[Version, tuple[int, ...]]]) -> None:
        """Copy slowly: what is pinned stays as it is until it is let go."""
        draw = self._world.random
        realm = ticket.realm
        for index, (version, slots) in taken.items():
            await self._pause()
            self._contents.check(place_of(realm, b""), [version], self._views(realm, slots))
            if ticket.ticket_id in attached.core.tickets and draw.random() < 0.5:
                self._runtime.release(attached, ticket.ticket_id, [index])
        if ticket.ticket_id in attached.core.tickets and draw.random() < 0.95:
            self._runtime.release(attached, ticket.ticket_id, [])

    async def _prefetch(self, attached: Attached) -> None:
        draw = self._world.random
        keys = self._some_keys()
        ticket = self._runtime.prefetch(attached, attached.core.realm, keys, draw.choice([0.05, 1.0, 5.0]))
        self._note(f"prefetch {_span(keys)} ticket {ticket.ticket_id}")
        if not ticket.closed:
            self._prefetches.append(ticket.ticket_id)
        if draw.random() < 0.5:
            while not self._runtime.core.progress(ticket)[2]:
                await self._runtime.wait_progress(ticket)
        self._runtime.unwatch(ticket)

    async def _cancel(self, attached: Attached) -> None:
        if self._prefetches:
            self._runtime.cancel(attached, self._prefetches.pop())

    async def _lookup(self, attached: Attached) -> None:
        self._look(attached.core.realm, self._some_keys())

    def _look(self, realm: Realm, keys: list[bytes]) -> None:
        among = [self._contents.possible(place_of(realm, key)) for key in keys]
        _, masks = self._runtime.lookup(realm, b"".join(keys), each=True)
        for key, mask, versions in zip(keys, masks, among, strict=True):
            assert versions or not mask, f"block {key[-1]} is found, and was never saved, or was evicted, or has expired"

    async def must_save(self, attached: Attached, key: bytes) -> None:
        """Nothing goes wrong and nobody holds anything: a block that fits is saved, soon, and can be read."""
        realm = attached.core.realm
        for _ in range(20):
            grant = await self._runtime.save(attached, realm, [key], 3.0)
            if grant.ticket_id:
                break
            assert grant.outcomes == [BUSY], f"a save is answered {grant.outcomes}"
        assert grant.ticket_id, "a save never gets room"
        number = self._contents.new_number()
        self._fill(realm, number, tuple(grant.slots))
        self._runtime.commit(attached, grant.ticket_id, [])
        self._contents.committed(place_of(realm, key), number, None)
        assert await self.read(attached, [key], 10.0, patient=True), "what was saved just now cannot be read"

    # ---- a tenant that has a reserve

    async def put(self, attached: Attached, keys: list[bytes]) -> dict[bytes, int]:
        """Save what gets room within three seconds. Returns where the first shard of each block is."""
        realm = attached.core.realm
        grant = await self._runtime.save(attached, realm, keys, 3.0)
        granted = [key for key, outcome in zip(keys, grant.outcomes, strict=True) if outcome == GRANTED]
        saved = _by_block(granted, grant.slots, realm)
        for key, slots in saved:
            number = self._contents.new_number()
            self._fill(realm, number, slots)
            self._contents.committed(place_of(realm, key), number, None)
        if granted:
            self._runtime.commit(attached, grant.ticket_id, [])
        return {key: slots[0] for key, slots in saved}

    async def evict_for_good(self, attached: Attached, keys: list[bytes]) -> None:
        """Forget blocks, on all tiers."""
        realm = attached.core.realm
        gone = self._contents.evicting([place_of(realm, key) for key in keys])
        await self._runtime.evict([realm], keys, None, 0.0)
        self._contents.evicted(gone)

    async def read_on(self, attached: Attached, keys: list[bytes]) -> None:
        """Load one block after the other until cancelled: each is there."""
        for key in itertools.cycle(keys):
            assert await self.read(attached, [key], 1.0, patient=True), f"block {key[-1]} of a reserve has gone for others"
            await asyncio.sleep(0.01)

    # ---- pins and evictions

    async def _pin(self, attached: Attached) -> None:
        keys = self._some_keys()
        realm = attached.core.realm
        pin = self._runtime.pin([realm], keys, self._world.random.uniform(0.1, 5.0), tenant=realm.tenant)
        self._note(f"pin {_span(keys)}: ticket {pin.ticket_id}, {len(pin.copies)} copies")
        if pin.copies:
            self._pins.append(pin.ticket_id)

    async def _unpin(self, attached: Attached) -> None:
        if self._pins:
            self._runtime.unpin(self._pins.pop(), attached.tenant)

    async def _evict(self, attached: Attached) -> None:
        """Evict, often twice at one time, so that both want the journal."""
        both = [self._evict_one(attached) for _ in range(self._world.random.choice([1, 1, 2]))]
        await asyncio.gather(*both)

    async def _evict_one(self, attached: Attached) -> None:
        draw = self._world.random
        realm, keys = attached.core.realm, self._some_keys()
        tier = draw.choice([None, None, None, Tier.CPU, Tier.NVME])
        idle_s = draw.choice([0.0, 0.0, 1.0])
        for_good = tier is None and not idle_s
        gone = self._contents.evicting([place_of(realm, key) for key in keys]) if for_good else []
        self._note(f"evict {_span(keys)} of {tier.name if tier is not None else 'all tiers'}, idle {idle_s}")
        try:
            count = await self._runtime.evict([realm], keys, tier, idle_s)
        except OSError as e:
            self._note(f"evict not confirmed: {e}")
            return
        self._contents.evicted(gone)
        self._stage.evicted()
        self._note(f"evict {_span(keys)} confirmed: {count} copies")


def _by_block(keys: Sequence[Any], slots: Sequence[int], realm: Realm) -> list[tuple[Any, tuple[int, ...]]]:
    width = len(realm.slot_bytes)
    assert len(slots) == width * len(keys), "a slot for each shard of each block"
    return [(key, tuple(slots[i * width : (i + 1) * width])) for i, key in enumerate(keys)]


def _span(keys: Sequence[bytes]) -> str:
    return f"{keys[0][-1]}..{keys[-1][-1]}" if len(keys) > 1 else str(keys[0][-1])
