"""Keys and buffers as callers give them, turned into what is sent and copied."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvtierd.model import KEY_BYTES

Bytes1D: TypeAlias = NDArray[np.uint8]
Keys: TypeAlias = "bytes | bytearray | memoryview | NDArray[Any] | Sequence[bytes]"
"""Packed keys (32 bytes each in one bytes-like object, or a numpy array of bytes), or a sequence of 32-byte keys."""
Buffer: TypeAlias = Any
"""A C-contiguous object with the buffer protocol, a numpy array of any dtype, or a contiguous torch tensor in CPU memory."""
Buffers: TypeAlias = Any
"""One entry a key: a `Buffer` (one shard), or a sequence of one `Buffer` a shard. A 2-D numpy array works as one row a key."""


def pack_keys(keys: Keys) -> bytes:
    """Pack keys: 32 bytes each in one bytes object. Bytes are returned as they are, without a copy.

    Raises:
        ValueError: a key does not have 32 bytes.
    """
    if isinstance(keys, bytes):
        packed = keys
    elif isinstance(keys, np.ndarray):
        packed = keys.tobytes()
    elif isinstance(keys, bytearray | memoryview):
        packed = bytes(keys)
    else:
        packed = b"".join(keys)
        if keys and set(map(len, keys)) != {KEY_BYTES}:
            wrong = next(k for k in keys if len(k) != KEY_BYTES)
            raise ValueError(f"a key has {KEY_BYTES} bytes; got one of {len(wrong)}")
    if len(packed) % KEY_BYTES:
        raise ValueError(f"packed keys take {KEY_BYTES} bytes each; got {len(packed)} bytes")
    return packed


def count_keys(packed: bytes) -> int:
    """How many keys are packed."""
    return len(packed) // KEY_BYTES


def byte_view(buffer: Buffer, *, writable: bool = False) -> Bytes1D:
    """A flat uint8 view of a buffer's memory, never a copy.

    Raises:
        ValueError: not contiguous, not in CPU memory, or read-only where ``writable`` is asked for.
    """
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise ValueError("a numpy buffer must be C-contiguous")
        view = buffer.reshape(-1).view(np.uint8)
    elif hasattr(buffer, "untyped_storage"):
        view = _tensor_view(buffer)
    else:
        try:
            view = np.frombuffer(buffer, dtype=np.uint8)
        except (TypeError, ValueError, BufferError) as e:
            raise ValueError(f"{type(buffer).__name__} is no contiguous buffer: {e}") from e
    if writable and not view.flags.writeable:
        raise ValueError(f"{type(buffer).__name__} is read-only; a load needs a writable buffer")
    return view


def _tensor_view(tensor: Any) -> Bytes1D:
    """Torch has no buffer protocol, and numpy knows neither bfloat16 nor FP8: both go through a view as uint8."""
    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}; the client copies from and to CPU memory only")
    if not tensor.is_contiguous():
        raise ValueError("a tensor must be contiguous")
    # Never imported here: whoever has a tensor has already imported torch.
    uint8 = sys.modules["torch"].uint8
    return cast(Bytes1D, tensor.detach().reshape(-1).view(uint8).numpy())


def block_views(buffers: Buffers, count: int, shard_bytes: Sequence[int], *, writable: bool = False) -> list[list[Bytes1D]]:
    """Flat views of all buffers: one list a key with one view a shard.

    Raises:
        ValueError: another number of buffers than ``count``, or a buffer of another size than its shard; the text names both.
    """
    if len(buffers) != count:
        raise ValueError(f"{count} keys need {count} buffers; got {len(buffers)}")
    shards = len(shard_bytes)
    if (
        isinstance(buffers, np.ndarray)
        and shards == 1
        and count
        and buffers.flags.c_contiguous
        and buffers[0].nbytes == shard_bytes[0]
    ):
        rows = byte_view(buffers, writable=writable).reshape(count, -1)  # much faster than one view at a time
        return [[row] for row in rows]
    blocks: list[list[Bytes1D]] = []
    for index in range(count):
        entry = buffers[index]
        parts = entry if isinstance(entry, list | tuple) else (entry,)
        if len(parts) != shards:
            raise ValueError(f"key {index} needs one buffer for each of {shards} shards; got {len(parts)}")
        views = [byte_view(part, writable=writable) for part in parts]
        for shard, (view, expected) in enumerate(zip(views, shard_bytes, strict=True)):
            if view.nbytes != expected:
                raise ValueError(f"key {index}, shard {shard}: the namespace has {expected} bytes; the buffer has {view.nbytes}")
        blocks.append(views)
    return blocks
