"""The page docs/configuration.md, made from the configuration's own fields:
``python -m kvtierd.service.config_reference > docs/configuration.md``.
"""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Final

from kvtierd.config import Config, TenantConfig, field_paths
from kvtierd.service.config_text import held, kind_of, value_text

__all__ = ["PLACES", "reference"]

TENANT: Final = "tenants.NAME"
PLACES: Final = {
    "nvme.folders": "`kvtierd/nvme` in `$XDG_CACHE_HOME` or `~/.cache`",
    "server.socket": "`kvtierd/kvtierd.sock` in `$XDG_RUNTIME_DIR`, or `/tmp/kvtierd-UID/kvtierd.sock`",
}
"""Defaults that depend on who starts the daemon."""
KINDS: Final = {
    "size": "size",
    "duration": "duration",
    "ttl": 'duration or `"never"`',
    "mode": "permissions",
    "amount": 'size, share or `"none"`',
    "part": "share, or number from 0 to 1",
}
TYPES: Final = {bool: "`true` or `false`", str: "text", Path: "path"}
LISTS: Final = {Path: "list of paths", int: "list of names or numbers", str: "list of names or numbers"}
HEAD: Final = """# Configuration

`kvtierd serve --config FILE` reads one TOML file. A variable wins over the file and a flag over both: `cpu.capacity` is
`KVTIERD_CPU_CAPACITY`, or `--set cpu.capacity=2GiB`. In a variable or flag, a list is separated by colons. Unknown keys are errors
that name the nearest key. [deploy/kvtierd.toml](../deploy/kvtierd.toml) is a file with all of them; `kvtierd config` shows what is
in force here, `kvtierd config --running` what a running daemon was started with.

`kvtierd serve --check` says whether a file is fine: each key and value, and whether they go together, such as the reserves of all
tenants and the tiers that they are on. It exits with 0, or with 2 and what to do, as `kvtierd serve` does for the same file.
Whether this machine is fine too, with its folders, sockets, memory, GPUs and the files that are named, `kvtierd doctor` checks.

* **size**: bytes, as `4096`, `"64MiB"` or `"1.5GB"` (units of 1024 with an i, of 1000 without).
* **share**: of the tier, as `"20%"`.
* **duration**: seconds, as `2.5`, `"500ms"`, `"30s"`, `"10min"`, `"2h"` or `"7d"`.
* **permissions**: octal, `0o600` in a file and `0600` elsewhere.

A key changes when the daemon starts again; limits of tenants change while it runs, with `kvtierd tenants set`. This page is made
from the code: `make docs`.
"""


def reference() -> str:
    """The page as Markdown."""
    sections: dict[str, list[str]] = {}
    for path, info in field_paths():
        parent, _, name = path.rpartition(".")
        sections.setdefault(parent, []).append(_row(path, name, _holder(parent), info))
    parts = [HEAD]
    for parent, rows in sections.items():
        title = f"`[{parent}]`"
        text = (type(_holder(parent)).__doc__ or "").strip()
        parts.append(f"## {title}\n\n{text}\n\n| key | default | value | |\n| --- | --- | --- | --- |\n" + "".join(rows))
    return "\n".join(parts)


def _holder(parent: str) -> Any:
    return TenantConfig() if parent == TENANT else getattr(Config(), parent)


def _row(path: str, name: str, holder: Any, info: Any) -> str:
    text = None if path in PLACES else value_text(name, held(holder, name), info)
    default = PLACES.get(path) or ("not set" if text is None else f"`{text}`")
    return f"| `{name}` | {default} | {_possible(name, info)} | {_cell(info.description)} |\n"


def _possible(name: str, info: Any) -> str:
    """What may be written, in words."""
    if kind := kind_of(name, info):
        return KINDS[kind]
    limits: dict[str, Any] = {}
    for item in info.metadata:
        limits.update({key: value for key in ("ge", "gt", "le") if (value := getattr(item, key, None)) is not None})
    if typing.get_origin(info.annotation) is typing.Literal:
        return ", ".join(f'`"{choice}"`' for choice in typing.get_args(info.annotation))
    if typing.get_origin(info.annotation) is list:
        return LISTS[_item_type(info.annotation)]
    kind = _type(info.annotation)
    if kind in (int, float):
        least = f"above {limits['gt']}" if "gt" in limits else f"from {limits['ge']}"
        return f"{'whole ' * (kind is int)}number {least} to {limits['le']}"
    return TYPES[kind]


def _type(annotation: Any) -> Any:
    """The type of a value that is set: ``Path`` of ``Path | None``."""
    [kind] = set(typing.get_args(annotation)) - {types.NoneType} or {annotation}
    return kind


def _item_type(annotation: Any) -> Any:
    """The type of a list's entries."""
    [entry] = typing.get_args(annotation)
    return typing.get_args(entry)[0] if typing.get_origin(entry) is typing.Annotated else entry


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
