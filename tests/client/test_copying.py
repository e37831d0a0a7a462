"""Goal: large copies are shared among threads, every byte arrives, and nothing is given back while a helper still copies.
Method: the limits are lowered or the copies held up; bytes are compared."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtierd.client.copying import PARALLEL_BYTES, Copier, Job
from kvtierd.client.deadline import Deadline

MIB = 1 << 20


def jobs_of(count: int) -> list[Job]:
    """Blocks of 1 MiB in two shards."""
    rng = np.random.default_rng(count)
    return [
        (10 + i, [(np.zeros(MIB // 2, np.uint8), rng.integers(0, 256, MIB // 2, dtype=np.uint8)) for _ in range(2)])
        for i in range(count)
    ]


def arrived(jobs: list[Job]) -> list[bool]:
    return [all(np.array_equal(target, source) for target, source in pairs) for _, pairs in jobs]


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 20])
def test_every_block_arrives_whatever_the_number_of_threads(threads: int, count: int) -> None:
    copier, jobs = Copier(threads), jobs_of(count)
    assert copier.run(jobs, count * MIB, Deadline(60)) == [10 + i for i in range(count)]
    assert all(arrived(jobs))
    copier.close()


def test_calls_of_many_threads_share_the_helpers() -> None:
    copier = Copier(3)

    def work(count: int) -> bool:
        jobs = jobs_of(count)
        return copier.run(jobs, count * MIB, Deadline(60)) == [n for n, _ in jobs] and all(arrived(jobs))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, [8, 9, 10, 11] * 6))
    assert all(copier._idle.acquire(blocking=False) for _ in range(2)), "both helpers are idle again"
    copier.close()


def test_a_closed_copier_still_copies_in_the_callers_thread() -> None:
    copier, jobs = Copier(4), jobs_of(8)
    copier.close()
    copier.close()
    assert len(copier.run(jobs, PARALLEL_BYTES, Deadline(60))) == 8
    assert all(arrived(jobs))


def test_past_the_deadline_nothing_is_begun_and_what_is_named_is_whole() -> None:
    copier, jobs = Copier(2), jobs_of(8)
    assert copier.run(jobs, PARALLEL_BYTES, Deadline(0)) == []
    assert not any(arrived(jobs))
    copier.close()


def test_an_interrupt_waits_for_the_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own copy is interrupted while a helper is in the middle of its block."""
    copier, jobs = Copier(2), jobs_of(8)
    helping, go_on = threading.Event(), threading.Event()
    main = threading.current_thread()
    real = np.copyto
    finished: list[bool] = []

    def copy(target: object, source: object) -> None:
        if threading.current_thread() is main:
            assert helping.wait(10)
            threading.Timer(0.1, go_on.set).start()
            raise KeyboardInterrupt
        helping.set()
        assert go_on.wait(10)
        real(target, source)  # type: ignore[call-overload]
        finished.append(True)

    monkeypatch.setattr("kvtierd.client.copying.np.copyto", copy)
    with pytest.raises(KeyboardInterrupt):
        copier.run(jobs, PARALLEL_BYTES, Deadline(60))
    assert finished == [True, True], "the helper ended its block of two shards, and began no other"
    monkeypatch.undo()
    copier.close()


@pytest.mark.parametrize("threads", [0, 65])
def test_senseless_numbers_of_threads_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="copy_threads"):
        Copier(threads)
