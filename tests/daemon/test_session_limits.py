"""Goal: one session cannot take what others need: memory, tickets, pins, calls, processes.

Method: a real daemon; a session that asks for more and more, and another one that is served all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc

from kvtierd.client import Client
from kvtierd.runtime.sessions import MAX_CALLS
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc
from tests.daemon.test_hostile import until

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
SIZE = 64 << 10


def test_one_session_cannot_take_all_calls_of_a_daemon(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "1MiB", "prefault": False}, nvme={"capacity": "0"})
    greedy, other = make_client(daemon, SIZE), make_client(daemon, SIZE)
    # Half of all memory is one session's at the most, so two hold everything and the saves below have to wait.
    with other.reserve([os.urandom(32) for _ in range(8)]) as first, greedy.reserve([os.urandom(32) for _ in range(7)]) as second:
        assert (len(first.granted), len(second.granted)) == (8, 7)
        third = make_client(daemon, SIZE)
        with third.reserve([os.urandom(32)]) as last, grpc.insecure_channel(daemon.address) as channel:
            assert len(last.granted) == 1
            stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
            request = pb.SaveRequest(session=greedy.session_token, keys=os.urandom(32), wait_ms=60_000)
            waiting = [stub.Save.future(request) for _ in range(MAX_CALLS + 9)]  # the session's own stream is one more
            assert until(lambda: sum(call.done() for call in waiting) == 10)
            for call in (call for call in waiting if call.done()):
                assert call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "calls of this session are in progress" in call.details()
            assert other.lookup([bytes(32)]).reason is None, "others are served"
            for call in waiting:
                call.cancel()
            assert until(lambda: answers(stub, greedy)), "places come back"


def answers(stub: Any, client: Client) -> bool:
    try:
        stub.Lookup(pb.LookupRequest(session=client.session_token, keys=bytes(32)), timeout=10)
    except grpc.RpcError:
        return False
    return True
