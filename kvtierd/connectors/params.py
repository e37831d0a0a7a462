"""What one request asks for in its ``kv_transfer_params``: ``kvtierd.*`` first, else LMCache's names for the same."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtierd.config import MAX_DURATION_S, parse_duration
from kvtierd.tenant_config import name_problem
from kvtierd.units import shown

__all__ = ["DEFAULT_PIN_S", "RequestSettings", "request_settings"]

DEFAULT_PIN_S: Final = 3600.0
"""How long ``kvtierd.pin: true`` pins, in seconds."""
MAX_TOKENS: Final = 1 << 40
KEYS: Final = ("tenant", "ttl", "pin", "skip_save", "skip_load", "max_load_tokens", "max_save_tokens")
"""Names that may follow ``kvtierd.``."""
_YES: Final = frozenset(["true", "1", "yes", "on", "y"])
_NO: Final = frozenset(["false", "0", "no", "off", "n"])


@dataclass(frozen=True)
class RequestSettings:
    """What a request asks for; the defaults ask for nothing special.

    Attributes:
        tenant: who is billed; empty means the connector's setting decides.
        ttl_s: how long the request's blocks live; None for the tenant's or the tier's TTL.
        skip_save: save nothing of it.
        skip_load: load nothing for it.
        pin_s: pin its blocks for this long; None for no pin.
        max_load_tokens: load at most its first so many tokens; None for no limit.
        max_save_tokens: save at most its first so many tokens; None for no limit.
    """

    tenant: str = ""
    ttl_s: float | None = None
    skip_save: bool = False
    skip_load: bool = False
    pin_s: float | None = None
    max_load_tokens: int | None = None
    max_save_tokens: int | None = None


def request_settings(kv_transfer_params: Mapping[str, object] | None) -> RequestSettings:
    """Read a request's ``kv_transfer_params``. A value of null counts as absent.

    Raises:
        ValueError: a ``kvtierd.`` key is unknown, or a value of such a key or of one of LMCache's cannot be used; the text names
            the key and what is allowed.
    """
    if not kv_transfer_params:
        return RequestSettings()
    if not isinstance(kv_transfer_params, Mapping):  # vLLM lets a request put anything there
        raise ValueError(f"kv_transfer_params map names to values; got {shown(kv_transfer_params)}")
    for key in kv_transfer_params:
        name = str(key).removeprefix("kvtierd.")
        if name != str(key) and name not in KEYS:
            near = difflib.get_close_matches(name, KEYS, 1)
            hint = f"did you mean kvtierd.{near[0]}?" if near else "known: " + ", ".join(f"kvtierd.{k}" for k in KEYS)
            raise ValueError(f"{shown(key)} in kv_transfer_params is not known; {hint}")

    def first(*keys: str) -> tuple[str, object]:
        return next(((key, value) for key in keys if (value := kv_transfer_params.get(key)) is not None), ("", None))

    return RequestSettings(
        tenant=_tenant(*first("kvtierd.tenant", "lmcache.tag.tenant")),
        ttl_s=_seconds(*first("kvtierd.ttl", "lmcache.ttl")),
        skip_save=_flag(*first("kvtierd.skip_save", "lmcache.skip_save")),
        skip_load=_flag(*first("kvtierd.skip_load")),
        pin_s=_pin(*first("kvtierd.pin")),
        max_load_tokens=_tokens(*first("kvtierd.max_load_tokens")),
        max_save_tokens=_tokens(*first("kvtierd.max_save_tokens", "lmcache.max_offload_tokens")),
    )


def _tenant(key: str, value: object) -> str:
    if value is None:
        return ""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if problem := name_problem(text if isinstance(text, str) else ""):
        raise ValueError(f"{key}: {problem}; got {shown(value)}")
    return str(text)


def _flag(key: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    text = str(value).strip().lower() if isinstance(value, int | str) else ""
    if text not in _YES | _NO:
        raise ValueError(f"{key} is true or false; got {shown(value)}")
    return text in _YES


def _seconds(key: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        seconds = parse_duration(value) if isinstance(value, int | float | str) else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_DURATION_S:
        raise ValueError(f'{key} is a number of seconds above 0, up to ten years, or a text such as "10min"; got {shown(value)}')
    return seconds


def _pin(key: str, value: object) -> float | None:
    if isinstance(value, bool):
        return DEFAULT_PIN_S if value else None
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return DEFAULT_PIN_S if value.strip().lower() == "true" else None
    try:
        return _seconds(key, value)
    except ValueError as e:
        raise ValueError(f"{e}; true means {DEFAULT_PIN_S:g} seconds") from None


def _tokens(key: str, value: object) -> int | None:
    if value is None:
        return None
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{key} is a whole number of tokens, 0 or more; got {shown(value)}")
    return number
