"""Tries out the direct way between GPU memory and NVMe: whether all bytes come through, and how long it takes beside CPU memory."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import xxhash

from kvtierd.cuda import Device
from kvtierd.tiers.base import DeviceRange
from kvtierd.tiers.direct_path import DirectError, DirectPath
from kvtierd.tiers.io_engine import IoEngine, read_all, write_all

PART_BYTES: Final = 4 << 20
PARTS: Final = 4
"""Moved at one time."""
SIZE_BYTES: Final = PARTS * PART_BYTES
ROUNDS: Final = 3
"""The fastest counts."""
SLOWER: Final = 1.1
"""What takes longer than by CPU memory by more than this is slower; less is noise."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Bytes a second, written and read again, in one folder."""

    folder: str
    direct_bytes_per_s: float
    by_cpu_bytes_per_s: float

    @property
    def is_slower(self) -> bool:
        """Whether the way by CPU memory is the better one."""
        return self.direct_bytes_per_s * SLOWER < self.by_cpu_bytes_per_s


def probe(direct: DirectPath, engine: IoEngine, files: Sequence[tuple[str, bool]], device: Device) -> list[ProbeResult]:
    """Write, read and compare some MiB of a GPU's memory, both ways. Blocking; for as long as a transfer hangs.

    Args:
        direct: the way.
        engine: moves bytes of host memory.
        files: paths of files to make for it, and whether by O_DIRECT.
        device: the GPU.

    Raises:
        DirectError: the direct way does not work.
    """
    results = []
    try:
        address = device.allocate(2 * SIZE_BYTES)
    except OSError as e:
        raise DirectError(f"no GPU memory for a trial: {e}") from e
    try:
        for path, o_direct in files:
            try:
                results.append(_probe_file(direct, engine, path, device, address, o_direct=o_direct))
            except (DirectError, OSError) as e:
                raise DirectError(f"{os.path.dirname(path)}: {e}") from e
    finally:
        device.free(address)
    return results


def _probe_file(direct: DirectPath, engine: IoEngine, path: str, device: Device, address: int, *, o_direct: bool) -> ProbeResult:
    with _made(path):
        handle = engine.open(path, direct=o_direct)
        try:
            trial = _Trial(direct, engine, path, handle, device, address)
            for _ in range(ROUNDS):
                trial.round()
        finally:
            direct.close_file(path)
            engine.close(handle)
    return ProbeResult(os.path.dirname(path), 2 * SIZE_BYTES / min(trial.direct_s), 2 * SIZE_BYTES / min(trial.by_cpu_s))


class _Trial:
    """Both ways in one file. The first half of the memory at ``address`` is written from, the second is read to."""

    def __init__(self, direct: DirectPath, engine: IoEngine, path: str, handle: int, device: Device, address: int) -> None:
        self._direct, self._engine, self._path, self._handle = direct, engine, path, handle
        self._device, self._address = device, address
        self._host = memoryview(mmap.mmap(-1, SIZE_BYTES))
        self.direct_s: list[float] = []
        self.by_cpu_s: list[float] = []

    def round(self) -> None:
        """Raises DirectError, OSError."""
        content = secrets.token_bytes(SIZE_BYTES)
        self._device.write(self._address, content)
        self.direct_s.append(_timed(self._write) + _timed(self._read))
        if self._device.read(self._address + SIZE_BYTES, SIZE_BYTES) != content:
            raise DirectError("what was read is not what was written")
        if read_all(self._engine, self._handle, [self._host], 0) != SIZE_BYTES or self._host != content:
            raise DirectError("what was written is not what is in the file")
        self.by_cpu_s.append(_timed(self._write_by_cpu) + _timed(self._read_by_cpu))

    def _write(self, at: int) -> None:
        self._direct.write(self._path, [(DeviceRange(self._device, self._address + at, PART_BYTES), at)])

    def _read(self, at: int) -> None:
        self._direct.read(self._path, [(DeviceRange(self._device, self._address + SIZE_BYTES + at, PART_BYTES), at)])

    def _write_by_cpu(self, at: int) -> None:
        part = self._host[at : at + PART_BYTES]
        self._device.copy_to_host([(self._address + at, part)])
        xxhash.xxh3_128_digest(part)
        write_all(self._engine, self._handle, [part], at)

    def _read_by_cpu(self, at: int) -> None:
        part = self._host[at : at + PART_BYTES]
        read_all(self._engine, self._handle, [part], at)
        xxhash.xxh3_128_digest(part)
        self._device.copy_from_host([(self._address + SIZE_BYTES + at, part)])


def _timed(one: Callable[[int], None]) -> float:
    """Seconds that all parts take."""
    with ThreadPoolExecutor(PARTS) as threads:
        began_s = time.perf_counter()
        list(threads.map(one, range(0, SIZE_BYTES, PART_BYTES)))
        return time.perf_counter() - began_s


@contextmanager
def _made(path: str) -> Iterator[None]:
    """A file for the time of a trial."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, SIZE_BYTES)
        yield
    finally:
        os.close(fd)
        os.unlink(path)
