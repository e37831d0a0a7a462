"""Goal: the store for tests is a store. Method: the conformance suite, and its way to answer with faults."""

from __future__ import annotations

import pytest

from kvtierd.model import slot_id
from kvtierd.testing.memory_store import MemoryStore
from kvtierd.tiers.base import Result

from .conformance import BlockStoreConformance, ExtentStore, block, realm_of


class TestMemoryStore(BlockStoreConformance):
    @pytest.fixture
    def store(self) -> ExtentStore:
        return MemoryStore()

    def test_answers_with_the_fault_asked_for(self) -> None:
        store = MemoryStore(lambda what, _: Result.IO_ERROR if what == "read" else Result.OK)
        realm = realm_of(10)
        store.register_realm(realm)
        store.add_extent(1, 8192, 1)
        assert store.write([block(realm, "a", 1, slot_id(1, 0))]) == [Result.OK]
        assert store.read([block(realm, "a", 1, slot_id(1, 0))]) == [Result.IO_ERROR]
