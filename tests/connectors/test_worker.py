"""Goal: a worker reports each job exactly once, as good only when all of its bytes are in place, and touches nothing after.

Method: real KV caches in CPU memory, slots of a real daemon that a client reserves and fetches as the scheduler's side does; the
daemon is killed and sessions are changed in the middle. Failures are put into the copies, the fences and the threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed here: run make test-vllm")
pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.client import Client
from kvtierd.connectors.vllm import worker as worker_module
from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.vllm.metadata import KvtierdMetadata, LoadJob
from kvtierd.connectors.vllm.worker import WorkerSide
from kvtierd.errors import Reason, RequestError
from kvtierd.memory import PAGE_BYTES
from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.one_worker import PATIENCE_S, Worker, put

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports

# ---- copies


def test_out_and_in_again(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    kept = [worker.content(b) for b in range(4)]
    put(worker, 0, (0, 1), (2, 3))
    job = worker.load((5, 6), (1, 4))
    worker.step(loads=[job])
    assert worker.loaded() == ({"r"}, set(), set())
    assert [worker.content(b) for b in (5, 6, 1, 4)] == kept
    meta = worker.side.worker_meta()
    assert meta is not None
    report = meta.loads[job.job_id]
    assert (report.ranks, report.nbytes, report.ok) == (1, 4 * worker.block_bytes, True)
    assert worker.side.take_loads() == (set(), set(), set())


def test_blocks_that_take_no_part_are_left_alone(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    kept = [worker.content(b) for b in range(7)]
    put(worker, 0, (0, 1))
    worker.step(loads=[worker.load((-1, 5))])
    assert worker.loaded() == ({"r"}, set(), set())
    assert [worker.content(b) for b in range(7)] == [*kept[:5], kept[1], kept[6]]


@pytest.mark.parametrize("most_bytes, expected", [(worker_module.STRETCH_BYTES, [8, 8]), (1, [4, 4, 4, 4])])
def test_slots_side_by_side_are_copied_as_one(
    most_bytes: int, expected: list[int], workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "STRETCH_BYTES", most_bytes)
    worker = workers(daemon, per_chunk=4)
    assert 4 * worker.block_bytes % PAGE_BYTES == 0, "else there would be a gap behind each"
    kept = [worker.content(b) for b in range(7)]
    copied: list[int] = []
    copier: Any = worker.side._copier
    for name in ("save", "load"):
        run = getattr(copier, name)
        monkeypatch.setattr(
            copier, name, lambda group, chunks, *more, run=run: run(group, (copied.append(len(c[1])) or c for c in chunks), *more)
        )
    put(worker, 0, (0, 1, 2, 3), (4, 5, -1, 6))
    job = worker.load((6, 5, 4, 3), (2, 1, -1, 0))
    worker.step(loads=[job])
    assert worker.loaded() == ({"r"}, set(), set())
    assert [worker.content(b) for b in (6, 5, 4, 3, 2, 1, 0)] == kept
    assert copied == expected


def test_memory_from_before_is_mapped_ahead(
    workers: Callable[..., Worker], own_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the first loads after an engine's restart need not wait until it is pinned."""
    before = workers(own_daemon)
    put(before, 0, (0, 1))
    monkeypatch.setattr(WorkerSide, "_pins_memory", True)
    after = WorkerSide(before.side._config, before.side._kv_cache_config, (0, 0), 1)
    after.register(before.cache.tensors)
    try:
        after.start_loads(KvtierdMetadata(sessions=[before.session()]))
        until_s = time.monotonic() + PATIENCE_S
        while not ((joined := after._sessions.get(before.client.session_token)) and joined._extents):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        while not joined._extents.mapped_extents or joined._users:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert joined._extents.mapped_extents == set(joined._extents.existing)
    finally:
        after.close()


def test_mapping_ahead_ends_with_the_session(
    workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers(daemon)
    assert worker.side.wait_for_copies(PATIENCE_S), "what joined it has left"
    joined = worker.side._sessions[worker.client.session_token]
    extents = joined.enter(worker.side._connect, time.monotonic() + 10)
    asked: list[list[int]] = []

    def gone(extent_ids: list[int], timeout_s: float) -> None:
        asked.append(extent_ids)
        if len(asked) == 2:
            joined.retire()
        raise RequestError(Reason.NOT_FOUND, "gone")

    monkeypatch.setattr(extents, "existing", (1, 2, 3))
    monkeypatch.setattr(extents, "map", gone)
    worker.side._map_ahead(joined, extents)
    assert asked == [[1], [2]], "one that is gone keeps the others from nothing"
    assert not joined._users
    assert extents.closed


def test_memory_of_a_daemon_that_has_died_is_let_go(workers: Callable[..., Worker], own_daemon: DaemonProcess) -> None:
    """At once where no copy uses it: one that is started in its place makes as much again."""
    worker = workers(own_daemon)
    put(worker, 0, (0, 1))
    joined = worker.side._sessions[worker.client.session_token]
    used = joined.enter(worker.side._connect, time.monotonic() + 10)
    assert used.mapped_extents
    own_daemon.kill()
    until_s = time.monotonic() + PATIENCE_S
    while not used.closed:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    time.sleep(0.1)
    assert joined._extents is used, "a copy may still be reading it"
    joined.leave()
    assert joined._extents is None
    idle = workers(own_daemon.start())
    put(idle, 0, (0, 1))
    joined = idle.side._sessions[idle.client.session_token]
    own_daemon.kill()
    while joined._extents is not None:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_each_rank_has_its_own_slots(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    ranks = [workers(daemon, rank, 2) for rank in range(2)]
    first, second = ranks
    second.step(sessions=[first.session()])
    second.cache.spaces[0].add_(1)
    kept = [[worker.content(b) for b in range(4)] for worker in ranks]
    job, reservation = first.save((0, 1), (2, 3))
    for worker in ranks:
        worker.step(saves=[job])
        assert worker.saved(job).ok
    assert reservation.commit() == 2
    load = first.load((4, 5), (6, 0))
    for worker, content in zip(ranks, kept, strict=True):
        worker.step(loads=[load])
        assert worker.loaded() == ({"r"}, set(), set())
        assert [worker.content(b) for b in (4, 5, 6, 0)] == content


# ---- failures


def test_a_job_without_slots_fails_with_its_blocks(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    worker.step(loads=[LoadJob(1, "r", [], np.asarray([3, 4], np.int64), 0.0)])
    assert worker.loaded() == ({"r"}, {"r"}, {3, 4})


def test_slots_of_another_session(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    before = worker.content(5)
    job = worker.load((5, 6))
    job.parts[0].token = b"another"
    save, _ = worker.save((2, 3), key=50, token=b"another")
    worker.step(loads=[job], saves=[save])
    assert worker.loaded() == ({"r"}, {"r"}, {5, 6})
    assert not worker.saved(save).ok
    assert worker.content(5) == before


def test_the_deadline_has_passed(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    worker.step(loads=[worker.load((5, 6), timeout_s=-1.0)])
    assert worker.loaded() == ({"r"}, {"r"}, {5, 6})
    meta = worker.side.worker_meta()
    assert meta is not None
    assert "deadline" in next(iter(meta.loads.values())).reason


@pytest.mark.parametrize("error", [RuntimeError, OSError, ValueError])
def test_a_copy_that_raises(
    error: type[Exception], workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers(daemon)
    put(worker, 0, (0, 1))

    def broken(*_: Any) -> Any:
        raise error("a copy")

    monkeypatch.setattr(worker.side._copier, "save", broken)
    monkeypatch.setattr(worker.side._copier, "load", broken)
    save, _ = worker.save((2, 3), key=50)
    worker.step(loads=[worker.load((5, 6))], saves=[save])
    assert worker.loaded() == ({"r"}, {"r"}, {5, 6})
    assert not worker.saved(save).ok


@pytest.mark.parametrize("where", ["fence", "sessions", "threads", "full"])
def test_jobs_that_cannot_be_begun_are_reported(
    where: str, workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is never reported holds blocks of the engine for good, and a load its request."""
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    save, _ = worker.save((2, 3), key=50)
    load = worker.load((5, 6))

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    side = worker.side
    if where == "fence":
        monkeypatch.setattr(side._copier, "fence", broken)
    elif where == "sessions":
        monkeypatch.setattr(side, "_renew", broken)
    else:
        for threads in (side._loader, side._saver):
            monkeypatch.setattr(threads, "submit", broken if where == "threads" else lambda task: False)
    meta = KvtierdMetadata(loads=[load], saves=[save], sessions=[worker.session()])
    for begin in (lambda: side.start_loads(meta), side.start_saves):
        try:
            begin()
        except RuntimeError:
            assert where in ("fence", "sessions")
    assert worker.loaded() == ({"r"}, {"r"}, {5, 6})
    assert worker.saved(save).ok == (where == "sessions")
    monkeypatch.undo()
    worker.step(loads=[worker.load((5, 6), name="again")])
    assert worker.loaded() == ({"again"}, set(), set())


def test_a_cache_that_cannot_be_served(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    worker.side.refuse("why")
    save, _ = worker.save((2, 3))
    worker.step(loads=[LoadJob(1, "r", [], np.asarray([1], np.int64), 1.0)], saves=[save])
    assert worker.loaded() == ({"r"}, {"r"}, {1})
    assert not worker.saved(save).ok


# ---- the daemon goes


def test_the_daemon_dies_between_promise_and_copy(workers: Callable[..., Worker], own_daemon: DaemonProcess) -> None:
    worker = workers(own_daemon)
    put(worker, 0, (0, 1))
    before = [worker.content(b) for b in range(7)]
    load = worker.load((5, 6))
    own_daemon.kill()
    (joined,) = worker.side._sessions.values()
    until_s = time.monotonic() + PATIENCE_S
    while (extents := joined._extents) is not None and not extents.closed:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    worker.step(loads=[load])
    assert worker.loaded() == ({"r"}, {"r"}, {5, 6})
    assert [worker.content(b) for b in range(5)] == before[:5]


def test_the_daemon_dies_in_the_middle_of_a_copy(
    workers: Callable[..., Worker], own_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that were read while the connection broke count for nothing, though the memory was still mapped."""
    worker = workers(own_daemon)
    put(worker, 0, (0, 1))
    load = worker.load((5, 6))
    copier = worker.side._copier
    assert copier is not None
    right = copier.load

    def slow(group: int, chunks: Any, fence: Any, cancelled: Any) -> int:
        done = right(group, chunks, fence, cancelled)
        own_daemon.kill()
        (joined,) = worker.side._sessions.values()
        while joined._extents is not None and not joined._extents.closed:
            time.sleep(0.001)
        return done

    monkeypatch.setattr(copier, "load", slow)
    worker.step(loads=[load])
    assert worker.loaded() == ({"r"}, {"r"}, {5, 6})


def test_another_session_takes_its_place(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    """Loads that were begun with the old session still end well; saves of the new one need not wait for them."""
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    kept = worker.content(0)
    load = worker.load((5, 6))
    gate = threading.Event()
    worker.side._loader.submit(lambda: gate.wait(PATIENCE_S) and None)
    worker.step(loads=[load])
    old = worker.client
    worker.client = Client(old.namespace, old.address)
    assert worker.client.wait_attached(30)
    save, _ = worker.save((2, 3), key=50)
    worker.step(sessions=[worker.session()], saves=[save])
    assert worker.saved(save).ok
    gate.set()
    assert worker.loaded() == ({"r"}, set(), set())
    assert worker.content(5) == kept
    worker.side._loader.close()
    assert [joined.session.token for joined in worker.side._sessions.values()] == [worker.client.session_token]
    worker.held.append(old)


def test_the_same_session_told_twice(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    (joined,) = worker.side._sessions.values()
    worker.step(sessions=[worker.session()])
    assert list(worker.side._sessions.values()) == [joined]
    put(worker, 0, (0, 1))


# ---- small things


def test_the_layout_is_told_once(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    meta = worker.side.worker_meta()
    assert meta is not None
    assert meta.layouts == {(0, 0): worker.side.rank_layout}
    assert worker.side.worker_meta() is None


def test_a_step_that_is_measured_is_named_once(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    worker.side.worker_meta()
    worker.step(step=7)
    meta = worker.side.worker_meta()
    assert meta is not None
    assert meta.step == 7
    assert worker.side.worker_meta() is None


def test_the_end_with_work_under_way(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    save, _ = worker.save((2, 3), key=50)
    worker.step(loads=[worker.load((5, 6))], saves=[save])
    worker.side.close()
    worker.side.close()
    assert worker.loaded()[0] == {"r"}
    assert worker.saved(save) is not None
    assert not worker.side._sessions
    worker.step(loads=[LoadJob(9, "late", [], np.asarray([1], np.int64), 1.0)])
    assert worker.loaded() == ({"late"}, {"late"}, {1})


def test_a_copy_that_does_not_end_keeps_its_resources(
    workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers(daemon)
    closed: list[bool] = []
    monkeypatch.setattr(worker.side._copier, "close", lambda: closed.append(True))
    gate = threading.Event()
    worker.side._saver.submit(lambda: gate.wait(PATIENCE_S) and None)
    monkeypatch.setattr(worker.side._saver, "close", lambda: Background.close(worker.side._saver, 0.05))
    worker.side.close()
    assert not closed
    gate.set()
    assert Background.close(worker.side._saver)


def test_threads_are_bounded_and_survive_failures() -> None:
    threads = Background(1, "t")
    gate, ran = threading.Event(), threading.Event()
    begun = threading.Event()
    threads.submit(lambda: (begun.set(), gate.wait(PATIENCE_S))[0])
    assert begun.wait(PATIENCE_S)

    def broken() -> None:
        raise RuntimeError("a task")

    assert threads.submit(broken)
    accepted = 0
    while threads.submit(lambda: None):
        accepted += 1
        assert accepted < 100_000
    gate.set()
    while not threads.submit(ran.set):
        time.sleep(0.001)
    assert ran.wait(PATIENCE_S)
    assert threads.close()
    assert not threads.submit(lambda: None)
    assert SimpleNamespace(ok=threads.close()).ok


def test_a_task_that_waits_keeps_no_other_back() -> None:
    """As many wait at the same time as are allowed to, and threads are made only when all are busy."""
    threads = Background(3, "t")
    gate, begun = threading.Event(), threading.Semaphore(0)
    for _ in range(5):
        threads.submit(lambda: (begun.release(), gate.wait(PATIENCE_S))[0])
    for _ in range(3):
        assert begun.acquire(timeout=PATIENCE_S)
    assert not begun.acquire(timeout=0.05)
    gate.set()
    assert threads.close()
    assert len(threads._threads) == 3
    lazy = Background(3, "t")
    for _ in range(5):
        done = threading.Event()
        lazy.submit(done.set)
        assert done.wait(PATIENCE_S)
        while lazy._open:
            time.sleep(0.001)
    assert lazy.close()
    assert len(lazy._threads) == 1
