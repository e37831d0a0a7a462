"""One folder of the NVMe tier: is it fit for use, who holds it, which files in it are ours, and how is it doing.

Files: ``LOCK``, ``pool.json`` and ``realms.log`` (see ``pool_file``), ``budget.json`` (see ``budget_file``), ``journal-N.kvj``,
``snapshot-N.kvs`` and ``segment-E-B-C.kv`` (extent id, bytes of a slot, count of slots). ``*.tmp`` is unfinished and deleted at
the next start. Files of another format version, newer or older, are renamed to ``*.old-format-N`` and never touched again; a
version counts when the checksum over it fits, else the file is damaged (docs/upgrading.md). What only looks like one of these (see
:func:`_is_plausible`) is left alone and named in a warning.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvtierd.errors import StartupError
from kvtierd.model import FORMAT_VERSION, PAGE_BYTES, SLOT_INDEX_BITS
from kvtierd.tiers.json_file import read_json, seal
from kvtierd.tiers.record import FILE_HEADER_BYTES, LOG_VERSIONS, MAX_EXTENT_ID, file_version

log = logging.getLogger(__name__)

VOLATILE_FILE_SYSTEMS: Final = frozenset(["tmpfs", "ramfs", "rootfs", "overlay", "fuse.fuse-overlayfs", "aufs"])
ERRORS_IN_A_ROW: Final = 3
ERROR_WINDOW_S: Final = 60.0
"""Errors in a row within this time stop new segments, which are tried again this long after the last error."""

_EXHAUSTED: Final = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM])
_BROKEN: Final = frozenset([errno.EIO, errno.ENXIO, errno.ENODEV, errno.EROFS, errno.ESTALE, errno.EUCLEAN, errno.ENOTCONN])
MAX_SEQUENCE: Final = 1 << 40
"""Numbers of journals and snapshots beyond this are no daemon's."""
MAX_NAMED: Final = 5
"""Files that are not ours which the warning names."""
_UNNUMBERED: Final = frozenset(["pool.json", "realms.log", "budget.json"])
_SEGMENT_NAME: Final = re.compile(r"segment-([1-9]\d{0,9})-([1-9]\d{0,14})-([1-9]\d{0,9})\.kv", re.ASCII)
_LOG_NAME: Final = re.compile(r"(?:journal-([1-9]\d{0,12})\.kvj|snapshot-([1-9]\d{0,12})\.kvs)", re.ASCII)
_OUR_NAME: Final = re.compile(
    r"(segment-\d+-\d+-\d+\.kv|journal-\d+\.kvj|snapshot-\d+\.kvs|pool\.json|realms\.log|budget\.json)(\.tmp)?|probe\.tmp", re.ASCII
)


class FolderLostError(StartupError):
    """A folder cannot be used, and its device may be the cause: a tier that has others may go on with those."""


class FolderFailedError(Exception):
    """The device of a folder answered with an error."""

    def __init__(self, folder: Folder, error: OSError) -> None:
        super().__init__(str(error))
        self.folder = folder
        self.error = error


@contextmanager
def work_on(folder: Folder) -> Iterator[None]:
    """Errors of devices meanwhile are this folder's. Raises FolderFailedError."""
    try:
        yield
    except OSError as e:
        raise FolderFailedError(folder, e) from e


class Folder:
    """A locked folder. Made by :meth:`claim`; thread-safe."""

    def __init__(self, path: str, lock_fd: int, clock: Callable[[], float]) -> None:
        self.path = path
        self.direct = True
        self.used_bytes = 0
        """Bytes of segment files; the segment table keeps it."""
        self.device = os.stat(path).st_dev
        self.mount = mount_point_of(path)
        """Where its file system is mounted."""
        self._lock_fd = lock_fd
        self._clock = clock
        self._lock = threading.Lock()
        self._error_times_s: list[float] = []
        self._last_error = ""
        self._ignored: set[str] = set()
        self.error_count = 0
        """I/O errors since the start, reads and writes."""

    @classmethod
    def claim(cls, path: Path, *, allow_volatile: bool, clock: Callable[[], float]) -> Folder:
        """Make the folder where it is missing, check it and lock it.

        Raises:
            FolderLostError: it cannot be made or written.
            StartupError: it is on a volatile file system, or another process holds it.
        """
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as e:
            raise FolderLostError(
                f"nvme folder {path} cannot be made ({e.strerror}): make it, or name another in nvme.folders"
            ) from e
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            fix = "its file system is read-only: check its device, and remount it" if read_only else "chown or chmod it"
            raise FolderLostError(f"nvme folder {path} is not writable for user {os.geteuid()}: {fix}, or name another")
        kind = file_system_of(path)
        if kind in VOLATILE_FILE_SYSTEMS and not allow_volatile:
            raise StartupError(
                f"nvme folder {path} is on {kind}, which lives in memory or goes with the container: mount a volume there, "
                "name another folder in nvme.folders, or set nvme.allow_volatile = true"
            )
        try:
            fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise FolderLostError(f"nvme folder {path} is not writable ({e.strerror}): chown, chmod or remount it") from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise StartupError(
                f"nvme folder {path} is in use by process {holder}: stop that daemon, or give this one its own nvme.folders"
            ) from e
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return cls(str(path), fd, clock)
        except OSError as e:
            os.close(fd)
            raise FolderLostError(f"nvme folder {path} cannot be written ({e.strerror}): free space there, or name another") from e

    def release(self) -> None:
        """Give the lock back."""
        os.close(self._lock_fd)

    def file(self, name: str) -> str:
        """Path of a file in the folder."""
        return os.path.join(self.path, name)

    def our_files(self) -> list[os.DirEntry[str]]:
        """Files of the current format and unfinished ones, by name."""
        return [e for e in self._named_like_ours() if e.name not in self._ignored and _is_plausible(e)]

    def ignore(self, name: str, why: str) -> None:
        """Leave a file alone from now on, as if it were not there."""
        self._ignored.add(name)
        log.warning("%s is not used and left alone: %s; move it away or delete it", self.file(name), why)

    @property
    def highest_number(self) -> int:
        """The highest number that the name of any journal or snapshot has; 0 for none. No new file may get one that is taken."""
        matches = (_LOG_NAME.fullmatch(e.name) for e in self._named_like_ours())
        numbers = [int(m[1] or m[2]) for m in matches if m]
        return max((n for n in numbers if n <= MAX_SEQUENCE), default=0)

    def _named_like_ours(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.path) as entries:
            return sorted((e for e in entries if _OUR_NAME.fullmatch(e.name)), key=lambda e: e.name)

    def segments(self) -> list[tuple[int, int, int]]:
        """(extent id, bytes of a slot, count of slots) of each segment file."""
        matches = (_SEGMENT_NAME.fullmatch(e.name) for e in self.our_files())
        return [(int(m[1]), int(m[2]), int(m[3])) for m in matches if m]

    def file_bytes(self) -> int:
        """Bytes on disk of our files, as the file system counts them."""
        total = 0
        for entry in self.our_files():
            try:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
        return total

    def free_bytes(self) -> int:
        """Bytes that this user may still write to the file system."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def clean_up(self) -> None:
        """Delete unfinished files, move those of another format version aside, and say which are none of ours."""
        foreign = [e.name for e in self._named_like_ours() if not _is_plausible(e) and e.name not in _UNNUMBERED]
        if foreign:
            log.warning(
                "nvme folder %s has %d files that are named like the cache's but cannot be: %s; they are not used and take "
                "space, so move them away or delete them",
                self.path, len(foreign), ", ".join(foreign[:MAX_NAMED]) + (", ..." if len(foreign) > MAX_NAMED else ""),
            )  # fmt: skip
        for entry in self.our_files():
            if entry.name.endswith(".tmp"):
                os.unlink(entry.path)
        others = {e.name: v for e in self.our_files() if (v := _version_of(e.path)) not in (None, FORMAT_VERSION)}
        if others:
            moved = self._move_aside("old-format", others)
            log.warning(
                "nvme folder %s holds format version %s, this program uses %s: %d files (%d bytes) were renamed to *.old-format-N "
                "and are not used; delete them to get the space back",
                self.path,
                ", ".join(map(str, sorted(set(others.values())))),
                FORMAT_VERSION,
                *moved,
            )

    def _move_aside(self, why: str, last: Collection[str]) -> tuple[int, int]:
        """Rename all files; those by which a next start sees that it must go on with this go last."""
        number = 1
        taken = set(os.listdir(self.path))
        while any(name.endswith(f".{why}-{number}") for name in taken):
            number += 1
        count = size_bytes = 0
        for entry in sorted(self.our_files(), key=lambda e: e.name in last):
            size_bytes += entry.stat().st_blocks * 512
            os.rename(entry.path, f"{entry.path}.{why}-{number}")
            count += 1
        return count, size_bytes

    def set_aside(self, name: str, problem: str, suffix: str = "damaged") -> None:
        """Rename a file that cannot be used, so that nothing reads it again and nothing writes over it."""
        number = 1
        while os.path.exists(self.file(f"{name}.{suffix}-{number}")):
            number += 1
        os.rename(self.file(name), self.file(f"{name}.{suffix}-{number}"))
        log.error("%s %s; renamed to %s.%s-%d and not used", self.file(name), problem, name, suffix, number)

    def replace(self, name: str, data: bytes) -> None:
        """Put a small file in the place of the one of this name, atomically and durably. Raises OSError."""
        path = self.file(name)
        with open(path + ".tmp", "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.rename(path + ".tmp", path)
        self.sync()

    def sync(self) -> None:
        """Make renames in the folder durable."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def empty(self) -> int:
        """Delete the blocks and what tells of them. Whose the folder is stays. Returns the bytes freed. Raises OSError."""
        size_bytes = 0
        for entry in self.our_files():
            if entry.name not in _UNNUMBERED:
                size_bytes += entry.stat().st_blocks * 512
                os.unlink(entry.path)
        return size_bytes

    def probe_direct(self) -> str:
        """Try O_DIRECT with one page; "" when it works, else why not. Raises OSError when the device is broken."""
        path = self.file("probe.tmp")
        page = mmap.mmap(-1, PAGE_BYTES)
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
            page[:4] = b"page"
            if os.pwrite(fd, page, 0) != PAGE_BYTES or os.preadv(fd, [page], 0) != PAGE_BYTES or page[:4] != b"page":
                return "a page written was not read back"
            return ""
        except OSError as e:
            if e.errno in _BROKEN:
                raise
            return e.strerror or str(e)
        finally:
            if fd >= 0:
                os.close(fd)
            page.close()
            if os.path.isfile(path):
                os.unlink(path)

    def note_read_error(self, error: OSError) -> None:
        """Count a failed read."""
        with self._lock:
            self.error_count += 1
        log.error("reading from nvme folder %s: %s", self.path, error)

    def note_write_error(self, error: OSError) -> None:
        """Count a failed write; too many in a row stop new segments, and are told once."""
        told = self.failing
        with self._lock:
            self.error_count += 1
            self._last_error = error.strerror or str(error)
            self._error_times_s = [*self._error_times_s, self._clock()][-ERRORS_IN_A_ROW:]
        log.log(logging.DEBUG if told else logging.ERROR, "writing to nvme folder %s: %s", self.path, error)
        if self.failing and not told:
            log.error("nvme folder %s %s", self.path, self.health)

    def note_written(self) -> None:
        """A write went well: errors before it are no longer in a row."""
        if self._error_times_s:
            with self._lock:
                self._error_times_s.clear()

    @property
    def failing(self) -> bool:
        """True while the folder gets no new segments."""
        with self._lock:
            times = self._error_times_s
            if len(times) < ERRORS_IN_A_ROW or times[-1] - times[0] > ERROR_WINDOW_S:
                return False
            return self._clock() - times[-1] < ERROR_WINDOW_S

    @property
    def health(self) -> str:
        """ "ok" or what is wrong."""
        if not self.failing:
            return "ok"
        return f"failing: {ERRORS_IN_A_ROW} write errors in a row, the last: {self._last_error}; gets no new segments for now"


def segment_name(extent_id: int, slot_bytes: int, slot_count: int) -> str:
    """File name of a segment."""
    return f"segment-{extent_id}-{slot_bytes}-{slot_count}.kv"


def file_system_of(path: Path) -> str:
    """Type of the file system that holds a path, as the kernel names it; "" when that is not known."""
    return _mount_of(path)[1]


def mount_point_of(path: str | Path) -> str:
    """Where the file system that holds a path is mounted, also for a path that does not exist; "" when that is not known."""
    return _mount_of(path)[0]


def check_mounted(path: Path, mount: str) -> None:
    """Look whether the file system that held a folder is there.

    Args:
        path: the folder, which is empty or missing now.
        mount: where its file system was mounted; "" when that is not known.

    Raises:
        FolderLostError: what is at the path now is the file system below.
    """
    now = mount_point_of(path)
    if mount and now and now != mount and mount.startswith(now.rstrip("/") + "/"):
        raise FolderLostError(
            f"nvme folder {path} is not there, as nothing is mounted at {mount}: mount its device, or take the folder out of "
            f"nvme.folders for one start, to use the file system at {now} for it afterwards"
        )


def _mount_of(path: str | Path) -> tuple[str, str]:
    """Mount point and type of the file system that holds a path; two "" when they are not known."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "", ""
    real = os.path.realpath(path)
    best = ("", "")
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), left.split(" ")[4])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        # Of several mounts on one point the last is on top.
        if inside and len(mount) >= len(best[0]):
            best = (mount, right.split(" ")[0])
    return best


def _is_plausible(entry: os.DirEntry[str]) -> bool:
    """True for what only this cache makes: a plain file, with numbers that it uses; a segment not longer than its name says."""
    try:
        if not entry.is_file(follow_symlinks=False):
            return False
        segment, numbered = _SEGMENT_NAME.fullmatch(entry.name), _LOG_NAME.fullmatch(entry.name)
        if segment is not None:
            extent_id, slot_bytes, slot_count = map(int, segment.groups())
            fits = 0 < extent_id <= MAX_EXTENT_ID and slot_bytes >= 2 * PAGE_BYTES and slot_bytes % PAGE_BYTES == 0
            return fits and 0 < slot_count < 1 << SLOT_INDEX_BITS and entry.stat().st_size <= slot_bytes * slot_count
        if numbered is not None:
            return int(numbered[1] or numbered[2]) <= MAX_SEQUENCE
    except FileNotFoundError:
        return False
    return entry.name.endswith(".tmp") or entry.name in _UNNUMBERED


def is_exhausted(error: OSError) -> bool:
    """True when an error means that there is no room, or nothing to work with for a moment; not that the device is broken."""
    return error.errno in _EXHAUSTED


def _version_of(path: str) -> int | None:
    """Format version that a file declares, this program's for any that it can use; None when there is none that can be read."""
    if path.endswith((".kvj", ".kvs")):
        with open(path, "rb") as f:
            version = file_version(f.read(FILE_HEADER_BYTES))
            return FORMAT_VERSION if version in LOG_VERSIONS else version
    if path.endswith("pool.json"):
        try:
            content = read_json(path)
            version = content["format_version"]
            return version if isinstance(version, int) and content["seal"] == seal(content) else None
        except (ValueError, KeyError):
            return None
    return None
