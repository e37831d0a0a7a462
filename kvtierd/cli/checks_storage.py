"""Checks of NVMe folders and sockets for ``kvtierd doctor``. What they write, they remove again."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtierd.cli.findings import Finding, Host, Level
from kvtierd.cli.output import format_bytes
from kvtierd.config import Config
from kvtierd.errors import StartupError
from kvtierd.lifetime import scratch_folder
from kvtierd.tiers.encryption import read_key

__all__ = [
    "Speed",
    "check_encryption",
    "check_folder",
    "check_metrics_address",
    "check_socket",
    "check_space",
    "existing",
    "measure",
]

PROBE_BYTES: Final = 64 << 20
"""Most bytes that the speed test writes, and reads again."""
PROBE_TIME_S: Final = 4.0
"""Longest time for writing, and for reading; a slow disk is measured over less."""
IO_BYTES: Final = 4 << 20
SLOW_BYTES_PER_S: Final = 200e6
MAX_SOCKET_PATH: Final = 107
"""Bytes of a unix socket's path that Linux takes."""
_VOLATILE: Final = frozenset(["tmpfs", "ramfs", "overlay", "devtmpfs"])
_REMOTE: Final = frozenset(["nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "glusterfs"])


@dataclass(frozen=True)
class Speed:
    """Result of the speed test: bytes each way, bytes per second, and whether O_DIRECT worked."""

    size_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    direct: bool


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.expanduser().absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_folder(host: Host, config: Config, folder: Path) -> Iterator[Finding]:
    """One NVMe folder: writable, file system, O_DIRECT, speed."""
    name, base = f"folder {folder}", existing(folder)
    if not base.is_dir():
        yield Finding(name, Level.ERROR, f"{base} is not a folder", _without(config), "name a folder in nvme.folders")
        return
    if not os.access(base, os.W_OK | os.X_OK):
        fix = f"sudo install -d -o $(id -un) {folder}, or name another in nvme.folders"
        yield Finding(name, Level.ERROR, f"{base} is not writable", _without(config), fix)
        return
    yield _file_system(host, config, name, base)
    try:
        speed = measure(base, PROBE_BYTES)
    except OSError as e:
        why = e.strerror or str(e)
        yield Finding(name, Level.ERROR, f"test file: {why}", "the NVMe tier cannot write here", "see the kernel's log; free space")
        return
    yield from _speed_findings(config, name, speed)


def check_encryption(config: Config) -> Iterator[Finding]:
    """The key of blocks at rest, where there is one in a file; a command is not run here."""
    name, nvme = "NVMe encryption", config.nvme
    if nvme.encryption_key_command:
        yield Finding(name, Level.OK, "the key comes from nvme.encryption_key_command, which was not tried")
    if nvme.encryption_key_file is None:
        return
    try:
        read_key(nvme)
    except StartupError as e:
        yield Finding(name, Level.ERROR, str(e), "the daemon cannot start", "mend the file, or name another in the configuration")
    else:
        yield Finding(name, Level.OK, f"a key is in {nvme.encryption_key_file}")


def _without(config: Config) -> str:
    if len(config.nvme.folders) == 1:
        return "the NVMe tier cannot start"
    return "the NVMe tier starts without it if it was in use before, and else not at all"


def _file_system(host: Host, config: Config, name: str, base: Path) -> Finding:
    mount = host.mount(base)
    if mount is None:
        return Finding(name, Level.OK, "file system not known")
    text = f"{mount.kind} at {mount.point}"
    if mount.kind in _VOLATILE:
        level = Level.WARN if config.nvme.allow_volatile else Level.ERROR
        meaning = "this is memory or a container's own layer, not a disk: blocks are lost with it"
        return Finding(name, level, text, meaning, "name a folder on a disk in nvme.folders, or set nvme.allow_volatile = true")
    if mount.kind in _REMOTE or mount.kind.startswith("fuse"):
        return Finding(
            name, Level.WARN, text, "a network or user-space file system: slow, and errors come late", "use a local disk"
        )
    return Finding(name, Level.OK, text)


def _speed_findings(config: Config, name: str, speed: Speed) -> Iterator[Finding]:
    if speed.direct:
        yield Finding(name, Level.OK, "O_DIRECT works")
    else:
        level = Level.ERROR if config.nvme.direct == "require" else Level.OK if config.nvme.direct == "off" else Level.WARN
        meaning = "reads and writes go through the page cache: slower, and they take memory"
        yield Finding(name, level, "no O_DIRECT", meaning, 'use ext4 or xfs on a local disk, or set nvme.direct = "off"')
    text = (
        f"{speed.write_bytes_per_s / 1e6:,.0f} MB/s written, {speed.read_bytes_per_s / 1e6:,.0f} MB/s read "
        f"({format_bytes(speed.size_bytes)}, one I/O at a time)"
    )
    if min(speed.write_bytes_per_s, speed.read_bytes_per_s) < SLOW_BYTES_PER_S:
        meaning = "loading a block from here may take longer than computing it again"
        yield Finding(name, Level.WARN, text, meaning, "use an NVMe disk")
    else:
        yield Finding(name, Level.OK, text)


def measure(folder: Path, size_bytes: int) -> Speed:
    """Write and read a test file in a temporary folder below ``folder``.

    Takes at most a quarter of the free space, and a few seconds.

    Raises:
        OSError: when it cannot be written or read.
    """
    fs = os.statvfs(folder)
    total = min(size_bytes, fs.f_bavail * fs.f_frsize // 4) // IO_BYTES * IO_BYTES
    if total <= 0:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        scratch_folder(folder, ".kvtierd-doctor-") as scratch,
        mmap.mmap(-1, IO_BYTES) as buffer,
    ):
        buffer.write(os.urandom(IO_BYTES))  # a disk or file system that compresses must not look fast
        path = scratch / "probe"
        with _open(path, os.O_RDWR | os.O_CREAT) as (fd, direct):
            done, write_s = _timed_io(fd, buffer, total, write=True)
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read, read_s = _timed_io(fd, buffer, done, write=False)
    return Speed(done, done / write_s, read / read_s, direct)


@contextmanager
def _open(path: Path, flags: int) -> Iterator[tuple[int, bool]]:
    """Open with O_DIRECT where it works, else without."""
    direct = True
    try:
        fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        fd, direct = os.open(path, flags | os.O_CLOEXEC, 0o600), False
    try:
        yield fd, direct
    finally:
        os.close(fd)


def _timed_io(fd: int, buffer: mmap.mmap, total: int, *, write: bool) -> tuple[int, float]:
    start_s, done = time.perf_counter(), 0
    while done < total and time.perf_counter() - start_s < PROBE_TIME_S:
        n = os.pwrite(fd, buffer, done) if write else os.preadv(fd, [buffer], done)
        if n != IO_BYTES:
            raise OSError(errno.EIO, f"{'wrote' if write else 'read'} {n} of {IO_BYTES} bytes")
        done += n
    if write:
        os.fdatasync(fd)
    return done, max(time.perf_counter() - start_s, 1e-9)


def check_space(config: Config) -> Finding:
    """Free space of all folders together, with what kvtierd has there already, against the capacity."""
    capacity, room = config.nvme.capacity, 0
    devices: dict[int, int] = {}
    for folder in config.nvme.folders:
        base = existing(folder)
        try:
            fs, device = os.statvfs(base), base.stat().st_dev
        except OSError as e:
            return Finding("NVMe space", Level.ERROR, f"{base}: {e.strerror}", "space is not known", "check nvme.folders")
        devices[device] = max(0, fs.f_bavail * fs.f_frsize - config.nvme.reserve)
        room += _own_bytes(folder)
    room += sum(devices.values())
    text = f"room for {format_bytes(room)} on {len(devices)} file system(s), {format_bytes(config.nvme.reserve)} each kept free"
    if capacity <= room:
        return Finding("NVMe space", Level.OK, text)
    meaning = f"nvme.capacity of {format_bytes(capacity)} does not fit; the daemon refuses to start"
    return Finding("NVMe space", Level.ERROR, text, meaning, f'set nvme.capacity to at most "{room >> 20}MiB", or free space')


def _own_bytes(folder: Path) -> int:
    try:
        with os.scandir(folder.expanduser()) as entries:
            return sum(e.stat(follow_symlinks=False).st_blocks * 512 for e in entries if e.is_file(follow_symlinks=False))
    except OSError:
        return 0


def check_socket(path: Path, name: str) -> Finding:
    """A unix socket's path: length, folder, and who listens there."""
    path = path.expanduser().absolute()
    fix = f"set server.{'socket' if name == 'socket' else 'descriptor_socket'} to another path"
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        meaning = f"Linux takes at most {MAX_SOCKET_PATH} bytes; the daemon cannot start"
        return Finding(name, Level.ERROR, f"{path} has {length} bytes", meaning, fix.replace("another", "a shorter"))
    base = existing(path.parent)
    if not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        return Finding(name, Level.ERROR, f"{base} is not a writable folder", "the daemon cannot make its socket", fix)
    if path.parent == base and base.stat().st_mode & stat.S_IWOTH and not base.stat().st_mode & stat.S_ISVTX:
        meaning = "anybody may replace the socket by their own"
        return Finding(name, Level.ERROR, f"{base} is writable by everybody", meaning, f"chmod o-w {base}")
    if not os.path.lexists(path):
        return Finding(name, Level.OK, f"{path} is free")
    if not path.is_socket():
        return Finding(name, Level.ERROR, f"{path} is not a socket", "the daemon will not overwrite it", f"move it away, or {fix}")
    return _listener(path, name)


def _listener(path: Path, name: str) -> Finding:
    # A stream and a packet socket refuse each other with EPROTOTYPE, which means that somebody listens.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(os.fspath(path))
    if code in (0, errno.EAGAIN, errno.EPROTOTYPE):
        return Finding(name, Level.OK, f"a process listens on {path}")
    if code == errno.ECONNREFUSED:
        return Finding(name, Level.OK, f"{path} is left over from a daemon that has gone", "the next start replaces it")
    meaning = "the socket is another user's"
    return Finding(name, Level.WARN, f"{path}: {os.strerror(code)}", meaning, "run as the daemon's user, or see server.allow_users")


def check_metrics_address(config: Config) -> Finding:
    """The address of the metrics."""
    from kvtierd.errors import ConfigError
    from kvtierd.service.http import parse_listen

    if not config.server.metrics:
        return Finding("metrics address", Level.OK, "switched off")
    try:
        host, port = parse_listen(config.server.metrics)
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (ConfigError, OSError) as e:
        return Finding("metrics address", Level.ERROR, str(e), "the daemon cannot start", "correct server.metrics")
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as e:
            meaning = "the daemon cannot start beside whatever listens there (a running kvtierd perhaps)"
            fix = "set server.metrics to a free port, if it is not kvtierd's own"
            return Finding("metrics address", Level.WARN, f"{config.server.metrics}: {e.strerror}", meaning, fix)
    return Finding("metrics address", Level.OK, f"{config.server.metrics} is free")
