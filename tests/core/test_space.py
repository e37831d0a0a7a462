"""Room: extents and who gives them up, shards, quotas below, and the cost of it all."""

from __future__ import annotations

import random
import sys

import pytest

from kvtierd.core import slots as slot_pools
from kvtierd.core.commands import Forget, StartMoves
from kvtierd.core.limits import Limits
from kvtierd.core.saves import BUSY
from kvtierd.core.slots import LEAVING_PAUSE_S, MAX_LEAVING_EXTENTS, NewExtent, RetireExtent
from kvtierd.core.tickets import GRANTED
from kvtierd.core.tier_core import TierCore
from kvtierd.model import NO_END, Namespace, Result, Tier, slot_extent
from tests.core.shell import KIB, Shell, config, key_of
from tests.core.test_load import keys, on_nvme


def test_commands_come_in_an_order_that_works() -> None:
    """Goal: an extent is made before it is written, and a removal comes before its slots are used again.

    Method: read the raw commands of one eviction on a full NVMe tier.
    """
    core = TierCore(config(nvme=64 * KIB, extent=64 * KIB))
    realm = core.open_realm("t", Namespace(shard_bytes=(28 * KIB,)))[0]
    session = core.attach(1, realm)
    for i in range(3):
        grant = core.save(float(i), session, realm, keys(i))
        core.commit(float(i), session, grant.ticket_id)
        if i:
            core.evict_keys(float(i), realm, keys(i - 1), Tier.CPU)
        core.take_commands()
        core.drain(float(i), on=True)
        commands = core.take_commands()
        kinds = [type(c) for c in commands]
        if i == 0:
            assert kinds.index(NewExtent) < kinds.index(StartMoves)
        if i == 2:
            assert kinds.index(Forget) < kinds.index(StartMoves)
        for move_id in list(core.state.moves):
            core.move_done(float(i), move_id, Result.OK)
        core.drain(float(i), on=False)
        core.check()
    assert core.lookup(9.0, realm, keys(0))[0] == 0


@pytest.mark.parametrize("late", [False, True])
def test_colder_realm_gives_up_an_extent(late: bool) -> None:
    """Goal: a realm that needs room takes the coldest extent of another; blocks there that exist nowhere else are written
    down first and stay readable.

    Method: a full tier of a cold realm, all dirty; a hot realm saves. Clients let go of the memory at once or late.
    """
    shell = Shell(config(cpu=256 * KIB, free_target=0.0, max_ticket_share=1.0), release_late=late)
    cold, hot = shell.realm(4096, tenant="cold"), shell.realm(4096, tenant="hot")
    mine, other = shell.attach(cold), shell.attach(hot)
    for i in range(64):
        shell.now = i / 10
        shell.put(mine, cold, keys(i))
    assert len(shell.extents) == 4
    shell.now = 100.0
    assert shell.save(other, hot, keys(100)).outcomes == [BUSY]
    assert {slot_extent(m.src.all_slots()[0]) for m, _ in shell.moves.values()} == {1}
    shell.finish_all()
    shell.check()
    if late:
        assert shell.save(other, hot, keys(100)).outcomes == [BUSY], "the memory is still mapped somewhere"
        shell.release_all()
    assert shell.put(other, hot, keys(100)).outcomes == [GRANTED]
    assert shell.core.lookup(shell.now, cold, keys(*range(64)), each=True)[0] == 64, "nothing is lost"
    assert sum(shell.tiers(cold, key_of(i)) == "n" for i in range(64)) == 16, "no more than an extent"
    shell.check()


def test_one_extent_at_a_time_is_taken() -> None:
    """Goal: a caller that comes back again and again while room is being made does not empty the tier of others.

    Method: a newcomer asks 100 times while nothing is written down; then over a long time.
    """
    shell = Shell(config(cpu=512 * KIB, free_target=0.0), release_late=True)
    old, new = shell.realm(4096, tenant="old"), shell.realm(4096, tenant="new")
    mine, other = shell.attach(old), shell.attach(new)
    for i in range(4):
        shell.put(mine, old, keys(*range(i * 32, i * 32 + 32)))
    pool = shell.core.state.pools[Tier.CPU]
    for _ in range(100):
        assert shell.save(other, new, keys(999)).outcomes == [BUSY]
    assert sum(e.draining for e in pool.extents.values()) == 1
    for _ in range(20):
        shell.now += LEAVING_PAUSE_S
        shell.save(other, new, keys(999))
    assert sum(e.draining for e in pool.extents.values()) == MAX_LEAVING_EXTENTS
    shell.finish_all()
    shell.release_all()
    assert shell.put(other, new, keys(999)).outcomes == [GRANTED]
    shell.check()


def test_hot_extents_stay() -> None:
    """Goal: a realm with colder blocks of its own gives those up and takes nothing from a warmer realm.

    Method: fill half of the tier with each realm; the first goes on saving while the second was used last.
    """
    shell = Shell(config(cpu=128 * KIB, nvme=0))
    cold, warm = shell.realm(4096, tenant="c"), shell.realm(4096, tenant="w")
    mine, other = shell.attach(cold), shell.attach(warm)
    shell.put(mine, cold, keys(*range(16)))
    shell.now = 1.0
    shell.put(other, warm, keys(*range(16)))
    for i in range(16, 30):
        shell.now = 2.0 + i / 100
        assert shell.put(mine, cold, keys(i)).outcomes == [GRANTED]
    assert shell.core.lookup(shell.now, warm, keys(*range(16)), each=True)[0] == 16
    assert len(shell.extents) == 2


def test_own_blocks_are_used_while_an_extent_is_on_its_way() -> None:
    """Goal: nobody is told BUSY for want of an extent when an own block can go at once.

    Method: another realm's extent is empty but mapped by a client; the own extent is full of clean blocks.
    """
    shell = Shell(config(cpu=128 * KIB, nvme=0), release_late=True)
    gone, mine = shell.realm(4096, tenant="g"), shell.realm(4096, tenant="m")
    session, other = shell.attach(mine), shell.attach(gone)
    shell.put(other, gone, keys(1))
    shell.evict(gone, keys(1))
    shell.put(session, mine, keys(*range(16)))
    for i in range(16, 20):
        assert shell.put(session, mine, keys(i)).outcomes == [GRANTED]
    assert len(shell.unreleased) == 1
    shell.release_all()
    shell.put(session, mine, keys(*range(30, 34)))
    assert shell.core.state.copies[Tier.CPU] == 20
    shell.check()


@pytest.mark.parametrize("shards", [2, 3, 8, 16])
def test_shards_share_what_room_there_is(shards: int) -> None:
    """Goal: a block of many shards fits wherever its bytes fit, also when an extent a shard would not.

    Method: one extent of room for 2 to 16 shards, as first realm and as second realm in a tier that is full of another's.
    """
    shell = Shell(config(cpu=64 * KIB, nvme=0))
    realm = shell.realm(*[4096] * shards)
    assert shell.put(shell.attach(realm), realm, keys(1)).outcomes == [GRANTED]
    full = Shell(config(cpu=256 * KIB, nvme=0))
    other = full.realm(4096, tenant="other")
    full.put(full.attach(other), other, keys(*range(32)))
    full.put(full.attach(other), other, keys(*range(32, 64)))
    full.now = 10.0
    realm = full.realm(*[4096] * shards)
    session = full.attach(realm)
    full.put(session, realm, keys(1))
    assert full.put(session, realm, keys(1, 2)).outcomes[0] in (GRANTED, 2)
    assert full.tiers(realm, key_of(1)) == "c"
    assert full.core.state.copies[Tier.CPU] > 32, "an extent at most for each time that it asked"
    full.check()


def test_shards_of_different_sizes_in_a_full_tier() -> None:
    """Goal: a realm whose shards differ in size does not take extents from itself in turns for ever.

    Method: save far past the capacity on both tiers; the shell counts moves, and every command round ends.
    """
    shell = Shell(config(cpu=256 * KIB, nvme=512 * KIB, extent=32 * KIB))
    realm, other = shell.realm(4096, 12 * KIB, 1), shell.realm(8192)
    session = shell.attach(realm)
    for i in range(120):
        shell.now += 0.1
        which = realm if i % 3 else other
        shell.put(session, which, keys(i))
        shell.finish_all(limit=1000)
        shell.check()
    retired = shell.core.state.pools[Tier.CPU].next_extent_id
    assert retired < 120


def test_new_slot_size_on_a_full_nvme_pauses_nobody() -> None:
    """Goal: room for a slot size that is new on a full NVMe tier is made at once, and no write is put off for it.

    Method: fill NVMe with one size, then drain a block of another size.
    """
    shell = Shell(config(cpu=1 << 20, nvme=128 * KIB, extent=32 * KIB))
    small, large = shell.realm(4096), shell.realm(12 * KIB)
    session = shell.attach(small)
    on_nvme(shell, session, small, keys(*range(16)))
    shell.now = 50.0
    shell.put(session, large, keys(1))
    shell.drain()
    shell.finish_all()
    assert shell.tiers(large, key_of(1)) == "cn"
    assert not shell.core.state.turns.suspended and not shell.core.state.turns.paused
    assert shell.core.undrained_bytes == 0
    shell.check()


@pytest.mark.parametrize("result", [Result.NO_SPACE, Result.IO_ERROR])
def test_refused_write_pauses_and_goes_on(result: Result) -> None:
    """Goal: a failed write keeps the upper copy, pauses writes, and is tried again later; the failing segment is not used again
    after an I/O error, and a segment that could not be made goes.

    Method: fail the first write of a drain.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, keys(1, 2))
    shell.drain()
    first = {slot_extent(m.dst.all_slots()[0]) for m, _ in shell.moves.values()}
    shell.finish_all(result)
    assert [shell.tiers(realm, key_of(i)) for i in (1, 2)] == ["c", "c"]
    assert shell.core.snapshot().tiers[1].suspended == result.value
    assert not [e for (t, e) in shell.extents if t is Tier.NVME], "an empty segment goes"
    shell.wait(4.9)
    assert not shell.moves
    shell.wait(0.2)
    assert len(shell.moves) == 2
    assert not first & {slot_extent(m.dst.all_slots()[0]) for m, _ in shell.moves.values()}
    shell.finish_all()
    assert shell.core.undrained_bytes == 0 and shell.core.snapshot().tiers[1].suspended == ""
    shell.check()


def test_no_space_uses_the_segments_that_are_there() -> None:
    """Goal: when the file system is full, blocks still go into slots that exist; only growth stops.

    Method: one segment with room, then a second that cannot be made.
    """
    shell = Shell(config(nvme=1 << 20, extent=32 * KIB))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(0, 1, 2, 3))
    shell.put(session, realm, keys(10))
    shell.drain()
    shell.finish_all(Result.NO_SPACE)
    shell.drain(on=False)
    shell.wait(6)
    shell.now += 0.1
    shell.core.state.pools[Tier.NVME].growth_blocked_until_s = shell.now + 100
    shell.drain()
    shell.finish_all()
    assert shell.tiers(realm, key_of(10)) == "cn", "the oldest block on NVMe made room"
    assert sum(shell.tiers(realm, key_of(i)) == "n" for i in range(4)) == 3
    shell.check()


def test_failing_segment_is_left() -> None:
    """Goal: after an I/O error a segment gets no new blocks; what it holds stays readable.

    Method: a segment with two blocks; the third write fails.
    """
    shell = Shell(config(extent=32 * KIB))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(0, 1))
    shell.put(session, realm, keys(2))
    shell.drain()
    shell.finish_all(Result.IO_ERROR)
    shell.wait(6)
    shell.finish_all()
    assert shell.tiers(realm, key_of(2)) == "cn"
    assert len([e for (t, e) in shell.extents if t is Tier.NVME]) == 2
    assert shell.get(session, realm, keys(0, 1)) == [0, 1]
    shell.check()


def test_quota_on_nvme_does_not_hold_up_others() -> None:
    """Goal: a tenant that cannot write down for its own quota pauses alone.

    Method: its only block on NVMe is pinned; its dirty block is the oldest; another tenant's must still be written.
    """
    shell = Shell(config(), {"q": Limits((None, None, 8192))})
    tight, free = shell.realm(4096, tenant="q"), shell.realm(4096, tenant="f")
    mine, other = shell.attach(tight), shell.attach(free)
    on_nvme(shell, mine, tight, keys(1))
    assert shell.core.pin(shell.now, [tight], keys(1), shell.now + 10_000).copies  # by an operator
    shell.put(mine, tight, keys(2))
    shell.now = 1.0
    shell.put(other, free, keys(3))
    shell.drain()
    shell.finish_all()
    assert shell.tiers(free, key_of(3)) == "cn" and shell.tiers(tight, key_of(2)) == "c"
    shell.drain(on=False)
    shell.put(other, free, keys(4))
    shell.wait(700)
    shell.finish_all()
    assert shell.tiers(free, key_of(4)) == "n", "its TTL does not wait for the other tenant's"
    shell.check()


def test_recovery() -> None:
    """Goal: blocks found on NVMe are readable after a restart, doubles are given back, free slots are reused, and ids and
    generations go on; the order of blocks is their age.

    Method: two segments as found on disk, six rows of which one is a double.
    """
    shell = Shell(config(nvme=64 * KIB, extent=32 * KIB))
    one, two = shell.realm(4096, tenant="a"), shell.realm(4096, 4096, tenant="b")
    core = shell.core
    core.recover_extent(3, 8192, 4)
    core.recover_extent(7, 8192, 4)
    for extent_id in (3, 7):
        shell.extents[(Tier.NVME, extent_id)] = NewExtent(Tier.NVME, extent_id, -1, 0, 8192, 4)
    rows = [
        (one.realm_id, key_of(1), 11, (3 << 32 | 0,), NO_END),
        (one.realm_id, key_of(2), 12, (3 << 32 | 2,), NO_END),
        (two.realm_id, key_of(1), 13, (3 << 32 | 3, 7 << 32 | 1), NO_END),
    ]
    double = (one.realm_id, key_of(1), 9, (7 << 32 | 3,), NO_END)
    assert core.recover_blocks(5.0, [*rows, double]) == [double]
    core.recovered(20, 9)
    for realm_id, key, generation, slots, _ in rows:
        realm = core.state.realms[realm_id]
        shell.version[(realm_id, key)] = 1
        shell.followed.add((realm, key, Tier.NVME))  # who follows begins with what is there
        shell.disk[(realm_id, key, generation)] = slots
        for shard, slot in enumerate(slots):
            shell.disk_slots[slot] = (realm_id, key, generation)
            shell.content[(Tier.NVME, slot)] = (realm_id, key, shard, 1)
        assert shell.tiers(realm, key) == "n"
    shell.check()
    session = shell.attach(one)
    assert shell.get(session, one, keys(1, 2)) == [0, 1]
    assert shell.get(session, two, keys(1)) == [0]
    shell.now = 6.0
    shell.put(session, one, keys(*range(10, 14)))
    shell.drain()
    assert {m.dst.generation for m, _ in shell.moves.values()} == {20, 21, 22, 23}
    assert {slot_extent(m.dst.all_slots()[0]) for m, _ in shell.moves.values()} == {3, 7}, "free slots first"
    shell.finish_all()
    shell.drain(on=False)
    shell.put(session, one, keys(14))
    shell.drain()
    shell.finish_all()
    assert shell.core.state.pools[Tier.NVME].next_extent_id == 9, "the capacity is used up: no growth"
    assert shell.core.state.next_generation == 25
    shell.check()


class Lines:
    """Counts executed lines of the core."""

    def __init__(self) -> None:
        self.count = 0
        self._before = sys.gettrace()

    def __enter__(self) -> Lines:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame, event, arg):  # type: ignore[no-untyped-def]
        return self._line if "kvtierd/core" in frame.f_code.co_filename else None

    def _line(self, frame, event, arg):  # type: ignore[no-untyped-def]
        self.count += event == "line"
        return self._line


@pytest.mark.parametrize("quota", [None, 1 << 20])
def test_cost_does_not_grow_with_realms(quota: int | None) -> None:
    """Goal: the work of a save, a load and a tick is about the same with 10 and with 5,000 realms, full tier or not.

    Method: count executed lines of the core, not time; the tier holds a block of each realm, so that each save makes room.
    """

    def cost(realms: int) -> float:
        capacity = realms * 4096
        limit = None if quota is None else min(quota, capacity)
        sizes = config(cpu=capacity, nvme=4 * capacity, extent=4096, free_target=0.0, max_realms=realms)
        shell = Shell(sizes, {"t": Limits((None, limit, None))})
        made = [shell.realm(4096, model=str(i)) for i in range(realms)]
        session = shell.core.attach(1, made[0])
        core = shell.core
        for i, realm in enumerate(made):
            grant = core.save(i / realms, session, realm, keys(1))
            if grant.ticket_id:
                core.commit(i / realms, session, grant.ticket_id)
        core.take_commands()
        for move_id in list(core.state.moves):
            core.move_done(1.0, move_id, Result.OK)
        core.take_commands()
        steps = 40
        with Lines() as lines:
            for i in range(steps):
                now = 2.0 + i / 100
                realm = made[i * 7 % realms]
                grant = core.save(now, session, realm, keys(2 + i))
                if grant.ticket_id:
                    core.commit(now, session, grant.ticket_id)
                ticket = core.load(now, session, realm, keys(2 + i), now + 1, each=False)
                core.collect(now, ticket)
                if not ticket.closed:
                    core.release(now, session, ticket.ticket_id)
                core.tick(now)
                core.next_deadline()
                for command in core.take_commands():
                    if isinstance(command, StartMoves):
                        for move in command.moves:
                            core.move_done(now, move.move_id, Result.OK)
                    elif isinstance(command, RetireExtent):
                        core.extent_released(now, command.tier, command.extent_id)
        core.check()
        return lines.count / steps

    few, many = cost(20), cost(5000)
    assert many < 3 * few, f"{few} lines with few realms, {many} with many"


def test_a_pool_is_never_in_too_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: extents stay few however long realms of many sizes take room from each other, and everybody goes on getting room.

    Method: ever new blocks of one realm after the other, evicted or not; what is left over by one size is too little for the next.
    The bound is set lower than the number that there would be.
    """
    monkeypatch.setattr(slot_pools, "MIN_EXTENTS", 1)
    monkeypatch.setattr(slot_pools, "PIECES", 1)
    rng = random.Random(3)
    shell = Shell(config(cpu=1024 * KIB, extent=128 * KIB, nvme=0))
    pool = shell.core.state.pools[Tier.CPU]
    realms = [shell.realm(*sizes, model=f"m{n}") for n, sizes in enumerate([(4096,), (20_480, 4096), (65_536,)] * 8)]
    sessions = [shell.attach(realm) for realm in realms]
    most = number = 0
    for step in range(400):
        shell.now = step / 10
        at = rng.randrange(len(realms))
        some = keys(*range(number, number + 6))
        number += len(some)
        shell.put(sessions[at], realms[at], some)
        if rng.random() < 0.3:
            shell.evict(realms[at], some[:3])
        most = max(most, len(pool.extents) + len(pool.retiring))
    assert most == 8, "as many as fill the pool when they are whole"
    for session, realm in zip(sessions, realms, strict=True):
        outcomes: list[int] = []
        for _ in range(4):
            shell.now += 2 * LEAVING_PAUSE_S
            outcomes += shell.put(session, realm, keys(number := number + 1)).outcomes
        assert GRANTED in outcomes, "each gets room"
    shell.check()
