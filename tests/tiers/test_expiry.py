"""Goal: an expiry is found again after a restart as it was recorded last, and folders written before there were any are read.

Method: write, renew, crash at each step, open again and compare; folders of version 1 are made byte by byte.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import xxhash

from kvtierd.model import NO_END, slot_id
from kvtierd.tiers.base import BlockIo, Recovered, Result
from kvtierd.tiers.journal import MAX_PENDING_BYTES
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.record import FILE_HEADER_BYTES, RECORD_BYTES, FileHeader, pack_record

from .conformance import assert_held, block, key_of, realm_of, slot_bytes_for
from .nvme_tools import chunks_of, config_for, crash, open_store

SIZES = (5000, 100)
REALM = realm_of(*SIZES)
LATER = 2_000_000_000.25
"""Seconds since 1970; a whole number of milliseconds."""


def slots_of(n: int) -> tuple[int, ...]:
    return slot_id(1, n), slot_id(2, n)


def put(store: NvmeStore, n: int, expires_s: float = NO_END) -> None:
    new = block(REALM, n, n + 1, *slots_of(n))
    new.expires_s = expires_s
    assert store.write([new]) == [Result.OK]


def started(folder: Path) -> NvmeStore:
    store, _ = open_store(config_for(folder / "a", folder / "b"))
    store.register_realm(REALM)
    for extent_id, size in enumerate(SIZES, 1):
        store.add_extent(extent_id, slot_bytes_for(size), 16)
    return store


def reopened(folder: Path, store: NvmeStore) -> tuple[NvmeStore, dict[int, float]]:
    crash(store)
    again, recovered = open_store(config_for(folder / "a", folder / "b"))
    return again, expiries(recovered)


def expiries(recovered: Recovered) -> dict[int, float]:
    names = {key_of(n): n for n in range(16)}
    return {names[key]: expires_s for _, key, _, _, expires_s in recovered.blocks}


def renew(store: NvmeStore, n: int, expires_s: float) -> None:
    store.renew([BlockIo(1, key_of(n), n + 1, slots_of(n), (), expires_s)])


def test_expiries_survive_a_crash_with_and_without_a_renewal(tmp_path: Path) -> None:
    store = started(tmp_path)
    put(store, 0)
    put(store, 1, LATER)
    put(store, 2, 1.0)
    for n in (3, 4, 5, 6):
        put(store, n, LATER)
    renew(store, 3, LATER + 60)
    renew(store, 4, NO_END)
    store.flush()
    renew(store, 5, LATER + 60)  # in memory only
    store, found = reopened(tmp_path, store)
    assert found == {0: NO_END, 1: LATER, 2: 1.0, 3: LATER + 60, 4: NO_END, 5: LATER, 6: LATER}
    for n in found:
        assert_held(store, REALM, n, n + 1, *slots_of(n))
    store.close()


def test_the_latest_expiry_holds_whatever_the_order_and_a_removal_beats_all(tmp_path: Path) -> None:
    store = started(tmp_path)
    for n, order in enumerate(itertools.permutations((LATER, LATER + 9, LATER + 5))):
        put(store, n, 7.0)
        for expires_s in order:
            renew(store, n, expires_s)
    put(store, 9, LATER)
    store.forget([BlockIo(1, key_of(9), 10, slots_of(9), ())])
    renew(store, 9, NO_END)
    store.flush()
    store, found = reopened(tmp_path, store)
    assert found == dict.fromkeys(range(6), LATER + 9)
    store.close()


async def test_a_snapshot_keeps_expiries(tmp_path: Path) -> None:
    store = started(tmp_path)
    put(store, 0, LATER)
    put(store, 1, LATER)
    listed = [(1, key_of(n), n + 1, slots_of(n), at) for n, at in ((0, LATER + 3), (1, NO_END))]
    for _ in range(2):  # the second one deletes the journal that the blocks were recorded in
        assert await store.checkpoint(chunks_of(listed)) == 2
    store, found = reopened(tmp_path, store)
    assert found == {0: LATER + 3, 1: NO_END}
    store.close()


def to_version_1(path: Path) -> None:
    """Rewrite a journal or snapshot as it would have been written before records had an expiry."""
    raw = path.read_bytes()
    number = int(path.stem.partition("-")[2])
    out = FileHeader(number, raw[24:40], *(int.from_bytes(raw[i : i + 8], "little") for i in (40, 48)), version=1).pack()
    for start in range(FILE_HEADER_BYTES, len(raw), RECORD_BYTES):
        record = raw[start : start + RECORD_BYTES]
        body = record[:48] + record[56:64]
        out += body + xxhash.xxh3_64_digest(body)
    path.write_bytes(out)


@pytest.mark.parametrize("cut", [0, 5])
async def test_a_folder_of_version_1_is_read_and_written_on_in_the_new_one(tmp_path: Path, cut: int) -> None:
    store = started(tmp_path)
    for n in range(3):
        put(store, n)
    await store.checkpoint(chunks_of([(1, key_of(n), n + 1, slots_of(n), NO_END) for n in range(3)]))
    put(store, 3)
    put(store, 4)
    crash(store)
    for path in tmp_path.rglob("*.kv[js]"):
        to_version_1(path)
        if cut and path.name == "journal-2.kvj":
            path.write_bytes(path.read_bytes()[:-cut])
    store, recovered = open_store(config_for(tmp_path / "a", tmp_path / "b"))
    left = range(4 if cut else 5)
    assert expiries(recovered) == dict.fromkeys(left, NO_END)
    assert sorted(p.name for p in (tmp_path / "a").glob("*.kv[js]")) == [
        "journal-1.kvj", "journal-2.kvj", "journal-3.kvj", "snapshot-2.kvs",
    ]  # fmt: skip
    put(store, 7, LATER)
    renew(store, 7, LATER + 1)
    store.flush()
    for _ in range(2):
        store, found = reopened(tmp_path, store)
        assert found == dict.fromkeys(left, NO_END) | {7: LATER + 1}
    for n in found:
        assert_held(store, REALM, n, n + 1, *slots_of(n))
    assert not list(tmp_path.rglob("*old-format*")) and not list(tmp_path.rglob("*damaged*"))
    store.close()


def test_what_waits_in_memory_is_cut_between_records() -> None:
    assert MAX_PENDING_BYTES % len(pack_record(key_of(1), 1, 1, 1, 0, 1)) == 0
