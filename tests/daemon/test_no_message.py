"""Goal: bytes that are no message are refused like any other nonsense: with a reason, and without a trace in the log.

Method: every method of both services on a real daemon, unary and streaming, is sent what its message cannot be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvtierd.errors import Reason
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2, kvtier_pb2
from tests.daemon.test_any_number import reason_of

MakeDaemon = Callable[..., DaemonProcess]
NONSENSE = [b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05abc", b"\x07"]
METHODS = [
    (service.full_name, method)
    for service in (
        kvtier_pb2.DESCRIPTOR.services_by_name["KvTierService"],
        admin_pb2.DESCRIPTOR.services_by_name["KvTierAdminService"],
    )
    for method in service.methods
]


def test_every_method_refuses_what_is_no_message(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    with grpc.insecure_channel(daemon.address) as channel:
        for service, method in METHODS:
            kinds = ["stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)]
            call: Any = getattr(channel, "_".join(kinds))(f"/{service}/{method.name}", None, None)
            for raw in NONSENSE:
                with pytest.raises(grpc.RpcError) as refused:
                    list(call(iter([raw]) if method.client_streaming else raw, timeout=20))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method.name  # type: ignore[attr-defined]
                assert reason_of(refused.value) == Reason.BAD_REQUEST.name
                assert "no message" in refused.value.details()  # type: ignore[attr-defined]
    assert "Traceback" not in daemon.log()
    assert daemon.status().version
