"""What a check of ``kvtierd doctor`` answers, and the host it looks at."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

__all__ = ["Finding", "Host", "Level", "Mount"]


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    ERROR = "error"
    """The daemon will not start, or not do what the configuration says."""


@dataclass(frozen=True)
class Finding:
    """One answer: what was found, what it means and what to do about it (empty when there is nothing to do)."""

    check: str
    level: Level
    found: str
    meaning: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Mount:
    """The file system under a path."""

    point: Path
    kind: str


@dataclass(frozen=True)
class Host:
    """The kernel's view of this host, read below ``root`` so that a test can show another host."""

    root: Path = field(default=Path("/"))

    def read(self, path: str) -> str | None:
        """Text of a file of /proc or /sys without its last line break; None when it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def meminfo(self) -> dict[str, int]:
        """Figures of /proc/meminfo: bytes, or counts for the ``HugePages_`` lines."""
        figures: dict[str, int] = {}
        for line in (self.read("/proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if words and words[0].isdigit():
                figures[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
        return figures

    def cgroup_memory(self) -> tuple[int, int, str] | None:
        """(limit, usage, file) in bytes of the tightest memory limit of this process's cgroups; None without a limit."""
        found = [(limit - usage, limit, usage, name) for limit, usage, name in self._cgroup_limits()]
        if not found:
            return None
        _, limit, usage, name = min(found)
        return limit, usage, name

    def _cgroup_limits(self) -> list[tuple[int, int, str]]:
        limits = []
        for line in (self.read("/proc/self/cgroup") or "").splitlines():
            parts = line.split(":", 2)
            if len(parts) != 3:
                continue
            if parts[1] == "":
                base, limit_file, usage_file = "/sys/fs/cgroup", "memory.max", "memory.current"
            elif "memory" in parts[1].split(","):
                base, limit_file, usage_file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            # Inside a container the path may be the host's; then the root of the mount is the own cgroup, so it counts too.
            group = Path(parts[2].lstrip("/"))
            for folder in {group, *group.parents}:
                name = f"{base}/{folder}/{limit_file}".replace("/./", "/")
                limit, usage = self.read(name), self.read(f"{base}/{folder}/{usage_file}")
                # A v1 cgroup without a limit says the largest number of pages instead.
                if limit is not None and limit.isdigit() and int(limit) < 1 << 60:
                    limits.append((int(limit), int(usage) if usage and usage.isdigit() else 0, name))
        return limits

    def mount(self, path: Path) -> Mount | None:
        """The mount that holds an existing path."""
        real, best = Path(os.path.realpath(path)), None
        for line in (self.read("/proc/self/mountinfo") or "").splitlines():
            left, dash, right = line.partition(" - ")
            fields = left.split()
            if not dash or len(fields) < 5:
                continue
            point = Path(fields[4].replace("\\040", " "))
            # Later lines lie over earlier ones at the same point.
            if real.is_relative_to(point) and (best is None or len(point.parts) >= len(best.point.parts)):
                best = Mount(point, right.split()[0])
        return best
