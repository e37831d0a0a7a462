"""Goal: a request that finds nothing is computed without any lookup, and a probe never keeps one from what is held.

Method: as in ``test_loads``, with a stand-in for the connection that probes go through; then a small engine at a real daemon.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import loads as module
from kvtierd.connectors.vllm.loads import MISS_S, Loads
from kvtierd.connectors.vllm.probes import PROBE_S
from tests.connectors.engine_cases import Engines, fresh, right
from tests.connectors.parts import CHUNK, FakeProber, Parts, request, state
from tests.connectors.test_loads import Clock, ask

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the engine's thread sees."""
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def probed(held: int = 0, **more: Any) -> tuple[Parts, Loads, Any, FakeProber]:
    """A request of five chunks, the first ``held`` of which there are, that has just arrived."""
    parts, loads, one = Parts(**more), Loads(), state(request(tokens=5 * CHUNK))
    parts.client.held = set(parts.ctx.keys.keys(one.request, 0, 0, held))
    parts.prober = FakeProber(parts.client.held)
    loads.arrived(parts.ctx, one)
    return parts, loads, one, parts.prober


def test_a_miss_is_known_at_once_and_counted() -> None:
    parts, loads, one, prober = probed()
    assert loads.matched(parts.ctx, one, 0) == (0, False)
    assert not parts.lookups.tasks
    key = parts.ctx.keys.keys(one.request, 0, 0, 1)[0]
    assert prober.asked == [(key, 0, ""), (key, 5, "")], "the second tells the daemon what was missed"
    assert prober.forgotten == [2]
    assert parts.counts["loads|miss"] == 1
    loads.prefetch(parts.ctx, one)
    assert not parts.calls.tasks


def test_what_several_groups_miss_is_counted() -> None:
    """Of groups that need all chunks, whether nothing is held or a part of it; one load of a single group counts by itself."""
    parts, loads, one, prober = probed(windows=(0, 40, 0))
    keys = parts.ctx.keys
    assert loads.matched(parts.ctx, one, 0) == (0, False)
    assert prober.asked[1:] == [(keys.keys(one.request, group, 0, 1)[0], 5, "") for group in (0, 2)]
    parts, loads, one, prober = probed(held=2, windows=(0, 40, 0))
    keys = parts.ctx.keys
    parts.client.held.update(key for group in (1, 2) for key in keys.keys(one.request, group, 0, 2))
    assert ask(parts, loads, one) == (2 * CHUNK, True)
    assert prober.asked[1:] == [(keys.keys(one.request, group, 2, 3)[0], 3, "") for group in (0, 2)]
    assert loads.matched(parts.ctx, one, 0) == (2 * CHUNK, True)
    assert len(prober.asked) == 3, "once"
    parts, loads, one, prober = probed(held=2)
    assert ask(parts, loads, one) == (2 * CHUNK, True)
    assert len(prober.asked) == 1


def test_what_may_be_held_is_looked_up() -> None:
    parts, loads, one, _ = probed(held=2)
    assert ask(parts, loads, one) == (2 * CHUNK, True)
    assert one.probe is None


def test_the_answer_is_waited_for_for_a_moment(clock: Clock) -> None:
    parts, loads, one, prober = probed(held=5)
    prober.answers = False
    for _ in range(3):
        assert loads.matched(parts.ctx, one, 0) == (None, False)
    assert not parts.lookups.tasks
    clock.now += PROBE_S
    assert ask(parts, loads, one) == (5 * CHUNK, True), "looked up, for it may be held"
    assert prober.forgotten == [1]


@pytest.mark.parametrize("held", [0, 2, 3, 5])
def test_beyond_what_the_engine_holds_itself(held: int) -> None:
    """Nothing is held beyond a block that is not; where one is, that says nothing of those that follow."""
    parts, loads, one, prober = probed(held)
    tokens = max(0, held - 2) * CHUNK
    assert ask(parts, loads, one, 2 * CHUNK) == (tokens, tokens > 0)
    assert len(parts.client.fetches) == (tokens > 0)
    expected = parts.ctx.keys.keys(one.request, 0, 0, 3)
    assert [key for key, count, _ in prober.asked if not count] == ([expected[0]] if not held else [expected[0], expected[2]])


def test_after_a_miss_it_is_asked_anew(clock: Clock) -> None:
    """A request that vLLM took off again may find what it has saved itself."""
    parts, loads, one, prober = probed()
    assert loads.matched(parts.ctx, one, 0) == (0, False)
    prober.held = parts.client.held = set(parts.ctx.keys.keys(one.request, 0, 0, 5))
    clock.now += MISS_S
    assert ask(parts, loads, one) == (5 * CHUNK, True)


def test_without_probes_everything_is_looked_up() -> None:
    for change in ("no prober", "full"):
        parts, loads, one, prober = probed(held=1)
        one.forget_probe()
        if change == "full":
            prober.full = True
        else:
            parts.prober = None
        assert ask(parts, loads, one) == (CHUNK, True)


def test_windows_alone_are_looked_up() -> None:
    parts, loads, one = Parts(windows=(64,)), Loads(), state()
    parts.prober = FakeProber(set())
    loads.arrived(parts.ctx, one)
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    assert not parts.prober.asked
    assert parts.lookups.tasks


def test_requests_that_load_nothing_ask_nothing() -> None:
    parts, loads = Parts(), Loads()
    prober = parts.prober = FakeProber(set())
    for one in (state(skip_load=True), state(request(tokens=CHUNK - 1)), state(max_load_tokens=CHUNK - 1)):
        loads.arrived(parts.ctx, one)
    parts.pools.reachable = False
    loads.arrived(parts.ctx, state())
    assert not prober.asked


def test_answers_that_nobody_wants_are_let_go() -> None:
    _, loads, one, prober = probed()
    loads.forget(one)
    assert prober.forgotten == [1]
    assert one.probe is None


def test_an_engine_that_finds_nothing_makes_no_lookup(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    lookup = module.Lookup
    monkeypatch.setattr(module, "Lookup", lambda *args: made.append(args) or lookup(*args))
    engine = engines()
    engine.generate("first", fresh(64))  # has the connection made
    until_s = time.monotonic() + 30
    while not engine.side._pools._probers:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    made.clear()
    for n in range(5):
        engine.generate(f"r{n}", fresh(300))
    assert not made
    right(engine, *(f"r{n}" for n in range(5)))
