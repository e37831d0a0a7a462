"""Goal: bytes on disk are told from other bytes. Method: round trips, every single changed byte, and a fixed example."""

from __future__ import annotations

import pytest

from kvtierd.model import NO_END
from kvtierd.tiers.record import (
    RECORD_BYTES,
    expiries_s,
    header_page,
    pack_block,
    pack_record,
    pack_removal,
    page_matches,
    page_prefix,
    parse_records,
    tenant_hash,
)

KEY = bytes(range(32))
PREFIX = page_prefix(
    key=KEY, fingerprint=b"f" * 32, tenant=tenant_hash("t"), generation=9, slot=1 << 32 | 2, shard=1, shards=3, size_bytes=5
)


def test_a_header_page_is_one_page_that_matches_its_payload_only() -> None:
    page = header_page(PREFIX, b"hello")
    assert len(page) == 4096
    assert page_matches(memoryview(page), PREFIX, b"hello")
    assert not page_matches(memoryview(page), PREFIX, b"hellO")


def test_any_changed_byte_of_a_header_page_is_noticed() -> None:
    page = bytearray(header_page(PREFIX, b"hello"))
    for i in range(len(page)):
        page[i] ^= 0x80
        assert not page_matches(memoryview(page), PREFIX, b"hello"), i
        page[i] ^= 0x80


@pytest.mark.parametrize("change", [
    {"key": b"k" * 32}, {"fingerprint": b"g" * 32}, {"tenant": tenant_hash("u")}, {"generation": 10},
    {"slot": 3}, {"shard": 0}, {"shards": 4}, {"size_bytes": 6},
])  # fmt: skip
def test_a_header_of_another_block_does_not_match(change: dict[str, object]) -> None:
    fields = {"key": KEY, "fingerprint": b"f" * 32, "tenant": tenant_hash("t"), "generation": 9, "slot": 1 << 32 | 2,
              "shard": 1, "shards": 3, "size_bytes": 5}  # fmt: skip
    other = page_prefix(**(fields | change))  # type: ignore[arg-type]
    assert not page_matches(memoryview(header_page(other, b"hello")), PREFIX, b"hello")


def test_records_round_trip() -> None:
    raw = b"".join(pack_block((7, KEY, 5, (1 << 32, 2 << 32 | 9), 1.5)) + pack_removal((7, KEY, 5, (1 << 32,), 1.5)))
    records, intact = parse_records(raw + b"rest")
    assert intact.all()
    assert records["key"].tolist() == [KEY] * 3
    assert records["slot"].tolist() == [1 << 32, 2 << 32 | 9, 1 << 32]
    assert records["shard"].tolist() == [0, 1, 0]
    assert records["shards"].tolist() == [2, 2, 0]
    assert set(records["realm"].tolist()) == {7}
    assert set(records["generation"].tolist()) == {5}
    assert expiries_s(records).tolist() == [1.5, 1.5, NO_END], "a removal has none"


def test_any_changed_byte_of_a_record_is_noticed() -> None:
    raw = pack_record(KEY, 1, 2, 3, 4, 5)
    damaged = b"".join(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :] for i in range(RECORD_BYTES))
    assert not parse_records(damaged)[1].any()
    assert not parse_records(bytes(10 * RECORD_BYTES))[1].any(), "zeros are no records"


def test_the_format_on_disk_is_what_it_was() -> None:
    """A change of these bytes needs a new format version."""
    assert pack_record(KEY, 1, 2, 3, 4, 5, 1.5).hex() == (
        KEY.hex() + "0100000000000000" + "0200000000000000" + "dc05000000000000" + "03000000" + "0400" + "0500" + RECORD_CHECK
    )
    assert pack_record(KEY, 1, 2, 3, 4, 5)[48:56] == b"\xff" * 8, "no expiry"
    page = header_page(PREFIX, b"hello")
    assert page[: len(PREFIX)] == PREFIX
    assert (page[len(PREFIX) : len(PREFIX) + 16].hex(), page[-8:].hex()) == PAGE_CHECKS


def test_records_of_version_1_are_read_as_without_expiry() -> None:
    raw = bytes.fromhex(RECORD_OF_VERSION_1)
    records, intact = parse_records(raw + b"rest", 1)
    assert intact.all()
    assert [records[name].item() for name in ("key", "generation", "slot", "realm", "shard", "shards")] == [KEY, 1, 2, 3, 4, 5]
    assert expiries_s(records).tolist() == [NO_END]
    damaged = b"".join(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :] for i in range(64))
    assert not parse_records(damaged, 1)[1].any()


RECORD_CHECK = "0e2f4a539bac8eac"
RECORD_OF_VERSION_1 = KEY.hex() + "0100000000000000" + "0200000000000000" + "03000000" + "0400" + "0500" + "71b566399d2e9753"
PAGE_CHECKS = ("b5e9c1ad071b3e7fc779cfaa5e523818", "a130d183e2ad8ff5")
