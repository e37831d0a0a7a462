"""The NVMe tier's store: blocks in preallocated segment files, their existence in journals.

A write puts [header page, payload] into each slot and then a record a shard into the journal of the slot's folder; only then
is the block there. Slots that follow each other in a file are moved in one vectored call. A read takes header and payload
in one call and verifies everything. Nothing here decides what is stored where; see the core for that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import aiofiles

from kvtierd.config import NvmeConfig
from kvtierd.cuda import Device
from kvtierd.errors import Reason, RequestError
from kvtierd.model import MAX_REALMS, PAGE_BYTES, SLOT_INDEX_BITS, slot_extent
from kvtierd.tiers.base import BlockIo, RealmInfo, Recovered, RecoveredExtent, Result
from kvtierd.tiers.budget_file import SavedBudget, load_budget, save_budget
from kvtierd.tiers.direct_path import DirectPath
from kvtierd.tiers.direct_probe import ProbeResult, probe
from kvtierd.tiers.folder import Folder, is_exhausted
from kvtierd.tiers.io_engine import IoEngine, choose_engine
from kvtierd.tiers.nvme_fit import journal_limits
from kvtierd.tiers.nvme_open import open_folders
from kvtierd.tiers.pool_file import append_realm, save_pool
from kvtierd.tiers.record import Entry, pack_block, pack_removal
from kvtierd.tiers.recovery import LiveBlocks
from kvtierd.tiers.segments import SegmentTable
from kvtierd.tiers.slot_io import IoCounters, SlotMover, StoredRealm
from kvtierd.tiers.tenants_file import SavedTenants, load_tenants, save_tenants

log = logging.getLogger(__name__)
T = TypeVar("T")

SPARE_REALMS: Final = 64
"""So many forgotten realms stay in the files in any case, so that few realms are not written anew all the time."""


class NvmeStore:
    """Blocks on NVMe; see :class:`kvtierd.tiers.base.BlockStore`. Thread-safe. Made by :meth:`open`."""

    def __init__(self, config: NvmeConfig, engine: IoEngine, clock: Callable[[], float]) -> None:
        self._max_generation = 0
        self._max_extent_id = 0
        opened = open_folders(config, engine, self._floors, clock)
        self._engine = engine
        self._folders = folders = opened.folders
        self.lost = opened.lost
        """Folders that could not be used at the start, and why."""
        self._pool = opened.pool
        self._journals = opened.journals
        self._logs = opened.logs
        self._realms: dict[int, StoredRealm] = {}
        self._realm_lock = threading.Lock()
        self._recovered = False
        self._snapshot_lock = asyncio.Lock()
        _, self._snapshot_at_bytes, self._journal_limit_bytes = journal_limits(config)
        self.capacity_bytes = opened.usable_bytes
        """Bytes that extents may take: the configured capacity less what journals and snapshots may need, or what there is."""
        self.counters = IoCounters()
        self.path = "o_direct" if all(f.direct for f in folders) else "buffered"
        """"o_direct" or "buffered"."""
        self.engine_name = engine.name
        self._table = SegmentTable(engine, folders, self.capacity_bytes, config.reserve)
        self._mover = SlotMover(engine, self._table, self._realms, self.counters, opened.cipher)
        self.encrypted = opened.cipher is not None
        """Whether payloads are encrypted at rest."""

    @classmethod
    def open(cls, config: NvmeConfig, *, engine: IoEngine | None = None, clock: Callable[[], float] = time.monotonic) -> NvmeStore:
        """Claim and check the folders. Blocking. Call :meth:`recover` next.

        Args:
            config: the tier's configuration.
            engine: moves bytes; None takes the one that the configuration asks for.
            clock: seconds, monotonic.

        Raises:
            StartupError: a folder cannot be used, is held by another daemon or has not enough space; says what to do.
        """
        return cls(config, engine or choose_engine(config), clock)

    def _floors(self) -> tuple[int, int]:
        return self._max_generation, self._max_extent_id

    # Start

    def recover(self) -> Recovered:
        """What journals and snapshots tell; once, before anything else. Blocking. Raises OSError when a folder cannot be read."""
        assert not self._recovered, "recover() is called once"
        extents: dict[int, RecoveredExtent] = {}
        records = []
        # A realm that was lost may have records left, which must not pass for those of another one.
        realm_ids = [r.realm_id for r in self._pool.realms]
        for folder in self._folders:
            own = folder.segments()
            for extent_id, slot_bytes, slot_count in own:
                self._table.adopt(folder, extent_id, slot_bytes, slot_count)
                extents[extent_id] = RecoveredExtent(extent_id, slot_bytes, slot_count)
            found, header = self._logs.pop(id(folder))
            records += [(r, frozenset(extent_id for extent_id, _, _ in own)) for r in found]
            maxima = [(r["generation"].max(), r["slot"].max() >> SLOT_INDEX_BITS) for r in found if len(r)]
            realm_ids += [int(r["realm"].max()) for r in found if len(r)]
            self._max_generation = max([self._max_generation, header.max_generation, *(int(g) for g, _ in maxima)])
            self._max_extent_id = max([self._max_extent_id, header.max_extent_id, *extents, *(int(e) for _, e in maxima)])
        blocks = LiveBlocks(records, extents, {r.realm_id: r for r in self._pool.realms})
        if len(self._pool.realms) > MAX_REALMS:
            used = blocks.realm_ids
            self._pool.realms = [r for r in self._pool.realms if r.realm_id in used]
        for realm in self._pool.realms:
            self._realms[realm.realm_id] = StoredRealm(realm)
        self.forget([BlockIo(*entry[:4], ()) for entry in blocks.older])
        self._recovered = True
        return Recovered(
            list(self._pool.realms),
            list(extents.values()),
            iter(blocks),
            self._max_generation + 1,
            self._max_extent_id + 1,
            max(realm_ids, default=0) + 1,
        )

    def holds_forgotten(self, in_use: int) -> bool:
        """True when most of the recorded realms are none of those that count, of which there are so many."""
        return len(self._realms) > 2 * in_use + SPARE_REALMS

    def register_realm(self, realm: RealmInfo, in_use: Collection[int] | None = None) -> None:
        """Persist a realm in every folder before its first block. Rare; blocking; no work when it is known already.

        Args:
            realm: the new one.
            in_use: ids of realms that still count; the others hold nothing and are forgotten, for which the files are written
                anew (see :meth:`holds_forgotten`). None keeps all and adds a line.

        Raises:
            RequestError: IO when no folder could keep it.
        """
        with self._realm_lock:
            known = self._realms.get(realm.realm_id)
            if known is not None:
                assert known.info == realm, f"realm {realm.realm_id} is registered with other contents"
                return
            pool = self._pool
            if in_use is not None:
                pool = replace(pool, realms=[*(r for r in pool.realms if r.realm_id in in_use), realm])
                self._save_realm(lambda folder: save_pool(folder, pool))
                for realm_id in self._realms.keys() - {r.realm_id for r in pool.realms}:
                    del self._realms[realm_id]
                self._pool = pool
            else:
                self._save_realm(lambda folder: append_realm(folder, pool.pool_id, realm))
                pool.realms.append(realm)
            self._realms[realm.realm_id] = StoredRealm(realm)

    def _save_realm(self, save: Callable[[Folder], None]) -> None:
        saved, problem = 0, ""
        for folder in self._folders:
            try:
                save(folder)
                saved += 1
            except OSError as e:
                problem = e.strerror or str(e)
                folder.note_write_error(e)
        if not saved:
            raise RequestError(Reason.IO, f"no nvme folder could keep the new realm: {problem}")

    def add_extent(self, extent_id: int, slot_bytes: int, slot_count: int) -> None:
        """Note a new extent. Non-blocking; its file is made at its first write.

        Args:
            extent_id: never used before.
            slot_bytes: of one slot, header page included; whole pages, at least two.
            slot_count: at least 1.
        """
        assert slot_bytes >= 2 * PAGE_BYTES, "a slot holds its header page and at least one page"
        assert slot_bytes % PAGE_BYTES == 0, "a slot is whole pages"
        assert slot_count >= 1, "an extent has slots"
        self._table.add(extent_id, slot_bytes, slot_count)
        self._max_extent_id = max(self._max_extent_id, extent_id)

    def probe_direct(self, direct: DirectPath, device: Device) -> list[ProbeResult]:
        """Try out whether blocks can go directly between a GPU and each folder that is well. Blocking. Raises DirectError."""
        return probe(direct, self._engine, [(f.file("probe.tmp"), f.direct) for f in self._folders if not f.failing], device)

    def use_direct(self, direct: DirectPath) -> None:
        """Move blocks in GPU memory that way from now on, where it is open."""
        self._table.on_closing = direct.close_file
        self._mover.direct = direct

    def has_extent(self, extent_id: int) -> bool:
        """True for an extent that was recovered or added and not dropped."""
        return self._table.get(extent_id) is not None

    def drop_extent(self, extent_id: int) -> None:
        """Forget an extent and its blocks. Non-blocking; the file is deleted in a thread, and before any new file is made."""
        self._table.drop(extent_id)

    # Blocks

    def write(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Write blocks and record them; see :class:`kvtierd.tiers.base.BlockStore`."""
        assert self._recovered, "recover() comes first"
        if sum(j.size_bytes for j in self._journals.values()) > self._journal_limit_bytes:
            log.warning("journals take more than %d bytes: no block is written until a snapshot is", self._journal_limit_bytes)
            return [Result.NO_SPACE] * len(blocks)
        # A crash in the middle of overwriting must not find the slot's former block in the journal.
        self._flush_quietly()
        results = self._mover.write(blocks)
        self._record(blocks, results)
        return results

    def read(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Read and verify blocks; see :class:`kvtierd.tiers.base.BlockStore`."""
        assert self._recovered, "recover() comes first"
        return self._mover.read(blocks)

    def forget(self, blocks: Sequence[BlockIo]) -> None:
        """Record that blocks are gone: in memory until the next :meth:`write` or :meth:`flush`."""
        self._defer(blocks, pack_removal)

    def renew(self, blocks: Sequence[BlockIo]) -> None:
        """Record that stored blocks expire later than was recorded (buffers unused): in memory, as :meth:`forget`."""
        self._defer(blocks, pack_block)

    def _defer(self, blocks: Sequence[BlockIo], pack: Callable[[Entry], list[bytes]]) -> None:
        batches: dict[int, list[bytes]] = {}
        for block in blocks:
            for slot, record in zip(block.slots, pack(_entry(block)), strict=True):
                segment = self._table.get(slot_extent(slot))
                if segment is not None and segment.folder is not None:
                    batches.setdefault(id(segment.folder), []).append(record)
        for folder_id, batch in batches.items():
            self._journals[folder_id].defer(b"".join(batch))

    def flush(self) -> None:
        """Write removals and later expiries that wait in memory. Blocking. Raises OSError when a journal could not be written; the
        others were."""
        problem = self._flush_quietly()
        if problem is not None:
            raise problem

    def _flush_quietly(self) -> OSError | None:
        problem = None
        for folder in self._folders:
            try:
                self._journals[id(folder)].flush()
            except OSError as e:
                self._mover.note_write_error(folder, e)
                problem = e
        return problem

    def _record(self, blocks: Sequence[BlockIo], results: list[Result]) -> None:
        """Append the records of blocks that were written; a block whose records cannot be is not stored."""
        batches: dict[int, tuple[list[bytes], set[int]]] = {}
        for i, (block, result) in enumerate(zip(blocks, results, strict=True)):
            if result is not Result.OK:
                continue
            self._max_generation = max(self._max_generation, block.generation)
            for slot, record in zip(block.slots, pack_block(_entry(block)), strict=True):
                segment = self._table.get(slot_extent(slot))
                if segment is None:  # dropped meanwhile: the block is gone with it
                    continue
                assert segment.folder is not None
                records, members = batches.setdefault(id(segment.folder), ([], set()))
                records.append(record)
                members.add(i)
        for folder in self._folders:
            records, members = batches.get(id(folder), ([], set()))
            if not records:
                continue
            data = b"".join(records)
            try:
                self._journals[id(folder)].append(data)
            except OSError as e:
                self._mover.note_write_error(folder, e)
                for i in members:
                    results[i] = Result.NO_SPACE if is_exhausted(e) else Result.IO_ERROR

    # Snapshots

    def needs_snapshot(self) -> bool:
        """True when journals have grown enough for :meth:`checkpoint`; those of a folder that fails cannot be helped."""
        journals = (self._journals[id(f)] for f in self._folders if not f.failing)
        return sum(j.fresh_bytes for j in journals) > self._snapshot_at_bytes

    def begin_snapshot(self) -> dict[str, str]:
        """Begin a new journal in each folder that takes one. Blocking. Returns the snapshot file to fill, by folder.

        Raises:
            OSError: no folder takes one.
        """
        return self._of_each(self._folders, lambda folder: self._journals[id(folder)].begin_snapshot())

    def _of_each(self, folders: Sequence[Folder], work: Callable[[Folder], T]) -> dict[str, T]:
        """What work comes to, by folder, without those that it fails on: what one has lost is no reason to stop for the others.

        Raises:
            OSError: it fails on all.
        """
        done: dict[str, T] = {}
        problem: OSError | None = None
        for folder in folders:
            try:
                done[folder.path] = work(folder)
            except OSError as e:
                problem = e
                self._mover.note_write_error(folder, e)
        if problem is not None and not done:
            raise problem
        return done

    def pack_entries(self, entries: Sequence[Entry]) -> dict[str, bytes]:
        """Records for a snapshot, by folder; shards whose extent is gone are left out."""
        packed: dict[str, list[bytes]] = {}
        for entry in entries:
            for slot, record in zip(entry[3], pack_block(entry), strict=True):
                segment = self._table.get(slot_extent(slot))
                if segment is not None and segment.folder is not None:
                    packed.setdefault(segment.folder.path, []).append(record)
        return {path: b"".join(records) for path, records in packed.items()}

    def commit_snapshot(self, files: dict[str, str]) -> None:
        """Make filled snapshots count and delete what they replace. Blocking. Raises OSError when none could be."""
        filled = [folder for folder in self._folders if folder.path in files]
        self._of_each(filled, lambda folder: self._journals[id(folder)].commit_snapshot(files[folder.path]))

    def abort_snapshot(self) -> None:
        """Delete snapshots that were begun and not committed; none is no error. Blocking."""
        for folder in self._folders:
            try:
                self._journals[id(folder)].abort_snapshot()
            except OSError as e:  # the next start deletes it
                self._mover.note_write_error(folder, e)

    async def _fill_snapshots(self, files: dict[str, str], packed: dict[str, bytes]) -> None:
        """Append records to snapshots that were begun, and leave out of ``files`` those that cannot be written.

        Raises:
            OSError: none is left.
        """
        for folder in self._folders:
            if folder.path not in files or folder.path not in packed:
                continue
            try:
                async with aiofiles.open(files[folder.path], "ab") as f:
                    await f.write(packed[folder.path])
            except OSError as e:
                self._mover.note_write_error(folder, e)
                del files[folder.path]
                if not files:
                    raise

    async def checkpoint(self, chunks: AsyncIterator[list[Entry]]) -> int:
        """Write a snapshot while writes go on, so that journals can be deleted. One at a time; another call waits.

        The chunks name, in any order, each block that is stored (and not being written) when its chunk is made; they are
        asked for after a new journal was begun, which is what makes a listing over many turns of the event loop right (see
        :mod:`kvtierd.tiers.journal`).

        Args:
            chunks: lists of (realm id, key, generation, slots, expiry in seconds since 1970 or NO_END), about 5,000 each.

        Returns:
            How many blocks the snapshot names.

        Raises:
            OSError: no folder can be written. Where one cannot be, its former snapshot and all its journals stay: nothing is lost.
        """
        async with self._snapshot_lock:
            count = 0
            try:
                files = await _to_the_end(self.begin_snapshot)
                async for chunk in chunks:
                    count += len(chunk)
                    packed = await asyncio.to_thread(self.pack_entries, chunk)
                    await self._fill_snapshots(files, packed)
                await _to_the_end(lambda: self.commit_snapshot(files))
            finally:
                await _to_the_end(self.abort_snapshot)
            return count

    # State

    def save_budget(self, saved: SavedBudget) -> None:
        """Keep what is left of the write budget. Blocking."""
        save_budget(self._folders, saved)

    def save_tenants(self, saved: SavedTenants) -> None:
        """Keep what was set for tenants. Blocking. Raises RequestError IO when no folder can be written."""
        save_tenants(self._folders, saved)

    def load_tenants(self) -> SavedTenants | None:
        """What was set for tenants before. Blocking."""
        return load_tenants(self._folders)

    def load_budget(self) -> SavedBudget | None:
        """What was left of the write budget when it was kept last. Blocking."""
        return load_budget(self._folders)

    def used_file_bytes(self) -> int:
        """Bytes on disk of all files of the tier. Blocking, but quick."""
        return sum(f.file_bytes() for f in self._folders)

    def health(self) -> dict[str, str]:
        """ "ok" or what is wrong, by folder, those that are lost too."""
        return {f.path: f.health for f in self._folders} | {path: f"lost: {why}" for path, why in self.lost.items()}

    def folder_errors(self) -> dict[str, int]:
        """I/O errors since the start, reads and writes, by folder that is in use."""
        return {f.path: f.error_count for f in self._folders}

    def close(self) -> None:
        """Write removals, close files and release the folders. No other call may be running."""
        self._flush_quietly()
        self._table.close()
        for folder in self._folders:
            self._journals[id(folder)].close()
            folder.release()


def _entry(block: BlockIo) -> Entry:
    return block.realm_id, block.key, block.generation, block.slots, block.expires_s


async def _to_the_end(work: Callable[[], T]) -> T:
    """Run work in a thread; a cancellation is passed on only when the work is done, so that nothing runs behind our back."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # nobody is left to hear how it ended, and it is no news to asyncio
        raise
