"""Goal: every block that a save holds is given back once, whatever becomes of it; only whole and right chunks are published.

Method: vLLM's own block pool and requests; the daemon's client and the threads are stand-ins, so answers come when told to.
After each test all blocks of the pool are free and all slots are committed or returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import saves as module
from kvtierd.connectors.vllm.metadata import Report
from kvtierd.connectors.vllm.saves import Saves
from kvtierd.errors import DaemonUnavailableError
from tests.connectors.parts import BLOCK, CHUNK, Parts, request, state

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


class Set:
    """One engine's saves, and a request with its blocks."""

    def __init__(self, **more: Any) -> None:
        self.parts = Parts(**more)
        self.saves = Saves(self.parts.ctx)
        self.one = state(request(tokens=160))
        self.table = [self.parts.table(10) for _ in self.parts.ctx.plan.groups]

    @property
    def client(self) -> Any:
        return self.parts.client

    def collect(self, computed: int = 160, one: Any = None) -> None:
        self.saves.collect(one or self.one, self.table, computed)

    def end(self) -> None:
        """The request ends: vLLM gives its blocks back."""
        for ids in self.table:
            self.parts.free([b for b in ids if b])
        self.table = []

    def copied(self, jobs: list[Any], **report: Any) -> None:
        """Every rank has copied."""
        for job in jobs:
            for _ in range(self.parts.ctx.plan.ranks):
                self.saves.report(job.job_id, Report(**report))

    def nothing_is_left(self) -> None:
        self.parts.calls.run()
        self.copied(self.saves.jobs())
        self.parts.calls.run()
        if self.table:
            self.end()
        assert self.parts.used == 0
        assert (self.saves.held, self.saves.pending, dict(self.saves._by_request)) == (0, False, {})
        for reservation in self.client.reservations:
            assert reservation.closed == 1


@pytest.fixture
def made() -> Iterator[Callable[..., Set]]:
    sets: list[Set] = []

    def make(**more: Any) -> Set:
        sets.append(Set(**more))
        return sets[-1]

    yield make
    for one in sets:
        one.nothing_is_left()


# ---- what is due


def test_chunks_of_the_prompt_as_they_are_computed(made: Callable[..., Set]) -> None:
    one = made()
    due = [one.saves.choice.due(one.one, computed) for computed in (0, CHUNK - 1, CHUNK, 3 * CHUNK + 1, 160, 1000)]
    assert due == [0, 0, 1, 3, 5, 5]


def test_generated_tokens_only_when_asked_for_and_accepted(made: Callable[..., Set]) -> None:
    plain, decode = made(), made(save_decode=True)
    for one in (plain, decode):
        one.one.request.append_output_token_ids(list(range(CHUNK)))
    assert plain.saves.choice.due(plain.one, 192) == 5
    assert decode.saves.choice.due(decode.one, 192) == 5, "drafts may have been rejected"
    decode.one.request.append_output_token_ids(1)
    assert decode.saves.choice.due(decode.one, 192) == 6
    assert decode.saves.choice.due(decode.one, 193 + 50) == 6, "tokens that are only placeholders have no key"


@pytest.mark.parametrize(("limit", "due"), [(0, 0), (CHUNK - 1, 0), (CHUNK + 1, 1), (1000, 5)])
def test_a_limit_on_what_is_saved(limit: int, due: int, made: Callable[..., Set]) -> None:
    one = made()
    assert one.saves.choice.due(state(max_save_tokens=limit), 160) == due


def test_requests_that_save_nothing(made: Callable[..., Set]) -> None:
    one = made()
    bypassed, stale, not_loaded = state(), state(), state()
    bypassed.bypass = stale.stale = not_loaded.no_load = True
    assert [one.saves.choice.due(s, 160) for s in (bypassed, stale, state(skip_save=True))] == [0, 0, 0]
    assert one.saves.choice.due(not_loaded, 160) == 5, "what is computed after a load has failed is saved as ever"


# ---- one save's way


def test_granted_copied_committed(made: Callable[..., Set]) -> None:
    one = made(ranks=2)
    one.collect()
    assert (one.saves.held, one.saves.pending, one.saves.jobs()) == (10, True, [])
    table = one.table[0]
    one.end()
    assert one.parts.used == 10, "the request has ended, and its blocks are still held"
    one.parts.calls.run()
    jobs = one.saves.jobs()
    assert [b for job in jobs for b in job.part.block_ids.tolist()] == table
    one.saves.report(jobs[0].job_id, Report())
    assert one.parts.used == 10, "a rank may still read"
    one.saves.report(jobs[0].job_id, Report())
    assert one.parts.used < 10
    one.copied(jobs[1:])
    one.parts.calls.run()
    assert sum(len(r.committed) for r in one.client.reservations) == 5
    one.saves.jobs()
    assert one.parts.counts["saves|ok"] == 5


def test_held_already(made: Callable[..., Set]) -> None:
    one = made()
    one.client.outcome = lambda key: "HELD"
    one.collect()
    one.parts.calls.run()
    assert one.saves.jobs() == []
    assert (one.saves.held, one.parts.counts["saves|held"]) == (0, 5)
    again = state(request("again"))
    one.collect(one=again)
    assert (len(one.parts.calls.tasks), one.parts.counts["saves|held"]) == (0, 10), "known for a while"
    one.saves.forget()
    one.collect(one=state(request("later")))
    assert one.parts.calls.tasks


@pytest.mark.parametrize("outcome", ["BUSY", "QUOTA", "IN_PROGRESS", "TOO_LARGE", "LIMIT", "DRAINING", "UNAVAILABLE", "DEADLINE"])
def test_refused(outcome: str, made: Callable[..., Set]) -> None:
    one = made()
    one.client.outcome = lambda key: outcome
    one.collect()
    one.parts.calls.run()
    assert one.saves.jobs() == []
    assert (one.saves.held, one.parts.counts[f"saves|{outcome.lower()}"]) == (0, 5)


def test_some_are_granted(made: Callable[..., Set]) -> None:
    one = made(max_held_fraction=0.9, blocks=200)
    keys = one.parts.ctx.keys.keys(one.one.request, 0, 0, 5)
    one.client.outcome = lambda key: "GRANTED" if key in (keys[1], keys[3]) else "HELD"
    one.collect()
    one.parts.calls.run()
    (job,) = one.saves.jobs()
    table = one.table[0]
    assert job.part.block_ids.tolist() == table[2:4] + table[6:8]
    assert job.part.slots.tolist() == [1001, 1003]
    assert one.saves.held == 4
    one.copied([job])
    one.parts.calls.run()
    assert one.client.reservations[0].committed == [1, 3]


def test_nothing_was_copied(made: Callable[..., Set]) -> None:
    one = made()
    one.collect()
    one.parts.calls.run()
    one.copied(one.saves.jobs(), ok=False)
    one.parts.calls.run()
    assert one.parts.counts["saves|failed"] == sum(len(r.granted) for r in one.client.reservations) > 0
    assert sum(len(r.committed) for r in one.client.reservations) == 0


def test_a_commit_that_is_lost_is_asked_for_again(made: Callable[..., Set]) -> None:
    one = made()
    one.collect()
    one.parts.calls.run()
    for reservation in one.client.reservations:
        reservation.commits = False
    one.copied(one.saves.jobs())
    one.parts.calls.run()
    one.saves.jobs()
    assert one.parts.counts["saves|lost"] == 5
    one.collect(one=state(request("again")))
    assert one.parts.calls.tasks
    one.parts.calls.run()
    one.copied(one.saves.jobs())


def test_the_daemon_goes_or_refuses(made: Callable[..., Set]) -> None:
    one = made()

    def gone(packed: bytes, **_: Any) -> Any:
        raise DaemonUnavailableError("gone")

    one.client.reserve = gone
    one.collect()
    one.parts.calls.run()
    assert one.saves.jobs() == []
    assert one.saves.held == 0


def test_an_answer_that_comes_too_late_is_not_waited_for(made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(save_timeout_ms=1)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.now + 1e9)
    one.collect()
    clock.now += 100
    one.parts.calls.run()
    assert not one.client.reservations
    assert one.saves.jobs() == []


def test_no_room_for_another_call(made: Callable[..., Set]) -> None:
    """Blocks are held before a thread may hold slots for them; where none will, they go back at once."""
    one = made()
    one.parts.calls.full = True
    one.collect()
    assert (one.saves.held, one.parts.counts["saves|busy"]) == (0, 5)
    assert one.one.next_chunk == 5


def test_no_room_for_the_commit(made: Callable[..., Set]) -> None:
    one = made()
    one.collect()
    one.parts.calls.run()
    jobs = one.saves.jobs()
    one.parts.calls.full = True
    one.copied(jobs)
    assert one.saves.held == 0


def test_one_save_that_cannot_be_made_does_not_hold_up_the_others(made: Callable[..., Set]) -> None:
    one = made(blocks=40)
    one.collect()
    one.parts.calls.run()
    assert len(one.client.reservations) > 1

    def broken(index: int) -> list[int]:
        raise KeyError(index)

    one.client.reservations[0].slots = broken
    jobs = one.saves.jobs()
    assert len(jobs) == len(one.client.reservations) - 1
    one.copied(jobs)


def test_reports_that_nobody_waits_for(made: Callable[..., Set]) -> None:
    one = made(ranks=2)
    one.collect()
    one.parts.calls.run()
    jobs = one.saves.jobs()
    one.copied(jobs)
    one.copied(jobs)
    one.saves.report(999, Report())
    one.parts.calls.run()
    assert one.parts.used == 10


# ---- how much is held


def test_a_long_prompt_in_a_small_cache_is_saved_piece_by_piece(made: Callable[..., Set]) -> None:
    """One save never needs more blocks than may be held at all, or nothing of the prompt would ever be saved."""
    one = made(blocks=32, max_held_fraction=0.25)
    for _ in range(20):
        one.collect()
        assert one.saves.held <= 8
        one.parts.calls.run()
        one.copied(one.saves.jobs())
        one.parts.calls.run()
    assert one.one.next_chunk == 5
    assert sum(len(r.committed) for r in one.client.reservations) == 5
    assert one.parts.counts["save_delays"] > 0


def test_a_chunk_larger_than_what_may_be_held_is_saved_alone(made: Callable[..., Set]) -> None:
    one = made(blocks=32, max_held_fraction=0.01)
    for _ in range(20):
        one.collect()
        assert one.saves.held <= CHUNK // BLOCK
        one.parts.calls.run()
        one.copied(one.saves.jobs())
        one.parts.calls.run()
    assert sum(len(r.committed) for r in one.client.reservations) == 5


def test_what_a_request_leaves_unsaved_is_counted(made: Callable[..., Set]) -> None:
    one = made(blocks=32, max_held_fraction=0.25)
    one.saves.collect_last(one.one, one.table, 160)
    assert one.parts.counts["saves|busy"] == 5 - one.one.next_chunk > 0
    one.parts.calls.run()
    one.copied(one.saves.jobs())


def test_blocks_that_left_their_window_are_left_out(made: Callable[..., Set]) -> None:
    one = made(windows=(0, 40))
    null = one.parts.ctx.null_block
    one.parts.free(one.table[1][:5])
    one.table[1][:5] = [null] * 5
    one.collect()
    one.parts.calls.run()
    jobs = one.saves.jobs()
    second = [job for job in jobs if job.part.group == 1]
    assert [b for job in second for b in job.part.block_ids.tolist()] == one.table[1][6:]
    assert null not in [b for job in jobs for b in job.part.block_ids.tolist()]
    one.copied(jobs)
    one.table[1] = one.table[1][5:]


def test_chunks_of_no_use_without_their_window_wait_for_a_later_one(made: Callable[..., Set]) -> None:
    one = made(windows=(0, 40), blocks=200, max_held_fraction=0.9)
    null, table = one.parts.ctx.null_block, one.table[1]
    lost = [null, table[1], table[2], null, null, null]
    one.saves.collect(one.one, [one.table[0], lost], 3 * CHUNK)
    assert (one.saves.held, one.one.next_chunk) == (0, 0), "a hit could end nowhere in here"
    assert one.saves.choice.due(one.one, 3 * CHUNK) == one.one.useless == 3, "not looked at again and again"
    one.saves.collect(one.one, [one.table[0], lost + table[6:8]], 4 * CHUNK)
    assert (one.saves.held, one.one.next_chunk) == (0, 0), "a window reaches over two chunks"
    one.saves.collect(one.one, [one.table[0], lost + table[6:10]], 5 * CHUNK)
    assert one.one.next_chunk == 5
    one.parts.calls.run()
    jobs = one.saves.jobs()
    assert sorted(b for job in jobs for b in job.part.block_ids.tolist()) == sorted(one.table[0] + table[6:10])
    one.copied(jobs)


def test_chunks_of_no_use_at_the_end_are_counted(made: Callable[..., Set]) -> None:
    one = made(windows=(0, 40), blocks=200, max_held_fraction=0.9)
    null, table = one.parts.ctx.null_block, one.table[1]
    one.saves.collect_last(one.one, [one.table[0], [*table[:8], null, table[9]]], 160)
    assert one.one.next_chunk == 4
    assert (one.parts.counts["saves|window"], one.parts.counts["saves|busy"]) == (2, 0)
    one.parts.calls.run()
    one.copied(one.saves.jobs())


def test_a_table_that_is_too_short(made: Callable[..., Set]) -> None:
    one = made()
    one.saves.collect(one.one, [one.table[0][:5]], 160)
    one.parts.calls.run()
    jobs = one.saves.jobs()
    assert [b for job in jobs for b in job.part.block_ids.tolist()] == one.table[0][:4]
    one.copied(jobs)


def test_room_for_one_group_only(made: Callable[..., Set]) -> None:
    """Nothing is asked for until there is room for all groups, or the first would be asked for again and again."""
    one = made(windows=(0, 40), max_held_fraction=0.25)
    for _ in range(20):
        one.collect()
        one.parts.calls.run()
        one.copied(one.saves.jobs())
        one.parts.calls.run()
    asked = [key for keys in one.client.asked for key in keys]
    assert (len(asked), len(set(asked))) == (10, 10)


def test_little_is_held_while_the_daemon_does_not_answer(made: Callable[..., Set]) -> None:
    one = made(max_held_fraction=0.9, blocks=64)
    one.client.outcome = lambda key: "DEADLINE"
    one.collect()
    one.parts.calls.run()
    one.saves.jobs()
    assert one.saves._room == one.saves._max_held // module.BATCH_SHARE
    one.client.outcome = lambda key: "GRANTED"
    one.collect(one=state(request("later")))
    one.parts.calls.run()
    one.copied(one.saves.jobs())
    assert one.saves._room == one.saves._max_held


@pytest.mark.parametrize("others_hold_them", [True, False])
def test_blocks_that_get_free_soon(others_hold_them: bool, made: Callable[..., Set], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM waits for these instead of preempting a request. It must not wait for blocks that stay taken, or for a daemon."""
    one = made()
    one.collect()
    one.parts.calls.run()
    if not others_hold_them:
        one.end()
    assert not one.saves.frees_soon, "nobody copies yet"
    jobs = one.saves.jobs()
    assert one.saves.frees_soon is not others_hold_them
    monkeypatch.setattr(module, "MAX_COPY_S", 0.0)
    assert not one.saves.frees_soon, "something is wrong with these copies"
    one.copied(jobs)


def test_all_at_once_at_the_end(made: Callable[..., Set]) -> None:
    one = made()
    one.collect()
    one.parts.calls.run()
    one.saves.close()
