"""One folder's journal and snapshots.

A journal is a header and records in any order (see :mod:`kvtierd.tiers.record`). Journals are numbered; the highest is
written to. A snapshot N was begun when journal N was; it names every block that was stored then and is still stored when it
is listed. Recovery reads the highest snapshot and all journals that are left.

Why a snapshot may be listed while writes go on: everything that happens after journal N was begun is in journal N or later,
and those are kept. A block stored before, whose completion the lister has not seen yet, is in journal N-1, so that one
is kept as well until the next snapshot is committed. A block that is listed and removed later has its removal in journal N
or later, and a removal beats a listing of the same generation whatever their order. Files are deleted oldest first, so a
removal never goes before the record it cancels.

Records are written with plain writes, so they outlive the process; after a power cut the tail may be missing or torn, which
costs cached blocks and nothing else, because every read is verified against the header page. A file whose header is damaged still
has records with checksums of their own: they are used, and the file stays as it is until a snapshot replaces it.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from typing import Final

from kvtierd.tiers import log_file
from kvtierd.tiers.folder import Folder
from kvtierd.tiers.io_engine import IoEngine, write_all
from kvtierd.tiers.log_file import LogFile
from kvtierd.tiers.record import FILE_HEADER_BYTES, LOG_VERSION, RECORD_BYTES, FileHeader, Records

log = logging.getLogger(__name__)

MAX_PENDING_BYTES: Final = (4 << 20) // RECORD_BYTES * RECORD_BYTES
"""Records kept in memory before they are written at once; twice this is the most that is kept when writing fails."""

LOST_GENERATIONS: Final = 1 << 32
"""Generations left out where it is not known which were in use: more than are given out between two snapshots."""

_NAME: Final = re.compile(r"(journal|snapshot)-(\d+)\.kv[js]", re.ASCII)


class Journal:
    """Records of one folder. Thread-safe; call :meth:`load` once before anything else.

    Args:
        folder: where the files are.
        engine: how appends reach the file.
        pool_id: 16 bytes in every header; files of another pool are set aside.
        floors: gives the highest generation and extent id in use, for headers.
    """

    def __init__(self, folder: Folder, engine: IoEngine, pool_id: bytes, floors: Callable[[], tuple[int, int]]) -> None:
        self._folder = folder
        self._engine = engine
        self._pool_id = pool_id
        self._floors = floors
        self._lock = threading.Lock()
        """Held while the file is written."""
        self._pending_lock = threading.Lock()
        """Held for moments only; taken inside ``_lock``, never around it."""
        self._pending = bytearray()
        self._sizes: dict[int, int] = {}
        """Bytes of each journal, by number."""
        self._sequence = 0
        self._snapshot = 0
        """Number of the snapshot that was committed last; 0 for none."""
        self._handle = -1
        self._spare: list[str] = []
        """Paths of snapshots to delete: one that was begun and does not count yet, or the one before that which counts."""
        self._lost_floors = False
        """A header was damaged, and with it the highest generation in use before the file."""

    def load(self) -> tuple[list[Records], FileHeader]:
        """Read everything, drop a torn tail and open the newest journal.

        Returns:
            Arrays of intact records and a header whose maxima cover all headers read.

        Raises:
            OSError: a file cannot be read, or the first journal cannot be made.
        """
        names = [m for e in self._folder.our_files() if (m := _NAME.fullmatch(e.name))]
        snapshots = sorted(int(m[2]) for m in names if m[1] == "snapshot")
        journals = sorted(int(m[2]) for m in names if m[1] == "journal")
        found: list[Records] = []
        headers = [FileHeader(0, self._pool_id)]
        for number in reversed(snapshots):
            if self._snapshot:
                os.unlink(self._path("snapshot", number))
            elif self._load_file("snapshot", number, found, headers) is not None:
                self._snapshot = number
        newest: FileHeader | None = None
        for number in journals:
            read = self._load_file("journal", number, found, headers)
            if read is not None:
                self._sizes[number] = read.size_bytes
                newest = read.header
        generation = max(h.max_generation for h in headers)
        if self._lost_floors:
            generation = max([generation, *(int(r["generation"].max()) for r in found)]) + LOST_GENERATIONS
        top = FileHeader(0, self._pool_id, generation, max(h.max_extent_id for h in headers))
        self._sequence = self._folder.highest_number
        if newest is not None and newest.sequence == self._sequence and newest.version == LOG_VERSION:
            self._handle = self._engine.open(self._path("journal", self._sequence), direct=False)
        else:
            self._start_file(FileHeader(self._sequence + 1, self._pool_id, top.max_generation, top.max_extent_id))
        return found, top

    def _path(self, kind: str, number: int) -> str:
        return self._folder.file(f"{kind}-{number}.{'kvj' if kind == 'journal' else 'kvs'}")

    def _load_file(self, kind: str, number: int, found: list[Records], headers: list[FileHeader]) -> LogFile | None:
        """Read one file; None when it was set aside. One whose header is damaged is left as it is until a snapshot replaces it."""
        path = self._path(kind, number)
        read = log_file.read_log(path)
        header = read.header
        if header is None:
            self._lost_floors = True
            if not read.records:
                self._folder.set_aside(os.path.basename(path), "is damaged")
                return None
            log.error("%s: its header is damaged; its records are used until the next snapshot replaces it", path)
        elif header.pool_id != self._pool_id or header.sequence != number:
            # Segments of a pool that was lost may still be here: their generations must not be given out again.
            self._lost_floors |= header.pool_id != self._pool_id
            headers.append(FileHeader(0, self._pool_id, header.max_generation))
            self._folder.set_aside(os.path.basename(path), "belongs to another pool, or was renamed")
            return None
        else:
            headers.append(header)
        if read.damaged:
            log.error("%s: %d records in the middle are damaged and left out", path, read.damaged)
        if header is not None and read.good_bytes < read.size_bytes:
            log.info("%s: a torn tail of %d bytes is cut off", path, read.size_bytes - read.good_bytes)
            os.truncate(path, read.good_bytes)
            read.size_bytes = read.good_bytes
        found += read.records
        return read

    def _start_file(self, header: FileHeader) -> None:
        path = self._path("journal", header.sequence)
        with open(path + ".tmp", "wb") as f:
            f.write(header.pack())
        os.rename(path + ".tmp", path)
        handle = self._engine.open(path, direct=False)
        if self._handle >= 0:
            self._engine.close(self._handle)
        self._handle = handle
        self._sequence = header.sequence
        self._sizes[header.sequence] = FILE_HEADER_BYTES

    @property
    def size_bytes(self) -> int:
        """Bytes of all journals."""
        return sum(tuple(self._sizes.values()))

    @property
    def fresh_bytes(self) -> int:
        """Bytes of the journals begun with or after the last snapshot: what the next snapshot would make superfluous."""
        return sum(size for number, size in tuple(self._sizes.items()) if number >= self._snapshot)

    def append(self, records: bytes) -> None:
        """Write records that wait and then ``records``, in one write. Raises OSError; then none of ``records`` count."""
        with self._lock:
            with self._pending_lock:
                pending, self._pending = self._pending, bytearray()
            if not pending and not records:
                return
            size = self._sizes[self._sequence]
            data = bytes(pending) + records if pending else records
            try:
                write_all(self._engine, self._handle, [memoryview(data)], size)
            except OSError:
                self._undo(pending, size)
                raise
            self._sizes[self._sequence] = size + len(data)

    def _undo(self, pending: bytearray, size_bytes: int) -> None:
        """Cut off what a failed write left, and keep the records that waited for later."""
        with self._pending_lock:
            # Beyond the limit the oldest go: such a block may come back after a restart, and its bytes are verified as ever.
            self._pending = (pending + self._pending)[-2 * MAX_PENDING_BYTES :]
        try:
            os.truncate(self._path("journal", self._sequence), size_bytes)
        except OSError as e:
            log.log(
                logging.DEBUG if self._folder.failing else logging.ERROR,
                "%s: a failed write could not be undone: %s", self._folder.path, e,
            )  # fmt: skip

    def defer(self, records: bytes) -> None:
        """Keep records (of removals, or of later expiries) in memory until the next :meth:`append`; over 4 MiB they are written
        at once."""
        with self._pending_lock:
            self._pending += records
            full = len(self._pending) > MAX_PENDING_BYTES
        if full:
            try:
                self.flush()
            except OSError as e:
                log.error("%s: records could not be written: %s", self._folder.path, e)

    def flush(self) -> None:
        """Write records that wait; on return those that another thread was writing are there too. Raises OSError."""
        self.append(b"")

    def begin_snapshot(self) -> str:
        """Begin a new journal and return the path that the snapshot is to be written to, header included. Raises OSError, also as
        long as a former one cannot be deleted: there are never more than two."""
        self.abort_snapshot()
        with self._lock:
            header = FileHeader(self._sequence + 1, self._pool_id, *self._floors())
            self._start_file(header)
        path = self._path("snapshot", header.sequence) + ".tmp"
        self._spare.append(path)
        with open(path, "wb") as f:
            f.write(header.pack())
        return path

    def abort_snapshot(self) -> None:
        """Delete a snapshot that was begun and not committed, and one that was replaced and is still there. Raises OSError."""
        while self._spare:
            if os.path.exists(self._spare[0]):
                os.unlink(self._spare[0])
            del self._spare[0]

    def commit_snapshot(self, path: str) -> None:
        """Make a finished snapshot the one that counts and delete what it replaces. Raises OSError."""
        number = int(_NAME.fullmatch(os.path.basename(path).removesuffix(".tmp"))[2])  # type: ignore[index]
        with open(path, "rb") as f:
            os.fsync(f.fileno())
        os.rename(path, path.removesuffix(".tmp"))
        self._spare = [path.removesuffix(".tmp")]
        self._folder.sync()
        with self._lock:
            old, self._snapshot = self._snapshot, number
            done = sorted(n for n in self._sizes if n < number - 1)
        self._spare = [self._path("snapshot", old)] if old else []
        self.abort_snapshot()
        for journal in done:
            os.unlink(self._path("journal", journal))
            with self._lock:
                del self._sizes[journal]

    def close(self) -> None:
        """Close the file without writing anything."""
        with self._lock:
            if self._handle >= 0:
                self._engine.close(self._handle)
                self._handle = -1
