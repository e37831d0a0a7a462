"""Goal: a CPU tier that cannot fit is refused before it takes memory, with the numbers, under every form of control group.

Method: trees of files that look like ``/proc`` and the cgroup mounts of real systems.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.errors import StartupError
from kvtierd.tiers.memory_limits import check_limits, memory_groups

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
V1_MOUNT = "31 23 0:27 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 5 kB", "proc/self/mountinfo": V2_MOUNT})
    return tmp_path


def v2_group(root: Path, path: str, limit: str, used: int = 0, cache: int = 0) -> None:
    folder = f"sys/fs/cgroup{path}/"
    stat = f"anon 5\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}"
    write(root, {folder + "memory.max": limit, folder + "memory.current": str(used), folder + "memory.stat": stat})


def v1_group(root: Path, path: str, limit: int, used: int = 0, cache: int = 0) -> None:
    folder = f"sys/fs/cgroup/memory{path}/"
    files = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(used), "memory.stat": f"total_inactive_file {cache}"}
    write(root, {folder + name: text for name, text in files.items()})


def test_more_than_the_machine_has(root: Path) -> None:
    check_limits(40 * GIB, root)
    with pytest.raises(StartupError, match=r"cpu.capacity is 65.00 GiB, but this machine has 64.00 GiB .* set cpu.capacity"):
        check_limits(65 * GIB, root)


def test_close_to_the_limit_is_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_limits(51 * GIB, root)
    assert not caplog.records
    check_limits(52 * GIB, root)
    assert "above 80%" in caplog.text


@pytest.mark.parametrize("limited", ["/pod", "/pod/container"])
def test_every_group_up_to_the_root_counts(root: Path, limited: str) -> None:
    write(root, {"proc/self/cgroup": "0::/pod/container"})
    for path in ("/pod", "/pod/container"):
        v2_group(root, path, str(8 * GIB) if path == limited else "max")
    check_limits(5 * GIB, root)
    with pytest.raises(StartupError, match=rf"control group \S*{limited} is 8.00 GiB, .* or raise the limit"):
        check_limits(9 * GIB, root)


def test_what_is_in_use_counts_but_page_cache_does_not(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/"})
    v2_group(root, "", str(8 * GIB), used=5 * GIB, cache=3 * GIB)
    assert list(memory_groups(root)) == [(root / "sys/fs/cgroup", 8 * GIB, 2 * GIB)]
    check_limits(6 * GIB, root)
    with pytest.raises(StartupError, match=r"of which 2.00 GiB are in use; set cpu.capacity to less than 6.00 GiB"):
        check_limits(6 * GIB + 1, root)


def test_version_1_inside_a_container(root: Path) -> None:
    """The mount shows the container's own group as its root, while the process's path is the host's."""
    write(root, {"proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc"), "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/x"})
    v1_group(root, "", 4 * GIB, used=2 * GIB, cache=GIB)
    assert list(memory_groups(root)) == [(root / "sys/fs/cgroup/memory", 4 * GIB, GIB)]
    with pytest.raises(StartupError, match=r"4\.00 GiB"):
        check_limits(4 * GIB, root)


def test_version_1_and_2_side_by_side(root: Path) -> None:
    v2 = V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    write(root, {"proc/self/mountinfo": V1_MOUNT.format(root="/") + "\n" + v2, "proc/self/cgroup": "4:memory:/a/b\n0::/"})
    v1_group(root, "/a/b", (1 << 63) - 4096)
    v1_group(root, "/a", 2 * GIB)
    v1_group(root, "", (1 << 63) - 4096)
    assert [limit for _, limit, _ in memory_groups(root)] == [2 * GIB]


def test_a_path_of_another_namespace_falls_back_to_what_is_mounted(root: Path) -> None:
    write(root, {"proc/self/cgroup": "0::/../../other"})
    v2_group(root, "", str(GIB))
    assert [limit for _, limit, _ in memory_groups(root)] == [GIB]


def test_nothing_known_is_no_error(tmp_path: Path) -> None:
    check_limits(1 << 50, tmp_path)


def test_the_real_system_is_readable() -> None:
    check_limits(1 << 20)
