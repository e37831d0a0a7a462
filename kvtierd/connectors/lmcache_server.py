"""Arguments of ``lmcache server`` and sizes: what of them decides on the daemon's configuration."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from kvtierd.connectors.lmcache_keys import SERVER, Effect
from kvtierd.errors import ConfigError
from kvtierd.units import shown

__all__ = ["Capacities", "LmcacheConfigError", "ServerArguments", "Warn", "boolean", "number", "read_arguments", "size_bytes"]

Warn = Callable[[str, str], None]
"""Takes how the user wrote the key, and what to do."""
MAX_GIB: Final = 1 << 30
GIB: Final = 1 << 30
FOLDER: Final = "kvtierd"
"""Folder that is made inside LMCache's, so that nothing of the two mixes."""


class LmcacheConfigError(ConfigError, ValueError):
    """LMCache's configuration cannot be read. The text names the key and what is allowed."""


@dataclass
class Capacities:
    """Sizes of the tiers; None where LMCache's configuration does not say.

    Attributes:
        cpu_bytes: of memory.
        nvme_bytes: of all folders together; 0 for no disk.
        folders: for blocks, in LMCache's folders.
        prefault: whether memory is taken at the start.
    """

    cpu_bytes: int | None = None
    nvme_bytes: int | None = None
    folders: list[str] = field(default_factory=list)
    prefault: bool | None = None

    def add_disk(self, folders: Sequence[str], size_bytes: int | None) -> None:
        """More folders; a size of None is not known and leaves the sum as it is."""
        self.folders += [f"{folder.rstrip('/')}/{FOLDER}" for folder in folders]
        if size_bytes is not None:
            self.nvme_bytes = (self.nvme_bytes or 0) + size_bytes

    def replaced_by(self, other: Capacities) -> Capacities:
        """These, with what ``other`` says in their place."""
        says_disk = bool(other.folders) or other.nvme_bytes is not None
        return Capacities(
            self.cpu_bytes if other.cpu_bytes is None else other.cpu_bytes,
            other.nvme_bytes if says_disk else self.nvme_bytes,
            other.folders if says_disk else self.folders,
            self.prefault if other.prefault is None else other.prefault,
        )

    def tables(self) -> dict[str, object]:
        """The tables ``cpu`` and ``nvme`` of the daemon's configuration."""
        cpu: dict[str, object] = {}
        nvme: dict[str, object] = {}
        if self.cpu_bytes is not None:
            cpu["capacity"] = _size(self.cpu_bytes)
        if self.prefault is not None:
            cpu["prefault"] = self.prefault
        if self.nvme_bytes is not None:
            nvme["capacity"] = _size(self.nvme_bytes)
        if self.folders:
            nvme["folders"] = list(dict.fromkeys(self.folders))
        return {name: table for name, table in (("cpu", cpu), ("nvme", nvme)) if table}


@dataclass
class ServerArguments:
    """What the arguments of ``lmcache server`` say."""

    capacities: Capacities = field(default_factory=Capacities)
    chunk_tokens: int = 0
    metrics: str = ""
    """``host:port`` of its HTTP server; empty when it is not named."""


def _size(size_bytes: int) -> int | str:
    for unit, text in ((GIB, "GiB"), (1 << 20, "MiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{text}"
    return size_bytes


def number(label: str, value: object, least: float, most: float, *, whole: bool = False) -> float:
    """A number between limits. Raises LmcacheConfigError."""
    try:
        found = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    if not least <= found <= most or (whole and not found.is_integer()):
        kind = "whole number" if whole else "number"
        raise LmcacheConfigError(f"{label} is a {kind} from {least:g} to {most:g}; got {shown(value)}")
    return found


def size_bytes(label: str, value: object) -> int:
    """Bytes of one of LMCache's sizes, which are GiB although it writes GB. Raises LmcacheConfigError."""
    return int(number(f"{label} (GB)", value, 0, MAX_GIB) * GIB)


def boolean(label: str, value: object) -> bool:
    """A truth value, also as text. Raises LmcacheConfigError."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, int | str) else ""
    if text in ("true", "1", "yes", "y", "on"):
        return True
    if text in ("false", "0", "no", "n", "off"):
        return False
    raise LmcacheConfigError(f"{label} is true or false; got {shown(value)}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LmcacheConfigError(f"arguments of LMCache's server: {message}")


def _parser() -> _Parser:
    parser = _Parser(prog="lmcache server", add_help=False)
    forms: dict[str, dict[str, Any]] = {
        "value": {},
        "append": {"action": "append"},
        "list": {"nargs": "*"},
        "flag": {"action": "store_true"},
        "switch": {"action": argparse.BooleanOptionalAction},
    }
    for row in SERVER:
        for name in row.names:
            parser.add_argument(name, dest=name, default=None, **forms[row.form])
    return parser


def read_arguments(arguments: Sequence[str], warn: Warn) -> ServerArguments:
    """Read arguments of ``lmcache server`` (also abbreviated, as it takes them).

    Raises:
        LmcacheConfigError: a value is missing or cannot be used.
    """
    if not arguments:
        return ServerArguments()
    found, unknown = _parser().parse_known_args(list(arguments))
    given = {name: value for name, value in vars(found).items() if value is not None}
    for name in (text.partition("=")[0] for text in unknown if text.startswith("-")):
        warn(name, "the server of LMCache 0.5.6 has no such argument")
    for row in SERVER:
        for name in row.names:
            value = given.get(name)
            if row.effect is Effect.MISSING and value and str(value).lower() not in row.quiet:
                warn(name, f"no counterpart; {row.text}")
    read = ServerArguments()
    if "--chunk-size" in given:
        read.chunk_tokens = int(number("--chunk-size", given["--chunk-size"], 1, 1 << 20, whole=True))
    if "--l1-use-lazy" in given:
        read.capacities.prefault = not given["--l1-use-lazy"]
    if "--http-host" in given or "--http-port" in given:
        host = str(given.get("--http-host", "127.0.0.1"))
        port = int(number("--http-port", given.get("--http-port", "8080"), 1, 65535, whole=True))
        read.metrics = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _first_level(given, read.capacities, warn)
    for text in given.get("--l2-adapter", ()):
        _second_level(_object("--l2-adapter", text), read.capacities, warn)
    if read.capacities.cpu_bytes and not read.capacities.folders:
        read.capacities.nvme_bytes = 0  # a server without a second level uses no disk
    return read


def _first_level(given: Mapping[str, Any], capacities: Capacities, warn: Warn) -> None:
    size = size_bytes("--l1-size-gb", given["--l1-size-gb"]) if "--l1-size-gb" in given else None
    if given.get("--gds-l1-path"):
        capacities.add_disk([given["--gds-l1-path"]], size)
    elif size is not None:
        capacities.cpu_bytes = size
    for text in given.get("--l1-manager", ()):
        pool = _object("--l1-manager", text)
        kind = str(pool.get("type", "")).upper()
        if kind == "DRAM":
            capacities.cpu_bytes = (capacities.cpu_bytes or 0) + size_bytes("--l1-manager size_gb", pool.get("size_gb"))
        elif kind == "GDS":
            size = size_bytes("--l1-manager size_gb", pool.get("size_gb"))
            capacities.add_disk([_path("--l1-manager path", pool.get("path"))], size)
        else:
            warn("--l1-manager", f"no counterpart for type {shown(pool.get('type'))}; raise cpu.capacity instead")
    if capacities.cpu_bytes == 0:
        capacities.cpu_bytes = None
        warn("--l1-size-gb", "blocks always pass through CPU memory, so kvtierd needs some: set cpu.capacity")


def _second_level(adapter: Mapping[str, Any], capacities: Capacities, warn: Warn) -> None:
    kind = adapter.get("type")
    if kind not in ("fs", "fs_native"):
        where = "kvtierd keeps blocks in memory and on disks of its own host: give the disks in nvme.folders"
        warn("--l2-adapter", f"no counterpart for type {shown(kind)}; {where}")
        return
    label = f"--l2-adapter {kind}"
    size = size_bytes(f"{label} max_capacity_gb", adapter.get("max_capacity_gb") or 0)
    capacities.add_disk([_path(f"{label} base_path", adapter.get("base_path"))], size or None)
    if not size:
        warn(label, "has no limit of its own; set nvme.capacity, which kvtierd never exceeds")
    if adapter.get("serde"):
        warn(f"{label} serde", "no counterpart; kvtierd keeps the engine's bytes as they are")


def _object(label: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:  # the text itself is not shown: it may hold passwords
        raise LmcacheConfigError(f"{label} is a JSON object (in single quotes inside a longer text), and this is none: {e}") from e
    if not isinstance(value, dict):
        raise LmcacheConfigError(f"{label} is a JSON object; got a {type(value).__name__}")
    return value


def _path(label: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise LmcacheConfigError(f"{label} is the path of a folder; got {shown(value)}")
    return value
