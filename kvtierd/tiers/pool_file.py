"""Whose blocks a folder of the NVMe tier holds: ``pool.json`` (pool id and realms) and ``realms.log`` (realms that came since).

A new realm costs one line in the log, however many there are; every now and then ``pool.json`` is written anew and the log goes.
A line that a crash or a full disk cut off is passed over: its realm has no blocks yet.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass, field
from typing import Any, Final

import xxhash

from kvtierd.model import FORMAT_VERSION, Namespace
from kvtierd.tiers.base import RealmInfo
from kvtierd.tiers.folder import Folder
from kvtierd.tiers.record import POOL_ID_BYTES

log = logging.getLogger(__name__)

POOL_NAME: Final = "pool.json"
LOG_NAME: Final = "realms.log"


@dataclass(slots=True)
class PoolFile:
    """A pool's id and its realms."""

    pool_id: bytes
    realms: list[RealmInfo] = field(default_factory=list)


def new_pool_id() -> bytes:
    """A fresh random pool id."""
    return os.urandom(POOL_ID_BYTES)


def load_pool(folder: Folder) -> tuple[PoolFile | None, bool]:
    """Read what a folder says; None when there is nothing or it is damaged (then it is set aside). Raises OSError.

    Returns:
        The pool, and whether it is in ``pool.json`` whole.
    """
    path = folder.file(POOL_NAME)
    if not os.path.lexists(path):
        return None, False
    try:
        if not os.path.isfile(path):
            raise ValueError("not a file")
        with open(path, "rb") as f:
            content = json.loads(f.read())
        body = content["pool"]
        if content["checksum"] != _checksum(body):
            raise ValueError("checksum")
        realms = [realm_from(item) for item in body["realms"]]
        pool = PoolFile(bytes.fromhex(body["pool_id"]), [r for r in realms if r is not None])
    except (ValueError, KeyError, TypeError):
        for name in (POOL_NAME, LOG_NAME):
            if os.path.lexists(folder.file(name)):
                folder.set_aside(name)
        return None, False
    added = _read_log(folder, pool.pool_id)
    pool.realms += added
    return pool, not added


def save_pool(folder: Folder, pool: PoolFile) -> None:
    """Replace both files by one ``pool.json``, atomically. Raises OSError."""
    body = {"pool_id": pool.pool_id.hex(), "realms": [realm_to(r) for r in pool.realms]}
    content = {"format_version": FORMAT_VERSION, "pool": body, "checksum": _checksum(body)}
    final = folder.file(POOL_NAME)
    with open(final + ".tmp", "wb") as f:
        f.write(json.dumps(content).encode())
        f.flush()
        os.fsync(f.fileno())
    os.rename(final + ".tmp", final)
    folder.sync()
    # A crash before this leaves realms that are in pool.json too, or that nobody needs any more.
    if os.path.isfile(folder.file(LOG_NAME)):
        os.unlink(folder.file(LOG_NAME))


def append_realm(folder: Folder, pool_id: bytes, realm: RealmInfo) -> None:
    """Add a realm to the log, durably. Raises OSError."""
    body = {"pool_id": pool_id.hex(), "realm": realm_to(realm)}
    # It begins with the end of a line, as the one before may have been cut off.
    line = "\n" + json.dumps(body | {"checksum": _checksum(body)}) + "\n"
    path = folder.file(LOG_NAME)
    new = not os.path.lexists(path)
    with open(path, "ab") as f:
        f.write(line.encode())
        f.flush()
        os.fsync(f.fileno())
    if new:
        folder.sync()


def _read_log(folder: Folder, pool_id: bytes) -> list[RealmInfo]:
    path = folder.file(LOG_NAME)
    if not os.path.isfile(path):
        return []
    with open(path, "rb") as f:
        lines = f.read().split(b"\n")
    realms = []
    for line in filter(None, lines):
        try:
            body = json.loads(line)
            checksum = body.pop("checksum")
            if checksum != _checksum(body):
                raise ValueError("checksum")
            realm = realm_from(body["realm"]) if body["pool_id"] == pool_id.hex() else None
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            log.warning("a line of %s is damaged (%s) and passed over: the blocks of that namespace are dropped", path, e)
            continue
        if realm is not None:
            realms.append(realm)
    return realms


def _checksum(body: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


def realm_to(realm: RealmInfo) -> dict[str, Any]:
    """A realm as JSON."""
    namespace = dataclasses.asdict(realm.namespace)
    return {
        "realm_id": realm.realm_id,
        "tenant": realm.tenant,
        "fingerprint": realm.namespace.fingerprint().hex(),
        "namespace": namespace,
        "shared": realm.shared,
    }


def realm_from(item: dict[str, Any]) -> RealmInfo | None:
    """A realm from JSON; None, said in the log, when this program computes another fingerprint. Raises what odd JSON leads to."""
    fields = item["namespace"]
    namespace = Namespace(**(fields | {"shard_bytes": tuple(fields["shard_bytes"])}))
    if namespace.fingerprint().hex() != item["fingerprint"]:
        log.error("realm %s no longer has the fingerprint it was saved with; its blocks are dropped", item["realm_id"])
        return None
    return RealmInfo(int(item["realm_id"]), item["tenant"], namespace, bool(item.get("shared", False)))
