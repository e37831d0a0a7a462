"""Goal: a client of the protocol before works, and where client and daemon differ more, both say so and nothing breaks.

Method: messages made from the protocol that was released last (proto/baseline.binpb), raw on a real daemon; a daemon that is a
version ahead; a client that is; fields, calls, methods and packets that the daemon does not know.
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from kvtierd.client import Client
from kvtierd.client.probing import Prober
from kvtierd.errors import DaemonUnavailableError, Reason
from kvtierd.model import slot_extent, slot_index
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2, fdpass_pb2, kvtier_pb2
from tests.daemon.conftest import namespace

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
BASELINE = Path(__file__).parents[2] / "proto" / "baseline.binpb"
SIZE = 4096
UNKNOWN_FIELD = b"\xc2\x3e\x05later"
"""Field 1000, five bytes."""
VERSION_2 = """
import kvtierd
kvtierd.PROTOCOL_VERSION = 2
from kvtierd.cli import main
main()
"""
NO_PROBE = """
from kvtierd.errors import Reason, RequestError
from kvtierd.service.fdpass import DescriptorServer
def unknown(*_):
    raise RequestError(Reason.BAD_REQUEST, "the packet has no known message")
DescriptorServer._probe = unknown
from kvtierd.cli import main
main()
"""


def released() -> descriptor_pool.DescriptorPool:
    """The protocol that was released last, apart from today's."""
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(BASELINE.read_bytes()).file:
        pool.Add(file)  # type: ignore[no-untyped-call]
    return pool


POOL = released()


def old(name: str) -> Any:
    """A message class of the protocol before."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"kvtierd.v1.{name}"))


class OldSession:
    """An Attach stream that knows nothing but the protocol before."""

    def __init__(self, daemon: DaemonProcess, version: int = 1) -> None:
        self.channel = grpc.insecure_channel(daemon.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        request = old("AttachRequest")()
        request.hello.protocol_version = version
        request.hello.namespace.shard_bytes.append(SIZE)
        request.hello.namespace.model = "m"
        self._outbox.put(request)
        attach = self.channel.stream_stream(
            "/kvtierd.v1.KvTierService/Attach", lambda m: m.SerializeToString(), old("AttachResponse").FromString
        )
        self.stream = attach(iter(self._outbox.get, None), timeout=30)

    def call(self, kind: str, **fields: Any) -> Any:
        """One call inside the stream. Returns the reply."""
        request = old("AttachRequest")()
        request.call.id = 7
        getattr(request.call, kind).SetInParent()
        for name, value in fields.items():
            setattr(getattr(request.call, kind), name, value)
        return self.post(request)

    def post(self, request: Message) -> Any:
        """Send a message. Returns the reply."""
        self._outbox.put(request)
        return next(self.stream).reply

    def close(self) -> None:
        self._outbox.put(None)
        self.stream.cancel()
        self.channel.close()


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> DaemonProcess:
    return make_daemon()


@pytest.fixture
def session(daemon: DaemonProcess) -> Iterator[OldSession]:
    made = OldSession(daemon)
    yield made
    made.close()


def connect(welcome: Any) -> socket.socket:
    """A process on the descriptor socket, joined with a message of the protocol before."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(welcome.descriptor_socket)
    request = old("DescriptorRequest")()
    request.join.session, request.join.shard = welcome.session, -1
    sock.send(request.SerializeToString())
    assert old("DescriptorResponse").FromString(sock.recv(1 << 16)).joined.boot_epoch == welcome.boot_epoch
    return sock


def mapped(sock: socket.socket, extent_id: int) -> mmap.mmap:
    """The memory of an extent."""
    request = old("DescriptorRequest")()
    request.map.extents.append(extent_id)
    sock.send(request.SerializeToString())
    data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4)
    (extent,) = old("DescriptorResponse").FromString(data).extents.extents
    memory = mmap.mmap(fds[0], extent.size_bytes)
    os.close(fds[0])
    return memory


def test_client_of_the_protocol_before_saves_and_loads(daemon: DaemonProcess, session: OldSession) -> None:
    welcome = next(session.stream).welcome
    keys = [os.urandom(32) for _ in range(3)]
    saved = session.call("save", keys=b"".join(keys)).save
    assert list(saved.outcomes) == [1, 1, 1]
    with connect(welcome) as sock:
        memory = mapped(sock, slot_extent(saved.slots[0]))
        for number, slot in enumerate(saved.slots):
            at = slot_index(slot) * welcome.slot_bytes[0]
            memory[at : at + SIZE] = bytes([number + 1]) * SIZE
        request = old("AttachRequest")()
        request.call.commit.ticket = saved.ticket
        request.call.commit.SetInParent()
        committed = session.post(request)
        assert not committed.HasField("error"), committed
        assert session.call("lookup", keys=b"".join(keys)).HasField("lookup")
        loaded = session.call("load", keys=b"".join(keys), deadline_ms=5000).load
        assert list(loaded.indexes) == [0, 1, 2]
        for number, slot in enumerate(loaded.slots):
            at = slot_index(slot) * welcome.slot_bytes[0]
            assert memory[at : at + SIZE] == bytes([number + 1]) * SIZE
        assert session.call("release", ticket=loaded.ticket).HasField("release")
        memory.close()
    assert daemon.status().tiers[0].pinned_bytes == 0


@pytest.mark.parametrize("service", ["KvTierService", "KvTierAdminService"])
def test_methods_of_the_protocol_before_are_all_there(daemon: DaemonProcess, session: OldSession, service: str) -> None:
    """Each answers in a form that the old client reads; what it does not know it keeps, for whoever does."""
    token, codes = next(session.stream).welcome.session, set()
    for method in POOL.FindServiceByName(f"kvtierd.v1.{service}").methods:
        if method.client_streaming:
            continue
        request = old(method.input_type.name)()
        if "session" in method.input_type.fields_by_name:
            request.session = token
        if method.name == "Drain":
            request.resume = True
        kind = session.channel.unary_stream if method.server_streaming else session.channel.unary_unary
        call = kind(f"/kvtierd.v1.{service}/{method.name}", lambda m: m.SerializeToString(), None)
        try:
            raws = list(call(request, timeout=20)) if method.server_streaming else [call(request, timeout=20)]
        except grpc.RpcError as e:
            codes.add(e.code())  # type: ignore[attr-defined]
            continue
        today = getattr(kvtier_pb2, method.output_type.name, None) or getattr(admin_pb2, method.output_type.name)
        for raw in raws:
            again = old(method.output_type.name).FromString(raw).SerializeToString()
            assert today.FromString(again) == today.FromString(raw), method.name
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}


def test_daemon_a_version_ahead_serves_a_client_of_the_one_before(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(start=False)
    daemon.command = [sys.executable, "-c", VERSION_2]
    client = make_client(daemon.start(), SIZE)
    key, out = os.urandom(32), np.zeros(SIZE, np.uint8)
    assert client.save([key], [np.full(SIZE, 3, np.uint8)]).saved == 1
    assert client.load([key], [out]).loaded == 1
    assert (out == 3).all()
    for version, older in ((3, "daemon"), (0, "client")):
        session = OldSession(daemon, version)
        with pytest.raises(grpc.RpcError, match=rf"protocol {version}, this daemon .* 1 to 2: update the {older}"):
            next(session.stream)
        session.close()


def test_client_a_version_ahead_is_told_and_goes_without(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtierd.client.session.PROTOCOL_VERSION", 2)
    with pytest.raises(DaemonUnavailableError, match=r"the client speaks protocol 2, this daemon .* 1 to 1: update the daemon"):
        Client(namespace(SIZE), daemon.address, require=True, timeout_s=2)
    with Client(namespace(SIZE), daemon.address) as client:
        assert client.save([bytes(32)], [np.zeros(SIZE, np.uint8)]).saved == 0
        assert client.load([bytes(32)], [np.zeros(SIZE, np.uint8)]).loaded == 0
    assert not daemon.status().sessions


def test_what_the_daemon_does_not_know_is_passed_over_or_refused(daemon: DaemonProcess, session: OldSession) -> None:
    token = next(session.stream).welcome.session
    request = kvtier_pb2.AttachRequest(call=kvtier_pb2.Call(id=7, save=kvtier_pb2.SaveRequest(keys=os.urandom(32))))
    request.call.save.MergeFromString(UNKNOWN_FIELD)
    request.call.MergeFromString(UNKNOWN_FIELD)
    assert list(session.post(request).save.outcomes) == [1], "unknown fields are passed over"
    request = kvtier_pb2.AttachRequest(call=kvtier_pb2.Call(id=8))
    request.call.MergeFromString(UNKNOWN_FIELD)
    reply = session.post(request)
    assert (reply.id, reply.error.reason) == (8, Reason.BAD_REQUEST)
    assert "no request that this daemon knows" in reply.error.message
    assert session.call("lookup", keys=bytes(32)).HasField("lookup"), "and the session goes on"
    with pytest.raises(grpc.RpcError) as refused:
        session.channel.unary_unary("/kvtierd.v1.KvTierService/Later")(token, timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_packet_that_the_daemon_does_not_know_ends_its_connection_only(daemon: DaemonProcess, session: OldSession) -> None:
    welcome = next(session.stream).welcome
    with connect(welcome) as other, connect(welcome) as sock:
        sock.send(UNKNOWN_FIELD)
        answer = fdpass_pb2.DescriptorResponse.FromString(sock.recv(1 << 16))
        assert (answer.error.reason, answer.error.message) == ("BAD_REQUEST", "the packet has no known message")
        saved = session.call("save", keys=os.urandom(32)).save
        mapped(other, slot_extent(saved.slots[0])).close()


def test_probes_end_quietly_where_the_daemon_knows_none(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(start=False)
    daemon.command = [sys.executable, "-c", NO_PROBE]
    client = make_client(daemon.start(), SIZE)
    prober = Prober(client.descriptor_socket, client.session_token)
    number = prober.ask(bytes(32), 1)
    assert number is not None
    until_s = time.monotonic() + 10
    while not prober.closed and time.monotonic() < until_s:
        assert prober.answer(number) is None
        time.sleep(0.01)
    assert prober.closed
    assert prober.ask(bytes(32), 1) is None
    assert client.save([bytes(32)], [np.zeros(SIZE, np.uint8)]).saved == 1, "the session is not touched"
