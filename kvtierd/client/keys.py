r"""Keys for callers that have tokens but no engine that hashes them: a chain of BLAKE3 hashes.

Recipe, so that other languages can build the same keys. With ``u32(x)`` = 4 bytes, little-endian, and ``||`` = joined::

    key[i] = BLAKE3( "kvtierd.block.v1\0" || key[i-1] || u32(len(identity)) || identity || u32(block_tokens) || tokens )

- ``"kvtierd.block.v1\0"`` is 17 bytes of ASCII with the closing zero byte.
- ``key[-1]`` is ``parent``, 32 bytes; 32 zero bytes when there is none.
- ``identity`` is whatever else makes the block's content differ (cache salt, LoRA name, image hashes), any bytes; it goes into
  every block of the call.
- ``tokens`` are the block's ``block_tokens`` token ids, each as u32.
- BLAKE3 in its plain mode, 32 bytes of output. A last run of fewer than ``block_tokens`` tokens has no key.

Test vectors (hex)::

    block_keys([1, 2, 3, 4, 5, 6, 7, 8, 9], 4)
        6c78374f09d7b22fb7a9a401a5d5cf2464084d9d087bc15ba4e4ddbc2083cccb
        c3b17b1aa76575236ed178dad8a5cd4b5216a1d1c19831c8e166b96fdc1d3bb4
    block_keys([1, 2, 3, 4], 4, identity=b"lora-a")
        4cbb8e38ca630e517bb4e34d710a8790a7772c6a71733260c276ac3713c1c70e
    block_keys([5, 6, 7, 8], 4, parent=block_keys([1, 2, 3, 4], 4)[0])
        c3b17b1aa76575236ed178dad8a5cd4b5216a1d1c19831c8e166b96fdc1d3bb4

The model, its layout and the tenant are no part of these keys: the namespace and the tenant of the session keep those apart.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvtierd.model import KEY_BYTES

DOMAIN: Final = b"kvtierd.block.v1\0"
ROOT: Final = bytes(KEY_BYTES)
"""Parent of a first block."""
_MAX_U32: Final = 0xFFFF_FFFF


def block_keys(
    token_ids: Sequence[int] | NDArray[Any], block_tokens: int, parent: bytes | None = None, identity: bytes = b""
) -> list[bytes]:
    """Keys of all whole blocks of a run of tokens.

    Args:
        token_ids: the tokens, 0 to 2**32 - 1 each.
        block_tokens: tokens in one block, at least 1.
        parent: key of the block before the first token; None at the start of a prompt.
        identity: whatever else makes the content differ, for example a cache salt or a LoRA name.

    Returns:
        ``len(token_ids) // block_tokens`` keys of 32 bytes, root first.

    Raises:
        ValueError: a token id, ``block_tokens``, ``parent`` or ``identity`` is out of range.
    """
    if not 1 <= block_tokens <= _MAX_U32:
        raise ValueError(f"block_tokens is {block_tokens}; it is at least 1")
    if parent is not None and len(parent) != KEY_BYTES:
        raise ValueError(f"parent is a key of {KEY_BYTES} bytes; got {len(parent)}")
    if len(identity) > _MAX_U32:
        raise ValueError("identity takes at most 2**32 - 1 bytes")
    tokens = _as_u32(token_ids)
    middle = struct.pack("<I", len(identity)) + identity + struct.pack("<I", block_tokens)
    size = 4 * block_tokens
    key = parent or ROOT
    keys: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        key = blake3(DOMAIN + key + middle + tokens[start : start + size]).digest()
        keys.append(key)
    return keys


def _as_u32(token_ids: Sequence[int] | NDArray[Any]) -> bytes:
    array = np.asarray(token_ids) if len(token_ids) else np.empty(0, np.uint32)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are integers from 0 to {_MAX_U32}; got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"token ids are one flat run; got {array.ndim} dimensions")
    if array.size and (int(array.min()) < 0 or int(array.max()) > _MAX_U32):
        raise ValueError(f"token ids are integers from 0 to {_MAX_U32}")
    return array.astype("<u4").tobytes()
