"""Goal: every store of blocks behaves alike. Method: a suite to inherit; a subclass says how its store is made."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest

from kvtierd.model import PAGE_BYTES, Namespace, round_up, slot_id
from kvtierd.tiers.base import BlockIo, BlockStore, RealmInfo, Result

HEADER = PAGE_BYTES


class ExtentStore(BlockStore, Protocol):
    """A store whose space is divided into extents."""

    def register_realm(self, realm: RealmInfo) -> None: ...

    def add_extent(self, extent_id: int, slot_bytes: int, slot_count: int) -> None: ...

    def drop_extent(self, extent_id: int) -> None: ...


def buffer_of(size: int, content: bytes = b"") -> memoryview:
    """Page-aligned memory of exactly ``size`` bytes."""
    pages = memoryview(mmap.mmap(-1, round_up(size, PAGE_BYTES)))
    pages[: len(content)] = content
    return pages[:size]


def payload(seed: object, size: int) -> bytes:
    """Bytes that differ for each seed."""
    unit = hashlib.blake2b(repr(seed).encode()).digest() * 64
    return (unit * (size // len(unit) + 1))[:size]


def key_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def realm_of(*shard_bytes: int, realm_id: int = 1, tenant: str = "t") -> RealmInfo:
    return RealmInfo(realm_id, tenant, Namespace(tuple(shard_bytes)))


def slot_bytes_for(size: int) -> int:
    return HEADER + round_up(size, PAGE_BYTES)


def block(realm: RealmInfo, name: object, generation: int, *slots: int, filled: bool = True) -> BlockIo:
    """A block with content made of its name (or zeros, to be read into)."""
    sizes = realm.namespace.shard_bytes
    buffers = [buffer_of(n, payload((name, i), n) if filled else b"") for i, n in enumerate(sizes)]
    return BlockIo(realm.realm_id, key_of(name), generation, slots, buffers)


def assert_held(store: BlockStore, realm: RealmInfo, name: object, generation: int, *slots: int) -> None:
    """The store returns exactly what :func:`block` made."""
    wanted = block(realm, name, generation, *slots, filled=False)
    assert store.read([wanted]) == [Result.OK]
    for i, buffer in enumerate(wanted.buffers):
        assert bytes(buffer) == payload((name, i), len(memoryview(buffer))), f"shard {i} of {name}"


class BlockStoreConformance:
    """Inherit this and define the ``store`` fixture."""

    @pytest.fixture
    def store(self) -> Iterator[ExtentStore] | ExtentStore:
        raise NotImplementedError

    @pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 640 << 10, 33 << 20])
    def test_returns_what_was_written(self, store: ExtentStore, size: int) -> None:
        realm = realm_of(size)
        store.register_realm(realm)
        store.add_extent(1, slot_bytes_for(size), 2)
        blocks = [block(realm, n, n + 1, slot_id(1, n)) for n in range(2)]
        assert store.write(blocks) == [Result.OK] * 2
        for n in range(2):
            assert_held(store, realm, n, n + 1, slot_id(1, n))

    def test_many_small_blocks_in_one_call_in_any_order(self, store: ExtentStore) -> None:
        realm = realm_of(4096)
        store.register_realm(realm)
        store.add_extent(1, 8192, 2000)
        order = [(n * 769) % 2000 for n in range(2000)]
        assert set(store.write([block(realm, n, n + 1, slot_id(1, n)) for n in order])) == {Result.OK}
        wanted = [block(realm, n, n + 1, slot_id(1, n), filled=False) for n in reversed(order)]
        assert set(store.read(wanted)) == {Result.OK}
        for n, read in zip(reversed(order), wanted, strict=True):
            assert bytes(read.buffers[0]) == payload((n, 0), 4096)

    def test_shards_of_different_sizes_lie_in_different_extents(self, store: ExtentStore) -> None:
        realm = realm_of(100, 9000, 100)
        store.register_realm(realm)
        store.add_extent(1, slot_bytes_for(100), 8)
        store.add_extent(2, slot_bytes_for(9000), 4)
        slots = (slot_id(1, 3), slot_id(2, 1), slot_id(1, 4))
        assert store.write([block(realm, "a", 1, *slots)]) == [Result.OK]
        assert_held(store, realm, "a", 1, *slots)

    @pytest.mark.parametrize("change", ["key", "generation", "realm", "shards swapped"])
    def test_reading_another_block_than_the_one_stored_is_corrupt(self, store: ExtentStore, change: str) -> None:
        realm, other = realm_of(5000, 5000), realm_of(5000, 5000, realm_id=2, tenant="other")
        store.register_realm(realm)
        store.register_realm(other)
        store.add_extent(1, slot_bytes_for(5000), 4)
        a, b = slot_id(1, 0), slot_id(1, 1)
        assert store.write([block(realm, "a", 7, a, b)]) == [Result.OK]
        wrong = {
            "key": block(realm, "b", 7, a, b, filled=False),
            "generation": block(realm, "a", 8, a, b, filled=False),
            "realm": block(other, "a", 7, a, b, filled=False),
            "shards swapped": block(realm, "a", 7, b, a, filled=False),
        }[change]
        assert store.read([wrong]) == [Result.CORRUPT]
        assert_held(store, realm, "a", 7, a, b)

    def test_a_slot_that_was_never_written_is_corrupt_and_spoils_no_other(self, store: ExtentStore) -> None:
        realm = realm_of(4096)
        store.register_realm(realm)
        store.add_extent(1, 8192, 4)
        store.add_extent(2, 8192, 4)
        assert store.write([block(realm, "a", 1, slot_id(1, 1))]) == [Result.OK]
        wanted = [
            block(realm, "x", 2, slot_id(1, 0), filled=False),
            block(realm, "a", 1, slot_id(1, 1), filled=False),
            block(realm, "y", 3, slot_id(1, 2), filled=False),
            block(realm, "z", 4, slot_id(2, 0), filled=False),
        ]
        assert store.read(wanted) == [Result.CORRUPT, Result.OK, Result.CORRUPT, Result.CORRUPT]
        assert bytes(wanted[1].buffers[0]) == payload(("a", 0), 4096)

    def test_a_slot_written_again_holds_the_new_block_only(self, store: ExtentStore) -> None:
        realm = realm_of(6000)
        store.register_realm(realm)
        store.add_extent(1, slot_bytes_for(6000), 2)
        slot = slot_id(1, 0)
        assert store.write([block(realm, "old", 1, slot)]) == [Result.OK]
        store.forget([BlockIo(1, key_of("old"), 1, (slot,), [])])
        assert store.write([block(realm, "new", 2, slot)]) == [Result.OK]
        assert_held(store, realm, "new", 2, slot)
        assert store.read([block(realm, "old", 1, slot, filled=False)]) == [Result.CORRUPT]

    def test_a_dropped_extent_holds_nothing(self, store: ExtentStore) -> None:
        realm = realm_of(4096)
        store.register_realm(realm)
        store.add_extent(1, 8192, 2)
        assert store.write([block(realm, "a", 1, slot_id(1, 0))]) == [Result.OK]
        store.drop_extent(1)
        assert store.read([block(realm, "a", 1, slot_id(1, 0), filled=False)]) == [Result.CORRUPT]

    def test_many_threads_write_and_read_at_once(self, store: ExtentStore) -> None:
        realm = realm_of(70_000)
        store.register_realm(realm)
        for extent in (1, 2):
            store.add_extent(extent, slot_bytes_for(70_000), 16)

        def work(n: int) -> None:
            slot = slot_id(1 + n % 2, n // 2)
            for turn in range(4):
                generation = 1 + n * 4 + turn
                assert store.write([block(realm, (n, turn), generation, slot)]) == [Result.OK]
                assert_held(store, realm, (n, turn), generation, slot)

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(32)))

    def test_an_empty_call_is_fine(self, store: ExtentStore) -> None:
        assert store.write([]) == []
        assert store.read([]) == []
        store.forget([])
