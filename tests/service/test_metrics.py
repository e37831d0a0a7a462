"""Goal: metrics exist at zero, count what is reported, stay bounded, follow the naming rules and cost next to nothing.

Method: feed the methods, write the text as a scrape would and read it back with the library's own parser.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics_text
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from kvtierd.core.limits import Limits, TenantClass
from kvtierd.core.stats import StatsSnapshot, TenantStats, TierStats
from kvtierd.errors import Reason
from kvtierd.model import Tier
from kvtierd.service.metric_labels import EVICTION_REASONS, MAX_TENANT_LABELS, RPC_METHODS
from kvtierd.service.metrics import Metrics, watch_loop_lag


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = generate_latest(metrics.registry).decode()
    return {
        (s.name, frozenset(s.labels.items())): s.value for family in text_string_to_metric_families(text) for s in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    labels = {"class" if k == "cls" else k: v for k, v in labels.items()}
    return samples(metrics)[f"kvtierd_{name}", frozenset(labels.items())]


class Source:
    def __init__(self, shot: StatsSnapshot) -> None:
        self.shot = shot
        self.reads = 0

    def snapshot(self) -> StatsSnapshot:
        self.reads += 1
        return self.shot


def tenant(
    name: str, blocks: int = 1, used: tuple[int, int, int] = (0, 1, 2), quota: tuple[int | None, int, int] = (None, 5, 0)
) -> TenantStats:
    return TenantStats(name, blocks, used, Limits(quota), (0, 0, 0), 0)


def shot(tenants: list[TenantStats] | None = None) -> StatsSnapshot:
    cpu = TierStats(Tier.CPU, 100, 80, 60, 4, 20, 10, "I/O errors")
    return StatsSnapshot([cpu], tenants or [], blocks=9, sessions=2, tickets=3, queue_depth={"load": 5})


# ---- names and zeros


def test_every_series_exists_at_zero(metrics: Metrics) -> None:
    found = samples(metrics)
    nonzero = {name for (name, _), v in found.items() if v}
    assert nonzero == {"kvtierd_build_info", "kvtierd_tenant_quota_bytes", "kvtierd_tenant_class"}
    assert value(metrics, "tenant_quota_bytes", tenant="default", tier="cpu") == float("inf")
    assert value(metrics, "tenant_class", tenant="default", cls="standard") == 1
    assert value(metrics, "tenant_evictions_total", tenant="default", reason="quota") == 0
    for why in EVICTION_REASONS:
        assert value(metrics, "evictions_total", tier="nvme", reason=why) == 0
    assert value(metrics, "hits_total", tenant="default", tier="cpu") == 0
    assert value(metrics, "rpcs_total", method="Load", code="OK") == 0
    assert value(metrics, "tier_capacity_bytes", tier="cpu") == 0
    assert value(metrics, "io_path_active", tier="nvme", path="o_direct") == 0
    assert value(metrics, "queue_wait_seconds_count", cls="load") == 0
    assert value(metrics, "saved_bytes_total", tenant="default", path="grpc") == 0


def test_methods_of_both_services_are_known() -> None:
    assert {"Attach", "Save", "Load", "LoadBytes", "GetStatus", "Drain", "other"} <= set(RPC_METHODS)


def test_names_follow_the_rules(metrics: Metrics) -> None:
    families = list(metrics.collect())
    assert len({f.name for f in families}) == len(families)
    for family in families:
        assert re.fullmatch(r"kvtierd_[a-z][a-z0-9_]*", family.name)
        assert len(family.documentation) > 10, family.name
        assert family.documentation.endswith("."), family.name
        assert not re.search(r"_(count|sum|bucket|total)$", family.name), family.name
        for unit in ("millisecond", "_ms", "kilobyte", "percent"):
            assert unit not in family.name
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert not set(sample.labels) & {"le", "quantile"} or family.type == "histogram"


def test_both_formats_parse(metrics: Metrics) -> None:
    metrics.lookup('we"ird\n\\', 1, 1)
    assert value(metrics, "lookups_total", tenant='we"ird\n\\') == 1
    text = openmetrics_text.generate_latest(metrics.registry).decode()  # type: ignore[no-untyped-call]
    families = list(openmetrics_parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    assert len(families) == len(metrics.collect())


def test_two_daemons_cannot_share_a_registry(metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(metrics.registry)


# ---- counting


@pytest.mark.parametrize(
    "feed, name, labels, expected",
    [
        (lambda m: m.lookup("default", 3, 5), "lookups_total", {"tenant": "default"}, 1),
        (lambda m: m.lookup("default", 3, 5), "lookup_keys_total", {"tenant": "default", "result": "held"}, 3),
        (lambda m: m.lookup("default", 3, 5), "lookup_keys_total", {"tenant": "default", "result": "absent"}, 2),
        (lambda m: m.saved("default", 2, 9), "saved_blocks_total", {"tenant": "default", "path": "shm"}, 2),
        (lambda m: m.saved("default", 2, 9, "grpc", 0.1), "saved_bytes_total", {"tenant": "default", "path": "grpc"}, 9),
        (lambda m: m.saved("default", 2, 9, "grpc", 0.1), "save_seconds_count", {"path": "grpc"}, 1),
        (lambda m: m.loaded("default", 2, 9), "loaded_blocks_total", {"tenant": "default", "path": "shm"}, 2),
        (lambda m: m.loaded("default", 2, 9, "pigeon"), "loaded_bytes_total", {"tenant": "default", "path": "other"}, 9),
        (lambda m: m.loaded("default", 2, 9, "shm", 0.1), "load_seconds_sum", {"path": "shm"}, 0.1),
        (lambda m: m.rejected(Reason.QUOTA, 2), "rejections_total", {"reason": "quota"}, 2),
        (lambda m: m.rejected("BUSY"), "rejections_total", {"reason": "busy"}, 1),
        (lambda m: m.rejected("IN_PROGRESS"), "rejections_total", {"reason": "other"}, 1),
        (lambda m: m.rpc("Load", 0, 0.1), "rpcs_total", {"method": "Load", "code": "OK"}, 1),
        (lambda m: m.rpc("Load", "NOT_FOUND", 0.1), "rpcs_total", {"method": "Load", "code": "NOT_FOUND"}, 1),
        (lambda m: m.rpc("Load", 99, 0.1), "rpcs_total", {"method": "Load", "code": "UNKNOWN"}, 1),
        (lambda m: m.rpc("Evil", "EVIL", 0.1), "rpcs_total", {"method": "other", "code": "UNKNOWN"}, 1),
        (lambda m: m.rpc("Load", 0, 0.1), "rpc_seconds_count", {"method": "Load"}, 1),
        (lambda m: m.queue_wait("load", 0.2), "queue_wait_seconds_sum", {"cls": "load"}, 0.2),
        (lambda m: m.queue_wait("nap", 0.2), "queue_wait_seconds_sum", {"cls": "other"}, 0.2),
        (lambda m: m.prefetch("partial", 2), "prefetches_total", {"outcome": "partial"}, 2),
        (lambda m: m.prefetch("odd"), "prefetches_total", {"outcome": "other"}, 1),
        (lambda m: m.checksum_failure(2), "checksum_failures_total", {}, 2),
        (lambda m: m.io_error(Tier.NVME, "read"), "io_errors_total", {"tier": "nvme", "op": "read"}, 1),
        (lambda m: m.io_error(Tier.NVME, "fsync"), "io_errors_total", {"tier": "nvme", "op": "other"}, 1),
        (lambda m: m.nvme_totals(7, 5), "nvme_written_bytes_total", {}, 7),
        (lambda m: m.nvme_totals(5, 7), "nvme_read_bytes_total", {}, 7),
        (lambda m: m.nvme_totals(0, 0, 3, 4), "nvme_calls_total", {"op": "write"}, 3),
        (lambda m: m.nvme_totals(0, 0, 3, 4), "nvme_calls_total", {"op": "read"}, 4),
        (lambda m: m.folders({"/a": 2, "/b": 0}, {}), "nvme_folder_errors_total", {"folder": "/a"}, 2),
        (lambda m: m.folders({"/a": 2, "/b": 0}, {}), "nvme_folder_errors_total", {"folder": "/b"}, 0),
        (lambda m: m.nvme_engine("threads", encrypted=True), "nvme_encrypted", {}, 1),
        (lambda m: m.folders({}, {"/a": "ok", "/b": "lost: x"}), "nvme_folder_up", {"folder": "/a"}, 1),
        (lambda m: m.folders({}, {"/a": "ok", "/b": "lost: x"}), "nvme_folder_up", {"folder": "/b"}, 0),
        (lambda m: m.nvme_engine("kvikio"), "nvme_engine", {"engine": "kvikio"}, 1),
        (lambda m: m.nvme_engine("kvikio"), "nvme_engine", {"engine": "threads"}, 0),
        (lambda m: m.checkpoint(False), "checkpoints_total", {"result": "error"}, 1),
        (lambda m: m.session_opened(), "sessions_opened_total", {}, 1),
        (lambda m: m.loop_lag(0.5), "event_loop_lag_seconds_count", {}, 1),
        (lambda m: m.io_paths(Tier.NVME, ["buffered"]), "io_path_active", {"tier": "nvme", "path": "buffered"}, 1),
        (lambda m: m.io_paths(Tier.NVME, ["o_direct", "gds"]), "io_path_active", {"tier": "nvme", "path": "o_direct"}, 1),
        (lambda m: m.io_paths(Tier.NVME, ["o_direct", "gds"]), "io_path_active", {"tier": "nvme", "path": "gds"}, 1),
        (lambda m: m.io_paths(Tier.NVME, ["o_direct", "tape"]), "io_path_active", {"tier": "nvme", "path": "other"}, 1),
        (lambda m: m.prefaulted(5, 3), "cpu_prefaulted_bytes", {}, 5),
        (lambda m: m.prefaulted(5, 3), "cpu_huge_page_bytes", {}, 3),
        (lambda m: m.draining(True), "draining", {}, 1),
    ],
)
def test_each_method_counts(
    metrics: Metrics, feed: Callable[[Metrics], None], name: str, labels: dict[str, str], expected: float
) -> None:
    feed(metrics)
    assert value(metrics, name, **labels) == expected


def test_the_time_of_moves(metrics: Metrics) -> None:
    metrics.move_seconds(Tier.NVME, Tier.CPU, 0.01)
    assert value(metrics, "move_seconds_count", direction="promote", src="nvme", dst="cpu") == 1
    assert value(metrics, "move_seconds_count", direction="demote", src="cpu", dst="nvme") == 0


def test_buckets_are_cumulative_and_include_their_bound(metrics: Metrics) -> None:
    for seconds in (0.0001, 0.001, 0.0010001, 100):
        metrics.rpc("Save", 0, seconds)
    assert value(metrics, "rpc_seconds_bucket", method="Save", le="0.0001") == 1
    assert value(metrics, "rpc_seconds_bucket", method="Save", le="0.001") == 2
    assert value(metrics, "rpc_seconds_bucket", method="Save", le="10.0") == 3
    assert value(metrics, "rpc_seconds_bucket", method="Save", le="+Inf") == 4


# ---- bounds


def test_tenants_past_the_limit_are_other() -> None:
    metrics = Metrics(CollectorRegistry(), tenants=["vip"])
    for n in range(MAX_TENANT_LABELS + 50):
        metrics.lookup(f"t{n}", 1, 1)
    metrics.lookup("vip", 1, 1)
    metrics.bind(Source(shot([tenant(f"t{n}") for n in reversed(range(MAX_TENANT_LABELS + 50))])))
    metrics.refresh()
    found = samples(metrics)
    names = {dict(labels)["tenant"] for (_, labels) in found if "tenant" in dict(labels)}
    assert len(names) == MAX_TENANT_LABELS + 1
    assert {"vip", "default", "other"} <= names
    assert value(metrics, "lookups_total", tenant="vip") == 1
    assert value(metrics, "lookups_total", tenant="other") == 52
    total = sum(v for (name, _), v in found.items() if name == "kvtierd_tenant_used_bytes")
    assert total == 3 * (MAX_TENANT_LABELS + 50), "usage without a label of its own is summed, not lost"
    assert value(metrics, "tenant_quota_bytes", tenant="other", tier="cpu") == float("inf"), "a sum of limits limits nothing"


def limited(metrics: Metrics) -> set[str]:
    """Tenants whose quota is told to be 7."""
    quotas = {labels: v for (name, labels), v in samples(metrics).items() if name == "kvtierd_tenant_quota_bytes"}
    return {dict(labels)["tenant"] for labels, v in quotas.items() if v == 7}


def test_tenants_with_limits_have_series_before_anybody_attaches_for_them(metrics: Metrics) -> None:
    """Goal: whoever has limits has quota, reserve, class and counters at once, with as many labels as ever.

    Method: limits that are set while the daemon runs, for tenants that the core does not know, some and then very many; labels
    are all taken by others before.
    """
    limits: dict[str, Limits] = {"configured": Limits((None, 7, None))}
    many = [tenant(f"t{n}", used=(0, 1000 + n, 0)) for n in range(MAX_TENANT_LABELS + 50)]
    metrics.bind(Source(shot(many)), counts=Counts(), limits=limits)
    metrics.refresh()
    assert limited(metrics) == {"configured"}
    limits["acme"] = Limits((None, 7, None), (0, 5, 0), tenant_class=TenantClass.PREMIUM)
    metrics.refresh()
    assert limited(metrics) == {"configured", "acme"}
    assert value(metrics, "tenant_used_bytes", tenant="acme", tier="cpu") == 0
    assert value(metrics, "hits_total", tenant="acme", tier="cpu") == 0
    assert value(metrics, "tenant_reserve_bytes", tenant="acme", tier="cpu") == 5
    assert value(metrics, "tenant_class", tenant="acme", cls="premium") == 1

    limits.update({f"set{n}": Limits((None, 7, None)) for n in range(5000)})
    for _ in range(MAX_TENANT_LABELS):
        metrics.refresh()
    labels = set(metrics._tenants)
    assert len(labels) == MAX_TENANT_LABELS and labels - limits.keys() == {"default"}
    metrics.refresh()
    assert set(metrics._tenants) == labels, "those that hold nothing do not take turns"
    metrics.bind(Source(shot([tenant("set4999", used=(0, 9, 0))])), counts=Counts(), limits=limits)
    metrics.refresh()
    assert "set4999" in metrics._tenants, "of those with limits the largest come first"
    del limits["set4999"]
    metrics.bind(Source(shot(many)), counts=Counts(), limits=limits)
    metrics.refresh()
    assert "set4999" not in metrics._tenants and len(metrics._tenants) == MAX_TENANT_LABELS


def test_a_tenant_called_other_takes_no_label(metrics: Metrics) -> None:
    metrics.lookup("other", 0, 1)
    assert value(metrics, "lookups_total", tenant="other") == 1
    assert "other" not in metrics._tenants


def test_series_do_not_grow_with_odd_values(metrics: Metrics) -> None:
    before = len(samples(metrics))
    for n in range(500):
        metrics.rpc(f"m{n}", f"c{n}", 0)
        metrics.rejected(f"r{n}")
        metrics.prefetch(f"o{n}")
        metrics.queue_wait(f"q{n}", 0)
        metrics.io_error(Tier.CPU, f"o{n}")
    assert len(samples(metrics)) == before + 1, "only method other with code UNKNOWN is new"


# ---- gauges


def test_gauges_come_from_the_last_refresh(metrics: Metrics) -> None:
    source = Source(shot([tenant("acme", 7)]))
    metrics.bind(source, ready=lambda: (True, ""))
    assert value(metrics, "blocks") == 0, "nothing is read before a refresh"
    metrics.refresh()
    assert source.reads == 1
    assert value(metrics, "tier_used_bytes", tier="cpu") == 60
    assert value(metrics, "tier_suspended", tier="cpu") == 1
    assert value(metrics, "tier_suspended", tier="nvme") == 0
    assert value(metrics, "tenant_blocks", tenant="acme") == 7
    assert value(metrics, "tenant_used_bytes", tenant="acme", tier="nvme") == 2
    quotas = [value(metrics, "tenant_quota_bytes", tenant="acme", tier=tier) for tier in ("hbm", "cpu", "nvme")]
    assert quotas == [float("inf"), 5, 0], "none and nothing differ"
    assert value(metrics, "queue_depth", cls="load") == 5
    assert value(metrics, "queue_depth", cls="demote") == 0
    assert value(metrics, "ready") == 1
    assert (value(metrics, "blocks"), value(metrics, "sessions"), value(metrics, "tickets")) == (9, 2, 3)
    assert source.reads == 1, "writing the text reads nothing of the daemon, so it may run in a thread"


@dataclass
class Counts:
    evictions: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    moves: Counter[tuple[Tier, Tier, str]] = field(default_factory=Counter)
    move_bytes: Counter[tuple[Tier, Tier]] = field(default_factory=Counter)
    not_admitted: Counter[str] = field(default_factory=Counter)
    not_in_hbm: Counter[str] = field(default_factory=Counter)
    failed_commands: Counter[str] = field(default_factory=Counter)


def test_totals_of_the_core_are_taken_over(metrics: Metrics) -> None:
    counts = Counts()
    metrics.bind(Source(shot()), counts=counts)
    for round_ in (1, 2):
        counts.evictions[Tier.CPU, "pressure"] += 2
        counts.evictions[Tier.NVME, "corrupt"] += 1
        counts.evictions[Tier.NVME, "io_error"] += 1
        counts.evictions[Tier.NVME, "odd"] += 1
        counts.evictions[Tier.NVME, "odder"] += 1
        counts.moves[Tier.CPU, Tier.NVME, "ok"] += 3
        counts.moves[Tier.CPU, Tier.NVME, "no_space"] += 1
        counts.move_bytes[Tier.CPU, Tier.NVME] += 30
        counts.evictions[Tier.CPU, "not_admitted"] += 1
        counts.not_admitted["budget"] += 1
        counts.not_in_hbm["busy"] += 1
        counts.failed_commands["NewExtent"] += 5
        counts.failed_commands["Unheard"] += 6
        metrics.refresh()
        edge = {"direction": "demote", "src": "cpu", "dst": "nvme"}
        assert value(metrics, "evictions_total", tier="cpu", reason="pressure") == 2 * round_
        assert value(metrics, "evictions_total", tier="nvme", reason="io") == round_
        assert value(metrics, "evictions_total", tier="nvme", reason="other") == 2 * round_
        assert value(metrics, "evictions_total", tier="cpu", reason="not_admitted") == round_
        assert value(metrics, "nvme_not_admitted_blocks_total", reason="budget") == round_
        assert value(metrics, "hbm_refused_blocks_total", reason="busy") == round_
        assert value(metrics, "nvme_not_admitted_blocks_total", reason="no_room") == 0
        assert value(metrics, "moved_blocks_total", **edge) == 3 * round_
        assert value(metrics, "moved_bytes_total", **edge) == 30 * round_
        assert value(metrics, "move_failures_total", **edge) == round_
        assert value(metrics, "failed_commands_total", command="NewExtent") == 5 * round_
        assert value(metrics, "failed_commands_total", command="StartMoves") == 0
        assert value(metrics, "failed_commands_total", command="other") == 6 * round_
        assert metrics.totals()["kvtierd_evictions_total"] == 7 * round_


def test_hits_of_the_core_are_taken_over_with_its_totals() -> None:
    metrics = Metrics(CollectorRegistry(), tenants=[f"t{n}" for n in range(MAX_TENANT_LABELS - 1)])
    source = Source(shot([TenantStats(name, 1, (0, 0, 0), Limits(), (0, 2, 3), 4) for name in ("t0", "late", "later")]))
    metrics.bind(source, counts=Counts())
    for _ in range(2):
        metrics.refresh()
    assert value(metrics, "hits_total", tenant="t0", tier="cpu") == 2
    assert value(metrics, "hits_total", tenant="other", tier="nvme") == 6
    assert value(metrics, "misses_total", tenant="other") == 8
    assert metrics.totals()["kvtierd_hits_total"] == 15
    assert metrics.totals()["kvtierd_misses_total"] == 12


def test_labels_go_to_those_that_hold_most() -> None:
    """Goal: of many tenants the largest and the configured ones have labels, no counter ever falls, and sums count all.

    Method: more tenants than labels; then others become the largest, bit by bit, and come back to nothing.
    """
    metrics = Metrics(CollectorRegistry(), tenants=["vip"])
    names = [f"t{n:04}" for n in range(1000)]

    def look(sizes: dict[str, int], hits: int) -> dict[str, float]:
        tenants = [
            TenantStats(n, 1, (0, sizes.get(n, 1), 0), Limits(), (0, hits, 0), hits, {(Tier.CPU, "ttl"): hits}) for n in names
        ]
        metrics.bind(Source(shot(tenants)), counts=Counts())
        metrics.refresh()
        assert metrics.totals()["kvtierd_hits_total"] == 1000 * hits
        assert metrics.totals()["kvtierd_tenant_evictions_total"] == 1000 * hits
        return {dict(labels)["tenant"]: v for (name, labels), v in samples(metrics).items() if name == "kvtierd_hits_total" if v}

    first = look(dict.fromkeys(names[:50], 1000), 1)
    assert set(names[:50]) < set(first)
    before = first["other"]
    large = dict.fromkeys(names[-30:], 5000)
    for hits in range(2, 8):
        found = look(large, hits)
        assert found["other"] >= before
        before = found["other"]
        assert len(found) <= MAX_TENANT_LABELS
    assert set(names[-30:]) < set(found)
    assert found[names[-1]] < 7, "a new label counts from when it was given"
    assert set(names[-30:]) < set(look({}, 9)), "labels do not change hands for little"
    assert look({}, 10)["other"] >= before
    names[:] = names[500:]
    metrics.bind(Source(shot([])), counts=Counts())
    metrics.refresh()
    assert metrics.totals()["kvtierd_hits_total"] == 10_000


def test_totals_add_up_over_labels(metrics: Metrics) -> None:
    metrics.lookup("a", 2, 2)
    metrics.lookup("b", 3, 3)
    assert metrics.totals()["kvtierd_lookup_keys_total"] == 5
    assert all(name.startswith("kvtierd_") and name.endswith("_total") for name in metrics.totals())


# ---- cost


def test_an_event_costs_little(metrics: Metrics) -> None:
    """The fastest of many rounds, so that a busy host does not fail it; the limit is far above the real cost of 0.1-0.4 us."""
    feeds: list[Callable[[], None]] = [
        lambda: metrics.saved("default", 1, 10, "shm", 0.01),
        lambda: metrics.move_seconds(Tier.CPU, Tier.NVME, 0.01),
        lambda: metrics.rpc("Load", 0, 0.001),
        lambda: metrics.lookup("default", 1, 2),
    ]
    for feed in feeds:
        best_s = float("inf")
        for _ in range(30):
            start_s = time.perf_counter()
            for _ in range(300):
                feed()
            best_s = min(best_s, (time.perf_counter() - start_s) / 300)
        assert best_s < 4e-6


class Lag(Metrics):
    """Lets a test wait for the next measurement."""

    def __init__(self) -> None:
        super().__init__(CollectorRegistry())
        self.measured = asyncio.Event()

    def loop_lag(self, seconds: float) -> None:
        super().loop_lag(seconds)
        self.measured.set()


async def test_loop_lag_is_measured() -> None:
    metrics = Lag()
    task = asyncio.create_task(watch_loop_lag(metrics, interval_s=0.001))
    await metrics.measured.wait()
    metrics.measured.clear()
    time.sleep(0.05)  # a blocked loop is what is measured
    await metrics.measured.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert value(metrics, "event_loop_lag_seconds_sum") >= 0.04
