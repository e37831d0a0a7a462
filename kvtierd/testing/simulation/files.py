"""A file system in memory that tells what is on the disk from what only its cache knows.

A killed process loses nothing that it has written. A power cut does: of each page that was written since the file's last fsync, the
old or the new content is left, or a mixture by sectors; file sizes may go back; and of the changes of names since the folder's last
fsync, the last ones may be undone (in order: file systems have journals).
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass, field
from typing import Final

from kvtierd.model import PAGE_BYTES, round_up
from kvtierd.testing.simulation.disk import Disk

SECTOR_BYTES: Final = 512


@dataclass(eq=False)
class Inode:
    """One file's bytes."""

    disk: Disk
    number: int
    data: bytearray = field(default_factory=bytearray)
    before: dict[int, bytes] = field(default_factory=dict)
    """What the disk may still have of pages that were written since the last fsync."""
    durable_bytes: int = 0
    """Length on the disk for certain."""
    allocated_bytes: int = 0
    opened: int = 0
    modified_s: float = 0.0

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put bytes into the cache. Raises ENOSPC."""
        end = offset + len(data)
        self.allocate(max(end, len(self.data)))
        if end > len(self.data):
            self.data.extend(bytes(end - len(self.data)))
        for page in range(offset // PAGE_BYTES, -(-end // PAGE_BYTES)):
            if page not in self.before:
                self.before[page] = bytes(self.data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
        self.data[offset:end] = data

    def allocate(self, size_bytes: int) -> None:
        """Take room on the disk. Raises ENOSPC."""
        more = round_up(size_bytes, PAGE_BYTES) - self.allocated_bytes
        if more <= 0:
            return
        if more > self.disk.free_bytes:
            raise OSError(errno.ENOSPC, "the simulated disk is full")
        self.disk.used_bytes += more
        self.allocated_bytes += more

    def resize(self, size_bytes: int) -> None:
        """Cut or lengthen. Raises ENOSPC."""
        self.allocate(size_bytes)
        if size_bytes < len(self.data):
            for page in range(size_bytes // PAGE_BYTES, -(-len(self.data) // PAGE_BYTES)):
                if page not in self.before:
                    self.before[page] = bytes(self.data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])
            del self.data[size_bytes:]
            self.disk.used_bytes -= self.allocated_bytes - round_up(size_bytes, PAGE_BYTES)
            self.allocated_bytes = round_up(size_bytes, PAGE_BYTES)
        else:
            self.data.extend(bytes(size_bytes - len(self.data)))

    def sync(self) -> None:
        """Everything is on the disk."""
        self.before.clear()
        self.durable_bytes = len(self.data)

    def lose_power(self) -> None:
        """Keep what the disk happens to have."""
        draw = self.disk.world.random
        size = len(self.data)
        if size != self.durable_bytes and draw.random() < 0.5:
            low, high = sorted((size, self.durable_bytes))
            size = draw.choice([low, high, draw.randint(low, high)])
        for page, old in self.before.items():
            chance = draw.random()
            at = page * PAGE_BYTES
            old = old.ljust(PAGE_BYTES, b"\0")
            new = bytes(self.data[at : at + PAGE_BYTES]).ljust(PAGE_BYTES, b"\0")
            if chance < 0.45:
                kept = old
            elif chance < 0.9:
                kept = new
            else:
                spans = range(0, PAGE_BYTES, SECTOR_BYTES)
                kept = b"".join(draw.choice((old, new))[i : i + SECTOR_BYTES] for i in spans)
            if len(self.data) < at + PAGE_BYTES:
                self.data.extend(bytes(at + PAGE_BYTES - len(self.data)))
            self.data[at : at + PAGE_BYTES] = kept
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        self.allocated_bytes = round_up(size, PAGE_BYTES)
        self.sync()


class Files:
    """Names and inodes of all disks; a folder of its own on each.

    Args:
        disks: by the folder's path.
    """

    def __init__(self, disks: dict[str, Disk]) -> None:
        self.disks = disks
        self.names: dict[str, Inode] = {}
        self.folders: set[str] = set()
        self._undo: dict[str, list[dict[str, Inode | None]]] = {path: [] for path in disks}
        """What names meant before each change since the folder's last fsync."""
        self._nameless: list[Inode] = []
        """Files that are open and have no name any more."""
        self._number = 0

    def folder_of(self, path: str) -> str:
        """The folder of a file. Raises ENOENT."""
        folder = os.path.dirname(path)
        if folder not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        return folder

    def get(self, path: str) -> Inode:
        """The file of this name. Raises ENOENT."""
        inode = self.names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return inode

    def inside(self, folder: str) -> list[str]:
        """Paths of the files in a folder, in no order that means anything."""
        return [path for path in self.names if os.path.dirname(path) == folder]

    def create(self, path: str) -> Inode:
        """Make an empty file."""
        folder = self.folder_of(path)
        self._number += 1
        inode = Inode(self.disks[folder], self._number, modified_s=self.disks[folder].world.now)
        self._change(folder, {path: inode})
        return inode

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in place of what has it."""
        self._change(self.folder_of(target), {source: None, target: self.get(source)})

    def unlink(self, path: str) -> None:
        """Take a name away."""
        self.get(path)
        self._change(self.folder_of(path), {path: None})

    def _change(self, folder: str, change: dict[str, Inode | None]) -> None:
        self._undo[folder].append({path: self.names.get(path) for path in change})
        self._put(change)
        self.recount()

    def _put(self, change: dict[str, Inode | None]) -> None:
        for path, inode in change.items():
            former = self.names.pop(path, None)
            if former is not None and former.opened:
                self._nameless.append(former)
            if inode is not None:
                self.names[path] = inode

    def recount(self) -> None:
        """Work out what is in use on each disk."""
        self._nameless = [inode for inode in self._nameless if inode.opened]
        held = {inode.number: inode for inode in (*self.names.values(), *self._nameless)}
        for disk in self.disks.values():
            disk.used_bytes = sum(inode.allocated_bytes for inode in held.values() if inode.disk is disk)

    def sync(self, folder: str) -> None:
        """All names are on the disk."""
        self._undo[folder].clear()

    def close_all(self) -> None:
        """The process that had files open has gone."""
        for inode in (*self.names.values(), *self._nameless):
            inode.opened = 0
        self.recount()

    def lose_power(self, draw: random.Random) -> None:
        """Keep what the disks happen to have."""
        self.close_all()
        for undo in self._undo.values():
            keep = draw.randint(0, len(undo))
            for step in reversed(undo[keep:]):
                self._put(step)
            undo.clear()
        for inode in self.names.values():
            inode.lose_power()
        self.recount()
