"""Goal: as in ``test_scheduler``, where whole engines decide whether, when and for how long to load.

Method: vLLM's own scheduler with a function of the tokens in place of a model (``small_engine``) and a real daemon; what is slow
or broken is put in.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import gate, joining, loads
from kvtierd.connectors.vllm import worker as worker_module
from kvtierd.errors import DaemonUnavailableError
from tests.connectors.engine_cases import KINDS, Engines, fresh, right, save
from tests.connectors.small_engine import SmallEngine

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nothing_is_left_open")]
TOKEN_S = 0.002
"""What computing a token takes, with ``computing_takes_time``."""


def computing_takes_time(engine: SmallEngine) -> None:
    """As a real model's, which is measured at once."""
    execute = engine._execute

    def slow(output: Any, tables: Any) -> Any:
        time.sleep(TOKEN_S * output.total_num_scheduled_tokens)
        return execute(output, tables)

    engine._execute = slow  # type: ignore[method-assign]
    for n in range(2):
        engine.generate(f"computed{n}", fresh(256), params={"kvtierd.skip_save": True})


def again(engine: SmallEngine, name: str, tokens: list[int]) -> bool:
    """Run a request. Whether it was loaded."""
    engine.generate(name, tokens)
    engine.settle()
    engine.forget()
    return engine.computed[name] < 301


@pytest.fixture
def small_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads and steps of small engines are measured too, and few of them are enough."""
    for name, value in {"MIN_STEP_TOKENS": 64, "MIN_LOAD_BYTES": 1, "ENOUGH": 2, "MEASUREMENTS": 3, "PROBE_EVERY": 3}.items():
        monkeypatch.setattr(gate, name, value)


# ---- the gate


@pytest.mark.usefixtures("small_measures")
def test_the_gate_shuts_where_loading_is_slow_and_opens_again(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = fresh(300)
    engine = save(engines, tokens, gate=True)
    computing_takes_time(engine)
    measured, load_s = engine.side._ctx.gate, 100.0
    right_load = measured.load
    monkeypatch.setattr(measured, "load", lambda sessions, nbytes, *_: right_load(sessions, nbytes, load_s, load_s))
    loaded = [again(engine, f"slow{n}", tokens) for n in range(9)]
    assert loaded == [True] * 3 + [False, False, True] * 2, "one of a session does not count, two are enough, one in three tries"
    load_s = 0.001
    loaded = [again(engine, f"fast{n}", tokens) for n in range(9)]
    assert loaded == [False, False, True, False, False, True, True, True, True]
    right(engine, "slow0", "slow8", "fast0", "fast8")
    assert engine.counts["loads|slower"] == 8


@pytest.mark.usefixtures("small_measures")
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]])
def test_with_the_gate_a_fresh_engine_loads(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh(300)
    save(engines, tokens, gate=True, **kind)
    other = engines(gate=True, **kind)
    computing_takes_time(other)
    assert [again(other, f"r{n}", tokens) for n in range(5)] == [True] * 5
    right(other, *(f"r{n}" for n in range(5)))
    measured = other.side._ctx.gate
    assert measured.load_bytes_per_s.value > 0
    assert 0 < measured.prefill_tokens_per_s.value < 1.1 / TOKEN_S


# ---- a rank that cannot load


def test_a_rank_that_cannot_reach_the_daemon_costs_few_requests(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads fail, so after a few nothing is promised for a while; once it can, hits are loaded again."""
    for module, name in ((loads, "FIRST_PAUSE_S"), (loads, "FAILED_KEY_S"), (joining, "FIRST_PAUSE_S")):
        monkeypatch.setattr(module, name, 5.0)
    monkeypatch.setattr(joining, "JOIN_TIMEOUT_S", 0.2)
    prompts = [fresh(300) for _ in range(8)]
    for tokens in prompts:
        save(engines, tokens)
    engine = engines()
    side = engine.ranks[0].connector._worker
    connect = side._connect

    waits = []

    def never(session: Any, timeout_s: float, on_lost: Any) -> Any:
        waits.append(timeout_s)
        time.sleep(timeout_s)
        raise DaemonUnavailableError("cannot be reached")

    side._connect = never
    for n, tokens in enumerate(prompts):
        engine.generate(f"r{n}", tokens, params={"kvtierd.skip_save": True})
    assert len(waits) <= 4
    assert engine.counts["loads|failed"] <= 4
    assert engine.counts["loads|paused"] >= 4
    assert engine.counts["load_failures|daemon"] == engine.counts["loads|failed"]
    side._connect = connect
    (joined,) = side._sessions.values()
    while joined._pauses.pausing(time.monotonic()) or engine.side._loads._pauses.pausing(time.monotonic()):
        time.sleep(0.05)
    engine.settle()
    engine.forget()
    engine.generate("again", prompts[0])
    assert engine.computed["again"] == 301 - 256
    right(engine, *(f"r{n}" for n in range(8)), "again")


def test_ranks_of_several_hosts_have_no_cache(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter(["here 1", "there 2"])
    with monkeypatch.context() as patched:
        patched.setattr(worker_module, "host_identity", lambda: next(hosts))
        engine = engines(tp=2, attach=False)
    assert "another host" in engine.side._disabled or "on one host" in engine.side._disabled
    engine.generate("r", fresh())
    right(engine, "r")


# ---- prefetches


def test_prefetches_wait_for_their_turn(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """When many requests queue, those behind are prefetched for as those before them get their turn."""
    monkeypatch.setattr(loads, "MAX_PREFETCHES", 2)
    engine = engines()
    side = engine.side
    monkeypatch.setattr(side._pools, "prober", lambda *_: None)  # nothing is held of any, and it would say so
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    for n in range(6):
        engine.add(f"r{n}", fresh(100), params=None if n else {"kvtierd.skip_load": True})
    engine.step()  # there are no blocks for the first one, so no other is asked about
    assert list(side._arrivals) == [f"r{n}" for n in range(3, 6)]
    assert side._loads._prefetching == {"r1", "r2"}
    engine.abort("r1")
    engine.abort("r4")
    engine.step()
    assert list(side._arrivals) == ["r4", "r5"]
    assert side._loads._prefetching == {"r2", "r3"}
    engine.pool.free_blocks(taken)
    engine.run()
    right(engine, "r0", "r2", "r3", "r5")
    assert not side._arrivals


def test_what_waits_and_what_is_broken_is_shown(engines: Engines) -> None:
    engine = engines()
    assert engine.side.gauges() == {
        "attached": 1,
        "breaker": 0,
        "loading": 0,
        "looking_up": 0,
        "waiting": 0,
        "holding_blocks": 0,
    }
