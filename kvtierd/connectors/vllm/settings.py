"""What ``kv_connector_extra_config`` says, checked. Keys of LMCache are read too (see ``kvtierd.connectors.lmcache``)."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from kvtierd.client.address import ADDRESS_VARIABLE, socket_path
from kvtierd.connectors import lmcache
from kvtierd.tenant_config import name_problem

PREFIX: Final = "kvtierd."
ROLES: Final = ("both", "save", "load")
KV_ROLES: Final = {"kv_producer": "save", "kv_consumer": "load"}
"""vLLM's ``kv_role`` to the role that follows from it; any other stands for "both"."""


@dataclass(frozen=True)
class Settings:
    """Settings of the connector; each is the key ``kvtierd.<name>``. Times in milliseconds.

    Attributes:
        address: of the daemon, ``unix:PATH``; empty means ``$KVTIERD_ADDRESS`` or the default socket.
        token_file: file that holds the bearer token of a daemon that asks for one; empty means ``$KVTIERD_TOKEN_FILE``.
        tenant: who is billed when a request names nobody; empty means "default".
        chunk_tokens: tokens in one block of kvtierd; 0 picks the smallest multiple of the engine's blocks that makes a shard
            of 4 MiB, at most 256 tokens and the model's smallest attention window.
        lookup_timeout_ms: longest that a request waits for a lookup and for blocks on NVMe.
        load_timeout_ms: longest that a load into the engine's KV cache may take before it counts as failed.
        save_timeout_ms: longest that blocks are held for the daemon's answer to a save.
        save_decode: save blocks of generated tokens too.
        min_hit_tokens: hits of fewer tokens are recomputed; 0 means one chunk.
        gate: recompute a hit where that is measured to be faster than loading it.
        prefetch: begin to read from NVMe when a request arrives, while it waits in the engine's queue.
        max_loads: requests that may look up or load at the same time; others wait for their turn, no longer than for a lookup.
        max_held_fraction: share of the engine's KV blocks that saves may keep from being reused.
        salt_tenants: ``cache_salt`` of a request to the tenant it belongs to.
        revision: revision of the weights, when the model's name and revision do not say it.
        role: "both", "save" (never load) or "load" (never save).
        request_params: requests may ask for something in their ``kv_transfer_params``; else what they say there is ignored.
    """

    address: str = ""
    token_file: str = ""
    tenant: str = ""
    chunk_tokens: int = 0
    lookup_timeout_ms: float = 2000.0
    load_timeout_ms: float = 30_000.0
    save_timeout_ms: float = 2000.0
    save_decode: bool = False
    min_hit_tokens: int = 0
    gate: bool = True
    prefetch: bool = True
    max_loads: int = 32
    max_held_fraction: float = 0.25
    salt_tenants: Mapping[str, str] = field(default_factory=dict)
    revision: str = ""
    role: str = "both"
    request_params: bool = True

    @property
    def saves(self) -> bool:
        """Whether blocks are saved."""
        return self.role != "load"

    @property
    def loads(self) -> bool:
        """Whether blocks are loaded."""
        return self.role != "save"


_LIMITS: Final[dict[str, tuple[float, float]]] = {
    "chunk_tokens": (0, 1 << 20),
    "lookup_timeout_ms": (1, 3_600_000),
    "load_timeout_ms": (10, 3_600_000),
    "save_timeout_ms": (1, 3_600_000),
    "min_hit_tokens": (0, 1 << 30),
    "max_loads": (1, 4096),
    "max_held_fraction": (0.01, 0.9),
}


def read_settings(
    extra_config: Mapping[str, Any], environ: Mapping[str, str] | None = None, kv_role: str | None = None
) -> tuple[Settings, list[str]]:
    """Settings and warnings, from ``kv_connector_extra_config`` and LMCache's own sources below it.

    Args:
        extra_config: ``kv_connector_extra_config`` of vLLM.
        environ: variables; None for the process's own.
        kv_role: vLLM's, which decides on the role where nothing else does.

    Raises:
        ValueError: a ``kvtierd.`` key is unknown or its value cannot be used; the text names it and what is allowed.
    """
    if not isinstance(extra_config, Mapping) or not all(isinstance(key, str) for key in extra_config):
        raise ValueError(f"kv_connector_extra_config maps names of settings to values; got {extra_config!r}")
    environ = os.environ if environ is None else environ
    translation = lmcache.translate(extra_config, environ)
    values: dict[str, Any] = {"role": KV_ROLES[kv_role]} if kv_role in KV_ROLES else {}
    values |= {k.removeprefix(PREFIX): v for k, v in translation.settings.items()}
    values |= {k.removeprefix(PREFIX): v for k, v in extra_config.items() if k.startswith(PREFIX)}
    known = {f.name: f for f in fields(Settings)}
    for name in values:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {PREFIX}{close[0]}?" if close else f"; known: {', '.join(PREFIX + n for n in known)}"
            raise ValueError(f"{PREFIX}{name} in kv_connector_extra_config is not known{hint}")
    checked = {name: _checked(name, str(known[name].type), value) for name, value in values.items()}
    _check_address("kvtierd.address", checked.get("address", "") or environ.get(ADDRESS_VARIABLE, ""))
    return Settings(**checked), [*translation.warnings, *_sizes_warning(translation.daemon)]


def _sizes_warning(daemon: Mapping[str, Any]) -> list[str]:
    """A line where LMCache's configuration asks for something that only the daemon could give, and not only LMCache's defaults."""
    keys = [
        f"{section}.{key}"
        for section, table in daemon.items()
        for key, value in table.items()
        if lmcache.DEFAULT_DAEMON.get(section, {}).get(key) != value
    ]
    if not keys:
        return []
    text = "are the daemon's, and an engine does not give them to it: start it with what `kvtierd lmcache-config` writes"
    return [f"LMCache's configuration sets what here is {', '.join(keys)}: these {text}"]


def _checked(name: str, kind: str, value: Any) -> Any:
    key = PREFIX + name
    if kind == "bool":
        if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
            return value.lower() in ("true", "1")
        if not isinstance(value, bool):
            raise ValueError(f"{key} is true or false; got {value!r}")
        return value
    if kind in ("int", "float"):
        return _number(key, kind, value, *_LIMITS[name])
    if kind == "str":
        if not isinstance(value, str):
            raise ValueError(f"{key} is a text; got {value!r}")
        if name == "role" and value not in ROLES:
            raise ValueError(f"{key} is one of {', '.join(ROLES)}; got {value!r}")
        if name == "tenant":
            _check_tenant(key, value)
        if not value.isascii() and value != value.encode(errors="replace").decode():
            raise ValueError(f"{key} is no valid Unicode: {value!r}")
        return value
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError(f"{key} maps texts to texts (cache_salt to tenant); got {value!r}")
    for tenant in value.values():
        _check_tenant(key, tenant)
    return dict(value)


def _check_address(key: str, address: str) -> None:
    try:
        good = not address or socket_path(address) is not None
    except ValueError:
        good = False
    if not good:  # bytes go through memory that only processes of one host share
        raise ValueError(f'{key} (or ${ADDRESS_VARIABLE}) is a socket on the engine\'s own host, "unix:PATH"; got {address!r}')


def _check_tenant(key: str, name: str) -> None:
    if name and (problem := name_problem(name)):
        raise ValueError(f"{key}: {problem}; got {name!r}")


def _number(key: str, kind: str, value: Any, low: float, high: float) -> float | int:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not low <= number <= high or (kind == "int" and number != int(number)):
        raise ValueError(f"{key} is a {'whole ' if kind == 'int' else ''}number from {low:g} to {high:g}; got {value!r}")
    return int(number) if kind == "int" else number
