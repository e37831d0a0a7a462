"""Configuration: one TOML file, ``KVTIERD_*`` variables and flags, in rising order.

Every key has a unit in its type: sizes are bytes ("256MiB", "1GiB", 4096), durations are seconds ("30s", "10min", 2.5).
Unknown keys are errors with a suggestion. ``docs`` and ``kvtierd config`` are generated from the field descriptions.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from kvtierd.cuda import PIECE_BYTES
from kvtierd.errors import ConfigError
from kvtierd.tenant_config import Capacities, TenantConfig, check_tenants, fault_text, name_problem
from kvtierd.units import (
    MAX_DURATION_S,
    is_loopback,
    parse_address,
    parse_duration,
    parse_endpoint,
    parse_group,
    parse_mode,
    parse_size,
    parse_ttl,
    parse_user,
    shown,
)

__all__ = [
    "MAX_DURATION_S", "Config", "CpuConfig", "Duration", "EventsConfig", "Group", "HbmConfig", "LogConfig",
    "Mode", "NvmeConfig", "OptionalDuration", "PolicyConfig", "ServerConfig", "Size", "TenantConfig", "TracingConfig", "User",
    "field_paths", "load_config", "parse_address", "parse_duration", "parse_mode", "parse_size", "parse_ttl", "value_of",
]  # fmt: skip

MAX_DEADLINE_S: Final = 86400.0
MAX_FILE_BYTES: Final = 8 << 20
"""As many tenants as there may be take less."""
MAX_TOLD: Final = 20
"""Faults of one configuration that are told."""
MAX_KEY_CHARS: Final = 200
MAX_ALLOWED: Final = 128
"""Users, and groups, that the sockets let in."""


def _plain_number(value: object, field: FieldInfo) -> object:
    """Check a number without a unit against the limits of its key. Raises ValueError that names them."""
    whole = field.annotation is int
    limits = {name: limit for m in field.metadata for name in ("ge", "gt", "le") if (limit := getattr(m, name, None)) is not None}
    number = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            number = int(value) if whole else float(value)
    fits = (
        isinstance(number, int | float)
        and not isinstance(number, bool)
        and limits.get("ge", number) <= number <= limits["le"]  # false for nan
        and ("gt" not in limits or number > limits["gt"])
        and not (whole and number % 1)
    )
    if not fits:
        span = f"above {limits['gt']} up to" if "gt" in limits else f"from {limits['ge']} to"
        raise ValueError(f"{shown(value)} is not possible; write a {'whole ' * whole}number {span} {limits['le']}")
    return number


Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
OptionalDuration = Annotated[float | None, BeforeValidator(parse_ttl)]
Mode = Annotated[int, BeforeValidator(parse_mode)]
User = Annotated[int, BeforeValidator(parse_user)]
Group = Annotated[int, BeforeValidator(parse_group)]


class _Section(BaseModel):
    """A table of the configuration. Sizes, durations and permissions are read by their types; every other number has limits."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _number_fits(cls, value: object, info: ValidationInfo) -> object:
        if any(isinstance(text, str) and "\0" in text for text in (value if isinstance(value, list) else [value])):
            raise ValueError("no text here may have a NUL character")
        field = cls.model_fields[info.field_name or ""]
        read_by_type = any(isinstance(m, BeforeValidator) for m in field.metadata)
        return value if read_by_type or field.annotation not in (int, float) else _plain_number(value, field)


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtierd"


def _runtime_dir() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvtierd" if base else Path(f"/tmp/kvtierd-{os.getuid()}")  # noqa: S108 - private folder, mode checked


class HbmConfig(_Section):
    """GPU memory tier, for engines on GPUs of this host. Needs the NVIDIA driver, and nothing else."""

    capacity: Size = Field(0, description="Bytes of the pool on each GPU; 0 switches the tier off.")
    devices: list[str] = Field(
        default_factory=list,
        max_length=64,
        description="GPUs, by number or UUID, that have a pool; empty for all that the daemon may see.",
    )
    extent: Size = Field(0, description="Bytes of one extent; 0 means 1/16 of the capacity, from 2 MiB to 256 MiB.")
    ttl: OptionalDuration = Field(30.0, description='Idle time after which a copy moves down; "never" for none.')

    @property
    def pool_bytes(self) -> int:
        """Capacity of each GPU in whole pieces of its memory."""
        return self.capacity // PIECE_BYTES * PIECE_BYTES

    @property
    def extent_bytes(self) -> int:
        """Bytes of one extent with the default worked out, in whole pieces."""
        wanted = self.extent or min(256 << 20, self.capacity // 16)
        return max(wanted // PIECE_BYTES, 1) * PIECE_BYTES


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
    huge_pages: bool = Field(
        True, description="Have the kernel gather prefaulted memory in huge pages (Linux 6.1), whatever its own setting."
    )
    keep: str = Field(
        "", description="Where blocks in memory wait over a restart: `systemd`, a folder on tmpfs, or empty for nowhere."
    )

    @field_validator("keep")
    @classmethod
    def _is_place(cls, value: str) -> str:
        if value not in ("", "systemd") and not value.startswith("/"):
            raise ValueError(f'{shown(value)} is not possible; write "systemd", a folder\'s absolute path, or "" for nowhere')
        return value

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
    io: Literal["auto", "threads", "kvikio"] = Field("auto", description="I/O engine; auto means threads.")
    direct: Literal["auto", "require", "off"] = Field(
        "auto", description="O_DIRECT: probe for it, insist on it, or use the page cache."
    )
    gds: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Blocks between GPU memory and NVMe without CPU memory: auto where GPUDirect Storage works and is not "
        "slower, both tried out; on also by kvikio alone, and no start where that fails.",
    )
    gds_timeout: Duration = Field(10.0, description="Time after which such a transfer is taken to hang.")
    encryption_key_file: Path | None = Field(
        None, description="File with a key of 256 bits, in hex or base64, that blocks are encrypted with; not set: they are not."
    )
    encryption_key_command: str = Field(
        "", description="Command (no shell) whose output is that key, such as one of a key management service."
    )
    allow_volatile: bool = Field(False, description="Accept a folder on tmpfs or overlayfs.")
    max_bytes_in_flight: Size = Field(256 << 20, description="Bytes that may move from or to NVMe at one time, each way.")
    snapshot_journal: Size = Field(64 << 20, description="Journal size at which a snapshot is written.")
    admission: Literal["all", "second-use"] = Field(
        "all",
        description="What is written once the tier is full: every block, or those that are used a second time.",
    )
    second_use_window: Duration = Field(1800.0, description="Time within which a second use counts.")
    write_budget: Size = Field(
        0, description="Bytes a day; when they are used up, only what is used a second time is written. 0 means no limit."
    )

    @property
    def segment_bytes(self) -> int:
        """Bytes of one segment with the default worked out."""
        return self.segment or min(256 << 20, max(4 << 20, self.capacity // 16))

    @property
    def block_bytes(self) -> int:
        """What blocks may take of the capacity; the rest is for journals and snapshots."""
        return self.capacity - min(self.capacity // 32, max(16 * self.snapshot_journal, 1 << 30))


class PolicyConfig(_Section):
    """Order in which copies leave a tier."""

    eviction: Literal["lru", "arc"] = Field("lru", description="Least recently used first, or adaptive (ARC).")
    turn_bonus: Duration = Field(
        0.0, description="Blocks of requests that match at least two known ones count as used so much later; with lru only."
    )
    fair_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of a full tier beyond which a tenant evicts its own blocks, unless others are idle.",
    )


class ServerConfig(_Section):
    """Sockets and limits."""

    socket: Path = Field(default_factory=lambda: _runtime_dir() / "kvtierd.sock", description="Unix socket of the gRPC API.")
    descriptor_socket: Path | None = Field(None, description="Unix socket for descriptors; next to the gRPC socket when not set.")
    socket_mode: Mode = Field(0o600, description="Permissions of both sockets.")
    allow_users: list[User] = Field(
        default_factory=list,
        max_length=MAX_ALLOWED,
        description="Users (names or numbers) who may use both sockets beside the daemon's own and root; with socket_mode 0o600.",
    )
    allow_groups: list[Group] = Field(
        default_factory=list, max_length=MAX_ALLOWED, description="Groups (names or numbers) whose members may use them too."
    )
    token_file: Path | None = Field(
        None, description="TOML file of bearer tokens, read again when it changes; not set: no tokens are asked for."
    )
    unix_tokens: Literal["all", "admin", "none"] = Field(
        "all",
        description="Which calls on the unix socket need a token, where there is a token_file; on TCP all do.",
    )
    listen: str | None = Field(None, description='TCP address such as "0.0.0.0:9460"; needs tls_* or insecure.')
    insecure: bool = Field(False, description="Allow TCP without TLS.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain.")
    tls_key: Path | None = Field(None, description="PEM private key.")
    tls_client_ca: Path | None = Field(None, description="PEM CA that client certificates must be signed by (mTLS).")
    metrics: str = Field("127.0.0.1:9464", description='Address of /metrics, /healthz and /readyz; "" switches it off.')
    max_sessions: int = Field(1024, ge=1, le=65536, description="Most sessions at one time.")
    max_concurrent_calls: int = Field(1024, ge=1, le=1_000_000, description="Most calls in progress; more are refused at once.")
    max_tickets: int = Field(4096, ge=1, le=1_000_000, description="Most open tickets of one session.")
    max_ticket_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Most of the CPU tier for one session's tickets; most of a tier, and of a tenant's part of it, for pins.",
    )
    max_deadline: Duration = Field(300.0, description="Longest deadline or wait of a call; at most 1 day.")
    drain_timeout: Duration = Field(30.0, description="Longest time that a SIGTERM waits for blocks to reach NVMe.")

    @field_validator("listen", "metrics")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value:
            parse_address(value)
        return value

    @field_validator("max_deadline")
    @classmethod
    def _deadline_fits(cls, value: float) -> float:
        if not 0 < value <= MAX_DEADLINE_S:
            raise ValueError(f"{value:g} s is not possible; write a duration above 0 up to 1 day")
        return value

    @property
    def fd_socket(self) -> Path:
        """Descriptor socket with the default worked out."""
        return self.descriptor_socket or self.socket.with_name(self.socket.stem + ".fd.sock")


class LogConfig(_Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is written.")
    json_lines: bool = Field(False, description="One JSON object a line instead of text.")
    slow: Duration = Field(1.0, description="Calls and moves that take longer are told as warnings; 0 tells none.")


class EventsConfig(_Section):
    """KV events over ZeroMQ, for routers that send requests to where their blocks are. Needs the extra ``kvtierd[events]``."""

    endpoint: str | None = Field(
        None, description='Where subscribers connect, such as "ipc:///run/kvtierd/events.sock"; not set: no events.'
    )
    replay_endpoint: str | None = Field(None, description="Where they ask again for what they have missed; not set: nowhere.")
    topic: str = Field("", max_length=255, description="Topic of all messages.")
    buffer: Size = Field(64 << 20, description="Bytes of past messages that are kept to be asked for.")
    insecure: bool = Field(False, description="Allow endpoints that other machines reach; there is no encryption.")

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _is_endpoint(cls, value: str | None) -> str | None:
        if value is not None:
            parse_endpoint(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> EventsConfig:
        if self.replay_endpoint and not self.endpoint:
            raise ValueError("events.replay_endpoint is set, but no events are published; set events.endpoint too")
        if self.endpoint and self.endpoint == self.replay_endpoint:
            raise ValueError("events.endpoint and events.replay_endpoint are the same; give them two paths or ports")
        for text in (self.endpoint, self.replay_endpoint):
            place = parse_endpoint(text) if text else None
            if isinstance(place, tuple) and not self.insecure and not is_loopback(place[0]):
                raise ValueError(f"other machines can reach {text}; name a loopback address, or set events.insecure = true")
        return self


class TracingConfig(_Section):
    """OpenTelemetry spans of calls that clients trace. Needs the extra ``kvtierd[otel]``."""

    endpoint: str | None = Field(None, description='OTLP collector, such as "http://127.0.0.1:4317"; not set: no spans.')
    protocol: Literal["grpc", "http"] = Field("grpc", description="OTLP over gRPC, or over HTTP with its whole URL as endpoint.")

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None and not re.match("https?://.", value):
            raise ValueError(f'{shown(value)} is no URL; write for example "http://127.0.0.1:4317"')
        return value


class Config(_Section):
    """The whole configuration."""

    hbm: HbmConfig = Field(default_factory=HbmConfig)
    cpu: CpuConfig = Field(default_factory=CpuConfig)
    nvme: NvmeConfig = Field(default_factory=NvmeConfig)
    policy: PolicyConfig = Field(default_factory=PolicyConfig)
    server: ServerConfig = Field(default_factory=ServerConfig)
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    log: LogConfig = Field(default_factory=LogConfig)
    events: EventsConfig = Field(default_factory=EventsConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if 0 < self.hbm.capacity < PIECE_BYTES:
            raise ValueError("hbm.capacity is below 2MiB; raise it, or set it to 0 for no HBM tier")
        if self.hbm.capacity and self.hbm.extent_bytes > self.hbm.pool_bytes:
            raise ValueError("hbm.extent is larger than hbm.capacity")
        if self.nvme.capacity and self.nvme.capacity < 4 << 20:
            raise ValueError("nvme.capacity is below 4MiB; raise it, or set it to 0 for no NVMe tier")
        if self.cpu.capacity < 1 << 20:
            raise ValueError("cpu.capacity is below 1MiB; blocks pass through CPU memory on every path")
        if self.cpu.extent_bytes > self.cpu.capacity:
            raise ValueError("cpu.extent is larger than cpu.capacity")
        if self.nvme.capacity and not self.nvme.folders:
            raise ValueError('nvme.folders is empty; name at least one folder or set nvme.capacity to "0"')
        if self.nvme.capacity and len(set(self.nvme.folders)) < len(self.nvme.folders):
            raise ValueError("nvme.folders names a folder twice; name each once")
        if self.nvme.capacity and self.nvme.segment_bytes > self.nvme.capacity:
            raise ValueError("nvme.segment is larger than nvme.capacity")
        if self.nvme.encryption_key_file and self.nvme.encryption_key_command:
            raise ValueError("nvme.encryption_key_file and nvme.encryption_key_command are both set; leave one of them out")
        if self.nvme.gds == "on" and not (self.hbm.capacity and self.nvme.capacity):
            raise ValueError('nvme.gds = "on" needs both tiers; set hbm.capacity and nvme.capacity, or nvme.gds to "auto"')
        if self.nvme.gds == "on" and (self.nvme.encryption_key_file or self.nvme.encryption_key_command):
            raise ValueError('nvme.gds = "on" cannot be with encryption, which CPUs do; set nvme.gds to "auto", or set no key')
        if self.nvme.gds_timeout < 1:
            raise ValueError("nvme.gds_timeout is below 1s; raise it")
        if self.policy.eviction == "arc" and self.policy.turn_bonus:
            raise ValueError('policy.turn_bonus goes with policy.eviction = "lru"; set one of them back')
        if bool(self.server.tls_cert) != bool(self.server.tls_key):
            raise ValueError("server.tls_cert and server.tls_key go together")
        for name in self.tenants:
            if problem := name_problem(name):
                raise ValueError(f"tenants.{name[:80]!r}: {problem}")
        if self.server.tls_client_ca and not self.server.tls_cert:
            raise ValueError("server.tls_client_ca is for TLS; set server.tls_cert and server.tls_key too")
        if self.server.listen and not (self.server.tls_cert or self.server.insecure):
            raise ValueError("server.listen needs server.tls_cert and server.tls_key, or server.insecure = true")
        if (self.server.allow_users or self.server.allow_groups) and self.server.socket_mode & 0o077:
            raise ValueError(
                "server.socket_mode lets in users whom server.allow_users and server.allow_groups do not name; "
                "set it to 0o600, or leave the lists out"
            )
        check_tenants(self.tenants, self.block_bytes)
        return self

    @property
    def block_bytes(self) -> Capacities:
        """What blocks may take of each tier; of the HBM tier None where that depends on how many GPUs there are."""
        count = len(set(self.hbm.devices)) if self.hbm.devices or not self.hbm.capacity else None
        return None if count is None else count * self.hbm.pool_bytes, self.cpu.capacity, self.nvme.block_bytes


def field_paths(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All dotted keys with their pydantic field, in order; tenants appear as ``tenants.NAME.key``."""
    for name, info in model.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from field_paths(annotation, f"{prefix}{name}.")
        elif name == "tenants":
            yield from field_paths(TenantConfig, f"{prefix}{name}.NAME.")
        else:
            yield prefix + (info.alias or name), info


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
            with path.open("rb") as f:
                raw = f.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; is it kvtierd's configuration?")
            data = tomllib.loads(raw.decode())
        except OSError as e:
            raise ConfigError(f"cannot read the configuration {path}: {e.strerror}") from e
        except (ValueError, RecursionError) as e:  # of TOML, of UTF-8, of numbers that are too long
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
_NOT_CONFIG = frozenset(["KVTIERD_CONFIG", "KVTIERD_ADDRESS", "KVTIERD_TOKEN_FILE"])
_LISTS: Final = {
    "nvme.folders": ("folders", f"/mnt/nvme0/kvtierd{os.pathsep}/mnt/nvme1/kvtierd"),
    "server.allow_users": ("users", f"vllm{os.pathsep}1001"),
    "server.allow_groups": ("groups", f"vllm{os.pathsep}1001"),
}
"""Keys whose values are lists: of what, and an example."""


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
        try:
            yield key, value_of(key, text)
        except ValueError as e:
            raise ConfigError(f"{name}: {e}") from e


def value_of(key: str, text: str) -> object:
    """The value of a key that a variable or a flag gives as text: a list is separated by colons, all else is read later.

    Raises:
        ValueError: the text is no list; says what to write.
    """
    if key not in _LISTS:
        return text
    entries, example = _LISTS[key]
    how = f"separate {entries} by {os.pathsep!r}, for example {example}"
    if text.lstrip().startswith(("[", '"', "'")):
        raise ValueError(f"{text!r} looks like TOML; {how}")
    parts = text.split(os.pathsep)
    if not all(part.strip() for part in parts):
        raise ValueError(f"{text!r} has an empty entry; {how}")
    return parts


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
    found = error.errors()
    for item in found[:MAX_TOLD]:
        key = ".".join(str(p) for p in item["loc"])[:MAX_KEY_CHARS]
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, known, 1) or difflib.get_close_matches(key, {k.split(".")[0] for k in known}, 1)
            lines.append(f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))
        else:
            text = fault_text(item)
            lines.append(f"{key}: {text}" if key else text)
    if len(found) > MAX_TOLD:
        lines.append(f"and {len(found) - MAX_TOLD} more")
    return "\n".join(lines)
