"""Goal: bulk lookups say what the index says.

Method: Hypothesis changes an index in any order, with keys that differ in any one byte and tables that fill up and are made
anew; the vectorised answer is compared with the dictionary's, key by key.
"""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.core import presence
from kvtierd.core.presence import Presence, tags_of


def key(number: int) -> bytes:
    """Keys that share most of their bytes: only a few bits in one of four words differ."""
    raw = bytearray(b"prefix of a key, all the same...")
    at = number % 4 * 8
    raw[at : at + 4] = number.to_bytes(4, "little")
    return bytes(raw)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 7), st.booleans()), max_size=400))
def test_lookup_equals_the_index(steps: list[tuple[int, int, bool]]) -> None:
    index: dict[bytes, SimpleNamespace] = {}
    table = Presence(index)  # type: ignore[arg-type]
    everything = b"".join(key(n) for n in range(301))
    for number, mask, look in steps:
        if mask:
            index[key(number)] = SimpleNamespace(mask=mask)
        else:
            index.pop(key(number), None)
        table.changed(key(number))
        if look:
            assert table.lookup(everything) == bytes(index[k].mask if (k := key(n)) in index else 0 for n in range(301))
    table.check()


def test_table_grows_and_forgets_keys_that_went() -> None:
    index: dict[bytes, SimpleNamespace] = {}
    table = Presence(index)  # type: ignore[arg-type]
    for start in range(0, 40_000, 1000):
        for n in range(start, start + 1000):
            index[key(n)] = SimpleNamespace(mask=2)
            table.changed(key(n))
        for n in range(max(start - 1000, 0), start):
            if index.pop(key(n), None):
                table.changed(key(n))
    packed = b"".join(key(n) for n in range(40_000))
    assert table.lookup(packed) == bytes(39_000) + b"\2" * 1000
    assert len(table._tags) < 64 * 1024, "a thousand live keys need no large table, however many came and went"


def test_tags_differ_and_are_never_the_empty_mark() -> None:
    packed = b"".join(key(n) for n in range(100_000)) + bytes(32)
    tags = tags_of(packed)
    assert len(np.unique(tags)) == 100_001
    assert not (tags == 0).any()
    assert presence.MAX_FILL < 1
