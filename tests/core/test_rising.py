"""The second stage of a prefetch: from CPU memory to GPU memory."""

from __future__ import annotations

import pytest

from kvtierd.core import rising
from kvtierd.core.block import ready_copy
from kvtierd.core.limits import Limits, TenantClass
from kvtierd.core.realm import Realm
from kvtierd.core.rising import AFTER_S
from kvtierd.core.tickets import Session
from kvtierd.errors import Reason
from kvtierd.model import Result, Tier
from tests.core.shell import KIB, Shell, config, key_of

BLOCK = 4 * KIB


def keys(count: int) -> list[bytes]:
    return [key_of(n) for n in range(1, count + 1)]


def held_below(count: int, hbm: int = 1 << 20, *, nvme: bool = False, **changes: object) -> tuple[Shell, Session, Realm]:
    """Blocks that were saved by an engine that cannot open GPU memory, and a session of one that can."""
    limits = changes.pop("limits", None)
    shell = Shell(config(hbm=hbm, **changes), limits, into_hbm=False)  # type: ignore[arg-type]
    realm = shell.realm(BLOCK)
    session = shell.attach(realm)
    shell.put(session, realm, keys(count))
    if nvme:
        shell.drain()
        shell.finish_all()
        shell.drain(on=False)
        shell.evict(realm, keys(count), Tier.CPU)
    shell.into_hbm = True
    return shell, session, realm


def tiers(shell: Shell, realm: Realm, count: int) -> list[str]:
    return [shell.tiers(realm, key) for key in keys(count)]


@pytest.mark.parametrize("nvme", [False, True])
def test_a_prefetch_goes_on_to_gpu_memory(nvme: bool) -> None:
    """Goal: from wherever a block is, block by block, while its request waits; the load that follows reads GPU memory."""
    shell, session, realm = held_below(4, nvme=nvme)
    ticket = shell.prefetch(session, realm, keys(4))
    shell.finish_all()
    assert ticket.ready == 4 and all("h" not in held for held in tiers(shell, realm, 4))
    shell.wait(AFTER_S + 0.01)
    assert {(m.src.tier, m.dst.tier) for m, _ in shell.moves.values()} == {(Tier.CPU, Tier.HBM)}
    shell.finish_all()
    assert all(held.startswith("hc") for held in tiers(shell, realm, 4))
    load = shell.load(session, realm, keys(4))
    assert shell.collect(load) == ([0, 1, 2, 3], True)
    assert [copy.tier for copy in load.copies if copy] == [Tier.HBM] * 4 and ticket.closed
    shell.release(load)
    assert not session.tickets and not any(shell.core.state.pinned_bytes)
    shell.check()


def test_what_is_still_read_from_nvme_follows() -> None:
    """Goal: the stages overlap: a block goes on while those after it are still on their way up."""
    shell, session, realm = held_below(4, nvme=True)
    shell.prefetch(session, realm, keys(4))
    shell.wait(AFTER_S + 0.01)
    shell.finish(min(shell.moves))
    assert [m.dst.tier for m, _ in shell.moves.values()].count(Tier.HBM) == 1
    shell.finish_all()
    assert all(held.startswith("hc") for held in tiers(shell, realm, 4))
    shell.check()


def test_a_load_that_comes_at_once_shares_nothing() -> None:
    shell, session, realm = held_below(4)
    shell.prefetch(session, realm, keys(4))
    shell.wait(AFTER_S / 2)
    load = shell.load(session, realm, keys(4))
    shell.wait(1.0)
    assert not shell.moves and tiers(shell, realm, 4) == ["c"] * 4
    shell.collect(load)
    shell.release(load)
    shell.check()


def test_a_load_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what is on its way when the load comes arrives, at most as much as may be under way; the load gets the rest below."""
    monkeypatch.setattr(rising, "MAX_BYTES", 2 * BLOCK)
    shell, session, realm = held_below(8)
    shell.prefetch(session, realm, keys(8))
    shell.wait(AFTER_S + 0.01)
    assert len(shell.moves) == 2
    shell.finish(min(shell.moves))
    assert len(shell.moves) == 2
    load = shell.load(session, realm, keys(8))
    shell.finish_all()
    assert shell.collect(load) == (list(range(8)), True)
    assert [copy.tier for copy in load.copies if copy] == [Tier.HBM] + [Tier.CPU] * 7
    assert tiers(shell, realm, 8) == ["hc"] * 3 + ["c"] * 5
    shell.release(load)
    shell.check()


def test_one_prefetch_takes_half_of_the_tier() -> None:
    shell, session, realm = held_below(48, hbm=32 * BLOCK, extent=4 * BLOCK)
    shell.prefetch(session, realm, keys(48))
    shell.wait(AFTER_S + 0.01)
    shell.finish_all()
    assert tiers(shell, realm, 48) == ["hc"] * 16 + ["c"] * 32
    shell.check()


def test_where_there_is_no_room_it_stays() -> None:
    """Goal: saves that others still fill are not in the way of a prefetch, nor it in theirs."""
    shell, session, realm = held_below(8, hbm=4 * BLOCK, extent=4 * BLOCK)
    filling = shell.save(shell.attach(realm), realm, [key_of(100 + n) for n in range(2)])
    other = shell.save(shell.attach(realm), realm, [key_of(200 + n) for n in range(2)])
    assert filling.slots and other.slots
    ticket = shell.prefetch(session, realm, keys(8))
    shell.wait(1.0)
    assert not shell.moves and ticket.ready == 8 and not shell.core._mover._riser._queue
    for grant in (filling, other):
        shell.commit(grant.ticket_id)
    assert len(shell.get(session, realm, keys(8))) == 8
    shell.check()


@pytest.mark.parametrize("result", [Result.IO_ERROR, Result.NO_SPACE])
def test_a_gpu_that_fails_loses_nothing(result: Result) -> None:
    """Goal: the copy in CPU memory is as good as before, and the tier is left alone for a while."""
    shell, session, realm = held_below(4)
    ticket = shell.prefetch(session, realm, keys(4))
    shell.wait(AFTER_S + 0.01)
    shell.finish_all(result)
    assert tiers(shell, realm, 4) == ["c"] * 4 and ticket.ready == 4
    suspended = not shell.core.state.turns.takes_writes(Tier.HBM, shell.now)
    assert suspended is (result is Result.IO_ERROR)
    shell.core.cancel(shell.now, session, ticket.ticket_id)
    if suspended:
        shell.prefetch(session, realm, keys(4), 0.5)
        shell.wait(0.4)
        assert not shell.moves
        granted = shell.put(session, realm, [key_of(9)])
        assert granted.ticket_id and shell.tiers(realm, key_of(9)) == "c", "saves go to CPU memory meanwhile"
        assert shell.core.state.counts.not_in_hbm["suspended"] == 1
        shell.wait(shell.config.retry_s + 1)
    shell.prefetch(session, realm, keys(4))
    shell.wait(AFTER_S + 0.01)
    shell.finish_all()
    assert all(held.startswith("hc") for held in tiers(shell, realm, 4))
    shell.check()


def test_who_may_not_be_there_is_not() -> None:
    """Goal: basic tenants, and blocks of a namespace that is on other GPUs, stay in CPU memory."""
    shell, session, realm = held_below(2, limits={"t": Limits(tenant_class=TenantClass.BASIC)})
    shell.prefetch(session, realm, keys(2))
    shell.wait(1.0)
    assert not shell.moves
    shell, session, realm = held_below(2)
    assert shell.put_hbm(realm, key_of(50))
    realm.devices = (1,)
    shell.prefetch(session, realm, keys(2))
    shell.wait(1.0)
    assert not shell.moves and realm.devices == (1,)
    shell.check()


def test_what_is_evicted_on_its_way_is_gone() -> None:
    shell, session, realm = held_below(2)
    shell.prefetch(session, realm, keys(2))
    shell.wait(AFTER_S + 0.01)
    shell.evict(realm, keys(2))
    shell.finish_all()
    assert tiers(shell, realm, 2) == ["", ""]
    shell.wait(20.0)
    assert not any(shell.core.state.pinned_bytes) and not shell.core.state.copies[Tier.HBM]
    shell.check()


def test_a_drain_sends_nothing_up() -> None:
    shell, session, realm = held_below(2)
    shell.prefetch(session, realm, keys(2))
    shell.drain()
    shell.wait(AFTER_S + 0.01)
    shell.finish_all()
    assert all("h" not in held for held in tiers(shell, realm, 2))
    shell.check()


def test_it_waits_without_spinning() -> None:
    """Goal: the time at which a prefetch goes on is a deadline of its own, once."""
    shell, session, realm = held_below(2, hbm=4 * BLOCK, extent=4 * BLOCK)
    assert shell.save(shell.attach(realm), realm, [key_of(100 + n) for n in range(2)]).slots
    assert shell.save(shell.attach(realm), realm, [key_of(200 + n) for n in range(2)]).slots
    ticket = shell.prefetch(session, realm, keys(2), 5.0)
    assert shell.core.next_deadline() == pytest.approx(ticket.began_s + AFTER_S)
    assert shell.wait(4.0) <= 3
    assert ready_copy(realm.index[key_of(1)]).tier is Tier.CPU and ticket.reason is Reason.UNSPECIFIED
    shell.check()
