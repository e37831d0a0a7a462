"""What blocks of the campaign must hold: bytes that follow from realm and key, so that every process and every boot knows them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd.model import PAGE_BYTES, Namespace, round_up

SHARED_KEYS: Final = 160
"""Keys of a realm that all of its clients use."""
OWN_KEYS: Final = 24
"""Keys that one client alone saves and evicts."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Realm:
    """Whose blocks, and what they look like."""

    model: str
    tenant: str
    shard_bytes: tuple[int, ...]

    @property
    def namespace(self) -> Namespace:
        """What a client attaches with."""
        return Namespace(shard_bytes=self.shard_bytes, model=self.model)

    @property
    def nvme_bytes(self) -> int:
        """What one block takes on NVMe: a header page and whole pages a shard."""
        return sum(PAGE_BYTES + round_up(size, PAGE_BYTES) for size in self.shard_bytes)

    def content(self, key: bytes) -> list[Bytes]:
        """The only right bytes of each shard."""
        whole = sum(self.shard_bytes)
        seed = hashlib.blake2b(f"{self.model}/{self.tenant}/".encode() + key, digest_size=8).digest()
        drawn = np.random.default_rng(int.from_bytes(seed, "little")).bytes(whole)
        flat = np.frombuffer(drawn, np.uint8)
        ends = np.cumsum(self.shard_bytes)
        return [flat[end - size : end] for end, size in zip(ends, self.shard_bytes, strict=True)]

    def empty(self) -> list[Bytes]:
        """Buffers of a block."""
        return [np.zeros(size, np.uint8) for size in self.shard_bytes]


REALMS: Final = (
    Realm("first", "alpha", (65_536,)),
    Realm("first", "beta", (65_536,)),
    Realm("second", "alpha", (30_000, 4096)),
    Realm("second", "gamma", (30_000, 4096)),
)
"""Two layouts and three tenants: what one realm holds under a key is wrong in every other."""


def shared_key(number: int) -> bytes:
    """A key that all clients of all realms use."""
    return number.to_bytes(4, "big") * 8


def own_key(client: int, number: int) -> bytes:
    """A key that no other client uses."""
    return b"own!" + client.to_bytes(4, "big") * 3 + number.to_bytes(4, "big") * 4
