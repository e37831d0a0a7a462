"""NVMe through the daemon against raw O_DIRECT in the same folder, with the same bytes a round, I/O size and depth.

A round is: raw write, daemon write, raw read, daemon read, the order of raw and daemon changing each time. A write is a drain of
blocks that were just saved; a read is a load of blocks that are on NVMe only, so it includes verification and the copy to the
caller. The files of both are preallocated and have been written once before, since the first write to an extent is slower.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvtierd.bench.daemon import BenchDaemon, Tables, drain
from kvtierd.bench.measure import DISK_TARGET, GB, MIB, BenchError, Report, Row, counts_text, digits, median, spread
from kvtierd.client.client import Client
from kvtierd.model import Namespace, Tier

IO_BYTES: Final = 4 * MIB
"""What the daemon gathers for one I/O; a larger block is one I/O of its own."""
DEPTH: Final = 8
"""I/Os in flight: the daemon's default."""
CALL_TIMEOUT_S: Final = 60.0
CLIENT_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True)
class DiskPlan:
    """What to measure.

    Attributes:
        chunk_mib: sizes of a block; the first is the one that counts.
        rounds: measured rounds, after one that is not measured.
        round_bytes: bytes that each round writes and reads, on each side.
        depth: I/Os in flight.
    """

    chunk_mib: tuple[int, ...]
    rounds: int
    round_bytes: int
    depth: int = DEPTH


class RawFile:
    """A preallocated file that is read and written with O_DIRECT by a number of threads. A context manager.

    Args:
        path: made here, removed at the end.
        size_bytes: a multiple of ``io_bytes``.
        io_bytes: of one I/O, a multiple of 4 KiB.
        depth: threads.

    Raises:
        BenchError: the file system has no O_DIRECT.
    """

    def __init__(self, path: Path, size_bytes: int, io_bytes: int, depth: int) -> None:
        self._path = path
        self._offsets = range(0, size_bytes, io_bytes)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise BenchError(f"{path.parent} takes no O_DIRECT ({e.strerror}); name a folder on a local disk with --folder") from e
        os.posix_fallocate(self._fd, 0, size_bytes)
        self._threads = ThreadPoolExecutor(depth, thread_name_prefix="raw")
        # One buffer an I/O, as in the daemon, where each block lies elsewhere; anonymous maps start on a page.
        self._memory = mmap.mmap(-1, size_bytes)
        whole = np.frombuffer(self._memory, np.uint8)
        whole[:] = np.resize(np.random.default_rng(2).integers(0, 256, MIB, np.uint8), size_bytes)
        del whole
        self._views = [memoryview(self._memory)[o : o + io_bytes] for o in self._offsets]

    def write(self) -> None:
        """Write all of it."""
        self._all(os.pwritev)

    def read(self) -> None:
        """Read all of it."""
        self._all(os.preadv)

    def _all(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        def one(view: memoryview, offset: int) -> None:
            if call(self._fd, [view], offset) != len(view):
                raise BenchError("the disk moved fewer bytes than it was asked to")

        list(self._threads.map(one, self._views, self._offsets))

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        for view in self._views:
            view.release()
        self._memory.close()
        os.close(self._fd)
        self._path.unlink()


def measure(folder: Path, plan: DiskPlan, report: Report, progress: Callable[[str], None]) -> None:
    """Measure NVMe.

    Raises:
        BenchError: no O_DIRECT here, or the daemon did not move everything.
    """
    for number, mib in enumerate(plan.chunk_mib):
        progress(f"NVMe: {mib} MiB blocks, {plan.round_bytes >> 20} MiB a round")
        rates = _measure_size(folder, plan, mib)
        for part in ("write", "read"):
            raw, figure = rates[f"raw_{part}"], rates[part]
            row = Row(f"NVMe {part}, {mib} MiB blocks", "GB/s", median(figure), median(raw), DISK_TARGET)
            report.ratio(f"nvme_{part}", str(mib), row=row)
            report.put("nvme_by_mib", str(mib), f"{part}_gb_per_s", value=digits(row.figure))
            report.put("nvme_by_mib", str(mib), f"raw_{part}_gb_per_s", value=digits(median(raw)))
            report.put("quartiles", f"nvme_{part}_gb_per_s", str(mib), value=spread(figure))
            report.put("quartiles", f"disk_raw_{part}_gb_per_s", str(mib), value=spread(raw))
            if number == 0:
                report.put(f"nvme_{part}_gb_per_s", value=digits(row.figure))
                report.put(f"disk_raw_{part}_gb_per_s", value=digits(median(raw)))


def _measure_size(folder: Path, plan: DiskPlan, mib: int) -> dict[str, list[float]]:
    block_bytes = mib * MIB
    io_bytes = max(IO_BYTES, block_bytes)
    size_bytes = max(plan.round_bytes // io_bytes, 1) * io_bytes
    tables: Tables = {
        # Everything of one round stays in memory until the drain: the free target is met at all times.
        "cpu": {"capacity": max(size_bytes * 3 // 2, 4 * block_bytes), "free_target": 0.0, "ttl": "never"},
        "nvme": {"capacity": size_bytes * 3 // 2, "depth": plan.depth, "direct": "require", "reserve": 0},
    }
    namespace = Namespace(shard_bytes=(block_bytes,), model="kvtierd-bench", extra={"part": "nvme"})
    rates: dict[str, list[float]] = {"raw_write": [], "raw_read": [], "write": [], "read": []}
    with (
        RawFile(folder / "raw", size_bytes, io_bytes, plan.depth) as raw,
        BenchDaemon(folder / f"nvme-{mib}", tables) as daemon,
    ):
        daemon.start()
        with Client(namespace, daemon.address, timeout_s=CLIENT_TIMEOUT_S, name="kvtierd bench", require=True) as client:
            rounds = _Rounds(daemon, client, raw, size_bytes // block_bytes, block_bytes)
            for number in range(plan.rounds + 1):
                for name, rate in rounds.run(number).items():
                    if number:
                        rates[name].append(rate)
    return rates


class _Rounds:
    """Rounds of one block size."""

    def __init__(self, daemon: BenchDaemon, client: Client, raw: RawFile, blocks: int, block_bytes: int) -> None:
        self._daemon = daemon
        self._client = client
        self._raw = raw
        self._blocks = blocks
        self._size_bytes = blocks * block_bytes
        self._memory = np.random.default_rng(3).integers(0, 256, (blocks, block_bytes), np.uint8)

    def run(self, number: int) -> dict[str, float]:
        """One round. Returns GB/s by name."""
        keys = b"".join(b"%016x%016x" % (number, i) for i in range(self._blocks))
        saved = self._client.save(keys, self._memory)
        if saved.saved != self._blocks:
            raise BenchError(f"the daemon took {saved.saved} of {self._blocks} blocks: {counts_text(saved.rejected)}")
        rates = self._both("write", lambda: drain(self._daemon.address, CALL_TIMEOUT_S), self._raw.write, number)
        self._client.evict(keys, tier=Tier.CPU)
        rates |= self._both("read", lambda: self._load(keys), self._raw.read, number)
        self._client.evict(keys)
        return rates

    def _load(self, keys: bytes) -> float:
        began_s = time.perf_counter()
        result = self._client.load(keys, self._memory)
        took_s = time.perf_counter() - began_s
        if result.by_tier != {Tier.NVME: self._blocks}:
            why = result.reason.name if result.reason else ""
            raise BenchError(f"not all of {self._blocks} blocks came from NVMe, but {counts_text(result.by_tier)} {why}")
        return took_s

    def _both(self, name: str, figure: Callable[[], float], raw: Callable[[], None], number: int) -> dict[str, float]:
        rates: dict[str, float] = {}
        for is_raw in (True, False) if number % 2 else (False, True):
            if is_raw:
                began_s = time.perf_counter()
                raw()
                took_s = time.perf_counter() - began_s
            else:
                took_s = figure()
            rates[f"raw_{name}" if is_raw else name] = self._size_bytes / GB / took_s
        return rates
