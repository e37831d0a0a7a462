"""Goal: a start goes on without a folder that is lost, and believes nothing of it when it is there again.

Method: one of two folders is lost in each way there is, blocks are saved meanwhile under numbers that it used, and it is back.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtierd.errors import StartupError
from kvtierd.model import slot_id
from kvtierd.tiers import folder, log_file, nvme_open, pool_file
from kvtierd.tiers.base import Recovered, Result
from kvtierd.tiers.nvme import NvmeStore
from tests.tiers.conformance import assert_held, block, key_of, realm_of, slot_bytes_for
from tests.tiers.nvme_tools import MIB, config_for, crash, open_store

SIZE = 5000
REALM = realm_of(SIZE)
SLOTS = 64
CAPACITY = 64 * MIB


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Two folders, each on a device of its own as it seems, with a block in each of four extents."""
    mounted = tmp_path / "mnt"
    a, b = mounted / "a", mounted / "b"
    monkeypatch.setattr(folder, "mount_point_of", lambda path: str(path) if os.path.isdir(path) else "/")
    store, _ = open_store(config_for(a, b, capacity=CAPACITY))
    store.register_realm(REALM)
    for extent in range(1, 5):
        save(store, extent, extent)
    store.close()
    return a, b


def save(store: NvmeStore, extent: int, generation: int, name: object = None) -> None:
    store.add_extent(extent, slot_bytes_for(SIZE), SLOTS)
    name = extent if name is None else name
    assert store.write([block(REALM, name, generation, slot_id(extent, 0))]) == [Result.OK]


def in_folder(path: Path) -> set[int]:
    return {int(p.name.split("-")[1]) for p in path.glob("segment-*")}


def fails_below(path: Path, original: Callable[..., Any], times: int = 1000) -> Callable[..., Any]:
    """As the original, but for files below a path, which cannot be read so many times."""
    left = [times]

    def work(name: str, *args: Any) -> Any:
        if str(name).startswith(str(path)) and left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error", name)
        return original(name, *args)

    return work


def lose(how: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "not mounted":
        path.rename(path.with_name("unplugged"))
    elif how == "unreadable":
        access = os.access
        monkeypatch.setattr("os.access", lambda p, mode: Path(p) != path and access(p, mode))
    elif how == "no folder":
        path.rename(path.with_name("unplugged"))
        path.write_text("")
        monkeypatch.setattr(folder, "mount_point_of", str)
    elif how == "error in pool.json":
        monkeypatch.setattr(pool_file, "read_json", fails_below(path, pool_file.read_json))
    else:
        monkeypatch.setattr(log_file, "read_log", fails_below(path, log_file.read_log))


def find(path: Path) -> None:
    unplugged = path.with_name("unplugged")
    if unplugged.exists():
        if path.is_file():
            path.unlink()
        unplugged.rename(path)


@pytest.mark.parametrize("how", ["not mounted", "unreadable", "no folder", "error in pool.json", "error in a journal"])
def test_the_others_go_on_and_what_comes_back_is_not_believed(
    folders: tuple[Path, Path], how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = folders
    of_a, of_b = in_folder(a), in_folder(b)
    assert of_a and of_b
    whole, _ = open_store(config_for(a, b, capacity=CAPACITY))
    capacity_bytes = whole.capacity_bytes
    whole.close()
    with monkeypatch.context() as patch:
        lose(how, b, patch)
        store, recovered = open_store(config_for(a, b, capacity=CAPACITY))
        assert {key for _, key, *_ in recovered.blocks} == {key_of(n) for n in of_a}
        assert list(store.lost) == [str(b)] and store.health()[str(b)].startswith("lost: ")
        assert f"a folder is lost: nvme folder {b} " in caplog.text
        assert store.capacity_bytes == capacity_bytes // 2
        # Meanwhile one of the lost blocks is saved anew, and an extent and a generation are used again.
        extent, generation = max(of_b), max(of_b) + 1
        save(store, extent, generation, name=min(of_b))
        crash(store)
        again, recovered = open_store(config_for(a, b, capacity=CAPACITY))
        # It is known at the next start too; what could not be read there is not asked again.
        assert list(again.lost) == ([] if how == "error in a journal" else [str(b)])
        again.close()
    find(b)
    store, recovered = open_store(config_for(a, b, capacity=CAPACITY))
    assert "was away while others of its cache were in use" in caplog.text
    assert not store.lost and store.capacity_bytes == capacity_bytes
    assert {key for _, key, *_ in recovered.blocks} == {key_of(n) for n in (*of_a, min(of_b))}
    assert_held(store, REALM, min(of_b), generation, slot_id(extent, 0))
    assert not in_folder(b)
    for fresh in range(recovered.next_extent_id, recovered.next_extent_id + 2):
        save(store, fresh, recovered.next_generation + fresh)
    assert in_folder(b), "it is in use again"
    crash(store)
    store, recovered = open_store(config_for(a, b, capacity=CAPACITY))
    assert len(list(recovered.blocks)) == len(of_a) + 3, "what it holds now counts"
    store.close()


def test_of_two_halves_that_went_on_alone_one_counts(folders: tuple[Path, Path]) -> None:
    a, b = folders
    of_a = in_folder(a)
    for path in folders:
        path.rename(path.with_name("unplugged"))
        store, _ = open_store(config_for(a, b, capacity=CAPACITY))
        assert list(store.lost) == [str(path)]
        save(store, 100, 100, name=str(path))
        store.close()
        find(path)
    store, recovered = open_store(config_for(b, a, capacity=CAPACITY))
    of_b = {1, 2, 3, 4} - of_a
    assert {key for _, key, *_ in recovered.blocks} == {key_of(n) for n in (*of_b, str(a))}
    assert not in_folder(a)
    store.close()


def test_one_error_does_not_lose_a_folder(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "read_log", fails_below(folders[1], log_file.read_log, times=1))
    store, recovered = open_store(config_for(*folders, capacity=CAPACITY))
    assert not store.lost and len(list(recovered.blocks)) == 4
    store.close()


def with_a_new_device(a: Path, b: Path) -> tuple[NvmeStore, Recovered]:
    """A start where something else is mounted in the place of b."""
    b.rename(b.with_name("unplugged"))
    b.mkdir()
    return open_store(config_for(a, b, capacity=CAPACITY))


def test_a_new_device_in_the_place_of_a_lost_one_is_taken(folders: tuple[Path, Path]) -> None:
    a, b = folders
    of_a = in_folder(a)
    store, recovered = with_a_new_device(a, b)
    assert not store.lost and {key for _, key, *_ in recovered.blocks} == {key_of(n) for n in of_a}
    store.close()


def test_an_old_device_that_takes_the_place_of_a_new_one_is_not_believed(folders: tuple[Path, Path]) -> None:
    a, b = folders
    of_a = in_folder(a)
    store, recovered = with_a_new_device(a, b)
    fresh = range(recovered.next_extent_id, recovered.next_extent_id + 4)
    for extent in fresh:  # numbers that the old device has used, too
        save(store, extent, recovered.next_generation + extent, name=f"new {extent}")
    of_new_b = {extent for extent in in_folder(b) if extent in fresh}
    assert of_new_b and of_new_b != set(fresh)
    store.close()
    b.rename(b.with_name("new"))
    find(b)
    store, recovered = open_store(config_for(a, b, capacity=CAPACITY))
    kept = {key_of(f"new {extent}") for extent in set(fresh) - of_new_b}
    assert {key for _, key, *_ in recovered.blocks} == {key_of(n) for n in of_a} | kept
    store.close()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("written", range(5))
def test_a_start_that_ends_half_way_takes_no_folder_for_one_that_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, back: bool
) -> None:
    a, b, c = folders = [tmp_path / name for name in "abc"]
    monkeypatch.setattr(folder, "mount_point_of", lambda path: str(path) if os.path.isdir(path) else "/")
    config = config_for(*folders, capacity=CAPACITY)
    store, _ = open_store(config)
    store.register_realm(REALM)
    for extent in range(1, 7):
        save(store, extent, extent)
    store.close()
    left = {key_of(n) for path in (a, c) for n in in_folder(path)}
    assert in_folder(a) and in_folder(b) and in_folder(c)
    b.rename(b.with_name("unplugged"))
    ends = []
    for _ in range(2):
        with monkeypatch.context() as patch, contextlib.suppress(StartupError):
            patch.setattr(nvme_open, "save_pool", ends_after(written))
            NvmeStore.open(config).close()
            ends.append("served")
    assert len(ends) == max(written - 2, 0), "of 4 files to write, and of the last one the next time"
    if back:
        find(b)
    store, recovered = open_store(config)
    found = {key for _, key, *_ in recovered.blocks}
    assert found >= left, "what was there all along stays"
    assert found == left or (back and not ends), "what was away while others were served does not"
    store.close()
    store, recovered = open_store(config)
    assert {key for _, key, *_ in recovered.blocks} == found
    store.close()


def ends_after(written: int) -> Callable[..., None]:
    """Files are written so many times, and then the start is over."""
    left = [written]

    def save(*args: Any) -> None:
        if not left[0]:
            raise StartupError("killed")
        left[0] -= 1
        pool_file.save_pool(*args)

    return save


def test_a_folder_that_was_never_in_use_is_no_lost_one(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "typo").write_text("")
    with pytest.raises(StartupError, match="typo cannot be made"):
        NvmeStore.open(config_for(*folders, tmp_path / "typo"))


def test_all_lost_is_refused(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(log_file, "read_log", fails_below(folders[0].parent, log_file.read_log))
        with pytest.raises(StartupError, match=r"cannot be prepared.*Input/output error.*check the device"):
            NvmeStore.open(config_for(*folders, capacity=CAPACITY))
    for path in folders:
        path.rename(tmp := path.with_name(path.name + "-gone"))
        path.write_text("")
        assert tmp.exists()
    with pytest.raises(StartupError, match="cannot be made"):
        NvmeStore.open(config_for(*folders, capacity=CAPACITY))
