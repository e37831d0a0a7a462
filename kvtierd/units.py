"""Sizes, durations, permissions, users and addresses as people write them."""

from __future__ import annotations

import difflib
import grp
import ipaddress
import pwd
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

_SIZE_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE_UNITS |= {f"{p}b": n for p, n in list(_SIZE_UNITS.items()) if p not in ("", "b")}
_SIZE_UNITS |= {f"{p}i{s}": 1024 ** (i + 1) for i, p in enumerate("kmgt") for s in ("", "b")}
_SIZE_STEPS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_DURATION_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


MAX_SIZE_BYTES: Final = 1 << 60
"""Largest size that a key may say: more than any machine has, and far from where a number overflows."""
MAX_DURATION_S: Final = 3650 * 86400.0
"""Longest duration that a key may say, ten years; an endless one is spelled "never" where a key knows that."""
MAX_OWNER: Final = 2**32 - 2
"""Largest number of a user or group; the next one means none."""


def _number_with_unit(value: object, units: Mapping[str, float], kind: str, example: str, most: float, most_text: str) -> float:
    """A number in base units, from 0 to ``most``. Raises ValueError that says what may be written."""
    number: float
    if isinstance(value, bool):
        raise ValueError(f"a {kind} is a number with a unit, for example {example}")
    if isinstance(value, int | float):
        number = value
    else:
        text = value if isinstance(value, str) else ""
        match = re.fullmatch(r"\s*([+-]?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        if not match:
            raise ValueError(f"{shown(value)} is not a {kind}; write for example {example}")
        unit = match[2].lower()
        if unit not in units:
            near = difflib.get_close_matches(unit, list(units), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown unit {shown(match[2])} in {shown(value)}{hint} Write for example {example}")
        number = float(match[1]) * units[unit]
    if not 0 <= number <= most:  # false for nan too
        raise ValueError(f"{shown(value)} is not possible: a {kind} lies between 0 and {most_text}, for example {example}")
    return number


class _Shown(reprlib.Repr):
    """A ``repr`` that looks at no more of a value than is shown: others' lists may hold each other many times over."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 - as the original has it
        return repr(x) if abs(x) < 10**40 else "a number of more than 40 digits"

    def repr_str(self, x: str, level: int) -> str:  # noqa: ARG002 - as the original has it
        return repr(x[:100])


_SHOWN: Final = _Shown()


def shown(value: object) -> str:
    """A value in an error, escaped, and shortened where it is absurdly long."""
    text = _SHOWN.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_size(value: object) -> int:
    """Bytes of a size such as 4096, "64MiB" or "1.5 GB", at most 1 EiB. Raises ValueError with an example."""
    return int(_number_with_unit(value, _SIZE_UNITS, "size", '"256MiB"', MAX_SIZE_BYTES, "1 EiB"))


def size_text(size_bytes: int) -> str:
    """A size as a key may say it: "64MiB", or the mere number where no unit divides it."""
    for step, unit in _SIZE_STEPS:
        if size_bytes and size_bytes % step == 0:
            return f"{size_bytes // step}{unit}"
    return str(size_bytes)


def parse_duration(value: object) -> float:
    """Seconds of a duration such as 2.5, "30s" or "10min", at most ten years. Raises ValueError with an example."""
    return float(_number_with_unit(value, _DURATION_UNITS, "duration", '"30s"', MAX_DURATION_S, "10 years"))


def parse_ttl(value: object) -> float | None:
    """Seconds of a duration; None for "never". Raises ValueError with an example."""
    if value in (None, "none", "never"):
        return None
    try:
        return parse_duration(value)
    except ValueError as e:
        raise ValueError(f'{e}, or "never"') from None


class Share(float):
    """A share of something, 0 to 1."""

    def __str__(self) -> str:
        return f"{100 * self:.6g}%"


def _percent(text: str) -> Share:
    number = text.strip().removesuffix("%").strip()
    if not re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", number) or float(number) > 100:
        raise ValueError(f'{shown(text)} is not possible: a share lies between "0%" and "100%", for example "20%"')
    return Share(float(number) / 100)


def parse_share(value: object) -> float:
    """A share, as a number from 0 to 1 or as text such as "10%". Raises ValueError with an example."""
    if isinstance(value, str) and value.strip().endswith("%"):
        return float(_percent(value))
    try:
        share = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else float("nan")
    except (ValueError, OverflowError):
        share = float("nan")
    if not 0 <= share <= 1:  # false for nan too
        raise ValueError(f'{shown(value)} is not possible: write a share that lies between 0 and 1, or "0%" and "100%"')
    return share


def parse_amount(value: object) -> int | Share | None:
    """Bytes of a size such as "4GiB", a share of a tier such as "20%", or None for "none". Raises ValueError with an example."""
    if value is None or isinstance(value, Share):
        return value
    if isinstance(value, str) and value.strip().lower() == "none":
        return None
    if isinstance(value, str) and value.strip().endswith("%"):
        return _percent(value)
    try:
        return parse_size(value)
    except ValueError as e:
        raise ValueError(f'{e}; or a share of the tier, such as "20%", or "none"') from None


def amount_text(value: int | Share | None) -> int | str | None:
    """An amount as JSON has it: a number of bytes, "20%", or None."""
    return str(value) if isinstance(value, Share) else value


def parse_mode(value: object) -> int:
    """Permissions: a number (0o600 in TOML), or octal digits as text. Raises ValueError with an example."""
    try:
        mode = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        mode = -1
    if isinstance(mode, float) and mode.is_integer():  # Helm writes every number as one
        mode = int(mode)
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 0o777:
        raise ValueError(f"{shown(value)} are no permissions; they are octal: write 0o600 in a file, 0600 elsewhere")
    return mode


def parse_user(value: object) -> int:
    """Number of a user, given by name or number. Raises ValueError that says what may be written."""
    return _owner(value, "user", lambda name: pwd.getpwnam(name).pw_uid)


def parse_group(value: object) -> int:
    """Number of a group, given by name or number. Raises ValueError that says what may be written."""
    return _owner(value, "group", lambda name: grp.getgrnam(name).gr_gid)


def _owner(value: object, what: str, number_of: Callable[[str], int]) -> int:
    if isinstance(value, str) and not re.fullmatch(r"[0-9]{1,10}", value):
        try:
            return number_of(value)
        except (KeyError, ValueError):
            raise ValueError(f"there is no {what} {shown(value)} here; write a name that this machine knows, or a number") from None
    # Helm writes every number as a fraction.
    whole = isinstance(value, int | str) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 0 <= (number := int(value)) <= MAX_OWNER:  # type: ignore[call-overload]
        raise ValueError(f"{shown(value)} is no {what}; write a name, or a number from 0 to {MAX_OWNER}")
    return int(number)


def is_loopback(host: str) -> bool:
    """True for an IP address that only this machine reaches. Any other text, ``*`` too, is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_endpoint(text: str) -> Path | tuple[str, int]:
    """Path of ``ipc:///path``, or host and port of ``tcp://host:port``, a host being an IP address or ``*`` for all of them.

    Raises ValueError that says what may be written.
    """
    scheme, found, rest = text.partition("://")
    if found and scheme == "ipc" and rest.startswith("/") and "\0" not in rest:
        return Path(rest)
    if not found or scheme != "tcp":
        raise ValueError(
            f'{shown(text)} is no endpoint; write "ipc:///run/kvtierd/events.sock" with an absolute path, or "tcp://127.0.0.1:5557"'
        )
    host, port = parse_address(rest)
    if host != "*":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"{shown(text)} names no address; write the IP address to listen on, or * for all of them") from None
    return host, port


def parse_address(text: str, *, least_port: int = 1) -> tuple[str, int]:
    """Host and port of ``host:port``, ``[v6]:port`` or ``:port``. Raises ValueError that says what may be written."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise ValueError(f'{shown(text)} is not an address; write "host:port", for example "127.0.0.1:9464"')
    if len(port) > 5 or not least_port <= int(port) <= 65535:
        raise ValueError(f"{shown(text)} has no possible port; a port lies between {least_port} and 65535")
    if host.startswith("["):
        if not host.endswith("]"):
            raise ValueError(f'{shown(text)} is not an address; an IPv6 host goes in brackets, for example "[::1]:9464"')
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f'{shown(text)} is not an address; an IPv6 host goes in brackets, for example "[::1]:9464"')
    return host, int(port)
