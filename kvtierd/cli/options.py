"""Options and parameter types that several commands share, and what a command knows about its daemon."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import click

from kvtierd.config import Config, load_config, parse_duration
from kvtierd.errors import ConfigError
from kvtierd.model import KEY_BYTES, Tier

if TYPE_CHECKING:
    from kvtierd.cli.connection import AdminConnection, Target

__all__ = [
    "TIER",
    "NumberRange",
    "Settings",
    "admin_options",
    "config_option",
    "duration",
    "every_option",
    "hex_start",
    "json_option",
    "key",
]

P = ParamSpec("P")
R = TypeVar("R")

MIN_INTERVAL_S: Final = 0.2
"""Shortest time between two looks at a daemon."""


@dataclass
class Settings:
    """What the options before the command say; each command's own options come first."""

    address: str | None = None
    config_path: Path | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None

    def load(self, flags: dict[str, object] | None = None) -> Config:
        """The configuration of file, variables and flags. Raises ConfigError."""
        return load_config(self.config_path, flags=flags)

    def target(self) -> Target:
        """Where to connect: the address given, else the socket of the configuration.

        Raises:
            ConfigError: when no address is given and the configuration is wrong.
        """
        from kvtierd.cli.connection import Target  # with the client, which a daemon's start does without

        address = self.address
        if not address:
            try:
                address = str(self.load().server.socket)
            except ConfigError as e:
                raise ConfigError(f"{e}\n(read to find the daemon's socket; --address makes that unnecessary)") from e
        return Target(address, self.tls_ca, self.tls_cert, self.tls_key, str(self.token_file or ""))

    def connect(self) -> AdminConnection:
        """A connection to the daemon, not yet tried."""
        from kvtierd.cli.connection import AdminConnection

        return AdminConnection(self.target())


def duration(text: str) -> float:
    """Seconds of an option such as ``30s``, ``10min`` or ``2.5``."""
    try:
        return parse_duration(text)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


def _hex(text: str, least_bytes: int, most_bytes: int, what: str) -> bytes:
    length = f"{2 * least_bytes}" if least_bytes == most_bytes else f"{2 * least_bytes} to {2 * most_bytes}"
    try:
        data = bytes.fromhex(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not {what}: {length} hex digits, an even number") from None
    if not least_bytes <= len(data) <= most_bytes:
        raise click.BadParameter(f"{text!r} has {2 * len(data)} hex digits; {what} takes {length}")
    return data


def key(text: str) -> bytes:
    """A whole key in hex."""
    if text.endswith("…"):
        raise click.BadParameter(f"{text!r} is shortened; 'kvtierd blocks --json' writes whole keys")
    return _hex(text, KEY_BYTES, KEY_BYTES, "a key")


def hex_start(text: str) -> bytes:
    """A key or a fingerprint in hex, or at least 4 bytes of its start; also as a table shortens it, with an ellipsis."""
    return _hex(text.rstrip("….") or text, 4, KEY_BYTES, "a key or fingerprint, or the start of one")


class NumberRange(click.FloatRange):
    """Numbers within bounds. Comparisons let "nan" through any bounds, and a simulation that is given it ends, with figures."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As its base, and finite."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be used; write for example 0.5", param, ctx)
        return number


TIER = click.Choice([tier.name.lower() for tier in Tier], case_sensitive=False)
"""Lower-case name of a tier."""

_PATH = click.Path(dir_okay=False, path_type=Path)


def _settings(function: Callable[P, R], names: tuple[str, ...]) -> Callable[P, R]:
    """Move options of a command into its Settings, over those before the command."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        settings = click.get_current_context().ensure_object(Settings)
        for name in names:
            value: Any = kwargs.pop(name)
            if value is not None:
                setattr(settings, name, value)
        return function(*args, **kwargs)

    return wrapper


def admin_options(function: Callable[..., R]) -> Callable[..., R]:
    """Options of every command that talks to a daemon; the command finds them in ``Settings``."""
    wrapped = _settings(function, ("address", "config_path", "tls_ca", "tls_cert", "tls_key", "token_file"))
    for option in reversed(
        [
            click.option(
                "--address",
                metavar="ADDRESS",
                help="Unix socket or host:port of the daemon; the configuration's socket when left out.",
            ),
            click.option("--config", "config_path", type=_PATH, help="TOML file that names the daemon's socket."),
            click.option("--tls-ca", type=_PATH, help="PEM CA of a daemon on TCP; switches TLS on."),
            click.option("--tls-cert", type=_PATH, help="PEM client certificate (mTLS)."),
            click.option("--tls-key", type=_PATH, help="PEM key of the client certificate."),
            click.option("--token-file", type=_PATH, help="File that holds a token for the admin API."),
        ]
    ):
        wrapped = option(wrapped)
    return wrapped


def config_option(function: Callable[..., R]) -> Callable[..., R]:
    """``--config`` alone, for commands that read a configuration."""
    return click.option("--config", "config_path", type=_PATH, help="TOML file.")(_settings(function, ("config_path",)))


def json_option(text: str = "Write JSON.") -> Callable[[Callable[..., R]], Callable[..., R]]:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def _interval(text: str) -> float:
    """Seconds between two looks; not so few that a daemon does little else than answer."""
    seconds = duration(text)
    if seconds < MIN_INTERVAL_S:
        raise click.BadParameter(f"{text!r} is too short; write at least {1000 * MIN_INTERVAL_S:g}ms")
    return seconds


def every_option(text: str = "Time between two looks.") -> Callable[[Callable[..., R]], Callable[..., R]]:
    """``--every``: seconds between two looks at a daemon, ``MIN_INTERVAL_S`` at least, as ``every_s``."""
    return click.option(
        "--every",
        "every_s",
        type=_interval,
        default="2s",
        show_default=True,
        metavar="DURATION",
        help=text,
    )
