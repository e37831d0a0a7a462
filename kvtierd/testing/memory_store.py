"""A store of blocks in memory, for tests of what uses a store. It passes the same conformance tests as the NVMe store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvtierd.model import slot_extent
from kvtierd.tiers.base import BlockIo, RealmInfo, Result

Stamp = tuple[int, bytes, int, int, int]
"""Realm id, key, generation, shard, number of shards: what a slot holds."""


class MemoryStore:
    """Slots in a dictionary. Thread-safe.

    Args:
        fail: asked before each block with ("write" or "read", block); a result other than OK is answered in its place.
    """

    def __init__(self, fail: Callable[[str, BlockIo], Result] | None = None) -> None:
        self._fail = fail or (lambda _what, _block: Result.OK)
        self._lock = threading.Lock()
        self._slots: dict[int, tuple[Stamp, bytes]] = {}
        self._extents: dict[int, tuple[int, int]] = {}
        self.realms: dict[int, RealmInfo] = {}
        self.forgotten: list[tuple[int, bytes, int]] = []
        """Realm id, key and generation of what :meth:`forget` was told, in order."""

    def register_realm(self, realm: RealmInfo) -> None:
        """Note a realm before its first block."""
        self.realms[realm.realm_id] = realm

    def add_extent(self, extent_id: int, slot_bytes: int, slot_count: int) -> None:
        """Note a new extent."""
        assert extent_id not in self._extents
        self._extents[extent_id] = (slot_bytes, slot_count)

    def drop_extent(self, extent_id: int) -> None:
        """Forget an extent and what it holds."""
        del self._extents[extent_id]
        with self._lock:
            self._slots = {slot: held for slot, held in self._slots.items() if slot_extent(slot) != extent_id}

    def write(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Copy blocks in."""
        results = []
        for block in blocks:
            result = self._fail("write", block)
            if result is Result.OK:
                with self._lock:
                    for shard, (slot, buffer) in enumerate(zip(block.slots, block.buffers, strict=True)):
                        assert slot_extent(slot) in self._extents, f"extent {slot_extent(slot)} does not exist"
                        self._slots[slot] = (_stamp(block, shard), bytes(buffer))
            results.append(result)
        return results

    def read(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Copy blocks out; CORRUPT when a slot holds something else."""
        return [self._read(block) for block in blocks]

    def _read(self, block: BlockIo) -> Result:
        result = self._fail("read", block)
        if result is not Result.OK:
            return result
        for shard, (slot, buffer) in enumerate(zip(block.slots, block.buffers, strict=True)):
            with self._lock:
                held = self._slots.get(slot)
            view = memoryview(buffer).cast("B")
            if held is None or held[0] != _stamp(block, shard) or len(held[1]) != view.nbytes:
                return Result.CORRUPT
            view[:] = held[1]
        return Result.OK

    def forget(self, blocks: Sequence[BlockIo]) -> None:
        """Note that blocks are gone."""
        with self._lock:
            self.forgotten += [(b.realm_id, b.key, b.generation) for b in blocks]

    def flush(self) -> None:
        """Nothing waits in memory."""


def _stamp(block: BlockIo, shard: int) -> Stamp:
    return block.realm_id, block.key, block.generation, shard, len(block.slots)
