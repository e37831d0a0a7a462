"""What the daemon's modules know as ``os``, ``open``, ``fcntl`` and ``aiofiles``, over simulated files.

This is the narrowest place that all of the store's input and output passes: above it everything is the daemon's own code. A call
that is not simulated raises AttributeError, so that nothing reaches the real file system unseen.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from typing_extensions import Buffer

from kvtierd.model import PAGE_BYTES
from kvtierd.testing.simulation.disk import HIDDEN, TOLD, Fault
from kvtierd.testing.simulation.fileobject import SimFile
from kvtierd.testing.simulation.files import Files, Inode
from kvtierd.testing.simulation.threads import Crashed, World

FIRST_DESCRIPTOR: Final = 1 << 20
"""Simulated descriptors are none of the real ones."""
ASTRAY: Final = (1, 2, 3, 4, 6, 8)
"""Pages by which a transfer misses its place; often it is another slot."""


class _Descriptor:
    __slots__ = ("folder", "inode", "path")

    def __init__(self, path: str, inode: Inode | None, folder: str) -> None:
        self.path = path
        self.inode = inode
        self.folder = folder


class _Entry:
    """As ``os.DirEntry``."""

    def __init__(self, system: SimOs, path: str) -> None:
        self.path = path
        self.name = os.path.basename(path)
        self._system = system

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002 - as the original has it
        """There is nothing else."""
        return True

    def stat(self, *, follow_symlinks: bool = True) -> Any:  # noqa: ARG002 - as the original has it
        """Size and room."""
        return self._system.stat(self.path)


class _Path:
    """As ``os.path``, as far as the store uses it."""

    join = staticmethod(os.path.join)
    basename = staticmethod(os.path.basename)

    def __init__(self, files: Files) -> None:
        self._files = files

    def exists(self, path: str) -> bool:
        """True for a file that is there."""
        return path in self._files.names

    lexists = exists
    isfile = exists

    @staticmethod
    def realpath(path: object) -> str:
        """There are no links."""
        return os.fspath(path)  # type: ignore[call-overload,no-any-return]


class _Statvfs:
    def __init__(self, free_bytes: int) -> None:
        self.f_bavail = free_bytes // PAGE_BYTES
        self.f_frsize = PAGE_BYTES


class SimOs:
    """As the module ``os``, for one run.

    Args:
        world: time, randomness, and whether the process is alive.
        files: what there is.
    """

    O_RDWR, O_RDONLY, O_CREAT, O_EXCL = os.O_RDWR, os.O_RDONLY, os.O_CREAT, os.O_EXCL
    O_CLOEXEC, O_DIRECT, O_DIRECTORY = os.O_CLOEXEC, os.O_DIRECT, os.O_DIRECTORY
    R_OK, W_OK, X_OK = os.R_OK, os.W_OK, os.X_OK
    fspath = staticmethod(os.fspath)

    def __init__(self, world: World, files: Files) -> None:
        self._world = world
        self._files = files
        self.path = _Path(files)
        self._open: dict[int, _Descriptor] = {}
        self._next = FIRST_DESCRIPTOR
        self.locks: set[str] = set()
        self.lied = False
        """The disk has done something wrong that it did not tell."""
        self.lied_in_log = False
        """The same, to a journal or another file that says what is stored."""
        self.key: bytes | None = None
        """That blocks are encrypted with."""
        self.failed = 0
        """Operations that failed, as the device told."""

    def process_gone(self) -> None:
        """The kernel closes what a killed process had open."""
        self._open.clear()
        self.locks.clear()
        self._files.close_all()

    # ---- the way of every call

    def _call(self, what: str, path: str, among: tuple[Fault, ...] = (Fault.EIO,)) -> Fault | None:
        """Take the time of a call, and say what goes wrong with it. Raises what the device tells at once."""
        world = self._world
        if not world.alive:
            raise Crashed
        folder = path if path in self._files.disks else os.path.dirname(path)
        disk = self._files.disks.get(folder)
        if disk is None:
            raise FileNotFoundError(errno.ENOENT, "not on a simulated disk", path)
        disk.wait()
        fault = disk.draw(among)
        if fault is None and "journal-" in path:
            fault = disk.draw(among)  # there are few of these writes, and much depends on them
        if fault is not None:
            world.note(f"disk: {what} {os.path.basename(path)}: {fault.value}")
        if fault in (Fault.EIO, Fault.ENOSPC):
            self.failed += 1
            number = errno.EIO if fault is Fault.EIO else errno.ENOSPC
            raise OSError(number, f"simulated {fault.value} in {what}", path)
        return fault

    def _lie(self, path: str) -> None:
        self.lied = True
        self.lied_in_log |= "segment-" not in path

    # ---- names

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:  # noqa: ARG002 - as the original has it
        """As ``os.open``."""
        path = os.fspath(path)
        self._call("open", path)
        files = self._files
        inode = None
        if not flags & os.O_DIRECTORY:
            if path in files.names:
                if flags & os.O_EXCL:
                    raise FileExistsError(errno.EEXIST, "exists", path)
                inode = files.names[path]
            elif flags & os.O_CREAT:
                inode = files.create(path)
            else:
                inode = files.get(path)
            inode.opened += 1
        self._next += 1
        self._open[self._next] = _Descriptor(path, inode, path if inode is None else files.folder_of(path))
        return self._next

    def close(self, fd: int) -> None:
        """As ``os.close``."""
        if not self._world.alive:
            raise Crashed
        descriptor = self._descriptor(fd)
        del self._open[fd]
        self.locks.discard(descriptor.path)
        if descriptor.inode is not None:
            descriptor.inode.opened -= 1
            self._files.recount()

    def _descriptor(self, fd: int) -> _Descriptor:
        found = self._open.get(fd)
        # A closed descriptor may be somebody else's by now: using one is a bug, not an answer of the device.
        assert found is not None, f"descriptor {fd} is used after it was closed"
        return found

    def _inode(self, fd: int) -> tuple[Inode, str]:
        descriptor = self._descriptor(fd)
        assert descriptor.inode is not None
        return descriptor.inode, descriptor.path

    def rename(self, source: str, target: str) -> None:
        """As ``os.rename``."""
        self._call("rename", target)
        self._files.rename(source, target)

    def unlink(self, path: str) -> None:
        """As ``os.unlink``."""
        self._call("unlink", path)
        self._files.unlink(path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:  # noqa: ARG002 - as the original has it
        """As ``os.makedirs``."""
        self._call("makedirs", os.fspath(path))
        self._files.folders.add(os.fspath(path))

    def access(self, path: Any, mode: int) -> bool:  # noqa: ARG002 - as the original has it
        """As ``os.access``."""
        return os.fspath(path) in self._files.folders

    @contextmanager
    def scandir(self, path: str) -> Iterator[list[_Entry]]:
        """As ``os.scandir``."""
        self._call("scandir", path)
        yield [_Entry(self, name) for name in self._files.inside(path)]

    def listdir(self, path: str) -> list[str]:
        """As ``os.listdir``."""
        self._call("listdir", path)
        return [os.path.basename(name) for name in self._files.inside(path)]

    def stat(self, path: str) -> Any:
        """As ``os.stat``, as far as the store asks."""
        if path in self._files.folders:
            number = list(self._files.disks).index(path) + 1
            return os.stat_result((0o40700, 0, number, 1, 0, 0, 0, 0, 0, 0))
        return _Stat(self._files.get(path))

    def statvfs(self, path: str) -> _Statvfs:
        """As ``os.statvfs``."""
        self._call("statvfs", path)
        return _Statvfs(self._files.disks[path].free_bytes)

    # ---- bytes

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As ``os.pwritev``."""
        inode, path = self._inode(fd)
        data = b"".join(bytes(b) for b in buffers)
        fault = self._call("write", path, (*TOLD, *HIDDEN))
        self._descriptor(fd)
        size = len(data)
        draw = self._world.random
        if fault is Fault.SHORT:
            data = data[: self._part(size)]
            size = len(data)
        elif fault is not None:
            self._lie(path)
            if fault is Fault.LOST:
                return size
            if fault is Fault.TORN:
                data = data[: self._part(size)]
            elif fault is Fault.MISDIRECTED:
                offset += draw.choice(ASTRAY) * PAGE_BYTES
                data = data[: max(len(inode.data) - offset, 0)]
            elif fault is Fault.BIT_ROT:
                data = _flipped(data, draw.randrange(max(size, 1) * 8))
        if len(data) > PAGE_BYTES and draw.random() < 0.2:
            # The process may be killed in between, and others may read what is there so far.
            cut = draw.randrange(1, -(-len(data) // PAGE_BYTES)) * PAGE_BYTES
            inode.write(data[:cut], offset)
            self._files.disks[os.path.dirname(path)].wait()
            self._descriptor(fd)
            inode.write(data[cut:], offset + cut)
        elif data:
            inode.write(data, offset)
        inode.modified_s = self._world.now
        return size

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As ``os.preadv``."""
        inode, path = self._inode(fd)
        fault = self._call("read", path, (Fault.EIO, Fault.SHORT, Fault.MISDIRECTED, Fault.BIT_ROT))
        self._descriptor(fd)
        views = [memoryview(b).cast("B") for b in buffers]
        size = sum(v.nbytes for v in views)
        if fault is Fault.SHORT:
            size = self._part(size)
        elif fault is not None:
            self._lie(path)
            offset += self._world.random.choice(ASTRAY) * PAGE_BYTES if fault is Fault.MISDIRECTED else 0
        data = bytes(inode.data[offset : offset + size])
        if fault is Fault.BIT_ROT and data:
            data = _flipped(data, self._world.random.randrange(len(data) * 8))
        at = 0
        for view in views:
            part = data[at : at + view.nbytes]
            view[: len(part)] = part
            at += len(part)
        return len(data)

    def _part(self, size_bytes: int) -> int:
        """Some whole pages but not all; one page stays one; of less, half, but something: nothing would be the end of the file."""
        pages = size_bytes // PAGE_BYTES
        return self._world.random.randrange(1, pages) * PAGE_BYTES if pages > 1 else pages * PAGE_BYTES or (size_bytes + 1) // 2

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        """As ``os.pwrite``."""
        return self.pwritev(fd, [data], offset)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """As ``os.pread``."""
        buffer = bytearray(size)
        return bytes(buffer[: self.preadv(fd, [buffer], offset)])

    def truncate(self, path: str, size: int) -> None:
        """As ``os.truncate``."""
        self._call("truncate", path)
        self._files.get(path).resize(size)

    def ftruncate(self, fd: int, size: int) -> None:
        """As ``os.ftruncate``."""
        inode, path = self._inode(fd)
        self._call("truncate", path)
        inode.resize(size)

    def posix_fallocate(self, fd: int, offset: int, size: int) -> None:
        """As ``os.posix_fallocate``."""
        inode, path = self._inode(fd)
        self._call("fallocate", path, (Fault.EIO, Fault.ENOSPC))
        inode.resize(max(offset + size, len(inode.data)))

    def fsync(self, fd: int) -> None:
        """As ``os.fsync``."""
        descriptor = self._descriptor(fd)
        self._call("fsync", descriptor.path)
        if descriptor.inode is None:
            self._files.sync(descriptor.folder)
        else:
            descriptor.inode.sync()

    # ---- the rest

    def getpid(self) -> int:
        """A number."""
        return 4242

    def geteuid(self) -> int:
        """A number."""
        return 1000

    def urandom(self, size: int) -> bytes:
        """Random, but from the seed."""
        return self._world.random.randbytes(size)

    def flock(self, fd: int, _operation: int) -> None:
        """As ``fcntl.flock`` of an exclusive lock."""
        path = self._descriptor(fd).path
        if path in self.locks:
            raise BlockingIOError(errno.EAGAIN, "locked", path)
        self.locks.add(path)

    def open_file(self, path: Any, mode: str = "r", **_text: object) -> SimFile:
        """As the built-in ``open``."""
        path = os.fspath(path)
        flags = os.O_RDONLY if "r" in mode else os.O_RDWR | os.O_CREAT
        fd = self.open(path, flags)
        inode, _ = self._inode(fd)
        if "w" in mode:
            inode.resize(0)
        return SimFile(self, fd, len(inode.data) if "a" in mode else 0, text="b" not in mode)

    def size_of(self, fd: int) -> int:
        """Length of an open file in bytes."""
        return len(self._inode(fd)[0].data)


class _Stat:
    def __init__(self, inode: Inode) -> None:
        self.st_size = len(inode.data)
        self.st_blocks = inode.allocated_bytes // 512
        self.st_mtime_ns = int(inode.modified_s * 1e9)


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[bit // 8 % len(changed)] ^= 1 << bit % 8
    return bytes(changed)
