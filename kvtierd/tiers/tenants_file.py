"""What the admin API has set for tenants, kept over a restart: ``tenants.json`` in each NVMe folder.

A file has a version, a number that grows with each change, and a checksum of all that it says; the one with the highest number
counts. One that is damaged, or that another version has written, is renamed and left alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvtierd.errors import Reason, RequestError
from kvtierd.tiers.folder import Folder
from kvtierd.tiers.json_file import checked, checksum, read_json

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
    text = json.dumps(body | {"checksum": checksum(body)}, indent=1)
    problems = []
    for folder in folders:
        try:
            folder.replace(NAME, text.encode())
        except OSError as e:
            log.warning("the limits of tenants cannot be kept in %s: %s", folder.file(NAME), e)
            problems.append(e.strerror or str(e))
    if len(problems) == len(folders):
        raise RequestError(Reason.IO, f"nothing was changed: no nvme folder could keep it ({problems[-1]}); see the daemon's log")


def load_tenants(folders: Sequence[Folder]) -> SavedTenants | None:
    """What the latest file of any folder says; None when there is none. Blocking."""
    found = [saved for folder in folders if (saved := _read(folder)) is not None]
    return max(found, key=lambda saved: saved.sequence, default=None)


def _read(folder: Folder) -> SavedTenants | None:
    try:
        body = checked(read_json(folder.file(NAME)))
        if body["version"] != VERSION:
            _set_aside(folder, f"has version {body['version']!r}, this program knows {VERSION}", "old-format")
            return None
        tenants = {str(name): dict(settings) for name, settings in body["tenants"].items()}
        return SavedTenants(int(body["sequence"]), tenants)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        _set_aside(folder, f"is damaged ({e})", "damaged")
        return None


def _set_aside(folder: Folder, problem: str, suffix: str) -> None:
    try:
        folder.set_aside(NAME, f"{problem}, so the limits of tenants in it are not in force", suffix)
    except OSError as e:
        log.warning("%s cannot be renamed: %s", folder.file(NAME), e)
