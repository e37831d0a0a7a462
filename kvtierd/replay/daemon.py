"""A trace through a running daemon: real bytes, in the trace's own time or scaled.

The loop is open: a request begins when the trace says so, whether those before it have ended or not, as far as there are workers.
How late requests began is part of the result. Every byte that is loaded is checked.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from kvtierd.client import Client, block_keys
from kvtierd.errors import DaemonUnavailableError
from kvtierd.memory import available_bytes
from kvtierd.model import PAGE_BYTES, Namespace, Tier
from kvtierd.replay.result import MAX_SAMPLES, Tally, figures
from kvtierd.replay.trace import Request
from kvtierd.v1 import admin_pb2

MAX_TENANTS: Final = 64
"""Tenants that a replay through a daemon may have: each takes a session."""
SAVE_WAIT_S: Final = 1.0
"""How long a save may wait for room."""
LEAST_SAMPLE_S: Final = 0.25
ATTACH_TIMEOUT_S: Final = 10.0

Bytes = NDArray[np.uint8]


class ReplayError(Exception):
    """A replay that cannot be. The text says why."""


@dataclass(frozen=True)
class DaemonSettings:
    """How to replay."""

    address: str
    block_bytes: int = 64 << 10
    """A multiple of the page size."""
    time_scale: float = 1.0
    workers: int = 4
    seed: int = 1
    """Part of every key: runs with different seeds share nothing."""
    timeout_s: float = 30.0
    """Of each call."""
    keep: bool = False
    """Leave the blocks in the daemon at the end."""
    token_file: str | None = None
    """As a client has it."""


@dataclass
class _Counts:
    loaded: Counter[Tier] = field(default_factory=Counter)
    lost: int = 0
    saved: int = 0
    unsaved: int = 0
    checked_bytes: int = 0
    wrong_bytes: int = 0
    late_s: list[float] = field(default_factory=list)


class DaemonReplay:
    """One run; :meth:`run` once.

    Args:
        settings: how.
        requests: what.
        status: asks the daemon for its status.

    Raises:
        ReplayError: the settings or the trace ask for what cannot be.
    """

    def __init__(
        self, settings: DaemonSettings, requests: list[Request], status: Callable[[], admin_pb2.GetStatusResponse]
    ) -> None:
        if settings.block_bytes % PAGE_BYTES or not settings.block_bytes:
            raise ReplayError(f"a block of {settings.block_bytes} bytes: it is a multiple of {PAGE_BYTES} here")
        tenants = {r.tenant for r in requests}
        if len(tenants) > MAX_TENANTS:
            raise ReplayError(f"the trace has {len(tenants)} tenants; at most {MAX_TENANTS} can be replayed through a daemon")
        self._settings = settings
        self._requests = requests
        self._workers = min(settings.workers, len(requests))
        self._widest = max(len(r.blocks) for r in requests)
        self._need_memory()
        self._status = status
        self._tenants = sorted(tenants)
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()
        self._next: Iterator[Request] = iter(requests)
        self._began_s = 0.0
        self._failure: BaseException | None = None
        self.tally = Tally()
        self._counts = _Counts()

    def run(self) -> dict[str, Any]:
        """Replay everything. Returns the figures as JSON values.

        Raises:
            DaemonUnavailableError: no daemon answers there, at the start or later.
            RequestError: the daemon refuses such calls.
        """
        before = self._status()
        settings = self._settings
        namespace = Namespace(shard_bytes=(settings.block_bytes,), model="kvtierd-replay", revision=f"seed-{settings.seed}")
        try:
            for tenant in self._tenants:
                self._clients[tenant] = Client(
                    namespace,
                    settings.address,
                    tenant,
                    ATTACH_TIMEOUT_S,
                    name="kvtierd replay",
                    require=True,
                    token_file=settings.token_file,
                )
            self._began_s = time.monotonic()
            self._work_and_watch()
            if self._failure is not None:
                raise self._failure
            seconds = time.monotonic() - self._began_s
            after = self._status()
            return self._figures(before, after, seconds)
        finally:
            for client in self._clients.values():
                if not settings.keep:
                    client.require = False
                    client.evict(timeout_s=settings.timeout_s)
                client.close()

    def _need_memory(self) -> None:
        """Each worker has memory for the blocks of the longest request. Raises ReplayError where there is not as much."""
        size, free = self._workers * self._widest * self._settings.block_bytes, available_bytes()
        if size > free:
            raise ReplayError(
                f"{self._workers} workers with memory for {self._widest} blocks of {self._settings.block_bytes:,} bytes take "
                f"{size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free: lower --block-size or --workers"
            )

    # ---- workers

    def _work_and_watch(self) -> None:
        """Have it done. However this ends, no worker is left: one that waits for a later request would keep the process."""
        with ThreadPoolExecutor(self._workers, "replay") as pool:
            workers = [pool.submit(self._work) for _ in range(self._workers)]
            try:
                self._watch(workers)
            except BaseException as e:
                self._failure = e
                raise
            finally:
                wait(workers)

    def _work(self) -> None:
        try:
            buffers = np.zeros((self._widest, self._settings.block_bytes), np.uint8)
            while (request := self._take()) is not None:
                due_s = self._began_s + request.at_s * self._settings.time_scale
                while (wait_s := due_s - time.monotonic()) > 0:
                    if self._failure is not None:
                        return
                    time.sleep(min(wait_s, 0.5))
                late_s = time.monotonic() - due_s
                self._replay(request, buffers, late_s)
        except BaseException as e:
            self._failure = e

    def _take(self) -> Request | None:
        with self._lock:
            return None if self._failure is not None else next(self._next, None)

    def _replay(self, request: Request, buffers: Bytes, late_s: float) -> None:
        client, timeout_s = self._clients[request.tenant], self._settings.timeout_s
        keys = block_keys(request.blocks, 1, identity=f"kvtierd-replay/{self._settings.seed}".encode())
        rows = list(buffers[: len(keys)])
        found = client.lookup(keys, timeout_s=timeout_s)
        with self._lock:
            self.tally.arrived(request, found.tiers)
            self._counts.late_s.append(late_s)
        buffers[: len(keys)] = 0
        result = client.load(keys, rows, timeout_s)  # of all keys: what is missing counts in the daemon's hit rate
        loaded = result.loaded
        wrong = sum(_wrong_bytes(key, row) for key, row in zip(keys[:loaded], rows, strict=False))
        with self._lock:
            self._counts.loaded.update(result.by_tier)
            self._counts.lost += max(0, found.held - loaded)
        for key, row in zip(keys[loaded:], rows[loaded:], strict=True):
            _fill(key, row)
        saved = client.save(keys, rows, timeout_s, wait_s=SAVE_WAIT_S) if loaded < len(keys) else None
        with self._lock:
            self._counts.checked_bytes += loaded * self._settings.block_bytes
            self._counts.wrong_bytes += wrong
            if saved is not None:
                self._counts.saved += saved.saved
                self._counts.unsaved += saved.rejected.total()

    # ---- watching

    def _watch(self, workers: list[Future[None]]) -> None:
        """Look at the daemon now and then until the workers have ended."""
        span_s = self._requests[-1].at_s * self._settings.time_scale
        every_s = max(span_s / MAX_SAMPLES, LEAST_SAMPLE_S)
        running: set[Future[None]] = set(workers)
        while running:
            self._sample()
            running = wait(running, every_s).not_done
        self._sample()

    def _sample(self) -> None:
        try:
            status = self._status()
        except (grpc.RpcError, DaemonUnavailableError) as e:
            self._failure = self._failure or e
            return
        with self._lock:
            self.tally.sample(time.monotonic() - self._began_s, {Tier(t.tier - 1): t.copies for t in status.tiers})

    # ---- figures

    def _figures(self, before: admin_pb2.GetStatusResponse, after: admin_pb2.GetStatusResponse, seconds: float) -> dict[str, Any]:
        counts, settings = self._counts, self._settings

        def grown(name: str) -> int:
            return int(after.counters.get(name, 0.0) - before.counters.get(name, 0.0))

        late = sorted(counts.late_s)
        parameters = {
            "mode": "daemon",
            "block_bytes": settings.block_bytes,
            "time_scale": settings.time_scale,
            "workers": settings.workers,
            "seed": settings.seed,
            "capacity_bytes": {Tier(t.tier - 1).name.lower(): t.capacity_bytes for t in after.tiers},
            "daemon_version": after.version,
        }
        return figures(self._requests, self.tally, [Tier(t.tier - 1) for t in after.tiers], parameters) | {
            "saved_blocks": counts.saved,
            "unsaved_blocks": counts.unsaved,
            "lost_blocks": counts.lost,
            "loaded_blocks_by_tier": {t.name.lower(): n for t, n in sorted(counts.loaded.items())},
            "checked_bytes": counts.checked_bytes,
            "wrong_bytes": counts.wrong_bytes,
            "nvme_written_bytes": grown("kvtierd_nvme_written_bytes_total"),
            "nvme_read_bytes": grown("kvtierd_nvme_read_bytes_total"),
            "demoted_blocks": grown("demotions"),
            "promoted_blocks": grown("promotions"),
            "evicted_copies": grown("kvtierd_evictions_total"),
            "not_admitted_blocks": grown("kvtierd_nvme_not_admitted_blocks_total"),
            "late_s": {"p50": _at(late, 0.5), "p99": _at(late, 0.99), "max": _at(late, 1.0)},
            "seconds": round(seconds, 3),
        }


def _at(values: list[float], share: float) -> float:
    return round(values[min(int(len(values) * share), len(values) - 1)], 4) if values else 0.0


def _content(key: bytes, size_bytes: int) -> Bytes:
    """What a key holds: its own words over and over, each run marked with its place."""
    words = np.empty((size_bytes // len(key), len(key) // 8), np.uint64)
    words[:] = np.frombuffer(key, np.uint64)
    words[:, 0] += np.arange(len(words), dtype=np.uint64)
    return words.view(np.uint8).reshape(-1)


def _fill(key: bytes, row: Bytes) -> None:
    row[:] = _content(key, row.size)


def _wrong_bytes(key: bytes, row: Bytes) -> int:
    return int(np.count_nonzero(row != _content(key, row.size)))
