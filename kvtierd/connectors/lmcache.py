"""Reads LMCache's configuration, so that a change of ``kv_connector`` is all that a user of LMCache has to do in vLLM.

LMCache's sources count in its own order: the YAML file (``LMCACHE_CONFIG_FILE``), ``LMCACHE_<NAME>`` variables, ``lmcache.<name>``
in ``kv_connector_extra_config``, and for its server the arguments of ``lmcache server``. ``kvtierd.*`` keys win over all.
``lmcache_keys`` has the table of all keys. Names and meanings are those of LMCache 0.5.6; none of its code is needed.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvtierd.connectors.lmcache_keys import CONNECTOR, ENGINE, EXTRA, VARIABLES, Effect, Key, find
from kvtierd.connectors.lmcache_server import Capacities, LmcacheConfigError, boolean, number, read_arguments, size_bytes
from kvtierd.connectors.params import RequestSettings, request_settings
from kvtierd.units import shown

__all__ = ["LmcacheConfigError", "RequestSettings", "Translation", "read_config_file", "request_settings", "translate"]

PREFIX: Final = "kvtierd."
DEFAULT_CPU_GIB: Final = 5.0
"""LMCache's max_local_cpu_size when none is given."""
DEFAULT_DAEMON: Final[dict[str, dict[str, object]]] = {"cpu": {"capacity": "5GiB"}, "nvme": {"capacity": 0}}
"""The daemon's configuration that follows from LMCache's defaults."""
WAITS_MS: Final = {"kvtierd.lookup_timeout_ms": 2000.0, "kvtierd.load_timeout_ms": 30_000.0, "kvtierd.save_timeout_ms": 2000.0}
"""The connector's own limits, which LMCache's mq_timeout can only lower."""
MAX_FILE_BYTES: Final = 1 << 20
_LOOPBACK: Final = frozenset(["", "localhost", "127.0.0.1", "::1", "0.0.0.0", "*"])  # noqa: S104 - compared, never bound
_LEVELS: Final = {"debug": "debug", "info": "info", "warning": "warning", "warn": "warning", "error": "error", "critical": "error"}


@dataclass(frozen=True)
class Translation:
    """What follows from LMCache's configuration.

    Attributes:
        settings: keys of kvtierd's connector, those that were given as ``kvtierd.*`` included.
        daemon: the daemon's configuration, as its TOML file is structured, with LMCache's capacities.
        warnings: a line for each key that asks for something without a counterpart: names it and says what to use instead.
    """

    settings: dict[str, object] = field(default_factory=dict)
    daemon: dict[str, object] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Given:
    """A value and how its user wrote the key."""

    label: str
    value: object


def translate(
    extra_config: Mapping[str, object],
    environ: Mapping[str, str],
    file: Mapping[str, object] | None = None,
    *,
    server_arguments: Sequence[str] = (),
    ranks: int = 1,
) -> Translation:
    """Turn LMCache's configuration into kvtierd's.

    Args:
        extra_config: ``kv_connector_extra_config`` of vLLM.
        environ: variables of the engine's process.
        file: content of LMCache's YAML file; None reads the one that ``LMCACHE_CONFIG_FILE`` names, if any.
        server_arguments: of ``lmcache server``.
        ranks: worker processes on this host, each of which would have its own memory and disk space in LMCache.

    Raises:
        LmcacheConfigError: a value cannot be used or the file cannot be read; the text names the key and what is allowed.
    """
    if file is None:
        path = environ.get("LMCACHE_CONFIG_FILE")
        file = read_config_file(path) if path else {}
    reader = _Reader(ranks, address_known=bool(extra_config.get("kvtierd.address") or environ.get("KVTIERD_ADDRESS")))
    given = reader.collect(file, environ, extra_config)
    reader.engine(given)
    reader.variables(environ)
    reader.connector(extra_config, server_arguments)
    own = {key: value for key, value in extra_config.items() if key.startswith(PREFIX)}
    return Translation(reader.settings | own, reader.daemon(), list(dict.fromkeys(reader.warnings)))


def read_config_file(path: str | os.PathLike[str]) -> dict[str, object]:
    """Content of LMCache's YAML file.

    Raises:
        LmcacheConfigError: it cannot be read, is no YAML or no table of keys, or no YAML library is installed.
    """
    try:
        import yaml
    except ModuleNotFoundError as e:
        raise LmcacheConfigError(f"reading {path} takes the package PyYAML; install it with: pip install 'kvtierd[vllm]'") from e
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise LmcacheConfigError(f"cannot read LMCache's configuration {path}: {e.strerror}") from e
    if len(data) > MAX_FILE_BYTES:
        raise LmcacheConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; is it LMCache's configuration?")
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise LmcacheConfigError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from e
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise LmcacheConfigError(f'{path} is no table of keys; LMCache\'s configuration has lines such as "chunk_size: 256"')
    return content


class _Reader:
    """Collects settings, capacities and warnings of one translation."""

    def __init__(self, ranks: int, *, address_known: bool) -> None:
        if ranks < 1:
            raise LmcacheConfigError(f"{ranks} worker processes are not possible; write a number from 1")
        self.settings: dict[str, object] = {}
        self.warnings: list[str] = []
        self._ranks = ranks
        self._address_known = address_known
        self._daemon: dict[str, dict[str, object]] = {}
        self._capacities = Capacities()

    def collect(
        self, file: Mapping[str, object], environ: Mapping[str, str], extra_config: Mapping[str, object]
    ) -> dict[str, _Given]:
        """The engine's keys of all sources; later sources win, as in LMCache. Keys that are not LMCache's give a warning."""
        given = {name: _Given(name, value) for name, value in file.items()}
        for row in ENGINE:
            for name in row.names:
                text = environ.get(f"LMCACHE_{name.upper()}")
                if text is not None and text.strip() and not name.startswith("ec"):  # LMCACHE_EC_* are not about KV cache
                    given[name] = _Given(f"LMCACHE_{name.upper()}", _unquoted(text))
        for key, value in extra_config.items():
            name = key.removeprefix("lmcache.")
            if name != key and not name.startswith("mp.") and find(CONNECTOR, key) is None:
                given[name] = _Given(key, value)
        for name in [name for name, item in given.items() if item.value is None]:
            del given[name]
        return given

    def engine(self, given: Mapping[str, _Given]) -> None:
        """Apply the engine's keys."""
        for name, item in given.items():
            row = find(ENGINE, name)
            if row is None:
                near = difflib.get_close_matches(name, [n for r in ENGINE for n in r.names], 1)
                self._warn(item.label, "LMCache 0.5.6 has no such key" + (f"; did you mean {near[0]}?" if near else ""))
            elif row.effect is Effect.USED:
                setting = _SETTINGS.get(name)
                if setting is not None:
                    self.settings[setting.key] = setting.read(item.label, item.value)
            else:
                self._note(row, item.label, item.value)
        extra = self._extra(given.get("extra_config"))
        if given:
            self._memory(given, extra)
            self._disk(given, extra)

    def _extra(self, item: _Given | None) -> dict[str, object]:
        if item is None:
            return {}
        content = item.value
        try:
            content = json.loads(content) if isinstance(content, str) else content
        except (ValueError, RecursionError):
            content = None
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise LmcacheConfigError(f'{item.label} is a table of keys, as text a JSON object such as {{"use_odirect": true}}')
        for name, value in content.items():
            row = find(EXTRA, name)
            assert row is not None, "the last row of the table fits every name"
            self._note(row, f"extra_config.{name}", value)
        return content

    def _memory(self, given: Mapping[str, _Given], extra: Mapping[str, object]) -> None:
        item = given.get("max_local_cpu_size", _Given("max_local_cpu_size", DEFAULT_CPU_GIB))
        ranks = self._saving_ranks(extra)
        first = extra.get("first_rank_max_local_cpu_size")
        if first is not None:
            item, ranks = _Given("extra_config.first_rank_max_local_cpu_size", first), 1
        size = ranks * size_bytes(item.label, item.value)
        if size:
            self._capacities.cpu_bytes = size
        else:
            self._warn(item.label, "blocks always pass through CPU memory, so kvtierd needs some: set cpu.capacity")
        local = given.get("local_cpu")
        if local is not None and not boolean(local.label, local.value):
            self._warn(local.label, "blocks on their way also stay in CPU memory; for less of it lower cpu.capacity")
        lazy = given.get("enable_lazy_memory_allocator")
        if lazy is not None and boolean(lazy.label, lazy.value):
            self._capacities.prefault = False

    def _saving_ranks(self, extra: Mapping[str, object]) -> int:
        only_first = extra.get("save_only_first_rank")
        return 1 if only_first is not None and boolean("extra_config.save_only_first_rank", only_first) else self._ranks

    def _disk(self, given: Mapping[str, _Given], extra: Mapping[str, object]) -> None:
        limit = given.get("max_local_disk_size", _Given("max_local_disk_size", 0.0))
        size = self._saving_ranks(extra) * size_bytes(limit.label, limit.value)
        paths = given.get("local_disk")
        if paths is not None and not isinstance(paths.value, str):
            raise LmcacheConfigError(
                f"{paths.label} is the path of a folder, or several with commas between; got {shown(paths.value)}"
            )
        folders = [part.strip().removeprefix("file://") for part in str(paths.value).split(",")] if paths else []
        folders = [folder for folder in folders if folder]
        if size and not folders:
            self._warn(limit.label, "has no effect without local_disk, in LMCache too: no disk is used")
        if folders and not size:
            assert paths is not None
            self._warn(paths.label, "has no effect without max_local_disk_size, in LMCache too: no disk is used")
        self._capacities.add_disk(folders if size else [], size if folders else 0)

    def variables(self, environ: Mapping[str, str]) -> None:
        """Apply variables that are no keys of the engine."""
        for name in sorted(name for name in environ if name.startswith("LMCACHE_")):
            row = find(VARIABLES, name)
            if row is not None and environ[name].strip():
                self._note(row, name, environ[name])
        if environ.get("LMCACHE_FORCE_SKIP_SAVE"):
            self.settings["kvtierd.role"] = "load"
        level = environ.get("LMCACHE_LOG_LEVEL", "").strip().lower()
        if level in _LEVELS:
            self._daemon["log"] = {"level": _LEVELS[level]}
        elif level:
            self._warn("LMCACHE_LOG_LEVEL", f"{level[:40]!r} is no level here; set log.level to debug, info, warning or error")

    def connector(self, extra_config: Mapping[str, object], server_arguments: Sequence[str]) -> None:
        """Apply keys of ``kv_connector_extra_config`` that are no keys of the engine, and arguments of LMCache's server."""
        for key, value in extra_config.items():
            row = find(CONNECTOR, key)
            if row is None:
                if key.startswith("lmcache.mp."):
                    near = difflib.get_close_matches(key, [n for r in CONNECTOR for n in r.names], 1)
                    self._warn(key, "LMCache 0.5.6 has no such key" + (f"; did you mean {near[0]}?" if near else ""))
                continue
            setting = _SETTINGS.get(key)
            if setting is not None and value is not None:
                self.settings[setting.key] = setting.read(key, value)
            self._note(row, key, value)
        self._hosts(extra_config)
        wait_s = extra_config.get("lmcache.mp.mq_timeout")
        if wait_s is not None:
            most_ms = number("lmcache.mp.mq_timeout", wait_s, 0.001, 3_600_000.0) * 1000
            for key, default_ms in WAITS_MS.items():
                now_ms = self.settings.get(key, default_ms)
                assert isinstance(now_ms, int | float), "made by a reader of numbers"
                if most_ms < now_ms:
                    self.settings[key] = max(most_ms, 10.0)
        arguments = extra_config.get("lmcache.mp.autostart.server_args")
        read = read_arguments([*_split("lmcache.mp.autostart.server_args", arguments), *server_arguments], self._warn)
        if read.chunk_tokens:
            self.settings["kvtierd.chunk_tokens"] = read.chunk_tokens
        self._capacities = self._capacities.replaced_by(read.capacities)
        if read.metrics:
            self._daemon["server"] = {"metrics": read.metrics}

    def _hosts(self, extra_config: Mapping[str, object]) -> None:
        key = "lmcache.mp.server_urls" if extra_config.get("lmcache.mp.server_urls") else "lmcache.mp.host"
        value = extra_config.get(key) or ""
        urls = value if isinstance(value, list) else str(value).split(",")
        for url in (str(url).strip() for url in urls):
            host = _host(url)
            if host not in _LOOPBACK and not self._address_known:
                text = f"{host} may be another host, and the daemon is reached over a unix socket on the engine's own host"
                self._warn(key, f"{text}: run `kvtierd serve` there, and set kvtierd.address if its socket is not the default one")
        if len(urls) > 1:
            self._warn(key, "one daemon serves all workers of an engine; the engine's workers must be on one host")

    def daemon(self) -> dict[str, object]:
        """The daemon's configuration."""
        return {**self._capacities.tables(), **self._daemon}

    def _warn(self, label: str, text: str) -> None:
        self.warnings.append(f"{label}: {text}")

    def _note(self, row: Key, label: str, value: object) -> None:
        """A warning where a key without a counterpart asks for something."""
        if row.effect is Effect.MISSING and not _is_off(value) and shown(value).strip("' ").lower() not in row.quiet:
            self._warn(label, f"no counterpart; {row.text}")


@dataclass(frozen=True)
class _Setting:
    """How a key of LMCache becomes a setting of the connector."""

    key: str
    read: Callable[[str, object], object]


def _whole(least: int, most: int) -> Callable[[str, object], int]:
    return lambda label, value: int(number(label, value, least, most, whole=True))


_SETTINGS: Final[dict[str, _Setting]] = {
    "chunk_size": _Setting("kvtierd.chunk_tokens", _whole(1, 1 << 20)),
    "save_decode_cache": _Setting("kvtierd.save_decode", boolean),
    "min_retrieve_tokens": _Setting("kvtierd.min_hit_tokens", _whole(0, 1 << 30)),
    "lookup_timeout_ms": _Setting("kvtierd.lookup_timeout_ms", _whole(1, 3_600_000)),
    "blocking_timeout_secs": _Setting("kvtierd.load_timeout_ms", lambda label, value: 1000 * number(label, value, 0.01, 3600)),
    "lmcache.mp.save_decode_cache": _Setting("kvtierd.save_decode", boolean),
    "lmcache.mp.eager_prefetch": _Setting("kvtierd.prefetch", boolean),
}


def _is_off(value: object) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in ("", "false", "0", "no", "off", "none", "null")
    return not value


def _unquoted(text: str) -> str:
    """A variable's text without one pair of quotes around it, as LMCache reads it."""
    text = text.strip()
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        return text
    try:
        value: Any = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    return value if isinstance(value, str) else text[1:-1]


def _split(label: str, value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, str):
        raise LmcacheConfigError(f'{label} is a text such as "--l1-size-gb 20 --eviction-policy LRU"')
    try:
        return shlex.split(value)
    except ValueError as e:
        raise LmcacheConfigError(f"{label}: {e} in {value[:80]!r}") from e


def _host(url: str) -> str:
    """Host name of an endpoint such as ``tcp://node1:5555``, ``node1:5555`` or ``grpc+unix:///run/x``; empty for a local one."""
    scheme, _, rest = url.rpartition("://")
    if scheme in ("ipc", "inproc", "grpc+unix"):
        return ""
    if rest.count(":") > 1 and not rest.startswith("["):
        return rest  # a bare IPv6 address
    try:
        return urlsplit(f"//{rest}").hostname or ""
    except ValueError:
        return rest
