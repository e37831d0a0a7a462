"""Goal: a reset, a sleep and a new session of the daemon leave nothing behind that is no longer true: not in what requests hit, not
in what is saved, not in what vLLM's event stream has been told, and no block that nobody reads.

Method: vLLM's own scheduler with a function of the tokens in place of a model (``small_engine``) and a real daemon. Moments that
are hard to hit are held by stopping the workers' threads or the answers of the daemon.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtierd.connectors.vllm import connector as connector_module
from kvtierd.connectors.vllm import resets as resets_module
from kvtierd.connectors.vllm import saves as saves_module
from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.engine_cases import KINDS, Engines, Stop, fresh, right, save
from tests.connectors.small_engine import BLOCK, CHUNK, NEW, RequestStatus, SmallEngine

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nothing_is_left_open")]


NOT_KEPT = pytest.mark.skipif(not NEW, reason="this vLLM keeps the blocks of a request until its saves have ended")


class Heard:
    """What an engine publishes of blocks beyond its own memory."""

    def __init__(self, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.stored: list[tuple[int, Any]] = []
        self.removed: list[tuple[int, Any]] = []
        monkeypatch.setattr(engine.scheduler.kv_event_publisher, "publish", self._publish)

    def _publish(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", "") == "CPU":
                heard = {BlockStored: self.stored, BlockRemoved: self.removed}[type(event)]
                heard += [(event.group_idx, h) for h in event.block_hashes]

    def of(self, name: str, chunks: int) -> list[tuple[int, Any]]:
        """Hashes of a request's first chunks, of all groups."""
        hashes = self.engine.requests[name].block_hashes[: chunks * CHUNK // BLOCK]
        return sorted((group, maybe_convert_block_hash(h)) for group in range(self.engine.groups) for h in hashes)


# ---- events


@pytest.mark.parametrize("kind", KINDS)
def test_events_of_saves_loads_and_a_reset(kind: dict[str, Any], engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = fresh(256)
    engine = engines(events=True, **kind)
    heard = Heard(engine, monkeypatch)
    engine.generate("a", tokens)
    engine.settle()
    assert sorted(heard.stored) == heard.of("a", 4), "at once, not with the next request"
    engine.forget()
    engine.generate("again", tokens)
    engine.settle()
    assert (len(heard.stored), heard.removed) == (len(heard.of("a", 4)), [])
    reader = engines(events=True, **kind)
    other = Heard(reader, monkeypatch)
    reader.generate("b", tokens)
    reader.settle()
    assert set(other.of("b", 4)) >= set(other.stored) > set(), "what it has loaded; of windows no more than is needed"
    assert {h for group, h in other.stored if not group} == {h for group, h in other.of("b", 4) if not group}
    engine.connector.reset_cache()
    engine.step()
    assert sorted(heard.removed) == heard.of("a", 4)
    right(engine, "a", "again")


def test_a_new_session_takes_back_what_was_told(
    engines: Engines, own_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(own_daemon.address, events=True)
    heard = Heard(engine, monkeypatch)
    engine.generate("a", fresh(256))
    engine.settle()
    own_daemon.kill()
    own_daemon.start()
    engine.until(lambda: engine.side._pools.attached)
    engine.until(lambda: bool(heard.removed))
    assert sorted(heard.removed) == heard.of("a", 4)


# ---- blocks that saves hold


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are made later are in other processes."""
    monkeypatch.setattr(connector_module, "is_here", lambda engine_id, worker: None)


@NOT_KEPT
def test_a_reset_lets_saves_end_where_the_engine_takes_no_steps(engines: Engines) -> None:
    engine, tokens = engines(), fresh()
    stop = Stop(engine)
    engine.generate("a", tokens)
    assert engine.side._saves.held > 0
    threading.Timer(0.1, stop.go).start()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.side._saves.held == 0
    engine.settle()
    assert engine.counts["saves|ok"] == 4
    engine.generate("again", tokens)
    assert engine.computed["again"] < 300
    right(engine, "a", "again")


@NOT_KEPT
def test_a_reset_ends_saves_whose_reports_are_on_their_way(engines: Engines) -> None:
    """With a step under way, what workers have reported with it is not taken up yet."""
    engine = engines(asynchronous=True)
    engine.generate("a", fresh())
    engine.until(lambda: bool(engine.ranks[0].connector._worker._ended_saves))
    assert engine.scheduler.reset_prefix_cache()
    engine.settle()
    assert engine.counts["saves|ok"] == 4
    right(engine, "a")


def test_a_reset_that_fails_anyway_waits_for_nothing(engines: Engines) -> None:
    engine = engines()
    engine.add("runs", fresh(), 50)
    stop = Stop(engine)
    engine.until(lambda: engine.side._saves.held > 0)
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.side._saves.held > 0
    stop.go()
    engine.run("runs")
    right(engine, "runs")


@NOT_KEPT
def test_a_reset_waits_for_no_daemon_for_ever(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resets_module, "FINISH_S", 0.2)
    engine = engines()
    client, answer = engine.side._pools.clients[0], threading.Event()
    reserve = client.reserve
    monkeypatch.setattr(client, "reserve", lambda *args, **more: answer.wait(60) and reserve(*args, **more))
    engine.generate("a", fresh())
    assert engine.scheduler.reset_prefix_cache()
    answer.set()
    right(engine, "a")
    assert engine.counts["saves|stale"] == 4


def test_a_reset_waits_for_no_copy_for_ever(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resets_module, "FINISH_S", 0.2)
    engine = engines()
    stop = Stop(engine)
    engine.generate("a", fresh())
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "the worker reads blocks"
    stop.go()
    engine.settle()
    right(engine, "a")


@pytest.mark.usefixtures("elsewhere")
def test_reset_while_workers_copy(engines: Engines) -> None:
    engine = engines()
    stop = Stop(engine)
    engine.generate("a", fresh())
    engine.until(lambda: bool(engine.ranks[0].connector._worker._saver._queue.qsize()))
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True), "the workers read blocks"
    assert engine.side._saves.held > 0
    stop.go()
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    right(engine, "a")


@pytest.mark.usefixtures("elsewhere")
def test_reset_while_the_daemon_does_not_answer(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines()
    client, answer = engine.side._pools.clients[0], threading.Event()
    reserve = client.reserve
    monkeypatch.setattr(client, "reserve", lambda *args, **more: answer.wait(60) and reserve(*args, **more))
    engine.generate("a", fresh())
    assert engine.side._saves.held > 0
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.side._saves.held == 0
    if not NEW:  # an older vLLM keeps a request's blocks until the workers have said that they may go
        engine.step()
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True), "nothing is waited for"
    answer.set()
    right(engine, "a")
    assert engine.counts["saves|stale"] == 4


@pytest.mark.skipif(not hasattr(KVConnectorBase_V1, "has_pending_block_frees"), reason="this vLLM always preempts")
def test_no_request_is_preempted_for_blocks_that_are_about_to_be_free(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves_module, "MAX_COPY_S", 60.0)
    engine = engines(blocks=13)
    stop = Stop(engine)
    engine.add("waits", fresh(64), 96, params={"kvtierd.skip_save": True, "kvtierd.skip_load": True})
    engine.add("saved", fresh(256), 2)
    engine.until(lambda: engine.requests["saved"].is_finished())
    engine.until(lambda: bool(engine.ranks[0].connector._worker._saver._queue.qsize()))
    for _ in range(100):
        engine.step()
    assert engine.requests["waits"].num_computed_tokens == 128, "no block is left for the next token"
    stop.go()
    engine.run("waits")
    assert engine.requests["waits"].num_preemptions == 0
    right(engine, "waits", "saved")


# ---- requests over a reset


def test_a_request_that_waits_is_saved_under_the_new_keys(engines: Engines) -> None:
    engine = engines()
    taken = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks())
    engine.add("waits", fresh(256))
    cancelled: list[int] = []
    engine.step()
    state = engine.side._requests["waits"]
    state.prefetches = [SimpleNamespace(cancel=lambda: cancelled.append(1))]
    engine.connector.reset_cache()
    assert cancelled, "what it reads has old keys"
    engine.pool.free_blocks(taken)
    engine.run("waits")
    right(engine, "waits")
    assert engine.counts["saves|ok"] == 4


def test_running_requests_that_are_computed_anew(engines: Engines) -> None:
    """A reset that preempts all of them: what they compute from then on is of after it."""
    engine = engines()
    tokens = fresh(256)
    engine.add("r", tokens, 40)
    engine.until(lambda: engine.requests["r"].num_output_tokens > 2 and not engine.side.pending)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run("r")
    right(engine, "r")
    assert engine.counts["saves|ok"] == 8
    engine.forget()
    engine.generate("again", tokens)
    assert engine.computed["again"] < 256


# ---- sleep


def test_sleep_and_wake(engines: Engines) -> None:
    """As an engine goes to sleep: its requests end, saves are waited for, caches are reset, memory goes. Then it wakes up."""
    tokens = fresh()
    engine = save(engines, tokens)
    stop = Stop(engine)
    engine.add("running", fresh(), 50)
    engine.add("loading", tokens)
    engine.until(lambda: engine.requests["loading"].status == RequestStatus.WAITING_FOR_REMOTE_KVS)
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.step()
    worker = engine.ranks[0].connector
    asleep = threading.Thread(target=lambda: (worker.unregister_kv_caches(), gone.set()))
    gone = threading.Event()
    asleep.start()
    assert not gone.wait(0.2), "copies still touch the KV cache"
    stop.go()
    asleep.join(60)
    assert gone.is_set()
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    worker.restore_kv_caches()
    for memory in engine.ranks[0].memory:
        memory[:] = 0
    engine.generate("awake", tokens)
    engine.settle()
    engine.forget()
    engine.generate("again", tokens)
    assert engine.computed["awake"] >= 300 > engine.computed["again"]
    right(engine, "awake", "again")


def test_sleep_hooks_of_the_scheduler_side(engines: Engines) -> None:
    connector = engines().connector
    assert type(connector).supports_sleep_mode(None)
    connector.release_kv_caches()
    connector.restore_kv_caches()
