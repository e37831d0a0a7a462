"""Does the CPU tier fit into this machine and into the memory limits of this process's control groups?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvtierd.errors import StartupError

log = logging.getLogger(__name__)

WARN_SHARE: Final = 0.8
"""Share of a limit above which the capacity is worth a warning."""
MAX_ANCESTRY: Final = 256
"""Control groups looked at, from a process's own up to the root."""


def check_limits(capacity: int, root: Path = Path("/"), *, held: int = 0) -> None:
    """Check the CPU tier's capacity against the machine's memory and every memory control group above this process.

    Size limits of tmpfs mounts do not matter: memfds belong to no mount. Page cache counts as free, for the kernel drops it.

    Args:
        capacity: bytes of the CPU tier.
        root: where ``proc`` and the cgroup mounts are found.
        held: bytes that are in use already and become a part of the tier.

    Raises:
        StartupError: it cannot fit; the text names the numbers and the fix.
    """
    total = _mem_total(root)
    if total is not None:
        _judge(capacity, total, 0, f"this machine has {_size(total)} of memory")
    for folder, limit, used in memory_groups(root):
        used = max(used - held, 0)
        text = f"the memory limit of the control group {folder} is {_size(limit)}, of which {_size(used)} are in use"
        _judge(capacity, limit, used, text)


def _judge(capacity: int, limit: int, used: int, text: str) -> None:
    room = max(limit - used, 0)
    if capacity > room:
        fix = f"set cpu.capacity to less than {_size(room)}" + (", or raise the limit" if "control group" in text else "")
        raise StartupError(f"cpu.capacity is {_size(capacity)}, but {text}; {fix}")
    if capacity > WARN_SHARE * room:
        log.warning("cpu.capacity is %s, above %d%% of what is free: %s", _size(capacity), WARN_SHARE * 100, text)


def memory_groups(root: Path = Path("/")) -> Iterator[tuple[Path, int, int]]:
    """Control groups with a memory limit that this process is in: folder, limit and bytes in use but for page cache."""
    for folder, version in _own_groups(root):
        if version == 2:
            names, cache_keys = ("memory.max", "memory.current"), ("inactive_file", "active_file")
        else:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cache_keys = ("total_inactive_file", "total_active_file")
        limit, used = (_number(folder / name) for name in names)
        if limit is None or limit >= 1 << 60:  # version 1 writes "no limit" as a number near 2**63
            continue
        stat = _table(folder / "memory.stat")
        cache = sum(stat.get(key, 0) for key in cache_keys)
        yield folder, limit, max((used or 0) - cache, 0)


def _own_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Folders of this process's control groups with a memory controller, own first, up to each mount's root."""
    paths: dict[int, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for version, mount_root, mount_point in _mounts(root):
        if version not in paths:
            continue
        path = paths[version]
        if mount_root != "/" and (path + "/").startswith(mount_root.rstrip("/") + "/"):
            path = path[len(mount_root) :]
        top = root / mount_point.lstrip("/")
        folder = top / path.lstrip("/")
        if ".." in Path(path).parts or not folder.is_dir():
            folder = top  # another namespace's path; what is mounted here is what can be known
        for _ in range(MAX_ANCESTRY):
            yield folder, version
            if folder == top:
                break
            folder = folder.parent


def _mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield 1, fields[3], fields[4]


def _mem_total(root: Path) -> int | None:
    value = _table(root / "proc/meminfo").get("MemTotal")
    return None if value is None else value * 1024


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _table(path: Path) -> dict[str, int]:
    pairs = (line.replace(":", " ").split() for line in _lines(path))
    return {p[0]: int(p[1]) for p in pairs if len(p) >= 2 and p[1].isdigit()}


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
