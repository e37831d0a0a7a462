"""Direct transfers between GPU memory and files without kvikio, and faults; see :class:`~kvtierd.tiers.device_io.DeviceIo`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import xxhash

from kvtierd.tiers.base import DeviceRange
from kvtierd.tiers.device_io import Part

Fault = Literal["", "fail", "short", "corrupt", "hang"]


class FileIo:
    """Reads and writes files by plain calls, over any CUDA driver.

    Attributes:
        fault: what happens to transfers from now on; those that hang go on after :meth:`release`.
        moved: transfers that were asked for, as "write" and "read".
    """

    name = "gds"

    def __init__(self) -> None:
        self.fault: Fault = ""
        self.moved: list[str] = []
        self.open: set[str] = set()
        """Files that were used and not closed."""
        self.hanging = threading.Event()
        """Set while a transfer hangs."""
        self._released = threading.Event()

    def release(self) -> None:
        """Let what hangs go on."""
        self._released.set()

    def write(self, path: str, parts: Sequence[Part]) -> list[int]:
        """See DeviceIo."""
        self._begin("write", path)
        moved = []
        with Path(path).open("r+b", buffering=0) as file:
            for memory, at in parts:
                data = bytearray(memory.nbytes)
                memory.device.copy_to_host([(memory.address, data)])
                moved.append(os.pwrite(file.fileno(), self._spoilt(data), at))
        return moved

    def read(self, path: str, parts: Sequence[Part]) -> list[int]:
        """See DeviceIo."""
        self._begin("read", path)
        moved = []
        with Path(path).open("rb", buffering=0) as file:
            for memory, at in parts:
                data = self._spoilt(bytearray(os.pread(file.fileno(), memory.nbytes, at)))
                memory.device.copy_from_host([(memory.address, data)])
                moved.append(len(data))
        return moved

    def digests(self, ranges: Sequence[DeviceRange]) -> list[bytes]:
        """See DeviceIo."""
        return [xxhash.xxh3_128_digest(memory.device.read(memory.address, memory.nbytes)) for memory in ranges]

    def close(self, path: str) -> None:
        """See DeviceIo."""
        self.open.discard(path)

    def _begin(self, what: str, path: str) -> None:
        self.moved.append(what)
        self.open.add(path)
        if self.fault == "fail":
            raise RuntimeError("cuFile internal error")
        if self.fault == "hang":
            self.hanging.set()
            self._released.wait()
            self.hanging.clear()

    def _spoilt(self, data: bytearray) -> bytearray:
        if self.fault == "corrupt":
            data[len(data) // 2] ^= 1
        return data[:-4096] if self.fault == "short" else data
