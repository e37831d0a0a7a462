"""Goal: each load that is promised becomes one job with the right slots and blocks; whatever else happens, its pins come back.

Method: the engine's thread is the test; lookups run when the test says so, against a stand-in for the daemon's client. Requests and
the block pool are vLLM's own.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import loads as module
from kvtierd.connectors.vllm.gate import ENOUGH
from kvtierd.connectors.vllm.loads import Loads
from kvtierd.connectors.vllm.metadata import Report
from tests.connectors.parts import BLOCK, CHUNK, FakeClient, FakeFetch, Parts, request, state

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time that the engine's thread sees."""
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def ask(parts: Parts, loads: Loads, one: Any, local: int = 0) -> tuple[int | None, bool]:
    """Ask, let the lookup run, and ask again."""
    first = loads.matched(parts.ctx, one, local)
    if first != (None, False):
        return first
    parts.lookups.run()
    return loads.matched(parts.ctx, one, local)


def allocate(parts: Parts, loads: Loads, one: Any, local: int, external: int) -> list[int]:
    """As vLLM does: blocks for what it holds and what is to be loaded."""
    table = parts.table(-(-(local + external) // BLOCK))
    one.block_ids = (table,)
    loads.allocated(parts.ctx, one, external)
    return table


def closed(parts: Parts) -> list[int]:
    return [fetch.closed for fetch in parts.client.fetches]


# ---- the question


def test_a_hit_is_promised_when_it_is_pinned() -> None:
    parts, loads, one = Parts(), Loads(), state(request(tokens=160))
    parts.client.everything = True
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    parts.lookups.run()
    assert loads.matched(parts.ctx, one, 0) == (160, True)
    assert loads.matched(parts.ctx, one, 0) == (160, True)
    assert loads.asking == 1


def test_requests_that_load_nothing() -> None:
    """vLLM 0.23 does not itself look whether a request, for its prompt's log probabilities, must compute every token."""
    parts, loads = Parts(), Loads()
    parts.client.everything = True
    bypassed = state()
    bypassed.bypass = True
    for one in (state(skip_load=True), bypassed, state(request(skip_reading=True)), state(request(tokens=CHUNK - 1))):
        assert ask(parts, loads, one) == (0, False)
        loads.prefetch(parts.ctx, one)
    parts.pools.reachable = False
    assert ask(parts, loads, state()) == (0, False)
    parts.calls.run()
    assert not parts.client.fetches
    assert [p.keys for p in parts.client.prefetches] == []


@pytest.mark.parametrize(("limit", "promised"), [(0, 0), (CHUNK - 1, 0), (CHUNK, 32), (CHUNK + 5, 32), (1000, 160)])
def test_a_limit_that_is_no_multiple_of_a_chunk(limit: int, promised: int) -> None:
    parts, loads, one = Parts(), Loads(), state(max_load_tokens=limit)
    parts.client.everything = True
    assert ask(parts, loads, one) == (promised, promised > 0)
    other = state(request("o"), max_load_tokens=limit)
    loads.prefetch(parts.ctx, other)
    parts.calls.run()
    assert [p.keys for p in parts.client.prefetches] == ([promised // CHUNK] if promised else [])


@pytest.mark.parametrize("local", [0, 16, 32, 48, 64])
def test_a_local_hit_in_the_middle_of_a_chunk(local: int) -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    assert ask(parts, loads, one, local) == (160 - local, True)
    table = allocate(parts, loads, one, local, 160 - local)
    job = loads.take()[0]
    assert job.blocks == table[local // BLOCK :]
    (part,) = job.parts
    first = local // CHUNK
    assert part.slots.tolist() == [100 + n for n in range(5 - first)]
    assert part.block_ids.tolist() == [b if n >= local // BLOCK else -1 for n, b in enumerate(table)][2 * first :]


def test_a_miss_is_not_asked_about_again_at_once(clock: Clock) -> None:
    parts, loads, one = Parts(), Loads(), state()
    assert ask(parts, loads, one) == (0, False)
    assert ask(parts, loads, one) == (0, False)
    assert len(parts.client.fetches) == 1
    clock.now += module.MISS_S + 0.1
    assert ask(parts, loads, one) == (0, False)
    assert closed(parts) == [1, 1]
    assert parts.counts["loads|miss"] == 2
    assert loads.asking == 0


def test_small_and_slow_hits_are_computed() -> None:
    parts, loads = Parts(min_hit_tokens=100), Loads()
    parts.client.next_fetch = FakeFetch(b"t", [[0, 1]], done=True)
    assert ask(parts, loads, state()) == (0, False)
    slow = Parts(gate=True)
    slow.client.everything = True
    for _ in range(ENOUGH + 1):
        slow.ctx.gate.step(1000, 1e-6)
        slow.ctx.gate.load({b"t"}, 1 << 20, 1e6, 1e6)
    assert ask(slow, loads, state(request("s"))) == (0, False)
    assert (parts.counts["loads|small"], slow.counts["loads|slower"]) == (1, 1)
    assert closed(parts) + closed(slow) == [1, 1]


@pytest.mark.parametrize(("least", "local", "promised"), [(0, 48, 0), (0, 32, 32), (1, 48, 16), (16, 48, 16), (17, 48, 0)])
def test_a_hit_of_less_than_a_chunk_is_computed_unless_it_is_asked_for(least: int, local: int, promised: int) -> None:
    parts, loads = Parts(min_hit_tokens=least), Loads()
    parts.client.everything = True
    assert ask(parts, loads, state(request(tokens=64)), local) == (promised, promised > 0)
    assert len(parts.client.fetches) == (promised > 0), "what would not be loaded is not asked for"


def test_past_the_deadline_what_is_there_is_loaded(clock: Clock) -> None:
    parts, loads, one = Parts(lookup_timeout_ms=1), Loads(), state()
    parts.client.next_fetch = FakeFetch(b"t", [[0, 1]], done=False)
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    assert one.lookup is not None
    parts.lookups.run()
    one.lookup._ended.clear()  # as if its thread had not yet come to its end
    clock.now += 1e6
    assert loads.matched(parts.ctx, one, 0) == (64, True)
    one.lookup.ready(0).add([2], [102], b"\2", b"t")
    assert loads.matched(parts.ctx, one, 0) == (64, True)
    table = allocate(parts, loads, one, 0, 64)
    assert loads.take()[0].blocks == table
    assert parts.counts["loads|timeout"] == 0, "it is a load"


def test_slots_of_a_session_that_has_ended_are_not_promised() -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    parts.lookups.run()
    parts.client.fetches[0].intact = False
    assert loads.matched(parts.ctx, one, 0) == (0, False)
    assert closed(parts) == [1]


def test_a_smaller_local_hit_asks_again() -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    assert ask(parts, loads, one, 64) == (96, True)
    assert loads.matched(parts.ctx, one, 0) == (None, False)
    assert closed(parts) == [1]
    parts.lookups.run()
    assert loads.matched(parts.ctx, one, 0) == (160, True)
    assert loads.matched(parts.ctx, one, 96) == (64, True)
    assert loads.matched(parts.ctx, one, 160) == (0, False)
    assert loads.asking == 0


# ---- turns


def test_others_wait_for_their_turn_but_not_for_ever(clock: Clock) -> None:
    """No more requests than allowed hold slots or load, in a burst too; one that waits is computed after a while."""
    parts, loads = Parts(max_loads=2, lookup_timeout_ms=2000), Loads()
    parts.client.everything = True
    many = [state(request(f"r{n}")) for n in range(4)]
    assert [loads.matched(parts.ctx, one, 0) for one in many] == [(None, False)] * 4
    assert (loads.asking, len(parts.lookups.tasks)) == (2, 2)
    parts.lookups.run()
    assert loads.matched(parts.ctx, many[0], 0) == (160, True)
    allocate(parts, loads, many[0], 0, 160)
    assert (loads.running, loads.asking) == (1, 1)
    assert loads.matched(parts.ctx, many[2], 0) == (None, False)
    assert len(parts.lookups.tasks) == 0
    loads.report(parts.ctx, loads.take()[0].job_id, Report())
    loads.ended(parts.ctx, many[0])
    assert ask(parts, loads, many[2]) == (160, True)
    clock.now += 1.9
    assert loads.matched(parts.ctx, many[3], 0) == (None, False)
    clock.now += 0.2
    assert loads.matched(parts.ctx, many[3], 0) == (0, False)
    assert parts.counts["loads|busy"] == 1


def test_a_turn_that_nobody_asked_for_is_begun_anew(clock: Clock) -> None:
    parts, loads, waiting = Parts(max_loads=1), Loads(), state(request("w"))
    assert loads.matched(parts.ctx, state(), 0) == (None, False)
    assert loads.matched(parts.ctx, waiting, 0) == (None, False)
    clock.now += 100
    assert loads.matched(parts.ctx, waiting, 0) == (None, False)


def test_no_thread_is_free() -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.lookups.full = True
    assert loads.matched(parts.ctx, one, 0) == (0, False)
    assert (loads.asking, one.lookup) == (0, None)


@pytest.mark.parametrize("promised", [False, True])
def test_what_vllm_does_not_come_back_for_is_let_go(promised: bool, clock: Clock) -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    loads.matched(parts.ctx, one, 0)
    loads.drop_stale(one, clock.now + 100)
    assert one.lookup is not None, "it is still under way"
    parts.lookups.run()
    if promised:
        loads.matched(parts.ctx, one, 0)
        clock.now += module.PROMISE_S - 0.1
        loads.matched(parts.ctx, one, 0)
    loads.drop_stale(one, clock.now)
    assert one.lookup is not None
    loads.drop_stale(one, clock.now + module.PROMISE_S + 0.1)
    assert (one.lookup, loads.asking, closed(parts)) == (None, 0, [1])


# ---- the job


def test_vllm_loads_nothing_after_all() -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    ask(parts, loads, one)
    allocate(parts, loads, one, 0, 0)
    assert (loads.take(), loads.asking, closed(parts)) == ([], 0, [1])


def test_a_promise_that_cannot_be_kept_is_reported_as_failed() -> None:
    """Only blocks that were to be filled: those before are the engine's own hit, and may belong to running requests too."""
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    assert ask(parts, loads, one, 32) == (128, True)
    loads.drop(one)
    table = allocate(parts, loads, one, 32, 128)
    job = loads.take()[0]
    assert (job.parts, job.blocks) == ([], table[2:])
    assert (one.no_load, one.bypass) == (True, False), "what is computed instead is saved"
    assert one.load is not None
    loads.ended(parts.ctx, one)
    assert (one.load, loads.running) == (None, 0)
    assert loads.matched(parts.ctx, one, 0) == (0, False)


def test_too_few_blocks() -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    ask(parts, loads, one)
    one.block_ids = (parts.table(3),)
    loads.allocated(parts.ctx, one, 160)
    job = loads.take()[0]
    assert (job.parts, job.blocks) == ([], list(one.block_ids[0]))
    assert (loads.running, loads.asking, closed(parts)) == (0, 0, [1])


def test_windows_load_their_last_blocks_only() -> None:
    parts, loads, one = Parts(windows=(0, 40)), Loads(), state()
    parts.client.everything = True
    assert ask(parts, loads, one) == (160, True)
    full, null = parts.table(10), parts.ctx.null_block
    window = [null] * 7 + parts.table(3)
    one.block_ids = (full, window)
    loads.allocated(parts.ctx, one, 160)
    first, second = loads.take()[0].parts
    assert first.block_ids.tolist() == full
    assert second.block_ids.tolist() == [-1, *window[7:]]
    assert second.slots.tolist() == [105, 106]


def test_a_window_that_wants_what_was_not_fetched_fails() -> None:
    parts, loads, one = Parts(windows=(0, 40)), Loads(), state()
    parts.client.everything = True
    ask(parts, loads, one)
    one.block_ids = (parts.table(10), parts.table(10))
    loads.allocated(parts.ctx, one, 160)
    assert loads.take()[0].parts == []


# ---- the end


def loading(parts: Parts, loads: Loads, one: Any, local: int = 0) -> int:
    parts.client.everything = True
    promised, _ = ask(parts, loads, one, local)
    assert promised
    allocate(parts, loads, one, local, promised)
    return loads.take()[0].job_id


def test_a_load_that_went_well() -> None:
    parts, loads, one = Parts(ranks=2), Loads(), state()
    job = loading(parts, loads, one)
    loads.report(parts.ctx, job, Report(nbytes=10, seconds=1.0))
    loads.report(parts.ctx, job, Report(nbytes=20, seconds=2.0))
    assert closed(parts) == [0], "a rank may still read"
    loads.ended(parts.ctx, one)
    assert closed(parts) == [1]
    assert {k: v for k, v in parts.counts.items() if v} == {
        "loads|ok": 1,
        "load_bytes": 30,
        "load_us": 2_000_000,
        "hit_tokens|cpu": 160,
    }
    assert one.next_chunk == 5
    loads.ended(parts.ctx, one)
    assert closed(parts) == [1]


def test_slots_are_kept_until_the_last_device_has_read_them() -> None:
    """One rank says early that the engine may go on, another one at the end."""
    parts, loads, one = Parts(ranks=2), Loads(), state()
    job = loading(parts, loads, one)
    loads.report(parts.ctx, job, Report(early=1))
    loads.report(parts.ctx, job, Report(nbytes=20, seconds=2.0))
    loads.ended(parts.ctx, one)
    assert (closed(parts), one.load, one.next_chunk, loads.pending) == ([0], None, 5, True)
    assert not parts.counts["loads|ok"]
    loads.report(parts.ctx, job, Report(nbytes=10, seconds=1.0).tail())
    assert (closed(parts), parts.counts["loads|ok"], parts.counts["load_bytes"], loads.pending) == ([1], 1, 30, False)


def test_a_rank_that_was_early_has_ended_before_the_others() -> None:
    parts, loads, one = Parts(ranks=2), Loads(), state()
    job = loading(parts, loads, one)
    for report in (Report(early=1), Report(nbytes=10).tail(), Report(nbytes=20)):
        loads.report(parts.ctx, job, report)
    assert closed(parts) == [0]
    loads.ended(parts.ctx, one)
    assert (closed(parts), parts.counts["loads|ok"], parts.counts["load_bytes"]) == ([1], 1, 30)


def test_a_load_that_failed_after_its_engine_went_on() -> None:
    parts, loads, one = Parts(), Loads(), state()
    job = loading(parts, loads, one)
    loads.report(parts.ctx, job, Report(early=1))
    loads.ended(parts.ctx, one)
    loads.report(parts.ctx, job, Report(ok=False, cause="daemon", reason="gone").tail())
    assert (closed(parts), parts.counts["loads|failed"], parts.counts["load_failures|daemon"]) == ([1], 1, 1)


def test_slots_that_are_still_read_go_with_the_engine() -> None:
    parts, loads, one = Parts(), Loads(), state()
    loads.report(parts.ctx, loading(parts, loads, one), Report(early=1))
    loads.ended(parts.ctx, one)
    loads.close()
    assert closed(parts) == [1]


def test_chunks_before_a_load_are_still_saved() -> None:
    """What the engine held itself may have gone from the daemon, and all that follows it would be of no use."""
    parts, loads, one = Parts(), Loads(), state()
    job = loading(parts, loads, one, local=64)
    loads.report(parts.ctx, job, Report())
    loads.ended(parts.ctx, one)
    assert one.next_chunk == 0
    later = state(request("l"))
    later.next_chunk = 2
    job = loading(parts, loads, later, local=64)
    loads.report(parts.ctx, job, Report())
    loads.ended(parts.ctx, later)
    assert later.next_chunk == 5


@pytest.mark.parametrize("report", [Report(ok=False, reason="why"), None])
def test_a_load_that_failed_is_not_tried_again(report: Report | None) -> None:
    parts, loads, one = Parts(), Loads(), state()
    job = loading(parts, loads, one)
    if report is not None:
        loads.report(parts.ctx, job, Report())
        loads.report(parts.ctx, job, report)
    loads.ended(parts.ctx, one)
    assert (closed(parts), parts.counts["loads|failed"], one.next_chunk) == ([1], 1, 0)
    assert loads.matched(parts.ctx, one, 0) == (0, False)


def test_a_report_of_a_job_that_is_not_known() -> None:
    parts, loads = Parts(), Loads()
    loads.report(parts.ctx, 7, Report())
    assert loads.running == 0


# ---- prefetches


def test_a_prefetch_is_cancelled_when_the_lookup_has_pinned() -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    loads.prefetch(parts.ctx, one)
    parts.calls.run()
    assert len(loads._prefetching) == 1
    loads.matched(parts.ctx, one, 0)
    assert parts.client.prefetches[0].cancelled == 0
    parts.lookups.run()
    assert parts.client.prefetches[0].cancelled == 1
    assert not loads._prefetching


def test_a_prefetch_that_comes_late_is_cancelled() -> None:
    parts, loads, one = Parts(), Loads(), state()
    loads.prefetch(parts.ctx, one)
    loads.matched(parts.ctx, one, 0)
    parts.calls.run()
    assert not parts.client.prefetches
    other = state(request("o"))
    loads.prefetch(parts.ctx, other)
    real, parts.client.prefetch = parts.client.prefetch, None  # type: ignore[assignment]

    def late(*args: Any, **more: Any) -> Any:
        loads.matched(parts.ctx, other, 0)
        return real(*args, **more)

    parts.client.prefetch = late  # type: ignore[method-assign]
    parts.calls.run()
    assert parts.client.prefetches[0].cancelled == 1


def test_a_request_that_runs_without_a_load_gives_its_prefetch_back() -> None:
    """Else requests whose whole prompt the engine holds keep the few places until they end, and nobody is prefetched for."""
    parts, loads, one = Parts(), Loads(), state()
    loads.prefetch(parts.ctx, one)
    parts.calls.run()
    assert loads.matched(parts.ctx, one, 160) == (0, False)
    allocate(parts, loads, one, 160, 0)
    assert not loads._prefetching
    assert parts.client.prefetches[0].cancelled == 1


def test_of_several_groups_those_that_attend_to_everything_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each pool; what a window needs depends on how much is held."""
    parts, loads, one = Parts(windows=(0, 40, 0, 0)), Loads(), state()
    pools = [replace(group, pool=pool) for group, pool in zip(parts.ctx.plan.groups, (0, 0, 1, 1), strict=True)]
    parts.pools.plan = replace(parts.ctx.plan, groups=tuple(pools), namespaces=parts.ctx.plan.namespaces * 2)
    second = FakeClient()
    parts.pools.clients.append(second)
    loads.prefetch(parts.ctx, one)
    parts.calls.run()
    assert [p.keys for p in parts.client.prefetches] == [5]
    assert [p.keys for p in second.prefetches] == [10]
    loads.matched(parts.ctx, one, 0)
    parts.lookups.run()
    assert [p.cancelled for p in parts.client.prefetches + second.prefetches] == [1, 1]
    windows = Parts(windows=(40,))
    loads.prefetch(windows.ctx, state(request("w")))
    assert not windows.calls.tasks


def test_prefetches_are_bounded_and_end_with_their_requests() -> None:
    parts, loads = Parts(), Loads()
    many = [state(request(f"r{n}")) for n in range(module.MAX_PREFETCHES + 5)]
    for one in many:
        loads.prefetch(parts.ctx, one)
    parts.calls.run()
    assert len(parts.client.prefetches) == module.MAX_PREFETCHES
    assert not loads.may_prefetch
    for one in many:
        loads.forget(one)
    assert loads.may_prefetch
    assert [p.cancelled for p in parts.client.prefetches] == [1] * module.MAX_PREFETCHES
    assert not loads._prefetching


@pytest.mark.parametrize("moment", ["asked", "promised", "loading"])
def test_the_request_goes(moment: str) -> None:
    parts, loads, one = Parts(), Loads(), state()
    parts.client.everything = True
    loads.matched(parts.ctx, one, 0)
    if moment != "asked":
        parts.lookups.run()
        loads.matched(parts.ctx, one, 0)
    if moment == "loading":
        allocate(parts, loads, one, 0, 160)
        loads.drop(one)
        assert closed(parts) == [0], "slots that a worker reads stay pinned"
        loads.ended(parts.ctx, one)
    loads.forget(one)
    parts.lookups.run()
    assert closed(parts) == [1] * (moment != "asked")
    assert (loads.asking, loads.running) == (0, 0)


def test_names_of_requests_are_cut() -> None:
    parts, loads, one = Parts(), Loads(), state(request("x" * 500))
    seen = SimpleNamespace(name="")

    def prefetch(packed: bytes, seconds: float, *, request_id: str, tenant: str) -> Any:
        seen.name = request_id
        return SimpleNamespace(cancel=lambda: None)

    parts.client.prefetch = prefetch  # type: ignore[method-assign]
    loads.prefetch(parts.ctx, one)
    parts.calls.run()
    assert seen.name == "x" * 64
