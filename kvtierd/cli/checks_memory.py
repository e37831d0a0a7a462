"""Checks of memory and limits of the process for ``kvtierd doctor``."""

from __future__ import annotations

import mmap
import os
import resource
from typing import Final

from kvtierd.cli.findings import Finding, Host, Level
from kvtierd.cli.output import format_bytes
from kvtierd.config import Config
from kvtierd.memory import can_gather

__all__ = [
    "check_cgroup",
    "check_files",
    "check_free_memory",
    "check_huge_pages",
    "check_memlock",
    "check_populate",
    "check_shmem_pages",
    "wanted_files",
]

FULL_SHARE: Final = 0.8
"""Share of a memory limit above which a pool leaves too little for everything else."""
SPARE_FILES: Final = 256
"""Descriptors for sockets, logs and libraries."""
_MADV_POPULATE_WRITE: Final = 23


def check_cgroup(host: Host, config: Config) -> Finding:
    """The tightest cgroup memory limit against the CPU pool."""
    found, capacity = host.cgroup_memory(), config.cpu.capacity
    if found is None:
        return Finding("cgroup memory", Level.OK, "no limit")
    limit, usage, name = found
    text = f"limit {format_bytes(limit)}, {format_bytes(usage)} in use ({name})"
    fix = f'raise the limit, or set cpu.capacity to at most "{int(limit * FULL_SHARE) >> 20}MiB"'
    if capacity > limit:
        meaning = f"cpu.capacity of {format_bytes(capacity)} can never fit: the kernel would kill the daemon"
        return Finding("cgroup memory", Level.ERROR, text, meaning, fix)
    if capacity > limit - usage:
        meaning = f"cpu.capacity of {format_bytes(capacity)} does not fit beside what is in use now (a running daemon counts too)"
        return Finding("cgroup memory", Level.WARN, text, meaning, fix)
    if capacity > limit * FULL_SHARE:
        meaning = f"cpu.capacity of {format_bytes(capacity)} is above {FULL_SHARE:.0%} of the limit"
        return Finding("cgroup memory", Level.WARN, text, meaning, fix)
    return Finding("cgroup memory", Level.OK, text)


def check_free_memory(host: Host, config: Config) -> Finding:
    """The host's memory against the CPU pool."""
    info, capacity = host.meminfo(), config.cpu.capacity
    if "MemTotal" not in info:
        return Finding("memory", Level.WARN, "/proc/meminfo cannot be read", "free memory is not known", "mount /proc")
    total, free = info["MemTotal"], info.get("MemAvailable", info.get("MemFree", 0))
    text = f"{format_bytes(free)} available of {format_bytes(total)}"
    fix = f'set cpu.capacity to at most "{int(free * FULL_SHARE) >> 20}MiB", or free memory'
    if capacity > total:
        return Finding("memory", Level.ERROR, text, f"cpu.capacity is {format_bytes(capacity)}, more than there is", fix)
    if capacity > free:
        meaning = (
            f"cpu.capacity is {format_bytes(capacity)}; filling it would make the host swap or kill (a running daemon counts too)"
        )
        return Finding("memory", Level.WARN, text, meaning, fix)
    return Finding("memory", Level.OK, text)


def check_memlock(config: Config, cuda: bool) -> Finding:
    """The limit of locked memory, which pinning for devices may count against."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "no limit" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    if soft == resource.RLIM_INFINITY or soft >= config.cpu.capacity:
        return Finding("memlock limit", Level.OK, text)
    if not cuda:
        return Finding("memlock limit", Level.OK, text, "below cpu.capacity; it only matters where a device pins memory")
    raisable = hard == resource.RLIM_INFINITY or hard >= config.cpu.capacity
    fix = "start engines and the daemon with 'ulimit -l unlimited'"
    if not raisable:
        fix = "set LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1 (docker) or memlock in /etc/security/limits.conf"
    return Finding("memlock limit", Level.WARN, text, "pinning the pool for RDMA, or for CUDA on some drivers, may fail", fix)


def check_shmem_pages(host: Host, config: Config) -> Finding:
    """Whether shared memory has huge pages: by the kernel's setting, or gathered by the daemon."""
    text = host.read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if text is None:
        return Finding("huge pages of shared memory", Level.OK, "not offered by this kernel", "the pool uses 4 KiB pages")
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "within_size", "advise", "force"):
        return Finding("huge pages of shared memory", Level.OK, mode)
    if config.cpu.prefault and config.cpu.huge_pages and can_gather():
        return Finding("huge pages of shared memory", Level.OK, f"{mode or text}; the daemon gathers its own")
    return Finding(
        "huge pages of shared memory",
        Level.WARN,
        mode or text,
        "the pool uses 4 KiB pages: copies are a tenth slower, reads from NVMe may be a third slower, and registering with a GPU "
        "takes longer",
        "set cpu.prefault and cpu.huge_pages with Linux 6.1 or newer, or as root: "
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def check_huge_pages(host: Host) -> Finding:
    """Memory set aside for hugetlbfs, which the daemon does not use."""
    info = host.meminfo()
    unused = info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0)
    if not unused:
        return Finding("reserved huge pages", Level.OK, "none unused")
    if unused * 10 < info.get("MemTotal", 0):
        return Finding("reserved huge pages", Level.OK, f"{format_bytes(unused)} unused")
    return Finding(
        "reserved huge pages",
        Level.WARN,
        f"{format_bytes(unused)} set aside and unused",
        "kvtierd does not use hugetlbfs, and nothing else can use this memory",
        "as root: sysctl vm.nr_hugepages=0, unless another program needs them",
    )


def check_populate() -> Finding:
    """Whether the kernel can fault memory in ahead (MADV_POPULATE_WRITE, Linux 5.14)."""
    release = os.uname().release
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            meaning = "the pool is faulted in by touching pages, which is slower"
            fix = "use Linux 5.14 or newer; gVisor and old kernels lack MADV_POPULATE_WRITE"
            return Finding("kernel", Level.WARN, f"{release}, no MADV_POPULATE_WRITE", meaning, fix)
    return Finding("kernel", Level.OK, f"{release}, with MADV_POPULATE_WRITE")


def wanted_files(config: Config) -> int:
    """Descriptors that the daemon may need at most: extents, segments, two sockets a session, and some."""
    extents = -(-config.cpu.capacity // config.cpu.extent_bytes)
    segments = -(-config.nvme.capacity // config.nvme.segment_bytes) if config.nvme.capacity else 0
    return extents + segments + 2 * config.server.max_sessions + SPARE_FILES


def check_files(config: Config) -> Finding:
    """The limit of open files against what the configuration may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted_files(config)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return Finding("open files", Level.OK, f"limit {soft if soft != resource.RLIM_INFINITY else 'none'}, up to {wanted} needed")
    meaning = f"with {config.server.max_sessions} sessions up to {wanted} descriptors are needed"
    raisable = hard == resource.RLIM_INFINITY or hard >= wanted
    fix = f"ulimit -n {wanted}" if raisable else f"set LimitNOFILE={wanted} (systemd), or lower server.max_sessions"
    return Finding("open files", Level.WARN, f"limit {soft}", meaning, fix)
