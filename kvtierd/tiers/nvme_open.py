"""Start of the NVMe tier: claim folders, agree on one pool, choose the I/O path, fit the files to capacity and real space."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from kvtierd.config import NvmeConfig
from kvtierd.errors import StartupError
from kvtierd.tiers.base import RealmInfo
from kvtierd.tiers.folder import Folder, segment_name
from kvtierd.tiers.pool_file import PoolFile, load_pool, new_pool_id, save_pool

log = logging.getLogger(__name__)


def journal_limits(config: NvmeConfig) -> tuple[int, int, int]:
    """Divide the configured capacity, so that all files together stay below it.

    A slot takes at least two pages and a snapshot 72 bytes for each, so two snapshots (the former one and its successor)
    take at most 9/16 of 1/32 of the capacity; journals get the other 7/16. Snapshots are asked for long before that is full.

    Returns:
        Bytes for extents, journal bytes at which a snapshot is due, journal bytes at which writes are refused.
    """
    aside = min(config.capacity // 32, max(16 * config.snapshot_journal, 1 << 30))
    return config.capacity - aside, min(config.snapshot_journal, aside // 8), aside * 7 // 16


def open_folders(config: NvmeConfig, clock: Callable[[], float]) -> tuple[list[Folder], PoolFile, int]:
    """Claim all folders and prepare them.

    Returns:
        The folders, the pool, and how many bytes segments may take.

    Raises:
        StartupError: one cannot be used; then none stays locked.
    """
    folders: list[Folder] = []
    try:
        _check_distinct(config)
        for path in config.folders:
            folders.append(  # noqa: PERF401 - those claimed before a failure must be released
                Folder.claim(path, allow_volatile=config.allow_volatile, clock=clock)
            )
        for folder in folders:
            folder.clean_up()
            _choose_path(config, folder)
        pool = _agree_on_pool(folders)
        _drop_doubles(folders)
        _fit_capacity(folders, journal_limits(config)[0])
        return folders, pool, _usable_bytes(config, folders)
    except OSError as e:
        for folder in folders:
            folder.release()
        raise StartupError(f"nvme folder cannot be prepared: {e}; check the device and the folder's permissions") from e
    except StartupError:
        for folder in folders:
            folder.release()
        raise


def _check_distinct(config: NvmeConfig) -> None:
    real = [os.path.realpath(p) for p in config.folders]
    for path, resolved in zip(config.folders, real, strict=True):
        if real.count(resolved) > 1:
            raise StartupError(f"nvme folder {path} is named twice in nvme.folders: name each folder once")


def _choose_path(config: NvmeConfig, folder: Folder) -> None:
    if config.direct == "off":
        folder.direct = False
        return
    problem = folder.probe_direct()
    if not problem:
        return
    if config.direct == "require":
        raise StartupError(
            f"nvme folder {folder.path} does not take O_DIRECT ({problem}): use a folder on ext4 or XFS, "
            'or set nvme.direct = "auto"'
        )
    log.warning("nvme folder %s does not take O_DIRECT (%s): its I/O goes through the page cache", folder.path, problem)
    folder.direct = False


def _agree_on_pool(folders: Sequence[Folder]) -> PoolFile:
    """One pool id and all realms; written to folders that lack them."""
    found = [(folder, *load_pool(folder)) for folder in folders]
    ids = {pool.pool_id: folder.path for folder, pool, _ in found if pool is not None}
    if len(ids) > 1:
        raise StartupError(
            f"nvme folders {' and '.join(ids.values())} hold caches of different daemons: name only folders that were used "
            "together, or empty one of them"
        )
    realms: dict[int, RealmInfo] = {}
    disputed: set[int] = set()
    for _, pool, _ in found:
        for realm in pool.realms if pool else ():
            if realms.setdefault(realm.realm_id, realm) != realm:
                disputed.add(realm.realm_id)
    for realm_id in sorted(disputed):  # a disk that lost what it had called written, or a folder that was away
        log.error("nvme folders disagree about whose blocks those of realm %d are: they are dropped", realm_id)
        del realms[realm_id]
    # Of two with the same identity the earlier was forgotten, as it held nothing, and the later took its place.
    latest = {(r.tenant, r.namespace.fingerprint(), r.shared): r for _, r in sorted(realms.items())}
    merged = PoolFile(next(iter(ids), None) or new_pool_id(), list(latest.values()))
    for folder, pool, whole in found:
        if pool is None or not whole or pool.realms != merged.realms:
            save_pool(folder, merged)
    return merged


def _drop_doubles(folders: Sequence[Folder]) -> None:
    """Delete older segments that have another's extent id: they come from a folder that was away for a while.

    In one folder there is only one of each id; what somebody copied there is left alone.
    """
    for folder in folders:
        first: dict[int, tuple[int, str]] = {}
        for extent_id, slot_bytes, slot_count in folder.segments():
            name = segment_name(extent_id, slot_bytes, slot_count)
            candidate = (os.stat(folder.file(name)).st_mtime_ns, name)
            other = first.setdefault(extent_id, candidate)
            if other is not candidate:
                first[extent_id] = min(other, candidate)
                folder.ignore(max(other, candidate)[1], f"{min(other, candidate)[1]} is the same extent, and older")
    newest: dict[int, tuple[int, str]] = {}
    for folder in folders:
        for extent_id, slot_bytes, slot_count in folder.segments():
            path = folder.file(segment_name(extent_id, slot_bytes, slot_count))
            candidate = (os.stat(path).st_mtime_ns, path)
            other = newest.setdefault(extent_id, candidate)
            if other is candidate:
                continue
            newest[extent_id] = max(other, candidate)
            log.warning("%s is older than another segment of the same extent and is deleted", min(other, candidate)[1])
            os.unlink(min(other, candidate)[1])


def _fit_capacity(folders: Sequence[Folder], capacity_bytes: int) -> None:
    """Delete whole segments, oldest first, until the rest fits a capacity that was lowered.

    Files shorter than their name says (after a power cut, or somebody else's) are used while there is room, and cost no other.
    """
    found = [(e, b * c, segment_name(e, b, c), folder) for folder in folders for e, b, c in folder.segments()]
    whole: list[tuple[int, int, str]] = []
    short: list[tuple[int, int, str, Folder]] = []
    for extent_id, size, name, folder in found:
        if os.stat(folder.file(name)).st_size == size:
            whole.append((extent_id, size, folder.file(name)))
        else:
            short.append((extent_id, size, name, folder))
    total = sum(size for _, size, _ in whole)
    count = dropped = 0
    for _, size, path in sorted(whole):
        if total - dropped <= capacity_bytes:
            break
        os.unlink(path)
        dropped += size
        count += 1
    room = capacity_bytes - total + dropped
    for _, size, name, folder in sorted(short, key=lambda s: s[0]):
        if size > room:
            folder.ignore(name, "it is shorter than its name says, and there is no room for that")
        else:
            room -= size
    if count:
        log.warning(
            "segments take %d bytes, the capacity allows %d: the oldest %d segments (%d bytes) were deleted with their blocks",
            total, capacity_bytes, count, dropped,
        )  # fmt: skip


def _usable_bytes(config: NvmeConfig, folders: Sequence[Folder]) -> int:
    """Bytes that segments may take: all that is configured, unless others have filled the disk beside an existing cache.

    Raises:
        StartupError: a cache that has no segments yet does not fit into what is free above the reserve.
    """
    limit = journal_limits(config)[0]
    devices = {f.device: f for f in folders}
    own = sum(f.file_bytes() for f in folders)
    free = sum(max(f.free_bytes() - config.reserve, 0) for f in devices.values())
    if own + free >= config.capacity:
        return limit
    held = sum(b * c for f in folders for _, b, c in f.segments())
    if not held:
        raise StartupError(
            f"nvme.capacity is {config.capacity} bytes, but only {own + free} fit: {own} are in use by this cache and {free} are "
            f"free beside the reserve of {config.reserve} on each file system; lower nvme.capacity or nvme.reserve, or free "
            f"space (files named *.old-format-N in {', '.join(f.path for f in folders)} may be deleted)"
        )
    # What exists is allocated already and can be used again for other blocks; journals need their part of the rest.
    usable = min(max(own + free - (config.capacity - limit), held), limit)
    log.warning(
        "nvme.capacity is %d bytes, but others have filled the disk: this cache has %d and %d are free beside the reserve; it "
        "starts with %d bytes for blocks; free space and restart the daemon to have all",
        config.capacity, own, free, usable,
    )  # fmt: skip
    return usable
