"""What a shard of a block holds: bytes that follow from tenant, key and shard, so that every loaded byte can be checked.

A fixed pattern of random words, each combined with 64 bits of a hash of the three: another tenant's, block's or rank's bytes differ
everywhere, and shifted, torn or flipped ones where they were touched.
"""

from __future__ import annotations

import functools

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Words = NDArray[np.uint64]


@functools.cache
def _pattern(words: int) -> Words:
    return np.random.Generator(np.random.PCG64(20_261_130)).integers(0, 2**64, words, dtype=np.uint64)


def _word(tenant: str, key: bytes, shard: int) -> np.uint64:
    return np.uint64(int.from_bytes(blake3(b"%b/%d/" % (key, shard) + tenant.encode()).digest(8), "little"))


def fill(out: memoryview, tenant: str, key: bytes, shard: int) -> None:
    """Write what the shard holds; its size is a multiple of 8 bytes."""
    words = np.frombuffer(out, np.uint64)
    np.bitwise_xor(_pattern(len(words)), _word(tenant, key, shard), out=words)


def wrong_bytes(data: Words, tenant: str, key: bytes, shard: int) -> int:
    """Bytes that are not the shard's."""
    difference = np.bitwise_xor(data, _pattern(len(data)))
    word = _word(tenant, key, shard)
    if (difference == word).all():
        return 0
    return int(np.count_nonzero(difference.view(np.uint8) != np.full_like(difference, word).view(np.uint8)))
