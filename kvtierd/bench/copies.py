"""Save and load through shared memory, as a client does by default, against one thread that copies memory.

Source, target and pool are each larger than the last-level cache and are walked through in turn, so that neither side finds its
bytes in a cache. The copy that serves as limit moves as many bytes in pieces of the same size, right before or after.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.bench.measure import (
    COPY_TARGET,
    GB,
    MIB,
    BenchError,
    Report,
    Row,
    counts_text,
    digits,
    last_level_cache_bytes,
    median,
    spread,
)
from kvtierd.client.client import Client
from kvtierd.client.copying import DEFAULT_COPY_THREADS
from kvtierd.model import KEY_BYTES, Namespace

REQUEST_BYTES: Final = 64 * MIB
FEW_CHUNKS: Final = 2
FEW_REQUESTS: Final = 20
"""Requests of two chunks in one pass."""
CALL_TIMEOUT_S: Final = 30.0
SPACE_WAIT_S: Final = 5.0
MAX_BUFFER_BYTES: Final = 2 << 30

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class CopyPlan:
    """What to measure.

    Attributes:
        chunk_mib: sizes of a block.
        passes: measured passes over all buffers, after one that is not measured.
        buffer_bytes: bytes of the source and of the target, multiples of ``REQUEST_BYTES`` at best.
    """

    chunk_mib: tuple[int, ...]
    passes: int
    buffer_bytes: int

    @property
    def pool_bytes(self) -> int:
        """CPU tier that holds one pass without any demotion."""
        return 2 * self.buffer_bytes


def cold_buffer_bytes() -> int:
    """Bytes of a buffer that does not fit in the last-level cache: a quarter more than it, from 512 MiB to 2 GiB."""
    wanted = last_level_cache_bytes() * 5 // 4
    return min(max(512 * MIB, -(-wanted // REQUEST_BYTES) * REQUEST_BYTES), MAX_BUFFER_BYTES)


@dataclass
class _Samples:
    """Rates in GB/s of a figure and its limit, taken in turn."""

    figure: list[float] = field(default_factory=list)
    limit: list[float] = field(default_factory=list)

    def take(self, size_bytes: int, figure: Callable[[], None], limit: Callable[[], None], *, limit_first: bool) -> None:
        """Time both, in the order asked for."""
        for is_limit in (True, False) if limit_first else (False, True):
            began_s = time.perf_counter()
            (limit if is_limit else figure)()
            took_s = time.perf_counter() - began_s
            (self.limit if is_limit else self.figure).append(size_bytes / GB / took_s)


def measure(
    serve: Callable[[], AbstractContextManager[str]],
    plan: CopyPlan,
    parts: frozenset[str],
    report: Report,
    progress: Callable[[str], None],
) -> None:
    """Measure "save" and "load" as far as ``parts`` names them.

    Args:
        serve: gives the address of a daemon, called once a block size: memory never goes from one namespace to another while
            it is measured.
        plan: sizes.
        parts: some of "save" and "load".
        report: gets the results.
        progress: told what is going on.

    Raises:
        BenchError: the daemon refused blocks, or gave back other bytes.
    """
    source = _filled(plan.buffer_bytes)
    target = np.ones(plan.buffer_bytes, np.uint8)
    report.put("copy_threads", value=DEFAULT_COPY_THREADS)
    memcpy: dict[int, list[float]] = {}
    for mib in plan.chunk_mib:
        with serve() as address:
            for few in (False, True):
                progress(f"save and load: {mib} MiB blocks, {'2 blocks' if few else '64 MiB'} a request")
                samples = _measure_size(address, plan, mib, source, target, few=few)
                if not few:
                    memcpy[mib] = samples["save"].limit + samples["load"].limit
                for part in sorted(parts & samples.keys(), reverse=True):
                    _report(report, part, mib, samples[part], few=few)
    for mib, rates in memcpy.items():
        report.put("memcpy_gb_per_s", str(mib), value=digits(median(rates)))


def _filled(size_bytes: int) -> Bytes:
    """A buffer whose every block differs."""
    pattern = np.random.default_rng(1).integers(0, 256, MIB, np.uint8)
    buffer = np.empty(size_bytes, np.uint8)
    for number, start in enumerate(range(0, size_bytes, MIB)):
        part = buffer[start : start + MIB]
        part[:] = pattern[: len(part)]
        part[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return buffer


def _measure_size(address: str, plan: CopyPlan, mib: int, source: Bytes, target: Bytes, *, few: bool) -> dict[str, _Samples]:
    block_bytes = mib * MIB
    sources, targets = (b[: len(b) // block_bytes * block_bytes].reshape(-1, block_bytes) for b in (source, target))
    each = min(FEW_CHUNKS if few else max(1, REQUEST_BYTES // block_bytes), len(sources))
    requests = len(sources) // each
    # Few requests are spread over the whole buffers, so that they are as cold as many.
    chosen = np.linspace(0, requests - 1, min(FEW_REQUESTS, requests)).astype(int) if few else range(requests)
    starts = [int(i) * each for i in chosen]
    namespace = Namespace(shard_bytes=(block_bytes,), model="kvtierd-bench", extra={"part": "copies"})
    samples = {"save": _Samples(), "load": _Samples()}
    with Client(namespace, address, timeout_s=CALL_TIMEOUT_S, name="kvtierd bench", require=True) as client:
        _Pass(client, 0, starts, each, sources, targets).check()
        client.evict()
        for number in range(1, plan.passes + 1):
            _Pass(client, number, starts, each, sources, targets).run(samples)
            client.evict()
    return samples


class _Pass:
    """One walk over the buffers: everything saved, then everything loaded.

    Args:
        client: of a namespace of one shard.
        number: makes the keys new.
        starts: first block of each request.
        each: blocks of a request.
        sources: one row a block.
        targets: one row a block.
    """

    def __init__(self, client: Client, number: int, starts: Sequence[int], each: int, sources: Bytes, targets: Bytes) -> None:
        self._client = client
        self._starts = starts
        self._each = each
        self._sources = sources
        self._targets = targets
        self._keys = {start: _keys(number, start, each) for start in starts}

    def run(self, samples: dict[str, _Samples]) -> None:
        """Measure."""
        size_bytes = self._each * self._sources.shape[1]
        for part, call in (("save", self._save), ("load", self._load)):
            for turn, start in enumerate(self._starts):
                # The limit works half the buffers away, where the figure has not been for half a pass.
                far = self._starts[(turn + len(self._starts) // 2) % len(self._starts)]
                samples[part].take(size_bytes, partial(call, start), partial(self._copy, far), limit_first=bool(turn % 2))

    def check(self) -> None:
        """Do the same once without a clock: maps and faults in what the measured passes use, and compares bytes."""
        for start in self._starts:
            self._save(start, wait_s=SPACE_WAIT_S)  # memory of the namespace before this one may have to come back first
        self._targets[:] = 0
        for start in self._starts:
            self._load(start)
            rows = slice(start, start + self._each)
            if not np.array_equal(self._targets[rows], self._sources[rows]):
                raise BenchError(f"blocks from {start} on came back with other bytes than were saved")

    def _save(self, start: int, wait_s: float = 0.0) -> None:
        result = self._client.save(self._keys[start], self._sources[start : start + self._each], wait_s=wait_s)
        if result.saved != self._each:
            raise BenchError(f"the daemon took {result.saved} of {self._each} blocks: {counts_text(result.rejected)}")

    def _load(self, start: int) -> None:
        result = self._client.load(self._keys[start], self._targets[start : start + self._each])
        if result.loaded != self._each:
            raise BenchError(f"the daemon gave {result.loaded} of {self._each} blocks: {result.reason and result.reason.name}")

    def _copy(self, start: int) -> None:
        for i in range(start, start + self._each):
            np.copyto(self._targets[i], self._sources[i])


def _keys(number: int, start: int, count: int) -> bytes:
    return b"".join(b"%08x%08x" % (number, start + i) * (KEY_BYTES // 16) for i in range(count))


def _report(report: Report, part: str, mib: int, samples: _Samples, *, few: bool) -> None:
    name = f"{part}_2_chunks" if few else part
    figure, limit = median(samples.figure), median(samples.limit)
    report.put(f"{name}_gb_per_s", str(mib), value=digits(figure))
    report.put("quartiles", f"{name}_gb_per_s", str(mib), value=spread(samples.figure))
    report.put("quartiles", f"{name}_memcpy_gb_per_s", str(mib), value=spread(samples.limit))
    blocks = f"2 x {mib} MiB" if few else f"64 MiB of {mib} MiB blocks"
    # Two small blocks a request measure the round trip as well: shown, but without a target.
    report.ratio(name, str(mib), row=Row(f"{part}, {blocks}", "GB/s", figure, limit, None if few else COPY_TARGET))
