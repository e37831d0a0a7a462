"""Goal: a daemon knows after a restart whose blocks it holds, whatever happened to the files, and a new realm costs one line.

Method: stores on real folders; files cut off, damaged, copied and left behind by crashes.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from kvtierd.model import Result, slot_id
from kvtierd.tiers.base import RealmInfo
from kvtierd.tiers.nvme import SPARE_REALMS, NvmeStore
from kvtierd.tiers.pool_file import append_realm
from tests.tiers.conformance import assert_held, block, realm_of, slot_bytes_for
from tests.tiers.nvme_tools import MIB, config_for, open_store

SIZE = MIB
SLOT = slot_bytes_for(SIZE)


def realm(number: int, tenant: str = "") -> RealmInfo:
    return realm_of(SIZE, realm_id=number, tenant=tenant or f"t{number}")


def save(store: NvmeStore, info: RealmInfo, extent_id: int = 1) -> None:
    if not store.has_extent(extent_id):
        store.add_extent(extent_id, SLOT, 8)
    assert store.write([block(info, info.realm_id, info.realm_id, slot_id(extent_id, info.realm_id))]) == [Result.OK]


def test_each_new_realm_adds_a_line_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    store, _ = open_store(config_for(tmp_path))
    whole = (tmp_path / "pool.json").stat()
    sizes = []
    for number in range(1, 201):
        store.register_realm(realm(number))
        sizes.append((tmp_path / "realms.log").stat().st_size)
    now = (tmp_path / "pool.json").stat()
    assert (now.st_ino, now.st_size) == (whole.st_ino, whole.st_size)
    grown = [b - a for a, b in itertools.pairwise(sizes)]
    assert max(grown) < 1.1 * min(grown)
    store.close()
    store, recovered = open_store(config_for(tmp_path))
    assert recovered.realms == [realm(n) for n in range(1, 201)]
    assert not (tmp_path / "realms.log").exists(), "a start puts all into one file"
    store.close()
    store, recovered = open_store(config_for(tmp_path))
    assert len(recovered.realms) == 200
    store.close()


@pytest.mark.parametrize("damage", ["cut off", "flipped", "no object", "of another pool"])
def test_a_damaged_line_costs_its_own_realm_only(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = open_store(config_for(tmp_path))
    path = tmp_path / "realms.log"
    for number in (1, 2):
        store.register_realm(realm(number))
    lines = path.read_bytes().split(b"\n")
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:-20])
    elif damage == "flipped":
        path.write_bytes(path.read_bytes().replace(b'"tenant": "t2"', b'"tenant": "t9"'))
    elif damage == "no object":
        path.write_bytes(b"\n".join([lines[1], b"[1, 2]", b'"text"', b"\xff\xfe", b""]))
    else:
        path.write_bytes(path.read_bytes().replace(store._pool.pool_id.hex().encode(), bytes(16).hex().encode(), 1))
    store.register_realm(realm(3))
    save(store, realm(3))
    store.close()
    store, recovered = open_store(config_for(tmp_path))
    survivor = 2 if damage == "of another pool" else 1
    assert recovered.realms == [realm(survivor), realm(3)]
    assert "passed over" in caplog.text
    assert_held(store, realm(3), 3, 3, slot_id(1, 3))
    store.close()


def test_a_full_disk_in_the_middle_of_a_line_leaves_the_next_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(realm(1))
    with open(tmp_path / "realms.log", "ab") as f:
        f.write(b'\n{"pool_id": "abc')  # what a disk that was full took of it
    store.register_realm(realm(2))
    store.close()
    store, recovered = open_store(config_for(tmp_path))
    assert recovered.realms == [realm(1), realm(2)]
    store.close()


def test_a_crash_before_the_log_goes_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = open_store(config_for(tmp_path))
    for number in (1, 2):
        store.register_realm(realm(number))
    save(store, realm(2))
    left = (tmp_path / "realms.log").read_bytes()
    store.register_realm(realm(3), {2})
    store.close()
    (tmp_path / "realms.log").write_bytes(left)
    store, recovered = open_store(config_for(tmp_path))
    assert recovered.realms == [realm(1), realm(2), realm(3)], "the first is forgotten again when places are rare"
    assert_held(store, realm(2), 2, 2, slot_id(1, 2))
    store.close()


def test_of_two_realms_with_one_identity_the_later_counts(tmp_path: Path) -> None:
    """A realm that was forgotten, as it held nothing, and came back under a new id while its line was still there."""
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(realm(1, "t"))
    store.register_realm(realm(2, "t"))
    save(store, realm(2, "t"))
    store.close()
    store, recovered = open_store(config_for(tmp_path))
    assert recovered.realms == [realm(2, "t")]
    assert_held(store, realm(2, "t"), 2, 2, slot_id(1, 2))
    store.close()


def test_a_damaged_pool_file_takes_the_log_aside_with_it(tmp_path: Path) -> None:
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(realm(1))
    store.close()
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(realm(2))
    store.close()
    (tmp_path / "pool.json").write_text("{")
    store, recovered = open_store(config_for(tmp_path))
    assert recovered.realms == []
    assert {p.name for p in tmp_path.glob("*.damaged-1")} >= {"pool.json.damaged-1", "realms.log.damaged-1"}
    store.close()


def test_folders_tell_each_other_what_one_missed(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    store, _ = open_store(config_for(*folders))
    store.register_realm(realm(1))
    store.close()
    store, _ = open_store(config_for(*folders))
    store.register_realm(realm(2))
    store.close()
    os.unlink(folders[1] / "realms.log")
    store, recovered = open_store(config_for(*folders))
    assert recovered.realms == [realm(1), realm(2)]
    store.close()
    store, recovered = open_store(config_for(folders[1]))
    assert recovered.realms == [realm(1), realm(2)]
    store.close()


def test_what_folders_disagree_about_is_dropped_and_its_id_not_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two tenants under one id: a disk has lost what it had called written. Nobody may get the other's blocks."""
    folders = [tmp_path / "a", tmp_path / "b"]
    store, _ = open_store(config_for(*folders))
    store.register_realm(realm(1))
    store.register_realm(realm(2, "x"))
    save(store, realm(2, "x"), extent_id=1)
    pool_id, other = store._pool.pool_id, store._folders[1]
    os.unlink(other.file("realms.log"))
    append_realm(other, pool_id, realm(2, "y"))
    store.close()
    store, recovered = open_store(config_for(*folders))
    assert recovered.realms == [realm(1)] and list(recovered.blocks) == []
    assert "disagree about whose blocks those of realm 2 are" in caplog.text
    assert recovered.next_realm_id > 2
    store.close()


def test_few_forgotten_realms_stay_and_many_are_written_out(tmp_path: Path) -> None:
    store, _ = open_store(config_for(tmp_path))
    for number in range(1, SPARE_REALMS + 11):
        store.register_realm(realm(number))
    assert not store.holds_forgotten(5)
    assert store.holds_forgotten(4)
    store.close()


def test_too_many_realms_are_trimmed_to_those_with_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtierd.tiers.nvme.MAX_REALMS", 2)
    store, _ = open_store(config_for(tmp_path))
    realms = [realm_of(SIZE, realm_id=n, tenant=f"t{n}") for n in range(1, 5)]
    for realm in realms:
        store.register_realm(realm)
    store.add_extent(1, SLOT, 2)
    assert store.write([block(realms[2], 0, 1, slot_id(1, 0))]) == [Result.OK]
    store.close()
    store, recovered = open_store(config_for(tmp_path))
    assert recovered.realms == [realms[2]]
    store.close()


def test_realms_that_are_not_in_use_are_forgotten_when_a_new_one_comes(tmp_path: Path) -> None:
    store, _ = open_store(config_for(tmp_path))
    realms = [realm_of(SIZE, realm_id=n, tenant=f"t{n}") for n in range(1, 5)]
    for realm in realms[:3]:
        store.register_realm(realm)
    store.register_realm(realms[3], {2, 4})
    store.add_extent(1, SLOT, 2)
    assert store.write([block(realms[1], 0, 1, slot_id(1, 0))]) == [Result.OK]
    store.close()
    store, recovered = open_store(config_for(tmp_path))
    assert recovered.realms == [realms[1], realms[3]]
    store.close()
