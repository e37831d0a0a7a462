"""Targets over a whole daemon in this process: every RPC's input, calls inside the Attach stream, packets on the descriptor socket.

The first bytes of an input choose the method, the rest is the message. A session's token cannot be guessed, so the token ``S``
stands for the real one; waits are cut to a moment, so that a call which does not end is a fault. After each input every invariant
of the core is checked and a plain call must work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvtierd.config import Config
from kvtierd.service.server import Daemon
from kvtierd.v1 import admin_pb2, fdpass_pb2, kvtier_pb2, kvtier_pb2_grpc

TIMEOUT_S: Final = 20.0
STAND_IN: Final = b"S"
MAX_CALLS: Final = 12
SIZE: Final = 4096
METHODS: Final = [
    method
    for module, name in ((kvtier_pb2, "KvTierService"), (admin_pb2, "KvTierAdminService"))
    for method in module.DESCRIPTOR.services_by_name[name].methods
    if method.name != "Attach"
]
CALLS: Final = list(kvtier_pb2.Call.DESCRIPTOR.oneofs_by_name["request"].fields)
MOMENTS: Final = {"wait_ms": 5, "deadline_ms": 5, "timeout_s": 0.005}


class Alarm(logging.Handler):
    """Keeps what the daemon logs of its own faults."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.CRITICAL:
            self.faults.append(logging.Formatter().format(record))


class InProcess:
    """A daemon on a thread of its own, with one session."""

    def __init__(self, folder: Path) -> None:
        self.alarm = Alarm()
        logging.getLogger().addHandler(self.alarm)
        self.socket = folder / "k.sock"
        config = Config.model_validate({
            "cpu": {"capacity": "4MiB", "extent": "1MiB", "prefault": False},
            "nvme": {"capacity": "16MiB", "folders": [str(folder / "nvme")], "allow_volatile": True, "reserve": 0, "direct": "off"},
            "server": {"socket": str(self.socket), "metrics": "", "drain_timeout": "1s", "max_sessions": 64},
            "log": {"slow": 0},
        })  # fmt: skip
        self.daemon = Daemon(config)
        self._loop = asyncio.new_event_loop()
        # Signals are the main thread's, and here that is the fuzzer's.
        self._loop.add_signal_handler = lambda *_: None  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self.daemon.serve(),), daemon=True)
        self._thread.start()
        while not self.daemon.ready()[0]:
            assert self._thread.is_alive(), "the daemon did not start"
        self.channel = grpc.insecure_channel(f"unix:{self.socket}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox.put(hello())
        self._stream = kvtier_pb2_grpc.KvTierServiceStub(self.channel).Attach(iter(self._outbox.get, None))
        self.welcome = next(self._stream).welcome

    def close(self) -> None:
        """End session and daemon."""
        self._outbox.put(None)
        self._stream.cancel()
        self.channel.close()
        self._loop.call_soon_threadsafe(self.daemon.stopping.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the daemon does not end"
        self._loop.close()
        logging.getLogger().removeHandler(self.alarm)

    def check(self) -> None:
        """The daemon is well: no bug was logged, every invariant holds, a plain call works."""
        done: Future[None] = Future()

        def look() -> None:
            try:
                self.daemon.runtime.core.state.draining = False  # a drain without an end is meant, and would end the tries
                self.daemon.runtime.core.check()
                done.set_result(None)
            except BaseException as e:
                done.set_exception(e)

        self._loop.call_soon_threadsafe(look)
        done.result(TIMEOUT_S)
        assert not self.alarm.faults, self.alarm.faults.pop()
        assert self.daemon.failure is None
        stub = kvtier_pb2_grpc.KvTierServiceStub(self.channel)
        stub.Lookup(kvtier_pb2.LookupRequest(session=self.welcome.session, keys=bytes(32)), timeout=TIMEOUT_S)

    def prepared(self, message: Message) -> Message:
        """The session's token in the place of its stand-in, and short waits, in nested messages too."""
        for field, value in message.ListFields():
            if field.name == "session" and value == STAND_IN:
                setattr(message, field.name, self.welcome.session)
            elif field.name in MOMENTS and not field.is_repeated:
                setattr(message, field.name, min(value, MOMENTS[field.name]))
            elif field.type == FieldDescriptor.TYPE_MESSAGE and not field.is_repeated:
                self.prepared(value)
        return message


def hello() -> kvtier_pb2.AttachRequest:
    """What opens a session."""
    space = kvtier_pb2.Namespace(shard_bytes=[SIZE], model="m")
    return kvtier_pb2.AttachRequest(hello=kvtier_pb2.Hello(protocol_version=1, namespace=space))


def refused(error: Any) -> None:
    """A refusal names its reason and is no fault of the daemon's."""
    code = error.code()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in error.details():
        return
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None and status.details and status.details[0].Unpack(info), f"{code}: {error.details()}"
    assert info.reason != "INTERNAL", error.details()


class Target:
    """What targets over a daemon share."""

    def __init__(self, folder: Path) -> None:
        self.process = InProcess(folder)

    def close(self) -> None:
        """End the daemon."""
        self.process.close()


class RpcTarget(Target):
    """Unary calls and streams, all but Attach."""

    def seeds(self) -> list[bytes]:
        """A message a method with each field set."""
        found = []
        for number, method in enumerate(METHODS):
            kind: Any = method.input_type._concrete_class
            for fill in (_empty, _filled):
                message = fill(kind)
                found.append(bytes([number]) + message.SerializeToString())
            found.append(bytes([number]) + b"\x0a\xff\xff\xff\xff\x0f")
        return found

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        if not data:
            return
        method, raw = METHODS[data[0] % len(METHODS)], data[1:]
        kind: Any = method.input_type._concrete_class
        with contextlib.suppress(DecodeError):  # what cannot be decoded is sent as it is
            raw = self.process.prepared(kind.FromString(raw)).SerializeToString()
        channel = self.process.channel
        path = f"/{method.containing_service.full_name}/{method.name}"
        streams = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
        call = getattr(channel, "_".join(streams))(path, None, None)
        try:
            answer = call(iter([raw, raw]) if method.client_streaming else raw, timeout=TIMEOUT_S)
            if method.server_streaming:
                for _ in answer:
                    pass
        except grpc.RpcError as e:
            refused(e)
        self.process.check()


class StreamTarget(Target):
    """An Attach stream: its Hello, then calls, each with a length and a kind before it."""

    def seeds(self) -> list[bytes]:
        """Calls that follow from each other."""
        keys = bytes(range(32)) * 2
        save = kvtier_pb2.SaveRequest(keys=keys).SerializeToString()
        load = kvtier_pb2.LoadRequest(keys=keys, deadline_ms=5).SerializeToString()
        ticket = kvtier_pb2.CommitRequest(ticket=1).SerializeToString()
        kinds = [field.name for field in CALLS]
        whole = [(kinds.index("save"), save), (kinds.index("commit"), ticket), (kinds.index("load"), load)]
        single = [[(n, _filled(field.message_type._concrete_class).SerializeToString())] for n, field in enumerate(CALLS)]  # type: ignore[attr-defined]
        nonsense = [(255, b"\x0a\xff\xff\xff\xff\x0f")]
        every = (whole, nonsense, *single)
        return [b"".join(bytes([kind, len(raw) & 255, len(raw) >> 8]) + raw for kind, raw in calls) for calls in every]

    def _requests(self, data: bytes) -> Iterator[bytes]:
        yield hello().SerializeToString()
        for number in range(MAX_CALLS):
            if len(data) < 3:
                return
            kind, size = data[0], int.from_bytes(data[1:3], "little")
            raw, data = data[3 : 3 + size], data[3 + size :]
            if kind == 255:
                yield raw
                continue
            field = CALLS[kind % len(CALLS)]
            message = kvtier_pb2.AttachRequest(call=kvtier_pb2.Call(id=number))
            try:
                getattr(message.call, field.name).MergeFromString(raw)
            except DecodeError:
                continue
            getattr(message.call, field.name).SetInParent()
            yield self.process.prepared(message).SerializeToString()

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        call = self.process.channel.stream_stream("/kvtierd.v1.KvTierService/Attach", None, kvtier_pb2.AttachResponse.FromString)
        try:
            for message in call(self._requests(data), timeout=TIMEOUT_S):
                error = message.reply.error
                assert error.reason != kvtier_pb2.ERROR_REASON_INTERNAL, error.message
        except grpc.RpcError as e:
            refused(e)
        self.process.check()


class PacketTarget(Target):
    """Packets on the descriptor socket, each with a length before it; the first is a join where the input begins with 0."""

    def seeds(self) -> list[bytes]:
        """Each kind of packet."""
        messages = [
            fdpass_pb2.DescriptorRequest(map=fdpass_pb2.MapExtents(extents=[1, 2, 2**32 - 1])),
            fdpass_pb2.DescriptorRequest(unmapped=fdpass_pb2.ExtentsUnmapped(extents=[1])),
            fdpass_pb2.DescriptorRequest(probe=fdpass_pb2.Probe(id=2**64 - 1, tenant="t", key=bytes(32), count=2**32 - 1)),
            fdpass_pb2.DescriptorRequest(join=fdpass_pb2.Join(session=STAND_IN, shard=-1, numa_node=-1)),
        ]
        raws = [m.SerializeToString() for m in messages]
        sized = [len(raw).to_bytes(2, "little") + raw for raw in raws]
        return [first + b"".join(sized[: n + 1]) for first in (b"\0", b"\1") for n in range(4)]

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        packets = []
        if data[:1] == b"\0":
            packets.append(fdpass_pb2.DescriptorRequest(join=fdpass_pb2.Join(session=STAND_IN, shard=-1)).SerializeToString())
        data = data[1:]
        while len(data) > 2 and len(packets) < MAX_CALLS:
            size = int.from_bytes(data[:2], "little")
            packets.append(data[2 : 2 + size])
            data = data[2 + size :]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(ConnectionError):
            sock.settimeout(TIMEOUT_S)
            sock.connect(self.process.welcome.descriptor_socket)
            for packet in packets:
                with contextlib.suppress(DecodeError):
                    request = fdpass_pb2.DescriptorRequest.FromString(packet)
                    if request.HasField("join"):
                        self.process.prepared(request.join)
                        packet = request.SerializeToString()
                sock.send(packet)
            self._read(sock)
        self.process.check()

    def _read(self, sock: socket.socket) -> None:
        """Take what the daemon has answered, and close the descriptors that came along."""
        sock.shutdown(socket.SHUT_WR)
        while True:
            answer, fds, _, _ = socket.recv_fds(sock, 1 << 16, 64)
            for fd in fds:
                socket.close(fd)
            if not answer:
                return
            message = fdpass_pb2.DescriptorResponse.FromString(answer)
            assert message.error.reason != "INTERNAL", message.error.message


def _empty(kind: Callable[[], Any]) -> Any:
    message = kind()
    if "session" in message.DESCRIPTOR.fields_by_name:
        message.session = STAND_IN
    return message


def _filled(kind: Callable[[], Any]) -> Any:
    """A message with something in each field."""
    message = _empty(kind)
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if not field.is_repeated and not field.message_type.GetOptions().map_entry:
                getattr(message, field.name).MergeFrom(_filled(field.message_type._concrete_class))
            continue
        value: Any = {
            FieldDescriptor.TYPE_STRING: "t", FieldDescriptor.TYPE_BYTES: bytes(32), FieldDescriptor.TYPE_BOOL: True,
            FieldDescriptor.TYPE_DOUBLE: 0.5,
        }.get(field.type, 1)  # fmt: skip
        if field.name == "session":
            continue
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message
