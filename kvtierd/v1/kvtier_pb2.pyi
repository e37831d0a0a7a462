from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_CPU: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_KEY: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_MANY_KEYS: _ClassVar[ErrorReason]
    ERROR_REASON_PROTOCOL_VERSION: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_LAYOUT: _ClassVar[ErrorReason]
    ERROR_REASON_LAYOUT_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_SESSION: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_TICKET: _ClassVar[ErrorReason]
    ERROR_REASON_PERMISSION: _ClassVar[ErrorReason]
    ERROR_REASON_BUSY: _ClassVar[ErrorReason]
    ERROR_REASON_QUOTA: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_LARGE: _ClassVar[ErrorReason]
    ERROR_REASON_LIMIT: _ClassVar[ErrorReason]
    ERROR_REASON_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE: _ClassVar[ErrorReason]
    ERROR_REASON_IO: _ClassVar[ErrorReason]
    ERROR_REASON_CORRUPT: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_OVERLOADED: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]

class SaveOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAVE_OUTCOME_UNSPECIFIED: _ClassVar[SaveOutcome]
    SAVE_OUTCOME_GRANTED: _ClassVar[SaveOutcome]
    SAVE_OUTCOME_HELD: _ClassVar[SaveOutcome]
    SAVE_OUTCOME_IN_PROGRESS: _ClassVar[SaveOutcome]
    SAVE_OUTCOME_BUSY: _ClassVar[SaveOutcome]
    SAVE_OUTCOME_QUOTA: _ClassVar[SaveOutcome]
    SAVE_OUTCOME_TOO_LARGE: _ClassVar[SaveOutcome]
    SAVE_OUTCOME_DRAINING: _ClassVar[SaveOutcome]
    SAVE_OUTCOME_LIMIT: _ClassVar[SaveOutcome]
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_CPU: Tier
TIER_NVME: Tier
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_BAD_REQUEST: ErrorReason
ERROR_REASON_BAD_KEY: ErrorReason
ERROR_REASON_TOO_MANY_KEYS: ErrorReason
ERROR_REASON_PROTOCOL_VERSION: ErrorReason
ERROR_REASON_UNKNOWN_LAYOUT: ErrorReason
ERROR_REASON_LAYOUT_MISMATCH: ErrorReason
ERROR_REASON_UNKNOWN_SESSION: ErrorReason
ERROR_REASON_UNKNOWN_TICKET: ErrorReason
ERROR_REASON_PERMISSION: ErrorReason
ERROR_REASON_BUSY: ErrorReason
ERROR_REASON_QUOTA: ErrorReason
ERROR_REASON_TOO_LARGE: ErrorReason
ERROR_REASON_LIMIT: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_DEADLINE: ErrorReason
ERROR_REASON_IO: ErrorReason
ERROR_REASON_CORRUPT: ErrorReason
ERROR_REASON_NOT_FOUND: ErrorReason
ERROR_REASON_OVERLOADED: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
SAVE_OUTCOME_UNSPECIFIED: SaveOutcome
SAVE_OUTCOME_GRANTED: SaveOutcome
SAVE_OUTCOME_HELD: SaveOutcome
SAVE_OUTCOME_IN_PROGRESS: SaveOutcome
SAVE_OUTCOME_BUSY: SaveOutcome
SAVE_OUTCOME_QUOTA: SaveOutcome
SAVE_OUTCOME_TOO_LARGE: SaveOutcome
SAVE_OUTCOME_DRAINING: SaveOutcome
SAVE_OUTCOME_LIMIT: SaveOutcome

class Namespace(_message.Message):
    __slots__ = ("model", "revision", "kv_dtype", "kv_layout", "attention", "block_tokens", "num_layers", "num_kv_heads", "head_size", "tp_size", "pp_size", "dcp_size", "shard_bytes", "hash_algorithm", "extra")
    class ExtraEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DCP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    kv_dtype: str
    kv_layout: str
    attention: str
    block_tokens: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    tp_size: int
    pp_size: int
    dcp_size: int
    shard_bytes: _containers.RepeatedScalarFieldContainer[int]
    hash_algorithm: str
    extra: _containers.ScalarMap[str, str]
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., attention: _Optional[str] = ..., block_tokens: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., tp_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., dcp_size: _Optional[int] = ..., shard_bytes: _Optional[_Iterable[int]] = ..., hash_algorithm: _Optional[str] = ..., extra: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "call")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    call: Call
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("welcome", "reply", "event")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    reply: Reply
    event: Event
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., reply: _Optional[_Union[Reply, _Mapping]] = ..., event: _Optional[_Union[Event, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "namespace", "tenant", "client_name", "pins_memory", "bytes_only", "pid")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PINS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    BYTES_ONLY_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    namespace: Namespace
    tenant: str
    client_name: str
    pins_memory: bool
    bytes_only: bool
    pid: int
    def __init__(self, protocol_version: _Optional[int] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., tenant: _Optional[str] = ..., client_name: _Optional[str] = ..., pins_memory: bool = ..., bytes_only: bool = ..., pid: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("session", "boot_epoch", "protocol_version", "descriptor_socket", "fingerprint", "slot_bytes", "limits", "daemon_version")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_SOCKET_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    boot_epoch: int
    protocol_version: int
    descriptor_socket: str
    fingerprint: bytes
    slot_bytes: _containers.RepeatedScalarFieldContainer[int]
    limits: Limits
    daemon_version: str
    def __init__(self, session: _Optional[bytes] = ..., boot_epoch: _Optional[int] = ..., protocol_version: _Optional[int] = ..., descriptor_socket: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., slot_bytes: _Optional[_Iterable[int]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., daemon_version: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_keys", "max_tickets", "max_deadline_ms", "max_ticket_bytes")
    MAX_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_TICKETS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TICKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_keys: int
    max_tickets: int
    max_deadline_ms: int
    max_ticket_bytes: int
    def __init__(self, max_keys: _Optional[int] = ..., max_tickets: _Optional[int] = ..., max_deadline_ms: _Optional[int] = ..., max_ticket_bytes: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("kind", "detail")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Event.Kind]
        KIND_DRAINING: _ClassVar[Event.Kind]
    KIND_UNSPECIFIED: Event.Kind
    KIND_DRAINING: Event.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: Event.Kind
    detail: str
    def __init__(self, kind: _Optional[_Union[Event.Kind, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("id", "lookup", "prefetch", "cancel", "save", "commit", "abort", "load", "release", "evict", "pin", "unpin", "traceparent")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    id: int
    lookup: LookupRequest
    prefetch: PrefetchRequest
    cancel: CancelRequest
    save: SaveRequest
    commit: CommitRequest
    abort: AbortRequest
    load: LoadRequest
    release: ReleaseRequest
    evict: EvictRequest
    pin: PinRequest
    unpin: UnpinRequest
    traceparent: str
    def __init__(self, id: _Optional[int] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., save: _Optional[_Union[SaveRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ..., load: _Optional[_Union[LoadRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., evict: _Optional[_Union[EvictRequest, _Mapping]] = ..., pin: _Optional[_Union[PinRequest, _Mapping]] = ..., unpin: _Optional[_Union[UnpinRequest, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Reply(_message.Message):
    __slots__ = ("id", "last", "error", "lookup", "prefetch", "cancel", "save", "commit", "abort", "load", "release", "evict", "pin", "unpin")
    ID_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    id: int
    last: bool
    error: CallError
    lookup: LookupResponse
    prefetch: PrefetchResponse
    cancel: CancelResponse
    save: SaveResponse
    commit: CommitResponse
    abort: AbortResponse
    load: LoadResponse
    release: ReleaseResponse
    evict: EvictResponse
    pin: PinResponse
    unpin: UnpinResponse
    def __init__(self, id: _Optional[int] = ..., last: bool = ..., error: _Optional[_Union[CallError, _Mapping]] = ..., lookup: _Optional[_Union[LookupResponse, _Mapping]] = ..., prefetch: _Optional[_Union[PrefetchResponse, _Mapping]] = ..., cancel: _Optional[_Union[CancelResponse, _Mapping]] = ..., save: _Optional[_Union[SaveResponse, _Mapping]] = ..., commit: _Optional[_Union[CommitResponse, _Mapping]] = ..., abort: _Optional[_Union[AbortResponse, _Mapping]] = ..., load: _Optional[_Union[LoadResponse, _Mapping]] = ..., release: _Optional[_Union[ReleaseResponse, _Mapping]] = ..., evict: _Optional[_Union[EvictResponse, _Mapping]] = ..., pin: _Optional[_Union[PinResponse, _Mapping]] = ..., unpin: _Optional[_Union[UnpinResponse, _Mapping]] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("code", "reason", "message", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: ErrorReason
    message: str
    retry_after_ms: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[_Union[ErrorReason, str]] = ..., message: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session", "keys", "tenant", "each", "missed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    keys: bytes
    tenant: str
    each: bool
    missed: int
    def __init__(self, session: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tenant: _Optional[str] = ..., each: bool = ..., missed: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("boot_epoch", "held", "tiers")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    held: int
    tiers: bytes
    def __init__(self, boot_epoch: _Optional[int] = ..., held: _Optional[int] = ..., tiers: _Optional[bytes] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session", "keys", "tenant", "deadline_ms", "request_id", "wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    keys: bytes
    tenant: str
    deadline_ms: int
    request_id: str
    wait: bool
    def __init__(self, session: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tenant: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., wait: bool = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("boot_epoch", "ticket", "held", "ready", "done")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    ticket: int
    held: int
    ready: int
    done: bool
    def __init__(self, boot_epoch: _Optional[int] = ..., ticket: _Optional[int] = ..., held: _Optional[int] = ..., ready: _Optional[int] = ..., done: bool = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("session", "ticket")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    ticket: int
    def __init__(self, session: _Optional[bytes] = ..., ticket: _Optional[int] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("boot_epoch",)
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    def __init__(self, boot_epoch: _Optional[int] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("session", "keys", "tenant", "wait_ms", "request_id", "ttl_ms", "before", "matched", "device")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    keys: bytes
    tenant: str
    wait_ms: int
    request_id: str
    ttl_ms: int
    before: bytes
    matched: int
    device: bool
    def __init__(self, session: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tenant: _Optional[str] = ..., wait_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., before: _Optional[bytes] = ..., matched: _Optional[int] = ..., device: bool = ...) -> None: ...

class SaveResponse(_message.Message):
    __slots__ = ("boot_epoch", "ticket", "outcomes", "slots")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    ticket: int
    outcomes: _containers.RepeatedScalarFieldContainer[SaveOutcome]
    slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, boot_epoch: _Optional[int] = ..., ticket: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[SaveOutcome, str]]] = ..., slots: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "ticket", "indexes")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    ticket: int
    indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[bytes] = ..., ticket: _Optional[int] = ..., indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("boot_epoch", "committed")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    committed: int
    def __init__(self, boot_epoch: _Optional[int] = ..., committed: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "ticket", "indexes", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    ticket: int
    indexes: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    def __init__(self, session: _Optional[bytes] = ..., ticket: _Optional[int] = ..., indexes: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("boot_epoch",)
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    def __init__(self, boot_epoch: _Optional[int] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("session", "keys", "tenant", "deadline_ms", "each", "request_id", "device", "keeps")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    keys: bytes
    tenant: str
    deadline_ms: int
    each: bool
    request_id: str
    device: bool
    keeps: bool
    def __init__(self, session: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., tenant: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., each: bool = ..., request_id: _Optional[str] = ..., device: bool = ..., keeps: bool = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("boot_epoch", "ticket", "indexes", "slots", "tiers", "done", "reason")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    ticket: int
    indexes: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    tiers: bytes
    done: bool
    reason: ErrorReason
    def __init__(self, boot_epoch: _Optional[int] = ..., ticket: _Optional[int] = ..., indexes: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., tiers: _Optional[bytes] = ..., done: bool = ..., reason: _Optional[_Union[ErrorReason, str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "ticket", "indexes", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    ticket: int
    indexes: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    def __init__(self, session: _Optional[bytes] = ..., ticket: _Optional[int] = ..., indexes: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("boot_epoch",)
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    def __init__(self, boot_epoch: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("session", "tenant", "keys", "tier", "idle_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tenant: str
    keys: bytes
    tier: Tier
    idle_s: float
    def __init__(self, session: _Optional[bytes] = ..., tenant: _Optional[str] = ..., keys: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ..., idle_s: _Optional[float] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("boot_epoch", "evicted")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    evicted: int
    def __init__(self, boot_epoch: _Optional[int] = ..., evicted: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session", "tenant", "keys", "expires_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tenant: str
    keys: bytes
    expires_s: float
    def __init__(self, session: _Optional[bytes] = ..., tenant: _Optional[str] = ..., keys: _Optional[bytes] = ..., expires_s: _Optional[float] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("boot_epoch", "ticket", "pinned")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    ticket: int
    pinned: int
    def __init__(self, boot_epoch: _Optional[int] = ..., ticket: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("session", "ticket")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    ticket: int
    def __init__(self, session: _Optional[bytes] = ..., ticket: _Optional[int] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("boot_epoch",)
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    def __init__(self, boot_epoch: _Optional[int] = ...) -> None: ...

class SaveBytesRequest(_message.Message):
    __slots__ = ("session", "tenant", "key", "shard", "data", "ttl_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tenant: str
    key: bytes
    shard: int
    data: bytes
    ttl_ms: int
    def __init__(self, session: _Optional[bytes] = ..., tenant: _Optional[str] = ..., key: _Optional[bytes] = ..., shard: _Optional[int] = ..., data: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class SaveBytesResponse(_message.Message):
    __slots__ = ("boot_epoch", "outcomes")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    outcomes: _containers.RepeatedScalarFieldContainer[SaveOutcome]
    def __init__(self, boot_epoch: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[SaveOutcome, str]]] = ...) -> None: ...

class LoadBytesRequest(_message.Message):
    __slots__ = ("session", "tenant", "keys", "deadline_ms", "each")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    tenant: str
    keys: bytes
    deadline_ms: int
    each: bool
    def __init__(self, session: _Optional[bytes] = ..., tenant: _Optional[str] = ..., keys: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., each: bool = ...) -> None: ...

class LoadBytesResponse(_message.Message):
    __slots__ = ("boot_epoch", "index", "shard", "data", "done", "reason")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    index: int
    shard: int
    data: bytes
    done: bool
    reason: ErrorReason
    def __init__(self, boot_epoch: _Optional[int] = ..., index: _Optional[int] = ..., shard: _Optional[int] = ..., data: _Optional[bytes] = ..., done: bool = ..., reason: _Optional[_Union[ErrorReason, str]] = ...) -> None: ...
