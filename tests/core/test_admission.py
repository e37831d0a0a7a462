"""What NVMe takes: room, second use, the write budget, and that a prefix is taken whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from kvtierd.core import admission
from kvtierd.core.admission import Admission, Prefix
from kvtierd.core.block import Block
from kvtierd.core.realm import Realm
from kvtierd.core.saves import HELD
from kvtierd.core.tickets import GRANTED, Session
from kvtierd.model import Tier
from tests.core.shell import KIB, Shell, config, key_of
from tests.core.test_load import keys

DAY_S = 86_400.0
SLOT = 8 * KIB
"""A block of one page with its header page."""


def small(nvme_blocks: int, cpu_blocks: int = 8, **options: Any) -> tuple[Shell, Realm, Session]:
    """Small tiers."""
    options = {"max_ticket_share": 1.0} | options
    shell = Shell(config(cpu=cpu_blocks * 4 * KIB, nvme=nvme_blocks * SLOT, extent=nvme_blocks * SLOT, **options))
    realm = shell.realm(4096)
    return shell, realm, shell.attach(realm)


def put(shell: Shell, session: Session, realm: Realm, *numbers: int) -> None:
    """Save a chain and write down what NVMe takes."""
    assert set(shell.put(session, realm, keys(*numbers)).outcomes) <= {GRANTED, HELD}
    sink(shell)


def get(shell: Shell, session: Session, realm: Realm, *numbers: int) -> None:
    """Load a chain that is held, and write down what NVMe takes."""
    assert shell.get(session, realm, keys(*numbers)) == list(range(len(numbers)))
    sink(shell)


def sink(shell: Shell) -> None:
    """Write down what NVMe takes."""
    shell.drain()
    shell.finish_all()
    shell.drain(on=False)


def on_disk(shell: Shell) -> set[int]:
    """Blocks on NVMe."""
    return {int.from_bytes(key, "big") for _, key, _ in shell.disk}


def gone(shell: Shell) -> int:
    """Copies that were forgotten as not admitted."""
    return shell.core.state.counts.evictions[(Tier.CPU, "not_admitted")]


def test_everything_is_written_while_there_is_room_and_then_only_a_second_use() -> None:
    """Goal: with second-use admission a full NVMe tier takes no more first uses; a request that finds them makes them a second.

    Method: fill NVMe, save more, look; load some of that, save others so that it has to go, look again.
    """
    shell, realm, session = small(6, second_use=True)
    put(shell, session, realm, *range(6))
    for number in (10, 11, 12):
        shell.now += 1.0
        put(shell, session, realm, number)
    assert on_disk(shell) == set(range(6)), "there was room for the first six"
    assert shell.core.state.counts.not_admitted == {}, "refused is not forgotten: memory has room"
    shell.now += 10.0
    get(shell, session, realm, 11)
    for number in range(20, 32):
        shell.now += 1.0
        put(shell, session, realm, number)
    assert 11 in on_disk(shell) and not on_disk(shell) & {10, 12, *range(20, 32)}
    assert shell.core.state.counts.not_admitted == {"no_room": gone(shell)} and gone(shell) >= 6
    shell.check()


def test_a_prefix_is_taken_whole_or_not_at_all() -> None:
    """Goal: where a request's blocks do not all fit, none is written: its tail without its head would be of no use.

    Method: room for four, a request of six; then a request of four.
    """
    shell, realm, session = small(4, second_use=True)
    put(shell, session, realm, *range(6))
    assert on_disk(shell) == set()
    put(shell, session, realm, *range(10, 14))
    assert on_disk(shell) == {10, 11, 12, 13}


@pytest.mark.parametrize(("pause_s", "taken"), [(50.0, True), (150.0, False)])
@pytest.mark.parametrize("how", ["load", "held", "forgotten"])
def test_a_second_use_counts_within_its_window(how: str, pause_s: float, taken: bool) -> None:
    """Goal: a load, a save that finds the block, and a save of a block that was forgotten are second uses, within the window.

    Method: a window of 100 s; the second use after 50 or 150 s.
    """
    shell, realm, session = small(2, second_use=True, second_use_window_s=100.0)
    put(shell, session, realm, 1, 2)
    shell.now = 10.0
    put(shell, session, realm, 5)
    if how == "forgotten":
        for number in range(20, 28):
            put(shell, session, realm, number)
        assert not shell.tiers(realm, key_of(5))
    shell.now += pause_s
    if how == "load":
        get(shell, session, realm, 5)
    else:
        put(shell, session, realm, 5)
    for number in range(30, 38):
        shell.now += 1.0
        put(shell, session, realm, number)
    assert (5 in on_disk(shell)) is taken


def test_only_the_beginning_that_was_seen_before_is_a_second_use() -> None:
    """Goal: of a request that begins as one that was forgotten, the common beginning is admitted and the rest is not.

    Method: forget 1 2 3; save 1 2 8 9.
    """
    shell, realm, session = small(2, second_use=True)
    put(shell, session, realm, 100, 101)
    shell.now = 1.0
    put(shell, session, realm, 1, 2, 3)
    for number in range(20, 30):
        shell.now += 1.0
        put(shell, session, realm, number)
    assert not [n for n in (1, 2, 3) if shell.tiers(realm, key_of(n))]
    put(shell, session, realm, 1, 2, 8, 9)
    assert on_disk(shell) == {1, 2}


def test_a_request_in_portions_is_no_second_use() -> None:
    """Goal: saves that name the request's own earlier blocks again do not make them a second use. Method: a chain in three."""
    shell, realm, session = small(2, cpu_blocks=16, second_use=True)
    put(shell, session, realm, 100, 101)
    for count in (2, 4, 6):
        shell.now += 0.3
        put(shell, session, realm, *range(1, count + 1))
    assert on_disk(shell) == {100, 101}


def test_no_save_is_refused_for_what_is_not_admitted() -> None:
    """Goal: memory that is full of refused blocks takes new ones at once.

    Method: NVMe is full; memory is filled ten times over, in calls as large as the tier, with and without room kept free.
    """
    for free_target in (0.0, 0.15):
        shell, realm, session = small(2, cpu_blocks=8, second_use=True, free_target=free_target)
        put(shell, session, realm, 0, 1)
        for first in range(100, 180, 8):
            shell.now += 5.0
            assert set(shell.put(session, realm, keys(*range(first, first + 8))).outcomes) == {GRANTED}
            shell.finish_all()
        assert on_disk(shell) == {0, 1} and gone(shell) >= 70
        shell.check()


def test_a_ttl_forgets_what_is_not_admitted() -> None:
    """Goal: a refused block leaves memory at its TTL, counted as not admitted. Method: only time passes."""
    shell, realm, session = small(1, second_use=True)
    put(shell, session, realm, 1)
    shell.now = 1.0
    put(shell, session, realm, 2)
    shell.wait(650.0)
    shell.finish_all()
    assert not shell.tiers(realm, key_of(2)) and shell.tiers(realm, key_of(1)) == "n"
    assert gone(shell) == 1 and shell.core.state.counts.evictions[(Tier.CPU, "ttl")] == 1
    shell.check()


def test_a_drain_leaves_what_is_refused() -> None:
    """Goal: a drain ends although NVMe takes nothing; what it refused can still be read. Method: drain, also with a reader."""
    shell, realm, session = small(1, second_use=True, free_target=0.0)
    put(shell, session, realm, 1, 2, 3)
    ticket = shell.load(session, realm, keys(1), each=True)
    shell.collect(ticket)
    shell.drain()
    shell.finish_all()
    shell.release(ticket)
    shell.finish_all()
    assert shell.core.undrained_bytes == 0
    assert [shell.tiers(realm, key_of(n)) for n in (2, 3)] == ["c", "c"]
    shell.check()


def test_what_nvme_forgot_is_decided_anew() -> None:
    """Goal: a block whose copy on NVMe went for others is not written again on the strength of its former admission.

    Method: 1 was admitted while there was room; second uses of others push it out of NVMe while memory still has it.
    """
    shell, realm, session = small(2, cpu_blocks=16, second_use=True)
    put(shell, session, realm, 1)
    put(shell, session, realm, 2)
    for number in (5, 6):
        shell.now += 10.0
        put(shell, session, realm, number)
        shell.now += 10.0
        get(shell, session, realm, number)
    assert on_disk(shell) == {5, 6} and shell.tiers(realm, key_of(1)) == "c"
    shell.wait(700.0)
    shell.finish_all()
    assert on_disk(shell) == {5, 6} and shell.core.state.counts.moves[(Tier.CPU, Tier.NVME, "ok")] == 4
    assert not shell.tiers(realm, key_of(1))


# ---- budget


def test_budget_is_spent_refills_and_gives_credit_for_a_second_use() -> None:
    """Goal: what is written is taken out of the budget; when it is used up first uses are refused, second uses still written;
    time fills it up again.

    Method: a budget of four blocks a day.
    """
    shell, realm, session = small(64, cpu_blocks=32, write_budget_bytes=4 * SLOT)
    core = shell.core
    put(shell, session, realm, *range(3))
    assert core.snapshot(shell.now).nvme_budget_left_bytes == SLOT
    shell.now = 1.0
    put(shell, session, realm, 3, 4)
    assert on_disk(shell) == {0, 1, 2, 3, 4}, "something was left, so the whole prefix goes"
    assert core.state.admission.left_bytes(shell.now) == pytest.approx(-SLOT, abs=2)
    shell.now = 2.0
    put(shell, session, realm, 7, 8)
    assert not on_disk(shell) & {7, 8}
    shell.now = 10.0
    get(shell, session, realm, 7)
    assert 7 in on_disk(shell) and 8 not in on_disk(shell)
    shell.evict(realm, keys(8))
    shell.now += DAY_S
    assert core.state.admission.left_bytes(shell.now) == pytest.approx(2 * SLOT, rel=0.01)
    put(shell, session, realm, 9)
    assert 9 in on_disk(shell)
    shell.now += 10 * DAY_S
    assert core.snapshot(shell.now).nvme_budget_left_bytes == 4 * SLOT, "no more than a day's"
    shell.check()


def test_credit_ends_at_a_day_s_budget() -> None:
    """Goal: second uses cannot be written on credit without end, so a long run never writes more than its budget.

    Method: second uses only, far more than two days' worth, within a minute; then a day later.
    """
    shell, realm, session = small(64, cpu_blocks=64, write_budget_bytes=4 * SLOT)
    for number in range(30):
        shell.now += 1.0
        put(shell, session, realm, number)
        get(shell, session, realm, number)
    written = shell.core.state.counts.moves[(Tier.CPU, Tier.NVME, "ok")]
    assert 8 <= written <= 10
    for number in range(20, 30):
        shell.evict(realm, keys(number))
        assert shell.tiers(realm, key_of(number)) == ""
    shell.now += DAY_S
    for number in range(100, 130):
        shell.now += 1.0
        put(shell, session, realm, number)
        get(shell, session, realm, number)
    assert shell.core.state.counts.moves[(Tier.CPU, Tier.NVME, "ok")] - written <= 6


def test_without_second_use_a_full_tier_refuses_nothing() -> None:
    """Goal: a budget alone says nothing about room. Method: a full NVMe tier and budget enough."""
    shell, realm, session = small(4, write_budget_bytes=1000 * SLOT)
    for number in range(12):
        shell.now += 1.0
        put(shell, session, realm, number)
    assert gone(shell) == 0 and len(on_disk(shell)) == 4 and 0 not in on_disk(shell)


def test_restored_budget_is_bounded_and_goes_on_filling() -> None:
    """Goal: a budget from before a restart is taken over as it is, within what may be. Method: restore several."""
    for left, later in ((500.0, 600), (5000.0, 1000), (-5000.0, -900), (-1000.0, -900)):
        budget = Admission(second_use=False, window_s=1.0, budget_bytes=1000)
        budget.restore(-DAY_S / 20, left)
        assert budget.left_bytes(DAY_S / 20) == pytest.approx(later, abs=1)
    assert Admission(second_use=True, window_s=1.0, budget_bytes=0).left_bytes(1e9) == 0


def test_memory_of_what_was_forgotten_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: only the latest forgotten blocks are remembered. Method: a bound of 100, a thousand blocks."""
    monkeypatch.setattr(admission, "MAX_SEEN", 100)
    shell, realm, _ = small(1)
    policy = Admission(second_use=True, window_s=1e9, budget_bytes=0)
    blocks = [Block(key_of(n), realm, float(n)) for n in range(1000)]
    for block in blocks:
        policy.forgotten(block)
    assert len(policy._seen) == 100
    assert [policy.saved_again(1e4, b) for b in (blocks[899], blocks[900], blocks[999])] == [False, True, True]
    assert not policy.saved_again(1e4, blocks[999]), "it is in use again"
    del shell


def test_a_decision_stands() -> None:
    """Goal: all blocks of a prefix get the answer of the first, whatever changes meanwhile. Method: room that goes and comes."""
    shell, realm, _ = small(1)
    policy = Admission(second_use=True, window_s=1.0, budget_bytes=0)
    prefix = Prefix(again=False)
    prefix.size_bytes = 30
    blocks = [Block(key_of(n), realm, 0.0) for n in range(3)]
    for block in blocks:
        block.prefix = prefix
    assert policy.refusal(0.0, blocks[2], 10, 30) == ""
    assert policy.refusal(0.0, blocks[1], 10, 0) == ""
    other = Block(key_of(9), realm, 0.0)
    assert policy.refusal(0.0, other, 10, 9) == "no_room" == policy.refusal(0.0, other, 10, 1000)
    del shell
