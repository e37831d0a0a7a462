"""What a tier's store must offer, and the results it may give.

A store moves bytes and answers with a :class:`Result` a block; it decides nothing about which block lives where (the core
does) and raises only for bugs. Device errors are results, because the world can do them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Buffer

from kvtierd.cuda import Device
from kvtierd.model import NO_END, Namespace, Result

__all__ = ["BlockIo", "BlockStore", "DeviceRange", "RealmInfo", "Recovered", "RecoveredExtent", "Result"]


@dataclass(frozen=True, slots=True)
class RealmInfo:
    """A realm: who may share memory. ``realm_id`` is stable across restarts."""

    realm_id: int
    tenant: str
    namespace: Namespace
    shared: bool = False
    """True when the shared realms of other tenants find its blocks."""


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """Memory of a GPU."""

    device: Device
    address: int
    nbytes: int


@dataclass(slots=True)
class BlockIo:
    """One block to write to or read from a store, all shards.

    ``slots[i]`` is shard ``i``'s slot in the store; ``buffers[i]`` is memory of exactly ``shard_bytes[i]`` bytes that
    starts on a page and may be used up to the next page boundary. ``expires_s`` is when the block expires, in seconds since
    1970. A block between GPU memory and NVMe has no buffers but ``ranges``, of which the same holds.
    """

    realm_id: int
    key: bytes
    generation: int
    slots: tuple[int, ...]
    buffers: Sequence[Buffer]
    expires_s: float = NO_END
    ranges: Sequence[DeviceRange] = ()


@dataclass(slots=True)
class RecoveredExtent:
    """A segment found after a restart."""

    extent_id: int
    slot_bytes: int
    slot_count: int


@dataclass(slots=True)
class Recovered:
    """What a persistent store still holds after a restart.

    ``blocks`` yields (realm_id, key, generation, slots, expiry) once, oldest generation first, whole blocks only; slots never
    overlap and lie inside ``extents``. The expiry is in seconds since 1970, or NO_END; it may have passed.
    """

    realms: list[RealmInfo]
    extents: list[RecoveredExtent]
    blocks: Iterator[tuple[int, bytes, int, tuple[int, ...], float]]
    next_generation: int
    next_extent_id: int
    next_realm_id: int


class BlockStore(Protocol):
    """A store of blocks beside CPU memory. ``write`` and ``read`` block and are called from worker threads."""

    def write(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Write blocks and make their existence durable against a crash of the process. One result a block: CORRUPT for one whose
        GPU memory cannot be read."""

    def read(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Fill the blocks' buffers and verify them. A result other than OK means that the buffers hold nothing usable, NO_SPACE
        that the store's copy is well, as where GPU memory takes nothing."""

    def forget(self, blocks: Sequence[BlockIo]) -> None:
        """Record that blocks are gone (buffers unused). Cheap and non-blocking; ordered before any later write's record."""
