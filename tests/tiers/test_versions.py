"""Goal: what another version wrote, and what is damaged, is told apart, never misread, never lost when it can be saved.

Method: a folder with two blocks, in which each versioned file in turn becomes newer, or one of its bits flips; each cell of the
table in docs/upgrading.md.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvtierd.errors import StartupError
from kvtierd.model import FORMAT_VERSION, NO_END, slot_id
from kvtierd.plain_file import MAX_FILE_BYTES
from kvtierd.tiers.base import Result
from kvtierd.tiers.budget_file import SavedBudget
from kvtierd.tiers.folder import Folder
from kvtierd.tiers.journal import LOST_GENERATIONS
from kvtierd.tiers.json_file import checksum
from kvtierd.tiers.log_file import MAX_GAP_BYTES
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.record import FILE_HEADER_BYTES, LOG_VERSION, MAX_GENERATION, RECORD_BYTES, FileHeader, pack_record
from kvtierd.tiers.tenants_file import SavedTenants

from .conformance import assert_held, block, key_of, realm_of, slot_bytes_for
from .nvme_tools import chunks_of, crash, flip, open_store, segment_path
from .nvme_tools import config_for as any_config_for

SIZE = 5000
SLOT = slot_bytes_for(SIZE)
REALM = realm_of(SIZE)
OTHER = realm_of(SIZE, realm_id=2, tenant="other")
REALMS = [REALM, OTHER]
KEPT = [(1, key_of(n), n + 1, (slot_id(1, n),), NO_END) for n in range(2)]
TENANTS = SavedTenants(3, {"t": {"cpu_quota": 5}})
BUDGET = SavedBudget(5.0, 100.0)
config_for = partial(any_config_for, direct="off")
LOGS = ["journal-1.kvj", "journal-2.kvj", "snapshot-2.kvs"]


@pytest.fixture
async def filled(tmp_path: Path) -> Path:
    """One realm is in the pool file and one in its log; block 0 in the first journal and the snapshot, block 1 in the second
    journal; tenants and budget are kept too."""
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(REALM)
    store.close()
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(OTHER)
    store.add_extent(1, SLOT, 8)
    assert store.write([block(REALM, 0, 1, slot_id(1, 0))]) == [Result.OK]
    await store.checkpoint(chunks_of(KEPT[:1]))
    assert store.write([block(REALM, 1, 2, slot_id(1, 1))]) == [Result.OK]
    store.save_tenants(TENANTS)
    store.save_budget(BUDGET)
    store.close()
    assert sorted(p.name for p in tmp_path.glob("*-*.kv[js]")) == LOGS
    return tmp_path


def seal_header(raw: bytes, **fields: Any) -> bytes:
    """A journal's or snapshot's bytes with fields of the header changed, and the checksum that belongs to it."""
    header = FileHeader(fields.pop("sequence", int.from_bytes(raw[16:24], "little")), raw[24:40], **fields)
    return header.pack() + raw[FILE_HEADER_BYTES:]


def make_newer(path: Path) -> None:
    """What a later version would write: the same envelope, and inside something that nobody knows yet."""
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        if path.name == "pool.json":
            body = content["pool"] | {"ways": [1]}
            content = {"format_version": FORMAT_VERSION + 1, "pool": body, "checksum": checksum(body)}
            content["seal"] = checksum([FORMAT_VERSION + 1, content["checksum"]])
        else:
            body = {k: v for k, v in content.items() if k != "checksum"} | {"version": 2, "more": True}
            content = body | {"checksum": checksum(body)}
        path.write_text(json.dumps(content))
    else:
        raw = path.read_bytes()
        path.write_bytes(seal_header(raw[:FILE_HEADER_BYTES], version=LOG_VERSION + 1) + os.urandom(500))


def flip_bit(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# ---- another version


@pytest.mark.parametrize("name", ["pool.json", *LOGS])
def test_a_cache_of_another_version_is_moved_aside_whole(filled: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    make_newer(filled / name)
    before = {p.name: p.read_bytes() for p in filled.iterdir() if p.name not in ("LOCK", "tenants.json")}
    store, recovered = open_store(config_for(filled))
    assert (recovered.realms, recovered.extents, list(recovered.blocks)) == ([], [], [])
    assert f"format version {FORMAT_VERSION + 1 if name == 'pool.json' else LOG_VERSION + 1}" in caplog.text
    assert store.load_tenants() == TENANTS, "it has a version of its own"
    store.close()
    store, _ = open_store(config_for(filled))
    store.close()
    assert {p.name.removesuffix(".old-format-1"): p.read_bytes() for p in filled.glob("*.old-format-1")} == before
    assert not list(filled.glob("*.old-format-2")), "nothing touches them again"


def test_a_cache_that_was_moved_aside_can_be_moved_back(filled: Path) -> None:
    make_newer(filled / "journal-2.kvj")
    open_store(config_for(filled))[0].close()
    for path in filled.glob("*.old-format-1"):
        path.rename(filled / path.name.removesuffix(".old-format-1"))
    (filled / "journal-2.kvj").unlink()  # what makes it another version's, as if that version were here again
    store, recovered = open_store(config_for(filled))
    assert list(recovered.blocks) == KEPT[:1]
    assert_held(store, REALM, 0, 1, slot_id(1, 0))
    store.close()


@pytest.mark.parametrize("after", range(5))
def test_a_start_that_was_interrupted_while_moving_goes_on(filled: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make_newer(filled / "journal-1.kvj")
    segment = Path(segment_path(filled, 1)).read_bytes()
    left, real = [after], os.rename

    def rename(source: str, target: str) -> None:
        if not left[0]:
            raise OSError(5, "interrupted")
        left[0] -= 1
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("os.rename", rename)
        with pytest.raises(StartupError, match="interrupted"):
            NvmeStore.open(config_for(filled))
    store, recovered = open_store(config_for(filled))
    assert (recovered.extents, list(recovered.blocks)) == ([], [])
    store.close()
    (moved,) = filled.glob("segment-*.old-format-*")
    assert moved.read_bytes() == segment


def test_tenants_of_another_version_are_kept_and_not_in_force(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_newer(filled / "tenants.json")
    newer = (filled / "tenants.json").read_bytes()
    store, _ = open_store(config_for(filled))
    assert store.load_tenants() is None
    assert "version 2, this program knows 1" in caplog.text
    store.save_tenants(TENANTS)
    store.close()
    assert (filled / "tenants.json.old-format-1").read_bytes() == newer


def test_a_budget_of_another_version_is_used(filled: Path) -> None:
    """It has no version: what is not known is passed over, and files of before it had a checksum are taken."""
    path = filled / "budget.json"
    for body in ({"left_bytes": 5.0, "at_wall_s": 100.0}, {"left_bytes": 5.0, "at_wall_s": 100.0, "more": [1]}):
        for content in (body, body | {"checksum": checksum(body)}):
            path.write_text(json.dumps(content))
            store, _ = open_store(config_for(filled))
            assert store.load_budget() == BUDGET
            store.close()


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1])
def test_a_slot_of_another_version_is_a_miss_and_costs_no_neighbour(filled: Path, version: int) -> None:
    path = Path(segment_path(filled, 1))
    raw = bytearray(path.read_bytes())
    raw[8:12] = version.to_bytes(4, "little")
    raw[4088:4096] = xxhash.xxh3_64_digest(bytes(raw[:4088]))
    path.write_bytes(raw)
    store, _ = open_store(config_for(filled))
    assert store.read([block(REALM, n, n + 1, slot_id(1, n), filled=False) for n in range(2)]) == [Result.CORRUPT, Result.OK]
    store.close()


def test_pool_file_of_before_it_had_a_seal_is_read(filled: Path) -> None:
    content = json.loads((filled / "pool.json").read_text())
    del content["seal"]
    (filled / "pool.json").write_text(json.dumps(content))
    store, recovered = open_store(config_for(filled))
    assert (recovered.realms, list(recovered.blocks)) == (REALMS, KEPT)
    store.close()


# ---- damage


@pytest.mark.parametrize("name", LOGS)
def test_a_flipped_bit_of_a_header_costs_no_block(filled: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path, before = filled / name, names(filled)
    good = path.read_bytes()
    for bit in [*range(64, 96, 3), *range(0, 8 * FILE_HEADER_BYTES, 37)]:  # the version, and all fields
        caplog.clear()
        flip_bit(path, bit)
        damaged = path.read_bytes()
        store, recovered = open_store(config_for(filled))
        assert (recovered.realms, list(recovered.blocks)) == (REALMS, KEPT), bit
        assert recovered.next_generation > LOST_GENERATIONS, "generations of before the file are not given out again"
        assert (path.read_bytes() == damaged) and "its header is damaged" in caplog.text
        crash(store)
        for made in names(filled) - before:
            assert made == "journal-3.kvj" and name == "journal-2.kvj", "only what cannot be written to has a successor"
            (filled / made).unlink()
        path.write_bytes(good)


async def test_a_file_with_a_damaged_header_goes_with_the_next_snapshot(filled: Path) -> None:
    flip(str(filled / "journal-2.kvj"), 9)
    store, recovered = open_store(config_for(filled))
    generation = recovered.next_generation
    assert store.write([block(REALM, 2, generation, slot_id(1, 2))]) == [Result.OK]
    blocks = [*KEPT, (1, key_of(2), generation, (slot_id(1, 2),), NO_END)]
    for _ in range(2):
        await store.checkpoint(chunks_of(blocks))
    crash(store)
    assert sorted(p.name for p in filled.glob("*-*.kv[js]")) == ["journal-4.kvj", "journal-5.kvj", "snapshot-5.kvs"]
    store, recovered = open_store(config_for(filled))
    assert list(recovered.blocks) == blocks
    assert recovered.next_generation == generation + 1
    store.close()


def test_a_header_is_lost_whole_and_the_records_of_the_first_version_are_used(filled: Path) -> None:
    realm_id, key, generation, slots, _ = KEPT[1]
    body = key + b"".join(n.to_bytes(8, "little") for n in (generation, *slots)) + realm_id.to_bytes(4, "little") + b"\0\0\1\0"
    (filled / "journal-2.kvj").write_bytes(bytes(FILE_HEADER_BYTES) + body + xxhash.xxh3_64_digest(body) + os.urandom(30))
    store, recovered = open_store(config_for(filled))
    assert list(recovered.blocks) == KEPT
    store.close()


def test_a_file_of_which_nothing_is_left_is_set_aside(filled: Path) -> None:
    (filled / "journal-2.kvj").write_bytes(os.urandom(3000))
    store, recovered = open_store(config_for(filled))
    assert list(recovered.blocks) == KEPT[:1]
    assert (filled / "journal-2.kvj.damaged-1").exists()
    assert store.write([block(REALM, 7, recovered.next_generation, slot_id(1, 7))]) == [Result.OK]
    store.close()


def test_a_damaged_header_of_a_newer_version_is_no_reason_to_touch_the_file(filled: Path) -> None:
    make_newer(filled / "journal-2.kvj")
    flip(str(filled / "journal-2.kvj"), 20)
    raw = (filled / "journal-2.kvj").read_bytes()
    store, _ = open_store(config_for(filled))
    store.close()
    assert (filled / "journal-2.kvj.damaged-1").read_bytes() == raw


def test_a_flipped_bit_of_the_pool_file_reads_nothing_wrong(filled: Path) -> None:
    """Damage to what says the version costs nothing; to the rest, the folder's blocks, as nobody knows whose they were."""
    path = filled / "pool.json"
    good = path.read_bytes()
    at = good.index(b'"format_version": ') + len(b'"format_version": ')
    files = {p.name: p.read_bytes() for p in filled.iterdir() if p.name != "LOCK"}
    results = set()
    for bit in [*range(0, 8 * len(good), 83), *range(8 * at, 8 * at + 8)]:
        flip_bit(path, bit)
        store, recovered = open_store(config_for(filled))
        found = list(recovered.blocks)
        assert found in ([], KEPT), bit
        if not found:
            assert recovered.next_generation > 2, "slots still hold what those of before have written"
        results.add((len(found), bit // 8 == at))
        crash(store)
        assert not any("old-format" in name for name in names(filled)), bit
        for name in names(filled) - {"LOCK"}:
            (filled / name).unlink()
        for name, raw in files.items():
            (filled / name).write_bytes(raw)
    assert results >= {(0, False), (2, True)}


def test_a_flipped_version_of_the_pool_file_is_mended(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = filled / "pool.json"
    good = path.read_text()
    path.write_text(good.replace('"format_version": 1', '"format_version": 3'))
    store, recovered = open_store(config_for(filled))
    assert list(recovered.blocks) == KEPT
    assert "its version is damaged" in caplog.text
    now = json.loads(path.read_text())
    assert (now["format_version"], len(now["pool"]["realms"])) == (FORMAT_VERSION, 2)
    store.close()


@pytest.mark.parametrize("name", ["tenants.json", "budget.json"])
def test_any_flipped_bit_of_settings_is_noticed(filled: Path, name: str) -> None:
    """Or does not matter: a letter of the hexadecimal checksum may be a capital, white space may be another."""
    path = filled / name
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        flip_bit(path, bit)
        folder = Folder.claim(filled, allow_volatile=True, clock=lambda: 0.0)
        store = NvmeStore.__new__(NvmeStore)
        store._folders = [folder]
        found = store.load_tenants() if name == "tenants.json" else store.load_budget()
        assert found in (None, TENANTS, BUDGET), bit
        folder.release()
        path.write_bytes(good)


@pytest.mark.parametrize("content", [
    b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b'"', b"\xff", b"null", b"{}", b'{"version": 1e999}', b"NaN",
], ids=lambda c: c[:8].decode(errors="replace"))  # fmt: skip
@pytest.mark.parametrize("name", ["pool.json", "tenants.json", "budget.json"])
def test_no_text_whatever_ends_the_start(filled: Path, name: str, content: bytes) -> None:
    (filled / name).write_bytes(content)
    store, _ = open_store(config_for(filled))
    assert store.load_tenants() == (None if name == "tenants.json" else TENANTS)
    assert store.load_budget() == (None if name == "budget.json" else BUDGET)
    store.close()


@pytest.mark.parametrize("name, body", [
    ("tenants.json", {"version": 1, "sequence": float("inf"), "tenants": {}}),
    ("tenants.json", {"version": 1, "sequence": 1, "tenants": []}),
    ("tenants.json", {"version": 1, "sequence": 1, "tenants": {"t": 5}}),
    ("budget.json", {"left_bytes": 10**400, "at_wall_s": 1}),
    ("budget.json", {"left_bytes": 1, "at_wall_s": 1, "of_tenants": [1]}),
])  # fmt: skip
def test_a_checksum_that_fits_does_not_make_sense_of_nonsense(filled: Path, name: str, body: dict[str, Any]) -> None:
    (filled / name).write_text(json.dumps(body | {"checksum": checksum(body)}))
    store, _ = open_store(config_for(filled))
    assert (store.load_tenants() if name == "tenants.json" else store.load_budget()) is None
    store.close()


@pytest.mark.parametrize("change", [
    {"realm_id": 2**32}, {"realm_id": 0}, {"realm_id": "1"}, {"tenant": 5}, {"namespace": {"shard_bytes": ["x"]}},
    {"namespace": {"shard_bytes": [-5]}}, {"namespace": {"shard_bytes": [5000], "ways": 2}}, {"namespace": []}, {"fingerprint": 7},
], ids=str)  # fmt: skip
def test_a_realm_that_cannot_be_is_not_served(filled: Path, change: dict[str, Any]) -> None:
    path = filled / "pool.json"
    content = json.loads(path.read_text())
    content["pool"]["realms"][0] |= change
    content["checksum"] = checksum(content["pool"])
    content["seal"] = checksum([FORMAT_VERSION, content["checksum"]])
    path.write_text(json.dumps(content))
    store, recovered = open_store(config_for(filled))
    assert REALM not in recovered.realms
    assert list(recovered.blocks) == []
    store.close()


@pytest.mark.parametrize("name", ["pool.json", "realms.log", "tenants.json", "budget.json"])
def test_a_pipe_or_a_file_without_end_in_a_files_place_is_not_waited_for(filled: Path, name: str) -> None:
    (filled / name).unlink()
    os.mkfifo(filled / name)
    store, _ = open_store(config_for(filled))
    store.load_tenants()
    store.load_budget()
    store.close()
    (filled / name).unlink(missing_ok=True)
    (filled / name).touch()
    os.truncate(filled / name, MAX_FILE_BYTES + 1)
    store, _ = open_store(config_for(filled))
    store.load_tenants()
    store.load_budget()
    store.close()


# ---- records that no daemon writes, though they look intact


def test_numbers_that_no_daemon_uses_do_not_spoil_the_next_ones(filled: Path) -> None:
    with open(filled / "journal-2.kvj", "ab") as f:
        f.write(pack_record(key_of(5), MAX_GENERATION + 1, slot_id(1, 5), 1, 0, 1))
        f.write(pack_record(key_of(6), 9, slot_id(2**32 - 1, 0), 1, 0, 1))
        f.write(pack_record(key_of(7), 9, slot_id(1, 7), 2**32 - 1, 0, 1))
    for fields in ({"max_generation": MAX_GENERATION + 1}, {"max_extent_id": 2**31}):
        path = filled / "snapshot-2.kvs"
        path.write_bytes(seal_header(path.read_bytes(), **fields))
        store, recovered = open_store(config_for(filled))
        assert list(recovered.blocks) == KEPT
        assert (recovered.next_extent_id, recovered.next_realm_id, recovered.next_generation < MAX_GENERATION) == (2, 3, True)
        crash(store)


def test_a_tail_without_end_costs_neither_memory_nor_time(filled: Path) -> None:
    os.truncate(filled / "journal-2.kvj", 1 << 40)
    store, recovered = open_store(config_for(filled))
    assert list(recovered.blocks) == KEPT
    assert (filled / "journal-2.kvj").stat().st_size == FILE_HEADER_BYTES + RECORD_BYTES
    assert store.write([block(REALM, 2, 3, slot_id(1, 2))]) == [Result.OK]
    store.close()


def test_records_behind_a_large_hole_are_read(filled: Path) -> None:
    with open(filled / "journal-2.kvj", "r+b") as f:
        f.seek(FILE_HEADER_BYTES + RECORD_BYTES * ((MAX_GAP_BYTES >> 2) // RECORD_BYTES))
        f.write(pack_record(key_of(2), 3, slot_id(1, 2), 1, 0, 1))
    store, recovered = open_store(config_for(filled))
    assert [generation for _, _, generation, _, _ in recovered.blocks] == [1, 2, 3]
    store.close()
