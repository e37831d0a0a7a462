"""Background threads that fault shared memory in, so that nobody pays for it later.

Work is done in small chunks, each a huge page where the kernel grants one: a thread that faults pages in holds the process's
memory map, and whoever wants to map something meanwhile (the event loop too) waits for the chunk. Memory that is in use comes
before memory that is kept in stock; when nothing is left to do, the owner is asked for more stock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from kvtierd.memory import HUGE_PAGE_BYTES, SharedMapping, allocate, can_gather, can_populate

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = HUGE_PAGE_BYTES
MAX_THREADS: Final = 256
MAX_REFUSALS: Final = 32
"""So many huge pages refused one after another are the last that are asked for: each time the kernel looks all memory through."""
NICENESS: Final = 10
"""The threads yield to those that serve."""


class Region:
    """A memfd, its mapping in this process, and how much of it has been faulted in.

    Attributes:
        fd: the memfd (or file on tmpfs), made for this; owned from here on.
        size_bytes: its size; shrinks by :meth:`cut`.
        mapping: as large as the memfd was at first.
        node: NUMA node that its pages come from; -1 for any.
        populated_bytes: faulted in by a :class:`Prefaulter` (an upper bound after :meth:`cut`).
        gathered_bytes: of these, those that were gathered in huge pages.

    Raises:
        OSError: no address space left; the descriptor is closed.
    """

    def __init__(self, fd: int, size_bytes: int, node: int = -1) -> None:
        self.fd = fd
        try:
            self.mapping = SharedMapping(self.fd, size_bytes)
        except OSError:
            os.close(self.fd)
            raise
        self.size_bytes = size_bytes
        self.node = node if node >= 0 and self.mapping.prefer_node(node) else -1
        self.populated_bytes = 0
        self.gathered_bytes = 0
        # Below here: the prefaulter's, under its lock.
        self.next_offset = 0
        self.busy = 0
        self.adding: list[int] = []
        """Where chunks in progress end that could put pages there even if the region was cut meanwhile."""
        self.stopped = False

    def cut(self, size_bytes: int) -> None:
        """Shorten an unsealed region; the pages behind go at once. One that a prefaulter has is cut by :meth:`Prefaulter.cut`."""
        self.mapping.expect_end(size_bytes)
        os.ftruncate(self.fd, size_bytes)
        self.size_bytes = size_bytes
        self.populated_bytes = min(self.populated_bytes, size_bytes)
        self.gathered_bytes = min(self.gathered_bytes, size_bytes)

    def close(self) -> None:
        """Close the descriptor and unmap, or have the last view unmap."""
        os.close(self.fd)
        self.mapping.release()


class Prefaulter:
    """Threads that fault regions in.

    Args:
        threads: how many, at most ``MAX_THREADS``.
        huge_pages: gather pages in huge ones, where the kernel can.
        refill: called without locks when nothing is left to do; may add regions and says whether it did.
    """

    def __init__(self, threads: int, huge_pages: bool, refill: Callable[[], bool]) -> None:
        self._refill = refill
        self._changed = threading.Condition()
        self._urgent: deque[Region] = deque()
        self._stock: deque[Region] = deque()
        self._wanted = True
        self._closing = False
        self._populates = can_populate()
        self._gathers = huge_pages and self._populates and can_gather()
        self._refusals = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"kvtierd-prefault-{i}", daemon=True) for i in range(min(threads, MAX_THREADS))
        ]

    def start(self) -> None:
        """Begin to work; the owner must be ready to be asked for stock."""
        for thread in self._threads:
            thread.start()

    def add(self, region: Region, *, urgent: bool) -> None:
        """Queue a region, or move a queued one to the front (urgent). One that is complete is passed over."""
        with self._changed:
            region.stopped = False
            (self._urgent if urgent else self._stock).append(region)
            self._changed.notify_all()

    def wake(self) -> None:
        """Have the owner asked for more stock."""
        with self._changed:
            self._wanted = True
            self._changed.notify()

    def stop(self, region: Region) -> None:
        """Touch a region no more. Waits for chunks of it that are in progress: a few milliseconds at most."""
        with self._changed:
            region.stopped = True
            self._changed.wait_for(lambda: region.busy == 0)

    def cut(self, region: Region, size_bytes: int) -> None:
        """Shorten a region. Waits for chunks in progress that could put pages behind the end: a few milliseconds at most.

        Raises:
            OSError: it keeps its size.
        """
        with self._changed:
            before, region.size_bytes = region.size_bytes, size_bytes  # nothing behind the new end is begun from here on
            try:
                self._changed.wait_for(lambda: max(region.adding, default=0) <= size_bytes)
                region.cut(size_bytes)
            except BaseException:
                region.size_bytes = before
                raise

    def close(self) -> None:
        """End the threads and wait for them."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            with self._changed:
                claim = self._claim()
                while claim is None and not self._wanted and not self._closing:
                    self._changed.wait()
                    claim = self._claim()
                if self._closing:
                    if claim is not None:
                        self._done(claim)
                    return
                if claim is None:
                    self._wanted = False
            if claim is not None:
                self._fault_in(claim)
            elif self._try_refill():
                self.wake()

    def _try_refill(self) -> bool:
        try:
            return self._refill()
        except OSError as e:
            log.warning("no more memory is prefaulted: %s", e)
            return False

    def _claim(self) -> _Chunk | None:
        """Take the next chunk. Under the lock."""
        for queue in (self._urgent, self._stock):
            while queue:
                region = queue[0]
                if region.stopped or region.next_offset >= region.size_bytes:
                    queue.popleft()
                    continue
                offset = region.next_offset
                length = min(CHUNK_BYTES, region.size_bytes - offset)
                gathers = self._gathers and length == HUGE_PAGE_BYTES
                chunk = _Chunk(region, offset, length, gathers, adds=gathers or not self._populates)
                region.next_offset += length
                region.busy += 1
                if chunk.adds:
                    region.adding.append(offset + length)
                return chunk
        return None

    def _done(self, chunk: _Chunk) -> None:
        """Give a chunk back. Under the lock."""
        region = chunk.region
        region.busy -= 1
        if chunk.adds:
            region.adding.remove(chunk.offset + chunk.length)
        if region.busy == 0 or chunk.adds:
            self._changed.notify_all()

    def _fault_in(self, chunk: _Chunk) -> None:
        region, offset, length = chunk.region, chunk.offset, chunk.length
        failure: OSError | ValueError | None = None
        gathered = False
        try:
            gathered = chunk.gathers and self._gather(region, offset)
            if self._populates:
                region.mapping.populate(offset, length)
            else:
                allocate(region.fd, offset, length)
        except (OSError, ValueError) as e:
            failure = e
        with self._changed:
            # A region that was cut or closed meanwhile fails beyond its new end: expected.
            if failure is not None and offset + length <= region.size_bytes:
                log.warning("prefaulting an extent stopped: %s", failure)
                region.stopped = True
            else:
                region.populated_bytes = min(region.populated_bytes + length, region.size_bytes)
                region.gathered_bytes = min(region.gathered_bytes + gathered * length, region.size_bytes)
            self._done(chunk)

    def _gather(self, region: Region, offset: int) -> bool:
        """Whether the chunk is a huge page now. It stays as it was where the kernel has none or a device holds its pages."""
        try:
            region.mapping.gather(offset)
        except OSError as e:
            with self._changed:
                if e.errno != errno.EAGAIN:
                    self._refusals += 1
                if self._refusals >= MAX_REFUSALS and self._gathers:
                    self._gathers = False
                    log.warning("the rest of the CPU memory has small pages: %s", e)
            return False
        self._refusals = 0
        return True


class _Chunk(NamedTuple):
    region: Region
    offset: int
    length: int
    gathers: bool
    """It is to become a huge page."""
    adds: bool
    """It could put pages behind the region's end if that was cut meanwhile; populating alone could not."""
