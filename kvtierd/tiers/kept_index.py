"""What was in CPU memory when a daemon ended: JSON with a checksum over all of it, and one of each copy's bytes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any, NamedTuple

import xxhash

from kvtierd.model import FORMAT_VERSION, KEY_BYTES, NO_END
from kvtierd.tiers.base import RealmInfo
from kvtierd.tiers.json_file import parse_object
from kvtierd.tiers.pool_file import realm_from, realm_to

log = logging.getLogger(__name__)


class KeptExtent(NamedTuple):
    """Memory of one realm's shard."""

    extent_id: int
    shard: int
    slot_bytes: int
    slot_count: int


class KeptCopy(NamedTuple):
    """One block in memory."""

    key: bytes
    slots: tuple[int, ...]
    expires_wall_s: float
    """Seconds since 1970, or NO_END."""
    digest: str
    """Of the bytes of its slots, see :func:`digest_of`."""


@dataclass(slots=True)
class KeptRealm:
    """What one realm has in memory; copies from the least to the most recently used."""

    info: RealmInfo
    extents: list[KeptExtent] = field(default_factory=list)
    copies: list[KeptCopy] = field(default_factory=list)


def digest_of(views: Sequence[memoryview]) -> str:
    """xxh3_128 of a copy's slots in shard order, as hexadecimal digits. Releases nothing and copies nothing."""
    digest = xxhash.xxh3_128()
    for view in views:
        digest.update(view)
    return digest.hexdigest()


def pack_index(realms: Sequence[KeptRealm]) -> bytes:
    """The index of these realms."""
    body = {
        "format_version": FORMAT_VERSION,
        "realms": [
            {
                "realm": realm_to(r.info),
                "extents": [list(e) for e in r.extents],
                "copies": [
                    [c.key.hex(), list(c.slots), None if c.expires_wall_s == NO_END else c.expires_wall_s, c.digest]
                    for c in r.copies
                ],
            }
            for r in realms
        ],
    }
    raw = json.dumps(body).encode()
    return xxhash.xxh3_128_hexdigest(raw).encode() + b"\n" + raw


def unpack_index(raw: bytes) -> list[KeptRealm]:
    """Read an index; [] when it is none, damaged or another version's, with a warning."""
    checksum, _, text = raw.partition(b"\n")
    try:
        if checksum != xxhash.xxh3_128_hexdigest(text).encode():
            raise ValueError("its checksum is wrong")
        body = parse_object(text)
        if body["format_version"] != FORMAT_VERSION:
            raise ValueError(f"it has format version {body['format_version']}, this program uses {FORMAT_VERSION}")
        return [kept for item in body["realms"] if (kept := _realm(item)) is not None]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        log.warning("what was kept of CPU memory is not used: %s", e)
        return []


def _realm(item: dict[str, Any]) -> KeptRealm | None:
    info = realm_from(item["realm"])
    if info is None:
        return None
    extents = [KeptExtent(*map(int, e)) for e in item["extents"]]
    copies = [
        KeptCopy(bytes.fromhex(key), tuple(map(int, slots)), NO_END if end is None else float(end), str(digest))
        for key, slots, end, digest in item["copies"]
    ]
    if any(len(copy.key) != KEY_BYTES or isnan(copy.expires_wall_s) for copy in copies):
        raise ValueError("a key or an end is none")
    return KeptRealm(info, extents, copies)
