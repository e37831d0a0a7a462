"""Whose blocks a folder of the NVMe tier holds: ``pool.json`` (pool id and realms) and ``realms.log`` (realms that came since).

A new realm costs one line in the log, however many there are; every now and then ``pool.json`` is written anew and the log goes.
A line that a crash or a full disk cut off is passed over: its realm has no blocks yet.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtierd.errors import RequestError
from kvtierd.model import FORMAT_VERSION, Namespace
from kvtierd.plain_file import read_plain
from kvtierd.tiers.base import RealmInfo
from kvtierd.tiers.folder import Folder
from kvtierd.tiers.json_file import checked, checksum, parse_object, read_json, seal
from kvtierd.tiers.membership import Membership, first_membership, membership_from
from kvtierd.tiers.record import MAX_REALM_ID, POOL_ID_BYTES

log = logging.getLogger(__name__)

POOL_NAME: Final = "pool.json"
LOG_NAME: Final = "realms.log"


@dataclass(slots=True)
class PoolFile:
    """A pool's id, its realms and its folders."""

    pool_id: bytes
    realms: list[RealmInfo] = field(default_factory=list)
    membership: Membership = field(default_factory=lambda: Membership(""))
    key_check: str = ""
    """Tells with which key blocks are encrypted; "" when they are not."""

    def __post_init__(self) -> None:
        if not self.membership.tag:
            self.membership = first_membership(self.pool_id)


def new_pool_id() -> bytes:
    """A fresh random pool id."""
    return os.urandom(POOL_ID_BYTES)


def load_pool(folder: Folder) -> tuple[PoolFile | None, bool]:
    """Read what a folder says; None when there is nothing or it is damaged (then it is set aside). Raises OSError.

    Returns:
        The pool, and whether it is in ``pool.json`` whole.
    """
    try:
        content = read_json(folder.file(POOL_NAME))
        version, pool = content.get("format_version"), _pool_from(content)
    except FileNotFoundError:
        return None, False
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        for name in (POOL_NAME, LOG_NAME):
            if os.path.lexists(folder.file(name)):
                folder.set_aside(name, f"is damaged ({e})" if name == POOL_NAME else f"belongs to the {POOL_NAME} that was damaged")
        return None, False
    if version != FORMAT_VERSION:
        log.error("%s: its version is damaged, its contents are not; it is written anew", folder.file(POOL_NAME))
    added = _read_log(folder, pool.pool_id)
    pool.realms += added
    return pool, not added and version == FORMAT_VERSION


def peek_membership(path: Path) -> Membership | None:
    """What a folder that is not claimed says of its pool's folders; None when it says nothing that can be read."""
    try:
        body = read_json(os.path.join(path, POOL_NAME))["pool"]
        return membership_from(body["folders"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save_pool(folder: Folder, pool: PoolFile) -> None:
    """Replace both files by one ``pool.json``, atomically. Raises OSError."""
    body = {"pool_id": pool.pool_id.hex(), "realms": [realm_to(r) for r in pool.realms], "folders": pool.membership.to_json()}
    if pool.key_check:
        body["key_check"] = pool.key_check
    content = {"format_version": FORMAT_VERSION, "pool": body, "checksum": checksum(body)}
    content["seal"] = seal(content)
    folder.replace(POOL_NAME, json.dumps(content).encode())
    # A crash before this leaves realms that are in pool.json too, or that nobody needs any more.
    if os.path.isfile(folder.file(LOG_NAME)):
        os.unlink(folder.file(LOG_NAME))


def append_realm(folder: Folder, pool_id: bytes, realm: RealmInfo) -> None:
    """Add a realm to the log, durably. Raises OSError."""
    body = {"pool_id": pool_id.hex(), "realm": realm_to(realm)}
    # It begins with the end of a line, as the one before may have been cut off.
    line = "\n" + json.dumps(body | {"checksum": checksum(body)}) + "\n"
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
    try:
        lines = read_plain(path).split(b"\n")
    except FileNotFoundError:
        return []
    except ValueError as e:
        folder.set_aside(LOG_NAME, f"is damaged ({e})")
        return []
    realms = []
    for line in filter(None, lines):
        try:
            body = checked(parse_object(line))
            realm = realm_from(body["realm"]) if body["pool_id"] == pool_id.hex() else None
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            log.warning("a line of %s is damaged (%s) and passed over: the blocks of that namespace are dropped", path, e)
            continue
        if realm is not None:
            realms.append(realm)
    return realms


def _pool_from(content: Mapping[str, Any]) -> PoolFile:
    """What ``pool.json`` says. Raises ValueError, KeyError, TypeError or AttributeError when it is damaged."""
    body = content["pool"]
    if content["checksum"] != checksum(body):
        raise ValueError("its checksum is wrong")
    pool_id = bytes.fromhex(body["pool_id"])
    if len(pool_id) != POOL_ID_BYTES:
        raise ValueError(f"a pool id of {len(pool_id)} bytes")
    # Files of before folders were noted have none: they are all the same.
    membership = membership_from(body["folders"]) if "folders" in body else first_membership(pool_id)
    realms = [realm for item in body["realms"] if (realm := realm_from(item)) is not None]
    return PoolFile(pool_id, realms, membership, str(body.get("key_check", "")))


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
    """A realm from JSON; None, said in the log, when it is none of this program's. Raises what odd JSON leads to."""
    fields, realm_id, tenant = item["namespace"], item["realm_id"], item["tenant"]
    namespace = Namespace(**(fields | {"shard_bytes": tuple(fields["shard_bytes"])}))
    if namespace.fingerprint().hex() != item["fingerprint"]:
        log.error("realm %s no longer has the fingerprint it was saved with; its blocks are dropped", realm_id)
        return None
    try:
        namespace.validate()
    except RequestError as e:
        log.error("realm %s is none that this program serves, its blocks are dropped: %s", realm_id, e)
        return None
    if not (isinstance(realm_id, int) and 0 < realm_id <= MAX_REALM_ID and isinstance(tenant, str)):
        raise ValueError(f"a realm {str(realm_id)[:20]} of tenant {str(tenant)[:20]!r}")
    return RealmInfo(realm_id, tenant, namespace, bool(item.get("shared", False)))
