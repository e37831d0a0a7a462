"""Which copies stay, move and go: TTLs, age, watermarks, drain."""

from __future__ import annotations

import pytest

from kvtierd.core.limits import Limits
from kvtierd.core.tickets import GRANTED
from kvtierd.core.tier_core import MIN_TICK_S
from kvtierd.model import Result, Tier
from tests.core.shell import KIB, Shell, config, key_of
from tests.core.test_load import keys, on_nvme


def test_ttl_of_cpu_memory_copies_down_first() -> None:
    """Goal: after 10 minutes without use a block goes to NVMe; it leaves CPU memory only when it is readable there.

    Method: watch a block before, at, and after its TTL, and after the write has ended.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, keys(1))
    shell.wait(599.9)
    assert not shell.moves
    shell.wait(0.2)
    assert len(shell.moves) == 1 and shell.tiers(realm, key_of(1)) == "c"
    shell.finish_all()
    assert shell.tiers(realm, key_of(1)) == "n"
    shell.wait(10_000_000)
    assert shell.tiers(realm, key_of(1)) == "n", "no TTL on NVMe"
    assert shell.core.state.counts.evictions == {(Tier.CPU, "ttl"): 1}
    shell.check()


def test_ttl_of_hbm() -> None:
    """Goal: 30 s without use move a block from HBM to CPU memory, and its TTL there goes on from its last use.

    Method: a block put into HBM, then only time.
    """
    shell = Shell(config(hbm=64 * KIB))
    realm = shell.realm(4096)
    shell.put_hbm(realm, key_of(1))
    shell.wait(29.9)
    assert shell.tiers(realm, key_of(1)) == "h"
    shell.wait(0.2)
    shell.finish_all()
    assert shell.tiers(realm, key_of(1)) == "c"
    shell.wait(570.1)
    shell.finish_all()
    assert shell.tiers(realm, key_of(1)) == "n"
    shell.check()


@pytest.mark.parametrize("how", ["load", "save", "pin"])
def test_touched_meanwhile_it_stays(how: str) -> None:
    """Goal: a block that is used while its TTL copies it down stays, now clean, until its TTL runs out anew.

    Method: use it by a load, by a save that finds it held, or pin it between start and end of the move.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, keys(1))
    shell.wait(600.1)
    assert len(shell.moves) == 1
    if how == "load":
        shell.now += 0.5
        ticket = shell.load(session, realm, keys(1))
        shell.collect(ticket)
        shell.release(ticket)
    elif how == "save":
        shell.now += 0.5
        shell.save(session, realm, keys(1))
    else:
        shell.pin(realm, keys(1), wait_s=300)
    shell.finish_all()
    assert shell.tiers(realm, key_of(1)) == "cn"
    shell.wait(299)
    assert shell.tiers(realm, key_of(1)) == "cn"
    shell.wait(400)
    assert not shell.moves and shell.tiers(realm, key_of(1)) == "n", "clean: it goes without another write"
    shell.check()


def test_a_ttl_refuses_nothing() -> None:
    """Goal: a TTL that has not run out keeps nothing in place: the least recently used goes when room is needed.

    Method: fill the tier three times over without letting time pass.
    """
    shell = Shell(config(cpu=64 * KIB, nvme=0))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    for i in range(48):
        assert shell.put(session, realm, keys(i)).outcomes == [GRANTED]
    assert shell.core.lookup(shell.now, realm, keys(*range(48)), each=True)[0] == 16


def test_cpu_memory_as_the_last_tier_keeps_its_blocks() -> None:
    """Goal: a TTL moves a block down, it does not lose it: without a lower tier, or where the block does not fit, it stays.

    Method: no NVMe; NVMe smaller than the block; a tenant whose quota on NVMe is smaller; a realm that is not on record.
    """
    for nvme, quota in ((0, None), (16 * KIB, None), (1 << 20, 4096)):
        shell = Shell(config(nvme=nvme), {"t": Limits((None, None, quota))})
        realm = shell.realm(32 * KIB)
        shell.put(shell.attach(realm), realm, keys(1))
        assert shell.wait(100_000) == 0, "nothing is due"
        assert shell.tiers(realm, key_of(1)) == "c"
        shell.drain()
        assert shell.core.undrained_bytes == 0 and not shell.moves
    shell = Shell(config())
    realm, other = shell.realm(4096), shell.realm(4096, model="other")
    realm.writable = False
    shell.put(shell.attach(realm), realm, keys(1))
    shell.now = 1.0
    shell.put(shell.attach(other), other, keys(1))
    shell.wait(700)
    shell.finish_all()
    assert shell.tiers(realm, key_of(1)) == "c" and shell.tiers(other, key_of(1)) == "n", "one does not block the other"
    shell.drain()
    assert shell.core.undrained_bytes == 0


def test_ttl_on_nvme_forgets() -> None:
    """Goal: a TTL on NVMe, the last tier, forgets blocks.

    Method: TTLs of 1, 2 and 5 s.
    """
    shell = Shell(config(ttl_s=(1.0, 2.0, 5.0)))
    realm = shell.realm(4096)
    shell.put(shell.attach(realm), realm, keys(1))
    shell.wait(3)
    shell.finish_all()
    assert shell.tiers(realm, key_of(1)) == "n"
    shell.wait(3)
    assert shell.tiers(realm, key_of(1)) == "" and not shell.disk
    shell.check()


def test_tenants_have_their_own_ttl() -> None:
    """Goal: a tenant's own TTL takes the place of the tier's.

    Method: two tenants, one with 5 s.
    """
    shell = Shell(config(), {"fast": Limits(ttl_s=(None, 5.0, None))})
    fast, slow = shell.realm(4096, tenant="fast"), shell.realm(4096, tenant="slow")
    for realm in (slow, fast):
        shell.put(shell.attach(realm), realm, keys(1))
    shell.wait(6)
    shell.finish_all()
    assert shell.tiers(fast, key_of(1)) == "n" and shell.tiers(slow, key_of(1)) == "c"


@pytest.mark.parametrize("how", ["commit", "load", "release in parts", "held"])
def test_leaves_go_before_roots(how: str) -> None:
    """Goal: of one request's blocks the last ones go first, after a save, after a load, and after a save that finds them.

    Method: a chain of four; then save new blocks one by one into a full tier and see who goes.
    """
    shell = Shell(config(cpu=64 * KIB, nvme=0, max_ticket_share=1.0))
    realm = shell.realm(8 * KIB)
    session = shell.attach(realm)
    chain = keys(1, 2, 3, 4)
    shell.put(session, realm, chain)
    shell.now += 1
    shell.put(session, realm, keys(10, 11, 12, 13))
    shell.now += 1
    if how == "load":
        shell.get(session, realm, chain)
    elif how == "release in parts":
        ticket = shell.load(session, realm, chain)
        shell.collect(ticket)
        for index in (1, 0, 3, 2):
            shell.release(ticket, [index])
    elif how == "held":
        shell.save(session, realm, chain)
    order = []
    shell.now += 1
    for i in range(20, 28):
        before = [k for k in (1, 2, 3, 4, 10, 11, 12, 13) if shell.tiers(realm, key_of(k))]
        shell.put(session, realm, keys(i))
        order += [k for k in before if not shell.tiers(realm, key_of(k))]
    if how == "commit":
        assert order == [4, 3, 2, 1, 13, 12, 11, 10]
    else:
        assert order == [13, 12, 11, 10, 4, 3, 2, 1]


def test_clean_demotion_writes_nothing() -> None:
    """Goal: a block that came up from NVMe goes down again without a write: the copy there was kept.

    Method: promote, let the TTL run out, count moves.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(1))
    assert shell.get(session, realm, keys(1)) == [0]
    assert shell.tiers(realm, key_of(1)) == "cn"
    moves = dict(shell.core.state.counts.moves)
    shell.wait(601)
    assert not shell.moves and shell.core.state.counts.moves == moves
    assert shell.tiers(realm, key_of(1)) == "n"


def test_watermark_keeps_room() -> None:
    """Goal: ``free_target`` of the tier is free or clean, so that saves find room; no more than that is written.

    Method: fill a tier of 16 blocks one by one with a target of a quarter.
    """
    shell = Shell(config(cpu=64 * KIB, free_target=0.25))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    for i in range(40):
        shell.now += 1
        assert shell.put(session, realm, keys(i)).outcomes == [GRANTED]
        shell.finish_all()
        assert shell.core.state.dirty_bytes[Tier.CPU] <= 48 * KIB
        assert len(shell.disk) == max(i + 1 - 12, 0), "the oldest first, and no more than needed"
    assert shell.core.lookup(shell.now, realm, keys(*range(40)), each=True)[0] == 40, "nothing is lost on the way"
    shell.check()


def test_demotions_in_flight_are_bounded() -> None:
    """Goal: no more than ``max_demote_bytes`` (and one block) is on its way down, also while draining.

    Method: drain 30 blocks with a bound of four.
    """
    shell = Shell(config(max_demote_bytes=16 * KIB))
    realm = shell.realm(4096)
    shell.put(shell.attach(realm), realm, keys(*range(30)))
    shell.drain()
    most = 0
    while shell.moves:
        most = max(most, len(shell.moves))
        shell.finish(min(shell.moves))
    assert most == 4 and shell.core.undrained_bytes == 0
    assert len(shell.disk) == 30


def test_drain_takes_blocks_in_use_along() -> None:
    """Goal: blocks that are being read or are pinned are written down too; saves that end while draining follow.

    Method: one block in a load, one pinned, one committed after the drain began.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, keys(1, 2))
    late = shell.save(session, realm, keys(3))
    ticket = shell.load(session, realm, keys(1))
    shell.collect(ticket)
    shell.pin(realm, keys(2), wait_s=1000)
    shell.drain()
    assert len(shell.moves) == 2
    shell.commit(late.ticket_id)
    assert shell.core.undrained_bytes == 3 * 4096
    shell.finish_all()
    assert shell.core.undrained_bytes == 0 and len(shell.disk) == 3
    shell.release(ticket)
    shell.check()


def test_lower_tier_that_is_smaller_comes_to_rest() -> None:
    """Goal: where NVMe, or a tenant's share of it, is smaller than memory, writing down ends: it does not push blocks out of
    NVMe that memory still holds, only to write those again.

    Method: NVMe of four blocks, or a quota of four, below a CPU tier of 16; drain, and save past the watermark. The number of
    moves is bounded.
    """
    for nvme, quota in ((32 * KIB, None), (1 << 20, 32 * KIB)):
        shell = Shell(config(cpu=64 * KIB, nvme=nvme, extent=8 * KIB), {"t": Limits((None, None, quota))})
        realm = shell.realm(4096)
        session = shell.attach(realm)
        for i in range(60):
            shell.now += 0.1
            shell.put(session, realm, keys(i))
            shell.finish_all(limit=100)
        shell.drain()
        shell.finish_all(limit=100)
        writes = sum(n for (_, dst, _), n in shell.core.state.counts.moves.items() if dst is Tier.NVME)
        assert writes <= 100
        assert shell.wait(60) < 200
        shell.finish_all(limit=100)
        assert shell.core.lookup(shell.now, realm, keys(59))[0] == 1
        shell.check()


def test_next_deadline() -> None:
    """Goal: nothing is due in an idle core; a TTL, an alarm or a pause is; work that cannot be done does not make ticks spin.

    Method: read the deadline after each; then let a TTL be due that a refusing device holds up.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    assert shell.core.next_deadline() is None
    shell.now = 100.0
    shell.put(session, realm, keys(1))
    assert shell.core.next_deadline() == 700.0
    shell.prefetch(session, realm, keys(1), wait_s=7.0)
    assert shell.core.next_deadline() == 107.0
    shell.wait(8)
    assert shell.core.next_deadline() == 700.0
    shell.wait(592.1)
    assert len(shell.moves) == 1
    assert shell.wait(100) <= 100 / MIN_TICK_S
    for _ in range(20):
        shell.finish_all(Result.IO_ERROR)
        ticks = shell.wait(5.1)
        assert ticks <= 8, "a pause ends, and meanwhile a look a second"
    assert shell.tiers(realm, key_of(1)) == "c"
    shell.finish_all()
    assert shell.tiers(realm, key_of(1)) == "n"
    assert shell.core.next_deadline() is None or shell.core.next_deadline() > shell.now  # type: ignore[operator]


def test_many_ttls_at_one_time() -> None:
    """Goal: more TTLs than one tick handles are applied over several ticks, all of them.

    Method: 5,000 clean blocks of one age.
    """
    shell = Shell(config(cpu=32 << 20, nvme=64 << 20, extent=4 << 20))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    chain = keys(*range(5000))
    shell.put(session, realm, chain[:2500])
    shell.put(session, realm, chain[2500:])
    shell.drain()
    shell.finish_all()
    shell.drain(on=False)
    assert shell.core.state.copies[Tier.CPU] == 5000
    assert 3 <= shell.wait(610) <= 6
    assert shell.core.state.copies[Tier.CPU] == 0 and shell.core.state.copies[Tier.NVME] == 5000
    shell.check()
