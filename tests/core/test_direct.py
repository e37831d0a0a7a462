"""Moves between GPU memory and NVMe without a copy in CPU memory: when they start, and what their results mean.

Method: the shell with real contents around the core; blocks that are on NVMe only are loaded by sessions that can open GPU memory
and by such that cannot, and blocks in GPU memory have to go while there is room below or none.
"""

from __future__ import annotations

import pytest

from kvtierd.core.limits import Limits, TenantClass
from kvtierd.core.realm import Realm
from kvtierd.core.rising import AFTER_S
from kvtierd.core.tickets import ReadTicket, Session
from kvtierd.errors import Reason
from kvtierd.model import Result, Tier
from tests.core.shell import KIB, Shell, config, key_of
from tests.core.test_unmade import ShortShell

BLOCK = 4 * KIB
UP, DOWN = (Tier.NVME, Tier.HBM), (Tier.HBM, Tier.NVME)
BY_CPU = (Tier.NVME, Tier.CPU)


def keys(count: int, first: int = 1) -> list[bytes]:
    return [key_of(n) for n in range(first, first + count)]


def fill(shell: Shell, session: Session, realm: Realm, saved: list[bytes]) -> None:
    """Save one after the other, as a session may fill half of a memory at a time."""
    for key in saved:
        shell.put(session, realm, [key])


def sink(shell: Shell, count: int) -> tuple[Session, Realm]:
    """Blocks on NVMe only, and a session that can open GPU memory; direct moves are possible."""
    realm = shell.realm(BLOCK)
    session = shell.attach(realm)
    shell.into_hbm = False
    fill(shell, session, realm, keys(count))
    shell.drain()
    shell.finish_all()
    shell.drain(on=False)
    shell.evict(realm, keys(count), Tier.CPU)
    shell.into_hbm = True
    assert tiers(shell, realm, count) == ["n"] * count
    shell.set_direct(True)
    return session, realm


def on_nvme(count: int, hbm: int = 1 << 20, **changes: object) -> tuple[Shell, Session, Realm]:
    limits = changes.pop("limits", None)
    shell = Shell(config(hbm=hbm, **changes), limits)  # type: ignore[arg-type]
    return shell, *sink(shell, count)


def in_hbm(count: int, **changes: object) -> tuple[Shell, Session, Realm]:
    """Blocks in GPU memory only; direct moves are possible."""
    limits = changes.pop("limits", None)
    shell = Shell(config(**{"hbm": 1 << 20, **changes}), limits, into_hbm=True)  # type: ignore[arg-type]
    shell.set_direct(True)
    realm = shell.realm(BLOCK)
    session = shell.attach(realm)
    fill(shell, session, realm, keys(count))
    assert tiers(shell, realm, count) == ["h"] * count
    return shell, session, realm


def read(shell: Shell, load: ReadTicket) -> None:
    """Take all of a load, and let go."""
    assert shell.collect(load) == (list(range(len(load.copies))), True)
    shell.release(load)


def blind(shell: Shell, realm: Realm) -> Session:
    """A session that cannot open GPU memory."""
    session = shell.attach(realm)
    shell.blind.add(session)
    return session


def tiers(shell: Shell, realm: Realm, count: int, first: int = 1) -> list[str]:
    return [shell.tiers(realm, key) for key in keys(count, first)]


def ways(shell: Shell) -> list[tuple[Tier, Tier]]:
    """Which way each move in flight goes, oldest first."""
    return [(move.src.tier, move.dst.tier) for _, (move, _) in sorted(shell.moves.items())]


# ---- up


def test_a_load_comes_up_to_gpu_memory() -> None:
    """Goal: the reader is given the copy in GPU memory, CPU memory is not touched, and the copy goes later without a write."""
    shell, session, realm = on_nvme(4)
    state = shell.core.state
    load = shell.load(session, realm, keys(4))
    assert ways(shell) == [UP] * 4 and not state.pools[Tier.CPU].used_bytes
    shell.finish_all()
    assert shell.collect(load) == ([0, 1, 2, 3], True)
    assert [copy.tier for copy in load.copies if copy] == [Tier.HBM] * 4
    shell.release(load)
    assert tiers(shell, realm, 4) == ["hn"] * 4 and not state.dirty_bytes[Tier.HBM]
    assert state.counts.move_bytes[UP] == 4 * BLOCK and realm.tenant.hits == [0, 0, 4]
    shell.wait(31.0)
    assert not shell.moves and tiers(shell, realm, 4) == ["n"] * 4
    shell.check()


def test_a_prefetch_has_nothing_left_to_rise() -> None:
    shell, session, realm = on_nvme(4)
    ticket = shell.prefetch(session, realm, keys(4))
    assert ways(shell) == [UP] * 4
    shell.finish_all()
    shell.wait(AFTER_S + 0.01)
    assert ticket.ready == 4 and not shell.moves and tiers(shell, realm, 4) == ["hn"] * 4
    load = shell.load(session, realm, keys(4))
    assert shell.collect(load) == ([0, 1, 2, 3], True) and ticket.closed
    shell.release(load)
    assert not any(shell.core.state.pinned_bytes)
    shell.check()


@pytest.mark.parametrize("prefetch", [False, True])
def test_one_ticket_takes_half_of_the_tier(prefetch: bool) -> None:
    """Goal: the rest comes by CPU memory, and of a prefetch it does not rise beyond the half either."""
    shell, session, realm = on_nvme(12, hbm=16 * BLOCK, extent=4 * BLOCK)
    ticket = shell.prefetch(session, realm, keys(12)) if prefetch else shell.load(session, realm, keys(12))
    assert ways(shell) == [UP] * 8 + [BY_CPU] * 4
    shell.finish_all()
    shell.wait(AFTER_S + 0.01)
    assert ticket.ready == 12 and not shell.moves and tiers(shell, realm, 12) == ["hn"] * 8 + ["cn"] * 4
    shell.check()


def test_both_ways_have_one_bound() -> None:
    shell, session, realm = on_nvme(8, max_promote_bytes=3 * BLOCK)
    other = blind(shell, realm)
    shell.load(session, realm, keys(2))
    shell.load(other, realm, keys(4, 3))
    assert ways(shell) == [UP, UP, BY_CPU] and shell.core._mover.up_bytes == 3 * BLOCK
    shell.finish(min(shell.moves))
    assert ways(shell) == [UP, BY_CPU, BY_CPU]
    shell.finish_all()
    assert not shell.core._mover.up_bytes
    shell.check()


@pytest.mark.parametrize("why", ["off", "blind", "class", "other_gpu", "suspended", "draining", "full"])
def test_where_it_cannot_be_it_comes_by_cpu_memory(why: str) -> None:
    limits = {"t": Limits(tenant_class=TenantClass.BASIC)} if why == "class" else None
    shell, session, realm = on_nvme(4, hbm=4 * BLOCK, extent=4 * BLOCK, limits=limits)
    if why == "off":
        shell.set_direct(False)
    elif why == "blind":
        session = blind(shell, realm)
    elif why == "other_gpu":
        assert shell.put_hbm(realm, key_of(50))
        realm.devices = (1,)
    elif why == "suspended":
        shell.core.state.turns.suspended[Tier.HBM] = (shell.now + 60.0, "io_error")
    elif why == "draining":
        shell.drain()
    elif why == "full":
        others = [shell.save(shell.attach(realm), realm, keys(2, first)) for first in (100, 200)]
        assert all(grant.slots for grant in others)
    load = shell.load(session, realm, keys(4))
    assert ways(shell) == [BY_CPU] * 4
    shell.finish_all()
    read(shell, load)
    shell.check()


def test_who_can_read_it_shares_the_move() -> None:
    """Goal: one read of the disk for all that can open the GPU's memory, one more for those that cannot."""
    shell, session, realm = on_nvme(2)
    others = [shell.attach(realm), blind(shell, realm), blind(shell, realm)]
    loads = [shell.load(s, realm, keys(2)) for s in (session, *others)]
    assert ways(shell) == [UP, UP, BY_CPU, BY_CPU]
    shell.check()
    shell.finish_all()
    for load, tier in zip(loads, [Tier.HBM, Tier.HBM, Tier.CPU, Tier.CPU], strict=True):
        assert shell.collect(load) == ([0, 1], True)
        assert [copy.tier for copy in load.copies if copy] == [tier] * 2
        shell.release(load)
    assert tiers(shell, realm, 2) == ["hcn"] * 2
    shell.check()


def test_who_can_read_cpu_memory_only_holds_nobody_else_up() -> None:
    """Goal: a load for which CPU memory has no room waits; one that comes up to GPU memory does not wait for it."""
    shell, session, realm = on_nvme(4, cpu=4 * BLOCK, extent=4 * BLOCK)
    other = blind(shell, realm)
    filling = [shell.save(blind(shell, realm), realm, keys(2, first)) for first in (100, 200)]
    assert all(grant.slots for grant in filling)
    waits = shell.load(other, realm, keys(2))
    assert not shell.moves
    load = shell.load(session, realm, keys(2, 3))
    assert ways(shell) == [UP] * 2
    shell.finish_all()
    read(shell, load)
    shell.abort(filling[0].ticket_id)
    shell.finish_all()
    read(shell, waits)
    shell.check()


@pytest.mark.parametrize(("result", "reason"), [(Result.CORRUPT, Reason.CORRUPT), (Result.IO_ERROR, Reason.IO)])
def test_what_cannot_be_read_is_forgotten(result: Result, reason: Reason) -> None:
    shell, session, realm = on_nvme(2)
    load = shell.load(session, realm, keys(2))
    shell.finish_all(result)
    assert load.reason is reason and load.open == 0 and tiers(shell, realm, 2) == [""] * 2
    state = shell.core.state
    assert not state.copies[Tier.HBM] and not state.turns.suspended and not session.held_bytes
    assert state.counts.moves[(*UP, result.value)] == 2
    shell.collect(load)
    shell.check()


def test_gpu_memory_that_takes_nothing_costs_no_hit() -> None:
    """Goal: who waits for it goes on by CPU memory, in order, and so does what comes after for a while."""
    shell, session, realm = on_nvme(4)
    load = shell.load(session, realm, keys(3))
    shell.finish(max(shell.moves), Result.NO_SPACE)
    for move_id in sorted(shell.moves)[:2]:
        shell.finish(move_id, Result.NO_SPACE)
    later = shell.load(session, realm, keys(1, 4))
    assert ways(shell) == [BY_CPU] * 4
    shell.finish_all()
    read(shell, load)
    read(shell, later)
    assert not session.held_bytes
    shell.evict(realm, keys(4), Tier.CPU)
    shell.wait(shell.config.retry_s + 1)
    read_again = shell.load(session, realm, keys(4))
    assert ways(shell) == [UP] * 4
    shell.finish_all()
    read(shell, read_again)
    shell.check()


def test_gpu_memory_that_cannot_be_had_costs_no_hit() -> None:
    """Goal: who waits for an extent that cannot be made gets its blocks by CPU memory, in order."""
    shell = ShortShell(hbm=8 * BLOCK, extent=2 * BLOCK)
    session, realm = sink(shell, 6)
    make = shell._new_extent
    shell._new_extent = lambda new: _refuse(shell, new, make)  # type: ignore[method-assign, assignment]
    load = shell.load(session, realm, keys(6))
    assert ways(shell) == [BY_CPU] * 6 and shell.refused == 2
    assert [move.src.block.key for _, (move, _) in sorted(shell.moves.items())] == keys(2, 5) + keys(4)
    shell.check()
    shell.finish_all()
    read(shell, load)
    assert not session.held_bytes
    shell.check()


def _refuse(shell: ShortShell, new, make) -> None:  # type: ignore[no-untyped-def]
    shell.left = 0 if new.tier is Tier.HBM else 1
    make(new)


def test_it_may_end_while_some_wait() -> None:
    """Goal: what is on its way arrives, and the rest comes by CPU memory; and back."""
    shell, session, realm = on_nvme(3, max_promote_bytes=BLOCK)
    load = shell.load(session, realm, keys(3))
    assert ways(shell) == [UP]
    shell.set_direct(False)
    shell.finish(min(shell.moves))
    assert ways(shell) == [BY_CPU]
    shell.set_direct(True)
    shell.finish_all()
    read(shell, load)
    assert tiers(shell, realm, 3) == ["hn", "cn", "hn"]
    shell.check()


def test_a_block_that_rises_is_read_below_meanwhile() -> None:
    """Goal: whoever comes while a block is copied to GPU memory for another, and finds it on NVMe only, waits for CPU memory."""
    shell, session, realm = on_nvme(1)
    shell.set_direct(False)
    shell.prefetch(shell.attach(realm), realm, keys(1))
    shell.finish_all()
    shell.wait(AFTER_S + 0.01)
    shell.evict(realm, keys(1), Tier.CPU)
    shell.set_direct(True)
    load = shell.load(session, realm, keys(1))
    assert ways(shell) == [(Tier.CPU, Tier.HBM), BY_CPU]
    shell.finish_all()
    read(shell, load)
    shell.check()


def test_what_is_evicted_on_its_way_up_is_gone() -> None:
    shell, session, realm = on_nvme(2)
    load = shell.load(session, realm, keys(2))
    shell.evict(realm, keys(2))
    shell.finish_all()
    assert shell.collect(load) == ([], True) and tiers(shell, realm, 2) == ["", ""]
    assert not any(shell.core.state.pinned_bytes) and not shell.core.state.copies[Tier.HBM]
    shell.check()


def test_a_block_that_comes_to_both_memories_is_clean_in_both() -> None:
    """Goal: a block that fails on one of its two ways is forgotten on NVMe only, and its other copy is all there is then."""
    shell, session, realm = on_nvme(1)
    shell.load(session, realm, keys(1))
    load = shell.load(blind(shell, realm), realm, keys(1))
    assert ways(shell) == [UP, BY_CPU]
    shell.finish(min(shell.moves), Result.CORRUPT)
    assert tiers(shell, realm, 1) == [""]
    shell.finish_all()
    assert shell.collect(load) == ([0], True) and tiers(shell, realm, 1) == ["c"]
    assert shell.core.state.dirty_bytes == [0, BLOCK, 0]
    shell.release(load)
    shell.check()


# ---- down


def test_a_drain_goes_down_directly() -> None:
    """Goal: what a stop writes takes no room in CPU memory; what is in use goes too, and is clean then."""
    shell, session, realm = in_hbm(4)
    shell.put(blind(shell, realm), realm, keys(2, 11))
    load = shell.load(session, realm, keys(1))
    assert shell.collect(load) == ([0], True)
    shell.drain()
    shell.drain()
    assert ways(shell) == [DOWN] * 4 + [(Tier.CPU, Tier.NVME)] * 2
    shell.finish_all()
    state = shell.core.state
    assert tiers(shell, realm, 4) == ["hn"] * 4 and not shell.core.undrained_bytes
    assert state.counts.demotions[(Tier.HBM, "drain")] == 4 and state.pools[Tier.CPU].used_bytes == 2 * BLOCK
    shell.release(load)
    shell.drain(on=False)
    shell.wait(31.0)
    assert not shell.moves and tiers(shell, realm, 4) == ["n"] * 4
    shell.check()


@pytest.mark.parametrize("why", ["off", "full", "suspended", "not admitted"])
def test_what_a_drain_cannot_bring_to_nvme_goes_to_cpu_memory(why: str) -> None:
    """Goal: a drain is no worse with direct moves than without. Method: NVMe has room for two blocks, or takes nothing."""
    shell, session, realm = in_hbm(2, nvme=4 * BLOCK, extent=4 * BLOCK, second_use=why == "not admitted")
    if why == "off":
        shell.set_direct(False)
    elif why == "suspended":
        shell.core.state.turns.suspended[Tier.NVME] = (shell.now + 60.0, "io_error")
    else:
        shell.drain()
        shell.finish_all()
        shell.drain(on=False)
        assert tiers(shell, realm, 2) == ["hn"] * 2
        if why == "full":
            for copy in (realm.index[key].nvme for key in keys(2)):
                assert copy is not None
                shell.core.state.pin(copy)
        fill(shell, session, realm, keys(2, 3))
    shell.drain()
    shell.finish_all()
    left = {"off": ["hcn"] * 2, "suspended": ["hc"] * 2}.get(why, ["hn", "hn", "hc", "hc"])
    assert tiers(shell, realm, len(left)) == left
    shell.check()


def crowded(shell: Shell, realm: Realm) -> None:
    """CPU memory is full of what clients still fill, so that nothing leaves it."""
    for first in (100, 200):
        assert shell.save(blind(shell, realm), realm, keys(2, first)).slots


SMALL = {"cpu": 4 * BLOCK, "extent": 4 * BLOCK}


def test_an_idle_block_skips_cpu_memory_where_that_has_no_room() -> None:
    shell, _, realm = in_hbm(3, **SMALL)
    crowded(shell, realm)
    shell.wait(30.0 + 1)
    assert ways(shell) == [DOWN] * 3
    shell.finish_all()
    assert tiers(shell, realm, 3) == ["n"] * 3
    assert shell.core.state.counts.demotions == {(Tier.HBM, "ttl"): 3}
    shell.check()


@pytest.mark.parametrize("free_target", [0.15, 0.0])
def test_an_idle_block_goes_to_cpu_memory_that_can_write_down(free_target: float) -> None:
    """Goal: what CPU memory can write down itself goes first, and the block from GPU memory follows into its place."""
    shell, _, realm = in_hbm(2, **SMALL, free_target=free_target)
    other = blind(shell, realm)
    shell.put(other, realm, keys(2, 11))
    shell.put(other, realm, keys(2, 13))
    shell.wait(31.0)
    assert DOWN not in ways(shell)
    shell.finish_all()
    shell.wait(2.0)
    shell.finish_all()
    assert tiers(shell, realm, 2) == ["c"] * 2
    assert not shell.core.state.counts.moves[(*DOWN, "ok")]
    shell.check()


@pytest.mark.parametrize("used", [False, True])
def test_an_idle_block_goes_to_cpu_memory_that_comes_back_soon(used: bool) -> None:
    """Goal: it waits for an extent of another realm that has to go for it, until its last reader or its last process lets go."""
    shell = Shell(config(hbm=1 << 20, **SMALL), release_late=True, into_hbm=True)  # type: ignore[arg-type]
    other = shell.realm(BLOCK, model="other")
    reader = blind(shell, other)
    fill(shell, reader, other, keys(4))
    shell.drain()
    shell.finish_all()
    shell.drain(on=False)
    load = shell.load(reader, other, keys(1))
    shell.collect(load)
    if not used:
        shell.release(load)
    shell.set_direct(True)
    realm = shell.realm(BLOCK)
    shell.wait(1.0)
    fill(shell, shell.attach(realm), realm, keys(2))
    shell.wait(31.0)
    pool = shell.core.state.pools[Tier.CPU]
    assert not shell.moves and bool(pool.leaving) is used and bool(pool.retiring) is not used
    if used:
        shell.release(load)
    shell.release_all()
    shell.wait(1.0)
    assert ways(shell) == [(Tier.HBM, Tier.CPU)] * 2
    shell.finish_all()
    shell.check()


def test_saves_get_room_in_gpu_memory_whose_blocks_can_only_go_to_nvme() -> None:
    """Goal: the watermark, and room that saves are refused for, go on while CPU memory is in use."""
    shell, session, realm = in_hbm(6, hbm=8 * BLOCK, **SMALL)
    crowded(shell, realm)
    fill(shell, session, realm, keys(2, 11))
    assert ways(shell) == [DOWN] * 2
    shell.finish_all()
    fill(shell, session, realm, keys(2, 13))
    assert tiers(shell, realm, 4, 11) == ["h"] * 4 and tiers(shell, realm, 2) == ["n"] * 2
    assert shell.core.state.counts.demotions[(Tier.HBM, "watermark")] == 2
    shell.check()


def test_an_extent_that_drains_is_emptied_to_nvme() -> None:
    """Goal: when its engine has gone, GPU memory comes back although CPU memory has no room."""
    shell, _, realm = in_hbm(3, **SMALL)
    crowded(shell, realm)
    shell.core.leave_devices(shell.now, realm)
    shell.run()
    shell.finish_all()
    assert tiers(shell, realm, 3) == ["n"] * 3 and not shell.core.state.pools[Tier.HBM].reserved_bytes
    shell.check()


def test_gpu_memory_comes_back_although_cpu_memory_never_has_room() -> None:
    """Goal: a block that cannot go anywhere does not keep the memory of a GPU whose engine has gone.

    Found by random histories: a reserve of its own tenant kept all of CPU memory, in which nothing had to be written down.
    """
    limits = {"t": Limits((None, None, None), (0, 3 * BLOCK, 0), tenant_class=TenantClass.PREMIUM)}
    shell, _, realm = in_hbm(1, limits=limits, **SMALL)
    shell.set_direct(False)
    other = shell.realm(BLOCK, model="other")
    session = blind(shell, other)
    fill(shell, session, other, keys(4))
    shell.drain()
    shell.finish_all()
    shell.drain(on=False)
    assert tiers(shell, other, 4) == ["cn"] * 4 and tiers(shell, realm, 1) == ["h"]
    load = shell.load(session, other, keys(1))
    shell.collect(load)
    shell.core.leave_devices(shell.now, realm)
    shell.run()
    shell.wait(1.0)
    assert tiers(shell, realm, 1) == ["h"], "it waits for the reader"
    shell.release(load)
    assert tiers(shell, realm, 1) == [""] and not shell.core.state.pools[Tier.HBM].reserved_bytes
    shell.check()


def test_a_cut_quota_is_met_by_way_of_nvme() -> None:
    shell, _, realm = in_hbm(3, **SMALL)
    crowded(shell, realm)
    shell.core.set_limits(shell.now, "t", Limits((BLOCK, None, None)))
    shell.wait(1.0)
    assert ways(shell) == [DOWN] * 2
    shell.finish_all()
    assert tiers(shell, realm, 3) == ["n", "n", "h"]
    shell.check()


def test_what_nvme_does_not_take_stays() -> None:
    """Goal: NVMe's rules hold for what comes from GPU memory: admission, what a drive costs, and a pause after it failed."""
    shell, _, realm = in_hbm(4, write_budget_bytes=1024 * KIB, **SMALL)
    crowded(shell, realm)
    left = shell.core.state.admission.left_bytes(shell.now)
    shell.wait(31.0)
    assert shell.core.state.admission.left_bytes(shell.now) < left
    shell.finish_all(Result.IO_ERROR)
    assert tiers(shell, realm, 4) == ["h"] * 4 and not shell.core.state.turns.takes_writes(Tier.NVME, shell.now)
    shell.wait(4.0)
    assert not shell.moves
    shell.wait(2.0)
    assert ways(shell) == [DOWN] * 4
    shell.finish_all()
    shell.wait(1.0)
    assert tiers(shell, realm, 4) == ["n"] * 4
    shell.check()


def test_what_is_not_admitted_stays() -> None:
    shell, _, realm = in_hbm(3, write_budget_bytes=1, **SMALL)
    shell.core.state.admission.spend(shell.now, realm.tenant, 1 << 20)
    crowded(shell, realm)
    shell.wait(31.0)
    assert not shell.moves and tiers(shell, realm, 3) == ["h"] * 3
    shell.check()


def test_what_cannot_be_read_from_gpu_memory_is_no_fault_of_nvme() -> None:
    """Goal: the block goes, what else there is on NVMe stays, and NVMe is written on."""
    shell, _, realm = in_hbm(2)
    shell.drain()
    first, second = sorted(shell.moves)
    shell.finish(first)
    shell.finish(second, Result.CORRUPT)
    assert sorted(tiers(shell, realm, 2)) == ["", "hn"] and not shell.core.state.turns.suspended
    assert not any(e.draining for e in shell.core.state.pools[Tier.NVME].extents.values())
    shell.check()


def test_two_blocks_do_not_push_each_other_out_for_ever() -> None:
    """Goal: what NVMe has no room for waits a while. Method: room for one, whose older block is of a tenant before whom the other
    gives way.

    Found by random histories: each block went to NVMe in place of the other as soon as that had been written.
    """
    shell = Shell(config(hbm=1 << 20, nvme=4 * BLOCK, **SMALL), into_hbm=True)  # type: ignore[arg-type]
    shell.set_direct(True)
    for tenant in "ab":
        assert shell.put_hbm(shell.realm(3 * BLOCK, tenant=tenant), key_of(1))
        shell.wait(1.0)
    crowded(shell, shell.realm(BLOCK))
    shell.core.set_limits(shell.now, "b", Limits(tenant_class=TenantClass.BASIC))
    shell.drain()
    assert shell.finish_all(limit=20)
    shell.check()


def test_what_is_evicted_on_its_way_down_leaves_nothing() -> None:
    shell, _, realm = in_hbm(2)
    shell.drain()
    assert ways(shell) == [DOWN] * 2
    shell.evict(realm, keys(2))
    shell.finish_all()
    assert tiers(shell, realm, 2) == ["", ""] and not any(shell.core.state.pinned_bytes)
    shell.check()


@pytest.mark.parametrize("first", [DOWN, (Tier.HBM, Tier.CPU)])
def test_a_reader_that_needs_cpu_memory_meets_a_block_on_its_way_down(first: tuple[Tier, Tier]) -> None:
    """Goal: it is promoted from GPU memory at the same time, and whichever ends first, nothing is written twice or paused."""
    shell, _, realm = in_hbm(1)
    shell.drain()
    load = shell.load(blind(shell, realm), realm, keys(1))
    moves = {(move.src.tier, move.dst.tier): move_id for move_id, (move, _) in shell.moves.items()}
    assert set(moves) == {DOWN, (Tier.HBM, Tier.CPU)}
    shell.finish(moves.pop(first))
    shell.check()
    if first is not DOWN:
        read(shell, load)
        assert ways(shell) == [DOWN] and not shell.core.state.turns.paused
    shell.finish_all()
    if first is DOWN:
        read(shell, load)
    assert tiers(shell, realm, 1) == ["hcn"] and not shell.moves and shell.core.state.dirty_bytes[:2] == [0, 0]
    shell.check()
