"""Goal: an engine that has nothing else to do waits within a step for what a request needs; one that has does not.

Method: the parts with stand-ins around them, as in ``test_loads``; a worker at a real daemon; then a small engine at a real daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import idle as module
from kvtierd.connectors.vllm.idle import STEP_S, Idle
from kvtierd.connectors.vllm.loads import Loads
from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.engine_cases import Engines, fresh, right, save
from tests.connectors.one_worker import Worker, put
from tests.connectors.parts import CHUNK, FakeProber, Parts, request, state

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
LONG_S = 30.0
SOON_S = 0.05


def idle(**parallel: int) -> Idle:
    return Idle(SimpleNamespace(parallel_config=SimpleNamespace(**parallel)))


# ---- when


def test_a_request_that_is_alone_is_waited_for() -> None:
    engine = idle()
    assert engine.spare_s(1) == STEP_S
    assert engine.spare_s(2) == 0.0, "the other one may be running"
    assert not engine.stepped(8, 1), "it is computed"
    assert engine.stepped(0, 1)


def test_several_are_waited_for_once_nothing_is_computed() -> None:
    engine = idle()
    assert not engine.stepped(100, 2)
    assert engine.spare_s(2) == 0.0
    assert not engine.stepped(0, 2), "the step before may still be under way"
    assert engine.spare_s(2) == STEP_S
    assert engine.stepped(0, 2)
    engine.loaded()
    assert engine.spare_s(2) == 0.0, "one of them can run now"


def test_one_step_waits_no_longer_than_that() -> None:
    engine = idle()
    engine.spend(STEP_S / 2)
    assert engine.spare_s(1) == pytest.approx(STEP_S / 2)
    engine.spend(STEP_S)
    assert engine.spare_s(1) == 0.0
    engine.stepped(0, 1)
    assert engine.spare_s(1) == STEP_S


@pytest.mark.parametrize("parallel", [{"pipeline_parallel_size": 2}, {"data_parallel_size": 2}])
def test_engines_that_step_together_never_wait(parallel: dict[str, int]) -> None:
    engine = idle(**parallel)
    assert not engine.stepped(0, 1)
    assert not engine.stepped(0, 1)
    assert engine.spare_s(1) == 0.0


# ---- the scheduler's side


def asked(held: int = 5) -> tuple[Parts, Loads, Any]:
    parts, loads, one = Parts(), Loads(), state(request(tokens=5 * CHUNK))
    parts.client.held = set(parts.ctx.keys.keys(one.request, 0, 0, held))
    return parts, loads, one


def later(run: Callable[[], Any]) -> None:
    threading.Timer(SOON_S, run).start()


def test_the_end_of_a_lookup_is_waited_for() -> None:
    parts, loads, one = asked()
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    later(parts.lookups.run)
    assert loads.matched(parts.ctx, one, 0, LONG_S) == (5 * CHUNK, True)


def test_not_longer_than_there_is_time() -> None:
    parts, loads, one = asked()
    begun_s = time.monotonic()
    assert loads.matched(parts.ctx, one, 0, SOON_S) == (None, False)
    assert SOON_S <= time.monotonic() - begun_s < LONG_S
    parts.lookups.run()
    assert loads.matched(parts.ctx, one, 0) == (5 * CHUNK, True)


@pytest.mark.parametrize("held", [0, 5])
def test_a_probe_and_the_lookup_after_it_are_waited_for(held: int) -> None:
    parts, loads, one = asked(held)
    prober = parts.prober = FakeProber(parts.client.held)
    prober.answers = False
    loads.arrived(parts.ctx, one)

    def answer() -> None:
        prober.answers = True
        prober.news.set()
        if held:
            while not parts.lookups.tasks:
                time.sleep(0.001)
            parts.lookups.run()

    later(answer)
    assert loads.matched(parts.ctx, one, 0, LONG_S) == ((5 * CHUNK, True) if held else (0, False))


def test_whoever_waits_for_its_turn_does_not_hold_the_engine_up() -> None:
    parts, loads, one = Parts(max_loads=1), Loads(), state(request("one"))
    parts.client.everything = True
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    begun_s = time.monotonic()
    assert loads.matched(parts.ctx, state(request("two", range(160, 320))), 0, LONG_S) == (None, False)
    assert time.monotonic() - begun_s < LONG_S / 2


# ---- the workers' side


def test_the_end_of_a_load_is_waited_for(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    put(worker, 1, (2, 3))
    go = threading.Event()
    worker.side._loader.submit(lambda: go.wait(60) and None)
    worker.step(loads=[worker.load((4, 5), key=1)])
    begun_s = time.monotonic()
    assert worker.side.take_loads(wait_s=SOON_S) == (set(), set(), set())
    assert time.monotonic() - begun_s >= SOON_S
    later(go.set)
    assert worker.side.take_loads(wait_s=LONG_S) == ({"r"}, set(), set())
    assert worker.content(4) == worker.content(2)
    begun_s = time.monotonic()
    assert worker.side.take_loads(wait_s=LONG_S) == (set(), set(), set()), "nothing is under way"
    assert time.monotonic() - begun_s < LONG_S / 2


# ---- an engine


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_hit_takes_few_steps(asynchronous: bool, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", LONG_S)
    tokens = fresh()
    engine = save(engines, tokens, asynchronous=asynchronous)
    before = engine.steps
    engine.add("hit", tokens, 1)
    engine.step()
    assert engine.requests["hit"].status.name == "WAITING_FOR_REMOTE_KVS", "asked, promised and begun in one step"
    engine.run("hit")
    assert engine.computed["hit"] < len(tokens)
    assert engine.steps - before <= 20, "the copy is waited for by the worker"
    right(engine, "hit")


def test_a_busy_engine_goes_on(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a request that runs are not held up by another one's lookup, though it lasts."""
    tokens = fresh()
    engine = save(engines, tokens)
    monkeypatch.setattr(module, "STEP_S", LONG_S)
    engine.add("runs", fresh(), 200)
    engine.until(lambda: engine.requests["runs"].num_output_tokens > 2)
    go = threading.Event()
    run = engine.side._lookups.submit
    monkeypatch.setattr(engine.side._lookups, "submit", lambda task: run(lambda: go.wait(60) and task()))
    engine.add("waits", tokens, 1)
    begun_s = time.monotonic()
    for _ in range(20):
        engine.step()
    assert time.monotonic() - begun_s < LONG_S / 2
    assert engine.requests["runs"].num_output_tokens > 10
    go.set()
    engine.run("runs", "waits")
    right(engine, "runs", "waits")
