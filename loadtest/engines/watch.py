"""The daemon's side of a run: the process, its figures over time, and the faults when they are due."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvtierd.bench.measure import status_bytes
from kvtierd.demo.daemon import DemoDaemon
from kvtierd.model import Tier
from kvtierd.testing.faults.disk import DiskFault, FaultyDisk, compiler
from loadtest.engines.plan import DISK_KINDS, Fault, FaultKind, PlanError, Settings

SAMPLE_EVERY_S = 0.5
STATUS_TIMEOUT_S = 1.0
FULL = {DiskFault.WRITE_ENOSPC: 1.0, DiskFault.MAKE_ENOSPC: 1.0}
FAILING = {DiskFault.WRITE_EIO: 0.3, DiskFault.READ_EIO: 0.3, DiskFault.READ_FLIP: 0.2}
COUNTERS = (
    "demotions",
    "promotions",
    "kvtierd_evictions_total",
    "kvtierd_nvme_written_bytes_total",
    "kvtierd_nvme_read_bytes_total",
)


@dataclass(frozen=True)
class Sample:
    """What the daemon held at one moment; nothing but the time where it did not answer."""

    at_s: float
    used_bytes: dict[str, int]
    capacity_bytes: dict[str, int]
    rss_bytes: int = 0
    """Anonymous memory of the process; that of blocks is counted in the CPU tier."""
    sessions: int = 0
    suspended: dict[str, str] | None = None
    """Why a tier takes nothing at present."""


@dataclass
class Event:
    """One fault as it happened."""

    fault: Fault
    began_s: float
    ended_s: float | None = None


class Watched:
    """A daemon with a disk that can fail, looked at twice a second by a thread of its own.

    Args:
        folder: for everything; on the file system that is to be tried.
        settings: the run's.

    Raises:
        PlanError: faults of the disk need a C compiler, and there is none.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.disk: FaultyDisk | None = None
        if any(fault.kind in DISK_KINDS for fault in settings.faults):
            if compiler() is None:
                raise PlanError("faults of the disk need a C compiler: install gcc, or leave them out of --faults")
            self.disk = FaultyDisk(folder / "nvme", folder / "faults")
        self.daemon = DemoDaemon(
            folder,
            {"cpu": {"capacity": settings.cpu}, "nvme": {"capacity": settings.nvme}, "log": {"level": "warning"}},
        )
        if self.disk is not None:
            self.daemon.environment = self.disk.environment
        self.samples: list[Sample] = []
        self.disk_hits: dict[str, int] = {}
        """Calls that were made to fail, once it is closed."""
        self.counters: dict[str, float] = {}
        """Of all boots together."""
        self._boot: tuple[int, dict[str, float]] = (0, {})
        self._began_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)

    def start(self) -> None:
        """Start the daemon. Raises StartupError."""
        self.daemon.start()

    def begin(self, began_s: float) -> None:
        """Look at it from now on; the run begins at that moment of the monotonic clock."""
        self._began_s = began_s
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            self._look()

    def _look(self) -> None:
        now_s = time.monotonic() - self._began_s
        try:
            status = self.daemon.status(STATUS_TIMEOUT_S)
            rss = status_bytes(self.daemon.pid, "RssAnon")
        except (grpc.RpcError, OSError, AssertionError):
            self.samples.append(Sample(now_s, {}, {}))
            return
        epoch, last = self._boot
        counters = {name: status.counters.get(name, 0.0) for name in COUNTERS}
        for name, value in counters.items():
            self.counters[name] = (
                self.counters.get(name, 0.0) + value - (last.get(name, 0.0) if epoch == status.boot_epoch else 0.0)
            )
        self._boot = (status.boot_epoch, counters)
        tiers = {Tier(t.tier - 1).name.lower(): t for t in status.tiers}
        self.samples.append(
            Sample(
                now_s,
                {name: t.used_bytes for name, t in tiers.items()},
                {name: t.capacity_bytes for name, t in tiers.items()},
                rss,
                len(status.sessions),
                {name: t.suspended for name, t in tiers.items() if t.suspended},
            )
        )

    def inflict(self, fault: Fault) -> Callable[[], None]:
        """Begin a fault of the daemon or its disk. Returns what ends it."""
        daemon, disk = self.daemon, self.disk
        if fault.kind is FaultKind.KILL:
            daemon.kill()
            return lambda: _start(daemon)
        if fault.kind is FaultKind.STOP:
            pid = daemon.pid
            os.kill(pid, signal.SIGSTOP)
            return lambda: _go_on(pid)
        assert disk is not None, "made where the schedule has faults of the disk"
        disk.set(FULL if fault.kind is FaultKind.DISK_FULL else FAILING, seed=round(fault.at_s * 1000))
        return disk.heal

    @property
    def ended(self) -> int | None:
        """Exit status when the daemon has ended by itself."""
        return self.daemon.ended

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5 * STATUS_TIMEOUT_S)
        self.daemon.kill()
        self.daemon.remove_sockets()
        if self.disk is not None:
            self.disk_hits = {fault.name.lower(): hits for fault, hits in self.disk.hits().items() if hits}
            self.disk.close()


def _start(daemon: DemoDaemon) -> None:
    daemon.launch()


def _go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
