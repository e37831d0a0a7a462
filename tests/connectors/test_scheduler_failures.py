"""Goal: as in ``test_scheduler``, while copies fail, promises cannot be kept, the daemon comes and goes, and all of it at random.

Method: vLLM's own scheduler with a function of the tokens in place of a model (``small_engine``) and a real daemon. Moments that
are hard to hit are held by stopping the workers' threads; the rest is drawn at random from a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm.metadata import KvtierdWorkerMetadata, Report
from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.engine_cases import KINDS, Engines, Stop, fresh, right, save, until_loading
from tests.connectors.small_engine import BLOCK, RequestStatus, SmallEngine, prompt

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nothing_is_left_open")]


# ---- failures


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_fails_is_computed(kind: dict[str, Any], engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = fresh()
    engine = save(engines, tokens, **kind)

    def broken(*_: Any) -> Any:
        raise OSError("a copy")

    for rank in engine.ranks[-1:]:
        monkeypatch.setattr(rank.connector._worker._copier, "load", broken)
    engine.generate("again", tokens)
    assert engine.computed["again"] == 301
    right(engine, "again")
    assert engine.counts["loads|failed"] == 1


def test_a_load_that_fails_after_a_local_hit(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own blocks stay good, and others that use them run on."""
    tokens = fresh()
    engine = save(engines, tokens)
    engine.add("other", tokens[: 4 * BLOCK + 1], 60, params={"kvtierd.skip_load": True})
    engine.until(lambda: engine.requests["other"].num_output_tokens > 1)
    monkeypatch.setattr(engine.ranks[0].connector._worker._copier, "load", lambda *_: 0)
    engine.generate("again", tokens)
    engine.run("other")
    assert engine.computed["again"] == 301 - 4 * BLOCK
    assert engine.computed["other"] == 4 * BLOCK + 60
    right(engine, "again", "other")


@pytest.mark.parametrize("kind", KINDS)
def test_a_promise_that_cannot_be_kept(kind: dict[str, Any], engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = fresh()
    engine = save(engines, tokens, **kind)

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine.side._loads, "_job", broken)
    engine.add("other", tokens[: 4 * BLOCK + 1], 60, params={"kvtierd.skip_load": True})
    engine.until(lambda: engine.requests["other"].num_output_tokens > 1)
    engine.generate("again", tokens)
    engine.run("other")
    assert engine.computed["other"] == 4 * BLOCK + 60, "a request that shares blocks computes nothing twice"
    right(engine, "again", "other")


def test_the_policy_that_fails_requests(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = fresh()
    engine = save(engines, tokens, policy="fail")
    monkeypatch.setattr(engine.ranks[0].connector._worker._copier, "load", lambda *_: 0)
    engine.generate("fails", tokens)
    assert engine.requests["fails"].status == RequestStatus.FINISHED_ERROR
    monkeypatch.undo()
    engine.generate("works", tokens)
    right(engine, "works")


@pytest.mark.parametrize("kind", KINDS)
def test_the_daemon_restarts_between_promise_and_copy(kind: dict[str, Any], engines: Engines, own_daemon: DaemonProcess) -> None:
    tokens = fresh()
    engine = save(engines, tokens, address=own_daemon.address, **kind)
    stop = Stop(engine)
    engine.add("r", tokens)
    until_loading(engine, "r")
    own_daemon.kill()
    own_daemon.start()
    engine.until(lambda: engine.side._pools.attached)
    stop.go()
    engine.run("r")
    right(engine, "r")
    engine.forget()
    engine.generate("again", tokens)
    right(engine, "again")


@pytest.mark.parametrize("kind", KINDS)
def test_the_daemon_dies_between_copy_and_commit(kind: dict[str, Any], engines: Engines, own_daemon: DaemonProcess) -> None:
    engine = engines(own_daemon.address, **kind)
    stop = Stop(engine)
    engine.generate("r", fresh())
    engine.until(lambda: bool(engine.ranks[-1].connector._worker._saver._queue.qsize()))
    own_daemon.kill()
    stop.go()
    right(engine, "r")
    assert engine.counts["saves|ok"] == 0


def test_a_report_that_fails_takes_no_other_along(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines()
    side = engine.side
    taken, abandoned = [], []

    def report(save_id: int, _: Report) -> None:
        if save_id == 1:
            raise RuntimeError("a bug")
        taken.append(save_id)

    monkeypatch.setattr(side._saves, "report", report)
    monkeypatch.setattr(side._saves, "abandon", abandoned.append)
    side.output(KvtierdWorkerMetadata({1: Report(), 2: Report()}), set())
    assert (taken, abandoned, engine.connector._untold_failures) == ([2], [1], 1)


def test_no_daemon_at_all(engines: Engines, tmp_path: Path) -> None:
    engine = engines(f"unix:{tmp_path}/none.sock", attach=False)
    tokens = fresh()
    for name in ("a", "b"):
        engine.generate(name, tokens)
    right(engine, "a", "b")


# ---- many things at once


def chaos(engine: SmallEngine, rng: random.Random, count: int = 30) -> set[str]:
    """Requests come and go at random. Returns those that ended by themselves."""
    live: list[str] = []
    ended: set[str] = set()
    added = 0
    while added < count or live:
        if added < count and len(live) < 6 and rng.random() < 0.3:
            length, name = rng.randint(1, 560), f"r{added}"
            params = rng.choice([None] * 6 + [{"kvtierd.max_load_tokens": rng.randint(1, 500)}, {"kvtierd.skip_save": True}])
            shared = min(length, rng.choice([0, 96, 200, 400]))
            tokens = prompt(length, seed=rng.randint(0, 5), shared=shared)
            engine.add(name, tokens, rng.randint(1, 40), params, skip_reading=rng.random() < 0.1)
            live.append(name)
            added += 1
        if live and rng.random() < 0.02:
            engine.abort(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.01:
            engine.connector.reset_cache()
        engine.step()
        done = [name for name in live if engine.requests[name].is_finished()]
        ended.update(done)
        live = [name for name in live if name not in done]
    return ended


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_chaos(kind: dict[str, Any], seed: int, engines: Engines) -> None:
    rng = random.Random(f"{seed} {kind}")
    blocks = rng.choice([48, 80] if kind.get("groups") else [24, 40, 80])
    settings = {"prefetch": rng.random() < 0.5, "max_loads": rng.choice([1, 2, 32]), "save_decode": rng.random() < 0.5}
    engine = engines(blocks=blocks, max_held_fraction=rng.choice([0.1, 0.5, 0.9]), **settings, **kind)
    for rank in engine.ranks:
        copier = rank.connector._worker._copier
        copier.load = _sometimes(copier.load, rng)
        copier.save = _sometimes(copier.save, rng)
    right(engine, *sorted(chaos(engine, rng)))


def _sometimes(run: Callable[..., Any], rng: random.Random) -> Callable[..., Any]:
    """A copy that fails now and then."""

    def copy(*args: Any) -> Any:
        if rng.random() < 0.1:
            raise OSError("a copy that a test lets fail")
        return run(*args)

    return copy
