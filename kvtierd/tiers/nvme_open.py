"""Start of the NVMe tier: claim folders, agree on one pool, choose the I/O path, read journals; go on without what is lost."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtierd.config import NvmeConfig
from kvtierd.errors import StartupError
from kvtierd.tiers.base import RealmInfo
from kvtierd.tiers.encryption import SlotCipher, check_value, cipher_of, read_key
from kvtierd.tiers.folder import Folder, FolderFailedError, FolderLostError, check_mounted, is_exhausted, work_on
from kvtierd.tiers.io_engine import IoEngine
from kvtierd.tiers.journal import Journal
from kvtierd.tiers.membership import first_membership, latest
from kvtierd.tiers.nvme_fit import drop_doubles, fit_capacity, journal_limits, usable_bytes_of
from kvtierd.tiers.pool_file import PoolFile, load_pool, new_pool_id, peek_membership, save_pool
from kvtierd.tiers.record import FileHeader, Records

log = logging.getLogger(__name__)

ATTEMPTS: Final = 2
"""Errors of its device after which a folder is lost."""
AWAY: Final = "was away while others of its cache were in use, so its blocks may be out of date"
OTHER_KEY: Final = "has blocks that were encrypted with another key than the one that nvme.encryption_key_* gives"
NO_KEY: Final = "has blocks that are encrypted, and no nvme.encryption_key_* is set"
PLAIN: Final = "has blocks that are not encrypted, and nvme.encryption_key_* is set"


@dataclass(slots=True)
class Opened:
    """What a start has found, ready for use."""

    folders: list[Folder]
    pool: PoolFile
    usable_bytes: int
    """Bytes that segments may take."""
    journals: dict[int, Journal]
    """Of each folder, by its identity; loaded."""
    logs: dict[int, tuple[list[Records], FileHeader]]
    """What they hold."""
    lost: dict[str, str]
    """Folders that cannot be used, and why."""
    cipher: SlotCipher | None
    """Encrypts what is written; None for nothing."""


def open_folders(config: NvmeConfig, engine: IoEngine, floors: Callable[[], tuple[int, int]], clock: Callable[[], float]) -> Opened:
    """Claim all folders and prepare them. One that belongs to the pool and is lost is left out, where there are others.

    Args:
        config: the tier's configuration.
        engine: opens journals.
        floors: for journals.
        clock: seconds, monotonic.

    Raises:
        StartupError: the tier cannot be used; then no folder stays locked.
    """
    _check_distinct(config)
    opening = _Opening(config, engine, floors, clock)
    try:
        opening.claim()
        while (opened := opening.attempt()) is None:
            pass
    except StartupError:
        opening.release()
        raise
    for why in opened.lost.values():
        log.error(
            "a folder is lost: %s. The tier goes on with %d of %d folders and %d bytes for blocks; what the lost folder holds is "
            "deleted when it is there again",
            why, len(opened.folders), len(config.folders), opened.usable_bytes,
        )  # fmt: skip
    return opened


class _Opening:
    """One start: claims folders, and prepares them all, over again without those that fail."""

    def __init__(
        self, config: NvmeConfig, engine: IoEngine, floors: Callable[[], tuple[int, int]], clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._engine = engine
        self._floors = floors
        self._clock = clock
        self._folders: list[Folder] = []
        self._journals: dict[int, Journal] = {}
        self._key = read_key(config)
        self._lost: dict[str, FolderLostError] = {}
        """By the path that is configured."""
        self._failures: Counter[str] = Counter()

    def claim(self) -> None:
        """Lock all folders that are there. Raises StartupError when none is, or one is not fit for use."""
        config = self._config
        peeked = [peek_membership(path) for path in config.folders] if len(config.folders) > 1 else [None]
        known = [membership for membership in peeked if membership is not None]
        for path, membership in zip(config.folders, peeked, strict=True):
            try:
                if known and membership is None:
                    check_mounted(path, latest(known).mount_of(os.path.realpath(path)))
                self._folders.append(Folder.claim(path, allow_volatile=config.allow_volatile, clock=self._clock))
            except FolderLostError as e:
                self._lost[str(path)] = e
        if not self._folders:
            raise next(iter(self._lost.values()))

    def release(self) -> None:
        """Unlock everything."""
        self._close_journals()
        for folder in self._folders:
            folder.release()

    def attempt(self) -> Opened | None:
        """Prepare the folders that are left; None when one of them failed, for another attempt. Raises StartupError."""
        try:
            return self._prepare()
        except FolderFailedError as e:
            self._close_journals()
            self._failed(e.folder, e.error)
            return None

    def _failed(self, folder: Folder, error: OSError) -> None:
        """An error may be a passing one; with the second the folder is lost. Raises StartupError when it was the last."""
        why = f"nvme folder {folder.path} cannot be prepared: {error}; check the device and the folder's permissions"
        if is_exhausted(error):  # the folder is well, and so is what it holds
            raise StartupError(why) from error
        self._failures[folder.path] += 1
        if self._failures[folder.path] < ATTEMPTS:
            log.warning("nvme folder %s: %s; trying once more", folder.path, error)
            return
        if len(self._folders) == 1:
            raise StartupError(why) from error
        self._folders.remove(folder)
        folder.release()
        self._lost[folder.path] = FolderLostError(why)

    def _close_journals(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()

    def _prepare(self) -> Opened:
        """Raises FolderFailedError, and StartupError for what is no device's fault."""
        config, folders = self._config, self._folders
        for folder in folders:
            with work_on(folder):
                folder.clean_up()
                _choose_path(config, folder)
        plan = self._agree_on_pool()
        logs = {}
        for folder in folders:
            if id(folder) not in plan.stale:
                logs[id(folder)] = self._load_journal(folder, plan.pool)
        # All that may be read has been: only now is it written down who goes on.
        for folder in folders:
            with work_on(folder):
                if id(folder) in plan.stale:
                    _empty(folder, plan.stale[id(folder)])
                if id(folder) in plan.outdated:
                    save_pool(folder, plan.pool)
            if id(folder) in plan.stale:
                logs[id(folder)] = self._load_journal(folder, plan.pool)
        self._settle(plan.pool)
        drop_doubles(folders)
        fit_capacity(folders, journal_limits(config)[0], {folder_id: records for folder_id, (records, _) in logs.items()})
        usable_bytes = usable_bytes_of(config, folders, lost=len(self._lost))
        lost = {path: str(error) for path, error in self._lost.items()}
        cipher = cipher_of(self._key, plan.pool.pool_id) if self._key is not None else None
        return Opened(folders, plan.pool, usable_bytes, self._journals, logs, lost, cipher)

    def _settle(self, pool: PoolFile) -> None:
        """A new tag is in all folders: the former one counts no more."""
        if pool.membership.before:
            pool.membership = pool.membership.settled()
            for folder in self._folders:
                with work_on(folder):
                    save_pool(folder, pool)

    def _load_journal(self, folder: Folder, pool: PoolFile) -> tuple[list[Records], FileHeader]:
        with work_on(folder):
            journal = self._journals[id(folder)] = Journal(folder, self._engine, pool.pool_id, self._floors)
            return journal.load()

    def _agree_on_pool(self) -> _Plan:
        """One pool id and all realms of the folders that were there all along. Changes nothing."""
        found = []
        for folder in self._folders:
            with work_on(folder):
                found.append((folder, *load_pool(folder)))
        ids = {pool.pool_id: folder.path for folder, pool, _ in found if pool is not None}
        if len(ids) > 1:
            raise StartupError(
                f"nvme folders {' and '.join(ids.values())} hold caches of different daemons: name only folders that were used "
                "together, or empty one of them"
            )
        pool_id = next(iter(ids), None) or new_pool_id()
        known = [pool.membership for _, pool, _ in found if pool is not None]
        former = latest(known) if known else first_membership(pool_id)
        for path, error in self._lost.items():
            if not former.knows(os.path.realpath(path)):
                raise error
        # A folder that has lost its pool.json says nothing of itself; the others know whether it was there.
        away = {
            id(folder)
            for folder, pool, _ in found
            if not (pool.membership.was_there(former) if pool else former.may_have(os.path.realpath(folder.path)))
        }
        pools = [pool for folder, pool, _ in found if pool is not None and id(folder) not in away]
        present = {os.path.realpath(folder.path): folder.mount for folder in self._folders}
        strangers = {os.path.realpath(folder.path) for folder, pool, _ in found if pool is None or id(folder) in away}
        lost = [os.path.realpath(path) for path in self._lost]
        membership = former.after(present, lost, strangers, [pool.membership for pool in pools])
        key_check = check_value(self._key, pool_id) if self._key is not None else ""
        stale = dict.fromkeys(away, AWAY)
        for folder, pool, _ in found:
            written_with = pool.key_check if pool else pools[0].key_check if pools else ""
            if written_with != key_check:
                stale[id(folder)] = OTHER_KEY if written_with and key_check else NO_KEY if written_with else PLAIN
        merged = PoolFile(pool_id, _merged_realms(pools), membership, key_check)
        outdated = {id(folder) for folder, pool, whole in found if pool is None or not whole or _differ(pool, merged)}
        return _Plan(merged, stale, outdated)


def _differ(pool: PoolFile, other: PoolFile) -> bool:
    return (pool.realms, pool.membership, pool.key_check) != (other.realms, other.membership, other.key_check)


@dataclass(slots=True)
class _Plan:
    """What folders are to have in common."""

    pool: PoolFile
    stale: dict[int, str]
    """What is to be said of folders, by identity, whose blocks are deleted."""
    outdated: set[int]
    """Of those whose ``pool.json`` is to be written."""


def _merged_realms(pools: Sequence[PoolFile]) -> list[RealmInfo]:
    """Realms of all folders, without those that they disagree about."""
    realms: dict[int, RealmInfo] = {}
    disputed: set[int] = set()
    for pool in pools:
        for realm in pool.realms:
            if realms.setdefault(realm.realm_id, realm) != realm:
                disputed.add(realm.realm_id)
    for realm_id in sorted(disputed):  # a disk that lost what it had called written
        log.error("nvme folders disagree about whose blocks those of realm %d are: they are dropped", realm_id)
        del realms[realm_id]
    # Of two with the same identity the earlier was forgotten, as it held nothing, and the later took its place.
    latest_of = {(r.tenant, r.namespace.fingerprint(), r.shared): r for _, r in sorted(realms.items())}
    return list(latest_of.values())


def _empty(folder: Folder, why: str) -> None:
    size_bytes = folder.empty()
    if size_bytes:
        log.error("nvme folder %s %s: what it held (%d bytes) was deleted", folder.path, why, size_bytes)


def _check_distinct(config: NvmeConfig) -> None:
    same = [_identity(path) for path in config.folders]
    for path, identity in zip(config.folders, same, strict=True):
        if same.count(identity) > 1:
            raise StartupError(f"nvme folder {path} is twice in nvme.folders, by one name or two: name each folder once")


def _identity(path: Path) -> object:
    """The same for two names of one folder, whether by links or by mounts."""
    real = os.path.realpath(path)
    try:
        info = os.stat(real)
    except OSError:
        return real
    return info.st_dev, info.st_ino


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
