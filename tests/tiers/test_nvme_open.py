"""Goal: the daemon starts only where it can keep its promises, and says what to do where it cannot.

Method: folders that are held, read-only, volatile, full, from another daemon or of another format.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtierd.errors import StartupError
from kvtierd.model import slot_id
from kvtierd.tiers import record
from kvtierd.tiers.base import Result
from kvtierd.tiers.folder import Folder, file_system_of
from kvtierd.tiers.nvme import NvmeStore

from .conformance import assert_held, block, key_of, realm_of, slot_bytes_for
from .nvme_tools import MIB, config_for, open_store

SIZE = MIB
SLOT = slot_bytes_for(SIZE)
REALM = realm_of(SIZE)


def test_a_second_daemon_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    store, _ = open_store(config_for(tmp_path))
    with pytest.raises(StartupError, match=f"in use by process {os.getpid()}"):
        NvmeStore.open(config_for(tmp_path))
    store.close()
    open_store(config_for(tmp_path))[0].close()


def test_a_second_daemon_in_another_process_is_refused(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.tiers.nvme_tools import config_for, open_store\n"
        "open_store(config_for(Path(sys.argv[1]))); print('ready', flush=True); sys.stdin.read()\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with pytest.raises(StartupError, match=f"in use by process {process.pid}"):
            NvmeStore.open(config_for(tmp_path))
        process.kill()
    open_store(config_for(tmp_path))[0].close()


def test_a_failed_start_holds_no_folder(tmp_path: Path) -> None:
    held, _ = open_store(config_for(tmp_path / "b"))
    with pytest.raises(StartupError, match="in use"):
        NvmeStore.open(config_for(tmp_path / "a", tmp_path / "b"))
    open_store(config_for(tmp_path / "a"))[0].close()
    held.close()


@pytest.mark.parametrize("how", ["dots", "a link", "missing", "a second mount"])
def test_a_folder_named_twice_is_refused(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path, tmp_path / "." / "x" / ".."
    if how == "a link":
        second = tmp_path / "link"
        second.symlink_to(tmp_path)
    elif how == "missing":
        first, second = tmp_path / "none", tmp_path / "x" / ".." / "none"
    elif how == "a second mount":
        first, second = (tmp_path / name for name in "ab")
        first.mkdir()
        real = os.stat
        monkeypatch.setattr("os.stat", lambda path, **more: real(first if path == str(second) else path, **more))
    with pytest.raises(StartupError, match=r"is twice in nvme.folders, by one name or two"):
        NvmeStore.open(config_for(first, second))


def test_a_read_only_file_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(StartupError, match="its file system is read-only: check its device, and remount it"):
        NvmeStore.open(config_for(tmp_path))


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(StartupError, match="cannot be made"):
        NvmeStore.open(config_for(tmp_path / "f"))


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, who may write anywhere
    with pytest.raises(StartupError, match=r"not writable.*chown"):
        NvmeStore.open(config_for(tmp_path))


@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_a_volatile_file_system_is_refused_unless_allowed(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtierd.tiers.folder.file_system_of", lambda _: kind)
    config = config_for(tmp_path)
    with pytest.raises(StartupError, match=f"is on {kind}.*nvme.allow_volatile = true"):
        NvmeStore.open(config.model_copy(update={"allow_volatile": False}))
    open_store(config)[0].close()


def test_the_file_system_is_recognised() -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    assert file_system_of(Path("/")) != ""


@pytest.mark.parametrize("direct", ["auto", "require", "off"])
def test_where_direct_io_is_missing(
    tmp_path: Path, direct: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Folder, "probe_direct", lambda _: "Invalid argument")
    if direct == "require":
        with pytest.raises(StartupError, match=r"does not take O_DIRECT \(Invalid argument\)"):
            NvmeStore.open(config_for(tmp_path, direct=direct))
        return
    store, _ = open_store(config_for(tmp_path, direct=direct))
    assert store.path == "buffered"
    assert ("page cache" in caplog.text) == (direct == "auto")
    store.close()


def test_a_capacity_that_does_not_fit_names_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 100 * MIB)
    config = config_for(tmp_path, capacity=90 * MIB).model_copy(update={"reserve": 20 * MIB})
    with pytest.raises(StartupError, match=rf"{90 * MIB} bytes, but only {80 * MIB + 8192} fit") as refused:
        NvmeStore.open(config)
    assert str(20 * MIB) in str(refused.value)


def test_what_the_cache_already_takes_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(tmp_path, capacity=64 * MIB)
    store, _ = open_store(config)
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 40)
    assert store.write([block(REALM, 0, 1, slot_id(1, 0))]) == [Result.OK]
    store.close()
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 30 * MIB)
    open_store(config)[0].close()


def test_a_lowered_capacity_drops_whole_segments_oldest_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(REALM)
    for extent in range(1, 5):
        store.add_extent(extent, SLOT, 8)
        assert store.write([block(REALM, extent, extent, slot_id(extent, 0))]) == [Result.OK]
    store.close()
    store, recovered = open_store(config_for(tmp_path, capacity=20 * MIB))
    assert "2 segments (16842752 bytes) were deleted, 2 of them with blocks" in caplog.text
    assert [key for _, key, *_ in recovered.blocks] == [key_of(3), key_of(4)]
    assert store.used_file_bytes() <= 20 * MIB
    store.close()


def test_folders_of_different_daemons_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        store, _ = open_store(config_for(tmp_path / name))
        store.register_realm(REALM)
        store.close()
    with pytest.raises(StartupError, match="caches of different daemons"):
        NvmeStore.open(config_for(tmp_path / "a", tmp_path / "b"))


def test_folders_may_be_added_and_taken_away(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    store, _ = open_store(config_for(a))
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 2)
    assert store.write([block(REALM, 0, 1, slot_id(1, 0))]) == [Result.OK]
    store.close()
    store, _ = open_store(config_for(b, a))
    store.add_extent(2, SLOT, 2)
    assert store.write([block(REALM, 1, 2, slot_id(2, 0))]) == [Result.OK]
    store.close()
    store, recovered = open_store(config_for(b))
    assert [key for _, key, *_ in recovered.blocks] == [key_of(1)]
    assert recovered.realms == [REALM]
    # Meanwhile extent 1 is used again here; the older one that comes back gives way.
    store.add_extent(1, SLOT, 2)
    assert store.write([block(REALM, 5, 9, slot_id(1, 0))]) == [Result.OK]
    os.utime(next(a.glob("segment-1-*")), (1, 1))
    store.close()
    store, recovered = open_store(config_for(a, b))
    assert [(key, generation) for _, key, generation, *_ in recovered.blocks] == [(key_of(1), 2), (key_of(5), 9)]
    assert_held(store, REALM, 5, 9, slot_id(1, 0))
    store.close()


def test_unfinished_files_are_deleted_and_foreign_ones_left_alone(tmp_path: Path) -> None:
    for name in ("segment-3-8192-4.kv.tmp", "snapshot-2.kvs.tmp", "pool.json.tmp", "notes.txt", "segment-x.kv"):
        (tmp_path / name).write_text("x")
    store, recovered = open_store(config_for(tmp_path))
    assert recovered.extents == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LOCK", "journal-1.kvj", "notes.txt", "pool.json", "segment-x.kv"]
    store.close()


def test_a_file_header_of_the_present_version_round_trips() -> None:
    header = record.FileHeader(7, bytes(range(16)), 11, 13)
    raw = header.pack()
    assert len(raw) == record.FILE_HEADER_BYTES
    assert record.parse_file_header(raw) == header
    for i in range(56):
        assert record.parse_file_header(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :]) is None
