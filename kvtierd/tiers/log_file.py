"""Reading a journal or snapshot: piece by piece, as far as there is anything to read, and its records though its header is lost."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvtierd.tiers.record import (
    FILE_HEADER_BYTES,
    LOG_VERSIONS,
    FileHeader,
    Records,
    parse_file_header,
    parse_records,
    record_bytes,
)

PIECE_BYTES: Final = 64 * 72 * 2048
"""Read at a time: whole records of each version."""
MAX_GAP_BYTES: Final = 32 * PIECE_BYTES
"""Where as much has no intact record, the file ends."""


@dataclass(slots=True)
class LogFile:
    """What was found in one file."""

    header: FileHeader | None
    """None when it is damaged; then the version is the one that the records fit."""
    records: list[Records] = field(default_factory=list)
    """The intact ones."""
    damaged: int = 0
    """Records before the last intact one that are not."""
    good_bytes: int = FILE_HEADER_BYTES
    """To the end of the last intact record."""
    size_bytes: int = 0
    """Of the file."""


def read_log(path: str) -> LogFile:
    """Read one file. Raises OSError."""
    with open(path, "rb") as f:
        found = LogFile(parse_file_header(f.read(FILE_HEADER_BYTES)))
        piece = f.read(PIECE_BYTES)
        version = found.header.version if found.header is not None else _likely_version(piece)
        size = record_bytes(version)
        at = FILE_HEADER_BYTES
        while len(piece) >= size:
            records, intact = parse_records(piece, version)
            good = np.flatnonzero(intact)
            if len(good):
                count = int(good[-1]) + 1
                found.damaged += (at - found.good_bytes) // size + count - len(good)
                found.good_bytes = at + count * size
                found.records.append(records[intact] if len(good) < len(records) else records)
            at += len(piece)
            if at - found.good_bytes >= MAX_GAP_BYTES:
                break
            piece = f.read(PIECE_BYTES)
    found.size_bytes = os.stat(path).st_size
    return found


def _likely_version(piece: bytes) -> int:
    """The version of which most records are intact."""
    return max(sorted(LOG_VERSIONS), key=lambda version: int(parse_records(piece, version)[1].sum()))
