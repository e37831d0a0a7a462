"""Blocks that expire.

Goal: after its time a block is a miss everywhere and its copies go, while who has it already may finish; saving it again can only
make it live longer; and nothing of this looks at more than it must.

Method: a core with real contents and a fake clock; each test lets time pass a block's end in one situation.
"""

from __future__ import annotations

import itertools
import random

import pytest

from kvtierd.core.adoption import Recovered
from kvtierd.core.commands import Renew
from kvtierd.core.expiry import MAX_EXPIRED_PER_TICK
from kvtierd.core.realm import Realm
from kvtierd.core.saves import HELD
from kvtierd.core.slots import NewExtent
from kvtierd.core.tickets import GRANTED, Session
from kvtierd.core.tier_core import BULK_KEYS
from kvtierd.model import NO_END, Result, Tier
from tests.core.lifetimes import MortalShell
from tests.core.shell import KIB, config, key_of


def keys(*numbers: int) -> list[bytes]:
    return [key_of(n) for n in numbers]


def started(**changes: object) -> tuple[MortalShell, Realm, Session]:
    shell = MortalShell(config(**changes))  # type: ignore[arg-type]
    realm = shell.realm(4096)
    return shell, realm, shell.attach(realm)


def put(shell: MortalShell, session: Session, realm: Realm, names: list[bytes], ttl_s: float | None) -> list[int]:
    """Save with a life; returns the outcomes."""
    shell.ttl_s = ttl_s
    return shell.put(session, realm, names).outcomes


def demote(shell: MortalShell, realm: Realm, names: list[bytes]) -> None:
    """Leave copies on NVMe only."""
    shell.drain(on=True)
    shell.finish_all()
    shell.drain(on=False)
    shell.core.evict_keys(shell.now, realm, names, Tier.CPU)
    shell.run()


@pytest.mark.parametrize("below", [False, True])
def test_a_block_ends_on_every_tier_at_its_time(below: bool) -> None:
    shell, realm, session = started()
    put(shell, session, realm, keys(1), 5.0)
    put(shell, session, realm, keys(2), None)
    if below:
        demote(shell, realm, keys(1, 2))
    shell.wait(4.9)
    assert shell.core.lookup(shell.now, realm, keys(1, 2))[0] == 2
    shell.wait(0.2)
    assert shell.core.lookup(shell.now, realm, keys(1, 2), each=True)[1][0] == 0
    assert shell.get(session, realm, keys(1, 2), each=True) == [1]
    assert shell.prefetch(session, realm, keys(1)).closed
    tier = Tier.NVME if below else Tier.CPU
    assert shell.core.state.counts.evictions[(tier, "expired")] == 1
    assert [e.why for e in shell.core.story(key_of(1))][-1] == "expired"
    shell.check()


def test_a_life_begins_with_the_commit() -> None:
    shell, realm, session = started()
    shell.ttl_s = 5.0
    grant = shell.save(session, realm, keys(1))
    shell.wait(60.0)
    shell.commit(grant.ticket_id)
    shell.wait(4.9)
    assert shell.tiers(realm, key_of(1)) == "c"
    shell.wait(0.2)
    assert shell.tiers(realm, key_of(1)) == ""


@pytest.mark.parametrize("many", [False, True])
def test_a_late_tick_makes_no_difference(many: bool) -> None:
    """Neither the short nor the vectorised lookup, nor a load, prefetch or pin finds what the next tick will forget."""
    shell, realm, session = started(cpu=4 << 20)
    names = keys(*range(BULK_KEYS + 1 if many else 2))
    put(shell, session, realm, names, 5.0)
    packed = b"".join(names)
    assert shell.core.lookup_packed(shell.now, realm, packed)[0] == len(names)
    shell.now += 5.0
    assert shell.core.lookup_packed(shell.now, realm, packed, each=True) == (0, bytes(len(names)))
    assert shell.core.lookup_packed(shell.now, realm, packed) == (0, b"")
    assert shell.load(session, realm, names).closed
    assert shell.prefetch(session, realm, names).closed
    assert not shell.pin(realm, names).copies
    shell.check()


@pytest.mark.parametrize("first, second, end", [(5.0, 9.0, 10.0), (9.0, 5.0, 9.0), (5.0, None, NO_END), (None, 5.0, NO_END)])
@pytest.mark.parametrize("below", [False, True])
def test_the_latest_end_of_several_saves_holds(first: float | None, second: float | None, end: float, below: bool) -> None:
    shell, realm, session = started()
    put(shell, session, realm, keys(1), first)
    if below:
        demote(shell, realm, keys(1))
    shell.wait(1.0)
    assert put(shell, session, realm, keys(1), second) == [HELD]
    assert realm.index[key_of(1)].expires_s == end
    shell.wait(min(end, 3600.0) - shell.now - 0.1)
    assert shell.tiers(realm, key_of(1))
    shell.wait(0.2)
    assert bool(shell.tiers(realm, key_of(1))) == (end == NO_END)
    shell.check()


def test_a_save_that_comes_before_the_copies_are_forgotten_brings_the_block_back() -> None:
    shell, realm, session = started()
    put(shell, session, realm, keys(1), 5.0)
    shell.now += 6.0
    assert put(shell, session, realm, keys(1), 5.0) == [HELD]
    shell.wait(4.0)
    assert shell.tiers(realm, key_of(1)) == "c"
    shell.wait(2.0)
    assert put(shell, session, realm, keys(1), 5.0) == [GRANTED]


def test_a_pin_keeps_the_memory_and_not_the_block() -> None:
    shell, realm, session = started()
    put(shell, session, realm, keys(1), 5.0)
    shell.pin(realm, keys(1), 60.0)
    shell.wait(6.0)
    assert shell.tiers(realm, key_of(1)) == "" and shell.core.state.pinned_bytes[Tier.CPU] == 4096
    assert put(shell, session, realm, keys(1), None) == [GRANTED], "a new copy; the pinned one is nobody's"
    shell.wait(60.0)
    assert shell.core.state.pinned_bytes == [0, 0, 0]
    assert shell.tiers(realm, key_of(1)) == "c"
    shell.check()


@pytest.mark.parametrize("when", ["waiting", "moving", "ready", "taken"])
def test_a_load_under_way_finishes(when: str) -> None:
    """A load has found a block that expires before its bytes are there, or before they are copied: it gets them all the same."""
    shell, realm, session = started(max_promote_bytes=4096)
    put(shell, session, realm, keys(0, 1), 5.0)
    if when != "taken":
        demote(shell, realm, keys(0, 1))
    ticket = shell.load(session, realm, keys(0, 1), 60.0)
    if when == "moving":
        shell.finish(min(shell.moves))
    elif when == "ready":
        shell.finish_all()
    elif when == "taken":
        assert shell.collect(ticket) == ([0, 1], True)
    shell.wait(6.0)
    other = shell.attach(realm)
    assert shell.load(other, realm, keys(0, 1), each=True).closed, "it is there for nobody else"
    assert shell.core.lookup(shell.now, realm, keys(0, 1), each=True)[0] == 0
    shell.check()
    if when != "taken":
        shell.finish_all()
        assert shell.collect(ticket) == ([0, 1], True)
    shell.release(ticket)
    shell.wait(60.0)
    assert not realm.index and shell.core.state.copies == [0, 0, 0]
    assert shell.core.next_deadline() is None
    shell.check()


def test_a_save_brings_back_what_only_a_load_still_has() -> None:
    shell, realm, session = started()
    put(shell, session, realm, keys(1), 5.0)
    demote(shell, realm, keys(1))
    ticket = shell.load(session, realm, keys(1), 60.0)
    shell.wait(6.0)
    assert realm.index and shell.core.state.expiries.holds and not shell.tiers(realm, key_of(1))
    assert put(shell, session, realm, keys(1), 5.0) == [HELD]
    assert not shell.core.state.expiries.holds and shell.tiers(realm, key_of(1)) == "n"
    shell.finish_all()
    assert shell.collect(ticket) == ([0], True)
    shell.release(ticket)
    shell.wait(6.0)
    assert not realm.index
    shell.check()


def test_a_block_that_expires_while_it_is_written_down_leaves_nothing() -> None:
    shell, realm, session = started()
    put(shell, session, realm, keys(1), 5.0)
    shell.drain()
    assert shell.moves
    shell.wait(6.0)
    shell.finish_all()
    assert not realm.index and not shell.disk
    shell.check()


def renewals(shell: MortalShell) -> list[float]:
    """What :meth:`Shell.run` would be told to record, taken in its place."""
    return [c.expires_s for c in shell.core.take_commands() if isinstance(c, Renew)]


def test_a_later_end_is_recorded_but_not_each_time() -> None:
    """Goal: what is on disk follows what is in memory, closely enough, without a record a save.

    Method: saves of a block that is on NVMe, each a little later than the one before.
    """
    shell, realm, session = started()
    put(shell, session, realm, keys(1), 100.0)
    demote(shell, realm, keys(1))
    block = realm.index[key_of(1)]
    assert block.nvme is not None and block.nvme.expires_s == 100.0
    recorded = []
    for _ in range(1000):
        shell.now += 0.1
        shell.core.save(shell.now, session, realm, keys(1), 100.0)
        recorded += renewals(shell)
        assert block.nvme.expires_s <= block.expires_s <= block.nvme.expires_s + 100.0 / 16
    assert 10 <= len(recorded) <= 20 and recorded == sorted(recorded)
    shell.core.save(shell.now, session, realm, keys(1))
    assert renewals(shell) == [NO_END]
    shell.core.save(shell.now, session, realm, keys(1))
    assert renewals(shell) == []


def test_an_end_that_is_put_off_during_the_write_is_recorded_after_it() -> None:
    shell, realm, session = started()
    put(shell, session, realm, keys(1), 100.0)
    shell.drain()
    (move_id,) = shell.moves
    put(shell, session, realm, keys(1), None)
    shell.core.move_done(shell.now, move_id, Result.OK)
    assert renewals(shell) == [NO_END]


def test_recovered_blocks_expire_and_are_listed_with_their_end() -> None:
    shell, realm, _ = started(nvme=64 * KIB, extent=32 * KIB)
    core = shell.core
    core.recover_extent(3, 8192, 4)
    shell.extents[(Tier.NVME, 3)] = NewExtent(Tier.NVME, 3, -1, 0, 8192, 4)
    rows: list[Recovered] = [(realm.realm_id, key_of(n), n, (3 << 32 | n,), at) for n, at in ((1, 5.0), (2, NO_END))]
    assert core.recover_blocks(0.0, rows) == []
    core.recovered(9, 9)
    core.check()
    assert core.nvme_entries(realm, keys(1, 2)) == rows
    assert core.next_deadline() == 5.0
    core.tick(5.0)
    assert core.lookup(5.0, realm, keys(1, 2), each=True)[1] == bytes([0, Tier.NVME.bit])
    core.check()


def test_many_blocks_that_expire_at_once_go_in_portions() -> None:
    """A tick never looks at more than it may; meanwhile nobody finds the others."""
    shell, realm, session = started(cpu=64 << 20, nvme=0, extent=4 << 20)
    names = keys(*range(2 * MAX_EXPIRED_PER_TICK + 5))
    for start in range(0, len(names), 500):
        put(shell, session, realm, names[start : start + 500], 5.0)
    left = []
    shell.now = 5.0
    while realm.index:
        shell.core.tick(shell.now)
        left.append(len(realm.index))
        assert shell.core.lookup_packed(shell.now, realm, b"".join(names), each=True)[0] == 0
        due_s = shell.core.next_deadline()
        shell.now = shell.now if due_s is None else due_s
    assert left == [MAX_EXPIRED_PER_TICK + 5, 5, 0]


@pytest.mark.parametrize("seed", range(5))
def test_what_went_otherwise_does_not_pile_up(seed: int) -> None:
    """Goal: the heap holds no more than twice what expires, whatever comes and goes.

    Method: blocks with long lives are saved, put off, made to stay, and evicted at random; the core's own check bounds the heap.
    """
    rng = random.Random(seed)
    shell, realm, session = started(nvme=0)
    for step in itertools.count():
        if step == 1500:
            break
        some = keys(*rng.sample(range(200), 3))
        if rng.random() < 0.5:
            put(shell, session, realm, some, rng.choice([1e6, 2e6, 3e6, 1.0, *([None] * (rng.random() < 0.05))]))
        else:
            shell.evict(realm, some)
        if step % 20 == 0:
            shell.wait(rng.random())
            shell.check()
    shell.evict(realm, list(realm.index))
    shell.check()
    assert len(shell.core.state.expiries._heap) <= 64
