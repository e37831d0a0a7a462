"""One run: which parts, in which order, with which sizes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtierd.bench import copies, disk, index
from kvtierd.bench.copies import CopyPlan
from kvtierd.bench.daemon import BenchDaemon, Tables, need_space, work_folder
from kvtierd.bench.disk import DiskPlan
from kvtierd.bench.index import IndexPlan
from kvtierd.bench.measure import MIB, BenchError, Report, close_environment, digits, environment
from kvtierd.memory import available_bytes

PARTS: Final = ("save", "load", "lookup", "nvme", "index")
"""Everything there is to measure, in order."""
SHARED_PARTS: Final = frozenset(["save", "load", "lookup"])
"""What can be measured on a daemon that others use too."""
SPARE_MEMORY: Final = 1 << 30
SPARE_NVME: Final = 64 * MIB


@dataclass(frozen=True)
class BenchOptions:
    """What to measure and where.

    Attributes:
        parts: some of ``PARTS``.
        address: a running daemon; empty means one of our own.
        folder: parent of the temporary folder; None means the user's cache folder.
        copies: see there.
        disk: see there.
        index: see there.
    """

    parts: frozenset[str]
    address: str
    folder: Path | None
    copies: CopyPlan
    disk: DiskPlan
    index: IndexPlan


def plan(
    *,
    full: bool = False,
    parts: frozenset[str] = frozenset(),
    address: str = "",
    folder: Path | None = None,
    index_blocks: int | None = None,
    chunk_mib: tuple[int, ...] = (),
    buffer_mib: int | None = None,
    round_mib: int | None = None,
) -> BenchOptions:
    """Options with the defaults of a short run (about a minute) or a full one (about six).

    Raises:
        BenchError: they contradict each other.
    """
    chosen = parts or (SHARED_PARTS if address else frozenset(PARTS))
    if address and chosen - SHARED_PARTS:
        names = ", ".join(sorted(chosen - SHARED_PARTS))
        raise BenchError(f"{names}: needs a daemon that nobody else uses; leave --address out, and one is started")
    sizes = chunk_mib or (2, 8, 32)
    buffer_bytes = buffer_mib * MIB if buffer_mib else copies.cold_buffer_bytes()
    if buffer_bytes < max(sizes) * MIB:
        raise BenchError(f"a buffer of {buffer_bytes >> 20} MiB holds no block of {max(sizes)} MiB; raise --buffer-mib")
    blocks = index_blocks or (1_000_000 if full else 100_000)
    if blocks <= index.SMALL_INDEX:
        raise BenchError(f"the large index needs more than {index.SMALL_INDEX} blocks")
    return BenchOptions(
        parts=chosen,
        address=address,
        folder=folder,
        copies=CopyPlan(sizes, 8 if full else 3, buffer_bytes),
        disk=DiskPlan(sizes if full else sizes[:1], 7 if full else 4, (round_mib or (1024 if full else 512)) * MIB),
        index=IndexPlan(blocks, 500 if full else 200),
    )


def run(options: BenchOptions, progress: Callable[[str], None] = lambda _text: None) -> Report:
    """Measure.

    Raises:
        BenchError: something cannot be measured; the text says what to do.
        KvtierdError: the daemon at ``address`` cannot be reached or refuses the benchmark.
    """
    report = Report()
    began_s = time.perf_counter()
    if options.address:
        report.put("environment", value=environment(None))
        if options.parts & {"save", "load"}:
            copies.measure(lambda: contextlib.nullcontext(options.address), options.copies, options.parts, report, progress)
        if "lookup" in options.parts:
            index.measure_running(options.address, options.index, report, progress)
    else:
        with work_folder(options.folder) as folder:
            report.put("environment", value=environment(folder))
            _run_own(options, folder, report, progress)
    close_environment(report.values["environment"])
    report.put("environment", "took_s", value=digits(time.perf_counter() - began_s))
    return report


def _run_own(options: BenchOptions, folder: Path, report: Report, progress: Callable[[str], None]) -> None:
    parts = options.parts
    if parts & {"save", "load"}:
        pool_bytes = options.copies.pool_bytes
        _need_memory(pool_bytes + 2 * options.copies.buffer_bytes)
        need_space(folder, SPARE_NVME)

        @contextlib.contextmanager
        def serve() -> Iterator[str]:
            tables: Tables = {"cpu": {"capacity": pool_bytes, "ttl": "never"}, "nvme": {"capacity": SPARE_NVME, "reserve": 0}}
            with BenchDaemon(folder / "copies", tables) as daemon:
                daemon.start()
                daemon.wait_prefaulted(pool_bytes)
                yield daemon.address

        copies.measure(serve, options.copies, parts, report, progress)
    if "nvme" in parts:
        _need_memory(4 * options.disk.round_bytes)
        need_space(folder, 3 * options.disk.round_bytes)
        disk.measure(folder, options.disk, report, progress)
    if parts & {"lookup", "index"}:
        index.measure(folder, options.index, parts, report, progress)


def _need_memory(size_bytes: int) -> None:
    available = available_bytes()
    if available < size_bytes + SPARE_MEMORY:
        raise BenchError(
            f"this needs {(size_bytes + SPARE_MEMORY) / 2**30:.1f} GiB of free memory, {available / 2**30:.1f} GiB are there: "
            "measure less with --buffer-mib and --round-mib"
        )
