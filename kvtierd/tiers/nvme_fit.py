"""Fitting the files of the NVMe tier to the capacity and to the room that there is."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from kvtierd.config import NvmeConfig
from kvtierd.errors import StartupError
from kvtierd.tiers.folder import Folder, segment_name, work_on
from kvtierd.tiers.record import Records
from kvtierd.tiers.recovery import live_extents

log = logging.getLogger(__name__)


def journal_limits(config: NvmeConfig) -> tuple[int, int, int]:
    """Divide the configured capacity, so that all files together stay below it.

    A slot takes at least two pages and a snapshot 72 bytes for each, so two snapshots (the former one and its successor)
    take at most 9/16 of 1/32 of the capacity; journals get the other 7/16. Snapshots are asked for long before that is full.

    Returns:
        Bytes for extents, journal bytes at which a snapshot is due, journal bytes at which writes are refused.
    """
    aside = config.capacity - config.block_bytes
    return config.block_bytes, min(config.snapshot_journal, aside // 8), aside * 7 // 16


def drop_doubles(folders: Sequence[Folder]) -> None:
    """Delete older segments that have another's extent id: they come from a folder that was away for a while.

    In one folder there is only one of each id; what somebody copied there is left alone. Raises FolderFailedError.
    """
    for folder in folders:
        first: dict[int, tuple[int, str]] = {}
        with work_on(folder):
            for extent_id, slot_bytes, slot_count in folder.segments():
                name = segment_name(extent_id, slot_bytes, slot_count)
                candidate = (os.stat(folder.file(name)).st_mtime_ns, name)
                other = first.setdefault(extent_id, candidate)
                if other is not candidate:
                    first[extent_id] = min(other, candidate)
                    folder.ignore(max(other, candidate)[1], f"{min(other, candidate)[1]} is the same extent, and older")
    newest: dict[int, tuple[int, str, Folder]] = {}
    for folder in folders:
        with work_on(folder):
            here = [
                (extent_id, os.stat(path).st_mtime_ns, path)
                for extent_id, slot_bytes, slot_count in folder.segments()
                for path in [folder.file(segment_name(extent_id, slot_bytes, slot_count))]
            ]
        for extent_id, at_ns, path in here:
            mine = (at_ns, path, folder)
            other_one = newest.setdefault(extent_id, mine)
            if other_one is mine:
                continue
            older, newest[extent_id] = sorted([other_one, mine], key=lambda segment: segment[:2])
            log.warning("%s is older than another segment of the same extent and is deleted", older[1])
            with work_on(older[2]):
                os.unlink(older[1])


def fit_capacity(folders: Sequence[Folder], capacity_bytes: int, logs: Mapping[int, Sequence[Records]]) -> None:
    """Delete segments until the rest fits: a capacity was lowered, or a power cut brought back what had been deleted.

    A segment counts with the size that its name says, whatever is left of it. Those that hold no block by the journal go first,
    then those that have lost a part, then the oldest.

    Args:
        folders: where segments are.
        capacity_bytes: what all of them may take.
        logs: the records of each folder, by its identity.

    Raises:
        FolderFailedError: a device answers with an error.
    """
    found: list[tuple[int, bool, int, str, Folder]] = []
    for folder in folders:
        with work_on(folder):
            for extent_id, slot_bytes, slot_count in folder.segments():
                size, path = slot_bytes * slot_count, folder.file(segment_name(extent_id, slot_bytes, slot_count))
                found.append((extent_id, os.stat(path).st_size == size, size, path, folder))
    total = left = sum(size for _, _, size, _, _ in found)
    if total <= capacity_bytes:
        return
    live = {id(folder): live_extents(logs[id(folder)]) for folder in folders}
    count = costly = 0
    for extent_id, _, size, path, folder in sorted(found, key=lambda s: (s[0] in live[id(s[4])], s[1], s[0])):
        if left <= capacity_bytes:
            break
        with work_on(folder):
            os.unlink(path)
        left -= size
        count += 1
        costly += extent_id in live[id(folder)]
    log.warning(
        "segments take %d bytes, the capacity allows %d: %d segments (%d bytes) were deleted, %d of them with blocks",
        total, capacity_bytes, count, total - left, costly,
    )  # fmt: skip


def usable_bytes_of(config: NvmeConfig, folders: Sequence[Folder], lost: int) -> int:
    """Bytes that segments may take: all that is configured, unless others have filled the disk beside an existing cache, or
    folders are lost: then the others take what they hold, and their share of the capacity.

    Raises:
        FolderFailedError: a device answers with an error.
        StartupError: a cache that has no segments yet does not fit into what is free above the reserve.
    """
    limit = journal_limits(config)[0]
    aside = config.capacity - limit
    devices: dict[int, Folder] = {}
    own = held = free = 0
    for folder in folders:
        with work_on(folder):
            own += folder.file_bytes()
            held += sum(b * c for _, b, c in folder.segments())
            if devices.setdefault(folder.device, folder) is folder:
                free += max(folder.free_bytes() - config.reserve, 0)
    if lost:
        limit = max(limit * len(folders) // (len(folders) + lost), min(held, limit))
    if own + free >= limit + aside:
        return limit
    # What exists is allocated already and can be used again for other blocks; journals need their part of the rest.
    usable = min(max(own + free - aside, held), limit)
    if not held and not (lost and usable >= config.segment_bytes):
        raise StartupError(
            f"nvme.capacity is {config.capacity} bytes, but only {own + free} fit: {own} are in use by this cache and {free} are "
            f"free beside the reserve of {config.reserve} on each file system; lower nvme.capacity or nvme.reserve, or free "
            f"space (files named *.old-format-N in {', '.join(f.path for f in folders)} may be deleted)"
        )
    log.warning(
        "nvme.capacity is %d bytes, but others have filled the disk: this cache has %d and %d are free beside the reserve; it "
        "starts with %d bytes for blocks; free space and restart the daemon to have all",
        config.capacity, own, free, usable,
    )  # fmt: skip
    return usable
