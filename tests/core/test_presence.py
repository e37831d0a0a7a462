"""Goal: bulk lookups say what the index says.

Method: Hypothesis changes an index in any order, with keys that differ in any one byte and tables that fill up and are made
anew; the vectorised answer is compared with the dictionary's, key by key.
"""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
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


@pytest.mark.parametrize(
    "change",
    [
        lambda index: setattr(index[key(1)], "mask", 3),
        lambda index: index.update({key(1): SimpleNamespace(mask=3)}),
        lambda index: index.update({key(2): SimpleNamespace(mask=2)}),
    ],
    ids=["other mask", "other block", "new key"],
)
def test_check_sees_a_change_that_nobody_told_of(change: Callable[[dict[bytes, SimpleNamespace]], object]) -> None:
    """Goal: a check that leaves out what has not changed since the one before misses nothing."""
    index = {key(n): SimpleNamespace(mask=2) for n in (0, 1)}
    table = Presence(index)  # type: ignore[arg-type]
    table.check()
    change(index)
    with pytest.raises(AssertionError):
        table.check()
    for number in (1, 2):
        table.changed(key(number))
    table.check()


def test_tags_differ_and_are_never_the_empty_mark() -> None:
    packed = b"".join(key(n) for n in range(100_000)) + bytes(32)
    tags = tags_of(packed)
    assert len(np.unique(tags)) == 100_001
    assert not (tags == 0).any()
    assert presence.MAX_FILL < 1
