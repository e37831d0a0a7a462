"""Goal: no sequence of writes, reads, removals, snapshots, faults and crashes makes the store return wrong bytes, lose a block
that it said was stored, or bring back one whose removal was written.

Method: a Hypothesis machine against a dictionary. A crash closes descriptors and writes nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtierd.model import NO_END, slot_id
from kvtierd.testing.faulty_io import Fault, FaultyEngine
from kvtierd.tiers.base import BlockIo, Result
from kvtierd.tiers.io_engine import ThreadEngine
from kvtierd.tiers.nvme import NvmeStore

from .conformance import assert_held, block, key_of, realm_of, slot_bytes_for
from .nvme_tools import MIB, chunks_of, config_for, crash, open_store

SLOTS = 12
REALM = realm_of(3000, 9000)
SLOT_BYTES = (slot_bytes_for(3000), slot_bytes_for(9000))
Held = dict[int, tuple[int, tuple[int, ...]]]
"""Name to generation and slots."""


class Machine(RuleBasedStateMachine):
    """Small and large shards of one realm in one extent each, over two folders."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvtierd-machine-"))
        self.config = config_for(self.root / "a", self.root / "b", capacity=64 * MIB)
        self.held: Held = {}
        self.unsure: Held = {}
        """Blocks that may or may not be back after a crash: removed in memory only, or answered with an error."""
        self.start()
        self.store.register_realm(REALM)
        self.extents = (1, 2)
        for extent, size in zip(self.extents, SLOT_BYTES, strict=True):
            self.store.add_extent(extent, size, SLOTS)
        self.next_extent = 3

    def start(self) -> None:
        self.engine = FaultyEngine(ThreadEngine())
        self.store: NvmeStore
        self.store, recovered = open_store(self.config, self.engine)
        found = {key: (generation, slots) for realm_id, key, generation, slots, _ in recovered.blocks if realm_id == 1}
        for name, where in self.held.items():
            assert found.pop(key_of(name), None) == where, f"block {name} is lost"
        allowed = {key_of(name): where for name, where in self.unsure.items()}
        for key, where in found.items():
            assert allowed.get(key) == where, "a block came back"
            self.forget_block(key, *where)
        self.store.flush()
        self.unsure.clear()
        self.generation = recovered.next_generation
        assert self.generation > max((g for g, _ in self.held.values()), default=0)
        self.ids = {e.extent_id for e in recovered.extents}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    def forget_block(self, key: bytes, generation: int, slots: tuple[int, ...]) -> None:
        self.store.forget([BlockIo(1, key, generation, slots, [])])

    def free_indexes(self) -> list[int]:
        used = {slots[0] & 0xFFFF for _, slots in self.held.values()}
        return [i for i in range(SLOTS) if i not in used]

    @rule(names=st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True), fault=st.sampled_from([None, "data", "journal"]),
          kind=st.sampled_from([Fault.EIO, Fault.ENOSPC, Fault.SHORT]))  # fmt: skip
    def write(self, names: list[int], fault: str | None, kind: Fault) -> None:
        names = [n for n in names if n not in self.held]
        where = {}
        for name, index in zip(names, self.free_indexes(), strict=False):
            where[name] = (self.generation, tuple(slot_id(e, index) for e in self.extents))
            self.generation += 1
        if fault:
            self.engine.inject(kind, write=True, path_part="segment-" if fault == "data" else "journal-")
        # Whatever was in these slots may be destroyed by now, whether the write ends well or not.
        taken = {slots for _, slots in where.values()}
        results = self.store.write([block(REALM, n, g, *slots) for n, (g, slots) in where.items()])
        self.engine.heal()
        self.unsure = {n: (g, slots) for n, (g, slots) in self.unsure.items() if n not in where}
        for (name, at), result in zip(where.items(), results, strict=True):
            if result is Result.OK:
                self.held[name] = at
            else:
                assert fault is not None
                assert kind is not Fault.SHORT
                self.unsure[name] = at
        assert taken >= {self.held[n][1] for n in where if n in self.held}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        where = self.held.pop(name)
        self.forget_block(key_of(name), *where)
        self.unsure[name] = where

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.unsure = {}
        # Blocks answered with an error have no record, or one that was taken back.

    @rule(parts=st.integers(1, 3))
    def checkpoint(self, parts: int) -> None:
        listed = [(1, key_of(n), g, slots, NO_END) for n, (g, slots) in self.held.items()]
        chunks = [listed[i::parts] for i in range(parts)]
        assert asyncio.run(self.store.checkpoint(chunks_of(*chunks))) == len(listed)

    @rule()
    def checkpoint_dies(self) -> None:
        self.store.begin_snapshot()

    @rule(clean=st.booleans())
    def restart(self, clean: bool) -> None:
        if clean:
            self.store.close()
            self.unsure = {}
        else:
            crash(self.store)
        self.start()
        for extent, size in zip(self.extents, SLOT_BYTES, strict=True):
            if extent not in self.ids:
                self.store.add_extent(extent, size, SLOTS)

    @rule()
    def replace_extents(self) -> None:
        for extent in self.extents:
            self.store.drop_extent(extent)
        self.store._table.delete_dropped()
        self.held.clear()
        self.unsure.clear()
        self.extents = (self.next_extent, self.next_extent + 1)
        self.next_extent += 2
        for extent, size in zip(self.extents, SLOT_BYTES, strict=True):
            self.store.add_extent(extent, size, SLOTS)

    @invariant()
    def every_held_block_reads_back(self) -> None:
        for name, (generation, slots) in self.held.items():
            assert_held(self.store, REALM, name, generation, *slots)

    @invariant()
    def files_stay_below_the_capacity(self) -> None:
        assert self.store.used_file_bytes() <= self.config.capacity


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
