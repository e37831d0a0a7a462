"""Who goes first: last use over all tiers, the credit for further turns, ARC, and saves into HBM."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvtierd.core.order import ArcOrder, ghost_of
from kvtierd.core.realm import Realm
from kvtierd.core.saves import Request
from kvtierd.core.tickets import GRANTED, Session
from kvtierd.model import Tier, in_device
from tests.core.shell import KIB, Shell, config, key_of
from tests.core.test_load import keys


def flat(blocks: int, **options: Any) -> tuple[Shell, Realm, Session]:
    """One tier of CPU memory for so many blocks."""
    shell = Shell(config(cpu=blocks * 4 * KIB, nvme=0, max_ticket_share=1.0, **options))
    realm = shell.realm(4096)
    return shell, realm, shell.attach(realm)


def held(shell: Shell, realm: Realm, *numbers: int) -> list[int]:
    """Which of these blocks are held."""
    return [n for n in numbers if shell.tiers(realm, key_of(n))]


def test_a_copy_that_is_written_down_keeps_its_age() -> None:
    """Goal: on NVMe the last use counts, wherever the block was then, and not the time of writing.

    Method: 1 is used on NVMe at 50 s; 9, used last at 40 s, is written down after that. 9 has to go before 1.
    """
    shell = Shell(config(cpu=1 << 20, nvme=32 * KIB, extent=32 * KIB))
    realm = shell.realm(4096)
    session = shell.attach(realm)

    def sink(*numbers: int) -> None:
        shell.drain()
        shell.finish_all()
        shell.drain(on=False)
        shell.evict(realm, keys(*numbers), Tier.CPU)

    for at_s, number in ((10.0, 1), (20.0, 2), (30.0, 3)):
        shell.now = at_s
        shell.put(session, realm, keys(number))
        sink(number)
    shell.now = 40.0
    shell.put(session, realm, keys(9))
    shell.now = 50.0
    assert shell.get(session, realm, keys(1)) == [0]
    shell.evict(realm, keys(1), Tier.CPU)
    shell.now = 60.0
    sink(9)
    order = []
    for number in range(20, 24):
        shell.now += 1.0
        shell.put(session, realm, keys(number))
        before = held(shell, realm, 1, 2, 3, 9)
        sink(number)
        order += [n for n in before if n not in held(shell, realm, 1, 2, 3, 9)]
    assert order == [2, 3, 9, 1]
    shell.check()


def test_leaves_go_before_roots_wherever_they_were_when_they_were_used() -> None:
    """Goal: the order within one use holds on the lower tier too, when its blocks came there in another order.

    Method: a chain of four; its tail is on NVMe already when the chain is used, its head is written down after that.
    """
    shell = Shell(config(cpu=1 << 20, nvme=32 * KIB, extent=32 * KIB))
    realm = shell.realm(4096)
    session = shell.attach(realm)

    def sink() -> None:
        shell.drain()
        shell.finish_all()
        shell.drain(on=False)

    shell.put(session, realm, keys(3, 4))
    sink()
    shell.now = 10.0
    shell.put(session, realm, keys(1, 2))
    assert shell.get(session, realm, keys(1, 2, 3, 4)) == [0, 1, 2, 3]
    sink()
    shell.evict(realm, keys(1, 2, 3, 4), Tier.CPU)
    order: list[int] = []
    for number in range(20, 24):
        shell.now += 1.0
        before = held(shell, realm, 1, 2, 3, 4)
        shell.put(session, realm, keys(number))
        sink()
        order += [n for n in before if n not in held(shell, realm, 1, 2, 3, 4)]
    assert order == [4, 3, 2, 1]


@pytest.mark.parametrize("later_s", [0.0, 2.0])
def test_what_a_save_found_held_outlives_what_it_added(later_s: float) -> None:
    """Goal: of one request's blocks the last ones go first, also when the first ones were there before.

    Method: a root from before, a save of root and leaves that is committed at once or later; then new blocks one by one.
    """
    shell, realm, session = flat(8)
    shell.put(session, realm, keys(1, 2))
    shell.now = 10.0
    grant = shell.save(session, realm, keys(1, 2, 3, 4))
    shell.now += later_s
    shell.commit(grant.ticket_id)
    order: list[int] = []
    for number in range(10, 18):
        shell.now += 1.0
        before = held(shell, realm, 1, 2, 3, 4)
        shell.put(session, realm, keys(number))
        order += [n for n in before if n not in held(shell, realm, 1, 2, 3, 4)]
    assert order == [4, 3, 2, 1]


def test_turn_bonus() -> None:
    """Goal: blocks of a request that matched two known blocks count as used later by the bonus: they go after younger ones
    without it, and no longer than that. A request that matched one block earns nothing.

    Method: a further turn at 10 s with a bonus of 60 s; younger blocks at 60 s go before it, those at 80 s after it.
    """
    shell, realm, session = flat(8, turn_bonus_s=60.0)
    shell.put(session, realm, keys(1, 2))
    shell.put(session, realm, keys(7))
    shell.now = 10.0
    assert shell.get(session, realm, keys(1, 2)) == [0, 1]
    shell.put(session, realm, keys(1, 2, 3))
    assert shell.get(session, realm, keys(7)) == [0]
    for at_s, number in ((60.0, 20), (80.0, 21), (80.0, 22), (80.0, 23)):
        shell.now = at_s
        shell.put(session, realm, keys(number))
    watched = (1, 2, 3, 7, 20, 21, 22, 23)
    assert held(shell, realm, *watched) == list(watched)
    order: list[int] = []
    for number in range(30, 36):
        shell.now += 1.0
        before = held(shell, realm, *watched)
        shell.put(session, realm, keys(number))
        order += [n for n in before if n not in held(shell, realm, *watched)]
    assert order == [7, 20, 3, 2, 1, 21]
    shell.check()


def test_a_shared_root_keeps_its_bonus() -> None:
    """Goal: a root does not go before its leaves because a request that matched nothing else used it without a bonus.

    Method: a further turn of one conversation, then a new conversation with the same root; new blocks until all have gone.
    """
    shell, realm, session = flat(8, turn_bonus_s=60.0)
    shell.put(session, realm, keys(1, 2, 3))
    shell.now = 10.0
    assert shell.get(session, realm, keys(1, 2, 3)) == [0, 1, 2]
    shell.now = 20.0
    assert shell.get(session, realm, keys(1)) == [0]
    shell.put(session, realm, keys(1, 9))
    order: list[int] = []
    for number in range(30, 44):
        shell.now += 10.0
        before = held(shell, realm, 1, 2, 3, 9)
        shell.put(session, realm, keys(number))
        order += [n for n in before if n not in held(shell, realm, 1, 2, 3, 9)]
    assert order == [9, 3, 2, 1]


def test_a_turn_in_portions_earns_its_bonus_once() -> None:
    """Goal: a request that names its own earlier blocks again has not matched them. Method: three saves of one new chain."""
    shell, realm, session = flat(16, turn_bonus_s=60.0)
    for count in (3, 6, 9):
        shell.now += 0.2
        shell.put(session, realm, keys(*range(count)))
    assert [realm.index[key_of(n)].lane for n in range(9)] == [0] * 9
    shell.now += 5.0
    shell.put(session, realm, keys(*range(10)))
    assert [realm.index[key_of(n)].lane for n in range(10)] == [1] * 10, "seconds later it is another request"


def test_turn_bonus_puts_a_ttl_off() -> None:
    """Goal: a TTL runs from the credited time. Method: two chains of one age, one of them with a bonus; only time passes."""
    shell = Shell(config(turn_bonus_s=60.0))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, keys(1, 2))
    shell.get(session, realm, keys(1, 2))
    shell.put(session, realm, keys(8, 9))
    shell.wait(600.1)
    shell.finish_all()
    assert [shell.tiers(realm, key_of(n)) for n in (1, 2, 8, 9)] == ["c", "c", "n", "n"]
    shell.wait(60.0)
    shell.finish_all()
    assert [shell.tiers(realm, key_of(n)) for n in (1, 2)] == ["n", "n"]


# ---- ARC


def test_arc_keeps_what_is_used_again_through_a_scan() -> None:
    """Goal: blocks that were used twice survive a flood of blocks that are used once, which LRU does not grant them.

    Method: eight of sixteen blocks are loaded once; then sixty others come. The same with LRU.
    """
    for eviction, left in (("arc", list(range(8))), ("lru", [])):
        shell, realm, session = flat(16, eviction=eviction)
        for number in range(8):
            shell.put(session, realm, keys(number))
        shell.now = 10.0
        for number in range(8):
            shell.get(session, realm, keys(number))
        for number in range(100, 160):
            shell.now += 0.1
            shell.put(session, realm, keys(number))
        assert held(shell, realm, *range(8)) == left
        shell.check()


def test_arc_adapts() -> None:
    """Goal: a request for what went from T1 lets T1 grow, one for what went from T2 lets it shrink; both come back into T2.

    Method: read the target and the lanes after each.
    """
    shell, realm, session = flat(4, eviction="arc")
    order = realm.orders[Tier.CPU]
    assert isinstance(order, ArcOrder)
    shell.put(session, realm, keys(1))
    shell.now = 5.0
    shell.get(session, realm, keys(1))
    for number in (2, 3, 4, 5):
        shell.put(session, realm, keys(number))
    assert order.target == 0 and ghost_of(key_of(2)) in order.ghosts[0]
    shell.put(session, realm, keys(2))
    assert order.target == 1.0 and realm.index[key_of(2)].lane == 1
    for number in (6, 7, 8, 2, 1, 6, 7):
        shell.now += 5.0
        shell.put(session, realm, keys(number))
        shell.get(session, realm, keys(number))
    assert order.ghosts[1], "something went from T2"
    target = order.target
    gone = next(n for n in range(1, 9) if ghost_of(key_of(n)) in order.ghosts[1])
    shell.put(session, realm, keys(gone))
    assert order.target < max(target, 1.0) and realm.index[key_of(gone)].lane == 1
    shell.check()


def test_arc_remembers_no_more_than_it_holds() -> None:
    """Goal: ghosts are bounded by the copies. Method: thousands of random uses of a small tier."""
    shell, realm, session = flat(16, eviction="arc")
    order = realm.orders[Tier.CPU]
    assert isinstance(order, ArcOrder)
    r = random.Random(5)
    for _ in range(3000):
        shell.now += 0.5
        number = int(r.paretovariate(0.6)) % 500
        if not shell.get(session, realm, keys(number)):
            shell.put(session, realm, keys(number))
        assert len(order.ghosts[0]) + len(order.ghosts[1]) <= 17 and 0 <= order.target <= 16
    shell.check()


def _arc_hits(uses: list[int], capacity: int) -> int:
    """ARC as in the paper (FAST'03, figure 4), on plain lists."""
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p, hits = 0.0, 0

    def replace(x: int) -> None:
        if t1 and (len(t1) > p or (x in b2 and len(t1) == p)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for x in uses:
        if x in t1 or x in t2:
            hits += 1
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            continue
        if x in b1:
            p = min(capacity, p + max(1.0, len(b2) / len(b1)))
            replace(x)
            b1.remove(x)
            t2.append(x)
            continue
        if x in b2:
            p = max(0.0, p - max(1.0, len(b1) / len(b2)))
            replace(x)
            b2.remove(x)
            t2.append(x)
            continue
        if len(t1) + len(b1) == capacity:
            if len(t1) < capacity:
                b1.pop(0)
                replace(x)
            else:
                t1.pop(0)
        elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
            if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                b2.pop(0)
            replace(x)
        t1.append(x)
    return hits


@pytest.mark.parametrize("seed", range(5))
def test_arc_hits_about_what_the_paper_s_does(seed: int) -> None:
    """Goal: in one realm on one tier this is ARC, up to ties and the moment at which a ghost is dropped.

    Method: skewed uses with a shift of what is popular and scans between, against a plain version of the paper's algorithm.
    """
    r = random.Random(seed)
    uses: list[int] = []
    for n in range(4000):
        if n % 1000 > 850:
            uses.append(10_000 + n)
        else:
            uses.append(int(r.paretovariate(0.9)) % 200 + 60 * (n // 2000))
    shell, realm, session = flat(24, eviction="arc")
    hits = 0
    for number in uses:
        shell.now += 2.0
        if shell.get(session, realm, keys(number)):
            hits += 1
        else:
            shell.put(session, realm, keys(number))
    assert hits == pytest.approx(_arc_hits(uses, 24), rel=0.03)


# ---- HBM as the tier of saves


def test_saves_into_hbm_and_loads_from_there() -> None:
    """Goal: where saves go to HBM, loads read there what is there, and everything else comes up to CPU memory.

    Method: a chain through all three tiers; the shell compares every byte that a load sees.
    """
    shell = Shell(config(cpu=32 * KIB, nvme=1 << 20, hbm=16 * KIB, max_ticket_share=1.0), into_hbm=True)
    realm = shell.realm(4096)
    session = shell.attach(realm)
    for number in range(20):
        shell.now += 1.0
        assert shell.put(session, realm, keys(number)).outcomes == [GRANTED]
        shell.finish_all()
    where = [shell.tiers(realm, key_of(n)) for n in range(20)]
    assert where[19][0] == "h" and where[0] == "n" and all(where), "nothing is lost on the way"
    ticket = shell.load(session, realm, keys(19))
    assert shell.collect(ticket) == ([0], True) and not shell.moves
    shell.release(ticket)
    for first in range(0, 20, 4):
        assert shell.get(session, realm, keys(*range(first, first + 4))) == [0, 1, 2, 3]
    shell.check()


def test_each_gpu_has_its_own_capacity() -> None:
    """Goal: of two GPUs the one that engines use is kept free by itself, and what does not fit there goes to CPU memory.

    Method: a tier of two GPUs with room for 16 blocks each; one realm saves on one of them, another on the other.
    """
    shell = Shell(config(hbm=128 * KIB, devices=2, extent=16 * KIB, free_target=0.25, ttl_s=(None, None, None)), into_hbm=True)
    realm, other = shell.realm(4096), shell.realm(4096, tenant="u")
    session = shell.attach(realm)
    for number in range(12):
        assert shell.put(session, realm, keys(number)).outcomes == [GRANTED]
    assert not shell.moves
    shell.put(session, realm, keys(12))
    assert len(shell.moves) == 1, "a quarter of it is kept free"
    for number in range(13, 20):
        assert shell.put(session, realm, keys(number)).outcomes == [GRANTED]
    assert [n for n in range(20) if "h" not in shell.tiers(realm, key_of(n))] == [16, 17, 18, 19]
    assert shell.core.state.counts.not_in_hbm["busy"] == 4
    request = Request(devices=(1,))
    grant = shell.core.save(shell.now, session, other, keys(1), request=request)
    assert in_device(grant.slots[0]), "the other one is empty"
    shell.core.abort(shell.now, session, grant.ticket_id)
    shell.run()
    shell.core.leave_devices(shell.now, realm)
    shell.run()
    shell.finish_all()
    assert "h" not in "".join(shell.tiers(realm, key_of(n)) for n in range(20)) and len(held(shell, realm, *range(20))) == 20
    shell.check()


def test_a_full_middle_tier_is_waited_for() -> None:
    """Goal: while CPU memory writes down, copies in HBM that wait for its room are not dropped.

    Method: no room is kept free; HBM and CPU memory are full of what exists nowhere else when more is saved.
    """
    shell = Shell(config(cpu=32 * KIB, nvme=1 << 20, hbm=16 * KIB, max_ticket_share=1.0, free_target=0.0), into_hbm=True)
    realm = shell.realm(4096)
    session = shell.attach(realm)
    saved = []
    for number in range(60):
        shell.now += 0.1
        if shell.put(session, realm, keys(number)).outcomes == [GRANTED]:
            saved.append(number)
        shell.finish_all()
    assert len(saved) > 30
    assert held(shell, realm, *saved) == saved
    shell.check()
