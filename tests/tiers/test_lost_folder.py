"""Goal: a folder whose device is lost takes nothing from the others: they are written, and their journals are cut by snapshots.

Method: an engine and a snapshot folder that fail for one of two folders; files and recovered blocks are compared.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest
from typing_extensions import Buffer

from kvtierd.model import NO_END, slot_id
from kvtierd.tiers.base import BlockIo, Result
from kvtierd.tiers.io_engine import ThreadEngine
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.record import RECORD_BYTES, Entry

from .conformance import block, key_of, realm_of, slot_bytes_for
from .nvme_tools import MIB, chunks_of, config_for, crash, open_store

SIZE = 5000
REALM = realm_of(SIZE)
SLOTS = 64


class LostFolder(ThreadEngine):
    """Writes to files below a folder fail, once it is lost."""

    def __init__(self) -> None:
        self.lost = ""
        self._paths: dict[int, str] = {}

    def open(self, path: str, *, direct: bool) -> int:
        if self.lost and path.startswith(self.lost):
            raise OSError(errno.EIO, "the device is gone", path)
        handle = super().open(path, direct=direct)
        self._paths[handle] = path
        return handle

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        if self.lost and self._paths[handle].startswith(self.lost):
            raise OSError(errno.EIO, "the device is gone")
        return super().pwritev(handle, buffers, offset_bytes)


def stored(tmp_path: Path, engine: LostFolder) -> tuple[NvmeStore, dict[int, str]]:
    """A store of two folders with a block in each of four extents, and the folder of each extent."""
    store, _ = open_store(config_for(tmp_path / "a", tmp_path / "b", capacity=64 * MIB, snapshot_journal=8192), engine)
    store.register_realm(REALM)
    for extent in range(1, 5):
        store.add_extent(extent, slot_bytes_for(SIZE), SLOTS)
        assert store.write([block(REALM, extent, extent, slot_id(extent, 0))]) == [Result.OK]
    where = {int(p.name.split("-")[1]): str(p.parent) for p in tmp_path.glob("*/segment-*")}
    assert len(set(where.values())) == 2
    return store, where


def entries(*extents: int) -> list[Entry]:
    return [(1, key_of(n), n, (slot_id(n, 0),), NO_END) for n in extents]


async def test_the_others_get_their_snapshots(tmp_path: Path) -> None:
    engine = LostFolder()
    store, where = stored(tmp_path, engine)
    engine.lost = str(tmp_path / "b")
    left = [n for n, folder in where.items() if folder != engine.lost]
    for generation in range(10, 400):
        assert store.write([block(REALM, left[0], generation, slot_id(left[0], 1))]) == [Result.OK]
    assert store.needs_snapshot()
    await store.checkpoint(chunks_of(entries(*where)))
    await store.checkpoint(chunks_of(entries(*where)))
    sizes = [p.stat().st_size for p in (tmp_path / "a").glob("journal-*")]
    assert sum(sizes) < 10 * RECORD_BYTES, "the journal was cut"
    engine.lost = ""
    crash(store)
    again, recovered = open_store(config_for(tmp_path / "a", tmp_path / "b", capacity=64 * MIB))
    assert {key for _, key, *_ in recovered.blocks} >= {key_of(n) for n in where}
    again.close()


def test_removals_reach_the_others(tmp_path: Path) -> None:
    engine = LostFolder()
    store, where = stored(tmp_path, engine)
    # The folder that comes first is lost.
    engine.lost = str(tmp_path / "a")
    store.forget([BlockIo(1, key_of(n), n, (slot_id(n, 0),), ()) for n in where])
    with pytest.raises(OSError, match="gone"):
        store.flush()
    engine.lost = ""
    crash(store)
    again, recovered = open_store(config_for(tmp_path / "a", tmp_path / "b", capacity=64 * MIB))
    assert {key for _, key, *_ in recovered.blocks} == {key_of(n) for n, folder in where.items() if folder.endswith("a")}
    again.close()


def test_a_folder_that_fails_asks_for_no_snapshot(tmp_path: Path) -> None:
    engine = LostFolder()
    store, where = stored(tmp_path, engine)
    (extent,) = [n for n, folder in where.items() if folder.endswith("b")][:1]
    for generation in range(10, 400):
        store.write([block(REALM, extent, generation, slot_id(extent, 1))])
    assert store.needs_snapshot()
    engine.lost = str(tmp_path / "b")
    for generation in range(400, 403):
        assert store.write([block(REALM, extent, generation, slot_id(extent, 1))]) == [Result.IO_ERROR]
    assert not store.needs_snapshot(), "it could not be written"
    assert "failing" in store.health()[engine.lost]
    engine.lost = ""
    store.close()


async def test_all_lost_is_an_error_and_costs_nothing(tmp_path: Path) -> None:
    engine = LostFolder()
    store, where = stored(tmp_path, engine)
    engine.lost = str(tmp_path)
    with pytest.raises(OSError, match="gone"):
        await store.checkpoint(chunks_of(entries(*where)))
    engine.lost = ""
    crash(store)
    again, recovered = open_store(config_for(tmp_path / "a", tmp_path / "b", capacity=64 * MIB))
    assert {key for _, key, *_ in recovered.blocks} == {key_of(n) for n in where}
    again.close()
