"""What the admin API has set for tenants, kept over a restart: ``tenants.json`` in each NVMe folder.

A file has a version, a number that grows with each change, and a checksum; the one with the highest number counts. One that is
damaged, or that a later version has written, is renamed and left alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import xxhash

from kvtierd.errors import Reason, RequestError
from kvtierd.tiers.folder import Folder

log = logging.getLogger(__name__)

NAME: Final = "tenants.json"
VERSION: Final = 1


class SavedTenants(NamedTuple):
    """Settings by tenant and key, as JSON values, and how often they were changed."""

    sequence: int
    tenants: Mapping[str, Mapping[str, Any]]


def save_tenants(folders: Sequence[Folder], saved: SavedTenants) -> None:
    """Replace the file in each folder, durably. Blocking. A folder that cannot be written is passed over.

    Raises:
        RequestError: IO when none could be written.
    """
    body = {"version": VERSION, "sequence": saved.sequence, "tenants": {n: dict(s) for n, s in saved.tenants.items()}}
    text = json.dumps(body | {"checksum": _checksum(body)}, indent=1)
    problems = []
    for folder in folders:
        path = folder.file(NAME)
        try:
            with open(path + ".tmp", "w", encoding="ascii") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.rename(path + ".tmp", path)
            folder.sync()
        except OSError as e:
            log.warning("the limits of tenants cannot be kept in %s: %s", path, e)
            problems.append(e.strerror or str(e))
    if len(problems) == len(folders):
        raise RequestError(Reason.IO, f"nothing was changed: no nvme folder could keep it ({problems[-1]}); see the daemon's log")


def load_tenants(folders: Sequence[Folder]) -> SavedTenants | None:
    """What the latest file of any folder says; None when there is none. Blocking."""
    found = [saved for folder in folders if (saved := _read(folder)) is not None]
    return max(found, key=lambda saved: saved.sequence, default=None)


def _read(folder: Folder) -> SavedTenants | None:
    try:
        with open(folder.file(NAME), encoding="ascii") as f:
            content = json.load(f)
        body = {key: content[key] for key in ("version", "sequence", "tenants")}
        if content["checksum"] != _checksum(body):
            raise ValueError("its checksum is wrong")
        if body["version"] != VERSION:
            raise ValueError(f"its version is {body['version']!r}, and this program knows {VERSION}")
        tenants = {str(name): dict(settings) for name, settings in body["tenants"].items()}
        return SavedTenants(int(body["sequence"]), tenants)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        log.warning("limits of tenants in %s are not used: %s", folder.file(NAME), e)
    try:
        folder.set_aside(NAME)
    except OSError as e:
        log.warning("%s cannot be renamed: %s", folder.file(NAME), e)
    return None


def _checksum(body: object) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
