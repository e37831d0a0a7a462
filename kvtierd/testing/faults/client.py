"""A client process of the campaign: random calls until it is killed; it ends by itself only when bytes are not those of their key.

Its state is in a file that outlives it however it ends: calls made, blocks saved, blocks loaded, and of each key of its own a byte
that says 1 while the daemon has confirmed that the key was evicted.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import random
import signal
import struct
import sys
from pathlib import Path
from typing import Final

import numpy as np

from kvtierd.client import Client
from kvtierd.testing.faults.contents import OWN_KEYS, REALMS, SHARED_KEYS, Realm, own_key, shared_key

PR_SET_PDEATHSIG: Final = 1
WRONG: Final = 3
"""Exit status of a client that was given wrong bytes."""
_PROGRESS: Final = struct.Struct("<3Q")
STATE_BYTES: Final = _PROGRESS.size + OWN_KEYS


def make_state(path: Path) -> None:
    """A file for a client to begin with."""
    path.write_bytes(bytes(STATE_BYTES))


def progress_of(path: Path) -> tuple[int, int, int]:
    """Calls made, blocks saved and blocks loaded so far."""
    with path.open("rb") as f:
        return _PROGRESS.unpack(f.read(_PROGRESS.size))


def evicted_keys(path: Path, client: int) -> list[bytes]:
    """Own keys that the daemon has said to be gone, and that were not saved since."""
    with path.open("rb") as f:
        marks = f.read()[_PROGRESS.size :]
    return [own_key(client, number) for number, mark in enumerate(marks) if mark]


def forget_evicted(path: Path) -> None:
    """Expect nothing of own keys any more. The client must be stopped."""
    with path.open("r+b") as f:
        f.seek(_PROGRESS.size)
        f.write(bytes(OWN_KEYS))


class CampaignClient:
    """Random calls on one realm."""

    def __init__(self, realm: Realm, number: int, address: str, seed: str, path: str) -> None:
        self._realm = realm
        self._number = number
        self._rng = random.Random(seed)
        self._client = Client(realm.namespace, address, realm.tenant, timeout_s=3.0, name=f"campaign {number}")
        with Path(path).open("r+b") as f:
            self._state = mmap.mmap(f.fileno(), STATE_BYTES)
        self._counts = list(_PROGRESS.unpack_from(self._state))

    def step(self) -> None:
        """One call."""
        rng = self._rng
        some = [shared_key(n) for n in sorted(rng.sample(range(SHARED_KEYS), rng.randrange(1, 20)))]
        what = rng.random()
        if what < 0.38:
            saved = self._client.save(some, [self._realm.content(key) for key in some], wait_s=rng.choice([0, 0.1]))
            self._counts[1] += saved.saved
        elif what < 0.72:
            self._load(some)
        elif what < 0.76:
            got = self._client.load_bytes(some[:4], each=True)
            for index, shards in got.blocks.items():
                self._compare(some[index], [np.frombuffer(s, np.uint8) for s in shards])
                self._counts[2] += 1
        elif what < 0.80:
            self._client.save_bytes(some[:3], [self._realm.content(key) for key in some[:3]])
        elif what < 0.84:
            self._client.evict(some[:3])
        elif what < 0.88:
            self._client.prefetch(some, deadline_s=0.5)
        elif what < 0.91:
            self._client.pin(some[:3], expires_s=0.5)
        else:
            self._own()
        self._counts[0] += 1
        _PROGRESS.pack_into(self._state, 0, *self._counts)

    def _load(self, keys: list[bytes]) -> None:
        out = [self._realm.empty() for _ in keys]
        result = self._client.load(keys, out, each=True, timeout_s=self._rng.choice([0.02, 0.2, 2]))
        for index in result.indexes:
            self._compare(keys[index], out[index])
        self._counts[2] += result.loaded

    def _own(self) -> None:
        """Save a key of its own, load it, or evict it and note that the daemon has said so."""
        number = self._rng.randrange(OWN_KEYS)
        key = own_key(self._number, number)
        at = _PROGRESS.size + number
        what = self._rng.random()
        if what < 0.2:
            self._load([key])
        elif what < 0.65:
            self._state[at] = 0
            self._counts[1] += self._client.save([key], [self._realm.content(key)]).saved
        elif self._client.evict([key]):
            self._state[at] = 1

    def _compare(self, key: bytes, shards: list[np.ndarray]) -> None:
        if not all(np.array_equal(got, right) for got, right in zip(shards, self._realm.content(key), strict=True)):
            print(f"wrong bytes for key {key.hex()} of {self._realm}", flush=True)
            os._exit(WRONG)


def main(realm: int, number: int, address: str, seed: str, path: str) -> None:
    """Run until killed, at the latest when the campaign has gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.disable(logging.WARNING)  # that the daemon goes away is what is tried
    client = CampaignClient(REALMS[realm], number, address, seed, path)
    while True:
        client.step()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
