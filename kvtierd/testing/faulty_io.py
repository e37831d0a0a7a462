"""An I/O engine that fails on purpose, in front of a real one. Seeded, so that a run can be repeated.

Faults that a device reports (EIO, ENOSPC) raise. Faults that it hides (torn, lost, misdirected, flipped bits) report success, so
that only verification can find them. A short transfer is no fault at all: callers must go on from there.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from typing_extensions import Buffer

from kvtierd.model import PAGE_BYTES
from kvtierd.tiers.io_engine import IoEngine

MAX_PLANS: Final = 1024
"""Faults that wait at one time."""


class Fault(Enum):
    """What goes wrong with one transfer."""

    EIO = "eio"
    ENOSPC = "enospc"
    SHORT = "short"
    """Only a part is moved, whole pages where there are several, and the count says so."""
    TORN = "torn"
    """A write stops within; the count says that all was written."""
    LOST = "lost"
    """A write does nothing, or a read leaves what was in memory; the count says that all was moved."""
    MISDIRECTED = "misdirected"
    """The bytes go to, or come from, one page further on."""
    BIT_FLIP = "bit_flip"
    """One bit is wrong after a read, or on the device after a write."""


@dataclass(slots=True)
class Plan:
    """Faults to come: the next ``count`` transfers that match, after ``skip`` others that do."""

    fault: Fault
    write: bool
    count: int
    skip: int
    path_part: str


class FaultyEngine:
    """See the module. Thread-safe.

    Args:
        inner: does the real work.
        seed: of everything random.
        rates: probability of each fault for each transfer, besides planned ones.
    """

    def __init__(self, inner: IoEngine, seed: int = 0, rates: dict[Fault, float] | None = None) -> None:
        self._inner = inner
        self._random = random.Random(seed)
        self._rates = dict(rates or {})
        self._lock = threading.Lock()
        self._plans: list[Plan] = []
        self._paths: dict[int, str] = {}
        self.transfers: list[tuple[bool, str, int]] = []
        """Write or not, path and bytes asked for of the last transfers, at most 10,000."""

    @property
    def name(self) -> str:
        """Name of the engine behind."""
        return self._inner.name

    def inject(self, fault: Fault, *, write: bool, count: int = 1, skip: int = 0, path_part: str = "segment-") -> None:
        """Plan a fault for transfers of files whose path contains ``path_part``."""
        with self._lock:
            assert len(self._plans) < MAX_PLANS, "too many faults planned"
            self._plans.append(Plan(fault, write, count, skip, path_part))

    def heal(self) -> None:
        """Forget all faults to come."""
        with self._lock:
            self._plans.clear()
            self._rates.clear()

    def open(self, path: str, *, direct: bool) -> int:
        """Open without faults."""
        handle = self._inner.open(path, direct=direct)
        self._paths[handle] = path
        return handle

    def close(self, handle: int) -> None:
        """Close without faults."""
        self._paths.pop(handle, None)
        self._inner.close(handle)

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """Write, or pretend to."""
        fault = self._next_fault(handle, buffers, write=True)
        views = [memoryview(b) for b in buffers]
        size = sum(v.nbytes for v in views)
        if fault is None or fault in (Fault.EIO, Fault.ENOSPC):
            _raise(fault)
            return self._inner.pwritev(handle, buffers, offset_bytes)
        if fault is Fault.LOST:
            return size
        if fault in (Fault.SHORT, Fault.TORN):
            part = self._part(size)
            moved = self._inner.pwritev(handle, _first(views, part), offset_bytes)
            return size if fault is Fault.TORN else moved
        if fault is Fault.MISDIRECTED:
            self._inner.pwritev(handle, buffers, offset_bytes + PAGE_BYTES)
            return size
        moved = self._inner.pwritev(handle, buffers, offset_bytes)
        self._flip_on_device(handle, views, offset_bytes)
        return moved

    def preadv(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """Read, or pretend to."""
        fault = self._next_fault(handle, buffers, write=False)
        views = [memoryview(b) for b in buffers]
        size = sum(v.nbytes for v in views)
        _raise(fault)
        if fault in (Fault.LOST, Fault.TORN):
            return size
        if fault is Fault.SHORT:
            return self._inner.preadv(handle, _first(views, self._part(size)), offset_bytes)
        if fault is Fault.MISDIRECTED:
            return self._inner.preadv(handle, buffers, offset_bytes + PAGE_BYTES)
        moved = self._inner.preadv(handle, buffers, offset_bytes)
        if fault is Fault.BIT_FLIP:
            view = views[-1].cast("B")
            view[self._random.randrange(view.nbytes)] ^= 1 << self._random.randrange(8)
        return moved

    def _next_fault(self, handle: int, buffers: Sequence[Buffer], *, write: bool) -> Fault | None:
        path = self._paths.get(handle, "")
        with self._lock:
            self.transfers.append((write, path, sum(memoryview(b).nbytes for b in buffers)))
            del self.transfers[:-10_000]
            for plan in self._plans:
                if plan.write is not write or plan.path_part not in path:
                    continue
                if plan.skip:
                    plan.skip -= 1
                    continue
                plan.count -= 1
                if plan.count == 0:
                    self._plans.remove(plan)
                return plan.fault
            for fault, rate in self._rates.items():
                if self._random.random() < rate:
                    return fault
        return None

    def _part(self, size_bytes: int) -> int:
        """Some whole pages but not all; one page, which a device writes whole, stays one; of less, half."""
        pages = size_bytes // PAGE_BYTES
        return self._random.randrange(1, pages) * PAGE_BYTES if pages > 1 else pages * PAGE_BYTES or size_bytes // 2

    def _flip_on_device(self, handle: int, views: list[memoryview], offset_bytes: int) -> None:
        """Write the last page again with one bit turned."""
        last = views[-1]
        # Aligned like the buffer it comes from, because the file may be open for direct I/O.
        page = last[-min(PAGE_BYTES, last.nbytes) :].cast("B")
        kept = bytes(page)
        page[self._random.randrange(page.nbytes)] ^= 1 << self._random.randrange(8)
        try:
            self._inner.pwritev(handle, [page], offset_bytes + sum(v.nbytes for v in views) - page.nbytes)
        finally:
            page[:] = kept


def _raise(fault: Fault | None) -> None:
    if fault is Fault.EIO:
        raise OSError(errno.EIO, "injected fault")
    if fault is Fault.ENOSPC:
        raise OSError(errno.ENOSPC, "injected fault")


def _first(views: list[memoryview], size_bytes: int) -> list[memoryview]:
    """The first bytes of several buffers."""
    result = []
    for view in views:
        take = min(view.nbytes, size_bytes)
        if take:
            result.append(view[:take])
        size_bytes -= take
    return result
