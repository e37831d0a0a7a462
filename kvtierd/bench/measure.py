"""Numbers: rates, percentiles, one row of the report, and what must be known about the machine to read them."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import kvtierd
from kvtierd.errors import KvtierdError

GB: Final = 1e9
MIB: Final = 1 << 20
COPY_TARGET: Final = 0.8
"""Least share of a one-thread memory copy that a save or load through shared memory should reach."""
DISK_TARGET: Final = 0.9
"""Least share of raw O_DIRECT that NVMe through the daemon should reach."""
FALLBACK_CACHE_BYTES: Final = 64 << 20


class BenchError(KvtierdError):
    """The measurement cannot be made. The text says why and what to do."""


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        name: what was measured.
        unit: of ``limit`` and ``figure``.
        figure: median.
        limit: what the machine (or an index that is nearly empty) does; None where there is no such thing.
        target: least ``figure / limit``; None where there is none.
    """

    name: str
    unit: str
    figure: float
    limit: float | None = None
    target: float | None = None

    @property
    def ratio(self) -> float | None:
        """Figure by limit; None without a limit."""
        return self.figure / self.limit if self.limit else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None or self.ratio is None else self.ratio >= self.target


@dataclass
class Report:
    """Everything one run has found: rows for people and a tree of values for programs."""

    rows: list[Row] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def put(self, *path: str, value: object) -> None:
        """Set a value at a path of keys."""
        *parents, last = path
        table = self.values
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value

    def ratio(self, *path: str, row: Row) -> None:
        """Add a row, and its ratio under ``ratios``."""
        self.rows.append(row)
        if row.ratio is not None:
            self.put("ratios", *path, value=digits(row.ratio))


def counts_text(counts: Mapping[Any, int]) -> str:
    """Counts by name or by a member of an enumeration, in words."""
    return ", ".join(f"{n} {getattr(what, 'name', what)}" for what, n in counts.items()) or "none"


def digits(value: float, significant: int = 4) -> float:
    """A value rounded to some significant digits, for output."""
    return float(f"{value:.{significant}g}")


def median(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return statistics.median(values) if values else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of all do not exceed; 0 of nothing."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, -(-int(percent * len(ordered)) // 100) - 1))]


def spread(values: Sequence[float]) -> list[float]:
    """The quartiles, so that a reader sees how steady a median is."""
    return [digits(percentile(values, 25)), digits(percentile(values, 75))]


def last_level_cache_bytes() -> int:
    """Bytes of the largest CPU cache, 64 MiB when the kernel does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=FALLBACK_CACHE_BYTES)


def status_bytes(pid: int, name: str) -> int:
    """A size in bytes out of ``/proc/PID/status``, such as "RssAnon"; 0 when the kernel does not give it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_model() -> str:
    """Name of the CPU as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def filesystem_of(folder: Path) -> str:
    """Type and device of the file system that holds a folder, such as "ext4 on /dev/nvme0n1p1"; empty when unknown."""
    best, found = -1, ""
    where = str(folder.resolve())
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        device, mount, kind, *_ = line.split()
        mount = mount.replace("\\040", " ")
        if (where == mount or where.startswith(mount.rstrip("/") + "/")) and len(mount) >= best:
            best, found = len(mount), f"{kind} on {device}"
    return found


def source_digest() -> str:
    """12 hex digits that change with any Python file of the package: a version number does not tell two working copies apart."""
    root = Path(kvtierd.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def close_environment(found: dict[str, Any]) -> None:
    """Add what is known at the end of a run, and whether the code stayed the same: each daemon runs what it found at its start."""
    found["load_average_after"] = [digits(x, 3) for x in os.getloadavg()]
    found["source_changed"] = source_digest() != found["source"]


def environment(folder: Path | None) -> dict[str, Any]:
    """The machine and versions, for the head of a result."""
    found: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_mib": last_level_cache_bytes() // MIB,
        "memory_gib": digits(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 3),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvtierd": kvtierd.__version__,
        "source": source_digest(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(["kvtierd", *sys.argv[1:]]),
        "load_average_before": [digits(x, 3) for x in os.getloadavg()],
    }
    if folder is not None:
        found["filesystem"] = filesystem_of(folder)
    return found
