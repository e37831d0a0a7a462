"""Large hits on NVMe beside raw O_DIRECT reads of the same files: with CPU memory in huge pages, and without.

    .venv/bin/python loadtest/nvme_hits.py FOLDER

Each round loads the same blocks, which are on NVMe only, and reads the files that hold them with as many threads as the daemon has
I/Os in flight, into huge pages; which of the two comes first changes each time. A hit ends when all lies verified in shared memory,
from where an engine copies it to its GPU. One I/O is one block and its header in both. How much the disk was asked for at a time
comes with it: where pages lie scattered, a disk that takes few pieces a request gets smaller ones.
Prints the table of results/nvme_hits.md.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtierd.bench.daemon import BenchDaemon, drain, need_space, work_folder
from kvtierd.client.client import Client
from kvtierd.lifetime import end_in_order
from kvtierd.model import Namespace, Tier

MIB = 1 << 20
HEADER_BYTES = 4096
DEPTH = 8
TIMEOUT_S = 120.0


class DiskReads:
    """Reads that reached the device of a folder since the last look, from the kernel's counters."""

    def __init__(self, folder: Path) -> None:
        device = os.stat(folder).st_dev
        self._path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
        self._last = self._now()

    def _now(self) -> tuple[int, int]:
        try:
            fields = self._path.read_text().split()
        except OSError:  # a file system without a device of its own
            return 0, 0
        return int(fields[0]), int(fields[2]) * 512

    def kib_each(self) -> float:
        """KiB of one request, on average; 0 where it is not known."""
        last, self._last = self._last, self._now()
        requests = self._last[0] - last[0]
        return (self._last[1] - last[1]) / requests / 1024 if requests else 0.0


class RawReads:
    """The segment files of a daemon, read slot by slot with O_DIRECT."""

    def __init__(self, folder: Path, io_bytes: int, count: int) -> None:
        found = sorted((int(path.name.split("-")[1]), path) for path in folder.rglob("segment-*.kv"))
        self._files = [os.open(path, os.O_RDONLY | os.O_DIRECT) for _, path in found]
        places = [(fd, at) for fd in self._files for at in range(0, os.fstat(fd).st_size - io_bytes + 1, io_bytes)]
        assert len(places) >= count, "the files hold the blocks"
        memory = mmap.mmap(-1, io_bytes * count)
        memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(memory)
        self._reads = [(fd, at, whole[i * io_bytes : (i + 1) * io_bytes]) for i, (fd, at) in enumerate(places[:count])]
        self._threads = ThreadPoolExecutor(DEPTH)
        self.run()  # faults the memory in

    def run(self) -> float:
        """Seconds of all reads."""
        began_s = time.perf_counter()
        for read, wanted in self._threads.map(lambda r: (os.preadv(r[0], [r[2]], r[1]), len(r[2])), self._reads):
            assert read == wanted
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._threads.shutdown()
        for fd in self._files:
            os.close(fd)


def load(client: Client, keys: bytes, blocks: npt.NDArray[np.uint8]) -> float:
    """Seconds until all blocks, read from NVMe only, lay verified in shared memory."""
    began_s = time.perf_counter()
    with client.fetch(keys) as fetch:
        there = [index for index, _ in fetch]
        took_s = time.perf_counter() - began_s
        assert len(there) == len(blocks), fetch.reason
        assert set(fetch.tiers.values()) == {Tier.NVME}
        assert all(np.array_equal(np.frombuffer(fetch.views(i)[0], np.uint8), blocks[i]) for i in range(0, len(blocks), 16))
    return took_s


def measure(folder: Path, block_bytes: int, count: int, rounds: int, huge_pages: bool) -> None:
    size_bytes = block_bytes * count
    memory_bytes = size_bytes * 9 // 4  # one session may hold half of it
    tables = {
        "cpu": {"capacity": memory_bytes, "free_target": 0.0, "ttl": "never", "huge_pages": huge_pages},
        "nvme": {"capacity": size_bytes * 3 // 2, "depth": DEPTH, "direct": "require", "reserve": 0},
    }
    namespace = Namespace(shard_bytes=(block_bytes,), model="kvtierd-nvme-hits")
    keys = b"".join(b"%032x" % i for i in range(count))
    blocks = np.random.default_rng(3).integers(0, 256, (count, block_bytes), np.uint8)
    ratios, figures = [], []
    with BenchDaemon(folder / f"huge-{huge_pages}", tables) as daemon:
        daemon.start()
        daemon.wait_prefaulted(memory_bytes)
        with Client(namespace, daemon.address, timeout_s=TIMEOUT_S, name="nvme hits", require=True) as client:
            assert client.save(keys, blocks).saved == count
            drain(daemon.address, TIMEOUT_S)
            raw = RawReads(folder, block_bytes + HEADER_BYTES, count)
            disk = DiskReads(folder)
            for number in range(rounds + 1):
                client.evict(keys, tier=Tier.CPU)
                took: dict[str, float] = {}
                asked: dict[str, float] = {}
                for which in ("raw", "hit") if number % 2 else ("hit", "raw"):
                    disk.kib_each()
                    if which == "raw":
                        took[which] = raw.run()
                    else:
                        took[which] = load(client, keys, blocks)
                    asked[which] = disk.kib_each()
                if number:  # the first round is not measured
                    ratios.append(took["raw"] / took["hit"])
                    figures.append((size_bytes / 1e9 / took["raw"], size_bytes / 1e9 / took["hit"], asked["raw"], asked["hit"]))
            raw.close()
    read, hit, raw_kib, hit_kib = (statistics.median(column) for column in zip(*figures, strict=True))
    print(
        f"| {'huge' if huge_pages else 'as they come'} | {read:.2f} | {hit:.2f} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}–{max(ratios):.2f}) | {raw_kib:.0f} | {hit_kib:.0f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--block-mib", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    end_in_order()
    with work_folder(args.folder) as folder:
        need_space(folder, 3 * args.blocks * args.block_mib * MIB)
        print("| pages of CPU memory | raw, GB/s | hit, GB/s | hit / raw (rounds) | KiB a request, raw | hit |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for huge_pages in (True, False):
            measure(folder, args.block_mib * MIB, args.blocks, args.rounds, huge_pages)


if __name__ == "__main__":
    main()
