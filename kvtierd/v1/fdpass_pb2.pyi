from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescriptorRequest(_message.Message):
    __slots__ = ("join", "map", "unmapped", "probe", "device_proof")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    UNMAPPED_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PROOF_FIELD_NUMBER: _ClassVar[int]
    join: Join
    map: MapExtents
    unmapped: ExtentsUnmapped
    probe: Probe
    device_proof: DeviceProof
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., map: _Optional[_Union[MapExtents, _Mapping]] = ..., unmapped: _Optional[_Union[ExtentsUnmapped, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., device_proof: _Optional[_Union[DeviceProof, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("session", "shard", "pins_memory", "numa_node", "device")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PINS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    shard: int
    pins_memory: bool
    numa_node: int
    device: str
    def __init__(self, session: _Optional[bytes] = ..., shard: _Optional[int] = ..., pins_memory: bool = ..., numa_node: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class DeviceProof(_message.Message):
    __slots__ = ("content", "error")
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    content: bytes
    error: str
    def __init__(self, content: _Optional[bytes] = ..., error: _Optional[str] = ...) -> None: ...

class MapExtents(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, extents: _Optional[_Iterable[int]] = ...) -> None: ...

class ExtentsUnmapped(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, extents: _Optional[_Iterable[int]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("id", "tenant", "key", "count")
    ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    id: int
    tenant: str
    key: bytes
    count: int
    def __init__(self, id: _Optional[int] = ..., tenant: _Optional[str] = ..., key: _Optional[bytes] = ..., count: _Optional[int] = ...) -> None: ...

class DescriptorResponse(_message.Message):
    __slots__ = ("joined", "extents", "revoked", "error", "probed", "device_probe")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PROBE_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    extents: ExtentDescriptors
    revoked: Revoked
    error: DescriptorError
    probed: Probed
    device_probe: DeviceProbe
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., extents: _Optional[_Union[ExtentDescriptors, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., error: _Optional[_Union[DescriptorError, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ..., device_probe: _Optional[_Union[DeviceProbe, _Mapping]] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("boot_epoch", "slot_bytes", "extents")
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    boot_epoch: int
    slot_bytes: _containers.RepeatedScalarFieldContainer[int]
    extents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, boot_epoch: _Optional[int] = ..., slot_bytes: _Optional[_Iterable[int]] = ..., extents: _Optional[_Iterable[int]] = ...) -> None: ...

class DeviceProbe(_message.Message):
    __slots__ = ("handle", "size_bytes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    size_bytes: int
    def __init__(self, handle: _Optional[bytes] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("id", "held")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    id: int
    held: bool
    def __init__(self, id: _Optional[int] = ..., held: bool = ...) -> None: ...

class ExtentDescriptors(_message.Message):
    __slots__ = ("extents", "unknown")
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    unknown: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., unknown: _Optional[_Iterable[int]] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("id", "size_bytes", "slot_bytes", "shard", "device_handle")
    ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    id: int
    size_bytes: int
    slot_bytes: int
    shard: int
    device_handle: bytes
    def __init__(self, id: _Optional[int] = ..., size_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., shard: _Optional[int] = ..., device_handle: _Optional[bytes] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("extents",)
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    extents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, extents: _Optional[_Iterable[int]] = ...) -> None: ...

class DescriptorError(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
