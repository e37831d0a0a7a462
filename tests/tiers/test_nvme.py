"""Goal: the NVMe store never returns wrong bytes, answers faults with the right result and keeps its limits.

Method: the conformance suite on both I/O paths; then each fault through the engine's seam or in the files themselves.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.errors import Reason, RequestError
from kvtierd.model import slot_id
from kvtierd.testing.faulty_io import Fault, FaultyEngine
from kvtierd.tiers import segments
from kvtierd.tiers.base import BlockIo, Result
from kvtierd.tiers.io_engine import ThreadEngine
from kvtierd.tiers.nvme import NvmeStore

from .conformance import BlockStoreConformance, ExtentStore, assert_held, block, key_of, realm_of, slot_bytes_for
from .nvme_tools import MIB, config_for, crash, flip, open_store, segment_path

SIZE = 10_000
SLOT = slot_bytes_for(SIZE)
REALM = realm_of(SIZE)


class TestDirect(BlockStoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ExtentStore]:
        store, _ = open_store(config_for(tmp_path / "a", tmp_path / "b"))
        yield store
        store.close()


class TestBuffered(BlockStoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ExtentStore]:
        store, _ = open_store(config_for(tmp_path, direct="off"))
        assert store.path == "buffered"
        yield store
        store.close()


class TestShortTransfers(BlockStoreConformance):
    """Three of ten transfers move less than asked for; callers must not notice."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[ExtentStore]:
        engine = FaultyEngine(ThreadEngine(), seed=3, rates={Fault.SHORT: 0.3})
        store, _ = open_store(config_for(tmp_path), engine)
        yield store
        store.close()


@pytest.fixture
def engine() -> FaultyEngine:
    return FaultyEngine(ThreadEngine(), seed=1)


@pytest.fixture
def store(tmp_path: Path, engine: FaultyEngine) -> Iterator[NvmeStore]:
    store, _ = open_store(config_for(tmp_path), engine)
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 16)
    yield store
    store.close()


def put(store: NvmeStore, *names: int) -> list[Result]:
    return store.write([block(REALM, n, n + 1, slot_id(1, n)) for n in names])


def get(store: NvmeStore, *names: int) -> list[Result]:
    return store.read([block(REALM, n, n + 1, slot_id(1, n), filled=False) for n in names])


@pytest.mark.parametrize("where", [0, 9, 40, 2000, 4095, 4096, 4096 + SIZE - 1])
def test_a_flipped_bit_in_header_or_payload_is_corrupt(store: NvmeStore, tmp_path: Path, where: int) -> None:
    assert put(store, 0, 1, 2) == [Result.OK] * 3
    flip(segment_path(tmp_path, 1), SLOT + where)
    assert get(store, 0, 1, 2) == [Result.OK, Result.CORRUPT, Result.OK]


def test_a_flipped_bit_in_the_padding_harms_nobody(store: NvmeStore, tmp_path: Path) -> None:
    assert put(store, 0) == [Result.OK]
    flip(segment_path(tmp_path, 1), 4096 + SIZE)
    assert_held(store, REALM, 0, 1, slot_id(1, 0))


@pytest.mark.parametrize("keep", [0, 100, 4096, 5000, SLOT + 4096])
def test_a_truncated_file_is_corrupt_behind_the_cut(store: NvmeStore, tmp_path: Path, keep: int) -> None:
    assert put(store, 0, 1) == [Result.OK] * 2
    os.truncate(segment_path(tmp_path, 1), keep)
    assert get(store, 0, 1) == [Result.OK if keep >= SLOT else Result.CORRUPT, Result.CORRUPT]


def test_swapped_slots_are_corrupt(store: NvmeStore, tmp_path: Path) -> None:
    assert put(store, 0, 1) == [Result.OK] * 2
    with open(segment_path(tmp_path, 1), "r+b") as f:
        both = f.read(2 * SLOT)
        f.seek(0)
        f.write(both[SLOT:] + both[:SLOT])
    assert get(store, 0, 1) == [Result.CORRUPT] * 2


def test_a_slot_copied_to_another_place_is_corrupt_there(store: NvmeStore, tmp_path: Path) -> None:
    assert put(store, 0) == [Result.OK]
    with open(segment_path(tmp_path, 1), "r+b") as f:
        first = f.read(SLOT)
        f.seek(SLOT)
        f.write(first)
    assert store.read([block(REALM, 0, 1, slot_id(1, 1), filled=False)]) == [Result.CORRUPT]


def test_a_missing_file_is_corrupt(store: NvmeStore, tmp_path: Path) -> None:
    assert put(store, 0) == [Result.OK]
    crash(store)
    again, _ = open_store(config_for(tmp_path))
    os.unlink(segment_path(tmp_path, 1))
    assert get(again, 0) == [Result.CORRUPT]
    again.close()


@pytest.mark.parametrize("fault", [Fault.TORN, Fault.LOST, Fault.MISDIRECTED, Fault.BIT_FLIP])
def test_a_write_that_the_device_spoils_silently_is_found_by_the_read(store: NvmeStore, engine: FaultyEngine, fault: Fault) -> None:
    assert put(store, 3) == [Result.OK]
    engine.inject(fault, write=True)
    assert put(store, 0) == [Result.OK]
    if fault is Fault.BIT_FLIP and get(store, 0) == [Result.OK]:
        assert_held(store, REALM, 0, 1, slot_id(1, 0))  # the flipped bit is in the padding of the last page
        return
    assert get(store, 0) == [Result.CORRUPT]


@pytest.mark.parametrize("fault", [Fault.LOST, Fault.MISDIRECTED])
def test_a_read_that_the_device_spoils_silently_is_corrupt_and_the_next_one_is_good(
    store: NvmeStore, engine: FaultyEngine, fault: Fault
) -> None:
    assert put(store, 0) == [Result.OK]
    engine.inject(fault, write=False)
    assert get(store, 0) == [Result.CORRUPT]
    assert_held(store, REALM, 0, 1, slot_id(1, 0))


def test_a_read_error_takes_only_the_block_it_hits(store: NvmeStore, engine: FaultyEngine) -> None:
    assert put(store, 0, 1, 2) == [Result.OK] * 3
    # The call for all three fails, then they are tried one by one and the second fails again.
    engine.inject(Fault.EIO, write=False)
    engine.inject(Fault.EIO, write=False, skip=1)
    assert get(store, 0, 1, 2) == [Result.OK, Result.IO_ERROR, Result.OK]
    assert list(store.folder_errors().values()) == [1]


@pytest.mark.parametrize("fault, result", [(Fault.EIO, Result.IO_ERROR), (Fault.ENOSPC, Result.NO_SPACE)])
@pytest.mark.parametrize("path_part", ["segment-", "journal-"])
def test_a_failed_write_says_why_and_is_not_there_after_a_restart(
    tmp_path: Path, store: NvmeStore, engine: FaultyEngine, fault: Fault, result: Result, path_part: str
) -> None:
    assert put(store, 0) == [Result.OK]
    engine.inject(fault, write=True, path_part=path_part)
    assert put(store, 1) == [result]
    assert put(store, 2) == [Result.OK]
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert [key for _, key, *_ in recovered.blocks] == [key_of(0), key_of(2)]
    again.close()


def test_three_write_errors_in_a_row_stop_new_segments_until_a_minute_has_passed(tmp_path: Path) -> None:
    now = [100.0]
    engine = FaultyEngine(ThreadEngine())
    store, _ = open_store(config_for(tmp_path / "a", tmp_path / "b"), engine, clock=lambda: now[0])
    store.register_realm(REALM)
    for extent in range(1, 5):
        store.add_extent(extent, SLOT, 4)
    assert store.write([block(REALM, 0, 1, slot_id(1, 0))]) == [Result.OK]
    bad = "a" if list((tmp_path / "a").glob("segment-*")) else "b"
    engine.inject(Fault.EIO, write=True, count=3, path_part=f"/{bad}/segment-")
    for n in range(1, 4):
        assert store.health()[str(tmp_path / bad)] == "ok"
        assert store.write([block(REALM, n, n + 1, slot_id(1, n))]) == [Result.IO_ERROR]
    assert store.health()[str(tmp_path / bad)].startswith("failing: ")
    assert get(store, 0) == [Result.OK], "reads are still tried"
    for n, extent in ((4, 2), (5, 3)):
        assert store.write([block(REALM, n, n + 1, slot_id(extent, 0))]) == [Result.OK]
        assert not list((tmp_path / bad).glob(f"segment-{extent}-*"))
    now[0] += 61
    assert store.health()[str(tmp_path / bad)] == "ok"
    store.close()


def test_a_full_disk_is_told_once_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier that can make no segment is silent no longer; what it tries again every few seconds does not fill the log."""
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(REALM)
    for extent in (1, 2, 3):
        store.add_extent(extent, SLOT, 16)
    for time, extent in enumerate((1, 2), 1):
        with monkeypatch.context() as patch:
            patch.setattr("kvtierd.tiers.folder.Folder.free_bytes", lambda _: 16 * SLOT - 1)
            for n in range(3):
                assert store.write([block(REALM, n, n + 1, slot_id(extent, n))]) == [Result.NO_SPACE]
        assert sum("no segment can be made" in record.getMessage() for record in caplog.records) == time
        assert store.write([block(REALM, 9, 10, slot_id(extent, 0))]) == [Result.OK]
    store.close()


def test_a_full_disk_is_no_space_and_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(tmp_path)
    store, _ = open_store(config)
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 16)
    with monkeypatch.context() as patch:
        patch.setattr("kvtierd.tiers.folder.Folder.free_bytes", lambda _: 16 * SLOT - 1)
        assert put(store, 0) == [Result.NO_SPACE]
    with monkeypatch.context() as patch:

        def no_room(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no room")

        patch.setattr("os.posix_fallocate", no_room)
        assert put(store, 0) == [Result.NO_SPACE]
    assert not list(tmp_path.glob("segment-*"))
    assert store.health() == {str(tmp_path): "ok"}, "a full disk is not a broken one"
    assert put(store, 0) == [Result.OK]
    store.close()


def test_an_unfinished_segment_that_cannot_be_deleted_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = open_store(config_for(tmp_path, capacity=8 * MIB))
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 4 * MIB // SLOT)
    store.add_extent(2, SLOT, 4 * MIB // SLOT)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", broken)
        patch.setattr("os.unlink", broken)
        assert put(store, 0) == [Result.IO_ERROR]
    (left,) = tmp_path.glob("*.tmp")
    assert store.write([block(REALM, 1, 2, slot_id(2, 0))]) == [Result.NO_SPACE]
    store.close()
    store, _ = open_store(config_for(tmp_path, capacity=8 * MIB))
    assert not left.exists()
    store.close()


def test_extents_beyond_the_capacity_are_no_space(tmp_path: Path) -> None:
    store, _ = open_store(config_for(tmp_path, capacity=8 * MIB))
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 4 * MIB // SLOT)
    store.add_extent(2, SLOT, 4 * MIB // SLOT)
    assert put(store, 0) == [Result.OK]
    assert store.write([block(REALM, 1, 2, slot_id(2, 0))]) == [Result.NO_SPACE]
    store.drop_extent(1)
    assert store.write([block(REALM, 1, 2, slot_id(2, 0))]) == [Result.OK]
    assert store.used_file_bytes() <= 8 * MIB
    store.close()


def test_all_files_together_stay_below_the_capacity_and_writes_stop_until_a_snapshot(tmp_path: Path) -> None:
    realm = realm_of(1)
    store, _ = open_store(config_for(tmp_path, capacity=4 * MIB))
    store.register_realm(realm)
    store.add_extent(1, 8192, store.capacity_bytes // 8192)
    results = []
    for generation in range(1, 3000):
        results += store.write([block(realm, generation, generation, slot_id(1, generation % 100))])
        if results[-1] is not Result.OK:
            break
        if generation % 100 == 0:
            assert store.used_file_bytes() <= 4 * MIB
    assert results[-1] is Result.NO_SPACE
    assert store.needs_snapshot()
    assert store.used_file_bytes() <= 4 * MIB
    store.close()


def test_small_slots_move_in_large_calls(store: NvmeStore, engine: FaultyEngine) -> None:
    realm = realm_of(4096, realm_id=2)
    store.register_realm(realm)
    store.add_extent(2, 8192, 1024)
    engine.transfers.clear()
    assert set(store.write([block(realm, n, n + 1, slot_id(2, n)) for n in range(1024)])) == {Result.OK}
    sizes = [size for _, path, size in engine.transfers if "segment-" in path]
    assert sizes == [4 * MIB, 4 * MIB]


def test_calls_do_not_grow_beyond_what_the_device_can_use(store: NvmeStore, engine: FaultyEngine) -> None:
    realm = realm_of(MIB, realm_id=2)
    store.register_realm(realm)
    store.add_extent(2, MIB + 4096, 20)
    engine.transfers.clear()
    assert set(store.write([block(realm, n, n + 1, slot_id(2, n)) for n in range(20)])) == {Result.OK}
    sizes = [size for _, path, size in engine.transfers if "segment-" in path]
    assert sizes == [7 * (MIB + 4096)] * 2 + [6 * (MIB + 4096)]


def test_only_so_many_files_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MAX_OPEN_SEGMENTS", 2)
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(REALM)
    for extent in range(1, 8):
        store.add_extent(extent, SLOT, 1)
        assert store.write([block(REALM, extent, extent, slot_id(extent, 0))]) == [Result.OK]
    assert len(store._table._open) <= 2
    for extent in range(1, 8):
        assert_held(store, REALM, extent, extent, slot_id(extent, 0))
    store.close()


def test_a_dropped_extents_file_is_deleted(store: NvmeStore, tmp_path: Path) -> None:
    assert put(store, 0) == [Result.OK]
    store.drop_extent(1)
    store._table.delete_dropped()
    assert not list(tmp_path.glob("segment-*"))


def test_a_block_of_two_folders_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    engine = FaultyEngine(ThreadEngine())
    realm = realm_of(SIZE, SIZE)
    config = config_for(tmp_path / "a", tmp_path / "b")
    store, _ = open_store(config, engine)
    store.register_realm(realm)
    store.add_extent(1, SLOT, 4)
    store.add_extent(2, SLOT, 4)
    assert store.write([block(realm, 0, 1, slot_id(1, 0), slot_id(2, 0))]) == [Result.OK]
    assert [len(list((tmp_path / f).glob("segment-*"))) for f in "ab"] == [1, 1]
    engine.inject(Fault.EIO, write=True, path_part="/b/journal-")
    assert store.write([block(realm, 1, 2, slot_id(1, 1), slot_id(2, 1))]) == [Result.IO_ERROR]
    crash(store)
    again, recovered = open_store(config)
    assert [key for _, key, *_ in recovered.blocks] == [key_of(0)]
    assert_held(again, realm, 0, 1, slot_id(1, 0), slot_id(2, 0))
    again.close()


def test_a_realm_that_no_folder_keeps_is_refused(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("kvtierd.tiers.nvme.save_pool", fails)
    monkeypatch.setattr("kvtierd.tiers.nvme.append_realm", fails)
    for in_use in (None, {REALM.realm_id}):
        with pytest.raises(RequestError, match="broken") as refused:
            store.register_realm(realm_of(5, realm_id=9), in_use)
        assert refused.value.reason is Reason.IO
    store.register_realm(REALM)  # known already: nothing to save


def test_forgetting_many_blocks_keeps_memory_bounded(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtierd.tiers.journal.MAX_PENDING_BYTES", 6400)
    assert put(store, 0) == [Result.OK]
    journal = next(iter(store._journals.values()))
    before = journal.size_bytes
    for generation in range(250):
        store.forget([BlockIo(1, key_of(0), 1000 + generation, (slot_id(1, 0),), [])])
        assert len(journal._pending) <= 6464
    assert journal.size_bytes > before
