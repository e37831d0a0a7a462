"""Faults below a process: builds the preloaded library, steers it, and takes writes back that no sync has made durable.

Faults that a device reports (EIO, ENOSPC, short transfers) and those that it hides (torn and lost writes, flipped bits on reads)
come at rates; a path can be made dead altogether. Needs gcc or another C compiler that takes its arguments.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import struct
import subprocess
from enum import IntEnum
from pathlib import Path
from typing import Final

from kvtierd.model import PAGE_BYTES

SOURCE: Final = Path(__file__).with_name("shim.c")
CONTROL_BYTES: Final = 4096
PATH_ROOM: Final = 255
_MILLION: Final = 1_000_000
_RATES, _HITS, _UNDO, _WALL, _DEAD, _ONLY = 16, 80, 208, 216, 256, 512
_ENTRY: Final = struct.Struct("<7Q")
_UNDO_MAGIC: Final = 0x4F444E5544494B21


class DiskFault(IntEnum):
    """What goes wrong with one call; the order is the library's."""

    WRITE_EIO = 0
    WRITE_ENOSPC = 1
    WRITE_SHORT = 2
    """Only a part is written, and the count says so."""
    WRITE_TORN = 3
    """Only a part is written, and the count says that all was."""
    WRITE_LOST = 4
    """Nothing is written, and the count says that all was."""
    READ_EIO = 5
    READ_SHORT = 6
    READ_FLIP = 7
    """One bit is wrong."""
    SYNC_EIO = 8
    MAKE_ENOSPC = 9
    """A file's room cannot be allocated."""
    RENAME_EIO = 10


def compiler() -> str | None:
    """A C compiler; None where there is none."""
    return next((found for name in ("gcc", "cc", "clang") if (found := shutil.which(name))), None)


class FaultyDisk:
    """A folder whose files a process sees through faults.

    Args:
        under: the folder; calls on files in it and below count.
        work: for the library and what steers it; not inside ``under``.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """

    def __init__(self, under: Path, work: Path) -> None:
        self.under = under
        under.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        self._library, self._control_path, self._undo_path = work / "faults.so", work / "faults.control", work / "faults.undo"
        _build(self._library)
        self._control_path.write_bytes(bytes(CONTROL_BYTES))
        with self._control_path.open("r+b") as f:
            self._control = mmap.mmap(f.fileno(), CONTROL_BYTES)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the process that is to have the faults."""
        return {
            "LD_PRELOAD": str(self._library),
            "FAULTS_UNDER": str(self.under),
            "FAULTS_CONTROL": str(self._control_path),
            "FAULTS_UNDO": str(self._undo_path),
        }

    def set(self, rates: dict[DiskFault, float], *, seed: int = 0, only: str = "") -> None:
        """Have faults at these rates a call, and no others.

        Args:
            rates: 0 to 1, of each call of the kind.
            seed: of which calls; threads of the process may swap theirs.
            only: they befall only paths that contain this.
        """
        self._text(_ONLY, only)
        struct.pack_into("<QQ", self._control, 0, seed & (1 << 64) - 1, 0)
        for fault in DiskFault:
            struct.pack_into("<I", self._control, _RATES + 4 * fault, round(rates.get(fault, 0.0) * _MILLION))

    def kill(self, part: str) -> None:
        """Make everything dead whose path contains this: each call on it answers EIO. "" brings all back."""
        self._text(_DEAD, part)

    def move_clock(self, seconds: int) -> None:
        """Put the process's wall clock so far ahead of the real one (or behind it)."""
        struct.pack_into("<q", self._control, _WALL, seconds)

    def heal(self) -> None:
        """End all faults of the disk."""
        self.set({})
        self.kill("")

    def hits(self) -> dict[DiskFault, int]:
        """How often each fault came, since the start."""
        return {fault: struct.unpack_from("<Q", self._control, _HITS + 8 * fault)[0] for fault in DiskFault}

    def watch_writes(self, *, on: bool) -> None:
        """Begin or end to remember what writes replace until a sync; what was remembered before is forgotten."""
        struct.pack_into("<I", self._control, _UNDO, 0)
        with contextlib.suppress(FileNotFoundError):
            os.truncate(self._undo_path, 0)
        struct.pack_into("<I", self._control, _UNDO, int(on))

    def cut_power(self, rng: random.Random, share: float) -> int:
        """Take pages back that were written since :meth:`watch_writes` and never synced, once the process is dead.

        Args:
            rng: decides which.
            share: of the pages that are lost, 0 to 1.

        Returns:
            Pages taken back.
        """
        files = {e.stat().st_ino: e for e in self.under.rglob("*") if e.is_file()}
        taken = 0
        for inode, writes in _unsynced(self._undo_path).items():
            if inode in files:
                taken += _take_back(files[inode], writes, rng, share)
        return taken

    def _text(self, at: int, text: str) -> None:
        raw = os.fsencode(text)
        assert len(raw) <= PATH_ROOM, "a part of a path"
        self._control[at : at + len(raw) + 1] = raw + b"\0"

    def close(self) -> None:
        """Let go of the control file."""
        self._control.close()


_Write = tuple[int, int, int, bytes]
"""Offset, length, size of the file before, and the bytes before."""


def _unsynced(path: Path) -> dict[int, list[_Write]]:
    """Writes by inode that nothing has made durable, in order."""
    raw = path.read_bytes() if path.exists() else b""
    found: dict[int, list[_Write]] = {}
    at = 0
    while at + _ENTRY.size <= len(raw):
        magic, kind, inode, offset, length, old_size, old_length = _ENTRY.unpack_from(raw, at)
        at += _ENTRY.size
        if magic != _UNDO_MAGIC or at + old_length > len(raw):
            break  # the process died within; the write itself had not begun
        if kind == 0:
            found.setdefault(inode, []).append((offset, length, old_size, raw[at : at + old_length]))
        else:
            found.pop(inode, None)
        at += old_length
    return found


def _take_back(path: Path, writes: list[_Write], rng: random.Random, share: float) -> int:
    taken = 0
    with path.open("r+b") as f:
        for offset, length, old_size, old in reversed(writes):
            for start in range(0, length, PAGE_BYTES):
                if rng.random() >= share:
                    continue
                size = min(PAGE_BYTES, length - start)
                f.seek(offset + start)
                f.write(old[start : start + size].ljust(size, b"\0"))
                taken += 1
            if share == 1 and f.seek(0, os.SEEK_END) > old_size:
                f.truncate(old_size)
    return taken


def _build(library: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("faults below the daemon need a C compiler: install gcc")
    done = subprocess.run(
        [found, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{SOURCE} cannot be built: {done.stderr[-2000:]}")
