"""Goal: keys of tokens follow the published recipe to the byte. Method: fixed vectors, a second implementation written from
the recipe's text, and properties of a chain."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.client import block_keys, keys

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
FIRST = "6c78374f09d7b22fb7a9a401a5d5cf2464084d9d087bc15ba4e4ddbc2083cccb"
SECOND = "c3b17b1aa76575236ed178dad8a5cd4b5216a1d1c19831c8e166b96fdc1d3bb4"
WITH_IDENTITY = "4cbb8e38ca630e517bb4e34d710a8790a7772c6a71733260c276ac3713c1c70e"


def test_published_vectors() -> None:
    assert [k.hex() for k in block_keys(list(range(1, 10)), 4)] == [FIRST, SECOND]
    assert [k.hex() for k in block_keys([1, 2, 3, 4], 4, identity=b"lora-a")] == [WITH_IDENTITY]
    assert [k.hex() for k in block_keys([5, 6, 7, 8], 4, parent=bytes.fromhex(FIRST))] == [SECOND]
    assert keys.__doc__ is not None
    for vector in (FIRST, SECOND, WITH_IDENTITY):
        assert vector in keys.__doc__


@given(TOKENS, st.integers(1, 8), st.binary(max_size=8), st.none() | st.binary(min_size=32, max_size=32))
def test_another_implementation_of_the_recipe_agrees(tokens: list[int], size: int, identity: bytes, parent: bytes | None) -> None:
    expected, key = [], parent or b"\0" * 32
    for start in range(0, len(tokens) // size * size, size):
        text = b"kvtierd.block.v1\x00" + key + len(identity).to_bytes(4, "little") + identity + size.to_bytes(4, "little")
        key = blake3(text + b"".join(t.to_bytes(4, "little") for t in tokens[start : start + size])).digest()
        expected.append(key)
    assert block_keys(tokens, size, parent, identity) == expected


@given(TOKENS, st.integers(1, 8), st.integers(0, 5))
def test_a_chain_can_be_continued_at_any_block(tokens: list[int], size: int, blocks: int) -> None:
    whole = block_keys(tokens, size)
    head = block_keys(tokens[: blocks * size], size)
    assert head == whole[: len(head)]
    if head:
        assert block_keys(tokens[len(head) * size :], size, parent=head[-1]) == whole[len(head) :]


def test_everything_that_matters_changes_all_later_keys() -> None:
    base = block_keys(range(8), 2)  # type: ignore[arg-type]
    others = [
        block_keys([1, 1, *range(2, 8)], 2),
        block_keys(range(8), 2, parent=bytes(31) + b"\1"),  # type: ignore[arg-type]
        block_keys(range(8), 2, identity=b"x"),  # type: ignore[arg-type]
    ]
    assert len({key for chain in [base, *others] for key in chain}) == 16
    assert set(block_keys(range(8), 4)).isdisjoint(base)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint32, np.uint64, ">i4"])
def test_numpy_tokens_give_the_same_keys(dtype: str) -> None:
    assert [k.hex() for k in block_keys(np.arange(1, 10, dtype=dtype), 4)] == [FIRST, SECOND]


@pytest.mark.parametrize(
    "tokens, size, options",
    [
        ([-1, 2], 2, {}),
        ([2**32, 2], 2, {}),
        ([2**70, 2], 2, {}),
        ([1.5, 2], 2, {}),
        (["a", "b"], 2, {}),
        (np.zeros((2, 2), np.int32), 2, {}),
        ([1, 2], 0, {}),
        ([1, 2], 2, {"parent": b"short"}),
    ],
)
def test_nonsense_is_refused(tokens: list[int], size: int, options: dict[str, bytes]) -> None:
    with pytest.raises(ValueError):
        block_keys(tokens, size, **options)  # type: ignore[arg-type]


def test_no_tokens_no_keys() -> None:
    assert block_keys([], 4) == []
    assert block_keys([1, 2, 3], 4) == []
