"""Bytes on disk: the header page before each payload and the records of journals and snapshots. Pure; all little-endian.

A slot is one header page and then the payload. The header names the block and the slot itself, so bytes that ended up in
the wrong place, or that belong to an earlier block, are told from the right ones without any other state.

A record has 64 bytes: key, generation, slot, realm, shard, number of shards, and xxh3_64 of the 56 bytes before it. A record
with 0 shards says that the block of that generation is gone from that slot. For each slot the record with the highest
generation holds, and at the same generation "gone" beats "stored": so the order of records does not matter, and a record may
be read twice.
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

from kvtierd.model import FORMAT_VERSION, KEY_BYTES, PAGE_BYTES

PAGE_MAGIC: Final = b"KVTPAGE\n"
FILE_MAGIC: Final = b"KVTJRNL\n"
RECORD_BYTES: Final = 64
FILE_HEADER_BYTES: Final = 64
POOL_ID_BYTES: Final = 16
TENANT_HASH_BYTES: Final = 16
_CHECK_BYTES: Final = 8

_PAGE_PREFIX: Final = struct.Struct("<8sIIIIQQQ32s32s16s")
_RECORD_BODY: Final = struct.Struct("<32sQQIHH")
_FILE_HEADER: Final = struct.Struct("<8sIIQ16sQQ")
_PAGE_BODY_BYTES: Final = PAGE_BYTES - _CHECK_BYTES
_CHECKSUM_END: Final = _PAGE_PREFIX.size + 16

RECORD_DTYPE: Final = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("generation", "<u8"),
        ("slot", "<u8"),
        ("realm", "<u4"),
        ("shard", "<u2"),
        ("shards", "<u2"),
        ("check", "<u8"),
    ]
)
"""One record as numpy sees it; ``shards`` is 0 for a removal."""
Records = npt.NDArray[Any]
"""Array of :data:`RECORD_DTYPE`."""

Entry = tuple[int, bytes, int, tuple[int, ...]]
"""One block for a snapshot: realm id, key, generation, one slot a shard."""

assert RECORD_DTYPE.itemsize == RECORD_BYTES == _RECORD_BODY.size + _CHECK_BYTES
assert _FILE_HEADER.size + _CHECK_BYTES == FILE_HEADER_BYTES


def tenant_hash(tenant: str) -> bytes:
    """16 bytes that stand for a tenant's name in header pages."""
    return hashlib.blake2b(tenant.encode(), digest_size=TENANT_HASH_BYTES, person=b"kvtierd-tenant").digest()


def page_prefix(
    *, key: bytes, fingerprint: bytes, tenant: bytes, generation: int, slot: int, shard: int, shards: int, size_bytes: int
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
    """
    return _PAGE_PREFIX.pack(PAGE_MAGIC, FORMAT_VERSION, shard, shards, 0, size_bytes, generation, slot, key, fingerprint, tenant)


def header_page(prefix: bytes, payload: Buffer) -> bytes:
    """A whole header page: prefix, xxh3_128 of the payload, zeros, xxh3_64 of the page before it."""
    body = (prefix + xxhash.xxh3_128_digest(payload)).ljust(_PAGE_BODY_BYTES, b"\0")
    return body + xxhash.xxh3_64_digest(body)


def page_matches(page: memoryview, prefix: bytes, payload: Buffer) -> bool:
    """True when a header page read from disk is intact, names what ``prefix`` names, and belongs to this payload."""
    if page[: len(prefix)] != prefix or page[_PAGE_BODY_BYTES:] != xxhash.xxh3_64_digest(page[:_PAGE_BODY_BYTES]):
        return False
    return bool(page[len(prefix) : _CHECKSUM_END] == xxhash.xxh3_128_digest(payload))


def pack_record(key: bytes, generation: int, slot: int, realm_id: int, shard: int, shards: int) -> bytes:
    """One record; ``shards`` 0 makes it a removal."""
    body = _RECORD_BODY.pack(key, generation, slot, realm_id, shard, shards)
    return body + xxhash.xxh3_64_digest(body)


def pack_block(entry: Entry) -> list[bytes]:
    """One record a shard for a stored block."""
    realm_id, key, generation, slots = entry
    shards = len(slots)
    return [pack_record(key, generation, slot, realm_id, shard, shards) for shard, slot in enumerate(slots)]


def pack_removal(entry: Entry) -> list[bytes]:
    """One record a shard that says that the block is gone."""
    realm_id, key, generation, slots = entry
    return [pack_record(key, generation, slot, realm_id, shard, 0) for shard, slot in enumerate(slots)]


def parse_records(raw: bytes) -> tuple[Records, npt.NDArray[np.bool_]]:
    """Records in ``raw`` (a rest shorter than a record is left out) and which of them are intact."""
    count = len(raw) // RECORD_BYTES
    records: Records = np.frombuffer(raw, RECORD_DTYPE, count)
    digest, body = xxhash.xxh3_64_digest, _RECORD_BODY.size
    expected = b"".join([digest(raw[i : i + body]) for i in range(0, count * RECORD_BYTES, RECORD_BYTES)])
    return records, np.frombuffer(expected, "<u8") == records["check"]


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
    version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        """64 bytes."""
        body = _FILE_HEADER.pack(FILE_MAGIC, self.version, 0, self.sequence, self.pool_id, self.max_generation, self.max_extent_id)
        return body + xxhash.xxh3_64_digest(body)


def file_version(raw: bytes) -> int | None:
    """Format version of a journal or snapshot from its first 12 bytes, the only part that no version changes; None if unknown."""
    if len(raw) < 12 or raw[:8] != FILE_MAGIC:
        return None
    return int.from_bytes(raw[8:12], "little")


def parse_file_header(raw: bytes) -> FileHeader | None:
    """The header of a file of this format version; None when it is damaged."""
    if file_version(raw) != FORMAT_VERSION or len(raw) < FILE_HEADER_BYTES:
        return None
    if raw[_FILE_HEADER.size : FILE_HEADER_BYTES] != xxhash.xxh3_64_digest(raw[: _FILE_HEADER.size]):
        return None
    _, version, _, sequence, pool_id, generation, extent = _FILE_HEADER.unpack_from(raw)
    return FileHeader(sequence, pool_id, generation, extent, version)
