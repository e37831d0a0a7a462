"""What the index costs: lookups, the price of one block, memory, and the time to come back after a crash.

Blocks have one page, so that their number is what counts and not their bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.bench.daemon import BenchDaemon, Tables, drain, need_space, status
from kvtierd.bench.measure import MIB, BenchError, Report, Row, counts_text, digits, median, percentile
from kvtierd.client.client import Client
from kvtierd.model import KEY_BYTES, PAGE_BYTES, Namespace, Tier

SMALL_INDEX: Final = 1000
LOOKUP_KEYS: Final = (512, 8192)
COST_BATCH: Final = 512
COST_BATCHES: Final = 12
MAX_BATCH: Final = 4096
CALL_TIMEOUT_S: Final = 30.0
SPACE_WAIT_S: Final = 5.0
DRAIN_TIMEOUT_S: Final = 240.0
MIN_CPU_BYTES: Final = 64 * MIB
MAX_CPU_BYTES: Final = 1 << 30
CPU_SHARE: Final = 8
"""The CPU tier holds one in this many blocks, as where NVMe is the larger tier."""


@dataclass(frozen=True)
class IndexPlan:
    """What to measure.

    Attributes:
        blocks: of the large index.
        repeats: lookups of each length.
    """

    blocks: int
    repeats: int

    @property
    def cpu_bytes(self) -> int:
        """Capacity of the CPU tier."""
        return min(max(self.blocks // CPU_SHARE * PAGE_BYTES, MIN_CPU_BYTES), MAX_CPU_BYTES)

    @property
    def nvme_bytes(self) -> int:
        """Capacity of the NVMe tier: a page of header and a page of payload a block, and room for what is saved later."""
        return (self.blocks + COST_BATCH * COST_BATCHES * 2) * 2 * PAGE_BYTES * 9 // 8 + 64 * MIB


def make_keys(first: int, count: int) -> bytes:
    """Packed keys for numbers from ``first`` on: as uneven as real hashes, so that they collide in a table as those do.

    A mere multiple of the number would not do: such keys spread evenly, and flatter whatever index looks them up.
    """
    numbers = np.arange(first, first + count, dtype=np.uint64)
    words = KEY_BYTES // 8
    mixed: NDArray[np.uint64] = np.add.outer(numbers * np.uint64(words), np.arange(words, dtype=np.uint64))
    mixed *= np.uint64(0x9E37_79B9_7F4A_7C15)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB), (31, 1)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return mixed.tobytes()


def put_blocks(client: Client, first: int, count: int, batch: int) -> None:
    """Save blocks without writing anything into them, as fast as the daemon takes them.

    Raises:
        BenchError: it takes no more.
    """
    for start in range(first, first + count, batch):
        keys = make_keys(start, min(batch, first + count - start))
        while keys:
            with client.reserve(keys, timeout_s=CALL_TIMEOUT_S, wait_s=SPACE_WAIT_S) as reservation:
                granted = set(reservation.granted)
                if reservation.commit(timeout_s=CALL_TIMEOUT_S) != len(granted) or not granted:
                    raise BenchError(f"the daemon takes no more blocks: {counts_text(reservation.rejected)}")
            keys = b"".join(keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in range(len(keys) // KEY_BYTES) if i not in granted)


@dataclass(frozen=True)
class LookupTimes:
    """Milliseconds of a lookup."""

    p50: float
    p99: float

    def as_dict(self) -> dict[str, float]:
        """For output."""
        return {"p50": digits(self.p50), "p99": digits(self.p99)}


def time_lookups(client: Client, blocks: int, keys_each: int, repeats: int, *, scattered: bool = False) -> LookupTimes:
    """Time lookups of keys that are all held.

    Args:
        client: of the index.
        blocks: how many there are.
        keys_each: keys of one lookup; more than there are come round again.
        repeats: lookups.
        scattered: keys from all over the index, which no cache of the CPU holds, instead of a run that was saved together.

    Raises:
        BenchError: some were not held.
    """
    rng = np.random.default_rng(keys_each)
    held = np.frombuffer(make_keys(0, blocks), np.uint8).reshape(-1, KEY_BYTES)
    took_ms = []
    for _ in range(repeats):
        chosen = rng.integers(0, blocks, keys_each) if scattered else (rng.integers(0, blocks) + np.arange(keys_each)) % blocks
        keys = held[chosen].tobytes()
        began_s = time.perf_counter()
        found = client.lookup(keys)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
        if found.held != keys_each:
            raise BenchError(f"a lookup found {found.held} of {keys_each} keys: {found.reason and found.reason.name}")
    return LookupTimes(percentile(took_ms, 50), percentile(took_ms, 99))


def time_costs(client: Client, first: int) -> dict[str, float]:
    """Microseconds that one block costs in a call of ``COST_BATCH`` blocks, by kind of call, from the client's side.

    "save" is Save and Commit without any copy, "load" is Load and Release without any copy.

    Raises:
        BenchError: the daemon refused some.
    """
    took: dict[str, list[float]] = {"save": [], "lookup": [], "load": [], "evict": []}

    def timed(name: str, call: Callable[[], int]) -> None:
        began_s = time.perf_counter()
        done = call()
        took[name].append((time.perf_counter() - began_s) / COST_BATCH * 1e6)
        if done != COST_BATCH:
            raise BenchError(f"{name} served {done} of {COST_BATCH} blocks")

    def save(keys: bytes) -> int:
        with client.reserve(keys) as reservation:
            return reservation.commit(timeout_s=CALL_TIMEOUT_S)

    def load(keys: bytes) -> int:
        with client.fetch(keys) as fetch:
            count = 0
            while fetch.next_index() is not None:
                count += 1
            return count

    for number in range(COST_BATCHES):
        keys = make_keys(first + number * COST_BATCH, COST_BATCH)
        timed("save", lambda keys=keys: save(keys))  # type: ignore[misc]
        timed("lookup", lambda keys=keys: client.lookup(keys).held)  # type: ignore[misc]
        timed("load", lambda keys=keys: load(keys))  # type: ignore[misc]
        timed("evict", lambda keys=keys: client.evict(keys))  # type: ignore[misc]
    return {name: median(values) for name, values in took.items()}


def open_client(address: str) -> Client:
    """A client whose blocks have one page. Raises DaemonUnavailableError."""
    namespace = Namespace(shard_bytes=(PAGE_BYTES,), model="kvtierd-bench", extra={"part": "index"})
    return Client(namespace, address, timeout_s=CALL_TIMEOUT_S, name="kvtierd bench", require=True)


def measure_running(address: str, plan: IndexPlan, report: Report, progress: Callable[[str], None]) -> None:
    """Measure lookups on a daemon that runs already, with an index of ``SMALL_INDEX`` blocks of its own besides what is there."""
    progress(f"lookup: {SMALL_INDEX:,} blocks in the index")
    with open_client(address) as client:
        try:
            put_blocks(client, 0, SMALL_INDEX, COST_BATCH)
            for keys_each in LOOKUP_KEYS:
                times = time_lookups(client, SMALL_INDEX, keys_each, plan.repeats)
                report.put("lookup_ms", str(keys_each), value=times.as_dict())
                report.rows.append(Row(f"lookup of {keys_each:,} keys, p50", "ms", times.p50))
        finally:
            client.evict()


def measure(folder: Path, plan: IndexPlan, parts: frozenset[str], report: Report, progress: Callable[[str], None]) -> None:
    """Measure "lookup" and "index" as far as ``parts`` names them.

    Raises:
        BenchError: the daemon refused or lost blocks.
    """
    need_space(folder, plan.nvme_bytes)
    tables: Tables = {
        "cpu": {"capacity": plan.cpu_bytes, "ttl": "never"},
        "nvme": {"capacity": plan.nvme_bytes, "reserve": 0},
    }
    with BenchDaemon(folder / "index", tables) as daemon:
        start_s = daemon.start()
        daemon.wait_prefaulted(plan.cpu_bytes)
        with open_client(daemon.address) as client:
            _round_trip(client, report)
            progress(f"index: {SMALL_INDEX:,} blocks")
            put_blocks(client, 0, SMALL_INDEX, COST_BATCH)
            small = {n: time_lookups(client, SMALL_INDEX, n, plan.repeats) for n in LOOKUP_KEYS}
            small_costs = time_costs(client, 1 << 40)
            before_bytes = daemon.status_bytes("RssAnon")
            progress(f"index: {plan.blocks:,} blocks")
            batch = min(MAX_BATCH, plan.cpu_bytes // PAGE_BYTES // 8)
            began_s = time.perf_counter()
            put_blocks(client, SMALL_INDEX, plan.blocks - SMALL_INDEX, batch)
            drain(daemon.address, DRAIN_TIMEOUT_S)
            report.put("index_fill_s", value=digits(time.perf_counter() - began_s))
            grown_bytes = daemon.status_bytes("RssAnon") - before_bytes
            client.evict(tier=Tier.CPU)
            large = {n: time_lookups(client, plan.blocks, n, plan.repeats) for n in LOOKUP_KEYS}
            for n in LOOKUP_KEYS if "lookup" in parts else ():
                times = time_lookups(client, plan.blocks, n, plan.repeats, scattered=True)
                report.put("lookup_scattered_ms", str(n), value=times.as_dict())
            large_costs = time_costs(client, 1 << 41)
            held = status(daemon.address).blocks
        if held != plan.blocks:
            raise BenchError(f"the index holds {held} blocks instead of {plan.blocks}")
        report.put("index_blocks", value=plan.blocks)
        if "lookup" in parts:
            _report_lookups(report, small, large, small_costs, large_costs)
        if "index" in parts:
            per_block = grown_bytes / max(plan.blocks - SMALL_INDEX, 1)
            report.put("index_bytes_per_block", value=digits(per_block))
            report.rows.append(Row("memory of the daemon per block", "bytes", per_block))
            progress("index: recovery after SIGKILL")
            _recover(daemon, plan, report, start_s)


def _round_trip(client: Client, report: Report) -> None:
    key = make_keys(1 << 42, 1)
    took_ms = []
    for _ in range(200):
        began_s = time.perf_counter()
        client.lookup(key)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    report.put("round_trip_ms", value=digits(median(took_ms)))
    report.rows.append(Row("round trip (lookup of one key), p50", "ms", median(took_ms)))


def _report_lookups(
    report: Report,
    small: dict[int, LookupTimes],
    large: dict[int, LookupTimes],
    small_costs: dict[str, float],
    large_costs: dict[str, float],
) -> None:
    for keys_each in LOOKUP_KEYS:
        for name, before, after in (
            ("p50", small[keys_each].p50, large[keys_each].p50),
            ("p99", small[keys_each].p99, large[keys_each].p99),
        ):
            report.rows.append(Row(f"lookup of {keys_each:,} keys, {name}", "ms", after, before))
        report.put("lookup_ms", str(keys_each), value=large[keys_each].as_dict())
        scattered = report.values["lookup_scattered_ms"][str(keys_each)]["p50"]
        report.rows.append(Row(f"lookup of {keys_each:,} scattered keys, p50", "ms", scattered))
        report.put("lookup_small_index_ms", str(keys_each), value=small[keys_each].as_dict())
    for name, before in small_costs.items():
        after = large_costs[name]
        report.rows.append(Row(f"{name}, per block in calls of {COST_BATCH}", "us", after, before))
        report.put("block_cost_us", name, value=digits(after))
        report.put("block_cost_small_index_us", name, value=digits(before))
        report.put("ratios", "index_slowdown", name, value=digits(after / before))


def _recover(daemon: BenchDaemon, plan: IndexPlan, report: Report, start_s: float) -> None:
    daemon.kill()
    took_s = daemon.start()
    held = status(daemon.address).blocks
    if held != plan.blocks:
        raise BenchError(f"{held} of {plan.blocks} blocks came back after a crash")
    report.put("recovery_s", value=digits(took_s))
    report.put("start_s", value=digits(start_s))
    report.rows.append(Row(f"restart after SIGKILL with {plan.blocks:,} blocks", "s", took_s, start_s))
