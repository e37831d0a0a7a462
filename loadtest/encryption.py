"""What encryption at rest costs: the NVMe store plain and with a key, in turn, in one folder, with the same blocks and threads.

    .venv/bin/python loadtest/encryption.py FOLDER

Each round writes and reads the same blocks with both; files were written once before, since the first write to an extent is slower.
The processor's time is that of all threads; what else the machine does changes it less than the speed. The speed of encryption
alone, in memory and on one thread, comes with it. Prints the tables of results/encryption.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtierd.config import NvmeConfig
from kvtierd.lifetime import end_in_order, scratch_folder
from kvtierd.model import Namespace, Result, slot_id
from kvtierd.tiers.base import BlockIo, RealmInfo
from kvtierd.tiers.encryption import TAG_BYTES, SlotCipher
from kvtierd.tiers.nvme import NvmeStore

MIB = 1 << 20
HEADER_BYTES = 4096


class Side:
    """One store and its blocks."""

    def __init__(self, folder: Path, size: int, count: int, threads: int, key: Path | None) -> None:
        config = NvmeConfig(capacity=2 * count * (size + HEADER_BYTES) + 64 * MIB, folders=[folder], encryption_key_file=key)
        self.store = NvmeStore.open(config)
        self.store.recover()
        self.store.register_realm(RealmInfo(1, "bench", Namespace((size,))))
        self.store.add_extent(1, size + HEADER_BYTES, count)
        self._memory = [memoryview(mmap.mmap(-1, size)) for _ in range(count)]
        for view in self._memory:
            view[:] = os.urandom(MIB // 16) * (size // (MIB // 16))
        self._threads = ThreadPoolExecutor(threads)
        self._size, self._count, self._generation = size, count, 0

    def _all(self, work: Callable[[list[BlockIo]], list[Result]]) -> tuple[float, float]:
        """GB/s, and seconds of the processor for one GB, of all blocks, in jobs of about 4 MiB as the daemon has them."""
        at_once = max(4 * MIB // self._size, 1)
        blocks = [
            BlockIo(1, n.to_bytes(32), self._generation * self._count + n + 1, (slot_id(1, n),), [view])
            for n, view in enumerate(self._memory)
        ]
        jobs = [blocks[i : i + at_once] for i in range(0, self._count, at_once)]
        began, used = time.perf_counter(), time.process_time()
        for results in self._threads.map(work, jobs):
            assert set(results) == {Result.OK}
        moved_gb = self._count * self._size / 1e9
        return moved_gb / (time.perf_counter() - began), (time.process_time() - used) / moved_gb

    def write(self) -> tuple[float, float]:
        self._generation += 1
        return self._all(self.store.write)

    def read(self) -> tuple[float, float]:
        return self._all(self.store.read)

    def close(self) -> None:
        self._threads.shutdown()
        self.store.close()


def alone(size: int) -> tuple[float, float]:
    """GB/s of encryption and decryption on one thread, in memory."""
    cipher = SlotCipher(os.urandom(32))
    plain, into = memoryview(bytearray(os.urandom(size))), memoryview(bytearray(size + TAG_BYTES))
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(max(256 * MIB // size // 8, 40)):
        at = time.perf_counter()
        seal = cipher.encrypt(plain, b"", into)
        took[0].append(time.perf_counter() - at)
        at = time.perf_counter()
        assert cipher.decrypt(into[:size], b"", seal)
        took[1].append(time.perf_counter() - at)
    return tuple(size / statistics.median(t) / 1e9 for t in took)  # type: ignore[return-value]


def measured(folder: Path, size: int, args: Any) -> list[str]:
    count = args.mib * MIB // size
    key = folder / "key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    sides = {name: Side(folder / name, size, count, args.threads, k) for name, k in (("plain", None), ("encrypted", key))}
    rows = []
    figures: dict[tuple[str, str], list[tuple[float, float]]] = {(name, what): [] for name in sides for what in ("write", "read")}
    for number in range(args.rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            for what in ("write", "read"):
                found = getattr(sides[name], what)()
                if number:
                    figures[name, what].append(found)
    for what in ("write", "read"):
        plain, plain_s = zip(*figures["plain", what], strict=True)
        encrypted, encrypted_s = zip(*figures["encrypted", what], strict=True)
        ratios = sorted(b / a for a, b in zip(plain, encrypted, strict=True))
        middle = statistics.median
        rows.append(
            f"| {what}, blocks of {size // 1024} KiB | {middle(plain):.2f} | {middle(encrypted):.2f} | {middle(ratios):.2f} "
            f"| {ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f} "
            f"| {middle(plain_s):.2f} | {middle(encrypted_s):.2f} |"
        )
    for side in sides.values():
        side.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="on the disk to measure; what is made there is removed again")
    parser.add_argument("--threads", type=int, default=8, help="I/Os in flight (default 8, the daemon's)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="of each round, each way (default 256)")
    args = parser.parse_args()
    end_in_order()
    if not args.folder.is_dir():
        parser.error(f"{args.folder} is no folder")
    if importlib.util.find_spec("cryptography") is None:
        parser.error("encryption needs the package cryptography, which the extra `encryption` brings, and so does make venv")
    rows = []
    for size in (256 << 10, 2 * MIB, 8 * MIB):
        with scratch_folder(args.folder, "kvtierd-encryption-") as folder:
            rows += measured(folder, size, args)
    print("| | plain GB/s | encrypted GB/s | ratio | its quartiles | plain CPU s/GB | encrypted CPU s/GB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(rows))
    print("\n| on one thread, in memory | encrypt GB/s | decrypt GB/s |\n| --- | ---: | ---: |")
    for size in (64 << 10, 256 << 10, 2 * MIB, 8 * MIB):
        print("| {} KiB | {:.1f} | {:.1f} |".format(size // 1024, *alone(size)))


if __name__ == "__main__":
    main()
