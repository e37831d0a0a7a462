"""Configuration: one TOML file, ``KVTIERD_*`` variables and flags, in rising order.

Every key has a unit in its type: sizes are bytes ("256MiB", "1GiB", 4096), durations are seconds ("30s", "10min", 2.5).
Unknown keys are errors with a suggestion. ``docs`` and ``kvtierd config`` are generated from the field descriptions.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvtierd.errors import ConfigError

_SIZE_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE_UNITS |= {f"{p}b": n for p, n in list(_SIZE_UNITS.items()) if p not in ("", "b")}
_SIZE_UNITS |= {f"{p}i{s}": 1024 ** (i + 1) for i, p in enumerate("kmgt") for s in ("", "b")}
_DURATION_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _number_with_unit(value: object, units: Mapping[str, float], kind: str, example: str) -> float:
    if isinstance(value, bool):
        raise ValueError(f"a {kind} is a number with a unit, for example {example}")
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    if not match:
        raise ValueError(f"{value!r} is not a {kind}; write for example {example}")
    unit = match[2].lower()
    if unit not in units:
        near = difflib.get_close_matches(unit, list(units), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown unit {match[2]!r} in {value!r}{hint} Write for example {example}")
    return float(match[1]) * units[unit]


def parse_size(value: object) -> int:
    """Bytes of a size such as 4096, "64MiB" or "1.5 GB". Raises ValueError with an example."""
    return int(_number_with_unit(value, _SIZE_UNITS, "size", '"256MiB"'))


def parse_duration(value: object) -> float:
    """Seconds of a duration such as 2.5, "30s" or "10min". Raises ValueError with an example."""
    return _number_with_unit(value, _DURATION_UNITS, "duration", '"30s"')


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Duration = Annotated[float, BeforeValidator(parse_duration), Field(ge=0, allow_inf_nan=False)]
OptionalDuration = Annotated[float | None, BeforeValidator(lambda v: None if v in (None, "none", "never") else parse_duration(v))]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtierd"


def _runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvtierd" if base else Path(f"/tmp/kvtierd-{os.getuid()}")  # noqa: S108 - private folder, mode checked


class HbmConfig(_Section):
    """GPU memory tier. Not part of this version: the capacity must be 0."""

    capacity: Size = Field(0, description="Bytes of the pool on each GPU; 0 switches the tier off.")
    ttl: OptionalDuration = Field(30.0, description='Idle time after which a copy moves down; "never" for none.')


class CpuConfig(_Section):
    """CPU memory tier."""

    capacity: Size = Field(2**30, description="Hard limit over all tenants and ranks of this node.")
    extent: Size = Field(0, description="Bytes of one extent; 0 means 1/16 of the capacity, from 1 MiB to 256 MiB.")
    ttl: OptionalDuration = Field(600.0, description='Idle time after which a copy moves down; "never" for none.')
    free_target: float = Field(
        0.15,
        ge=0,
        le=0.9,
        description="Share of the tier that is kept free or clean by writing the least recently used blocks down.",
    )
    prefault: bool = Field(True, description="Fault the whole pool in at the start, in the background.")
    prefault_threads: int = Field(0, ge=0, le=256, description="Threads that prefault; 0 means one per CPU, at most 16.")

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent with the default worked out."""
        return self.extent or min(256 << 20, max(1 << 20, self.capacity // 16))


class NvmeConfig(_Section):
    """NVMe tier."""

    capacity: Size = Field(4 * 2**30, description="Hard limit over all folders; 0 switches the tier off.")
    folders: list[Path] = Field(default_factory=lambda: [_cache_dir() / "nvme"], description="One folder per device.")
    segment: Size = Field(0, description="Bytes of one segment file; 0 means 1/16 of the capacity, from 4 MiB to 256 MiB.")
    ttl: OptionalDuration = Field(None, description='Idle time after which a copy is forgotten; "never" for none.')
    reserve: Size = Field(256 << 20, description="Free space of the file system that is never used.")
    depth: int = Field(8, ge=2, le=256, description="I/Os in flight on each folder.")
    io: str = Field("auto", pattern="^(auto|threads|kvikio)$", description="I/O engine.")
    direct: str = Field(
        "auto", pattern="^(auto|require|off)$", description="O_DIRECT: probe for it, insist on it, or use the page cache."
    )
    allow_volatile: bool = Field(False, description="Accept a folder on tmpfs or overlayfs.")
    max_bytes_in_flight: Size = Field(256 << 20, description="Bytes that may move from or to NVMe at one time, each way.")
    snapshot_journal: Size = Field(64 << 20, description="Journal size at which a snapshot is written.")

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment with the default worked out."""
        return self.segment or min(256 << 20, max(4 << 20, self.capacity // 16))


class ServerConfig(_Section):
    """Sockets and limits."""

    socket: Path = Field(default_factory=lambda: _runtime_dir() / "kvtierd.sock", description="Unix socket of the gRPC API.")
    descriptor_socket: Path | None = Field(None, description="Unix socket for descriptors; next to the gRPC socket when not set.")
    socket_mode: int = Field(0o600, ge=0, le=0o777, description="Permissions of both sockets.")
    listen: str | None = Field(None, description='TCP address such as "0.0.0.0:9460"; needs tls_* or insecure.')
    insecure: bool = Field(False, description="Allow TCP without TLS.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain.")
    tls_key: Path | None = Field(None, description="PEM private key.")
    tls_client_ca: Path | None = Field(None, description="PEM CA that client certificates must be signed by (mTLS).")
    metrics: str = Field("127.0.0.1:9464", description='Address of /metrics, /healthz and /readyz; "" switches it off.')
    max_sessions: int = Field(1024, ge=1, le=65536, description="Most sessions at one time.")
    max_concurrent_calls: int = Field(1024, ge=1, description="Most calls in progress; more are refused at once.")
    max_tickets: int = Field(4096, ge=1, description="Most open tickets of one session.")
    max_ticket_share: float = Field(0.5, gt=0, le=1, description="Most of the CPU tier that one session's tickets may hold.")
    max_deadline: Duration = Field(300.0, description="Longest deadline or wait of a call.")
    drain_timeout: Duration = Field(30.0, description="Longest time that a SIGTERM waits for blocks to reach NVMe.")

    @property
    def fd_socket(self) -> Path:
        """Descriptor socket with the default worked out."""
        return self.descriptor_socket or self.socket.with_name(self.socket.stem + ".fd.sock")


class TenantConfig(_Section):
    """Limits of one tenant."""

    cpu_quota: Size = Field(0, description="Most bytes on the CPU tier; 0 means no limit.")
    nvme_quota: Size = Field(0, description="Most bytes on the NVMe tier; 0 means no limit.")
    hbm_quota: Size = Field(0, description="Most bytes on the HBM tier; 0 means no limit.")
    hbm_ttl: OptionalDuration = Field(None, description="Own TTL on HBM; not set means the tier's.")
    cpu_ttl: OptionalDuration = Field(None, description="Own TTL on CPU; not set means the tier's.")
    nvme_ttl: OptionalDuration = Field(None, description="Own TTL on NVMe; not set means the tier's.")


class LogConfig(_Section):
    """Logging."""

    level: str = Field("info", pattern="^(debug|info|warning|error)$", description="Least level that is written.")
    json_lines: bool = Field(False, description="One JSON object a line instead of text.")


class Config(_Section):
    """The whole configuration."""

    hbm: HbmConfig = Field(default_factory=HbmConfig)
    cpu: CpuConfig = Field(default_factory=CpuConfig)
    nvme: NvmeConfig = Field(default_factory=NvmeConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    log: LogConfig = Field(default_factory=LogConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.hbm.capacity:
            raise ValueError("hbm.capacity is set, but this version has no HBM tier; set it to 0")
        if self.nvme.capacity and self.nvme.capacity < 4 << 20:
            raise ValueError("nvme.capacity is below 4MiB; raise it, or set it to 0 for no NVMe tier")
        if self.cpu.capacity < 1 << 20:
            raise ValueError("cpu.capacity is below 1MiB; blocks pass through CPU memory on every path")
        if self.cpu.extent_bytes > self.cpu.capacity:
            raise ValueError("cpu.extent is larger than cpu.capacity")
        if self.nvme.capacity and not self.nvme.folders:
            raise ValueError('nvme.folders is empty; name at least one folder or set nvme.capacity to "0"')
        if self.nvme.capacity and self.nvme.segment_bytes > self.nvme.capacity:
            raise ValueError("nvme.segment is larger than nvme.capacity")
        if bool(self.server.tls_cert) != bool(self.server.tls_key):
            raise ValueError("server.tls_cert and server.tls_key go together")
        if self.server.listen and not (self.server.tls_cert or self.server.insecure):
            raise ValueError("server.listen needs server.tls_cert and server.tls_key, or server.insecure = true")
        return self


def field_paths(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted keys with their pydantic field, in order; tenants appear as ``tenants.NAME.key``."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from field_paths(annotation, f"{prefix}{name}.")
        elif name == "tenants":
            yield from field_paths(TenantConfig, f"{prefix}{name}.NAME.")
        else:
            yield prefix + name, info


def load_config(
    path: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> Config:
    """Read file, variables and flags, in rising order.

    Args:
        path: TOML file; None for none.
        env: variables; ``KVTIERD_CPU_CAPACITY=2GiB`` sets ``cpu.capacity``. Defaults to the process's.
        flags: dotted keys to values, for example ``{"cpu.capacity": "2GiB"}``; None values are skipped.

    Raises:
        ConfigError: with the key, the reason and a suggestion.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text())
        except OSError as e:
            raise ConfigError(f"cannot read the configuration {path}: {e.strerror}") from e
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise ConfigError(f"{path} is not valid TOML: {e}") from e
    for key, value in _from_env(os.environ if env is None else env):
        _put(data, key, value)
    for key, value in (flags or {}).items():
        if value is not None:
            _put(data, key, value)
    try:
        return Config.model_validate(data)
    except ValidationError as e:
        raise ConfigError(_explain(e)) from e


_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP)|$)")
"""What Kubernetes sets for a Service that is called kvtierd."""
_NOT_CONFIG = frozenset(["KVTIERD_CONFIG", "KVTIERD_ADDRESS"])


def _from_env(env: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    known = {"KVTIERD_" + key.replace(".", "_").upper(): key for key, _ in field_paths() if ".NAME." not in key}
    for name, text in env.items():
        if (
            not name.startswith("KVTIERD_")
            or _SERVICE_LINK.search(name)
            or name in _NOT_CONFIG
            or name.startswith("KVTIERD_COMPLETE")
        ):
            continue
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(f"unknown variable {name}" + (f"; did you mean {near[0]}?" if near else ""))
        key = known[name]
        yield key, text.split(os.pathsep) if key == "nvme.folders" else int(text, 8) if key == "server.socket_mode" else text


def _put(data: dict[str, Any], dotted: str, value: object) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{parent} is a table, not a value")
    data[last] = value


def _explain(error: ValidationError) -> str:
    known = [key for key, _ in field_paths()]
    lines = []
    for item in error.errors():
        key = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, known, 1) or difflib.get_close_matches(key, {k.split(".")[0] for k in known}, 1)
            lines.append(f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))
        else:
            text = item["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {text}" if key else text)
    return "\n".join(lines)
