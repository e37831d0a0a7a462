"""A realm's index once more, as flat arrays, so that a lookup of thousands of keys costs microseconds and not cache misses.

A dictionary of a million blocks answers each key with four dependent memory accesses; 8,192 scattered keys then take 7 ms. Here
a key is a 64-bit tag in an open-addressing table, and one vectorised pass looks all keys up: 0.4 ms, whatever the index holds.

The table follows the index lazily: changed keys are noted and brought in before the next lookup. Two keys with the same tag
(one pair among millions of millions) would be taken for each other by Lookup, which is advice; Load asks the index itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvtierd.core.block import Block

U64 = NDArray[np.uint64]
Places = NDArray[np.int64]

MIN_SLOTS: Final = 1024
MAX_FILL: Final = 0.6
MAX_CHANGED: Final = 8192
"""Changes that are kept until they are brought in without a lookup."""
_FACTORS: Final = tuple(
    np.uint64(f) for f in (0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9, 0xD6E8_FEB8_6659_FD93)
)
_SHIFT_A: Final = np.uint64(29)
_SHIFT_B: Final = np.uint64(32)
_EMPTY: Final = np.uint64(0)


def tags_of(packed: bytes) -> U64:
    """One tag a 32-byte key: all of its bytes mixed, never 0."""
    words = np.frombuffer(packed, np.uint64).reshape(-1, 4)
    tags: U64 = words[:, 0] * _FACTORS[0]
    for column in (1, 2, 3):
        tags ^= tags >> _SHIFT_A
        tags += words[:, column] * _FACTORS[column]
    tags ^= tags >> _SHIFT_B
    tags *= _FACTORS[0]
    tags ^= tags >> _SHIFT_A
    tags[tags == _EMPTY] = 1
    return tags


class Presence:
    """Masks of tiers by key, for bulk lookups. Belongs to one realm's index."""

    __slots__ = ("_changed", "_checked", "_filled", "_index", "_made", "_masks", "_shift", "_tags")

    def __init__(self, index: dict[bytes, Block]) -> None:
        self._index = index
        self._changed: list[bytes] = []
        self._checked: tuple[bytes, bytes] | None = None
        """Keys and masks that the table, as it is now, was found to agree with."""
        self._made = False
        """Made at the first bulk lookup: realms that never see one cost nothing."""
        self._clear(1)

    def _clear(self, slots: int) -> None:
        self._tags = np.zeros(slots, np.uint64)
        self._masks = np.zeros(slots, np.uint8)
        self._shift = np.uint64(64 - slots.bit_length() + 1)
        self._filled = 0
        self._checked = None

    def changed(self, key: bytes) -> None:
        """A key's mask has changed, or it came or went."""
        if not self._made:
            return
        self._changed.append(key)
        if len(self._changed) >= MAX_CHANGED:
            self._follow()

    def lookup(self, packed: bytes) -> bytes:
        """One mask a key; 0 where it is not held."""
        self._follow()
        tags = tags_of(packed)
        places = self._home(tags)
        masks = np.zeros(len(tags), np.uint8)
        open_ = np.arange(len(tags))
        while open_.size:
            at = places[open_]
            there = self._tags[at]
            same = there == tags[open_]
            masks[open_[same]] = self._masks[at[same]]
            open_ = open_[~same & (there != _EMPTY)]
            places[open_] = (places[open_] + 1) & (len(self._tags) - 1)
        return masks.tobytes()

    def _home(self, tags: U64) -> Places:
        return (tags >> self._shift).astype(np.int64)

    def _follow(self) -> None:
        """Bring the changes in."""
        if self._made and not self._changed:
            return
        keys = list(dict.fromkeys(self._changed))
        self._changed.clear()
        if not self._made or self._filled + len(keys) > MAX_FILL * len(self._tags):
            # Keys that went still take room; starting anew leaves them out.
            slots = MIN_SLOTS
            while len(self._index) > MAX_FILL / 2 * slots:
                slots *= 2
            self._clear(slots)
            self._made = True
            keys = list(self._index)
        get = self._index.get
        if not keys:
            return
        masks = bytes([0 if (block := get(key)) is None else block.mask for key in keys])
        self._put(tags_of(b"".join(keys)), np.frombuffer(masks, np.uint8))

    def _put(self, tags: U64, masks: NDArray[np.uint8]) -> None:
        self._checked = None
        places = self._home(tags)
        open_ = np.arange(len(tags))
        while open_.size:
            at = places[open_]
            empty = self._tags[at] == _EMPTY
            # Of several keys that want one empty place, the one written last gets it; the others see that and go on.
            self._tags[at[empty]] = tags[open_[empty]]
            mine = self._tags[at] == tags[open_]
            self._masks[at[mine]] = masks[open_[mine]]
            self._filled += int(np.unique(at[empty & mine]).size)
            open_ = open_[~mine]
            places[open_] = (places[open_] + 1) & (len(self._tags) - 1)

    def check(self) -> None:
        """Assert that the table says what the index says (up to tags that are equal). Costs little where nothing has changed."""
        told = b"".join(self._index), bytes([block.mask for block in self._index.values()])
        if self._changed or told != self._checked:
            assert self.lookup(told[0]) == told[1]
            self._checked = told
