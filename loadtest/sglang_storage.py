"""Pages of SGLang's host memory to and from a storage: kvtierd beside SGLang's own file backend and plain copies, in turn.

    .venv-sglang/bin/python loadtest/sglang_storage.py

The calls are those of SGLang's storage threads, in its batches of 128 pages. Each round writes pages that are new and reads them
into other host memory; every byte is compared. Both sides are warm: kvtierd's blocks are in its CPU memory, the files in the page
cache (SGLang does not sync them). Prints the table of results/sglang.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.cache_controller import PrefetchOperation
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE

import kvtierd
from kvtierd.lifetime import end_in_order, scratch_folder
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.testing.sglang import BACKEND, Rank, Shape, one_rank

MIB = 1 << 20


class Side:
    """One storage under one rank."""

    def __init__(self, rank: Rank, shape: Shape, pages: int) -> None:
        self.rank = rank
        self._page = shape.page
        self._written = rank.fill(pages * shape.page, seed=1)
        self._read = rank.host.alloc(pages * shape.page)
        self._operation = PrefetchOperation("request", [])

    def _batches(self, names: list[str], where: torch.Tensor) -> list[tuple[list[str], torch.Tensor]]:
        starts = range(0, len(names), STORAGE_BATCH_SIZE)
        end = STORAGE_BATCH_SIZE * self._page
        return [(names[n : n + STORAGE_BATCH_SIZE], where[n * self._page : n * self._page + end]) for n in starts]

    def round(self, tokens: list[int]) -> tuple[float, float]:
        """Seconds of writing pages and of reading them again."""
        names = self.rank.hashes(tokens)
        controller = self.rank.controller

        def write(some: list[str], where: torch.Tensor) -> None:
            assert controller.page_set_func(some, where), "all pages are kept"

        def read(some: list[str], where: torch.Tensor) -> None:
            assert controller.page_get_func(self._operation, some, where) == len(some), "all pages are read"

        took = [_seconds(call, self._batches(names, where)) for call, where in ((write, self._written), (read, self._read))]
        pairs = zip(self.rank.pages(self._written), self.rank.pages(self._read), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), "the same bytes"
        return took[0], took[1]


def _seconds(call: Callable[..., object], batches: list[tuple[Any, ...]]) -> float:
    began_s = time.perf_counter()
    for batch in batches:
        call(*batch)
    return time.perf_counter() - began_s


def _copies(nbytes: int) -> tuple[float, float]:
    """Seconds of two plain copies of as many bytes, by all threads of torch, as host memory is copied."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    took = [_seconds(target.copy_, [(source,)]) for _ in range(2)]
    return took[0], took[1]


def main() -> None:
    """Run and print."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=256, help="pages a round (default 256)")
    parser.add_argument("--page-tokens", type=int, default=64, help="tokens a page (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds after a first one that does not count (default 5)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the files of SGLang's file backend")
    args = parser.parse_args()
    tokens = args.pages * args.page_tokens
    shape = Shape(args.page_tokens, layers=8, heads=8, head=128, device_tokens=args.page_tokens, host_tokens=3 * tokens)
    page_bytes = 2 * 2 * shape.page * shape.layers * shape.heads * shape.head
    nbytes = args.pages * page_bytes
    took: dict[str, list[tuple[float, float]]] = {"kvtierd": [], "SGLang's files": [], "plain copy": []}
    with scratch_folder(args.folder, "kvtierd-sglang-") as folder, one_rank():
        capacity = (args.rounds + 2) * nbytes
        daemon = DaemonProcess(folder / "daemon", {"cpu": {"capacity": capacity, "prefault": True}, "nvme": {"capacity": 0}})
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder / "files")
        try:
            own = {"kvtierd.address": daemon.start().address, "kvtierd.revision": "1"}
            sides = {
                name: Side(Rank(storage, extra, shape=shape), shape, args.pages)
                for name, storage, extra in (("kvtierd", "dynamic", BACKEND | own), ("SGLang's files", "file", {}))
            }
            for number in range(args.rounds + 1):
                prompt = list(range(number * tokens, (number + 1) * tokens))
                seen = {name: side.round(prompt) for name, side in sides.items()} | {"plain copy": _copies(nbytes)}
                if number:
                    for name, seconds in seen.items():
                        took[name].append(seconds)
            for side in sides.values():
                side.rank.close()
        finally:
            daemon.kill()
    print(f"kvtierd {kvtierd.__version__}, {args.pages} pages of {page_bytes / MIB:.1f} MiB a round, {args.rounds} rounds\n")
    print("| storage | write GB/s | read GB/s | of a plain copy |\n| --- | --- | --- | --- |")
    speeds = {name: [[nbytes / 1e9 / s for s in column] for column in zip(*rounds, strict=True)] for name, rounds in took.items()}
    limit = [statistics.median(column) for column in speeds["plain copy"]]
    for name, columns in speeds.items():
        cells = [f"{statistics.median(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in columns]
        ratios = [f"{statistics.median(c) / most:.2f}" for c, most in zip(columns, limit, strict=True)]
        print(f"| {name} | {cells[0]} | {cells[1]} | {' / '.join(ratios)} |")


if __name__ == "__main__":
    main()
