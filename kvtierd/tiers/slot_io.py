"""Moving blocks between buffers and slots: neighbours in one call, headers made on the way out and verified on the way in."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from typing_extensions import Buffer

from kvtierd.model import PAGE_BYTES, round_up, slot_extent, slot_index
from kvtierd.tiers.base import BlockIo, RealmInfo, Result
from kvtierd.tiers.encryption import SEAL_BYTES, TAG_BYTES, SlotCipher
from kvtierd.tiers.folder import Folder, is_exhausted
from kvtierd.tiers.io_engine import MAX_IOV, IoEngine, read_all, write_all
from kvtierd.tiers.record import header_page, page_matches, page_names, page_prefix, seal_in, sealed_page, tenant_hash
from kvtierd.tiers.segments import SegmentTable

log = logging.getLogger(__name__)

MAX_RUN_BYTES: Final = 8 << 20
"""Neighbouring slots moved in one call; a larger slot is a call of its own."""
MAX_RUN_SLOTS: Final = MAX_IOV // 2


class StoredRealm:
    """A realm with what header pages say of it."""

    __slots__ = ("fingerprint", "info", "tenant")

    def __init__(self, info: RealmInfo) -> None:
        self.info = info
        self.fingerprint = info.namespace.fingerprint()
        self.tenant = tenant_hash(info.tenant)


@dataclass(slots=True)
class _Piece:
    """One shard of one block of a call."""

    slot: int
    block: int
    prefix: bytes
    payload: memoryview
    """Exactly the shard's bytes."""
    pages: memoryview
    """The payload's whole pages."""


@dataclass(slots=True)
class IoCounters:
    """Totals since the start, of what went well. Bytes are payload and headers, as the device sees them."""

    written_bytes: int = 0
    read_bytes: int = 0
    write_calls: int = 0
    read_calls: int = 0


class SlotMover:
    """Writes and reads slots. Thread-safe.

    Args:
        engine: moves the bytes.
        table: finds and makes segment files.
        realms: by id; the store adds to it.
        counters: what was moved.
        cipher: encrypts what is written; None for plain payloads.
    """

    def __init__(
        self, engine: IoEngine, table: SegmentTable, realms: dict[int, StoredRealm], counters: IoCounters, cipher: SlotCipher | None
    ) -> None:
        self._engine = engine
        self._cipher = cipher
        self._table = table
        self._realms = realms
        self._counters = counters
        self._counter_lock = threading.Lock()
        self._scratch = threading.local()
        self._told_full = False

    def write(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Write all slots; nothing is recorded yet."""
        results = [Result.OK] * len(blocks)
        for run in self._runs(self._pieces(blocks)):
            self._write_run(run, results)
        return results

    def read(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Read all slots and verify them."""
        results = [Result.OK] * len(blocks)
        for run in self._runs(self._pieces(blocks)):
            self._read_run(run, results)
        return results

    def _pieces(self, blocks: Sequence[BlockIo]) -> list[_Piece]:
        pieces = []
        for i, block in enumerate(blocks):
            realm = self._realms[block.realm_id]
            sizes = realm.info.namespace.shard_bytes
            assert len(block.slots) == len(block.buffers) == len(sizes), "a block has all shards of its realm"
            for shard, (slot, buffer, size) in enumerate(zip(block.slots, block.buffers, sizes, strict=True)):
                prefix = page_prefix(
                    key=block.key, fingerprint=realm.fingerprint, tenant=realm.tenant, generation=block.generation,
                    slot=slot, shard=shard, shards=len(sizes), size_bytes=size, encrypted=self._cipher is not None,
                )  # fmt: skip
                payload, pages = _whole_pages(buffer, size)
                pieces.append(_Piece(slot, i, prefix, payload, pages))
        pieces.sort(key=lambda p: p.slot)
        return pieces

    def _runs(self, pieces: list[_Piece]) -> Iterator[list[_Piece]]:
        """Split sorted pieces into runs that lie one after the other in one file without gaps."""
        run: list[_Piece] = []
        size = 0
        for piece in pieces:
            segment = self._table.get(slot_extent(piece.slot))
            slot_bytes = segment.slot_bytes if segment else 0
            here = PAGE_BYTES + piece.pages.nbytes
            assert here <= slot_bytes or not segment, f"a shard of {here} bytes with its header in a slot of {slot_bytes} bytes"
            joins = bool(run) and piece.slot == run[-1].slot + 1 and PAGE_BYTES + run[-1].pages.nbytes == slot_bytes
            if run and not (joins and size + here <= MAX_RUN_BYTES and len(run) < MAX_RUN_SLOTS):
                yield run
                run, size = [], 0
            run.append(piece)
            size += here
        if run:
            yield run

    def _header_pages(self) -> memoryview:
        """This thread's pages for the headers of one run."""
        pages = getattr(self._scratch, "pages", None)
        if pages is None:
            pages = self._scratch.pages = memoryview(mmap.mmap(-1, MAX_RUN_SLOTS * PAGE_BYTES))
        assert isinstance(pages, memoryview)
        return pages

    def _room(self, size_bytes: int) -> memoryview:
        """This thread's memory for the encrypted payloads of one run."""
        room = getattr(self._scratch, "room", None)
        if room is None or room.nbytes < size_bytes:
            room = self._scratch.room = memoryview(mmap.mmap(-1, max(size_bytes, MAX_RUN_BYTES + MAX_RUN_SLOTS * PAGE_BYTES)))
        assert isinstance(room, memoryview)
        return room

    def _seal(self, run: list[_Piece], headers: list[memoryview], cipher: SlotCipher) -> list[memoryview]:
        """Encrypt payloads into memory of this thread, as those of blocks stay readable. Returns all buffers of the run."""
        takes = [round_up(piece.payload.nbytes + TAG_BYTES, PAGE_BYTES) for piece in run]
        room, at = self._room(sum(takes)), 0
        buffers = []
        for header, piece, size in zip(headers, run, takes, strict=True):
            end = at + piece.payload.nbytes
            header[:] = sealed_page(piece.prefix, cipher.encrypt(piece.payload, piece.prefix, room[at : end + TAG_BYTES]))
            pages = room[at : at + piece.pages.nbytes]
            pages[piece.payload.nbytes :] = bytes(piece.pages.nbytes - piece.payload.nbytes)
            buffers += [header, pages]
            at += size
        return buffers

    def _layout(self, run: list[_Piece]) -> tuple[list[memoryview], list[memoryview]]:
        """Header pages of a run, and all buffers in the order of the file."""
        scratch = self._header_pages()
        headers = [scratch[i * PAGE_BYTES : (i + 1) * PAGE_BYTES] for i in range(len(run))]
        return headers, [view for header, piece in zip(headers, run, strict=True) for view in (header, piece.pages)]

    def _write_run(self, run: list[_Piece], results: list[Result]) -> None:
        folder: Folder | None = None
        try:
            with self._table.using(slot_extent(run[0].slot), create=True) as segment:
                assert segment is not None
                folder = segment.folder
                headers, buffers = self._layout(run)
                if self._cipher is not None:
                    buffers = self._seal(run, headers, self._cipher)
                else:
                    for header, piece in zip(headers, run, strict=True):
                        header[:] = header_page(piece.prefix, piece.payload)
                write_all(self._engine, segment.handle, buffers, slot_index(run[0].slot) * segment.slot_bytes)
        except OSError as e:
            for piece in run:
                results[piece.block] = Result.NO_SPACE if is_exhausted(e) else Result.IO_ERROR
            if folder is not None:
                self.note_write_error(folder, e)
            elif not is_exhausted(e):
                log.error("a segment cannot be made: %s", e)
            elif not self._told_full:
                self._told_full = True
                log.warning("no segment can be made at present, blocks stay in memory: %s", e)
            return
        self._told_full = False
        if folder is not None:
            folder.note_written()
        with self._counter_lock:
            self._counters.write_calls += 1
            self._counters.written_bytes += sum(b.nbytes for b in buffers)

    def note_write_error(self, folder: Folder, error: OSError) -> None:
        """Count an error of a write, unless it only says that there is no room."""
        if is_exhausted(error):
            log.warning("nvme folder %s takes no write at present: %s", folder.path, error)
            return
        folder.note_write_error(error)

    def _read_run(self, run: list[_Piece], results: list[Result]) -> None:
        folder: Folder | None = None
        try:
            with self._table.using(slot_extent(run[0].slot), create=False) as segment:
                if segment is None:
                    for piece in run:
                        results[piece.block] = Result.CORRUPT
                    return
                folder = segment.folder
                headers, buffers = self._layout(run)
                got = read_all(self._engine, segment.handle, buffers, slot_index(run[0].slot) * segment.slot_bytes)
        except OSError as e:
            if len(run) > 1:  # one bad place must not take its neighbours along
                for piece in run:
                    self._read_run([piece], results)
                return
            if is_exhausted(e):  # the block is well, and can be read later
                log.warning("a block cannot be read from nvme at present: %s", e)
                results[run[0].block] = Result.NO_SPACE
                return
            results[run[0].block] = Result.IO_ERROR
            if folder is not None:
                folder.note_read_error(e)
            return
        end = 0
        for header, piece in zip(headers, run, strict=True):
            end += PAGE_BYTES + piece.pages.nbytes
            if (end > got or not self._verify(header, piece)) and results[piece.block] is Result.OK:
                results[piece.block] = Result.CORRUPT
        with self._counter_lock:
            self._counters.read_calls += 1
            self._counters.read_bytes += got

    def _verify(self, header: memoryview, piece: _Piece) -> bool:
        """Whether what was read is what was written there; decrypts it."""
        if self._cipher is None:
            return page_matches(header, piece.prefix, piece.payload)
        if not page_names(header, piece.prefix):
            return False
        return self._cipher.decrypt(piece.payload, piece.prefix, seal_in(header, piece.prefix, SEAL_BYTES))


def _whole_pages(buffer: Buffer, size_bytes: int) -> tuple[memoryview, memoryview]:
    """A buffer as bytes, and the same memory up to the end of its last page (the contract allows that)."""
    payload = memoryview(buffer).cast("B")
    assert payload.nbytes == size_bytes, f"a buffer of {payload.nbytes} bytes for a shard of {size_bytes} bytes"
    address = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
    assert address % PAGE_BYTES == 0, "a buffer starts on a page"
    padded = round_up(size_bytes, PAGE_BYTES)
    if padded == size_bytes:
        return payload, payload
    return payload, memoryview((ctypes.c_char * padded).from_address(address))
