"""Configuration as text: what is in force, and a reference of every key. Both are made from the fields themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvtierd.config import Config, Duration, OptionalDuration, Size, TenantConfig, field_paths
from kvtierd.tenant_config import Amount, OwnTtl, WriteShare
from kvtierd.units import Share, size_text

__all__ = ["config_json", "config_toml", "held", "kind_of", "reference_toml", "value_text"]

_ALIASES = (
    ("size", Size),
    ("amount", Amount),
    ("part", WriteShare),
    ("duration", Duration),
    ("ttl", OptionalDuration),
    ("ttl", OwnTtl),
)
_DURATION_STEPS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def config_toml(config: Config) -> str:
    """The configuration as TOML that :func:`kvtierd.config.load_config` reads back to the same values.

    Keys that are not set are left out. The configuration holds paths of secrets, never secrets.
    """
    lines: list[str] = []
    for name in Config.model_fields:
        section = getattr(config, name)
        if name == "tenants":
            for tenant, limits in section.items():
                lines += ["", f"[tenants.{_string(tenant)}]", *_items(limits)]
        else:
            lines += ["", f"[{name}]", *_items(section)]
    return "\n".join(lines[1:]) + "\n"


def config_json(config: Config) -> dict[str, Any]:
    """The configuration as JSON values: sizes in bytes, durations in seconds."""
    values: dict[str, Any] = config.model_dump(mode="json", by_alias=True)
    return values


def reference_toml() -> str:
    """Every key with its description, default and variable, as a TOML file in which every key is commented out."""
    default = Config()
    lines = ["# kvtierd configuration: every key with its default. A file, KVTIERD_* variables and flags count in rising order."]
    section = ""
    for path, info in field_paths():
        parent, _, name = path.rpartition(".")
        if parent != section:
            section = parent
            lines += ["", *_section_head(parent)]
        holder: Any = TenantConfig() if parent == "tenants.NAME" else getattr(default, parent)
        variable = "" if parent == "tenants.NAME" else f" [KVTIERD_{path.replace('.', '_').upper()}]"
        lines.append(f"# {info.description}{variable}")
        value = value_text(name, held(holder, name), info)
        lines.append(f"#{name} = {value}" if value is not None else f"#{name} =   # not set")
    return "\n".join(lines) + "\n"


def _section_head(parent: str) -> list[str]:
    model = TenantConfig if parent == "tenants.NAME" else Config.model_fields[parent].annotation
    text = (getattr(model, "__doc__", "") or "").strip().splitlines()
    # A tenant's table must stay a comment: a file with a tenant called NAME is not what anybody wants.
    head = f"#[{parent}]" if parent == "tenants.NAME" else f"[{parent}]"
    return [f"# {text[0]}" if text else "#", head]


def _items(section: BaseModel) -> Iterator[str]:
    for name, info in type(section).model_fields.items():
        value = value_text(name, getattr(section, name), info)
        if value is not None:
            yield f"{info.alias or name} = {value}"


def held(holder: BaseModel, key: str) -> object:
    """The value of a key, which is a field's alias where a field cannot have its name."""
    return getattr(holder, next((name for name, info in type(holder).model_fields.items() if info.alias == key), key))


def value_text(name: str, value: object, info: Any) -> str | None:
    """TOML text of a field's value; None when TOML cannot say it because it is not set."""
    kind = kind_of(name, info)
    if value is None:
        # A tier without a TTL says so; a tenant without its own takes the tier's, which leaving it out says.
        return '"never"' if name == "ttl" else None
    if isinstance(value, Share):
        return _string(str(value))
    if kind in ("size", "amount") and isinstance(value, int):
        return _size(value)
    if kind in ("duration", "ttl") and value != "never":
        return _duration(value)
    if kind == "mode":
        return f"0o{value:o}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_string(str(v)) for v in value) + "]"
    assert isinstance(value, str | Path), f"configuration key {name} holds a {type(value).__name__}"
    return _string(str(value))


def kind_of(name: str, info: Any) -> str:
    """``size``, ``amount``, ``part``, ``duration``, ``ttl`` or ``mode``; empty for a field that is read as it is."""
    # pydantic unpacks Annotated: what is left of a size or a duration is the function that reads it.
    readers = {getattr(m, "func", None) for m in info.metadata}
    for kind, alias in _ALIASES:
        if readers & {getattr(m, "func", None) for m in getattr(alias, "__metadata__", ())} - {None}:
            return kind
    return "mode" if name == "socket_mode" else ""


def _size(value: int) -> str:
    text = size_text(value)
    return text if text.isdigit() else f'"{text}"'


def _duration(value: object) -> str:
    assert isinstance(value, int | float), f"{value!r} is no duration"
    for step, unit in _DURATION_STEPS:
        if value and value % step == 0:
            return f'"{value / step:.0f}{unit}"'
    return repr(float(value))


def _string(text: str) -> str:
    # TOML's basic strings are JSON's, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
