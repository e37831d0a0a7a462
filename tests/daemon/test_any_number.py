"""Goal: no number, name or token of any request makes the daemon fail: each is served or refused with a reason.

Method: the fields of every request of both services, found from the protocol itself, one after the other set to values that
cannot be meant, on a real daemon; unary calls and calls inside the Attach stream.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvtierd.errors import Reason
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2, admin_pb2_grpc, kvtier_pb2, kvtier_pb2_grpc
from tests.daemon.test_hostile import RawSession

KIB = 1 << 10
STREAMS = ("Attach", "SaveBytes")
METHODS = [
    (service, method)
    for service in (
        kvtier_pb2.DESCRIPTOR.services_by_name["KvTierService"],
        admin_pb2.DESCRIPTOR.services_by_name["KvTierAdminService"],
    )
    for method in service.methods
]
_F = FieldDescriptor
EXTREMES: dict[int, list[Any]] = {
    _F.TYPE_UINT32: [1, 2**31, 2**32 - 1],
    _F.TYPE_UINT64: [1, 2**32, 2**63, 2**64 - 1],
    _F.TYPE_DOUBLE: [math.nan, math.inf, -math.inf, -1.0, 5e-324, 1e308, 2.0**63],
    _F.TYPE_ENUM: [-1, 3, 4, 2**31 - 1, -(2**31)],
    _F.TYPE_STRING: ["\0", "x" * 200_000, "9" * 5000, "1.-1", "9.99999999999999999999", "²." + "٣", "1." + "9" * 4400, "\u202e"],
    _F.TYPE_BYTES: [b"\0", b"\xff" * 31, b"\xff" * 33, b"\xff" * 32 * 70_000],
    _F.TYPE_BOOL: [True],
}


def variants(kind: Descriptor, make: Callable[[], Message]) -> Iterator[Message]:
    """Requests with one field after the other at each of its extremes; nested messages too."""
    for field in kind.fields:
        if field.type == _F.TYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                message = make()
                getattr(message, field.name)["k" * 9000] = "v"
                yield message
                continue

            def nested(name: str = field.name) -> Message:
                outer = make()
                getattr(outer, name).SetInParent()
                return outer

            for inner in variants(field.message_type, lambda kind=field.message_type: kind._concrete_class()):
                message = nested()
                getattr(message, field.name).MergeFrom(inner)
                yield message
            continue
        for value in EXTREMES[field.type]:
            message = make()
            if field.is_repeated:
                getattr(message, field.name).extend([value, type(value)()])
            else:
                setattr(message, field.name, value)
            yield message


def reason_of(error: Any) -> str:
    """Name of the reason of a refusal."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None, f"{error.code()}: {error.details()}"
    assert status.details[0].Unpack(info)
    return info.reason


def check_refusal(error: Any, request: Message) -> None:
    """A refusal has a reason that is not the daemon's fault, and a text of a line."""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in (error.details() or ""):
        return
    shown = f"{type(request).__name__} {str(request)[:200]}: {error.code()} {error.details()}"
    assert reason_of(error) in Reason.__members__, shown
    assert reason_of(error) != "INTERNAL", shown
    assert 0 < len(error.details()) < 1000, shown


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    found = DaemonProcess(
        tmp_path_factory.mktemp("numbers"),
        {"cpu": {"capacity": "4MiB", "prefault": False}, "nvme": {"capacity": "64MiB"}, "server": {"max_deadline": "200ms"}},
    ).start()
    yield found
    log = found.log()
    found.kill()
    assert "Traceback" not in log, log[-3000:]


@pytest.fixture
def session(daemon: DaemonProcess) -> Iterator[RawSession]:
    found = RawSession(daemon, 64 * KIB, 4 * KIB)
    yield found
    found.close()


def filled(kind: Any, token: bytes) -> Message:
    """A request that would be served: with a session, and keys of blocks that are there."""
    request: Message = kind()
    names = kind.DESCRIPTOR.fields_by_name
    if "session" in names:
        request.session = token  # type: ignore[attr-defined]
    if "keys" in names:
        request.keys = bytes(64)  # type: ignore[attr-defined]
    if "key" in names:
        request.key = bytes(32)  # type: ignore[attr-defined]
    if "expires_s" in names:
        request.expires_s = 0.001  # type: ignore[attr-defined]
    if "deadline_ms" in names:
        request.deadline_ms = 5  # type: ignore[attr-defined]
    if kind is admin_pb2.DrainRequest:
        request.resume = True  # type: ignore[attr-defined]
    return request


@pytest.mark.parametrize("service, method", [m for m in METHODS if m[1].name not in STREAMS], ids=lambda d: d.name)
def test_unary_calls(daemon: DaemonProcess, session: RawSession, service: Any, method: Any) -> None:
    token = session.welcome()
    kind = method.input_type._concrete_class
    with grpc.insecure_channel(daemon.address) as channel:
        stubs = (kvtier_pb2_grpc.KvTierServiceStub(channel), admin_pb2_grpc.KvTierAdminServiceStub(channel))
        call = getattr(stubs["Admin" in service.name], method.name)
        for request in variants(method.input_type, lambda: filled(kind, token)):
            if getattr(request, "resume", True) is False:
                request.resume = True  # type: ignore[attr-defined]
            try:
                answer = call(request, timeout=30)
                if method.server_streaming:
                    list(answer)
            except grpc.RpcError as e:
                check_refusal(e, request)
    assert daemon.status().version


def test_parts_of_blocks(daemon: DaemonProcess, session: RawSession) -> None:
    token = session.welcome()
    for request in variants(kvtier_pb2.SaveBytesRequest.DESCRIPTOR, lambda: filled(kvtier_pb2.SaveBytesRequest, token)):
        try:
            session.stub.SaveBytes(iter([request, request]), timeout=30)
        except grpc.RpcError as e:
            check_refusal(e, request)


def test_hellos(daemon: DaemonProcess) -> None:
    with grpc.insecure_channel(daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)

        def hello() -> Message:
            space = kvtier_pb2.Namespace(shard_bytes=[4096], model="m")
            return kvtier_pb2.Hello(protocol_version=1, namespace=space)

        for request in variants(kvtier_pb2.Hello.DESCRIPTOR, hello):
            first = kvtier_pb2.AttachRequest(hello=request)  # type: ignore[arg-type]
            try:
                list(stub.Attach(iter([first]), timeout=30))
            except grpc.RpcError as e:
                check_refusal(e, request)


def test_calls_inside_the_stream(daemon: DaemonProcess) -> None:
    space = kvtier_pb2.Namespace(shard_bytes=[4096], model="m")
    first = kvtier_pb2.AttachRequest(hello=kvtier_pb2.Hello(protocol_version=1, namespace=space))
    requests = [first, kvtier_pb2.AttachRequest(call=kvtier_pb2.Call(id=2**64 - 1))]
    for field in kvtier_pb2.Call.DESCRIPTOR.oneofs_by_name["request"].fields:
        kind = field.message_type._concrete_class
        for number, request in enumerate(variants(field.message_type, lambda kind=kind: filled(kind, b""))):
            outer = kvtier_pb2.AttachRequest(call=kvtier_pb2.Call(id=number))
            getattr(outer.call, field.name).MergeFrom(request)
            if len(outer.SerializeToString()) < 1 << 20:
                requests.append(outer)
    with grpc.insecure_channel(daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        replies = 0
        for message in stub.Attach(_one_by_one(requests), timeout=120):
            replies += message.HasField("reply")
            error = message.reply.error
            if error.message:
                assert error.reason not in (kvtier_pb2.ERROR_REASON_UNSPECIFIED, kvtier_pb2.ERROR_REASON_INTERNAL), error
    assert replies >= len(requests) - 1 - 40, "calls that wait when the stream ends need no answer"


def _one_by_one(requests: list[Any]) -> Iterator[Any]:
    yield from requests


@pytest.mark.parametrize("call", ["ListBlocks", "ListPins"])
@pytest.mark.parametrize("token", ["x", "1", "1.", ".1", "-1.0", "1.1.1", "9" * 5000 + ".0", "0." + "9" * 19, "٣.٣", " 1.0"])
def test_a_page_token_that_is_none_says_what_to_pass(daemon: DaemonProcess, call: str, token: str) -> None:
    kind = getattr(admin_pb2, f"{call}Request")
    with daemon.admin() as stub, pytest.raises(grpc.RpcError) as refused:
        getattr(stub, call)(kind(page_token=token))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    assert "next_page_token" in refused.value.details()  # type: ignore[attr-defined]


def test_a_page_token_past_the_end_is_an_empty_page(daemon: DaemonProcess) -> None:
    with daemon.admin() as stub:
        page = stub.ListBlocks(admin_pb2.ListBlocksRequest(page_token="9" * 18 + "." + "9" * 18))
        assert (list(page.blocks), page.next_page_token) == ([], "")


def test_a_span_that_cannot_be_is_named(daemon: DaemonProcess) -> None:
    with daemon.admin() as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Drain(admin_pb2.DrainRequest(timeout_s=math.nan))
    assert "timeout_s" in refused.value.details()  # type: ignore[attr-defined]
    assert os.path.exists(f"/proc/{daemon.pid}")
