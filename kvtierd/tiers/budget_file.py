"""What is left of the write budget, kept over a restart: ``budget.json`` in each NVMe folder.

A daemon that is killed forgets what it wrote in the last seconds. A file that cannot be read counts as none.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvtierd.tiers.folder import Folder
from kvtierd.tiers.json_file import checked, checksum, read_json

log = logging.getLogger(__name__)

NAME = "budget.json"


class SavedBudget(NamedTuple):
    """The budget at one moment."""

    left_bytes: float
    """Below 0 when written on credit."""
    at_wall_s: float
    """Seconds since 1970."""
    of_tenants: Mapping[str, float] = MappingProxyType({})
    """The same of tenants that have a share of it."""


def save_budget(folders: Sequence[Folder], saved: SavedBudget) -> None:
    """Replace the file in each folder. Blocking. A folder that cannot be written is passed over: the others have it."""
    body = {k: v for k, v in saved._asdict().items() if k != "of_tenants"} | _shares(saved)
    for folder in folders:
        path = folder.file(NAME)
        try:
            with open(path + ".tmp", "w", encoding="ascii") as f:
                json.dump(body | {"checksum": checksum(body)}, f)
            os.rename(path + ".tmp", path)
        except OSError as e:
            log.warning("the write budget cannot be kept in %s: %s", path, e)


def _shares(saved: SavedBudget) -> dict[str, dict[str, float]]:
    return {"of_tenants": dict(saved.of_tenants)} if saved.of_tenants else {}


def load_budget(folders: Sequence[Folder]) -> SavedBudget | None:
    """The latest that any folder has. Blocking."""
    found = [saved for folder in folders if (saved := _read(folder.file(NAME))) is not None]
    return max(found, key=lambda saved: saved.at_wall_s, default=None)


def _read(path: str) -> SavedBudget | None:
    try:
        content = read_json(path)
        if "checksum" in content:  # files written before it had one are taken as they are
            content = checked(content)
        of_tenants = {str(name): float(left) for name, left in content.get("of_tenants", {}).items()}
        saved = SavedBudget(float(content["left_bytes"]), float(content["at_wall_s"]), of_tenants)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        log.warning("%s is not used: %s", path, e)
        return None
    return saved if all(map(math.isfinite, (saved.left_bytes, saved.at_wall_s, *of_tenants.values()))) else None
