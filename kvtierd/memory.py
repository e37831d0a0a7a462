"""Shared memory made of memfds: make, seal, map, fault in, give back. Linux only; used by the daemon and by clients.

Mappings are made through libc and not through :mod:`mmap` for three reasons: a ``mmap`` object keeps a descriptor of its own
(one more for each extent), its ``madvise`` holds the GIL, and it cannot be unmapped while somebody holds a view of it. Here the
last view that goes away unmaps the memory, in whatever thread that happens.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import platform
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
HUGE_PAGE_BYTES: Final = 2 << 20
"""A huge page of x86-64, and of arm64 with 4 KiB pages."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What no holder of the descriptor can undo: the size stays, so nobody's access ends in a SIGBUS."""

_PROT_NONE: Final = 0
_PROT_READ_WRITE: Final = 3
_MAP_SHARED: Final = 1
_MAP_FIXED: Final = 0x10
_MAP_RESERVE: Final = 0x4022
"""Private, of no file, without swap set aside."""
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE: Final = 14
_MADV_NOHUGEPAGE: Final = 15
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_MPOL_PREFERRED: Final = 1
_NODE_MASK_BITS: Final = 1024
_MFD_NOEXEC_SEAL: Final = 8
_MBIND: Final = {"x86_64": 237, "aarch64": 235}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def available_bytes() -> int:
    """Memory of this machine that can be had without swapping, as the kernel estimates it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def create_memfd(name: str, size_bytes: int) -> int:
    """Make an unsealed memfd of ``size_bytes`` without any page in it. Returns the descriptor (close-on-exec). Raises OSError."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)  # a kernel before 6.3
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def create_memory_file(folder: str, size_bytes: int) -> int:
    """Make a file without a name and without any page in a folder on tmpfs. Returns the descriptor. Raises OSError."""
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """True for a memfd whose size nobody can change."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False


def seal(fd: int) -> None:
    """Fix the size of a memfd for good. Raises OSError."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)


def punch(fd: int, size_bytes: int) -> None:
    """Give all pages of a memfd back to the kernel at once, mapped or not; what is read afterwards is zero. Raises OSError."""
    _check(_libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, 0, size_bytes), "punching out a memfd")


def allocate(fd: int, offset: int, length: int) -> None:
    """Reserve the pages of a range without changing content. Raises OSError."""
    _check(_libc.fallocate(fd, _KEEP_SIZE, offset, length), "allocating pages of a memfd")


def filled_ranges(fd: int, size_bytes: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    """The ranges (offset, length) of a memfd that have pages, cut into pieces; each is looked up right before it is given out."""
    offset = end = 0
    while offset < size_bytes:
        try:
            start = os.lseek(fd, offset, os.SEEK_DATA)
            if start != offset or start >= end:
                end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as e:
            if e.errno == errno.ENXIO:
                return  # no more data
            raise
        length = min(end, size_bytes, start + max_bytes) - start
        if length <= 0:
            return
        yield start, length
        offset = start + length


class SharedMapping:
    """A whole memfd mapped for reading and writing, in huge pages if granted. The descriptor may be closed afterwards.

    It starts where a huge page of the memfd can be mapped as one.

    Args:
        fd: the memfd.
        size_bytes: bytes to map; the memfd has at least as many.
        on_unmapped: called once, right after the memory was unmapped, in the thread that dropped the last view. It must
            neither block nor raise.

    Attributes:
        address: start of the mapping; valid until it is unmapped.
        size_bytes: bytes that are mapped.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, size_bytes: int, on_unmapped: Callable[[], None] | None = None) -> None:
        address = _map(fd, size_bytes)
        self.address: int = address
        self.size_bytes = size_bytes
        # For a kernel that leaves huge pages to the program (one without them answers with an error that changes nothing).
        _libc.madvise(address, _whole_huge_pages(size_bytes), _MADV_HUGEPAGE)
        memory = (ctypes.c_ubyte * size_bytes).from_address(address)
        # Every view of the memory, a slice of a slice too, keeps this ctypes array alive.
        weakref.finalize(memory, _unmap, address, size_bytes, on_unmapped).atexit = False
        self._view: memoryview | None = memoryview(memory).cast("B")

    @property
    def view(self) -> memoryview:
        """The whole mapping as bytes. Raises ValueError after :meth:`release`."""
        view = self._view
        if view is None:
            raise ValueError("the mapping has been released")
        return view

    def release(self) -> None:
        """Unmap: at once when nobody holds a view, else when the last view goes away."""
        self._view = None

    def populate(self, offset: int, length: int) -> None:
        """Fault a range in for writing without changing it (with the GIL released). Raises OSError, ValueError."""
        view = self.view  # keeps the mapping in place meanwhile
        while _libc.madvise(self.address + offset, length, _MADV_POPULATE_WRITE) != 0:
            number = ctypes.get_errno()
            if number not in (errno.EINTR, errno.EAGAIN):
                raise OSError(number, f"populating {length} bytes: {os.strerror(number)}")
        del view

    def gather(self, offset: int) -> None:
        """Bring one huge page's worth of pages into a huge page, content and all (with the GIL released).

        The kernel's settings of transparent huge pages do not matter here. Pages that do not exist are added, beyond the end of the
        memfd too: nobody may shorten it meanwhile.

        Args:
            offset: multiple of HUGE_PAGE_BYTES, with as much behind it.

        Raises:
            OSError: no huge page is free (ENOMEM; EBUSY by a limit of the cgroup), pages are in use by a device or another call
                (EAGAIN), or the kernel does not do this (EINVAL).
            ValueError: the mapping has been released.
        """
        self.populate(offset, PAGE_BYTES)  # the kernel looks at page tables only, and leaves alone what has none
        view = self.view
        if _libc.madvise(self.address + offset, HUGE_PAGE_BYTES, _MADV_COLLAPSE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"gathering {HUGE_PAGE_BYTES} bytes into a huge page: {os.strerror(number)}")
        del view

    def expect_end(self, size_bytes: int) -> None:
        """Have no huge page reach beyond an end at which the memfd is about to be cut."""
        whole = _whole_huge_pages(size_bytes)
        _libc.madvise(self.address + whole, self.size_bytes - whole, _MADV_NOHUGEPAGE)

    def prefer_node(self, node: int) -> bool:
        """Have pages that do not exist yet come from a NUMA node while it has any. False where that cannot be had."""
        number = _MBIND.get(platform.machine())
        if number is None or not 0 <= node < _NODE_MASK_BITS:
            return False
        mask = (ctypes.c_ulong * (_NODE_MASK_BITS // 64))()
        mask[node // 64] = 1 << (node % 64)
        done: int = _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(self.address),
            ctypes.c_ulong(self.size_bytes),
            ctypes.c_int(_MPOL_PREFERRED),
            mask,
            ctypes.c_ulong(_NODE_MASK_BITS + 1),  # the kernel reads one bit less
            ctypes.c_uint(0),
        )
        return done == 0


def _map(fd: int, size_bytes: int) -> int:
    """Map a memfd at a multiple of HUGE_PAGE_BYTES. Returns the address. Raises OSError."""
    pages_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    room_bytes = pages_bytes + HUGE_PAGE_BYTES
    room = _try_map(None, room_bytes, _PROT_NONE, _MAP_RESERVE, -1)
    address = -(-room // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _try_map(address, size_bytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(room, room_bytes)
        raise
    end = address + pages_bytes
    if address > room:
        _libc.munmap(room, address - room)
    _libc.munmap(end, room + room_bytes - end)  # there is some: the room began at a page
    return address


def _try_map(at: int | None, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    address = _libc.mmap(at, size_bytes, protection, flags, fd, 0)
    if address == _MAP_FAILED or address is None:
        number = ctypes.get_errno()
        raise OSError(number, f"mapping {size_bytes} bytes: {os.strerror(number)}")
    return int(address)


def _whole_huge_pages(size_bytes: int) -> int:
    """The bytes that huge pages can fill without reaching beyond the end."""
    return size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def _unmap(address: int, size_bytes: int, on_unmapped: Callable[[], None] | None) -> None:
    _libc.munmap(address, size_bytes)
    if on_unmapped is not None:
        on_unmapped()


@functools.cache
def can_populate() -> bool:
    """True where the kernel knows MADV_POPULATE_WRITE (Linux 5.14 and newer)."""
    fd = create_memfd("kvtierd-probe", PAGE_BYTES)
    try:
        SharedMapping(fd, PAGE_BYTES).populate(0, PAGE_BYTES)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(fd)
    return True


@functools.cache
def can_gather() -> bool:
    """True where the kernel knows MADV_COLLAPSE (Linux 6.1 and newer) and shared memory can have huge pages."""
    fd = create_memfd("kvtierd-probe", HUGE_PAGE_BYTES)
    try:
        SharedMapping(fd, HUGE_PAGE_BYTES).gather(0)
    except OSError as e:
        return e.errno in (errno.ENOMEM, errno.EBUSY, errno.EAGAIN)  # not now
    finally:
        os.close(fd)
    return True
