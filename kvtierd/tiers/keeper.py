"""Where CPU memory waits while one daemon ends and the next one starts: with systemd, or in a folder on tmpfs.

What is kept is taken over once: :meth:`Keeper.take` leaves no index, so a daemon that crashes later keeps nothing. In a folder new
extents have no name and go with the last process that has them open; those that were taken over keep the name that they had to be
given, so after a crash they hold their memory until the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from kvtierd.errors import StartupError
from kvtierd.memory import create_memfd, create_memory_file, is_sealed
from kvtierd.plain_file import read_plain
from kvtierd.tiers.folder import file_system_of

log = logging.getLogger(__name__)

FIRST_PASSED_FD: Final = 3
INDEX: Final = "kvtierd-index"
_EXTENT: Final = re.compile(r"kvtierd-extent-([1-9]\d{0,9})", re.ASCII)


class Keeper(Protocol):
    """Keeps an index and memory by extent id."""

    @property
    def make(self) -> Callable[[int], int] | None:
        """Makes memory of so many bytes, all zeros, that can be kept; None where sealed memfds can."""

    def held_bytes(self) -> int:
        """Bytes of memory that wait to be taken over."""

    def take(self) -> tuple[bytes, dict[int, int]]:
        """What the last daemon left, once: its index (empty for none) and descriptors, the caller's from here on."""

    def put(self, index: bytes, memory: Mapping[int, int]) -> None:
        """Leave an index and memory for the next daemon; all or nothing. Raises OSError."""

    def close(self) -> None:
        """Let go of the place."""


class SystemdKeeper:
    """The file descriptor store of systemd (``FileDescriptorStoreMax=``), by the notification socket.

    Raises:
        StartupError: the daemon was not started by systemd, or may not speak to it.
    """

    make: Callable[[int], int] | None = None

    def __init__(self) -> None:
        self._path = os.environ.get("NOTIFY_SOCKET", "")
        if not self._path:
            raise StartupError(
                'cpu.keep = "systemd" needs a unit with NotifyAccess=main and FileDescriptorStoreMax=; start the daemon by '
                "systemd, or name a folder on tmpfs in cpu.keep"
            )

    def held_bytes(self) -> int:
        """Bytes of what systemd passed."""
        return sum(os.fstat(fd).st_blocks * 512 for fd, _ in self._passed())

    def _passed(self) -> list[tuple[int, str]]:
        if os.environ.get("LISTEN_PID") != str(os.getpid()):
            return []
        names = os.environ.get("LISTEN_FDNAMES", "").split(":")
        count = os.environ.get("LISTEN_FDS", "")
        return list(zip(itertools.count(FIRST_PASSED_FD), names[: int(count) if count.isdecimal() else 0]))

    def take(self) -> tuple[bytes, dict[int, int]]:
        """What systemd passed at the start. It forgets what it passed."""
        index, memory = b"", {}
        for fd, name in self._passed():
            os.set_inheritable(fd, False)
            match = _EXTENT.fullmatch(name)
            if match and is_sealed(fd):
                memory[int(match[1])] = fd
            elif name == INDEX:
                index = os.pread(fd, os.fstat(fd).st_size, 0)
                os.close(fd)
            elif match:
                log.error("memory that systemd kept can be shortened by others and is not used")
                os.close(fd)
            else:
                continue  # somebody else's
            try:
                self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")
            except OSError as e:
                # It would be passed again to a later daemon, whatever became of its blocks.
                log.error(
                    "systemd cannot be told that %s was taken (%s): nothing that was kept is used; see $NOTIFY_SOCKET", name, e
                )
                index = b""
                break
        os.environ.pop("LISTEN_PID", None)
        return index, memory

    def put(self, index: bytes, memory: Mapping[int, int]) -> None:
        """Send everything to systemd."""
        fd = create_memfd(INDEX, len(index))
        try:
            os.pwrite(fd, index, 0)
            for extent_id, extent in memory.items():
                self._tell(f"FDSTORE=1\nFDNAME=kvtierd-extent-{extent_id}", extent)
            # The index comes last: without it the rest is not used.
            self._tell(f"FDSTORE=1\nFDNAME={INDEX}", fd)
        finally:
            os.close(fd)

    def _tell(self, text: str, *fds: int) -> None:
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as server:
            server.connect(address)
            socket.send_fds(server, [text.encode()], fds)

    def close(self) -> None:
        """There is nothing to let go of."""


class FolderKeeper:
    """A folder on tmpfs, locked.

    Args:
        path: the folder; made if missing.
        capacity_bytes: what the file system must have room for.

    Raises:
        StartupError: it cannot be used, is not in memory, is too small, or another daemon holds it.
    """

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self._path = str(path)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            owner = os.stat(path).st_uid
            if owner not in (0, os.geteuid()):  # anybody can make folders in /dev/shm
                raise StartupError(
                    f"cpu.keep folder {path} belongs to user {owner}, who can change what is kept there: chown it to root or user "
                    f"{os.geteuid()}, or name another"
                )
            self._lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise StartupError(f"cpu.keep folder {path} cannot be used ({e.strerror}): chown it, or name another") from e
        try:
            kind = file_system_of(path)
            if kind not in ("tmpfs", "ramfs"):
                raise StartupError(f"cpu.keep folder {path} is on {kind or 'an unknown file system'}: name one on tmpfs")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise StartupError(f"cpu.keep folder {path} is in use by another daemon: give each its own") from e
            stat = os.statvfs(path)
            # A tmpfs without a limit says that it has no blocks at all. What was kept counts as room: it becomes the pool.
            room = stat.f_bavail * stat.f_frsize + self.held_bytes()
            if stat.f_blocks and room < capacity_bytes:
                raise StartupError(
                    f"cpu.keep folder {path} has room for {room} bytes, but cpu.capacity is {capacity_bytes}: mount it with a "
                    "larger size, or lower cpu.capacity"
                )
        except (StartupError, OSError):
            os.close(self._lock)
            raise

    def make(self, size_bytes: int) -> int:
        """A file without a name."""
        return create_memory_file(self._path, size_bytes)

    def held_bytes(self) -> int:
        """Bytes of the files."""
        with os.scandir(self._path) as entries:
            return sum(e.stat(follow_symlinks=False).st_blocks * 512 for e in entries)

    def take(self) -> tuple[bytes, dict[int, int]]:
        """Open what is there, if it has an index."""
        path = os.path.join(self._path, INDEX)
        index, memory = b"", {}
        try:
            found = read_plain(path)
            os.unlink(path)  # one that stays is not used: it would be a later daemon's, too
            index = found
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as e:
            log.error("%s cannot be used (%s): what was kept of CPU memory is given back; move that file away", path, e)
        for name, extent_id in self._names():
            try:
                if index:
                    memory[extent_id] = os.open(os.path.join(self._path, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                else:
                    os.unlink(os.path.join(self._path, name))
            except OSError as e:
                log.error("%s in %s cannot be taken over: %s", name, self._path, e)
        return index, memory

    def _names(self) -> list[tuple[str, int]]:
        return [(name, int(match[1])) for name in os.listdir(self._path) if (match := _EXTENT.fullmatch(name))]

    def put(self, index: bytes, memory: Mapping[int, int]) -> None:
        """See that each file has a name and no other has, and write the index last."""
        names = {extent_id: os.path.join(self._path, f"kvtierd-extent-{extent_id}") for extent_id in memory}
        unfinished = os.path.join(self._path, INDEX + ".tmp")
        try:
            for name, extent_id in self._names():
                if extent_id not in memory:
                    os.unlink(os.path.join(self._path, name))
            for extent_id, fd in memory.items():
                # What was taken over has its name, and one without can be given one by its descriptor. Only linkat follows the
                # link that a descriptor's name is, and only a call that names a folder becomes linkat.
                if os.fstat(fd).st_nlink == 0:
                    os.link(f"/proc/self/fd/{fd}", names[extent_id], src_dir_fd=self._lock)
            with open(unfinished, "wb") as f:
                f.write(index)
            os.rename(unfinished, os.path.join(self._path, INDEX))
        except OSError:
            for path in (unfinished, *names.values()):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            raise

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock)


def open_keeper(where: str, capacity_bytes: int) -> Keeper | None:
    """What ``cpu.keep`` asks for: "" for none, "systemd", or a folder. Raises StartupError."""
    if not where:
        return None
    return SystemdKeeper() if where == "systemd" else FolderKeeper(Path(where), capacity_bytes)
