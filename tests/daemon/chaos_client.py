"""A client process for the chaos test: random calls until it is killed; it dies loudly when bytes are not those of their key.

Progress is in a file of three 64-bit numbers, which outlives the process however it ends: calls made, blocks saved, blocks loaded.
"""

import json
import logging
import os
import random
import struct
import sys

import numpy as np

from kvtierd.client import Client
from kvtierd.model import Namespace

KEYS = 400
WRONG = 3
"""Exit status of a client that was given wrong bytes."""
PROGRESS = struct.Struct("<3Q")


def key_of(number: int) -> bytes:
    """A 32-byte key."""
    return number.to_bytes(2, "big") * 16


def content_of(key: bytes, size: int) -> np.ndarray:
    """The only bytes that are right for a key: every process and every boot knows them."""
    return np.random.default_rng(int.from_bytes(key[:8], "little")).integers(0, 256, size, dtype=np.uint8)


def progress_of(path: str) -> tuple[int, int, int]:
    """Calls made, blocks saved and blocks loaded by a client so far."""
    with open(path, "rb") as file:
        raw = file.read(PROGRESS.size)
    return PROGRESS.unpack(raw) if len(raw) == PROGRESS.size else (0, 0, 0)


def main(address: str, seed: str, size: int, path: str) -> None:
    """Run until killed."""
    logging.disable(logging.WARNING)  # that the daemon goes away is what is tested
    random_ = random.Random(seed)
    keys = [key_of(n) for n in range(KEYS)]
    content = {key: content_of(key, size) for key in keys}
    client = Client(Namespace(shard_bytes=(size,), model="chaos"), address, timeout_s=3.0)
    progress = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    calls = saved = loaded = 0
    while True:
        some = random_.sample(keys, random_.randrange(1, 24))
        what = random_.random()
        if what < 0.45:
            saved += client.save(some, [content[key] for key in some], wait_s=random_.choice([0, 0.1])).saved
        elif what < 0.9:
            out = [np.zeros(size, np.uint8) for _ in some]
            result = client.load(some, out, each=True, timeout_s=random_.choice([0.02, 0.2, 2]))
            for index in result.indexes:
                if not np.array_equal(out[index], content[some[index]]):
                    print(f"wrong bytes for key {some[index].hex()}", flush=True)
                    os._exit(WRONG)
            loaded += result.loaded
        elif what < 0.95:
            client.evict(some[:3])
        elif what < 0.98:
            client.prefetch(some, deadline_s=1)
        else:
            client.pin(some[:2], expires_s=0.5)
        calls += 1
        os.pwrite(progress, PROGRESS.pack(calls, saved, loaded), 0)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
