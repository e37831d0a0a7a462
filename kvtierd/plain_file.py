"""Small files that somebody else may have made, read without trust."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["MAX_FILE_BYTES", "read_plain"]

MAX_FILE_BYTES: Final = 1 << 30
"""More than as many realms as a pool may have take, with the longest names."""


def read_plain(path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """All bytes of a file. Never waits, whatever is at the path.

    Raises:
        FileNotFoundError: there is nothing.
        OSError: it cannot be read.
        ValueError: it is no plain file, or too large.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("it is no plain file")
    size = os.stat(path).st_size
    if size > max_bytes:
        raise ValueError(f"it has more than the {max_bytes} bytes that are read")
    with open(path, "rb") as f:
        return f.read(size)
