"""What each key holds: bytes that follow from the key, so that every loaded byte can be checked.

A block is a fixed pattern of random 64-bit words, each combined with 64 bits of the key. Any other block's words differ from it
everywhere, and a shifted, torn or flipped one differs where it was touched.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvtierd.client import block_keys
from kvtierd.model import Namespace

MODEL: Final = "demo-16x1x64"
BLOCK_TOKENS: Final = 512
LAYERS: Final = 16
KV_HEADS: Final = 1
HEAD_SIZE: Final = 64
BLOCK_BYTES: Final = 2 * BLOCK_TOKENS * LAYERS * KV_HEADS * HEAD_SIZE
"""1 MiB: K and V of 512 tokens in FP8, one byte an element."""
SHAPE: Final = f"{LAYERS} layers, {KV_HEADS} KV head of {HEAD_SIZE}, FP8 (E4M3), {BLOCK_TOKENS} tokens a block: 1 MiB"

Words = NDArray[np.uint64]


def namespace(seed: int) -> Namespace:
    """The demo's namespace; runs with different seeds never share blocks."""
    return Namespace(
        shard_bytes=(BLOCK_BYTES,),
        model=MODEL,
        revision=f"seed-{seed}",
        kv_dtype="fp8_e4m3",
        kv_layout="LBHNC",
        attention="mha",
        block_tokens=BLOCK_TOKENS,
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        hash_algorithm="blake3-chain-of-trace-ids",
    )


def keys_of(block_ids: Sequence[int], seed: int) -> list[bytes]:
    """Keys of a request's blocks, root first: the chain of `kvtierd.client.keys` over the trace's ids, one id standing for the
    tokens of one block. The identity names the demo and its seed."""
    return block_keys(block_ids, 1, identity=f"kvtierd-demo/{seed}".encode())


@functools.cache
def _pattern() -> Words:
    return np.random.Generator(np.random.PCG64(20_260_219)).integers(0, 2**64, BLOCK_BYTES // 8, dtype=np.uint64)


def _word(key: bytes) -> np.uint64:
    return np.uint64(int.from_bytes(key[:8], "little"))


def fill(key: bytes, out: Words) -> None:
    """Write what a key holds."""
    np.bitwise_xor(_pattern(), _word(key), out=out)


def spoil(out: Words) -> None:
    """Make buffers hold what no key holds, so that what is right in them afterwards was put there since."""
    out.fill(0)


def wrong_bytes(key: bytes, words: Words) -> int:
    """Bytes that are not what the key holds."""
    difference = np.bitwise_xor(words, _pattern())
    if (difference == _word(key)).all():
        return 0
    expected = np.full_like(difference, _word(key))
    return int(np.count_nonzero(difference.view(np.uint8) != expected.view(np.uint8)))
