"""Goal: an engine with nothing else to do begins a step while a device still copies into its blocks, and computes the same.

Method: small engines at a real daemon, whose copies go on for a while after all of it was queued, as those of a device do. The
engine's thread waits for them where the stream of a device would.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import idle, worker
from kvtierd.connectors.vllm.copying import Chunk, CpuBlockCopier, OnQueued
from kvtierd.connectors.vllm.layout import WorkerLayout
from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.engine_cases import KINDS, Engines, fresh, right, save, two_groups
from tests.connectors.small_engine import SmallEngine

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
PATIENCE_S: Final = 30.0


class Queueing(CpuBlockCopier):
    """Copies after it has said that all is queued.

    Attributes:
        lasts_s: how long the copy takes.
        fails: it does, at its end.
        refuses: its stream cannot wait.
        ending: called after all was queued.
        followed: loads that the engine went on before the end of.
        overlapped: it computed with one of them before its end.
    """

    def __init__(self, layout: WorkerLayout) -> None:
        super().__init__(layout)
        self.lasts_s = 0.02
        self.fails = False
        self.refuses = False
        self.ending: Callable[[], object] = lambda: None
        self.followed = 0
        self.overlapped = False
        self._mark = threading.Event()

    def load(
        self,
        group: int,
        chunks: Iterable[Chunk],
        fence: object | None,
        cancelled: Callable[[], bool],
        on_queued: OnQueued | None = None,
    ) -> int:
        chunks, ended = list(chunks), threading.Event()
        if on_queued is not None:
            on_queued(ended, len(chunks))
        try:
            self.ending()
            time.sleep(self.lasts_s)
            if self.fails:
                raise RuntimeError("the device failed")
            return super().load(group, chunks, fence, cancelled)
        finally:
            ended.set()

    def follow(self, mark: object) -> None:
        if self.refuses:
            raise RuntimeError("no stream")
        assert isinstance(mark, threading.Event)
        self.followed += 1
        self._mark = mark

    def pass_marks(self) -> None:
        """What a stream does before the next kernel."""
        if self.followed:
            self.overlapped = self.overlapped or not self._mark.is_set()
            assert self._mark.wait(PATIENCE_S)


@pytest.fixture(autouse=True)
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "make_copier", Queueing)
    monkeypatch.setattr(idle, "STEP_S", PATIENCE_S)
    monkeypatch.setattr("kvtierd.connectors.vllm.connector.STEP_S", PATIENCE_S)


def copiers(engine: SmallEngine) -> list[Queueing]:
    made = [rank.connector._worker._copier for rank in engine.ranks]
    for rank, copier in zip(engine.ranks, made, strict=True):
        holds = rank.holds
        # What attention reads is compared on the engine's thread, as a kernel would read it.
        rank.holds = lambda *a, holds=holds, copier=copier: copier.pass_marks() or holds(*a)  # type: ignore[method-assign, misc]
    return made


def hit(engine: SmallEngine, tokens: list[int]) -> None:
    engine.generate("hit", tokens)
    right(engine, "hit")


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_computed_with_what_was_loaded(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens, **kind)
    made = copiers(engine)
    hit(engine, tokens)
    assert engine.computed["hit"] < len(tokens) / 2
    early = 0 if kind.get("groups") == 2 else 1
    assert [copier.followed for copier in made] == [early] * len(made)
    assert (engine.counts["loads|ok"], engine.side._loads._tails) == (1, {})
    assert engine.counts["load_bytes"] > 0


@two_groups
def test_what_cannot_be_told_early_is_waited_for(engines: Engines) -> None:
    """In one step, not over and over until it has ended."""
    tokens = fresh()
    engine = save(engines, tokens, groups=2)
    (copier,) = copiers(engine)
    copier.lasts_s = 0.5
    before = engine.steps
    hit(engine, tokens)
    assert engine.steps - before < 20


@pytest.mark.parametrize("kind", KINDS[:3])
def test_the_step_begins_before_the_copy_ends(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens, **kind)
    made = copiers(engine)
    for copier in made:
        copier.lasts_s = 1.0
    hit(engine, tokens)
    assert made[0].overlapped


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_a_copy_that_fails_after_the_engine_went_on(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens, **kind)
    for copier in copiers(engine):
        copier.fails = True
    engine.generate("hit", tokens, 6)
    engine.settle()
    assert list(engine.requests["hit"].output_token_ids) == engine.expected(tokens, 6)
    assert not engine.leaks()
    assert (engine.counts["loads|failed"], engine.counts["hook_failures"]) == (1, 0)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_request_is_aborted_while_its_copy_ends(kind: dict[str, Any], engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens, **kind)
    made = copiers(engine)
    for copier in made:
        copier.lasts_s = 0.3
    engine.add("gone", tokens, 5)
    engine.until(lambda: bool(engine.side._loads._tails))
    engine.abort("gone")
    engine.generate("after", tokens)
    right(engine, "after")
    assert engine.side._loads._tails == {}


def test_a_daemon_that_ends_while_a_device_copies(engines: Engines, own_daemon: DaemonProcess) -> None:
    """The memory is there until the device has read it, and no other daemon can have written to it by then."""
    tokens = fresh()
    engine = save(engines, tokens, address=own_daemon.address)
    (copier,) = copiers(engine)
    copier.ending = own_daemon.kill
    hit(engine, tokens)
    assert engine.computed["hit"] < len(tokens) / 2
    assert (copier.followed, engine.counts["loads|ok"]) == (1, 1)


def test_a_daemon_that_may_have_a_successor_by_then(engines: Engines, own_daemon: DaemonProcess) -> None:
    tokens = fresh()
    engine = save(engines, tokens, address=own_daemon.address)
    (copier,) = copiers(engine)
    copier.ending, copier.lasts_s = own_daemon.kill, 2 * worker.SUCCESSOR_S
    hit(engine, tokens)
    assert engine.computed["hit"] > len(tokens)
    assert engine.counts["load_failures|daemon"] == 1


def test_a_device_that_cannot_order_its_work_is_waited_for(engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens)
    (copier,) = copiers(engine)
    copier.refuses = True
    hit(engine, tokens)
    assert (copier.followed, engine.counts["loads|ok"]) == (0, 1)


def test_a_busy_engine_is_not_held_up_by_a_copy(engines: Engines) -> None:
    tokens = fresh()
    engine = save(engines, tokens)
    (copier,) = copiers(engine)
    engine.add("runs", fresh(), 300)
    engine.until(lambda: engine.requests["runs"].num_output_tokens > 2)
    engine.generate("hit", tokens)
    assert not engine.requests["runs"].is_finished()
    engine.abort("runs")
    right(engine, "hit")
    assert (copier.followed, engine.counts["loads|ok"]) == (0, 1)
