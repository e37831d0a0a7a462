"""Goal: what a request asks for beyond being saved (pin, ttl) is done for all its blocks, also those that are held already; events
tell of each block once and take it back when it is not to be counted on; a reset lets go of what no worker reads.

Method: as in ``test_saves``, with stand-ins for the daemon's client and the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import events as events_module
from kvtierd.connectors.vllm import logs
from kvtierd.connectors.vllm import remembered as remembered_module
from kvtierd.connectors.vllm.events import Change, Events
from kvtierd.connectors.vllm.remembered import Remembered
from kvtierd.errors import DaemonUnavailableError
from tests.connectors.parts import CHUNK, request, state
from tests.connectors.test_saves import Set

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


@pytest.fixture
def made() -> Iterator[Callable[..., Set]]:
    sets: list[Set] = []

    def make(**more: Any) -> Set:
        sets.append(Set(**{"max_held_fraction": 0.9, "blocks": 200} | more))
        return sets[-1]

    yield make
    for one in sets:
        one.nothing_is_left()


def save(one: Set, name: str, **settings: Any) -> Any:
    """A request's way to the end of its saves."""
    mine = state(request(name), **settings)
    one.collect(one=mine)
    one.parts.calls.run()
    one.copied(one.saves.jobs())
    one.parts.calls.run()
    one.saves.jobs()
    return mine


def pinned(one: Set) -> int:
    return sum(count for count, _ in one.client.pins)


# ---- pins


def test_pins_of_what_is_saved(made: Callable[..., Set]) -> None:
    one = made()
    save(one, "p", pin_s=60.0)
    assert pinned(one) == 5


def test_pins_of_what_is_held_already(made: Callable[..., Set]) -> None:
    one = made()
    one.client.outcome = lambda key: "HELD"
    save(one, "p", pin_s=60.0)
    assert pinned(one) == 5


def test_pins_of_what_was_held_a_moment_ago(made: Callable[..., Set]) -> None:
    one = made()
    save(one, "a")
    save(one, "p", pin_s=60.0)
    assert pinned(one) == 5


@pytest.mark.parametrize("settings", [{}, {"skip_save": True}])
def test_pins_of_what_is_loaded(settings: dict[str, Any], made: Callable[..., Set]) -> None:
    one = made()
    one.saves.loaded(state(request("p"), pin_s=60.0, **settings), 1, 5)
    one.parts.calls.run()
    assert pinned(one) == 4


def test_windows_of_what_is_loaded(made: Callable[..., Set]) -> None:
    """Only what a hit needs was loaded, and only that is pinned."""
    one = made(windows=(0, 40))
    one.saves.loaded(state(request("p"), pin_s=60.0), 0, 5)
    one.parts.calls.run()
    assert pinned(one) == 5 + 2


def test_pins_when_a_block_was_lost(made: Callable[..., Set]) -> None:
    one = made()
    mine = state(request("p"), pin_s=60.0)
    one.collect(one=mine)
    one.parts.calls.run()
    for reservation in one.client.reservations:
        reservation.commit = lambda indexes, timeout_s: len(indexes) - 1  # type: ignore[method-assign]
    one.copied(one.saves.jobs())
    one.parts.calls.run()
    assert pinned(one) == 5
    one.saves.jobs()
    assert one.parts.counts["pin_failures"] == 0


def test_not_one_pin_a_request(made: Callable[..., Set]) -> None:
    """What all pins together may hold is limited, and a block counts once for each."""
    one = made()
    for name in "abc":
        save(one, name, pin_s=60.0)
    assert pinned(one) == 5
    save(one, "longer", pin_s=600.0)
    assert pinned(one) == 10
    one.saves.forget()
    save(one, "after a restart of the daemon", pin_s=60.0)
    assert pinned(one) == 15


@pytest.mark.parametrize("error", [None, DaemonUnavailableError("gone")])
def test_pins_that_cannot_be_made_are_counted(error: Exception | None, made: Callable[..., Set]) -> None:
    one = made()
    one.client.pinnable = 0

    def pin(packed: bytes, seconds: float, **_: Any) -> Any:
        raise error  # type: ignore[misc]

    if error is not None:
        one.client.pin = pin
    save(one, "p", pin_s=60.0)
    assert one.parts.counts["pin_failures"] == 5
    one.parts.calls.full = True
    one.saves.loaded(state(request("q"), pin_s=60.0), 0, 5)
    assert one.parts.counts["pin_failures"] == 10


# ---- lives


def test_a_life_is_asked_for_whatever_is_known(made: Callable[..., Set]) -> None:
    one = made()
    save(one, "a")
    one.client.outcome = lambda key: "HELD"
    save(one, "t", ttl_s=30.0)
    save(one, "u", ttl_s=30.0)
    one.saves.loaded(state(request("v"), ttl_s=30.0), 0, 5)
    one.parts.calls.run()
    assert one.client.lives == [None, 30.0, 30.0, 30.0]


def test_what_has_ended_is_saved_again(made: Callable[..., Set]) -> None:
    one = made()
    save(one, "t", ttl_s=1e-6)
    save(one, "a")
    assert sum(len(r.committed) for r in one.client.reservations) == 10


# ---- events


def hashes(mine: Any) -> list[bytes]:
    return [bytes(h) for h in mine.request.block_hashes]


def test_each_block_is_told_once(made: Callable[..., Set]) -> None:
    one = made(events=True)
    events = one.parts.ctx.events
    assert events is not None
    mine = save(one, "a")
    assert events.take() == [Change(True, 0, hashes(mine))]
    one.client.outcome = lambda key: "HELD"
    save(one, "t", ttl_s=30.0)
    one.saves.loaded(mine, 0, 5)
    assert events.take() == []


def test_blocks_that_others_have_saved_are_told(made: Callable[..., Set]) -> None:
    one = made(events=True)
    events = one.parts.ctx.events
    assert events is not None
    one.client.outcome = lambda key: "HELD"
    mine = save(one, "a")
    assert events.take() == [Change(True, 0, hashes(mine))]
    longer = state(request("b", tokens=320))
    one.saves.loaded(longer, 5, 10)
    assert events.take() == [Change(True, 0, hashes(longer)[10:20])]


def test_a_reset_takes_back_what_was_told_and_nothing_under_way_is_told(made: Callable[..., Set]) -> None:
    one = made(events=True)
    events = one.parts.ctx.events
    assert events is not None
    mine = save(one, "a")
    other = state(request("b", tokens=list(range(500, 660))))
    one.collect(one=other)
    one.parts.calls.run()
    jobs = one.saves.jobs()
    events.take()
    one.parts.ctx.keys.new_epoch()
    one.saves.forget()
    one.copied(jobs)
    one.parts.calls.run()
    one.saves.jobs()
    assert events.take() == [Change(False, 0, hashes(mine))]
    assert not one.saves._recent._until_s, "keys of before the reset"


def test_what_is_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "MAX_TOLD", 3)
    events = Events()
    events.stored(0, [b"a", b"b", b"a"])
    events.stored(1, [b"a", b"b"])
    assert events.take() == [Change(True, 0, [b"a", b"b"]), Change(True, 1, [b"a", b"b"]), Change(False, 0, [b"a"])]
    events.clear()
    assert events.take() == [Change(False, 0, [b"b"]), Change(False, 1, [b"a", b"b"])]
    events.clear()
    assert events.take() == []


# ---- resets


def test_a_reset_gives_back_blocks_that_no_worker_reads(made: Callable[..., Set]) -> None:
    one = made()
    one.collect()
    one.parts.calls.run()
    jobs = one.saves.jobs()
    later, answered = (
        state(request("later", tokens=list(range(500, 660)))),
        state(request("answered", tokens=list(range(900, 1060)))),
    )
    one.collect(one=answered)
    one.parts.calls.run()
    one.collect(one=later)
    assert one.saves.held == 30
    one.saves.drop_unsent()
    assert (one.saves.held, one.saves.pending) == (10, True), "workers copy these"
    one.parts.calls.run()
    assert one.saves.jobs() == []
    assert one.parts.counts["saves|stale"] == 10
    assert [r.closed for r in one.client.reservations] == [0, 1, 1], "their slots are given back too"
    one.copied(jobs)


# ---- small things


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_module, "MAX_REMEMBERED", 3)
    known = Remembered()
    for n in (1, 2, 3, 1, 4):
        known.add("t", bytes([n]), float(n))
    assert [known.until_s("t", bytes([n])) for n in range(1, 5)] == [1.0, 0.0, 3.0, 4.0]


def test_steps_are_needed_until_it_is_known_what_was_published(made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else events of an engine's last requests would wait for its next ones. But a commit that never ends keeps nothing busy."""
    one = made()
    one.collect()
    one.parts.calls.run()
    one.copied(one.saves.jobs())
    assert (one.saves.held, one.saves.pending) == (0, True)
    monkeypatch.setattr(one.saves, "_commits_until_s", 0.0)
    assert not one.saves.pending
    monkeypatch.undo()
    one.parts.calls.run()
    one.saves.jobs()
    assert not one.saves.pending


def test_warnings_that_clients_can_cause_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logs, "_last_s", {})
    monkeypatch.setattr(logs.log, "warning", lambda text, *args: said.append(text % args))
    for n in range(CHUNK):
        logs.warn_rarely("one %d", n)
        logs.warn_rarely("another %d", n)
    assert [text.split(" (")[0] for text in said] == ["one 0", "another 0"]
