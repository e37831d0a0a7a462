"""Targets that read files of the NVMe folder: bytes in the place of each file, with and without checksums that fit.

The first byte of an input says what is mended before the file is read, as no fuzzer finds a checksum: bit 0 that of the whole,
bit 1 those of records, bit 2 that it is a snapshot rather than a journal.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import xxhash

from kvtierd.config import NvmeConfig
from kvtierd.model import NO_END, PAGE_BYTES, Namespace, slot_id
from kvtierd.runtime.tenants import TenantBook
from kvtierd.tiers.base import BlockIo, RealmInfo, Result
from kvtierd.tiers.budget_file import SavedBudget
from kvtierd.tiers.json_file import checksum
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.record import FILE_HEADER_BYTES, header_page, page_matches, page_prefix, record_bytes, tenant_hash
from kvtierd.tiers.tenants_file import SavedTenants
from tests.tiers.conformance import block, key_of, payload

SIZE = 100
SLOT = 2 * PAGE_BYTES
REALM = RealmInfo(1, "t", Namespace((SIZE,)))
BLOCKS = 4
MAX_READ = 64
"""Blocks that are read back of one input."""


def config_of(folder: Path) -> NvmeConfig:
    return NvmeConfig(capacity=8 << 20, folders=[folder], reserve=0, allow_volatile=True, direct="off")


def fill(folder: Path) -> None:
    """A folder with four blocks, tenants and a budget, as a daemon leaves it."""
    store = NvmeStore.open(config_of(folder))
    store.recover()
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 2 * BLOCKS)
    assert store.write([block(REALM, n, n + 1, slot_id(1, n)) for n in range(BLOCKS)]) == [Result.OK] * BLOCKS
    for path in store.begin_snapshot().values():
        records = store.pack_entries([(1, key_of(n), n + 1, (slot_id(1, n),), NO_END) for n in range(2)])
        with open(path, "ab") as f:
            f.write(b"".join(records.values()))
        store.commit_snapshot({str(folder): path})
    store.save_tenants(SavedTenants(1, {"t": {"cpu_quota": 5, "nvme_ttl": "never"}}))
    store.save_budget(SavedBudget(5.0, 100.0, {"t": 1.0}))
    store.close()


def mended_log(data: bytes) -> tuple[bytes, bool]:
    """A journal's or snapshot's bytes, and whether it is a snapshot."""
    mode, raw = data[0] if data else 0, bytearray(data[1:])
    if mode & 1 and len(raw) >= FILE_HEADER_BYTES:
        raw[56:64] = xxhash.xxh3_64_digest(bytes(raw[:56]))
    if mode & 2:
        size = record_bytes(1 if raw[8:9] == b"\1" else 2)
        for at in range(FILE_HEADER_BYTES, len(raw) - size + 1, size):
            raw[at + size - 8 : at + size] = xxhash.xxh3_64_digest(bytes(raw[at : at + size - 8]))
    return bytes(raw), bool(mode & 4)


def mended_json(data: bytes) -> bytes:
    """A file's text with the checksums that belong to it, where it is an object at all."""
    mode, text = data[0] if data else 0, data[1:]
    if not mode & 1:
        return text
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            return text
        if "pool" in content:
            content["checksum"] = checksum(content["pool"])
            content["seal"] = checksum([content.get("format_version"), content["checksum"]])
        else:
            content["checksum"] = checksum({k: v for k, v in content.items() if k != "checksum"})
        return json.dumps(content).encode()
    except (ValueError, RecursionError):
        return text


class FolderTarget:
    """A store over a folder in which one file has other contents: it opens, gives right bytes or none, and goes on."""

    def __init__(self, folder: Path, name: str) -> None:
        self._template = folder / "template"
        self._folder = folder / "at-work"
        fill(self._template)
        self._name = name

    def seeds(self) -> list[bytes]:
        """What the file holds in truth, and the same in need of mending."""
        names = {"log": ("journal-1.kvj", "journal-2.kvj", "snapshot-2.kvs")}.get(self._name, (self._name,))
        raws = [(self._template / name).read_bytes() for name in names]
        return [bytes([mode]) + raw for raw in raws for mode in ((0, 3, 7) if self._name == "log" else (0, 1))]

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._template, self._folder)
        if self._name == "log":
            raw, snapshot = mended_log(data)
            (self._folder / ("snapshot-2.kvs" if snapshot else "journal-2.kvj")).write_bytes(raw)
        else:
            (self._folder / self._name).write_bytes(mended_json(data))
        self._serve()
        self._serve()

    def _serve(self) -> None:
        store = NvmeStore.open(config_of(self._folder))
        with contextlib.closing(store):
            found = store.recover()
            names = {key_of(n): n for n in range(BLOCKS)}
            for realm_id, key, generation, slots, _ in list(found.blocks)[:MAX_READ]:
                sizes = next(r for r in found.realms if r.realm_id == realm_id).namespace.shard_bytes
                if sizes != (SIZE,):
                    continue
                wanted = block(REALM, names.get(key, "?"), generation, *slots, filled=False)
                wanted = BlockIo(realm_id, key, generation, slots, wanted.buffers)
                if store.read([wanted]) == [Result.OK]:
                    assert bytes(memoryview(wanted.buffers[0])) == payload((names[key], 0), SIZE), "wrong bytes"
            saved = store.load_tenants()
            if saved is not None:
                TenantBook({}, (0, 1 << 20, 8 << 20)).adopt(saved.sequence, saved.tenants)
                store.save_tenants(SavedTenants(saved.sequence + 1, saved.tenants))
            store.load_budget()
            if REALM not in found.realms:
                return
            new = block(REALM, "new", found.next_generation, slot_id(found.next_extent_id, 0))
            store.add_extent(found.next_extent_id, SLOT, 1)
            assert store.write([new]) == [Result.OK]
            store.drop_extent(found.next_extent_id)


def slot_header(data: bytes) -> None:
    """Any page, also one whose own checksum fits, matches only the block that it names with the bytes that it was made for."""
    fields: dict[str, Any] = {"key": key_of(0), "fingerprint": REALM.namespace.fingerprint(), "tenant": tenant_hash("t")}
    prefix = page_prefix(**fields, generation=1, slot=slot_id(1, 0), shard=0, shards=1, size_bytes=SIZE)
    content = payload((0, 0), SIZE)
    good = header_page(prefix, content)
    at = int.from_bytes(data[:2], "little") % PAGE_BYTES
    page = (good[:at] + data[3:] + good[at + len(data) - 3 :])[:PAGE_BYTES] if len(data) > 3 else data
    if data[2:3] == b"\1":
        page = page[: PAGE_BYTES - 8] + xxhash.xxh3_64_digest(page[: PAGE_BYTES - 8])
    page = page.ljust(PAGE_BYTES, b"\0")
    if page_matches(memoryview(page), prefix, content):
        assert page[: len(prefix) + 16] == good[: len(prefix) + 16], "a page of something else passes for this block's"


def slot_seeds() -> list[bytes]:
    """Each field in turn, changed and sealed; and a newer version."""
    places = (0, 8, 12, 16, 24, 32, 40, 48, 80, 112, 128, 4000)
    return [bytes([at & 255, at >> 8, seal]) + b"\2" for at in places for seal in (0, 1)]
