"""Goal: a worker waits for the daemon, and for the engine's own work, no longer than it is worth, and says how long copying took.

Method: as in ``test_worker``; the way to the daemon is broken and mended by the test.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed here: run make test-vllm")
pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.client import ExtentMap
from kvtierd.connectors.vllm import joining
from kvtierd.connectors.vllm import worker as worker_module
from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.vllm.joining import Joined
from kvtierd.connectors.vllm.metadata import LoadJob
from kvtierd.errors import DaemonUnavailableError
from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.one_worker import NOTHING, Worker, put

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


class Reach:
    """A rank's way to the daemon, which a test can break: each attempt takes all the time that it is given."""

    def __init__(self, worker: Worker, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.broken = True
        self.waits: list[float] = []
        (self.joined,) = worker.side._sessions.values()
        worker.side._loader.close()  # what joined it ahead has ended
        worker.side._loader = Background(1, "kvtierd-load")
        assert self.joined._extents is not None
        if name == "join":
            self.joined._extents.close()
            self.right: Any = worker.side._connect
            monkeypatch.setattr(worker.side, "_connect", self.call)
        else:
            self.right = self.joined._extents.map
            monkeypatch.setattr(self.joined._extents, "map", self.call)

    def call(self, what: Any, timeout_s: float, *more: Any) -> Any:
        self.waits.append(timeout_s)
        if not self.broken:
            return self.right(what, timeout_s, *more)
        time.sleep(timeout_s)
        raise DaemonUnavailableError("cannot be reached")


@pytest.mark.parametrize("name", ["join", "map"])
def test_a_daemon_that_a_rank_cannot_reach_costs_one_wait(
    name: str, workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host, another mount namespace, a daemon that hangs: not every load and save waits in full, and it gets well again."""
    worker = workers(daemon)
    monkeypatch.setattr(joining, "JOIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(joining, "FIRST_PAUSE_S", 0.5)
    worker.side._sessions.clear()
    worker.step(sessions=[worker.session()])
    reach = Reach(worker, monkeypatch, name)
    save, _ = worker.save((2, 3), key=50)
    first, _ = worker.save((0, 1))
    worker.step(saves=[save, first])
    assert not worker.saved(save).ok
    loads = [LoadJob(worker.job_id(), f"r{n}", [save.part], NOTHING, 30.0) for n in range(5)]
    begun_s = time.monotonic()
    worker.step(loads=loads)
    ended: set[str] = set()
    while len(ended) < 5:
        ended |= worker.loaded()[1]
    assert time.monotonic() - begun_s < 0.3
    assert len(reach.waits) == 1
    reach.broken = False
    while reach.joined._pauses.pausing(time.monotonic()):
        time.sleep(0.01)
    again, _ = worker.save((4, 5), key=60)
    worker.step(saves=[again])
    assert worker.saved(again).ok


@pytest.mark.parametrize("name", ["join", "map"])
def test_a_load_waits_for_the_daemon_up_to_its_deadline_only(
    name: str, workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers(daemon)
    save, _ = worker.save((2, 3))
    reach = Reach(worker, monkeypatch, name)
    worker.step(loads=[LoadJob(1, "r", [save.part], NOTHING, 0.2)])
    assert worker.loaded() == ({"r"}, {"r"}, {2, 3})
    (wait,) = reach.waits
    assert wait <= 0.2
    meta = worker.side.worker_meta()
    assert meta is not None
    assert meta.loads[1].cause == "deadline"


def test_a_load_whose_turn_comes_too_late_does_not_ask_the_daemon(
    workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers(daemon)
    save, _ = worker.save((2, 3))
    reach = Reach(worker, monkeypatch, "join")
    worker.step(loads=[LoadJob(1, "r", [save.part], NOTHING, -1.0)])
    assert worker.loaded() == ({"r"}, {"r"}, {2, 3})
    assert not reach.waits


def test_memory_that_cannot_be_had_is_named(workers: Callable[..., Worker], daemon: DaemonProcess) -> None:
    worker = workers(daemon)
    save, _ = worker.save((2, 3))
    reach = Reach(worker, pytest.MonkeyPatch(), "none")
    assert reach.joined._extents is not None
    reach.joined._extents.map = reach.right  # type: ignore[method-assign]
    reach.joined._extents._on_mapped = lambda *_: 1 / 0  # type: ignore[assignment, return-value]
    worker.step(loads=[LoadJob(1, "r", [save.part], NOTHING, 30.0)])
    assert worker.loaded() == ({"r"}, {"r"}, {2, 3})
    meta = worker.side.worker_meta()
    assert meta is not None
    assert (meta.loads[1].cause, meta.loads[1].lost) == ("refused", frozenset(save.part.slots.tolist()))


def test_the_time_of_a_copy_is_without_what_it_waits_for(
    workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapping and pinning memory, and the engine's work before it, would make loading look slow."""
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    right, passed_s = Joined.map, time.monotonic() + 0.6
    monkeypatch.setattr(Joined, "map", lambda *args: (time.sleep(0.3), right(*args))[1])
    monkeypatch.setattr(worker.side._copier, "fence", lambda: SimpleNamespace(query=lambda: time.monotonic() > passed_s))
    job = worker.load((5, 6), (1, -1))
    job.parts[0].slots = job.parts[0].slots.repeat(2)
    worker.step(loads=[job])
    assert worker.loaded() == ({"r"}, set(), set())
    assert time.monotonic() > passed_s
    meta = worker.side.worker_meta()
    assert meta is not None
    assert meta.loads[job.job_id].seconds < 0.2
    assert meta.loads[job.job_id].nbytes == 3 * worker.block_bytes, "a block that takes no part has no bytes"


def test_a_fence_that_is_not_passed_ends_with_the_deadline(
    workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    monkeypatch.setattr(worker.side._copier, "fence", lambda: SimpleNamespace(query=lambda: False))
    worker.step(loads=[worker.load((5, 6), timeout_s=0.1)])
    assert worker.loaded() == ({"r"}, {"r"}, {5, 6})


def test_a_rank_says_where_it_runs(workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "device_node", lambda device: 7)
    monkeypatch.setattr(worker_module, "host_identity", lambda: "here")
    seen: list[int] = []
    monkeypatch.setattr(worker_module, "ExtentMap", lambda *_, **more: seen.append(more["numa_node"]) or ExtentMap(*_, **more))
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    assert seen == [7]
    assert worker.side.rank_layout is not None
    assert worker.side.rank_layout.host == "here"


@pytest.mark.parametrize("what", ["load", "save"])
def test_a_copy_that_fails_lets_go_of_its_slots(
    what: str, workers: Callable[..., Worker], daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: an extent that is taken back stays mapped as long as there is a view of it."""
    worker = workers(daemon)
    put(worker, 0, (0, 1))
    views: list[Any] = []

    def broken(group: int, chunks: Any, *_: Any) -> Any:
        views.append(weakref.ref(next(chunks)[0]))
        raise DaemonUnavailableError("a copy")  # one that is logged with its trace stays with the log

    monkeypatch.setattr(worker.side._copier, what, broken)
    gc.disable()
    try:
        if what == "load":
            worker.step(loads=[worker.load((5, 6))])
            assert worker.loaded() == ({"r"}, {"r"}, {5, 6})
        else:
            save, _ = worker.save((2, 3), key=50)
            worker.step(saves=[save])
            assert not worker.saved(save).ok
        begun_s = time.monotonic()
        while views[0]() is not None and time.monotonic() < begun_s + 5:
            time.sleep(0.01)
        assert views[0]() is None
    finally:
        gc.enable()
