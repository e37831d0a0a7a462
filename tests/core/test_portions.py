"""Saves of a request that comes in portions: what they tell of its other blocks, and what the policy makes of it."""

from __future__ import annotations

import pytest

from kvtierd.core.realm import Realm
from kvtierd.core.saves import Request
from kvtierd.core.tickets import GRANTED, Session
from kvtierd.model import Tier
from tests.core.shell import Shell
from tests.core.test_admission import on_disk, put, sink, small
from tests.core.test_load import keys
from tests.core.test_order import flat, held


def portions(shell: Shell, realm: Realm, session: Session, numbers: range, each: int) -> None:
    """Save a chain in portions, the last of which names all before it."""
    for first in range(numbers.start, numbers.stop, each):
        stop = min(first + each, numbers.stop)
        before = keys(*range(first)) if stop == numbers.stop else []
        grant = shell.put(session, realm, keys(*range(first, stop)), Request(before, 0))
        assert set(grant.outcomes) == {GRANTED}
        shell.now += 2.0


def leavers(shell: Shell, realm: Realm, session: Session, numbers: range) -> list[int]:
    """In which order blocks go, when others need their room one by one."""
    order: list[int] = []
    for other in range(1000, 1000 + len(numbers)):
        shell.now += 1.0
        before = held(shell, realm, *numbers)
        shell.put(session, realm, keys(other))
        order += [n for n in before if n not in held(shell, realm, *numbers)]
    return order


def test_leaves_go_before_roots_when_a_request_is_saved_in_portions() -> None:
    """Goal: a prefix loses its end first, however it was saved. Method: six blocks in three saves fill the tier; others come."""
    shell, realm, session = flat(6)
    portions(shell, realm, session, range(6), 2)
    assert leavers(shell, realm, session, range(6)) == [5, 4, 3, 2, 1, 0]
    shell.check()


def test_the_order_holds_when_an_earlier_portion_is_still_being_copied() -> None:
    """Goal: the last save may be asked for before the one before it was committed. Method: commit both after the last grant."""
    shell, realm, session = flat(6)
    first = shell.save(session, realm, keys(0, 1, 2))
    last = shell.save(session, realm, keys(3, 4, 5), Request(keys(0, 1, 2), 0))
    shell.now += 1.0
    shell.commit(first.ticket_id)
    shell.now += 1.0
    shell.commit(last.ticket_id)
    assert leavers(shell, realm, session, range(6)) == [5, 4, 3, 2, 1, 0]
    shell.check()


def test_blocks_before_that_are_gone_cost_nothing_and_get_nothing() -> None:
    """Goal: what a save names before its keys is neither granted nor needed. Method: name blocks that are held nowhere."""
    shell, realm, session = flat(6)
    grant = shell.put(session, realm, keys(3, 4), Request(keys(0, 1, 2), 3))
    assert grant.outcomes == [GRANTED, GRANTED] and grant.held == []
    assert held(shell, realm, *range(6)) == [3, 4]
    shell.check()


def test_a_further_turn_is_one_although_its_save_names_only_what_is_new() -> None:
    """Goal: with a turn bonus the new blocks of a conversation that goes on get it too, and a first turn's do not.

    Method: two requests save two blocks each; one says that it has matched two. The other's leave first, though they are younger.
    """
    shell, realm, session = flat(4, turn_bonus_s=60.0)
    shell.put(session, realm, keys(0, 1), Request(matched=2))
    shell.now += 5.0
    shell.put(session, realm, keys(2, 3), Request(matched=0))
    assert leavers(shell, realm, session, range(4))[:2] == [3, 2]
    shell.check()


@pytest.mark.parametrize("matched", [2, 0])
def test_what_a_request_found_is_a_second_use_and_what_it_saved_itself_is_not(matched: int) -> None:
    """Goal: of the blocks before a save, those that the request came to count as used again, however slow it was.

    Method: NVMe is full; a chain of four is saved in two portions, ten seconds apart, by a request that found half of it or none.
    """
    shell, realm, session = small(2, cpu_blocks=16, second_use=True)
    put(shell, session, realm, 100, 101)
    put(shell, session, realm, 1, 2)
    assert on_disk(shell) == {100, 101}
    shell.now += 10.0
    shell.put(session, realm, keys(3, 4), Request(keys(1, 2), matched))
    shell.evict(realm, keys(100, 101), Tier.CPU)
    sink(shell)
    assert on_disk(shell) == ({1, 2} if matched else {100, 101}), "new blocks are a first use in any case"
    shell.check()
