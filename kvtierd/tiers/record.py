"""Bytes on disk: the header page before each payload and the records of journals and snapshots. Pure; all little-endian.

A slot is one header page and then the payload. The header names the block and the slot itself, so bytes that ended up in
the wrong place, or that belong to an earlier block, are told from the right ones without any other state. Of an encrypted payload
it says so, and has the seal (see :mod:`kvtierd.tiers.encryption`) in the place of the payload's checksum.

A record has 72 bytes: key, generation, slot, expiry, realm, shard, number of shards, and xxh3_64 of the 64 bytes before it. A
record with 0 shards says that the block of that generation is gone from that slot. For each slot the record with the highest
generation holds, and at the same generation "gone" beats "stored", and of several "stored" the latest expiry holds: so the order
of records does not matter, and a record may be read twice.

The expiry is wall-clock time, as it must hold over a restart: milliseconds since 1970, all bits set where there is none. In
version 1 of journals and snapshots records had no such field (64 bytes); they are read as without expiry, and never written.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from typing_extensions import Buffer

from kvtierd.model import FORMAT_VERSION, KEY_BYTES, NO_END, PAGE_BYTES, SLOT_INDEX_BITS

PAGE_MAGIC: Final = b"KVTPAGE\n"
FILE_MAGIC: Final = b"KVTJRNL\n"
LOG_VERSION: Final = 2
"""Version of journals and snapshots that are written."""
RECORD_BYTES: Final = 72
FILE_HEADER_BYTES: Final = 64
POOL_ID_BYTES: Final = 16
TENANT_HASH_BYTES: Final = 16
MAX_GENERATION: Final = 1 << 62
"""Generations beyond this are no daemon's: one would be at work for centuries. As many are left for new ones."""
MAX_EXTENT_ID: Final = 1 << 30
"""The same for ids of extents."""
MAX_REALM_ID: Final = 1 << 31
"""The same for ids of realms."""
_CHECK_BYTES: Final = 8

_PAGE_PREFIX: Final = struct.Struct("<8sIIIIQQQ32s32s16s")
_RECORD_BODY: Final = struct.Struct("<32sQQQIHH")
_NO_EXPIRY_MS: Final = (1 << 64) - 1
_FILE_HEADER: Final = struct.Struct("<8sIIQ16sQQ")
_PAGE_BODY_BYTES: Final = PAGE_BYTES - _CHECK_BYTES
_CHECKSUM_END: Final = _PAGE_PREFIX.size + 16
_ENCRYPTED: Final = 1
"""Flag in header pages: the payload is encrypted."""

RECORD_DTYPE: Final = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("generation", "<u8"),
        ("slot", "<u8"),
        ("expires_ms", "<u8"),
        ("realm", "<u4"),
        ("shard", "<u2"),
        ("shards", "<u2"),
        ("check", "<u8"),
    ]
)
"""One record as numpy sees it; ``shards`` is 0 for a removal."""
_FIELDS_1: Final = [name for name in RECORD_DTYPE.names or () if name != "expires_ms"]
_DTYPES: Final = {1: np.dtype([(name, RECORD_DTYPE[name]) for name in _FIELDS_1]), LOG_VERSION: RECORD_DTYPE}
LOG_VERSIONS: Final = frozenset(_DTYPES)
"""Versions of journals and snapshots that can be read."""
Records = npt.NDArray[Any]
"""Array of :data:`RECORD_DTYPE`."""

Entry = tuple[int, bytes, int, tuple[int, ...], float]
"""One block for a snapshot: realm id, key, generation, one slot a shard, expiry in seconds since 1970 or NO_END."""

assert RECORD_DTYPE.itemsize == RECORD_BYTES == _RECORD_BODY.size + _CHECK_BYTES
assert _FILE_HEADER.size + _CHECK_BYTES == FILE_HEADER_BYTES


def tenant_hash(tenant: str) -> bytes:
    """16 bytes that stand for a tenant's name in header pages."""
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_HASH_BYTES, person=b"kvtierd-tenant").digest()


def page_prefix(
    *,
    key: bytes,
    fingerprint: bytes,
    tenant: bytes,
    generation: int,
    slot: int,
    shard: int,
    shards: int,
    size_bytes: int,
    encrypted: bool = False,
) -> bytes:
    """Everything in a header page that is known before the payload is: what a read must find.

    Args:
        key: 32 bytes.
        fingerprint: the namespace's 32 bytes.
        tenant: :func:`tenant_hash`.
        generation: of this copy.
        slot: where the page is meant to be.
        shard: from 0.
        shards: of the whole block.
        size_bytes: of the payload.
        encrypted: whether the payload is.
    """
    flags = _ENCRYPTED if encrypted else 0
    return _PAGE_PREFIX.pack(
        PAGE_MAGIC, FORMAT_VERSION, shard, shards, flags, size_bytes, generation, slot, key, fingerprint, tenant
    )


def header_page(prefix: bytes, payload: Buffer) -> bytes:
    """A whole header page: prefix, xxh3_128 of the payload, zeros, xxh3_64 of the page before it."""
    return sealed_page(prefix, xxhash.xxh3_128_digest(payload))


def sealed_page(prefix: bytes, seal: bytes) -> bytes:
    """The same of an encrypted payload, with its seal in the place of the checksum."""
    body = (prefix + seal).ljust(_PAGE_BODY_BYTES, b"\0")
    return body + xxhash.xxh3_64_digest(body)


def page_names(page: memoryview, prefix: bytes) -> bool:
    """True when a header page read from disk is intact and names what ``prefix`` names."""
    return bool(page[: len(prefix)] == prefix and page[_PAGE_BODY_BYTES:] == xxhash.xxh3_64_digest(page[:_PAGE_BODY_BYTES]))


def page_matches(page: memoryview, prefix: bytes, payload: Buffer) -> bool:
    """The same, and that it belongs to this payload."""
    return page_has(page, prefix, xxhash.xxh3_128_digest(payload))


def page_has(page: memoryview, prefix: bytes, checksum: bytes) -> bool:
    """The same, of a payload with this xxh3_128."""
    return page_names(page, prefix) and bool(page[len(prefix) : _CHECKSUM_END] == checksum)


def seal_in(page: memoryview, prefix: bytes, size_bytes: int) -> bytes:
    """The seal in a header page of an encrypted payload."""
    return bytes(page[len(prefix) : len(prefix) + size_bytes])


def pack_record(key: bytes, generation: int, slot: int, realm_id: int, shard: int, shards: int, expires_s: float = NO_END) -> bytes:
    """One record; ``shards`` 0 makes it a removal. ``expires_s`` counts from 1970."""
    expires_ms = _NO_EXPIRY_MS if expires_s == NO_END else min(max(int(expires_s * 1000), 0), _NO_EXPIRY_MS - 1)
    body = _RECORD_BODY.pack(key, generation, slot, expires_ms, realm_id, shard, shards)
    return body + xxhash.xxh3_64_digest(body)


def pack_block(entry: Entry) -> list[bytes]:
    """One record a shard for a stored block."""
    realm_id, key, generation, slots, expires_s = entry
    shards = len(slots)
    return [pack_record(key, generation, slot, realm_id, shard, shards, expires_s) for shard, slot in enumerate(slots)]


def pack_removal(entry: Entry) -> list[bytes]:
    """One record a shard that says that the block is gone."""
    realm_id, key, generation, slots, _ = entry
    return [pack_record(key, generation, slot, realm_id, shard, 0) for shard, slot in enumerate(slots)]


def record_bytes(version: int) -> int:
    """Bytes of one record in files of a version that can be read."""
    return _DTYPES[version].itemsize


def parse_records(raw: bytes, version: int = LOG_VERSION) -> tuple[Records, npt.NDArray[np.bool_]]:
    """Records in ``raw`` (a rest shorter than a record is left out) and which of them are intact and can be a daemon's. Those of
    older versions are given in today's form, their checksums apart."""
    dtype = _DTYPES[version]
    size = dtype.itemsize
    count = len(raw) // size
    records: Records = np.frombuffer(raw, dtype, count)
    digest, body = xxhash.xxh3_64_digest, size - _CHECK_BYTES
    expected = b"".join([digest(raw[i : i + body]) for i in range(0, count * size, size)])
    intact = np.frombuffer(expected, "<u8") == records["check"]
    intact &= (records["generation"] <= MAX_GENERATION) & (records["slot"] >> SLOT_INDEX_BITS <= MAX_EXTENT_ID)
    intact &= records["realm"] <= MAX_REALM_ID
    if version != LOG_VERSION:
        older, records = records, np.empty(count, RECORD_DTYPE)
        records["expires_ms"] = _NO_EXPIRY_MS
        for name in _FIELDS_1:
            records[name] = older[name]
    return records, intact


def expiries_s(records: Records) -> npt.NDArray[np.float64]:
    """Expiries of records in seconds since 1970; NO_END where there is none."""
    at_ms = records["expires_ms"]
    return np.where(at_ms == _NO_EXPIRY_MS, NO_END, at_ms / 1000)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """First 64 bytes of a journal or snapshot.

    ``max_generation`` and ``max_extent_id`` are the highest that were in use before the file, so that neither is given out
    twice although the records that named them have been compacted away.
    """

    sequence: int
    pool_id: bytes
    max_generation: int = 0
    max_extent_id: int = 0
    version: int = LOG_VERSION

    def pack(self) -> bytes:
        """64 bytes."""
        body = _FILE_HEADER.pack(FILE_MAGIC, self.version, 0, self.sequence, self.pool_id, self.max_generation, self.max_extent_id)
        return body + xxhash.xxh3_64_digest(body)


def file_version(raw: bytes) -> int | None:
    """Version that a journal or snapshot declares in its first 64 bytes; None when they are damaged.

    Magic, version and checksum are where they are in every version, so a newer one is told from a damaged one.
    """
    if len(raw) < FILE_HEADER_BYTES or raw[: len(FILE_MAGIC)] != FILE_MAGIC:
        return None
    if raw[_FILE_HEADER.size : FILE_HEADER_BYTES] != xxhash.xxh3_64_digest(raw[: _FILE_HEADER.size]):
        return None
    return int.from_bytes(raw[len(FILE_MAGIC) : len(FILE_MAGIC) + 4], "little")


def parse_file_header(raw: bytes) -> FileHeader | None:
    """The header of a file of a version that can be read; None when it is damaged."""
    if file_version(raw) not in LOG_VERSIONS:
        return None
    _, version, _, sequence, pool_id, generation, extent = _FILE_HEADER.unpack_from(raw)
    if generation > MAX_GENERATION or extent > MAX_EXTENT_ID:
        return None
    return FileHeader(sequence, pool_id, generation, extent, version)
