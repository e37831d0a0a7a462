"""Drives a kvtierd daemon in the way ``lmcache_worker.py`` drives LMCache: the same commands, sizes and KV cache.

"save" and "load" copy between a paged KV cache and the daemon's memory, as an engine does and as LMCache's client does here:
K and V of each layer of a chunk are one run of 16 pages. "save_flat" and "load_flat" move whole contiguous blocks instead.
"""

import argparse
import json
import sys
import time

import numpy as np

from kvtierd.client.client import Client
from kvtierd.client.keys import block_keys
from kvtierd.model import Namespace

CHUNK_TOKENS = 256
PAGES = CHUNK_TOKENS // 16
REQUESTS = 20
CHUNKS = 2
LOOKUPS = 15
MAX_TOKENS = 131_072
HELLO_TOKEN = 9906
MIB = 1 << 20
TIMEOUT_S = 30.0


class Size:
    """One chunk size: a layer of one chunk takes 1 MiB (K and V, 8 heads of 128, float16)."""

    def __init__(self, address: str, mib: int, kv_blocks: int) -> None:
        namespace = Namespace(shard_bytes=(mib * MIB,), model="peers")
        self.client = Client(namespace, address, timeout_s=TIMEOUT_S, name="peers", require=True)
        self.kv_blocks = kv_blocks
        # One tensor a layer, as in an engine: K and V, pages, tokens, heads, channels.
        self.kv = np.random.default_rng(mib).integers(0, 65536, (mib, 2, kv_blocks, 16, 8, 128), np.uint16)
        # The same memory as rows of contiguous blocks.
        self.flat = self.kv.reshape(-1).view(np.uint8)[: kv_blocks // PAGES * mib * MIB].reshape(-1, mib * MIB)

    def offset(self, i: int) -> int:
        """First page of a request, as in LMCache's own benchmark."""
        pages = CHUNKS * PAGES
        return ((1 + i) * pages) % max(self.kv_blocks - pages, 1)

    def move(self, views: list[memoryview], first: int, *, save: bool) -> None:
        memory = np.frombuffer(views[0], np.uint16).reshape(len(self.kv), 2, PAGES, 16, 8, 128)
        for layer, cache in enumerate(self.kv):
            pages = cache[:, first : first + PAGES]
            if save:
                np.copyto(memory[layer], pages)
            else:
                np.copyto(pages, memory[layer])

    def save(self, keys: bytes, i: int) -> None:
        with self.client.reserve(keys) as reservation:
            for n in reservation.granted:
                self.move(reservation.views(n), self.offset(i) + n * PAGES, save=True)
            done = reservation.commit()
        if done != CHUNKS:
            raise RuntimeError(f"save: {done} of {CHUNKS} chunks, {dict(reservation.rejected)}")

    def load(self, keys: bytes, i: int) -> None:
        done = 0
        with self.client.fetch(keys) as fetch:
            for n, views in fetch:
                self.move(views, self.offset(i) + n * PAGES, save=False)
                done += 1
            if done != CHUNKS or not fetch.intact:
                raise RuntimeError(f"load: {done} of {CHUNKS} chunks, {fetch.reason}")

    def rows(self, i: int) -> np.ndarray:
        first = (CHUNKS * (1 + i)) % max(len(self.flat) - CHUNKS + 1, 1)
        return self.flat[first : first + CHUNKS]

    def save_flat(self, keys: bytes, i: int) -> None:
        result = self.client.save(keys, self.rows(i))
        if result.saved != CHUNKS:
            raise RuntimeError(f"save: {result}")

    def load_flat(self, keys: bytes, i: int) -> None:
        result = self.client.load(keys, self.rows(i))
        if result.loaded != CHUNKS:
            raise RuntimeError(f"load: {result}")

    def checked_load(self, keys: bytes, i: int) -> None:
        pages = slice(self.offset(i), self.offset(i) + CHUNKS * PAGES)
        before = [cache[:, pages].copy() for cache in self.kv]
        for cache in self.kv:
            cache[:, pages] = 0
        self.load(keys, i)
        if not all(np.array_equal(old, cache[:, pages]) for old, cache in zip(before, self.kv, strict=True)):
            raise RuntimeError("other bytes came back than were saved")

    def one_pass(self, number: int) -> dict[str, list[float]]:
        calls = {"save": self.save, "load": self.load, "save_flat": self.save_flat, "load_flat": self.load_flat}
        took: dict[str, list[float]] = {name: [] for name in calls}
        for name, call in calls.items():
            kind = "flat" if name.endswith("_flat") else "paged"
            for i in range(REQUESTS):
                keys = block_keys([number, i] * CHUNK_TOKENS, CHUNK_TOKENS, identity=kind.encode())
                packed = b"".join(keys[:CHUNKS])
                # The lookup that an engine makes first; not part of the time on either side.
                held = self.client.lookup(packed).held
                if held != (0 if name.startswith("save") else CHUNKS):
                    raise RuntimeError(f"{name}: {held} chunks held")
                run = self.checked_load if number == 1 and name == "load" else call
                began_s = time.perf_counter()
                run(packed, i)
                took[name].append(time.perf_counter() - began_s)
            if name.startswith("load"):
                self.client.evict()
        return took


class Lookups:
    """Lookups of long prompts; the time has the hashing of the tokens in it, which LMCache's server does inside the call."""

    def __init__(self, address: str) -> None:
        namespace = Namespace(shard_bytes=(16384,), model="peers")
        self.client = Client(namespace, address, timeout_s=TIMEOUT_S, name="peers", require=True)
        self.number = 0
        packed = b"".join(block_keys(self.tokens(1, MAX_TOKENS), CHUNK_TOKENS))
        for start in range(0, len(packed), 32 * 256):
            with self.client.reserve(packed[start : start + 32 * 256], wait_s=1.0) as reservation:
                if reservation.commit() != len(reservation.outcomes):
                    raise RuntimeError(f"filling failed: {dict(reservation.rejected)}")

    @staticmethod
    def tokens(first: int, count: int) -> list[int]:
        return [first] + [HELLO_TOKEN] * (count - 1)

    def run(self, tokens: int, *, hit: bool) -> list[float]:
        took = []
        for _ in range(LOOKUPS):
            self.number += 1
            ids = self.tokens(1 if hit else 1000 + self.number, tokens)
            began_s = time.perf_counter()
            found = self.client.lookup(block_keys(ids, CHUNK_TOKENS)).held
            took.append(time.perf_counter() - began_s)
            if found != (tokens // CHUNK_TOKENS if hit else 0):
                raise RuntimeError(f"lookup of {tokens} tokens found {found} chunks")
        return took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--kv-blocks", type=int, required=True)
    args = parser.parse_args()
    sizes: dict[int, Size] = {}
    lookups: Lookups | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "pass":
            mib = command["mib"]
            if mib not in sizes:
                for size in sizes.values():
                    size.client.close()
                sizes.clear()  # gives the memory of the last size back
                sizes[mib] = Size(args.address, mib, args.kv_blocks)
            answer: object = sizes[mib].one_pass(command["number"])
        else:
            lookups = lookups or Lookups(args.address)
            answer = lookups.run(command["tokens"], hit=command["hit"])
        print(json.dumps(answer), flush=True)
    for size in sizes.values():
        size.client.close()
    if lookups is not None:
        lookups.client.close()


if __name__ == "__main__":
    main()
