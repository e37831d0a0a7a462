"""What the daemon tells Prometheus.

Counters and histograms are fed by the methods of :class:`Metrics`, which the runtime calls on its event loop: a method looks
up a prepared cell and adds to it, so it costs well under two microseconds and never waits. Gauges are worked out from a
:class:`~kvtierd.core.stats.StatsSnapshot` that :meth:`Metrics.refresh` takes, on the event loop too, before each scrape;
the text is then written in a worker thread.

Every series exists from the start, at zero. Every label has a closed set of values: a value that is not in it counts as
``other``, and so do tenants past ``MAX_TENANT_LABELS``: the configured ones and those that hold most have labels. Names end in
their unit; counters end in ``_total``.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvtierd import PROTOCOL_VERSION, __version__
from kvtierd.core.limits import Limits
from kvtierd.core.stats import StatsSnapshot, TenantStats
from kvtierd.errors import Reason
from kvtierd.model import DEFAULT_TENANT, Tier
from kvtierd.service.metric_cells import CounterCell, CounterVec, HistogramCell, HistogramVec
from kvtierd.service.metric_core import CoreCounts, CoreSeries
from kvtierd.service.metric_gauges import Flags, gauge_families
from kvtierd.service.metric_labels import (
    ALWAYS_SHOWN_CODES,
    CODE_NAMES,
    EVICTION_REASONS,
    FAST_S,
    IO_OPS,
    IO_PATHS,
    KV_EVENTS,
    MAX_TENANT_LABELS,
    MOVE_S,
    OTHER,
    PREFETCH_OUTCOMES,
    QUEUE_CLASSES,
    RPC_CODES,
    RPC_METHODS,
    TIERS,
    TRANSFER_PATHS,
)
from kvtierd.service.metric_tenants import TenantCounts, labels_that_change

__all__ = ["Metrics", "StatsSource", "make_registry", "watch_loop_lag"]


class StatsSource(Protocol):
    """Where gauges come from; the runtime is one."""

    def snapshot(self) -> StatsSnapshot:
        """All figures at this moment. Changes nothing; called on the event loop."""


def make_registry() -> CollectorRegistry:
    """A registry of its own with the usual figures of the process, Python and its garbage collector."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class _TenantCells:
    """All cells of one tenant, so that one dictionary lookup finds them."""

    __slots__ = ("absent_keys", "evictions", "held_keys", "hits", "loaded", "lookups", "misses", "saved")

    def __init__(self, metrics: Metrics, label: str) -> None:
        self.lookups = metrics.lookups_vec.cell(label)
        self.held_keys = metrics.lookup_keys_vec.cell(label, "held")
        self.absent_keys = metrics.lookup_keys_vec.cell(label, "absent")
        self.hits = tuple(metrics.hits_vec.cell(label, tier) for tier in TIERS)
        self.misses = metrics.misses_vec.cell(label)
        self.evictions = {why: metrics.tenant_evictions_vec.cell(label, why) for why in EVICTION_REASONS}
        self.saved = {
            path: (metrics.saved_blocks_vec.cell(label, path), metrics.saved_bytes_vec.cell(label, path)) for path in TRANSFER_PATHS
        }
        self.loaded = {
            path: (metrics.loaded_blocks_vec.cell(label, path), metrics.loaded_bytes_vec.cell(label, path))
            for path in TRANSFER_PATHS
        }


class Metrics(Collector):
    """The daemon's metrics. Feeding methods belong on the event loop; :meth:`collect` may run in any thread.

    Args:
        registry: where to register; ``None`` makes one with :func:`make_registry`.
        tenants: names that surely get a label of their own, such as the configured tenants.
    """

    def __init__(self, registry: CollectorRegistry | None = None, tenants: Iterable[str] = ()) -> None:
        self.registry = make_registry() if registry is None else registry
        self.flags = Flags(version=__version__, protocol=str(PROTOCOL_VERSION), python=platform.python_version())
        self._source: StatsSource | None = None
        self._counts: CoreCounts | None = None
        self._ready: Callable[[], tuple[bool, str]] | None = None
        self._snapshot: StatsSnapshot | None = None
        self._writing = asyncio.Lock()
        self._counters: list[CounterVec] = []
        self._histograms: list[HistogramVec] = []
        self._make_tenant_vecs()
        self._make_tier_vecs()
        self._make_service_vecs()
        self._tenants: dict[str, _TenantCells] = {}
        self._configured: Collection[str] = frozenset(tenants)
        self._limits: Mapping[str, Limits] = {}
        self._shown_limits: dict[str, Limits] = {}
        self._counted = TenantCounts()
        self._other_tenant = _TenantCells(self, OTHER)
        for name in (DEFAULT_TENANT, *tenants):
            self._tenant(name)
        self.registry.register(self)

    # ---- making series

    def _counter(self, name: str, text: str, *labels: str) -> CounterVec:
        vec = CounterVec(f"kvtierd_{name}_total", text, labels)
        self._counters.append(vec)
        return vec

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> HistogramVec:
        vec = HistogramVec(f"kvtierd_{name}_seconds", text, bounds, labels)
        self._histograms.append(vec)
        return vec

    def _make_tenant_vecs(self) -> None:
        counter = self._counter
        self.lookups_vec = counter("lookups", "Lookup calls.", "tenant")
        self.lookup_keys_vec = counter("lookup_keys", "Keys that lookups asked for, by whether they were held.", "tenant", "result")
        self.hits_vec = counter("hits", "Blocks that loads found, by the fastest tier that held them.", "tenant", "tier")
        self.misses_vec = counter("misses", "Blocks that loads did not find or did not get in time.", "tenant")
        self.saved_blocks_vec = counter("saved_blocks", "Blocks committed by clients.", "tenant", "path")
        self.saved_bytes_vec = counter("saved_bytes", "Bytes of blocks committed by clients.", "tenant", "path")
        self.loaded_blocks_vec = counter("loaded_blocks", "Blocks handed to clients.", "tenant", "path")
        self.loaded_bytes_vec = counter("loaded_bytes", "Bytes of blocks handed to clients.", "tenant", "path")
        self.tenant_evictions_vec = counter("tenant_evictions", "Copies of the tenant forgotten, by reason.", "tenant", "reason")
        self._of_tenants = list(self._counters)

    def _make_tier_vecs(self) -> None:
        counter = self._counter
        self._core = CoreSeries(counter, self._histogram)
        io_errors = counter("io_errors", "I/O operations that a device refused.", "tier", "op")
        self._checksum_failures = counter("checksum_failures", "Copies that failed verification when they were read.").cell()
        self._nvme_written = counter(
            "nvme_written_bytes", "Bytes of slots written to NVMe, headers included; journals come on top."
        ).cell()
        self._nvme_read = counter("nvme_read_bytes", "Bytes read from NVMe, headers included.").cell()
        calls = counter("nvme_calls", "System calls (or calls of the engine) that moved slots to and from NVMe.", "op")
        self._nvme_calls = {op: calls.cell(op) for op in ("write", "read")}
        self._folder_errors = counter("nvme_folder_errors", "I/O errors of a folder of the NVMe tier, reads and writes.", "folder")
        checkpoints = counter("checkpoints", "Snapshots of the NVMe index, by result.", "result")
        self._checkpoints = {True: checkpoints.cell("ok"), False: checkpoints.cell("error")}
        self._io_errors = {(tier, op): io_errors.cell(TIERS[tier], op) for tier in Tier for op in IO_OPS}

    def _make_service_vecs(self) -> None:
        counter, histogram = self._counter, self._histogram
        rejections = counter("rejections", "Keys and calls refused, by reason.", "reason")
        prefetches = counter("prefetches", "Prefetches that ended, by outcome.", "outcome")
        self._rpcs = counter("rpcs", "Calls answered, by method and gRPC status code.", "method", "code")
        kv_events = counter("kv_events", "Copies told to routers as stored or removed; and how often all were called void.", "kind")
        self._kv_events = {kind: kv_events.cell(kind) for kind in KV_EVENTS}
        self._kv_event_overflows = counter(
            "kv_event_overflows", "Times that a subscriber of KV events was so slow that it lost messages, however many."
        ).cell()
        self._sessions_opened = counter("sessions_opened", "Sessions attached since the start.").cell()
        rpc_seconds = histogram("rpc", "Time to answer a call.", FAST_S, "method")
        waits = histogram("queue_wait", "Time that a move waits for its device, by class.", MOVE_S, "class")
        save_seconds = histogram("save", "Time from granting slots to their commit, by path.", FAST_S, "path")
        load_seconds = histogram("load", "Time from a load to its last readable block, by path.", FAST_S, "path")
        self._loop_lag = histogram("event_loop_lag", "How late the event loop runs a timer.", FAST_S).cell()
        self._rejections: dict[str, CounterCell] = {r.name: rejections.cell(r.name.lower()) for r in Reason if r}
        self._rejections[OTHER] = rejections.cell(OTHER)
        self._prefetches = {outcome: prefetches.cell(outcome) for outcome in PREFETCH_OUTCOMES}
        self._rpc_seconds = {method: rpc_seconds.cell(method) for method in RPC_METHODS}
        self._rpc_codes: dict[tuple[str, str], CounterCell] = {
            (method, code): self._rpcs.cell(method, code) for method in RPC_METHODS for code in ALWAYS_SHOWN_CODES
        }
        self._waits = {cls: waits.cell(cls) for cls in QUEUE_CLASSES}
        self._save_seconds: dict[str, HistogramCell] = {path: save_seconds.cell(path) for path in TRANSFER_PATHS}
        self._load_seconds: dict[str, HistogramCell] = {path: load_seconds.cell(path) for path in TRANSFER_PATHS}

    def _tenant(self, name: str) -> _TenantCells:
        found = self._tenants.get(name)
        if found is None:
            if name == OTHER or len(self._tenants) >= MAX_TENANT_LABELS:
                return self._other_tenant
            found = self._tenants[name] = _TenantCells(self, name)
        return found

    # ---- events, all on the event loop

    def lookup(self, tenant: str, held: int, asked: int) -> None:
        """Count one Lookup that asked for ``asked`` keys of which ``held`` are here."""
        cells = self._tenants.get(tenant) or self._tenant(tenant)
        cells.lookups.value += 1
        cells.held_keys.value += held
        cells.absent_keys.value += asked - held

    def saved(self, tenant: str, blocks: int, size_bytes: int, path: str = "shm", seconds: float | None = None) -> None:
        """Count committed blocks; ``seconds`` from the grant to the commit where it is known."""
        if path not in self._save_seconds:
            path = OTHER
        count, total = (self._tenants.get(tenant) or self._tenant(tenant)).saved[path]
        count.value += blocks
        total.value += size_bytes
        if seconds is not None:
            self._save_seconds[path].observe(seconds)

    def loaded(self, tenant: str, blocks: int, size_bytes: int, path: str = "shm", seconds: float | None = None) -> None:
        """Count blocks handed out; ``seconds`` from the call to its last readable block where it is known."""
        if path not in self._load_seconds:
            path = OTHER
        count, total = (self._tenants.get(tenant) or self._tenant(tenant)).loaded[path]
        count.value += blocks
        total.value += size_bytes
        if seconds is not None:
            self._load_seconds[path].observe(seconds)

    def move_seconds(self, src: Tier, dst: Tier, seconds: float) -> None:
        """Time of one batch from start to result; :class:`CoreCounts` counts its blocks and bytes."""
        self._core.edges[src, dst].seconds.observe(seconds)

    def queue_wait(self, cls: str, seconds: float) -> None:
        """Time that a move of class load, prefetch or demote waited for its device."""
        (self._waits.get(cls) or self._waits[OTHER]).observe(seconds)

    def rejected(self, reason: Reason | str, n: int = 1) -> None:
        """Count ``n`` keys or calls refused; a string is a :class:`Reason`'s or a SaveOutcome's name, such as ``BUSY``."""
        name = reason.name if isinstance(reason, Reason) else reason.upper()
        (self._rejections.get(name) or self._rejections[OTHER]).value += n

    def rpc(self, method: str, code: int | str, seconds: float) -> None:
        """Count one answered call; ``method`` without its service, ``code`` as gRPC's number or name."""
        if method not in self._rpc_seconds:
            method = OTHER
        name = code if isinstance(code, str) else CODE_NAMES.get(code, "UNKNOWN")
        cell = self._rpc_codes.get((method, name))
        if cell is None:
            if name not in RPC_CODES:
                name = "UNKNOWN"
            cell = self._rpc_codes[method, name] = self._rpcs.cell(method, name)
        cell.value += 1
        self._rpc_seconds[method].observe(seconds)

    def prefetch(self, outcome: str, n: int = 1) -> None:
        """Count ``n`` prefetches that ended with one of ``PREFETCH_OUTCOMES``."""
        (self._prefetches.get(outcome) or self._prefetches[OTHER]).value += n

    def checksum_failure(self, n: int = 1) -> None:
        """Count ``n`` copies that failed verification."""
        self._checksum_failures.value += n

    def io_error(self, tier: Tier, op: str, n: int = 1) -> None:
        """Count ``n`` operations ("read" or "write") that a device refused."""
        (self._io_errors.get((tier, op)) or self._io_errors[tier, OTHER]).value += n

    def nvme_totals(self, written_bytes: int, read_bytes: int, write_calls: int = 0, read_calls: int = 0) -> None:
        """Set the bytes that the device has written and read since the start, and in how many calls; the store counts them."""
        self._nvme_written.value = written_bytes
        self._nvme_read.value = read_bytes
        self._nvme_calls["write"].value = write_calls
        self._nvme_calls["read"].value = read_calls

    def folders(self, errors: Mapping[str, int], health: Mapping[str, str]) -> None:
        """Set the I/O errors of each configured folder since the start, and "ok" or what is wrong with it."""
        for folder, n in errors.items():
            self._folder_errors.cell(folder).value = n
        self.flags.folders_up = {folder: state == "ok" for folder, state in health.items()}

    def checkpoint(self, ok: bool = True) -> None:
        """Count one snapshot of the NVMe index."""
        self._checkpoints[ok].value += 1

    def kv_event(self, kind: str, n: int) -> None:
        """Count ``n`` copies told as one of ``KV_EVENTS``."""
        self._kv_events[kind].value += n

    def kv_event_overflow(self) -> None:
        """Count that a subscriber's queue was full."""
        self._kv_event_overflows.value += 1

    def session_opened(self) -> None:
        """Count one attached session."""
        self._sessions_opened.value += 1

    def loop_lag(self, seconds: float) -> None:
        """Time by which the event loop ran a timer late (see :func:`watch_loop_lag`)."""
        self._loop_lag.observe(seconds)

    # ---- states

    def io_paths(self, tier: Tier, paths: Iterable[str]) -> None:
        """Say what moves the bytes of a tier now: some of ``IO_PATHS``."""
        self.flags.io_paths[TIERS[tier]] = [path if path in IO_PATHS else OTHER for path in paths]

    def nvme_engine(self, name: str, *, encrypted: bool = False) -> None:
        """Say which engine moves bytes to and from NVMe, "" for none, and whether they are encrypted."""
        self.flags.nvme_engine = name
        self.flags.nvme_encrypted = encrypted

    def prefaulted(self, size_bytes: int, huge_page_bytes: int) -> None:
        """Say how many bytes of CPU memory are faulted in, and how many of these were gathered in huge pages."""
        self.flags.prefaulted_bytes = size_bytes
        self.flags.huge_page_bytes = huge_page_bytes

    def draining(self, on: bool) -> None:
        """Say whether the daemon drains."""
        self.flags.draining = on

    # ---- reading

    def bind(
        self,
        source: StatsSource,
        ready: Callable[[], tuple[bool, str]] | None = None,
        counts: CoreCounts | None = None,
        limits: Mapping[str, Limits] | None = None,
    ) -> None:
        """Name where gauges, readiness and the core's own totals come from.

        The core counts for itself: evictions, failed commands, moved blocks, bytes and failures are read from ``counts`` at
        each refresh, hits and misses from the snapshot's tenants. ``limits`` are those of the tenants that have some of their
        own at any time; they have a label each, as far as there are enough, whether the core knows them already or not.
        """
        self._source, self._ready, self._counts = source, ready, counts
        if limits is not None:
            self._configured = self._limits = limits

    def refresh(self) -> None:
        """Take a snapshot for the next scrapes. Call it on the event loop."""
        if self._source is not None:
            self._snapshot = self._source.snapshot()
            self._give_labels(self._snapshot.tenants)
            self._shown_limits = {name: self._limits[name] for name in self._tenants if name in self._limits}
        if self._ready is not None:
            self.flags.ready = self._ready()[0]
        if self._counts is not None:
            self._core.take(self._counts)
            self._take_tenants(self._snapshot.tenants if self._snapshot is not None else [])

    def _give_labels(self, tenants: list[TenantStats]) -> None:
        """Give labels to configured tenants and those that hold most, so that gauges and counters have the same."""
        gain, lose = labels_that_change(tenants, self._tenants, self._configured)
        for name in lose:
            del self._tenants[name]
            for vec in self._of_tenants:
                vec.drop(name)
        for name in gain:
            self._tenant(name)

    def _take_tenants(self, tenants: Iterable[TenantStats]) -> None:
        """Add what tenants have counted since the last time, each to the label that it has now."""
        for news in self._counted.news(tenants):
            cells = self._tenant(news.tenant)
            for cell, n in zip((*cells.hits, cells.misses), (*news.hits, news.misses), strict=True):
                cell.value += n
            for why, n in news.evictions.items():
                cells.evictions[why].value += n

    async def text(self, encoder: Callable[[CollectorRegistry], bytes] = generate_latest) -> bytes:
        """A scrape, in Prometheus's text format or the encoder's: written in a worker thread, one at a time. For the event loop."""
        async with self._writing:
            self.refresh()
            return await asyncio.to_thread(encoder, self.registry)

    def totals(self) -> dict[str, float]:
        """Each counter's total over all its labels, by name: what GetStatus calls counters. Read on the event loop."""
        if self._counts is not None:
            self.refresh()
        return {vec.name: vec.sum() for vec in self._counters}

    def describe(self) -> list[Metric]:
        """Families without samples, so that a registry finds names that clash."""
        vecs: list[CounterVec | HistogramVec] = [*self._counters, *self._histograms]
        return [*(vec.family(empty=True) for vec in vecs), *gauge_families(None, self.flags, {}, {})]

    def collect(self) -> list[Metric]:
        """All families with the counters of now and the gauges of the last :meth:`refresh`."""
        labels = {name: name for name in list(self._tenants)}
        vecs: list[CounterVec | HistogramVec] = [*self._counters, *self._histograms]
        return [*(vec.family() for vec in vecs), *gauge_families(self._snapshot, self.flags, labels, self._shown_limits)]


async def watch_loop_lag(metrics: Metrics, interval_s: float = 0.25) -> None:
    """Measure for ever how late the event loop runs a timer. Run it as a supervised task; it ends only by cancellation."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        metrics.loop_lag(max(0.0, loop.time() - due_s))
