"""The CPU tier's memory: extents, each a sealed memfd that clients map too, and a stock of blank ones faulted in ahead.

The core decides which extents there are and keeps their sum within the capacity. This pool keeps the rest of the capacity in
*blanks*: memfds without an owner whose pages are already there. ``create`` takes a blank where one fits, so a new extent is
ready to be copied into at full speed; otherwise it makes a fresh memfd, shortens blanks by as much first, and has it faulted in
behind its users' backs (that never changes content). Extents are never reused: another realm gets other, zeroed pages.

The sum of extents, of extents on their way out and of blanks never exceeds the capacity. A process that still maps an extent
can have pages of it (registered with a device, or made anew by an access) after :meth:`CpuPool.retire`, so its bytes count
until :meth:`CpuPool.released`.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvtierd.config import CpuConfig
from kvtierd.errors import StartupError
from kvtierd.memory import PAGE_BYTES, allocate, create_memfd, punch, seal
from kvtierd.model import slot_extent, slot_index
from kvtierd.tiers.memory_limits import check_limits
from kvtierd.tiers.prefault import Prefaulter, Region

log = logging.getLogger(__name__)

MAX_PREFAULT_THREADS: Final = 16
SPARE_DESCRIPTORS: Final = 256
"""Descriptors wanted for everything that is no extent, at the least."""
MAX_BLANK_FACTOR: Final = 2
"""A blank that is more than this many times as large as needed is not taken: cutting it would throw prefaulted pages away."""


class _Extent:
    """A region in use. ``view`` covers exactly ``slot_count`` slots."""

    __slots__ = ("region", "slot_bytes", "slot_count", "view")

    def __init__(self, region: Region, slot_bytes: int, slot_count: int) -> None:
        self.region = region
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.view = region.mapping.view[: slot_bytes * slot_count]


class CpuPool:
    """All memory of the CPU tier.

    Thread-safe, but for ``close``, and as long as each extent is created and retired by one caller. ``create`` is for the event
    loop; ``retire`` frees the pages, which takes about 0.1 ms for each MiB, and may be called in a worker thread.

    Args:
        config: capacity and the like.
        make: makes memory of so many bytes that is all zeros; None for memfds, which are sealed.

    Raises:
        StartupError: the process may not open as many files as there are extents.
    """

    def __init__(self, config: CpuConfig, make: Callable[[int], int] | None = None) -> None:
        self._make = make or (lambda size_bytes: create_memfd("kvtierd-extent", size_bytes))
        self.path = "memfd" if make is None else "tmpfs"
        """"memfd", or "tmpfs" for files that a restart may keep."""
        self.capacity_bytes = config.capacity // PAGE_BYTES * PAGE_BYTES
        self._blank_bytes_each = min(max(config.extent_bytes // PAGE_BYTES, 1) * PAGE_BYTES, self.capacity_bytes)
        _allow_descriptors(self.capacity_bytes // self._blank_bytes_each)
        self._extents: dict[int, _Extent] = {}
        self._lock = threading.Lock()
        # Under the lock:
        self._extent_bytes = 0
        self._retiring: dict[int, int] = {}
        self._blanks: list[Region] = []
        self._closed = False
        self._nodes = _numa_nodes()
        self._next_node = 0
        self._prefaulter: Prefaulter | None = None
        if config.prefault:
            threads = config.prefault_threads or min(len(os.sched_getaffinity(0)), MAX_PREFAULT_THREADS)
            self._prefaulter = Prefaulter(threads, config.huge_pages, self._refill)

    def start(self) -> None:
        """Begin to fault memory in, if so configured: after what was kept over a restart has been taken over."""
        if self._prefaulter is not None:
            self._prefaulter.start()

    # ---- figures

    @property
    def reserved_bytes(self) -> int:
        """Bytes of extents, those on their way out included."""
        with self._lock:
            return self._extent_bytes + sum(self._retiring.values())

    @property
    def blank_bytes(self) -> int:
        """Bytes of memory kept in stock, faulted in or about to be."""
        with self._lock:
            return sum(blank.size_bytes for blank in self._blanks)

    @property
    def prefaulted_bytes(self) -> int:
        """Bytes of extents and blanks that were faulted in ahead of their use."""
        with self._lock:
            regions = self._blanks + [extent.region for extent in self._extents.values()]
            return sum(region.populated_bytes for region in regions)

    @property
    def huge_page_bytes(self) -> int:
        """Bytes of these that the kernel gathered in huge pages."""
        with self._lock:
            regions = self._blanks + [extent.region for extent in self._extents.values()]
            return sum(region.gathered_bytes for region in regions)

    # ---- extents

    def create(self, extent_id: int, slot_bytes: int, slot_count: int, numa_node: int = -1) -> None:
        """Make an extent; no page is touched here, those of a file are reserved. The caller keeps the sum of all extents within the
        capacity.

        Args:
            extent_id: an id that was never used before.
            slot_bytes: bytes of one slot, whole pages.
            slot_count: slots.
            numa_node: node whose memory is preferred; -1 for any.

        Raises:
            OSError: no descriptor or address space left, or no room in the folder on tmpfs.
        """
        size_bytes = slot_bytes * slot_count
        assert size_bytes > 0, "an extent has at least one slot"
        assert slot_bytes % PAGE_BYTES == 0, "slots are whole pages"
        node = numa_node if len(self._nodes) > 1 and numa_node in self._nodes else -1
        with self._lock:
            assert extent_id not in self._extents
            assert extent_id not in self._retiring
            assert self._extent_bytes + size_bytes <= self.capacity_bytes, "the capacity holds at all times"
            region = self._take_blank(size_bytes, node)
            if region is None:
                self._shrink_blanks(size_bytes)
            self._extent_bytes += size_bytes
        try:
            if region is None:
                region = Region(self._make(size_bytes), size_bytes, node)
            self._finish(region, extent_id, slot_bytes, slot_count)
        except OSError:
            with self._lock:
                self._extent_bytes -= size_bytes
            raise
        if self._prefaulter is not None:
            self._prefaulter.add(region, urgent=True)
            self._prefaulter.wake()

    def _finish(self, region: Region, extent_id: int, slot_bytes: int, slot_count: int) -> None:
        try:
            self._cut(region, slot_bytes * slot_count)
            if self.path == "memfd":
                seal(region.fd)
            else:  # who touches a page for which the file system has no room is killed
                allocate(region.fd, 0, region.size_bytes)
        except OSError:
            region.close()
            raise
        with self._lock:
            self._extents[extent_id] = _Extent(region, slot_bytes, slot_count)

    def adopt(self, extent_id: int, fd: int, slot_bytes: int, slot_count: int) -> None:
        """Take over an extent that a former pool made, with what is in it. Before :meth:`start`.

        Args:
            extent_id: an id that is not in use.
            fd: its memory; the pool's from here on, unless this fails.
            slot_bytes: as it was made.
            slot_count: as it was made.

        Raises:
            OSError: it cannot be mapped, or there is no room for pages that it lacks.
        """
        size_bytes = slot_bytes * slot_count
        allocate(fd, 0, size_bytes)
        region = Region(os.dup(fd), size_bytes)
        os.close(fd)
        region.populated_bytes = region.next_offset = size_bytes
        with self._lock:
            assert extent_id not in self._extents
            assert self._extent_bytes + size_bytes <= self.capacity_bytes, "the capacity holds at all times"
            self._extent_bytes += size_bytes
            self._extents[extent_id] = _Extent(region, slot_bytes, slot_count)

    def has_extent(self, extent_id: int) -> bool:
        """True for an extent that was created and not retired."""
        return extent_id in self._extents

    def fd(self, extent_id: int) -> int:
        """Descriptor of an extent, owned by the pool: pass it on or duplicate it at once. Raises KeyError."""
        return self._extents[extent_id].region.fd

    def size_bytes(self, extent_id: int) -> int:
        """Bytes of an extent. Raises KeyError."""
        return self._extents[extent_id].region.size_bytes

    def view(self, slot: int) -> memoryview:
        """The whole slot as writable bytes. Raises KeyError when its extent does not exist."""
        extent = self._extents[slot_extent(slot)]
        index = slot_index(slot)
        assert index < extent.slot_count
        start = index * extent.slot_bytes
        return extent.view[start : start + extent.slot_bytes]

    def retire(self, extent_id: int) -> None:
        """Give an extent's pages back to the kernel at once, whoever maps them. Its bytes count until :meth:`released`.

        Views that are still held read zeros; the last one that goes unmaps the memory. Where the kernel refuses, the pages go
        with the last process that maps them. Raises KeyError.
        """
        extent = self._extents[extent_id]
        region = extent.region
        if self._prefaulter is not None:
            self._prefaulter.stop(region)
        try:
            punch(region.fd, region.size_bytes)
        except OSError as e:
            log.error("extent %d keeps its pages until its clients have gone: %s", extent_id, e)
        with self._lock:
            del self._extents[extent_id]
            self._extent_bytes -= region.size_bytes
            self._retiring[extent_id] = region.size_bytes
        extent.view = memoryview(b"")
        region.close()

    def released(self, extent_id: int) -> None:
        """No process keeps pages of a retired extent any more: its bytes may become a blank again."""
        with self._lock:
            self._retiring.pop(extent_id, None)
        if self._prefaulter is not None:
            self._prefaulter.wake()

    def close(self) -> None:
        """End the threads and give everything back. Views that are still held stay readable. May be called again."""
        with self._lock:
            self._closed = True
        if self._prefaulter is not None:
            self._prefaulter.close()
        with self._lock:
            regions = self._blanks + [extent.region for extent in self._extents.values()]
            self._blanks, self._extents = [], {}
            self._extent_bytes = 0
            self._retiring.clear()
        for region in regions:
            region.close()

    # ---- blanks

    def _cut(self, region: Region, size_bytes: int) -> None:
        if region.size_bytes == size_bytes:
            return
        if self._prefaulter is not None:
            self._prefaulter.cut(region, size_bytes)
        else:
            region.cut(size_bytes)

    def _take_blank(self, size_bytes: int, node: int) -> Region | None:
        """The best blank that fits, taken out of the stock. Under the lock."""
        fitting = [
            blank
            for blank in self._blanks
            if size_bytes <= blank.size_bytes <= MAX_BLANK_FACTOR * size_bytes and node in (-1, blank.node)
        ]
        if not fitting:
            return None
        best = max(fitting, key=lambda blank: (min(blank.populated_bytes, size_bytes), -blank.size_bytes))
        self._blanks.remove(best)
        return best

    def _shrink_blanks(self, size_bytes: int) -> None:
        """Shorten blanks, the least prefaulted first, until ``size_bytes`` more fit. Under the lock."""
        blank_bytes = sum(blank.size_bytes for blank in self._blanks)
        excess = self._extent_bytes + sum(self._retiring.values()) + blank_bytes + size_bytes - self.capacity_bytes
        for blank in sorted(self._blanks, key=lambda blank: blank.populated_bytes):
            if excess <= 0:
                return
            left = max(blank.size_bytes - excess, 0) // PAGE_BYTES * PAGE_BYTES
            excess -= blank.size_bytes - left
            self._cut(blank, left)
            if left == 0:
                self._blanks.remove(blank)
                blank.close()

    def _room(self) -> int:
        """Bytes that are neither extents nor blanks. Under the lock."""
        blank_bytes = sum(blank.size_bytes for blank in self._blanks)
        return self.capacity_bytes - self._extent_bytes - sum(self._retiring.values()) - blank_bytes

    def _refill(self) -> bool:
        """Add a blank where there is room for one. Called by the prefaulter's threads. Raises OSError."""
        with self._lock:
            size_bytes = self._blank_size()
            node = self._nodes[self._next_node % len(self._nodes)] if len(self._nodes) > 1 else -1
            self._next_node += 1
        if not size_bytes:
            return False
        blank = Region(self._make(size_bytes), size_bytes, node)
        with self._lock:
            # Room may have gone meanwhile; so far the blank has no page.
            fits = not self._closed and size_bytes <= self._room()
            if fits:
                self._blanks.append(blank)
        if not fits:
            blank.close()
            return True  # look again
        assert self._prefaulter is not None
        self._prefaulter.add(blank, urgent=False)
        return True

    def _blank_size(self) -> int:
        """Bytes of the next blank; 0 for none. Under the lock.

        One blank may be smaller than an extent; more odds and ends wait until they make a whole one.
        """
        room = self._room() // PAGE_BYTES * PAGE_BYTES
        odd = any(blank.size_bytes < self._blank_bytes_each for blank in self._blanks)
        if self._closed or room <= 0 or (room < self._blank_bytes_each and odd):
            return 0
        return min(room, self._blank_bytes_each)


def _allow_descriptors(extents: int) -> None:
    """Raise this process's limit of open files to what the pool and its clients may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = extents + SPARE_DESCRIPTORS
    wanted = 2 * extents + 16 * SPARE_DESCRIPTORS
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < least:
        raise StartupError(
            f"the CPU tier has {extents} extents, but this process may open {hard} files; raise the limit to {wanted} "
            "(ulimit -n, LimitNOFILE=) or set cpu.extent to a larger size"
        )
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard == unlimited else min(wanted, hard), hard))


def _numa_nodes(path: Path = Path("/sys/devices/system/node/has_memory")) -> list[int]:
    """NUMA nodes that have memory; [0] where that is not known."""
    try:
        text = path.read_text().strip()
        spans = [[int(n) for n in part.split("-")] for part in text.split(",") if part]
    except (OSError, ValueError):
        return [0]
    return [node for span in spans for node in range(span[0], span[-1] + 1)] or [0]


__all__ = ["CpuPool", "check_limits"]
