from kvtierd.v1 import kvtier_pb2 as _kvtier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TenantClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENANT_CLASS_UNSPECIFIED: _ClassVar[TenantClass]
    TENANT_CLASS_PREMIUM: _ClassVar[TenantClass]
    TENANT_CLASS_STANDARD: _ClassVar[TenantClass]
    TENANT_CLASS_BASIC: _ClassVar[TenantClass]

class TenantScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENANT_SCOPE_UNSPECIFIED: _ClassVar[TenantScope]
    TENANT_SCOPE_PRIVATE: _ClassVar[TenantScope]
    TENANT_SCOPE_SHARED: _ClassVar[TenantScope]
TENANT_CLASS_UNSPECIFIED: TenantClass
TENANT_CLASS_PREMIUM: TenantClass
TENANT_CLASS_STANDARD: TenantClass
TENANT_CLASS_BASIC: TenantClass
TENANT_SCOPE_UNSPECIFIED: TenantScope
TENANT_SCOPE_PRIVATE: TenantScope
TENANT_SCOPE_SHARED: TenantScope

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "reserved_bytes", "used_bytes", "copies", "dirty_bytes", "pinned_bytes", "path", "suspended", "configured_bytes", "folders", "encrypted")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SUSPENDED_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FOLDERS_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTED_FIELD_NUMBER: _ClassVar[int]
    tier: _kvtier_pb2.Tier
    capacity_bytes: int
    reserved_bytes: int
    used_bytes: int
    copies: int
    dirty_bytes: int
    pinned_bytes: int
    path: str
    suspended: str
    configured_bytes: int
    folders: _containers.RepeatedCompositeFieldContainer[FolderStatus]
    encrypted: bool
    def __init__(self, tier: _Optional[_Union[_kvtier_pb2.Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., copies: _Optional[int] = ..., dirty_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., path: _Optional[str] = ..., suspended: _Optional[str] = ..., configured_bytes: _Optional[int] = ..., folders: _Optional[_Iterable[_Union[FolderStatus, _Mapping]]] = ..., encrypted: bool = ...) -> None: ...

class FolderStatus(_message.Message):
    __slots__ = ("path", "problem")
    PATH_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    path: str
    problem: str
    def __init__(self, path: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("tenant", "blocks", "used_bytes", "quota_bytes", "hits", "misses", "limits", "tenant_class")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TENANT_CLASS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    blocks: int
    used_bytes: _containers.RepeatedScalarFieldContainer[int]
    quota_bytes: _containers.RepeatedScalarFieldContainer[int]
    hits: int
    misses: int
    limits: _containers.RepeatedCompositeFieldContainer[TenantTier]
    tenant_class: TenantClass
    def __init__(self, tenant: _Optional[str] = ..., blocks: _Optional[int] = ..., used_bytes: _Optional[_Iterable[int]] = ..., quota_bytes: _Optional[_Iterable[int]] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., limits: _Optional[_Iterable[_Union[TenantTier, _Mapping]]] = ..., tenant_class: _Optional[_Union[TenantClass, str]] = ...) -> None: ...

class TenantTier(_message.Message):
    __slots__ = ("tier", "quota_bytes", "reserve_bytes", "used_bytes", "evictions")
    class EvictionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIER_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    tier: _kvtier_pb2.Tier
    quota_bytes: int
    reserve_bytes: int
    used_bytes: int
    evictions: _containers.ScalarMap[str, int]
    def __init__(self, tier: _Optional[_Union[_kvtier_pb2.Tier, str]] = ..., quota_bytes: _Optional[int] = ..., reserve_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., evictions: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("id", "client_name", "tenant", "model", "fingerprint", "processes", "tickets", "ticket_bytes", "age_s", "pid", "devices", "no_device")
    ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    TICKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    NO_DEVICE_FIELD_NUMBER: _ClassVar[int]
    id: str
    client_name: str
    tenant: str
    model: str
    fingerprint: str
    processes: int
    tickets: int
    ticket_bytes: int
    age_s: float
    pid: int
    devices: str
    no_device: str
    def __init__(self, id: _Optional[str] = ..., client_name: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., processes: _Optional[int] = ..., tickets: _Optional[int] = ..., ticket_bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., pid: _Optional[int] = ..., devices: _Optional[str] = ..., no_device: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("boot_epoch", "version", "uptime_s", "tiers", "tenants", "sessions", "counters", "blocks", "draining", "tenant_problems")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TenantProblemsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TENANT_PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    version: str
    uptime_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    counters: _containers.ScalarMap[str, float]
    blocks: int
    draining: bool
    tenant_problems: _containers.ScalarMap[str, str]
    def __init__(self, boot_epoch: _Optional[int] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, float]] = ..., blocks: _Optional[int] = ..., draining: bool = ..., tenant_problems: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetConfigRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetConfigResponse(_message.Message):
    __slots__ = ("toml",)
    TOML_FIELD_NUMBER: _ClassVar[int]
    toml: str
    def __init__(self, toml: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s", "resume")
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    resume: bool
    def __init__(self, timeout_s: _Optional[float] = ..., resume: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("dirty_bytes",)
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    dirty_bytes: int
    def __init__(self, dirty_bytes: _Optional[int] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("copies",)
    COPIES_FIELD_NUMBER: _ClassVar[int]
    copies: int
    def __init__(self, copies: _Optional[int] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("tenant", "tier", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tier: _kvtier_pb2.Tier
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., tier: _Optional[_Union[_kvtier_pb2.Tier, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("key", "tenant", "fingerprint", "bytes", "states", "pins", "idle_s", "expires_in_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    tenant: str
    fingerprint: bytes
    bytes: int
    states: _containers.RepeatedScalarFieldContainer[str]
    pins: int
    idle_s: float
    expires_in_s: float
    def __init__(self, key: _Optional[bytes] = ..., tenant: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., bytes: _Optional[int] = ..., states: _Optional[_Iterable[str]] = ..., pins: _Optional[int] = ..., idle_s: _Optional[float] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class ListBlocksResponse(_message.Message):
    __slots__ = ("blocks", "next_page_token")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    next_page_token: str
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GetStoryRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    def __init__(self, key: _Optional[bytes] = ...) -> None: ...

class StoryEvent(_message.Message):
    __slots__ = ("at_s", "key", "tier", "to", "why")
    AT_S_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    at_s: float
    key: bytes
    tier: _kvtier_pb2.Tier
    to: str
    why: str
    def __init__(self, at_s: _Optional[float] = ..., key: _Optional[bytes] = ..., tier: _Optional[_Union[_kvtier_pb2.Tier, str]] = ..., to: _Optional[str] = ..., why: _Optional[str] = ..., **kwargs) -> None: ...

class GetStoryResponse(_message.Message):
    __slots__ = ("events", "block")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[StoryEvent]
    block: BlockInfo
    def __init__(self, events: _Optional[_Iterable[_Union[StoryEvent, _Mapping]]] = ..., block: _Optional[_Union[BlockInfo, _Mapping]] = ...) -> None: ...

class EvictBlocksRequest(_message.Message):
    __slots__ = ("tenant", "fingerprint", "keys", "tier", "idle_s", "all")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    fingerprint: bytes
    keys: bytes
    tier: _kvtier_pb2.Tier
    idle_s: float
    all: bool
    def __init__(self, tenant: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tier: _Optional[_Union[_kvtier_pb2.Tier, str]] = ..., idle_s: _Optional[float] = ..., all: bool = ...) -> None: ...

class EvictBlocksResponse(_message.Message):
    __slots__ = ("evicted", "evicted_pinned", "evicted_in_use")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PINNED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_IN_USE_FIELD_NUMBER: _ClassVar[int]
    evicted: int
    evicted_pinned: int
    evicted_in_use: int
    def __init__(self, evicted: _Optional[int] = ..., evicted_pinned: _Optional[int] = ..., evicted_in_use: _Optional[int] = ...) -> None: ...

class PinBlocksRequest(_message.Message):
    __slots__ = ("keys", "tenant", "expires_s")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    tenant: str
    expires_s: float
    def __init__(self, keys: _Optional[bytes] = ..., tenant: _Optional[str] = ..., expires_s: _Optional[float] = ...) -> None: ...

class PinBlocksResponse(_message.Message):
    __slots__ = ("ticket", "pinned")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    pinned: int
    def __init__(self, ticket: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ("tenant", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class PinInfo(_message.Message):
    __slots__ = ("ticket", "key", "tenant", "fingerprint", "tier", "bytes", "expires_in_s", "evicted")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    key: bytes
    tenant: str
    fingerprint: bytes
    tier: _kvtier_pb2.Tier
    bytes: int
    expires_in_s: float
    evicted: bool
    def __init__(self, ticket: _Optional[int] = ..., key: _Optional[bytes] = ..., tenant: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., tier: _Optional[_Union[_kvtier_pb2.Tier, str]] = ..., bytes: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., evicted: bool = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("pins", "next_page_token")
    PINS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[PinInfo]
    next_page_token: str
    def __init__(self, pins: _Optional[_Iterable[_Union[PinInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UnpinBlocksRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class UnpinBlocksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Amount(_message.Message):
    __slots__ = ("bytes", "share", "unlimited")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    UNLIMITED_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    share: float
    unlimited: bool
    def __init__(self, bytes: _Optional[int] = ..., share: _Optional[float] = ..., unlimited: bool = ...) -> None: ...

class OwnTtl(_message.Message):
    __slots__ = ("seconds", "never", "of_tier")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NEVER_FIELD_NUMBER: _ClassVar[int]
    OF_TIER_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    never: bool
    of_tier: bool
    def __init__(self, seconds: _Optional[float] = ..., never: bool = ..., of_tier: bool = ...) -> None: ...

class TierLimits(_message.Message):
    __slots__ = ("quota", "reserve", "ttl")
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    quota: Amount
    reserve: Amount
    ttl: OwnTtl
    def __init__(self, quota: _Optional[_Union[Amount, _Mapping]] = ..., reserve: _Optional[_Union[Amount, _Mapping]] = ..., ttl: _Optional[_Union[OwnTtl, _Mapping]] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("hbm", "cpu", "nvme", "tenant_class", "scope", "write_budget_share")
    HBM_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    NVME_FIELD_NUMBER: _ClassVar[int]
    TENANT_CLASS_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUDGET_SHARE_FIELD_NUMBER: _ClassVar[int]
    hbm: TierLimits
    cpu: TierLimits
    nvme: TierLimits
    tenant_class: TenantClass
    scope: TenantScope
    write_budget_share: float
    def __init__(self, hbm: _Optional[_Union[TierLimits, _Mapping]] = ..., cpu: _Optional[_Union[TierLimits, _Mapping]] = ..., nvme: _Optional[_Union[TierLimits, _Mapping]] = ..., tenant_class: _Optional[_Union[TenantClass, str]] = ..., scope: _Optional[_Union[TenantScope, str]] = ..., write_budget_share: _Optional[float] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("tenant", "page_size", "page_token")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    page_size: int
    page_token: str
    def __init__(self, tenant: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class TenantInfo(_message.Message):
    __slots__ = ("tenant", "limits", "tiers", "source", "blocks", "hits", "misses", "sessions", "problem")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limits: TenantLimits
    tiers: _containers.RepeatedCompositeFieldContainer[TenantTier]
    source: str
    blocks: int
    hits: int
    misses: int
    sessions: int
    problem: str
    def __init__(self, tenant: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., tiers: _Optional[_Iterable[_Union[TenantTier, _Mapping]]] = ..., source: _Optional[str] = ..., blocks: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., sessions: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants", "next_page_token")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantInfo]
    next_page_token: str
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SetTenantRequest(_message.Message):
    __slots__ = ("tenant", "limits", "reset")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    limits: TenantLimits
    reset: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tenant: _Optional[str] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., reset: _Optional[_Iterable[str]] = ...) -> None: ...

class SetTenantResponse(_message.Message):
    __slots__ = ("tenant", "kept")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    tenant: TenantInfo
    kept: bool
    def __init__(self, tenant: _Optional[_Union[TenantInfo, _Mapping]] = ..., kept: bool = ...) -> None: ...

class RemoveTenantRequest(_message.Message):
    __slots__ = ("tenant", "evict", "force")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    evict: bool
    force: bool
    def __init__(self, tenant: _Optional[str] = ..., evict: bool = ..., force: bool = ...) -> None: ...

class RemoveTenantResponse(_message.Message):
    __slots__ = ("evicted", "configured")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    evicted: int
    configured: bool
    def __init__(self, evicted: _Optional[int] = ..., configured: bool = ...) -> None: ...

class GetReuseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReuseDistance(_message.Message):
    __slots__ = ("upper_bytes", "uses")
    UPPER_BYTES_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    upper_bytes: int
    uses: float
    def __init__(self, upper_bytes: _Optional[int] = ..., uses: _Optional[float] = ...) -> None: ...

class GetReuseResponse(_message.Message):
    __slots__ = ("distances", "cold_uses", "found_uses", "added_uses", "sampled", "continued_requests", "new_requests", "lost_requests", "block_tokens")
    DISTANCES_FIELD_NUMBER: _ClassVar[int]
    COLD_USES_FIELD_NUMBER: _ClassVar[int]
    FOUND_USES_FIELD_NUMBER: _ClassVar[int]
    ADDED_USES_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NEW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LOST_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    distances: _containers.RepeatedCompositeFieldContainer[ReuseDistance]
    cold_uses: float
    found_uses: float
    added_uses: float
    sampled: float
    continued_requests: float
    new_requests: float
    lost_requests: float
    block_tokens: int
    def __init__(self, distances: _Optional[_Iterable[_Union[ReuseDistance, _Mapping]]] = ..., cold_uses: _Optional[float] = ..., found_uses: _Optional[float] = ..., added_uses: _Optional[float] = ..., sampled: _Optional[float] = ..., continued_requests: _Optional[float] = ..., new_requests: _Optional[float] = ..., lost_requests: _Optional[float] = ..., block_tokens: _Optional[int] = ...) -> None: ...
