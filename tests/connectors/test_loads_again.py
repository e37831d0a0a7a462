"""Goal: what failed, or was too slow, is neither tried again at once nor given up for good.

Method: as in ``test_loads``: the engine's thread is the test, lookups run when it says so, and the clock is its own.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import loads as module
from kvtierd.connectors.vllm.backoff import MAX_FAILED_KEYS, FailedKeys
from kvtierd.connectors.vllm.gate import ENOUGH, MEASUREMENTS, PROBE_EVERY
from kvtierd.connectors.vllm.loads import Loads
from kvtierd.connectors.vllm.metadata import CAUSES, Report
from kvtierd.connectors.vllm.stats import LOAD_RESULTS
from kvtierd.errors import Reason
from kvtierd.model import Tier
from tests.connectors.parts import CHUNK, FakeFetch, Parts, request, state
from tests.connectors.test_loads import Clock, allocate, ask, closed, loading

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
BAD = Report(ok=False, cause="daemon", reason="why")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the engine's thread sees."""
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def other(n: int, tokens: int = 160) -> Any:
    """A request that shares nothing with others."""
    return state(request(f"r{n}", [n * 1000 + token for token in range(tokens)]))


def run(parts: Parts, loads: Loads, one: Any, report: Report) -> None:
    """A load from the question to its end."""
    loads.report(parts.ctx, loading(parts, loads, one), report)
    loads.ended(parts.ctx, one)
    parts.free(one.block_ids[0])


# ---- failures in a row


def test_after_failures_in_a_row_nothing_is_promised_for_a_while(clock: Clock) -> None:
    parts, loads = Parts(), Loads()
    pauses = []
    for n in range(9):
        run(parts, loads, other(n), BAD)
        begun = clock.now
        while ask(parts, loads, probe := other(100 + n)) == (0, False):
            clock.now += 0.5
        loads.forget(probe)
        pauses.append(clock.now - begun)
    assert pauses == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    run(parts, loads, other(50), Report())
    run(parts, loads, other(51), BAD)
    assert ask(parts, loads, other(52)) == (160, True), "one success, and all is as it was"
    assert parts.counts["loads|failed"] == parts.counts["load_failures|daemon"] == 10
    assert parts.counts["loads|paused"] > 0


def test_loads_that_fail_together_count_once_and_those_of_a_dead_session_not_at_all(clock: Clock) -> None:
    parts, loads = Parts(blocks=400), Loads()
    many = [other(n) for n in range(10)]
    jobs = [loading(parts, loads, one) for one in many]
    clock.now += 0.1
    for job, one in zip(jobs, many, strict=True):
        loads.report(parts.ctx, job, BAD)
        loads.ended(parts.ctx, one)
    clock.now += 1.0
    assert ask(parts, loads, other(20))[1]
    known = dict(loads._failed_keys._failed)
    dead = [other(n) for n in range(30, 40)]
    jobs = [loading(parts, loads, one) for one in dead]
    clock.now += 0.1
    for fetch in parts.client.fetches[-10:]:
        fetch.intact = False
    for job, one in zip(jobs, dead, strict=True):
        loads.report(parts.ctx, job, BAD)
        loads.ended(parts.ctx, one)
    assert ask(parts, loads, other(41))[1], "the daemon was restarted, and another session is there"
    assert loads._failed_keys._failed == known


def test_another_session_is_given_another_chance(clock: Clock) -> None:
    parts, loads = Parts(), Loads()
    for n in range(module.FAILURES):
        run(parts, loads, other(n), BAD)
    assert ask(parts, loads, other(20)) == (0, False)
    parts.client.session_token = b"new"
    assert ask(parts, loads, other(21)) == (160, True)
    assert ask(parts, loads, other(0)) == (160, True)


# ---- keys


def test_what_a_load_failed_for_is_not_promised_to_others_for_a_while(clock: Clock) -> None:
    parts, loads = Parts(), Loads()
    run(parts, loads, state(request("a")), BAD)
    again = state(request("b"))
    assert ask(parts, loads, again) == (0, False)
    longer = state(request("c", 320))
    assert ask(parts, loads, longer) == (0, False)
    assert parts.counts["loads|paused"] == 2
    shared = state(request("d", [*range(96), *range(5000, 5064)]))
    assert ask(parts, loads, shared) == (160, True), "only a beginning in common"
    loads.forget(shared)
    assert ask(parts, loads, other(1)) == (160, True)
    clock.now += module.FAILED_KEY_S + 1
    assert ask(parts, loads, state(request("e"))) == (160, True)


def test_what_the_engine_holds_before_it_is_loaded_as_ever(clock: Clock) -> None:
    parts, loads = Parts(), Loads()
    one = state(request("a"))
    loads.report(parts.ctx, loading(parts, loads, one, local=64), BAD)
    loads.ended(parts.ctx, one)
    assert ask(parts, loads, state(request("b"))) == (64, True)


def test_a_chunk_whose_memory_cannot_be_had_cuts_every_hit_that_needs_it(clock: Clock) -> None:
    parts, loads = Parts(), Loads()
    run(parts, loads, state(request("a")), Report(ok=False, cause="refused", reason="why", lost=frozenset([102])))
    assert ask(parts, loads, state(request("b"))) == (64, True)
    shared = state(request("d", [*range(96), *range(5000, 5064)]))
    assert ask(parts, loads, shared) == (64, True)
    assert parts.counts["load_failures|refused"] == 1


def test_keys_that_failed_are_few(clock: Clock) -> None:
    keys = FailedKeys(10.0)
    for n in range(2 * MAX_FAILED_KEYS):
        keys.add(b"%d" % n, n, float(n))
    assert len(keys._failed) == MAX_FAILED_KEYS
    assert keys.limit({0: [b"1"]}, 0.0) == float("inf")
    assert keys.limit({0: [b"100", b"120"], 1: [b"99"]}, 0.0) == 99
    assert keys.limit({0: [b"100", b"120"]}, 110.0) == 120
    assert keys.limit({0: [b"100", b"120"]}, 1e9) == float("inf")
    assert not keys._failed


# ---- results


def test_every_cause_and_result_is_known_to_the_metrics(clock: Clock) -> None:
    parts, loads = Parts(), Loads()
    for n, cause in enumerate(CAUSES):
        clock.now += 100
        run(parts, loads, other(n), Report(ok=False, cause=cause))
    lost = other(50)
    ask(parts, loads, lost)
    loads.drop(lost)
    allocate(parts, loads, lost, 0, 160)
    loads.take()
    loads.ended(parts.ctx, lost)
    named = [name.split("|") for name in parts.counts if "|" in name]
    assert {label for name, label in named if name == "load_failures"} == set(CAUSES)
    assert {label for name, label in named if name == "loads"} <= set(LOAD_RESULTS)
    assert sum(parts.counts[f"load_failures|{cause}"] for cause in CAUSES) == parts.counts["loads|failed"]
    assert parts.counts["load_failures|promise"] == 2


def test_each_question_has_one_result(clock: Clock) -> None:
    """One that was too late and loaded in part is a load, and one that has found nothing in time is not a miss too."""
    parts, loads = Parts(), Loads()
    parts.client.next_fetch = FakeFetch(b"t", [], done=False)
    one = other(1)
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    clock.now += 1e6
    assert loads.matched(parts.ctx, one, 0) == (0, False)
    parts.client.next_fetch = late = FakeFetch(b"t", [])
    late.reason = Reason.DEADLINE
    assert ask(parts, loads, other(2)) == (0, False)
    parts.client.next_fetch = FakeFetch(b"t", [])
    assert ask(parts, loads, other(3)) == (0, False)
    assert {name: n for name, n in parts.counts.items() if name.startswith("loads|")} == {"loads|timeout": 2, "loads|miss": 1}


def test_waiting_for_a_turn_is_shown(clock: Clock) -> None:
    parts, loads = Parts(max_loads=1), Loads()
    many = [other(n) for n in range(4)]
    for one in many:
        loads.matched(parts.ctx, one, 0)
    assert (loads.asking, loads.waiting) == (1, 3)
    loads.forget(many[3])
    loads.forget(many[0])
    loads.matched(parts.ctx, many[1], 0)
    assert (loads.asking, loads.waiting) == (1, 1)
    clock.now += 100
    many[2].asked_s = clock.now
    assert loads.matched(parts.ctx, many[2], 0) == (0, False)
    assert loads.waiting == 0


# ---- how long a request waits


def test_turn_and_lookup_together_take_no_longer_than_one_lookup(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, loads = Parts(max_loads=1, lookup_timeout_ms=2000), Loads()
    limits: list[float] = []
    right = module.Lookup

    def lookup(*args: Any) -> Any:
        limits.append(args[-1])
        return right(*args)

    monkeypatch.setattr(module, "Lookup", lookup)
    first, second = other(1), other(2)
    loads.matched(parts.ctx, first, 0)
    loads.matched(parts.ctx, second, 0)
    clock.now += 1.5
    loads.forget(first)
    assert loads.matched(parts.ctx, second, 0) == (None, False)
    assert limits == [2.0, 0.5]
    loads.forget(second)
    clock.now += 0.1
    loads.matched(parts.ctx, third := other(3), 0)
    assert limits[-1] == 2.0
    parts.client.everything = True
    parts.lookups.run()
    assert loads.matched(parts.ctx, third, 0) == (160, True)
    loads.drop(third)
    clock.now += 1.0
    loads.matched(parts.ctx, third, 0)
    assert limits[-1] == 2.0, "it had its answer, so it waits anew"


def slow_nvme(parts: Parts) -> None:
    for _ in range(ENOUGH + 1):
        parts.ctx.gate.step(1000, 0.1)
        parts.ctx.gate.load({b"t"}, 1 << 30, 0.01, 0.02)
        parts.ctx.gate.read(1 << 20, 1000.0)


def test_nobody_waits_for_nvme_where_computing_is_faster(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, loads = Parts(gate=True), Loads()
    slow_nvme(parts)
    limits: list[float] = []
    right = module.Lookup
    monkeypatch.setattr(module, "Lookup", lambda *args: limits.append(args[-1]) or right(*args))
    for n in range(PROBE_EVERY):
        loads.matched(parts.ctx, one := other(n, 1600), 0)
        loads.forget(one)
    assert limits[:-1] == [module.MIN_WAIT_S] * (PROBE_EVERY - 1), "what is in CPU memory is there by then"
    assert limits[-1] > module.MIN_WAIT_S, "one waits all the same, to see whether it is still so"


def test_reading_from_nvme_is_measured() -> None:
    parts, loads = Parts(), Loads()
    parts.client.everything = True
    read: list[tuple[int, float]] = []
    parts.ctx.gate.read = lambda nbytes, seconds: read.append((nbytes, seconds))  # type: ignore[method-assign]
    parts.client.next_fetch = fetch = FakeFetch(b"t", [[0, 1], [2]])
    fetch.tier = Tier.NVME
    one = state(request(tokens=3 * CHUNK))
    assert ask(parts, loads, one) == (96, True)
    loads.matched(parts.ctx, one, 0)
    assert [nbytes for nbytes, _ in read] == [3 * 4096]
    assert 0 < read[0][1] < 60


# ---- the gate


def test_the_gate_is_told_what_is_loaded_and_gets_out_again(clock: Clock) -> None:
    parts, loads = Parts(gate=True, windows=(0, 40), blocks=400), Loads()
    parts.client.everything = True
    gate = parts.ctx.gate
    told: list[tuple[int, int]] = []
    right = gate.worth

    def worth(tokens: int, nbytes: int) -> bool:
        told.append((tokens, nbytes))
        return right(tokens, nbytes)

    gate.worth = worth  # type: ignore[method-assign]
    one = state(request(tokens=1600))
    assert ask(parts, loads, one) == (1600, True)
    loads.matched(parts.ctx, one, 0)
    assert told == [(1600, (100 + 3) * 2048)], "once for a hit, and only the blocks of the window that are needed"
    loads.forget(one)
    for _ in range(MEASUREMENTS + 1):
        gate.step(1000, 0.01)
        gate.load({b"t"}, 1 << 20, 1000.0, 2000.0)
    results = []
    for n in range(PROBE_EVERY):
        results.append(ask(parts, loads, other(n))[0])
    assert results == [0] * (PROBE_EVERY - 1) + [160]
    assert parts.counts["loads|slower"] == PROBE_EVERY - 1
    assert closed(parts)[-1] == 0


def test_a_promise_stands_though_the_gate_shuts(clock: Clock) -> None:
    parts, loads = Parts(gate=True), Loads()
    parts.client.everything = True
    one = state()
    assert ask(parts, loads, one) == (160, True)
    for _ in range(MEASUREMENTS + 1):
        parts.ctx.gate.step(1000, 0.01)
        parts.ctx.gate.load({b"t"}, 1 << 20, 1000.0, 2000.0)
    assert loads.matched(parts.ctx, one, 0) == (160, True)


def test_a_load_is_measured_from_its_job_to_its_end(clock: Clock) -> None:
    """The time that vLLM needed to find blocks is not the load's."""
    parts, loads = Parts(gate=True), Loads()
    parts.client.everything = True
    one = state()
    seen: list[Any] = []
    parts.ctx.gate.load = lambda *args: seen.append(args)  # type: ignore[method-assign]
    assert ask(parts, loads, one) == (160, True)
    clock.now += 1.9
    loads.matched(parts.ctx, one, 0)
    allocate(parts, loads, one, 0, 160)
    clock.now += 0.5
    loads.report(parts.ctx, loads.take()[0].job_id, Report(nbytes=5 << 20, seconds=0.25))
    loads.ended(parts.ctx, one)
    assert seen == [({b"t"}, 5 << 20, 0.25, pytest.approx(0.5))]
