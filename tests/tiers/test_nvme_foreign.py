"""Goal: what others put into the folder, or on its disk, costs neither the start nor a good block.

Method: files that are named almost like the cache's, or hold what cannot be, beside real blocks; a disk that others filled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.errors import StartupError
from kvtierd.model import slot_id
from kvtierd.tiers.base import Result
from kvtierd.tiers.folder import Folder
from kvtierd.tiers.nvme import NvmeStore

from .conformance import block, buffer_of, payload, realm_of, slot_bytes_for
from .nvme_tools import MIB, config_for, open_store, segment_path

SIZE = MIB // 4
SLOT = slot_bytes_for(SIZE)
REALM = realm_of(SIZE)
SLOTS = 8
CAPACITY = 16 * MIB


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A folder with four segments of eight blocks: more than half of the capacity."""
    store, _ = open_store(config_for(tmp_path, capacity=CAPACITY))
    store.register_realm(REALM)
    for extent_id in range(1, 5):
        store.add_extent(extent_id, SLOT, SLOTS)
        blocks = [block(REALM, (extent_id, i), 10 * extent_id + i, slot_id(extent_id, i)) for i in range(SLOTS)]
        assert store.write(blocks) == [Result.OK] * SLOTS
    store.close()
    return tmp_path


def readable(folder: Path) -> int:
    """Open the store, read all blocks that it recovers, compare them, write one more. Returns how many there were."""
    store, recovered = open_store(config_for(folder, capacity=CAPACITY))
    entries = list(recovered.blocks)
    names = {block(REALM, (e, i), 0, 0).key: (e, i) for e in range(1, 5) for i in range(SLOTS)}
    for realm_id, key, generation, slots, _ in entries:
        assert realm_id == REALM.realm_id
        wanted = block(REALM, names[key], generation, *slots, filled=False)
        assert store.read([wanted]) == [Result.OK]
        assert bytes(wanted.buffers[0]) == payload((names[key], 0), SIZE)
    store.add_extent(recovered.next_extent_id, SLOT, 1)
    assert recovered.next_extent_id < 1 << 30
    new = block(REALM, "new", recovered.next_generation, slot_id(recovered.next_extent_id, 0))
    assert store.write([new]) == [Result.OK]
    again = block(REALM, "new", new.generation, *new.slots, filled=False)
    again.buffers[0][:] = buffer_of(SIZE)
    assert store.read([again]) == [Result.OK]
    store.drop_extent(recovered.next_extent_id)
    store.close()
    return len(entries)


def copy_of_a_segment(name: str) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        return Path(shutil.copy(segment_path(folder, 1), folder / name))

    return put


def file_of(name: str, content: bytes) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return put


def folder_of(name: str) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        (folder / name).mkdir()
        return folder / name

    return put


def pipe_of(name: str) -> Callable[[Path], Path]:
    def put(folder: Path) -> Path:
        os.mkfifo(folder / name)
        return folder / name

    return put


FOREIGN: dict[str, Callable[[Path], Path]] = {
    "id beyond 64 bits": copy_of_a_segment(f"segment-99999999999999999999-{SLOT}-{SLOTS}.kv"),
    "id beyond 32 bits": copy_of_a_segment(f"segment-4294967296-{SLOT}-{SLOTS}.kv"),
    "last id there is": copy_of_a_segment(f"segment-2147483647-{SLOT}-{SLOTS}.kv"),
    "id 0": copy_of_a_segment(f"segment-0-{SLOT}-{SLOTS}.kv"),
    "id with zeros": copy_of_a_segment(f"segment-007-{SLOT}-{SLOTS}.kv"),
    "digits of another script": copy_of_a_segment(f"segment-\u0663-{SLOT}-{SLOTS}.kv"),
    "same id, other shape": copy_of_a_segment(f"segment-2-{2 * SLOT}-{SLOTS // 2}.kv"),
    "count beyond 32 bits": file_of("segment-70-8192-99999999999999.kv", b""),
    "count 0": file_of("segment-70-8192-0.kv", b""),
    "slots of a byte": file_of("segment-70-1-100.kv", bytes(100)),
    "longer than it says": file_of("segment-70-8192-1.kv", bytes(9000)),
    "segment that is a folder": folder_of(f"segment-70-{SLOT}-{SLOTS}.kv"),
    "segment that is a pipe": pipe_of(f"segment-70-{SLOT}-{SLOTS}.kv"),
    "unfinished folder": folder_of("segment-1-8192-3.kv.tmp"),
    "journal number beyond 64 bits": file_of("journal-99999999999999999999999.kvj", b"?"),
    "journal that is a folder": folder_of("journal-99.kvj"),
    "journal that is a pipe": pipe_of("journal-99.kvj"),
    "snapshot number beyond 64 bits": file_of("snapshot-99999999999999999999999.kvs", b"?"),
}


@pytest.mark.parametrize("put", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files_are_left_alone_and_cost_nothing(
    filled: Path, put: Callable[[Path], Path], caplog: pytest.LogCaptureFixture
) -> None:
    foreign = put(filled)
    before = foreign.stat()
    for _ in range(2):
        caplog.clear()
        assert readable(filled) == 4 * SLOTS
        after = foreign.stat()
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
        assert foreign.name in caplog.text or "\u0663" in foreign.name


@pytest.mark.parametrize("kind", ["journal", "snapshot"])
def test_a_file_of_records_under_another_number_is_set_aside(filled: Path, kind: str) -> None:
    """A copy of an old one would otherwise count as the newest, and newer ones would go for it."""
    (journal,) = filled.glob("journal-*.kvj")
    name = f"{kind}-999.kv{'j' if kind == 'journal' else 's'}"
    shutil.copy(journal, filled / name)
    assert readable(filled) == 4 * SLOTS
    assert (filled / f"{name}.damaged-1").exists()


def test_a_segment_that_lost_its_end_is_used_while_there_is_room(filled: Path) -> None:
    """After a power cut: what is left is read, what is not is a miss, and the file does not stay behind for ever."""
    os.truncate(segment_path(filled, 3), SLOT * SLOTS // 2)
    store, recovered = open_store(config_for(filled, capacity=CAPACITY))
    assert [e.extent_id for e in recovered.extents] == [1, 2, 3, 4]
    results = [store.read([block(REALM, "?", g, *slots, filled=False)]) for _, _, g, slots, _ in recovered.blocks]
    assert len(results) == 4 * SLOTS
    store.drop_extent(3)
    store.close()
    assert not list(filled.glob("segment-3-*"))


def whole(extent_id: int) -> tuple[str, int]:
    """Name and size of a segment like those that are there."""
    return f"segment-{extent_id}-{SLOT}-{SLOTS}.kv", SLOT * SLOTS


BACK: dict[str, dict[str, int]] = {
    "short ones": {f"segment-70-{MIB}-15.kv": MIB, f"segment-71-{MIB}-4.kv": 0},
    "whole ones": dict(map(whole, range(5, 9))),
    "both": {f"segment-5-{MIB}-4.kv": 3 * MIB, **dict(map(whole, range(6, 9)))},
    "one of no size that there can be": {"segment-70-8192-4000000000.kv": 8192},
}


@pytest.mark.parametrize("files", BACK.values(), ids=BACK)
def test_what_a_power_cut_brings_back_goes_where_it_does_not_fit(filled: Path, files: dict[str, int]) -> None:
    """Goal: segments that were deleted, and are there again, neither pass the capacity nor cost a block that the journal knows."""
    for name, size_bytes in files.items():
        (filled / name).write_bytes(bytes(size_bytes))
    store, recovered = open_store(config_for(filled, capacity=CAPACITY))
    assert len(list(recovered.blocks)) == 4 * SLOTS
    assert sum(e.slot_bytes * e.slot_count for e in recovered.extents) <= store.capacity_bytes
    assert len(list(filled.glob("segment-*"))) == len(recovered.extents), "each file is in use, and is counted with its full size"
    store.close()


def test_where_blocks_must_go_those_in_segments_that_lost_a_part_go_first(filled: Path) -> None:
    """Method: removals, after which the second segment holds nothing, and a third that lost its end; then a lower capacity."""
    store, _ = open_store(config_for(filled, capacity=CAPACITY))
    store.forget([block(REALM, (2, i), 20 + i, slot_id(2, i), filled=False) for i in range(SLOTS)])
    store.close()
    os.truncate(segment_path(filled, 3), SLOT)
    for segments, left in [(3, [1, 3, 4]), (2, [1, 4]), (1, [4])]:
        store, recovered = open_store(config_for(filled, capacity=(segments * SLOTS + 2) * SLOT))
        assert [e.extent_id for e in recovered.extents] == left
        store.close()


def test_a_segment_never_takes_the_place_of_a_file_that_is_there(filled: Path) -> None:
    store, recovered = open_store(config_for(filled, capacity=CAPACITY))
    theirs = filled / f"segment-{recovered.next_extent_id}-{SLOT}-1.kv"
    theirs.write_text("precious")
    store.add_extent(recovered.next_extent_id, SLOT, 1)
    new = block(REALM, "new", recovered.next_generation, slot_id(recovered.next_extent_id, 0))
    assert store.write([new]) == [Result.IO_ERROR]
    assert theirs.read_text() == "precious"
    store.close()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_pool_file_that_is_none_is_set_aside(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "pool.json")
    open_store(config_for(tmp_path))[0].close()
    assert (tmp_path / "pool.json.damaged-1").exists()
    assert (tmp_path / "pool.json").is_file()


# ---- a disk that others have filled


def test_a_cache_starts_with_what_it_has_on_a_disk_that_others_filled(
    filled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 0)
    store, recovered = open_store(config_for(filled, capacity=CAPACITY))
    assert len(list(recovered.blocks)) == 4 * SLOTS
    assert store.capacity_bytes == 4 * SLOTS * SLOT, "no more than is allocated already"
    assert "others have filled the disk" in caplog.text
    assert "restart the daemon" in caplog.text
    written = block(REALM, "new", recovered.next_generation, slot_id(1, 0))
    assert store.write([written]) == [Result.OK]
    store.close()


def test_what_is_free_still_counts(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 2 * MIB)
    store, _ = open_store(config_for(filled, capacity=CAPACITY))
    held = 4 * SLOTS * SLOT
    assert held + MIB < store.capacity_bytes <= held + 2 * MIB
    store.close()


def test_a_cache_without_segments_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_store(config_for(tmp_path, capacity=CAPACITY))[0].close()
    monkeypatch.setattr(Folder, "free_bytes", lambda _: CAPACITY // 2)
    with pytest.raises(StartupError, match=r"only \d+ fit.*lower nvme.capacity"):
        NvmeStore.open(config_for(tmp_path, capacity=CAPACITY))
