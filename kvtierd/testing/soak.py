"""``python -m kvtierd.testing.soak --minutes 30``: does a daemon that works for long keep to its memory, descriptors and threads?

Threads with a client each save ever new blocks, load, prefetch, pin and evict them, for tenants and namespaces in turn, and leave
and come back. What the daemon process holds is looked at again and again. The first third warms up; from then on descriptors,
threads and mappings must not become more, and memory must not grow with the blocks that have come and gone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtierd.client import Client
from kvtierd.lifetime import end_in_order, scratch_folder
from kvtierd.model import Namespace
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as pb

THREADS: Final = 3
THREADS_TO_COME: Final = 6
"""A pool of threads may not have started all of them when the first third is over."""
BLOCKS: Final = 24
"""Of one save."""
ROUNDS_A_SESSION: Final = 60
SIZES: Final = ((4096,), (20_000, 4096), (65_536,))
GROWTH_BYTES: Final = 4 << 20
"""Memory may differ by so much, whatever the number of blocks: the allocator's doing."""
GROWTH_BYTES_A_BLOCK: Final = 8.0
"""What one block more or less may cost at the most; an entry of the index takes several hundred."""


@dataclass(frozen=True)
class Sample:
    """What a process holds at one moment."""

    at_s: float
    blocks: int
    """Saved so far."""
    memory_bytes: int
    """Anonymous memory; that of blocks is not."""
    descriptors: int
    threads: int
    mappings: int


def sample(pid: int, blocks: int, began_s: float) -> Sample:
    """Look at a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    memory = int(status["RssAnon"].split()[0]) << 10
    maps = len(Path(f"/proc/{pid}/maps").read_text().splitlines())
    return Sample(
        time.monotonic() - began_s, blocks, memory, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(status["Threads"]), maps
    )


class Worker(threading.Thread):
    """One engine after the other."""

    def __init__(self, address: str, seed: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._rng = random.Random(seed)
        self.stop = threading.Event()
        self.blocks = 0
        self.rounds = 0
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Until told to stop."""
        try:
            while not self.stop.is_set():
                self._session()
        except BaseException as e:
            self.problem = e

    def _session(self) -> None:
        rng = self._rng
        shards = rng.choice(SIZES)
        space = Namespace(shard_bytes=shards, model=f"model {rng.randrange(3)}")
        with Client(space, self._address, f"tenant-{rng.randrange(8)}", timeout_s=20.0, require=True) as client:
            before: list[bytes] = []
            for _ in range(ROUNDS_A_SESSION):
                if self.stop.is_set():
                    return
                before = self._round(client, shards, before)
                self.rounds += 1

    def _round(self, client: Client, shards: tuple[int, ...], before: list[bytes]) -> list[bytes]:
        rng = self._rng
        keys = [rng.randbytes(32) for _ in range(BLOCKS)]
        data = [[key * (size // 32) for size in shards] for key in keys]
        saved = client.save(keys, data, wait_s=0.5, ttl_s=rng.choice([None, 2.0]))
        self.blocks += saved.saved
        client.prefetch(before[:8], deadline_s=0.2)
        some = [*keys[:8], *before[:8]]
        out = [[bytearray(size) for size in shards] for _ in some]
        for index in client.load(some, out, each=True).indexes:
            if any(bytes(got) != some[index] * (size // 32) for got, size in zip(out[index], shards, strict=True)):
                raise AssertionError(f"wrong bytes for key {some[index].hex()}")
        pin = client.pin(keys[:2], expires_s=1.0)
        client.load_bytes(keys[:2])
        pin.unpin()
        if rng.random() < 0.7:
            client.evict(before)
        return keys


class Soak:
    """A daemon, its load, and the samples."""

    def __init__(self, folder: Path, seed: int) -> None:
        config: dict[str, dict[str, Any]] = {
            "cpu": {"capacity": "24MiB", "ttl": 1.0},
            "nvme": {"capacity": "96MiB", "snapshot_journal": "64KiB"},
        }
        self.daemon = DaemonProcess(folder, config | {"server": {"metrics": ""}, "log": {"level": "warning"}}, tie=True).start()
        self.workers = [Worker(self.daemon.address, f"{seed}/{n}") for n in range(THREADS)]
        self.samples: list[Sample] = []
        self._began_s = time.monotonic()

    @property
    def blocks(self) -> int:
        """Blocks saved so far."""
        return sum(worker.blocks for worker in self.workers)

    @property
    def rounds(self) -> int:
        """Rounds of all workers so far."""
        return sum(worker.rounds for worker in self.workers)

    def start(self) -> None:
        """Begin the load."""
        for worker in self.workers:
            worker.start()

    def look(self) -> Sample:
        """Take a sample, and have the daemon tell all it can. Raises AssertionError when a worker has failed."""
        for worker in self.workers:
            if worker.problem is not None:
                raise AssertionError(f"a client failed: {worker.problem!r}") from worker.problem
        with self.daemon.admin() as stub:
            stub.GetMetrics(pb.GetMetricsRequest(), timeout=30)
            stub.ListBlocks(pb.ListBlocksRequest(page_size=100), timeout=30)
        self.daemon.status()
        self.samples.append(sample(self.daemon.pid, self.blocks, self._began_s))
        return self.samples[-1]

    def end(self) -> None:
        """End the load; nothing may be left of it. Raises AssertionError."""
        for worker in self.workers:
            worker.stop.set()
        for worker in self.workers:
            worker.join(60)
        with self.daemon.admin() as stub:
            stub.EvictBlocks(pb.EvictBlocksRequest(all=True), timeout=60)
        until_s = time.monotonic() + 30
        while True:
            status = self.daemon.status()
            if not status.sessions and not any(t.used_bytes or t.copies for t in status.tiers) and not status.blocks:
                break
            assert time.monotonic() < until_s, f"something is left: {status}"
            time.sleep(0.1)
        assert self.daemon.stop() == 0
        assert "Traceback" not in self.daemon.log(), self.daemon.log()[-4000:]

    def close(self) -> None:
        """Leave no process behind."""
        for worker in self.workers:
            worker.stop.set()
        self.daemon.kill()


def verdict(samples: list[Sample], extents_to_come: int = 0) -> list[str]:
    """What grew after the first third of the samples; empty when nothing did.

    Args:
        samples: at least 9.
        extents_to_come: that the daemon may not have made yet when the first third is over.
    """
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    found = []
    for name in ("descriptors", "threads", "mappings"):
        before, after = (max(getattr(s, name) for s in part) for part in (middle, last))
        # Extents come and go, each with a descriptor and a mapping; pools start their threads when they are needed first.
        if after > before + max(before // 10, THREADS_TO_COME if name == "threads" else extents_to_come, 4):
            found.append(f"{name}: at most {before}, later {after}")
    grown = statistics.median(s.memory_bytes for s in last) - statistics.median(s.memory_bytes for s in middle)
    blocks = statistics.median(s.blocks for s in last) - statistics.median(s.blocks for s in middle)
    if grown > GROWTH_BYTES + GROWTH_BYTES_A_BLOCK * blocks:
        found.append(f"memory: {grown / 2**20:.1f} MiB more while {blocks:.0f} blocks came and went")
    return found


def show(samples: list[Sample]) -> str:
    """Some of the samples as a table."""
    lines = ["minutes | blocks saved | memory, MiB | descriptors | threads | mappings", "---: | ---: | ---: | ---: | ---: | ---:"]
    step = max(len(samples) // 12, 1)
    lines += [
        f"{s.at_s / 60:.1f} | {s.blocks} | {s.memory_bytes / 2**20:.1f} | {s.descriptors} | {s.threads} | {s.mappings}"
        for s in [*samples[: len(samples) - 1 : step], samples[-1]]
    ]
    return "\n".join(lines)


def main() -> int:
    """Run and report. Returns the exit status: 1 when anything grew."""
    parser = argparse.ArgumentParser(prog="python -m kvtierd.testing.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of the load (default 1)")
    args = parser.parse_args()
    end_in_order()
    with scratch_folder(Path(tempfile.gettempdir()), "kvtierd-soak-") as folder:
        soak = Soak(folder, args.seed)
        try:
            soak.start()
            until_s = time.monotonic() + 60 * args.minutes
            while time.monotonic() < until_s:
                time.sleep(min(max(until_s - time.monotonic(), 0), max(args.minutes * 60 / 120, 0.5)))
                soak.look()
            samples = soak.samples
            soak.end()
        finally:
            soak.close()
    print(show(samples))
    found = verdict(samples)
    print("\n".join(found) or "nothing grew")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
