"""Segment files: one per extent, made at its first write, deleted when the extent is dropped.

A segment's bytes are allocated when it is made, so a write into it cannot run out of space on ordinary file systems, and the
file appears under its name complete or not at all. Files are opened on demand; at most :data:`MAX_OPEN_SEGMENTS` stay open.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvtierd.tiers.folder import Folder, is_exhausted, segment_name
from kvtierd.tiers.io_engine import IoEngine

log = logging.getLogger(__name__)

MAX_OPEN_SEGMENTS: Final = 512
"""Descriptors kept open; more are open only while more than this are in use at one time."""


@dataclass(slots=True, eq=False)
class Segment:
    """One extent on disk. ``folder`` is None until the file is made."""

    extent_id: int
    slot_bytes: int
    slot_count: int
    folder: Folder | None = None
    handle: int = -1
    users: int = 0
    dropped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the file is made or opened."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.slot_bytes * self.slot_count

    @property
    def path(self) -> str:
        """The file."""
        assert self.folder is not None
        return self.folder.file(segment_name(self.extent_id, self.slot_bytes, self.slot_count))


class SegmentTable:
    """All segments. Thread-safe.

    Args:
        engine: opens files.
        folders: where new segments may go.
        capacity_bytes: files never take more than this together.
        reserve_bytes: free space of each file system that is left alone.
    """

    def __init__(self, engine: IoEngine, folders: Sequence[Folder], capacity_bytes: int, reserve_bytes: int) -> None:
        self._engine = engine
        self._folders = folders
        self._capacity_bytes = capacity_bytes
        self._reserve_bytes = reserve_bytes
        self._lock = threading.Lock()
        self._create_lock = threading.Lock()
        self._delete_lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._open: OrderedDict[int, Segment] = OrderedDict()
        """Open segments, the least recently used first."""
        self._doomed: deque[Segment] = deque()
        """Files to delete; bounded by the number of segments that fit the capacity."""
        self._deleter = ThreadPoolExecutor(1, "nvme-delete")
        self.on_closing: Callable[[str], None] = lambda _path: None
        """Told of a file that is closed, from any thread."""

    def adopt(self, folder: Folder, extent_id: int, slot_bytes: int, slot_count: int) -> None:
        """Take over a file found at the start."""
        assert extent_id not in self._segments
        segment = self._segments[extent_id] = Segment(extent_id, slot_bytes, slot_count, folder)
        folder.used_bytes += segment.size_bytes

    def add(self, extent_id: int, slot_bytes: int, slot_count: int) -> None:
        """Note a new extent; nothing is made yet."""
        with self._lock:
            assert extent_id not in self._segments, f"extent {extent_id} exists"
            self._segments[extent_id] = Segment(extent_id, slot_bytes, slot_count)

    def drop(self, extent_id: int) -> None:
        """Forget an extent; its file goes soon, in a thread, once no I/O uses it."""
        with self._lock:
            segment = self._segments.pop(extent_id)
            segment.dropped = True
            if segment.users == 0:
                self._doom(segment)

    def get(self, extent_id: int) -> Segment | None:
        """An extent that exists."""
        return self._segments.get(extent_id)

    def on_disk(self) -> list[Segment]:
        """Segments that have a file, in order of their ids."""
        with self._lock:
            return sorted((s for s in self._segments.values() if s.folder is not None), key=lambda s: s.extent_id)

    def _doom(self, segment: Segment) -> None:
        self._doomed.append(segment)
        self._deleter.submit(self.delete_dropped)

    def delete_dropped(self) -> None:
        """Delete the files of dropped extents now."""
        with self._delete_lock:
            while self._doomed:
                segment = self._doomed.popleft()
                with self._lock:
                    handle, segment.handle = segment.handle, -1
                    self._open.pop(segment.extent_id, None)
                if segment.folder is None:
                    continue
                try:
                    if handle >= 0:
                        self._close(segment, handle)
                    os.unlink(segment.path)
                except FileNotFoundError:
                    pass
                except OSError as e:
                    # Its bytes stay counted: better less room than more than the limit.
                    log.error("%s cannot be deleted: %s", segment.path, e)
                    continue
                with self._lock:
                    segment.folder.used_bytes -= segment.size_bytes

    @contextmanager
    def using(self, extent_id: int, *, create: bool) -> Iterator[Segment | None]:
        """Open an extent's file for the time of an I/O; None when it has none and ``create`` is false.

        Raises:
            OSError: it cannot be opened; with ``create``, ENOSPC or EDQUOT when there is no room.
        """
        with self._lock:
            segment = self._segments.get(extent_id)
            if segment is None:
                assert not create, f"a write to extent {extent_id}, which does not exist"
            else:
                segment.users += 1
                if segment.handle >= 0:
                    self._open.move_to_end(extent_id)
        if segment is None:
            yield None
            return
        try:
            yield segment if self._opened(segment, create=create) else None
        finally:
            with self._lock:
                segment.users -= 1
                if segment.dropped and segment.users == 0:
                    self._doom(segment)

    def _opened(self, segment: Segment, *, create: bool) -> bool:
        if segment.handle >= 0:
            return True
        with segment.lock:
            if segment.handle >= 0:
                return True
            if segment.folder is None:
                if not create:
                    return False
                with self._create_lock:
                    self._create(segment)
            assert segment.folder is not None
            try:
                handle = self._engine.open(segment.path, direct=segment.folder.direct)
            except FileNotFoundError:
                if create:
                    raise
                return False
            with self._lock:
                segment.handle = handle
                self._open[segment.extent_id] = segment
        self._close_idle()
        return True

    def _close_idle(self) -> None:
        with self._lock:
            excess = len(self._open) - MAX_OPEN_SEGMENTS
            idle = [s for s in self._open.values() if s.users == 0][: max(excess, 0)] if excess > 0 else []
            handles = [(s, s.handle) for s in idle]
            for segment in idle:
                segment.handle = -1
                del self._open[segment.extent_id]
        for segment, handle in handles:
            self._close(segment, handle)

    def _close(self, segment: Segment, handle: int) -> None:
        self.on_closing(segment.path)
        self._engine.close(handle)

    def _create(self, segment: Segment) -> None:
        """Make the file in the folder with the most room. Raises OSError."""
        self.delete_dropped()
        size = segment.size_bytes
        if sum(f.used_bytes for f in self._folders) + size > self._capacity_bytes:
            raise OSError(errno.ENOSPC, f"a segment of {size} bytes would exceed the capacity of {self._capacity_bytes} bytes")
        usable = [f for f in self._folders if not f.failing]
        if not usable:
            raise OSError(errno.EIO, "every nvme folder is failing")
        error: OSError | None = None
        # Folders of one file system have the same room, give or take; then the one with fewer bytes of ours is next.
        for folder in sorted(usable, key=lambda f: (-(self._room(f) // max(size, 1)), f.used_bytes)):
            if self._room(folder) < size:
                continue
            try:
                self._make_file(folder, segment)
            except OSError as e:
                error = e
                if not is_exhausted(e):
                    folder.note_write_error(e)
                continue
            with self._lock:
                folder.used_bytes += size
                segment.folder = folder
            return
        raise error or OSError(errno.ENOSPC, f"no folder has {size} bytes of room above the reserve of {self._reserve_bytes} bytes")

    def _room(self, folder: Folder) -> int:
        try:
            return folder.free_bytes() - self._reserve_bytes
        except OSError as e:
            folder.note_write_error(e)
            return 0

    def _make_file(self, folder: Folder, segment: Segment) -> None:
        final = folder.file(segment_name(segment.extent_id, segment.slot_bytes, segment.slot_count))
        temporary = final + ".tmp"
        if os.path.lexists(final):
            raise FileExistsError(errno.EEXIST, "somebody else's file is in the place of a segment", final)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, segment.size_bytes)
            os.rename(temporary, final)
        except OSError:
            self._delete_unfinished(folder, temporary, segment.size_bytes)
            raise
        finally:
            os.close(fd)

    def _delete_unfinished(self, folder: Folder, path: str, size_bytes: int) -> None:
        try:
            os.unlink(path)
        except OSError as e:
            # As with a file that was used: its bytes count until the next start deletes it.
            log.error("%s cannot be deleted: %s", path, e)
            with self._lock:
                folder.used_bytes += size_bytes

    def close(self) -> None:
        """Delete what is dropped and close all files."""
        self._deleter.shutdown(wait=True)
        self.delete_dropped()
        with self._lock:
            handles = [(s, s.handle) for s in self._open.values()]
            for segment in self._open.values():
                segment.handle = -1
            self._open.clear()
        for segment, handle in handles:
            self._close(segment, handle)
