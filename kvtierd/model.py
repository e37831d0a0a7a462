"""Words that every layer shares: tiers, keys, slots, namespaces.

A *slot id* is one integer, ``extent_id << 32 | index``; it names the same thing in the core, on the wire and in a client.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Final

from kvtierd.errors import Reason, RequestError

KEY_BYTES: Final = 32
_KEY_FORMAT: Final = f"{KEY_BYTES}s"
PAGE_BYTES: Final = 4096
MAX_KEYS_PER_CALL: Final = 65_536
MAX_SHARDS: Final = 1024
MAX_REALMS: Final = 65_536
"""Pairs of a tenant and a namespace that a daemon holds blocks for, or has sessions of."""
MAX_SHARD_BYTES: Final = 1 << 32
SLOT_INDEX_BITS: Final = 32
FIRST_DEVICE_EXTENT: Final = 1 << 30
"""Extents of GPU memory have ids from here on, those of CPU memory lower ones: a slot says by itself where it is."""
DEFAULT_TENANT: Final = "default"
MAX_TTL_S: Final = 3650 * 86_400.0
"""Longest life that a caller of Save may ask for."""
NO_END: Final = float("inf")
"""Expiry, on any clock, of a block that does not expire."""
FORMAT_VERSION: Final = 1
"""Version of everything that is hashed or written to disk, but for journals and snapshots; part of every fingerprint."""

DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "uint8": 1,
    "opaque": 0,
}
KV_LAYOUTS: Final = frozenset(
    ["opaque", "LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", "L2BNHC", "LB2NHC", "L2BHNC", "LB2HNC", "LBNC", "BLNC"]
)
"""Known orders of Layer, Block, (K/V) 2, Head, tokeN, Channel; the forms without H are MLA's."""
ATTENTION_TYPES: Final = frozenset(["mha", "mla", "swa", "mamba", "opaque"])


class Tier(IntEnum):
    """Where a copy of a block lives, fastest first."""

    HBM = 0
    CPU = 1
    NVME = 2

    @property
    def bit(self) -> int:
        """This tier in a mask of tiers."""
        return 1 << self


class Result(Enum):
    """How moving one block ended."""

    OK = "ok"
    IO_ERROR = "io_error"
    """The device answered EIO or something like it."""
    CORRUPT = "corrupt"
    """The bytes read are not the bytes written: checksum, key, fingerprint, length or generation differ."""
    NO_SPACE = "no_space"
    """ENOSPC, EDQUOT, or the file system has less free space than the configured reserve; or the machine has no memory or
    descriptors left for it. What is there already stays."""


def slot_id(extent_id: int, index: int) -> int:
    """Name slot ``index`` of an extent."""
    return extent_id << SLOT_INDEX_BITS | index


def slot_extent(slot: int) -> int:
    """Extent of a slot."""
    return slot >> SLOT_INDEX_BITS


def slot_index(slot: int) -> int:
    """Index of a slot in its extent."""
    return slot & 0xFFFF_FFFF


def in_device(slot: int) -> bool:
    """Whether a slot that a client was given is in GPU memory."""
    return slot >> SLOT_INDEX_BITS >= FIRST_DEVICE_EXTENT


def round_up(n: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def count_keys(packed: bytes) -> int:
    """Number of packed keys.

    Raises:
        RequestError: BAD_KEY when the length is no multiple of 32; TOO_MANY_KEYS past 65,536 keys.
    """
    if len(packed) % KEY_BYTES:
        raise RequestError(
            Reason.BAD_KEY, f"keys take {KEY_BYTES} bytes each, packed; got {len(packed)} bytes, not a multiple of {KEY_BYTES}"
        )
    count = len(packed) // KEY_BYTES
    if count > MAX_KEYS_PER_CALL:
        raise RequestError(Reason.TOO_MANY_KEYS, f"{count} keys in one call; at most {MAX_KEYS_PER_CALL}: split the call")
    return count


def split_keys(packed: bytes) -> list[bytes]:
    """Split packed keys into 32-byte keys. Raises like :func:`count_keys`."""
    count_keys(packed)
    return [key for (key,) in struct.iter_unpack(_KEY_FORMAT, packed)]


@dataclass(frozen=True)
class Namespace:
    """Everything that changes the bytes of a block or their meaning (see ``kvtierd.v1.Namespace`` for the fields)."""

    shard_bytes: tuple[int, ...]
    model: str = "opaque"
    revision: str = ""
    kv_dtype: str = "opaque"
    kv_layout: str = "opaque"
    attention: str = "opaque"
    block_tokens: int = 0
    num_layers: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    hash_algorithm: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    def validate(self) -> None:
        """Check the fields against each other.

        Raises:
            RequestError: UNKNOWN_LAYOUT for a name that is not known, LAYOUT_MISMATCH where sizes contradict each other.
        """
        for name, value, known in (
            ("kv_layout", self.kv_layout, KV_LAYOUTS),
            ("kv_dtype", self.kv_dtype, frozenset(DTYPE_BYTES)),
            ("attention", self.attention, ATTENTION_TYPES),
        ):
            if value not in known:
                raise RequestError(Reason.UNKNOWN_LAYOUT, f"{name} {value!r} is not known here; known: {', '.join(sorted(known))}")
        if not 1 <= len(self.shard_bytes) <= MAX_SHARDS:
            raise RequestError(
                Reason.LAYOUT_MISMATCH, f"shard_bytes names {len(self.shard_bytes)} shards; a namespace has 1 to {MAX_SHARDS}"
            )
        for size in self.shard_bytes:
            if not 1 <= size <= MAX_SHARD_BYTES:
                raise RequestError(Reason.LAYOUT_MISMATCH, f"a shard of {size} bytes; a shard has 1 to {MAX_SHARD_BYTES} bytes")
        if len(self.model) > 512 or len(self.revision) > 512 or len(json.dumps(self.extra)) > 8192:
            raise RequestError(Reason.BAD_REQUEST, "model and revision take at most 512 characters, extra 8,192 in all")
        self._check_shape()

    def _check_shape(self) -> None:
        expected_shards = max(self.tp_size, 1) * max(self.pp_size, 1)
        if self.attention != "opaque":
            allowed = {expected_shards, max(self.pp_size, 1)} if self.attention == "mla" else {expected_shards}
            if len(self.shard_bytes) not in allowed:
                raise RequestError(
                    Reason.LAYOUT_MISMATCH,
                    f"{len(self.shard_bytes)} shards, but tp_size {self.tp_size} x pp_size {self.pp_size} "
                    f"with {self.attention} attention makes {' or '.join(map(str, sorted(allowed)))}",
                )
        shape = (self.block_tokens, self.num_layers, self.num_kv_heads, self.head_size)
        if self.kv_dtype == "opaque" or self.attention not in ("mha", "swa") or not all(shape):
            return
        # Replicated heads (tp_size above num_kv_heads) make every shard hold at least one head.
        heads = max(self.num_kv_heads, self.tp_size)
        expected = 2 * self.block_tokens * self.num_layers * heads * self.head_size * DTYPE_BYTES[self.kv_dtype]
        if expected != sum(self.shard_bytes):
            raise RequestError(
                Reason.LAYOUT_MISMATCH,
                f"the shards hold {sum(self.shard_bytes)} bytes, but {self.num_layers} layers x {heads} KV heads x "
                f"{self.head_size} x {self.block_tokens} tokens of {self.kv_dtype} (K and V) take {expected}",
            )

    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever any field differs: BLAKE2b over the canonical JSON of all fields."""
        fields = {k: v for k, v in self.__dict__.items() if k != "extra"} | {"extra": sorted(self.extra.items())}
        canonical = json.dumps(["kvtierd", FORMAT_VERSION, sorted(fields.items())], separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(canonical.encode(), digest_size=32, person=b"kvtierd-ns").digest()

    @property
    def slot_bytes(self) -> tuple[int, ...]:
        """Bytes of one slot of each shard: whole pages."""
        return tuple(round_up(n, PAGE_BYTES) for n in self.shard_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all shards."""
        return sum(self.shard_bytes)
