"""What ``--hicache-storage-backend-extra-config`` says of kvtierd, checked."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from kvtierd.client.address import socket_path
from kvtierd.tenant_config import name_problem

PREFIX: Final = "kvtierd."
KV_DTYPES: Final = ("fp8_e4m3", "fp8_e5m2")
MAX_TIMEOUT_MS: Final = 3_600_000


@dataclass(frozen=True)
class Settings:
    """Settings of the backend; each is the key ``kvtierd.<name>``. Times in milliseconds.

    Attributes:
        address: of the daemon, ``unix:PATH``; empty means ``$KVTIERD_ADDRESS`` or the default socket.
        token_file: file that holds the bearer token of a daemon that asks for one; empty means ``$KVTIERD_TOKEN_FILE``.
        tenant: who is billed; empty means "default".
        revision: a text that changes with the weights, where their files do not say it.
        kv_dtype: with an FP8 cache, which one: "fp8_e4m3" or "fp8_e5m2".
        lookup_timeout_ms: longest that a look for pages may take.
        load_timeout_ms: longest that reading a batch of pages may take; past it the rest is missing.
        save_timeout_ms: longest that writing a batch of pages may take.
    """

    address: str = ""
    token_file: str = ""
    tenant: str = ""
    revision: str = ""
    kv_dtype: str = ""
    lookup_timeout_ms: float = 1000.0
    load_timeout_ms: float = 10_000.0
    save_timeout_ms: float = 5000.0


def read_settings(extra_config: Mapping[str, Any]) -> Settings:
    """Settings of SGLang's extra configuration. Keys without the prefix are SGLang's own.

    Raises:
        ValueError: a ``kvtierd.`` key is unknown or its value cannot be used; the text names it and what is allowed.
    """
    known = {f.name: str(f.type) for f in fields(Settings)}
    values = {key.removeprefix(PREFIX): value for key, value in extra_config.items() if key.startswith(PREFIX)}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {PREFIX}{close[0]}?" if close else f"known: {', '.join(PREFIX + n for n in known)}"
            raise ValueError(f"{PREFIX}{name} in hicache-storage-backend-extra-config is not known; {hint}")
        (_check_time if known[name] == "float" else _check_text)(name, value)
    return Settings(**values)


def _check_time(name: str, value: object) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 1 <= value <= MAX_TIMEOUT_MS
    if not good:
        raise ValueError(f"{PREFIX}{name} is a number of milliseconds from 1 to {MAX_TIMEOUT_MS}; got {value!r}")


def _check_text(name: str, value: object) -> None:
    key = PREFIX + name
    if not isinstance(value, str):
        raise ValueError(f"{key} is a text; got {value!r}")
    if name == "tenant" and value and (problem := name_problem(value)):
        raise ValueError(f"{key}: {problem}; got {value!r}")
    if name == "kv_dtype" and value not in KV_DTYPES:
        raise ValueError(f"{key} is one of {', '.join(KV_DTYPES)}; got {value!r}")
    if name == "address" and value:
        try:
            local = socket_path(value) is not None
        except ValueError:
            local = False
        if not local:  # pages are copied to and from memory that only processes of one host share
            raise ValueError(f'{key} is a socket on the engine\'s own host, "unix:PATH"; got {value!r}')
