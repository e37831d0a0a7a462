"""The way between GPU memory and segment files that leaves CPU memory out, for as long as it works.

It is open for a GPU once :mod:`kvtierd.tiers.direct_probe` has found it to work there. The first failure closes it until the daemon
starts anew: blocks go by CPU memory then, and nothing is lost. A transfer that hangs keeps its thread, its memory and its place in
the file until it ends.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvtierd.cuda import Device
from kvtierd.model import PAGE_BYTES, round_up
from kvtierd.tiers.base import DeviceRange
from kvtierd.tiers.device_io import DeviceIo, Part

log = logging.getLogger(__name__)


class DirectError(Exception):
    """A transfer failed, or moved other bytes; the text says how."""


class DirectPath:
    """Transfers and digests of GPU memory, watched. Thread-safe.

    Args:
        io: does them.
        timeout_s: after so long one is taken to hang.
        clock: seconds, monotonic.
    """

    def __init__(self, io: DeviceIo, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = io.name
        self.timeout_s = timeout_s
        self.closed_by = ""
        """What has closed it; empty while it is open."""
        self._io = io
        self._clock = clock
        self._lock = threading.Lock()
        self._devices: set[Device] = set()
        self._began_s: dict[object, float] = {}

    def admit(self, device: Device) -> None:
        """It works on a GPU."""
        self._devices.add(device)

    def is_open(self, device: Device) -> bool:
        """Whether memory of a GPU may be moved by it."""
        return not self.closed_by and device in self._devices

    def trip(self, why: str) -> None:
        """Close it; tells why, once."""
        with self._lock:
            if self.closed_by:
                return
            self.closed_by = why
        log.error(
            "blocks between GPU memory and NVMe go by CPU memory from now on, as %s does not work: %s; see `kvtierd doctor` and "
            'the kernel\'s log, then restart the daemon, or set nvme.gds = "off"',
            "GPUDirect Storage" if self.name == "gds" else "kvikio",
            why,
        )

    @property
    def is_busy(self) -> bool:
        """Whether something has begun and not ended."""
        with self._lock:
            return bool(self._began_s)

    def hangs(self) -> bool:
        """Whether a transfer takes too long; closes the path then."""
        with self._lock:
            oldest_s = min(self._began_s.values(), default=None)
        overdue = oldest_s is not None and self._clock() - oldest_s > self.timeout_s
        if overdue:
            self.trip(f"a transfer has not ended within {self.timeout_s:g} s (nvme.gds_timeout)")
        return overdue

    @contextmanager
    def _watched(self) -> Iterator[None]:
        token = object()
        with self._lock:
            self._began_s[token] = self._clock()
        try:
            yield
        except Exception as e:
            raise DirectError(f"{type(e).__name__}: {e}") from e
        finally:
            with self._lock:
                del self._began_s[token]

    def write(self, path: str, parts: Sequence[Part]) -> list[bytes]:
        """Write memory to a file, whole pages of it. Returns the digests of the memory. Raises DirectError."""
        with self._watched():
            digests = self._digests([memory for memory, _ in parts])
            _check_whole(parts, self._io.write(path, _whole(parts)))
            return digests

    def read(self, path: str, parts: Sequence[Part]) -> list[bytes]:
        """Fill memory from a file, whole pages of it. Returns the digests of what is there then. Raises DirectError."""
        with self._watched():
            _check_whole(parts, self._io.read(path, _whole(parts)))
            return self._digests([memory for memory, _ in parts])

    def close_file(self, path: str) -> None:
        """Close a file, once no transfer uses it."""
        if self.hangs():
            return  # nor can it be closed then
        try:
            with self._watched():
                self._io.close(path)
        except DirectError as e:
            self.trip(f"a file cannot be closed: {e}")

    def _digests(self, ranges: Sequence[DeviceRange]) -> list[bytes]:
        found: dict[int, bytes] = {}
        for device in dict.fromkeys(memory.device for memory in ranges):
            numbers = [n for n, memory in enumerate(ranges) if memory.device is device]
            found.update(zip(numbers, self._io.digests([ranges[n] for n in numbers]), strict=True))
        return [found[n] for n in range(len(ranges))]


def _whole(parts: Sequence[Part]) -> list[Part]:
    """The same up to the end of their last pages, which the contract of blocks allows."""
    return [(DeviceRange(m.device, m.address, round_up(m.nbytes, PAGE_BYTES)), at) for m, at in parts]


def _check_whole(parts: Sequence[Part], moved: Sequence[int]) -> None:
    for (memory, _), count in zip(_whole(parts), moved, strict=True):
        if count != memory.nbytes:
            raise OSError(errno.EIO, f"{count} bytes of {memory.nbytes} were moved")
