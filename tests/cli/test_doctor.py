"""Goal: doctor's levels follow from what the host shows, every finding that is not fine says what to do, and it cleans up.

Method: a made-up /proc and /sys below a temporary folder, real files for the disk checks, and the whole command once.
"""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvtierd.cli import checks_gpu, checks_memory, checks_storage
from kvtierd.cli import doctor as doctor_module
from kvtierd.cli.checks_gpu import Cuda, check_cuda, check_gds, check_packages, find_cuda
from kvtierd.cli.checks_storage import (
    Speed,
    check_encryption,
    check_folder,
    check_metrics_address,
    check_socket,
    check_space,
    existing,
    measure,
)
from kvtierd.cli.doctor import examine
from kvtierd.cli.findings import Finding, Host, Level
from kvtierd.config import Config, CpuConfig

Kvtierd = Callable[..., Result]
GIB = 1 << 30
NO_CUDA = Cuda((), "none")


def host_with(root: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root)


def config(**sections: Any) -> Config:
    return Config.model_validate(sections)


def meminfo(total: int, free: int, **more: int) -> dict[str, str]:
    lines = [f"MemTotal: {total // 1024} kB", f"MemAvailable: {free // 1024} kB", *(f"{k}: {v}" for k, v in more.items())]
    return {"/proc/meminfo": "\n".join(lines) + "\nHugepagesize: 2048 kB\n"}


# ---- memory


@pytest.mark.parametrize(
    "capacity, level", [(GIB, Level.OK), (5 * GIB, Level.WARN), (9 * GIB, Level.ERROR)], ids=["fits", "above free", "above all"]
)
def test_free_memory(tmp_path: Path, capacity: int, level: Level) -> None:
    host = host_with(tmp_path, meminfo(8 * GIB, 4 * GIB))
    assert checks_memory.check_free_memory(host, config(cpu={"capacity": capacity})).level is level


def test_memory_without_proc(tmp_path: Path) -> None:
    assert checks_memory.check_free_memory(Host(tmp_path), Config()).level is Level.WARN
    assert checks_memory.check_cgroup(Host(tmp_path), Config()).level is Level.OK


V2 = {"/proc/self/cgroup": "0::/a/b\n"}


@pytest.mark.parametrize(
    "capacity, level",
    [(GIB, Level.OK), (int(3.5 * GIB), Level.WARN), (int(3.9 * GIB), Level.WARN), (5 * GIB, Level.ERROR)],
)
def test_cgroup_v2(tmp_path: Path, capacity: int, level: Level) -> None:
    files = V2 | {
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/b/memory.current": "1\n",
        "/sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "/sys/fs/cgroup/a/memory.current": f"{GIB // 4}\n",
    }
    found = checks_memory.check_cgroup(host_with(tmp_path, files), config(cpu={"capacity": capacity}))
    assert found.level is level
    assert "/sys/fs/cgroup/a/memory.max" in found.found, "the limit of a group above counts too"


def test_what_is_in_use_counts_against_the_limit(tmp_path: Path) -> None:
    files = V2 | {"/sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n", "/sys/fs/cgroup/a/memory.current": f"{6 * GIB}\n"}
    host = host_with(tmp_path, files)
    assert checks_memory.check_cgroup(host, config(cpu={"capacity": GIB})).level is Level.OK
    assert checks_memory.check_cgroup(host, config(cpu={"capacity": 3 * GIB})).level is Level.WARN


def test_cgroup_v1_inside_a_container(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n",  # the host's path; the mount shows the own group as /
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": "4096\n",
    }
    host = host_with(tmp_path, files)
    assert host.cgroup_memory() == (2 * GIB, 4096, "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    assert checks_memory.check_cgroup(host, config(cpu={"capacity": 3 * GIB})).level is Level.ERROR


def test_cgroup_v1_without_a_limit(tmp_path: Path) -> None:
    files = {"/proc/self/cgroup": "4:memory:/\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert host_with(tmp_path, files).cgroup_memory() is None


@pytest.mark.parametrize(
    "limit, cuda, level",
    [(-1, True, Level.OK), (2 * GIB, True, Level.OK), (65536, False, Level.OK), (65536, True, Level.WARN)],
)
def test_memlock(monkeypatch: pytest.MonkeyPatch, limit: int, cuda: bool, level: Level) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (limit, limit))
    assert checks_memory.check_memlock(config(cpu={"capacity": GIB}), cuda).level is level


@pytest.mark.parametrize("soft, hard, level", [(65536, 65536, Level.OK), (256, 1 << 20, Level.WARN), (256, 256, Level.WARN)])
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, level: Level) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, hard))
    found = checks_memory.check_files(Config())
    assert found.level is level
    assert ("ulimit" in found.fix) == (soft < hard)


@pytest.mark.parametrize(
    "text, level",
    [
        ("always [within_size] advise never", Level.OK),
        ("always within_size [advise] never", Level.OK),
        ("always within_size advise [never] deny", Level.WARN),
    ],
)
def test_shmem_huge_pages(tmp_path: Path, text: str, level: Level) -> None:
    host = host_with(tmp_path, {"/sys/kernel/mm/transparent_hugepage/shmem_enabled": text})
    small = Config(cpu=CpuConfig(huge_pages=False))
    assert checks_memory.check_shmem_pages(host, small).level is level
    assert checks_memory.check_shmem_pages(Host(tmp_path / "none"), small).level is Level.OK


@pytest.mark.parametrize("gathers, level", [(True, Level.OK), (False, Level.WARN)])
def test_huge_pages_that_the_daemon_gathers(tmp_path: Path, gathers: bool, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_memory, "can_gather", lambda: gathers)
    host = host_with(tmp_path, {"/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always advise [never]"})
    assert checks_memory.check_shmem_pages(host, Config()).level is level
    lazy = Config(cpu=CpuConfig(prefault=False))
    assert checks_memory.check_shmem_pages(host, lazy).level is Level.WARN


def test_huge_pages_that_nobody_uses(tmp_path: Path) -> None:
    assert checks_memory.check_huge_pages(host_with(tmp_path, meminfo(8 * GIB, GIB, HugePages_Free=2048))).level is Level.WARN
    assert checks_memory.check_huge_pages(host_with(tmp_path, meminfo(8 * GIB, GIB, HugePages_Free=0))).level is Level.OK


# ---- storage


def mounts(folder: Path, kind: str) -> dict[str, str]:
    lines = [
        "1 0 8:1 / / rw - ext4 /dev/sda rw",
        f"2 1 0:9 / {folder} rw - {kind} x rw",
        f"3 1 0:9 / {folder}x rw - beside x rw",
    ]
    return {"/proc/self/mountinfo": "\n".join(lines)}


FAST = Speed(1 << 26, 3e9, 3e9, True)


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> list[Speed]:
    """The measured speed, without measuring: change the only item."""
    speeds = [FAST]
    monkeypatch.setattr(checks_storage, "measure", lambda _folder, _size: speeds[0])
    return speeds


def worst(found: Iterator[Finding]) -> Level:
    order = list(Level)
    return max((f.level for f in found), key=order.index)


@pytest.mark.parametrize(
    "kind, volatile, level",
    [
        ("ext4", False, Level.OK),
        ("tmpfs", False, Level.ERROR),
        ("tmpfs", True, Level.WARN),
        ("overlay", False, Level.ERROR),
        ("nfs4", False, Level.WARN),
        ("fuse.sshfs", False, Level.WARN),
    ],
)
def test_file_systems(tmp_path: Path, speed: list[Speed], kind: str, volatile: bool, level: Level) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    host = host_with(tmp_path / "host", mounts(folder, kind))
    wanted = config(nvme={"folders": [folder], "allow_volatile": volatile})
    found = list(check_folder(host, wanted, folder / "kvtierd"))
    assert found[0].found == f"{kind} at {folder}"
    assert worst(iter(found)) is level


@pytest.mark.parametrize("direct, level", [("auto", Level.WARN), ("require", Level.ERROR), ("off", Level.OK)])
def test_no_direct_io(tmp_path: Path, speed: list[Speed], direct: str, level: Level) -> None:
    speed[0] = Speed(1 << 26, 3e9, 3e9, False)
    assert worst(check_folder(Host(tmp_path / "host"), config(nvme={"direct": direct}), tmp_path)) is level


def test_a_slow_disk(tmp_path: Path, speed: list[Speed]) -> None:
    speed[0] = Speed(1 << 26, 1e9, 5e7, True)
    found = list(check_folder(Host(tmp_path / "host"), Config(), tmp_path))
    assert found[-1].level is Level.WARN
    assert "50 MB/s read" in found[-1].found


def test_a_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> Speed:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checks_storage, "measure", broken)
    assert worst(check_folder(Host(tmp_path / "host"), Config(), tmp_path)) is Level.ERROR


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = check_folder(Host(tmp_path / "host"), Config(), tmp_path / "file" / "nvme")
    assert found.level is Level.ERROR


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_args: False)  # root may write everywhere
    (found,) = check_folder(Host(tmp_path / "host"), Config(), tmp_path)
    assert found.level is Level.ERROR
    assert "install -d" in found.fix


def test_measuring_leaves_nothing_behind(tmp_path: Path) -> None:
    result = measure(tmp_path, 8 << 20)
    assert result.size_bytes == 8 << 20
    assert result.write_bytes_per_s > 0
    assert result.read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_measuring_fails_cleanly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="No space"):
        measure(tmp_path, 8 << 20)
    assert list(tmp_path.iterdir()) == []


def test_space_counts_what_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    (folder / "segment").write_bytes(b"x" * (8 << 20))
    real = os.statvfs(folder)
    blocks = (4 << 20) // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result([*real[:4], blocks, *real[5:]]))
    nvme = {"folders": [folder], "reserve": 1 << 20, "capacity": 11 << 20, "segment": 4 << 20}
    assert check_space(config(nvme=nvme)).level is Level.OK, "3 MiB beside the reserve, and 8 MiB of segments"
    found = check_space(config(nvme=nvme | {"capacity": 12 << 20}))
    assert found.level is Level.ERROR
    assert "11MiB" in found.fix


def test_existing_climbs_to_a_folder(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert existing(tmp_path) == tmp_path


# ---- sockets


def test_socket_paths(short_dir: Path) -> None:
    path = short_dir / "k.sock"
    assert check_socket(path, "socket").level is Level.OK
    assert check_socket(short_dir / ("x" * 120), "socket").level is Level.ERROR
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert "left over" in check_socket(path, "socket").found
        server.listen()
        assert "listens" in check_socket(path, "socket").found
    (short_dir / "file").write_text("")
    assert check_socket(short_dir / "file", "socket").level is Level.ERROR


def test_a_packet_socket_listens_too(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(short_dir / "fd.sock"))
        server.listen()
        assert "listens" in check_socket(short_dir / "fd.sock", "descriptor socket").found


def test_a_folder_open_to_everybody(short_dir: Path) -> None:
    short_dir.chmod(0o777)
    assert check_socket(short_dir / "k.sock", "socket").level is Level.ERROR


def test_metrics_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert check_metrics_address(config(server={"metrics": address})).level is Level.WARN
    assert check_metrics_address(config(server={"metrics": address})).level is Level.OK
    assert check_metrics_address(config(server={"metrics": ""})).level is Level.OK
    assert check_metrics_address(config(server={"metrics": "no.such.host.invalid:1"})).level is Level.ERROR


# ---- devices


def test_no_cuda_matters_only_for_the_hbm_tier() -> None:
    assert find_cuda("libno-such-library.so.1").library is False
    assert check_cuda(Config(), NO_CUDA).level is Level.OK
    assert check_cuda(config(hbm={"capacity": "1GiB"}), NO_CUDA).level is Level.ERROR
    assert check_cuda(Config(), Cuda((), "cuInit answers error 999", library=True)).level is Level.WARN
    assert "2 x H200" in check_cuda(Config(), Cuda(("H200", "H200"), library=True)).found


def test_kvikio_is_an_error_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_gds(Host(tmp_path), Config(), NO_CUDA).level is Level.OK
    assert check_gds(Host(tmp_path), config(nvme={"io": "kvikio"}), NO_CUDA).level is Level.ERROR
    monkeypatch.setattr(checks_gpu, "_import_error", lambda _module: "")
    host = host_with(tmp_path, {"/proc/driver/nvidia-fs/version": "2.20"})
    found = check_gds(host, config(nvme={"io": "kvikio"}), Cuda(("H200",), library=True))
    assert found.level is Level.OK
    assert "2.20" in found.found


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["click<9,>=8.1", "no-such-package>=1", 'torch>=2; extra == "cuda13"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _name: wanted)
    found = check_packages()
    assert found.level is Level.ERROR
    assert found.found == "missing: no-such-package"


# ---- the whole


def test_the_command(kvtierd: Kvtierd, short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_storage, "PROBE_BYTES", 4 << 20)
    monkeypatch.setattr(doctor_module, "find_cuda", lambda: NO_CUDA)
    file = short_dir / "c.toml"
    file.write_text(
        f'[nvme]\nallow_volatile = true\ncapacity = "16MiB"\nreserve = 0\nfolders = ["{short_dir}/a", "{short_dir}/b"]\n'
        '[cpu]\ncapacity = "1MiB"\n[server]\nmetrics = ""\n'
    )
    result = kvtierd("doctor", "--json", "--config", file)
    data = json.loads(result.output)
    assert (result.exit_code, data["ok"]) == (0, True), data
    assert {f"folder {short_dir}/a", f"folder {short_dir}/b", "kernel", "socket", "CUDA"} <= {c["check"] for c in data["checks"]}
    assert all(c["meaning"] and c["fix"] for c in data["checks"] if c["level"] != "ok")
    assert {p.name for p in short_dir.iterdir()} == {"c.toml"}, "nothing is left behind"
    file.write_text(file.read_text().replace('"1MiB"', '"100TiB"'))
    text = kvtierd("doctor", "--config", file)
    assert text.exit_code == 1
    assert "fix: set cpu.capacity" in text.output


def test_a_check_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> Finding:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(doctor_module, "check_free_memory", broken)
    found = list(examine(config(nvme={"capacity": 0}), Host(tmp_path), NO_CUDA))
    assert any(f.check == "memory" and f.level is Level.WARN and "oops" in f.found for f in found)
    assert found[-1].check == "Python packages"


def test_the_key_of_blocks_at_rest(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("ab12" * 16)
    path.chmod(0o600)
    assert not list(check_encryption(Config()))
    assert worst(check_encryption(config(nvme={"encryption_key_file": path}))) is Level.OK
    path.chmod(0o644)
    (found,) = check_encryption(config(nvme={"encryption_key_file": path}))
    assert found.level is Level.ERROR and "chmod it to 0600" in found.found and "ab12" not in found.found
    (found,) = check_encryption(config(nvme={"encryption_key_command": "false"}))
    assert "was not tried" in found.found
