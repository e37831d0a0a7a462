"""Goal: whatever fails inside the connector, no exception reaches vLLM, no request waits for ever or gets wrong tokens, and what
was promised is reported.

Method: an exception is put into each function that a hook calls, once or every time; vLLM's own scheduler runs requests that save
and requests that load (``small_engine``). What a worker or a daemon that is not ours would send is given to the hooks as well.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from kvtierd.connectors.vllm import KvtierdConnector, register, versions
from kvtierd.connectors.vllm.metadata import KvtierdMetadata, KvtierdWorkerMetadata, Report
from kvtierd.connectors.vllm.stats import GAUGES, KvtierdPromMetrics, KvtierdStats
from tests.connectors.small_engine import NEW, SmallEngine, prompt

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
Engines = Callable[..., SmallEngine]
SEEDS = iter(range(2_000_000, 3_000_000))


class BugError(Exception):
    """What is put in."""


def scheduler(engine: SmallEngine) -> Any:
    return engine.side


def loads(engine: SmallEngine) -> Any:
    return engine.side._loads


def saves(engine: SmallEngine) -> Any:
    return engine.side._saves


def choice(engine: SmallEngine) -> Any:
    return engine.side._saves.choice


def keys(engine: SmallEngine) -> Any:
    return engine.side._ctx.keys


def pools(engine: SmallEngine) -> Any:
    return engine.side._pools


def gate(engine: SmallEngine) -> Any:
    return engine.side._ctx.gate


def worker(engine: SmallEngine) -> Any:
    return engine.ranks[-1].connector._worker


def copier(engine: SmallEngine) -> Any:
    return worker(engine)._copier


def client(engine: SmallEngine) -> Any:
    return engine.side._pools.clients[0]


PLACES: list[tuple[Callable[[SmallEngine], Any], str]] = [
    *((scheduler, name) for name in ("arrived", "matched", "allocated", "sources", "finished", "build", "output", "take_events")),
    *((scheduler, name) for name in ("gauges", "_follow_blocks", "_collect_saves", "_start_prefetches", "_state", "_reports")),
    *((loads, name) for name in ("matched", "allocated", "_job", "_ask", "_promise", "ended", "report", "drop_stale", "prefetch")),
    *((loads, name) for name in ("_went_well", "_matched", "_tail")),
    *((saves, name) for name in ("collect", "jobs", "report", "_add", "_job", "_commit", "_count_committed")),
    *((choice, name) for name in ("due", "useful", "wanted", "before")),
    *((keys, name) for name in ("keys", "count", "forget")),
    *((pools, name) for name in ("new_sessions",)),
    *((gate, name) for name in ("step", "load", "read", "worth", "worth_reading", "recompute_s")),
    *((worker, name) for name in ("start_saves", "_renew", "worker_meta", "_session", "_copy")),
    *((copier, name) for name in ("fence", "load", "save")),
    *((client, name) for name in ("fetch", "lookup", "reserve", "prefetch")),
]
LOSES_FOR_GOOD = {
    ("every time", "jobs"),
    ("every time", "report"),
    ("every time", "output"),
    ("every time", "_reports"),
    ("every time", "build"),
    ("every time", "start_saves"),
    ("every time", "worker_meta"),
    ("every time", "finished"),
    ("every time", "ended"),
    ("every time", "_count_committed"),
    ("every time", "new_sessions"),
}
"""Where nothing that the connector could do gives blocks back that saves hold, if it fails at every step."""


@pytest.mark.parametrize("times", ["once", "every time"])
@pytest.mark.parametrize(("where", "name"), PLACES, ids=[f"{where.__name__}.{name}" for where, name in PLACES])
def test_a_failure_inside(
    where: Callable[[SmallEngine], Any], name: str, times: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = next(SEEDS)
    old, new = prompt(300, seed), prompt(300, seed + 1_000_000)
    engine = engines(gate=True, save_decode=True)
    engine.generate("saved", old)
    engine.settle()
    engine.forget()
    target = where(engine)
    right, raised = getattr(target, name), []

    def broken(*args: Any, **more: Any) -> Any:
        if times == "once" and raised:
            return right(*args, **more)
        raised.append(1)
        raise BugError(name)

    monkeypatch.setattr(target, name, broken)
    for n in range(3):
        engine.add(f"old{n}", old, 8)
        engine.add(f"new{n}", new, 8)
    names = [f"{kind}{n}" for kind in ("old", "new") for n in range(3)]
    engine.run(*names)
    monkeypatch.undo()
    engine.generate("after", old)
    for one in (*names, "after"):
        tokens = list(engine.requests[one].all_token_ids)
        assert list(engine.requests[one].output_token_ids) == engine.expected(tokens[:300], engine.requests[one].max_tokens)
    assert not engine.wrong
    if (times, name) not in LOSES_FOR_GOOD:
        engine.settle()
        bounded = (" requests", " chains")  # of a request whose end the connector did not see
        assert [leak for leak in engine.leaks() if not leak.endswith(bounded)] == []


def test_every_hook_of_vllm_is_known() -> None:
    """A hook that a newer vLLM adds shows up here: somebody has to say whether the default will do."""
    known = {
        *vars(KvtierdConnector),
        # The defaults do: they do nothing, or answer from the configuration.
        "bind_connector_metadata",
        "bind_kv_cache_manager",
        "finish_forward",
        "get_finished_count",
        "get_kv_connector_kv_cache_events",
        "get_loaded_kv_cache_group_ids",
        "get_mem_pool_context",
        "get_required_kvcache_layout",
        "handle_preemptions",
        "has_connector_metadata",
        "has_pending_block_frees",
        "prefer_cross_layer_blocks",
        "register_cross_layers_kv_cache",
        "register_finished_partial_tail",
        "requires_piecewise_for_cudagraph",
        "reset_capture_state",
        "role",
        "set_host_xfer_buffer_ops",
        "supports_divergent_local_hybrid_hits",
    }
    hooks = {name for name, _ in inspect.getmembers(KVConnectorBase_V1) if not name.startswith("_")}
    assert hooks - known == set()


# ---- what is not ours


class Foreign(KVConnectorMetadata):
    """Of another connector."""


@pytest.fixture
def attached(engines: Engines) -> Iterator[SmallEngine]:
    engine = engines()
    yield engine
    engine.settle()
    assert engine.counts["hook_failures"] == 0


def test_messages_of_other_connectors(attached: SmallEngine) -> None:
    own = attached.ranks[0].connector
    own.bind_connector_metadata(Foreign())
    own.start_load_kv(None)
    own.wait_for_save()
    assert own.get_finished(set()) == (set(), set())
    own.clear_connector_metadata()
    attached.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    attached.connector.set_xfer_handshake_metadata({0: object()})
    attached.connector.update_connector_output(
        KVConnectorOutput(kv_connector_worker_meta=SimpleNamespace(), finished_recving={"x"})
    )


def test_hooks_without_metadata(attached: SmallEngine) -> None:
    own = attached.ranks[0].connector
    own.clear_connector_metadata()
    own.start_load_kv(None)
    own.wait_for_layer_load("a")
    own.save_kv_layer("a", None, None)
    own.wait_for_save()
    assert own.get_finished({"x"}) == (set(), set())


def test_requests_that_nobody_announced(attached: SmallEngine) -> None:
    request = SimpleNamespace(request_id="x", kv_transfer_params=None, num_computed_tokens=0, is_finished=lambda: True)
    assert attached.connector.request_finished(request, [1]) == (False, None)
    assert attached.connector.get_external_cache_hit_sources(request, 0) == {} if NEW else True


def test_reports_from_nowhere(attached: SmallEngine) -> None:
    meta = KvtierdWorkerMetadata(saves={99: Report()}, loads={98: Report(ok=False)}, step=97)
    attached.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta, finished_recving={"y"}))
    assert not attached.leaks()


def test_an_empty_step_without_anything(attached: SmallEngine) -> None:
    meta = attached.connector.build_connector_meta(attached.scheduler.schedule())
    assert isinstance(meta, KvtierdMetadata)
    assert (meta.loads, meta.saves, meta.sent, meta.step) == ([], [], [], 0)


def test_what_a_failed_step_had_found_is_not_lost(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads and granted saves go to the workers even when the rest of the step's work fails."""
    engine = engines()
    tokens = prompt(300, next(SEEDS))
    engine.generate("a", tokens)
    engine.settle()
    engine.forget()
    monkeypatch.setattr(engine.side, "_start_prefetches", lambda ctx: 1 / 0)
    engine.generate("b", tokens)
    engine.settle()
    assert engine.computed["b"] < 300, engine.counts
    assert not engine.leaks()
    assert engine.counts["hook_failures"] > 0


def test_the_end_of_an_engine_that_works(engines: Engines) -> None:
    engine = engines()
    engine.add("r", prompt(300, next(SEEDS)), 50)
    for _ in range(3):
        engine.step()
    engine.close()
    engine.step()
    engine.run("r")
    assert not engine.wrong


# ---- the class itself


def test_it_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("KvtierdConnector") is KvtierdConnector
    from kvtierd.connectors import vllm

    with pytest.raises(AttributeError, match="nothing"):
        getattr(vllm, "nothing")  # noqa: B009


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        ("0.22.1", True),
        ("0.23.0", False),
        ("0.32.0+cpu", False),
        ("0.33.0", False),
        ("0.1.dev1", False),
        ("9.0", False),
        ("", False),
    ],
)
def test_versions(version: str, refused: bool) -> None:
    if refused:
        with pytest.raises(ValueError, match=r"needs vLLM 0\.23"):
            versions.check_version(version)
    else:
        versions.check_version(version)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(versions.log, "warning", lambda text, *values: found.append(text % values))
    return found


def test_it_warns_about_the_policy(warned: list[str]) -> None:
    for policy in ({"kv_load_failure_policy": "fail"}, {"kv_load_failure_policy": "recompute"}, {}):
        versions.check_policy(SimpleNamespace(kv_transfer_config=SimpleNamespace(**policy)))
    assert len(warned) == 1
    assert "recompute" in warned[0]


@pytest.mark.parametrize(("outside", "inside", "warnings"), [("recompute", "fail", 0), ("fail", "recompute", 1)])
def test_inside_another_connector_the_policy_of_that_one_counts(
    attached: SmallEngine, warned: list[str], outside: str, inside: str, warnings: int
) -> None:
    """vLLM makes workers with the configuration that it acts on set, and gives each connector inside MultiConnector its own."""
    multi = copy.copy(attached.config)
    multi.kv_transfer_config = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy=outside)
    own = copy.copy(attached.ranks[0].connector._vllm_config)
    own.kv_transfer_config = copy.copy(own.kv_transfer_config)
    own.kv_transfer_config.kv_load_failure_policy = inside
    with set_current_vllm_config(multi):
        KvtierdConnector(own, KVConnectorRole.WORKER, attached.ranks[0].connector._kv_cache_config).shutdown()
    assert len(warned) == warnings
    assert all("beside MultiConnector" in text for text in warned)


def test_a_worker_reads_no_settings(attached: SmallEngine) -> None:
    """What they say is for the scheduler's side, and a file that only one host has would end that host's workers."""
    own = copy.copy(attached.ranks[0].connector._vllm_config)
    own.kv_transfer_config = copy.copy(own.kv_transfer_config)
    own.kv_transfer_config.kv_connector_extra_config = {"kvtierd.nothing": 1}
    KvtierdConnector(own, KVConnectorRole.WORKER, attached.ranks[0].connector._kv_cache_config).shutdown()


@pytest.mark.parametrize(("kv_role", "saves", "loads"), [("kv_producer", True, False), ("kv_consumer", False, True)])
def test_the_engine_s_role(kv_role: str, saves: bool, loads: bool, attached: SmallEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.copy(attached.config)
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_role = kv_role
    made = KvtierdConnector(config, KVConnectorRole.SCHEDULER, attached.connector._kv_cache_config)
    assert made._scheduler is not None
    assert (made._scheduler._settings.saves, made._scheduler._settings.loads) == (saves, loads)
    made.shutdown()


def test_requests_may_not_ask_for_anything(engines: Engines) -> None:
    engine = engines(request_params=False, tenant="t")
    asks = {"kvtierd.tenant": "other", "kvtierd.pin": True, "kvtierd.skip_save": True, "kvtierd.nothing": 1}
    tokens = prompt(300, next(SEEDS))
    engine.add("a", tokens, params=asks)
    state = engine.side._requests["a"]
    assert (state.tenant, state.settings.pin_s, state.bypass) == ("", None, False)
    engine.run("a")
    engine.settle()
    engine.forget()
    engine.generate("b", tokens)
    assert engine.computed["b"] < 300


class Cell:
    """In place of a Prometheus series, and as strict."""

    def __init__(self, **_: Any) -> None:
        self.value = 0.0

    def labels(self, *_: Any) -> Cell:
        return Cell()

    def inc(self, value: float) -> None:
        if value < 0:
            raise ValueError("a counter does not fall")
        self.value += value

    def set(self, value: float) -> None:
        self.value = value


def test_metrics_take_whatever_comes() -> None:
    metrics = KvtierdPromMetrics.__new__(KvtierdPromMetrics)
    metrics._counter_cls = metrics._gauge_cls = Cell  # type: ignore[assignment]
    metrics.per_engine_labelvalues = {0: ["m"]}
    init = KvtierdPromMetrics.__mro__[1].__init__
    try:
        KvtierdPromMetrics.__mro__[1].__init__ = lambda *_: None  # type: ignore[assignment, method-assign]
        KvtierdPromMetrics.__init__(metrics, None, None, [], {0: ["m"]})
    finally:
        KvtierdPromMetrics.__mro__[1].__init__ = init  # type: ignore[method-assign]
    metrics.observe({"loads|ok": 2, "hit_tokens|cpu": -5, "attached": 1, "loads|unheard of": 1, "nothing": 1})
    metrics.observe({"loads|ok": 1}, 7)
    assert metrics._cells[0]["loads|ok"].value == 2
    assert metrics._cells[0]["hit_tokens|cpu"].value == 0
    assert metrics._cells[0]["attached"].value == 1
    assert {"load_failures|daemon", "load_failures|promise", "breaker", "waiting", "loads|paused"} <= set(metrics._cells[0])


def test_stats_of_ranks_and_steps_add_up() -> None:
    stats = KvtierdStats(data={"loads|ok": 1, "loading": 5})
    stats.aggregate(KvtierdStats(data={"loads|ok": 2, "loading": 3, "load_bytes": 10**9, "load_us": 500_000}))
    assert stats.data == {"loads|ok": 3, "loading": 3, "load_bytes": 10**9, "load_us": 500_000}
    assert stats.reduce()["kvtierd load GB/s"] == 2.0
    assert set(GAUGES) & set(stats.data) == {"loading"}
    stats.aggregate(KvtierdStats(data={"breaker": 2, "waiting": 1, "load_failures|daemon": 1}))
    stats.aggregate(KvtierdStats(data={"breaker": 0, "waiting": 1, "load_failures|daemon": 1}))
    assert [stats.data[name] for name in ("breaker", "waiting", "load_failures|daemon")] == [0, 1, 2]
    stats.reset()
    assert stats.is_empty()
