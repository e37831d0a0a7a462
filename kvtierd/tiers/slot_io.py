"""Moving blocks between buffers and slots: neighbours in one call, headers made on the way out and verified on the way in.

Blocks in GPU memory go directly where the :class:`~kvtierd.tiers.direct_path.DirectPath` is open for their GPU: the payload first,
then the header page, by the plain engine. What fails so, or reads as damaged, is moved again through CPU memory, whose word counts:
where that goes well, the direct way is at fault, and is closed.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from typing_extensions import Buffer

from kvtierd.cuda import CudaError, Device
from kvtierd.model import PAGE_BYTES, round_up, slot_extent, slot_index
from kvtierd.tiers.base import BlockIo, DeviceRange, RealmInfo, Result
from kvtierd.tiers.direct_path import DirectError, DirectPath
from kvtierd.tiers.encryption import SEAL_BYTES, TAG_BYTES, SlotCipher
from kvtierd.tiers.folder import Folder, is_exhausted
from kvtierd.tiers.io_engine import MAX_IOV, IoEngine, read_all, write_all
from kvtierd.tiers.record import header_page, page_has, page_matches, page_names, page_prefix, seal_in, sealed_page, tenant_hash
from kvtierd.tiers.segments import Segment, SegmentTable

log = logging.getLogger(__name__)

MAX_RUN_BYTES: Final = 8 << 20
"""Neighbouring slots moved in one call; a larger slot is a call of its own."""
MAX_RUN_SLOTS: Final = MAX_IOV // 2


_NOTHING: Final = memoryview(b"")


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
    memory: DeviceRange | None = None
    """Where the shard is in GPU memory; both above are empty then."""

    @property
    def nbytes(self) -> int:
        """What it takes in the file."""
        return PAGE_BYTES + round_up(self.memory.nbytes if self.memory else self.payload.nbytes, PAGE_BYTES)


_Plain = Callable[[list[_Piece], list[Result]], None]
_Direct = Callable[[list[_Piece], list[Result]], tuple[list[_Piece], str]]


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
        self.direct: DirectPath | None = None
        """Moves payloads from and to GPU memory."""

    def write(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Write all slots; nothing is recorded yet."""
        return self._move(blocks, self._write_direct, self._write_run)

    def read(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Read all slots and verify them."""
        return self._move(blocks, self._read_direct, self._read_run)

    def _move(self, blocks: Sequence[BlockIo], direct: _Direct, plain: _Plain) -> list[Result]:
        results = [Result.OK] * len(blocks)
        pieces = self._pieces(blocks)
        directly = {p.slot for p in pieces if p.memory is not None and self._goes_directly(p.memory)}
        for run in self._runs([p for p in pieces if p.slot not in directly]):
            plain(run, results)
        for group in _of_files([p for p in pieces if p.slot in directly]):
            assert self.direct is not None
            why = self.direct.closed_by
            failed, why = (group, why) if why else direct(group, results)
            for run in self._runs(failed):
                plain(run, results)
            if any(results[p.block] is Result.OK for p in failed):
                self.direct.trip(why)
        return results

    def _goes_directly(self, memory: DeviceRange) -> bool:
        return self.direct is not None and self._cipher is None and self.direct.is_open(memory.device)

    def _pieces(self, blocks: Sequence[BlockIo]) -> list[_Piece]:
        pieces = []
        for i, block in enumerate(blocks):
            realm = self._realms[block.realm_id]
            sizes = realm.info.namespace.shard_bytes
            places: Sequence[Buffer | DeviceRange] = block.ranges or block.buffers
            assert len(block.slots) == len(places) == len(sizes), "a block has all shards of its realm"
            for shard, (slot, place, size) in enumerate(zip(block.slots, places, sizes, strict=True)):
                prefix = page_prefix(
                    key=block.key, fingerprint=realm.fingerprint, tenant=realm.tenant, generation=block.generation,
                    slot=slot, shard=shard, shards=len(sizes), size_bytes=size, encrypted=self._cipher is not None,
                )  # fmt: skip
                if isinstance(place, DeviceRange):
                    assert place.nbytes == size and place.address % PAGE_BYTES == 0, "memory of a shard starts on a page"
                    pieces.append(_Piece(slot, i, prefix, _NOTHING, _NOTHING, place))
                else:
                    pieces.append(_Piece(slot, i, prefix, *_whole_pages(place, size)))
        pieces.sort(key=lambda p: p.slot)
        return pieces

    def _runs(self, pieces: list[_Piece]) -> Iterator[list[_Piece]]:
        """Split sorted pieces into runs that lie one after the other in one file without gaps, in host memory or not."""
        run: list[_Piece] = []
        size = 0
        for piece in pieces:
            segment = self._table.get(slot_extent(piece.slot))
            slot_bytes = segment.slot_bytes if segment else 0
            here = piece.nbytes
            assert here <= slot_bytes or not segment, f"a shard of {here} bytes with its header in a slot of {slot_bytes} bytes"
            joins = bool(run) and piece.slot == run[-1].slot + 1 and run[-1].nbytes == slot_bytes
            joins = joins and (piece.memory is None) is (run[-1].memory is None)
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

    def _room(self, name: str, size_bytes: int) -> memoryview:
        """This thread's memory for the payloads of one run: "sealed", or from and to the "device"."""
        room = getattr(self._scratch, name, None)
        if room is None or room.nbytes < size_bytes:
            room = memoryview(mmap.mmap(-1, max(size_bytes, MAX_RUN_BYTES + MAX_RUN_SLOTS * PAGE_BYTES)))
            setattr(self._scratch, name, room)
        assert isinstance(room, memoryview)
        return room

    def _seal(self, run: list[_Piece], headers: list[memoryview], cipher: SlotCipher) -> list[memoryview]:
        """Encrypt payloads into memory of this thread, as those of blocks stay readable. Returns all buffers of the run."""
        takes = [round_up(piece.payload.nbytes + TAG_BYTES, PAGE_BYTES) for piece in run]
        room, at = self._room("sealed", sum(takes)), 0
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

    # Between the device and host memory

    def _in_host_memory(self, run: list[_Piece]) -> list[_Piece]:
        """The same pieces in memory of this thread, which holds anything so far."""
        room, at, pieces = self._room("device", sum(p.nbytes for p in run)), 0, []
        for piece in run:
            assert piece.memory is not None
            pages = room[at : at + piece.nbytes - PAGE_BYTES]
            at += pages.nbytes
            pages[piece.memory.nbytes :] = bytes(pages.nbytes - piece.memory.nbytes)  # what is there may be of another tenant
            pieces.append(_Piece(piece.slot, piece.block, piece.prefix, pages[: piece.memory.nbytes], pages))
        return pieces

    def _copied(self, run: list[_Piece], host: list[_Piece], results: list[Result], *, down: bool) -> bool:
        """Copy pieces that are well by DMA. Returns whether all could be."""
        copies: dict[Device, list[tuple[int, Buffer]]] = {}
        for piece, other in zip(run, host, strict=True):
            assert piece.memory is not None
            if down or results[piece.block] is Result.OK:
                copies.setdefault(piece.memory.device, []).append((piece.memory.address, other.payload))
        try:
            for device, some in copies.items():
                (device.copy_to_host if down else device.copy_from_host)(some)
        except CudaError as e:
            log.error("%d blocks cannot be moved between a GPU and nvme: %s", len(run), e)
            for piece in run:  # the disk is well, in either direction
                results[piece.block] = Result.CORRUPT if down else Result.NO_SPACE
            return False
        return True

    # One run

    def _write_run(self, run: list[_Piece], results: list[Result]) -> None:
        if run[0].memory is not None:
            host = self._in_host_memory(run)
            if self._copied(run, host, results, down=True):
                self._write_run(host, results)
            return
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
            self._not_written(run, results, folder, e)
            return
        assert folder is not None
        self._written(folder, 1, sum(b.nbytes for b in buffers))

    def _not_written(self, run: list[_Piece], results: list[Result], folder: Folder | None, error: OSError) -> None:
        for piece in run:
            results[piece.block] = Result.NO_SPACE if is_exhausted(error) else Result.IO_ERROR
        if folder is not None:
            self.note_write_error(folder, error)
        elif not is_exhausted(error):
            log.error("a segment cannot be made: %s", error)
        elif not self._told_full:
            self._told_full = True
            log.warning("no segment can be made at present, blocks stay in memory: %s", error)

    def _written(self, folder: Folder, calls: int, size_bytes: int) -> None:
        self._told_full = False
        folder.note_written()
        with self._counter_lock:
            self._counters.write_calls += calls
            self._counters.written_bytes += size_bytes

    def _write_direct(self, group: list[_Piece], results: list[Result]) -> tuple[list[_Piece], str]:
        """Write pieces of one file. Returns those that were not, through no fault of the disk, and why."""
        assert self.direct is not None
        folder: Folder | None = None
        header = self._header_pages()[:PAGE_BYTES]
        try:
            with self._table.using(slot_extent(group[0].slot), create=True) as segment:
                assert segment is not None
                folder = segment.folder
                for piece, digest in zip(group, self.direct.write(segment.path, _parts(segment, group)), strict=True):
                    header[:] = sealed_page(piece.prefix, digest)
                    write_all(self._engine, segment.handle, [header], slot_index(piece.slot) * segment.slot_bytes)
        except DirectError as e:
            return group, str(e)
        except OSError as e:
            self._not_written(group, results, folder, e)
            return [], ""
        assert folder is not None
        self._written(folder, 2 * len(group), sum(p.nbytes for p in group))
        return [], ""

    def note_write_error(self, folder: Folder, error: OSError) -> None:
        """Count an error of a write, unless it only says that there is no room."""
        if is_exhausted(error):
            log.warning("nvme folder %s takes no write at present: %s", folder.path, error)
            return
        folder.note_write_error(error)

    def _read_direct(self, group: list[_Piece], results: list[Result]) -> tuple[list[_Piece], str]:
        """Read pieces of one file and verify them. Returns those that are to be read again, and why."""
        assert self.direct is not None
        header, failed = self._header_pages()[:PAGE_BYTES], []
        try:
            with self._table.using(slot_extent(group[0].slot), create=False) as segment:
                if segment is None:
                    for piece in group:
                        results[piece.block] = Result.CORRUPT
                    return [], ""
                for piece, digest in zip(group, self.direct.read(segment.path, _parts(segment, group)), strict=True):
                    got = read_all(self._engine, segment.handle, [header], slot_index(piece.slot) * segment.slot_bytes)
                    if got != PAGE_BYTES or not page_has(header, piece.prefix, digest):
                        failed.append(piece)
        except (DirectError, OSError) as e:
            return group, str(e)
        with self._counter_lock:
            self._counters.read_calls += 2 * len(group)
            self._counters.read_bytes += sum(p.nbytes for p in group)
        return failed, "what was read is not what is in the file"

    def _read_run(self, run: list[_Piece], results: list[Result]) -> None:
        if run[0].memory is not None:
            host = self._in_host_memory(run)
            self._read_run(host, results)
            self._copied(run, host, results, down=False)
            return
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
            end += piece.nbytes
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


def _of_files(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Split sorted pieces by the file that they are in."""
    for _, group in itertools.groupby(pieces, lambda p: slot_extent(p.slot)):
        yield list(group)


def _parts(segment: Segment, group: list[_Piece]) -> list[tuple[DeviceRange, int]]:
    """Payloads in GPU memory, and where they are in the file."""
    return [(p.memory, slot_index(p.slot) * segment.slot_bytes + PAGE_BYTES) for p in group if p.memory is not None]


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
