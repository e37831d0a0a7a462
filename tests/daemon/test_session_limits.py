"""Goal: one session cannot take what others need: memory, tickets, pins, calls, processes.

Method: a real daemon; a session that asks for more and more, and another one that is served all the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvtierd.client import Client
from kvtierd.errors import Reason, RequestError
from kvtierd.runtime.sessions import MAX_CALLS
from kvtierd.service.attach import MAX_WAITING_CALLS
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc
from tests.daemon.test_hostile import RawSession, until

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
SIZE = 64 << 10


def some_keys(count: int) -> bytes:
    return os.urandom(32 * count)


def status_of(call: Callable[[], object]) -> tuple[str, str]:
    """Code and text of a call that is refused."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code().name, str(caught.value.details())  # type: ignore[attr-defined]


def test_a_session_has_so_many_open_tickets(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "16MiB"}, server={"max_tickets": 3})
    greedy, other = make_client(daemon, SIZE).session_token, make_client(daemon, SIZE).session_token
    with grpc.insecure_channel(daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        tickets = [stub.Save(pb.SaveRequest(session=greedy, keys=some_keys(1))).ticket for _ in range(3)]
        assert all(tickets)
        held = some_keys(1)
        for call in (
            lambda: stub.Save(pb.SaveRequest(session=greedy, keys=some_keys(1))),
            lambda: list(stub.Load(pb.LoadRequest(session=greedy, keys=held, deadline_ms=100))),
            lambda: list(stub.Prefetch(pb.PrefetchRequest(session=greedy, keys=held, deadline_ms=100))),
        ):
            code, text = status_of(call)
            assert (code, "3 tickets are open" in text) == ("RESOURCE_EXHAUSTED", True)
        assert stub.Save(pb.SaveRequest(session=other, keys=some_keys(1))).ticket
        stub.Abort(pb.AbortRequest(session=greedy, ticket=tickets[0]))
        assert stub.Save(pb.SaveRequest(session=greedy, keys=some_keys(1))).ticket


def test_a_session_has_so_many_slots(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "4MiB", "extent": "1MiB"}, server={"max_ticket_share": 0.25})
    greedy, other = make_client(daemon, SIZE).session_token, make_client(daemon, SIZE).session_token
    with grpc.insecure_channel(daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        outcomes = list(stub.Save(pb.SaveRequest(session=greedy, keys=some_keys(40))).outcomes)
        assert outcomes.count(pb.SAVE_OUTCOME_GRANTED) == 16, "a quarter of 4 MiB in slots of 64 KiB"
        assert outcomes.count(pb.SAVE_OUTCOME_LIMIT) == 24
        more = stub.Save(pb.SaveRequest(session=greedy, keys=some_keys(1)))
        assert list(more.outcomes) == [pb.SAVE_OUTCOME_LIMIT]
        assert list(stub.Save(pb.SaveRequest(session=other, keys=some_keys(1))).outcomes) == [pb.SAVE_OUTCOME_GRANTED]


def test_what_loads_hold_counts_as_slots(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "4MiB", "extent": "1MiB"}, server={"max_ticket_share": 0.25})
    greedy = make_client(daemon, SIZE)
    keys = [os.urandom(32) for _ in range(30)]
    for start in range(0, 30, 10):
        assert greedy.save(keys[start : start + 10], [bytes(SIZE)] * 10).saved == 10
    with greedy.fetch(keys[:16]) as fetch, grpc.insecure_channel(daemon.address) as channel:
        assert len(fetch.poll(10)) == 16
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        request = pb.LoadRequest(session=greedy.session_token, keys=b"".join(keys[16:]), deadline_ms=300)
        assert not [index for step in stub.Load(request) for index in step.indexes]
        save = pb.SaveRequest(session=greedy.session_token, keys=some_keys(1))
        assert list(stub.Save(save).outcomes) == [pb.SAVE_OUTCOME_LIMIT]
    assert greedy.load(keys[16:], [bytearray(SIZE) for _ in keys[16:]]).loaded == 14, "once they are released"


def test_pins_hold_so_much(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "4MiB", "extent": "1MiB"}, nvme={"capacity": "0"})
    one, other, third = (make_client(daemon, SIZE, tenant=name) for name in ("one", "second", "third"))
    keys = [os.urandom(32) for _ in range(16)]
    for client in (one, other, third):
        for part in (keys[:8], keys[8:]):
            assert client.save(part, [bytes(SIZE)] * 8).saved == 8
    assert one.pin(keys[:13], 60).pinned == 13
    for more in (keys[12:], keys[:4]):  # whoever pins a block once more counts too
        with pytest.raises(RequestError, match=r"pins of tenant 'one' .* unpin or pin fewer keys, or") as caught:
            one.pin(more, 60)
        assert caught.value.reason is Reason.LIMIT
    assert other.pin(keys[:14], 60).pinned == 14, "what one tenant pins leaves others theirs"
    with pytest.raises(RequestError, match=r"all pins together may hold at most .* unpin or pin fewer keys"):
        third.pin(keys[:8], 60)


def test_a_stream_has_so_many_calls_that_wait(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "1MiB", "prefault": False}, nvme={"capacity": "0"})
    fillers = [make_client(daemon, SIZE) for _ in range(2)]
    session = RawSession(daemon, SIZE)
    session.welcome()
    with fillers[0].reserve([os.urandom(32) for _ in range(8)]), fillers[1].reserve([os.urandom(32) for _ in range(8)]) as full:
        assert len(full.granted) == 8
        for number in range(1, MAX_WAITING_CALLS + 11):
            save = pb.SaveRequest(keys=some_keys(1), wait_ms=60_000)
            session.send(pb.AttachRequest(call=pb.Call(id=number, save=save)))
        refused = [next(session.stream).reply for _ in range(10)]
        assert {reply.error.reason for reply in refused} == {pb.ERROR_REASON_OVERLOADED}
        assert {reply.id for reply in refused} == set(range(MAX_WAITING_CALLS + 1, MAX_WAITING_CALLS + 11))
        assert fillers[0].lookup([bytes(32)]).reason is None
    session.close()


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
