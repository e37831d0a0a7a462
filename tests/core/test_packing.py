"""Goal: what a reserve keeps never keeps others from memory that is free, wherever in the tier it lies.

Method: a premium tenant whose few blocks are scattered over all extents, and no tier below; somebody else saves. The
shell has real contents: a load sees what was saved, and nobody reads a slot that is written.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtierd.core.limits import Limits, TenantClass
from kvtierd.core.saves import BUSY, HELD
from kvtierd.core.slots import LEAVING_PAUSE_S
from kvtierd.core.tickets import GRANTED
from kvtierd.model import Result, Tier, slot_extent
from tests.core.shell import Shell, config
from tests.core.test_load import keys

PAGE = 4096
SLOTS = 8
"""Slots of an extent."""
EXTENTS = 4
RESERVE = 8 * PAGE
KEPT = (0, 5, 9, 12, 17, 23, 26, 31)
"""Two blocks an extent."""
SMALL = Limits(reserve_bytes=(0, RESERVE, 0), tenant_class=TenantClass.PREMIUM)
LARGE = Limits(reserve_bytes=(0, 2 * RESERVE, 0), tenant_class=TenantClass.PREMIUM)


class Scattered:
    """A full tier of which a premium tenant has kept some blocks, and another tenant that has nothing yet."""

    def __init__(self, shards: int = 1, kept: tuple[int, ...] = KEPT) -> None:
        size = shards * SLOTS * EXTENTS * PAGE
        limits = {"premium": SMALL if shards == 1 else LARGE}
        self.shell = shell = Shell(config(cpu=size, nvme=0, extent=SLOTS * PAGE, max_ticket_share=1.0), limits)
        self.kept = kept
        self.owner = shell.realm(*[PAGE] * shards, tenant="premium")
        self.other = shell.realm(7 * PAGE, tenant="other")
        self.mine, self.theirs = shell.attach(self.owner), shell.attach(self.other)
        everything = range(SLOTS * EXTENTS)
        assert shell.put(self.mine, self.owner, keys(*everything)).outcomes == [GRANTED] * len(everything)
        shell.evict(self.owner, keys(*(set(everything) - set(kept))))
        assert len({slot_extent(s) for s in self.slots()}) == shards * EXTENTS

    def slots(self) -> list[int]:
        """Where the premium tenant's blocks are."""
        copies = [block.cpu for block in self.owner.index.values()]
        return [slot for copy in copies if copy is not None for slot in copy.all_slots()]

    def save(self, number: int) -> int:
        """The other tenant asks for one block. Returns the outcome."""
        self.shell.now += LEAVING_PAUSE_S
        return self.shell.put(self.theirs, self.other, keys(number)).outcomes[0]

    def fill(self, first: int, count: int) -> int:
        """The other tenant saves so many more, and moves end. Returns how many blocks it has then."""
        for number in range(first, first + count):
            while self.save(number) == BUSY:
                assert self.shell.finish_all(), "a save that waits for nothing"
            self.shell.finish_all()
        return len(self.other.index)

    def check(self) -> None:
        """The premium tenant has all it kept."""
        found = self.shell.get(self.mine, self.owner, keys(*self.kept), each=True)
        assert len(found) == len(self.kept)
        self.shell.check()


@pytest.mark.parametrize("shards", [1, 2])
def test_a_scattered_reserve_moves_together(shards: int) -> None:
    """Goal: others get all but the extents that the reserve fills, and the reserve loses nothing."""
    run = Scattered(shards)
    assert run.save(100) == BUSY
    assert [(m.src.tier, m.dst.tier) for m, _ in run.shell.moves.values()] == 2 * [(Tier.CPU, Tier.CPU)]
    assert run.fill(100, 10) == shards * (EXTENTS - 1)
    assert len({slot_extent(s) for s in run.slots()}) == shards
    run.check()


def test_what_is_beyond_the_reserve_moves_together_too() -> None:
    """Goal: nothing of it goes for that. Method: ten blocks in four extents, of which the reserve keeps eight."""
    run = Scattered(kept=(0, 1, 2, 8, 9, 10, 16, 17, 18, 24))
    assert run.fill(100, 10) == EXTENTS - 2
    assert len({slot_extent(s) for s in run.slots()}) == 2
    run.check()


@pytest.mark.parametrize("tenant_class", [TenantClass.BASIC, TenantClass.STANDARD])
def test_a_reserve_costs_its_owner_nothing_of_what_is_beyond_it(tenant_class: TenantClass) -> None:
    """Goal: who has a reserve and uses more than that loses no more of it than a tenant without one.

    Method: two tenants hold half of the tier each; the owner of a small reserve uses its blocks all the time, the other one saves.
    """
    limits = {"premium": SMALL, "other": Limits(tenant_class=tenant_class)}
    shell = Shell(config(cpu=8 * SLOTS * PAGE, nvme=0, extent=SLOTS * PAGE, max_ticket_share=1.0), limits)
    premium, other = (shell.realm(PAGE, tenant=name) for name in limits)
    mine, theirs = shell.attach(premium), shell.attach(other)
    shell.put(theirs, other, keys(*range(1000, 1000 + 4 * SLOTS)))
    shell.now += 1.0
    shell.put(mine, premium, keys(*range(4 * SLOTS)))
    for number in range(60):
        shell.now += 0.5
        shell.get(mine, premium, keys(*range(4 * SLOTS)), each=True)
        shell.put(theirs, other, keys(2000 + number))
        shell.finish_all()
    assert len(premium.index) == 4 * SLOTS
    shell.check()


def test_copies_in_use_stay_where_they_are() -> None:
    """Goal: what was being read before stays, what is read meanwhile moves later, and what is evicted meanwhile is gone."""
    run = Scattered()
    shell = run.shell
    early = shell.load(run.mine, run.owner, keys(*KEPT[::2]), each=True)
    shell.collect(early)
    assert run.save(100) == BUSY and not shell.moves, "every extent has a block in use"
    shell.release(early, [0])
    assert run.save(100) == BUSY and len(shell.moves) == 2, "one has none any more"
    late = shell.load(run.mine, run.owner, keys(KEPT[0]))
    shell.collect(late)
    shell.evict(run.owner, keys(KEPT[1]))
    shell.finish_all()
    assert run.save(100) == BUSY and not shell.moves
    shell.release(late)
    shell.finish_all()
    assert run.save(100) == GRANTED
    shell.release(early)
    assert shell.get(run.mine, run.owner, keys(*KEPT), each=True) == [0, 2, 3, 4, 5, 6, 7]
    shell.check()


@pytest.mark.parametrize("result", [Result.OK, Result.IO_ERROR])
def test_its_owner_waits_for_room_in_its_quota(result: Result) -> None:
    """Goal: a save is told to come back while its tenant's copies move, and nothing else of the tenant can go; not after it.

    Method: the quota is what the reserve keeps, and all that does not move is being loaded.
    """
    run = Scattered()
    run.shell.core.set_limits(run.shell.now, "premium", replace(SMALL, quota_bytes=(None, RESERVE, None)))
    assert not run.shell.core.is_packing
    run.save(100)
    moving = {move.src.block.key for move, _ in run.shell.moves.values()}
    assert run.shell.core.is_packing and len(moving) == 2
    others = [key for key in run.owner.index if key not in moving]
    ticket = run.shell.load(run.mine, run.owner, others, each=True)
    assert run.shell.put(run.mine, run.owner, keys(200)).outcomes == [BUSY]
    run.shell.finish_all(result)
    assert not run.shell.core.is_packing
    assert run.shell.put(run.mine, run.owner, keys(200)).outcomes == [GRANTED], "one of those that moved goes"
    run.shell.release(ticket)
    run.shell.check()


def test_a_move_that_fails_loses_nothing() -> None:
    """Method: it fails, so the extent stays; the next time it works."""
    run = Scattered()
    shell = run.shell
    assert run.save(100) == BUSY
    shell.finish(min(shell.moves), Result.IO_ERROR)
    shell.finish_all()
    assert not shell.core.state.pools[Tier.CPU].leaving
    run.check()
    assert run.fill(100, 1) == 1
    run.check()


def test_an_extent_stays_when_its_owner_needs_the_room() -> None:
    """Method: copies move one by one, and meanwhile their owner, within its reserve, takes the slots that they were to move to."""
    limits = {"premium": Limits(reserve_bytes=(0, 30 * PAGE, 0), tenant_class=TenantClass.PREMIUM)}
    shell = Shell(config(cpu=EXTENTS * RESERVE, nvme=0, extent=RESERVE, max_ticket_share=1.0, max_demote_bytes=1), limits)
    scattered, whole = (shell.realm(PAGE, tenant="premium", model=name) for name in ("scattered", "whole"))
    session = shell.attach(scattered)
    shell.put(session, scattered, keys(*range(2 * SLOTS)))
    shell.put(session, whole, keys(*range(2 * SLOTS)))
    shell.evict(scattered, keys(*range(5, SLOTS), *range(SLOTS + 3, 2 * SLOTS)))
    shell.now += 1.0
    other = shell.realm(7 * PAGE, tenant="other")
    assert shell.put(shell.attach(other), other, keys(100)).outcomes == [BUSY]
    assert len(shell.moves) == 1
    assert shell.put(session, scattered, keys(*range(50, 55))).outcomes == 4 * [GRANTED] + [BUSY]
    shell.finish_all()
    assert len(scattered.index) == 5 + 3 + 4 and len(whole.index) == 2 * SLOTS, "nothing is lost"
    assert shell.put(session, scattered, keys(*range(50, 55))).outcomes == 4 * [HELD] + [GRANTED], "there is room again"
    shell.check()


def test_extents_beyond_a_reserve_go_for_who_has_nothing() -> None:
    """Goal: a tenant with many namespaces, each in an extent of its own that no other can use, keeps as much memory as its reserve.

    Method: one block of each of four namespaces fills the tier with a reserve of one extent.
    """
    shell = Shell(config(cpu=EXTENTS * RESERVE, nvme=0, extent=RESERVE), {"premium": SMALL})
    realms = [shell.realm(PAGE, tenant="premium", model=str(i)) for i in range(EXTENTS)]
    for i, realm in enumerate(realms):
        shell.now += 1.0
        assert shell.put(shell.attach(realm), realm, keys(i)).outcomes == [GRANTED]
    other = shell.realm(7 * PAGE, tenant="other")
    session = shell.attach(other)
    assert shell.put(session, other, keys(100)).outcomes == [BUSY]
    assert shell.put(session, other, keys(100)).outcomes == [GRANTED]
    assert [len(realm.index) for realm in realms] == [0, 1, 1, 1], "the coldest went"
    shell.now += LEAVING_PAUSE_S
    assert shell.put(session, other, keys(101)).outcomes == [GRANTED], "who has something replaces that"
    assert [len(realm.index) for realm in realms] == [0, 1, 1, 1]
    shell.check()
