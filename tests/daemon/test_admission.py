"""Goal: a daemon that is behind refuses calls that begin something, before any work and with a hint; it serves those that end
something, and is not misled by a busy machine.

Method: measurements fed by hand; a daemon in this process whose admission has been told that it is behind, called both ways; a real
one whose calls wait.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvtierd.client.transport import rpc_failure
from kvtierd.config import load_config
from kvtierd.errors import Reason, RequestError
from kvtierd.service.admission import BEGINNING, HINT_S, MOST, Admission
from kvtierd.service.server import Daemon
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc
from tests.daemon.conftest import MIB
from tests.daemon.test_hostile import RawSession, until

LATE = (0.5, 0.4)
"""A look half a second late, most of it computed."""
IDLE = (0.0, 0.001)


def outcomes(admission: Admission, kind: str, count: int = 1000) -> Counter[str]:
    found: Counter[str] = Counter()
    for _ in range(count):
        try:
            admission.check(kind)
            found["served"] += 1
        except RequestError as e:
            found["refused" if e.reason is Reason.OVERLOADED and HINT_S[0] <= e.retry_after_s <= HINT_S[1] else str(e)] += 1
    return found


def test_a_burst_is_served_and_what_lasts_is_refused_more_and_more() -> None:
    admission = Admission(8)
    for _ in range(5):
        admission.note(*LATE)
    assert outcomes(admission, "load") == {"served": 1000}
    shares = []
    for _ in range(30):
        admission.note(*LATE)
        shares.append(outcomes(admission, "load")["refused"] / 1000)
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.1, abs=0.01)
    assert shares[-1] == pytest.approx(MOST, abs=0.01), "some are served, or nobody would learn that there is room"
    for _ in range(30):
        admission.note(*IDLE)
    assert outcomes(admission, "load") == {"served": 1000}


def test_what_makes_room_is_always_served() -> None:
    admission = Admission(8)
    for _ in range(30):
        admission.note(*LATE)
    for kind in ("commit", "abort", "release", "cancel", "unpin", "evict", "attach"):
        assert outcomes(admission, kind) == {"served": 1000}
    assert all(outcomes(admission, kind)["refused"] for kind in BEGINNING)


def test_a_machine_that_was_stopped_or_busy_is_no_overload() -> None:
    admission = Admission(8)
    for _ in range(30):
        admission.note(5.0, 0.002)
    assert outcomes(admission, "save") == {"served": 1000}


# ---- both ways into a daemon


@pytest.fixture
async def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The address of a daemon that refuses nearly everything that it may refuse."""

    async def no_looks(self: Admission) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Admission, "watch", no_looks)
    flags = {
        "server.socket": tmp_path / "k.sock",
        "server.metrics": "",
        "nvme.capacity": 0,
        "cpu.capacity": MIB,
        "cpu.prefault": False,
    }
    daemon = Daemon(load_config(env={}, flags=flags))
    serving = asyncio.ensure_future(daemon.serve())
    while not daemon.ready()[0]:
        assert not serving.done(), serving.result()
        await asyncio.sleep(0.01)
    for _ in range(30):
        daemon._admission.note(*LATE)
    yield f"unix:{tmp_path}/k.sock"
    daemon.stopping.set()
    await serving


async def stream_calls(stub: Any, *calls: pb.Call) -> tuple[bytes, list[pb.Reply], Any]:
    """Attach, make calls inside the stream, and return the token, the replies and the stream, still open."""
    stream = stub.Attach()
    hello = pb.Hello(protocol_version=1, namespace=pb.Namespace(shard_bytes=[4096], model="m"))
    await stream.write(pb.AttachRequest(hello=hello))
    token = (await stream.read()).welcome.session
    replies = []
    for call in calls:
        await stream.write(pb.AttachRequest(call=call))
        replies.append((await stream.read()).reply)
    return token, replies, stream


async def test_refusals_have_their_reason_and_a_hint_both_ways(busy: str) -> None:
    key = os.urandom(32)
    async with grpc.aio.insecure_channel(busy) as channel:
        stub: Any = kvtier_pb2_grpc.KvTierServiceStub(channel)
        saves = [pb.Call(id=n, save=pb.SaveRequest(keys=key)) for n in range(3)]
        token, replies, stream = await stream_calls(stub, *saves, pb.Call(id=9, release=pb.ReleaseRequest(ticket=7)))
        refused = [r.error for r in replies[:3] if r.HasField("error")]
        assert len(refused) >= 2
        assert {(e.code, e.reason) for e in refused} == {(8, pb.ERROR_REASON_OVERLOADED)}
        assert all(HINT_S[0] * 1000 <= e.retry_after_ms <= HINT_S[1] * 1000 for e in refused)
        assert replies[3].error.reason == pb.ERROR_REASON_UNKNOWN_TICKET, "served, and there is no such ticket"
        errors = []
        for _ in range(3):
            try:
                await stub.Lookup(pb.LookupRequest(session=token, keys=key))
            except grpc.aio.AioRpcError as e:
                errors.append(e)
        assert len(errors) >= 2
        for error in errors:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            status = rpc_status.from_call(error)
            assert status is not None
            retry = error_details_pb2.RetryInfo()
            assert any(detail.Unpack(retry) for detail in status.details)
            told = rpc_failure(error)
            assert isinstance(told, RequestError)
            assert told.reason is Reason.OVERLOADED
            assert told.retry_after_s == pytest.approx(retry.retry_delay.ToMilliseconds() / 1000)
        stream.cancel()


# ---- calls that wait


def test_calls_of_all_sessions_that_wait_have_a_limit(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(cpu={"capacity": "1MiB", "prefault": False}, nvme={"capacity": 0}, server={"max_concurrent_calls": 6})
    holder, first, second = (RawSession(daemon, MIB) for _ in range(3))
    for session in (holder, first, second):
        session.welcome()
    holder._outbox.put(pb.AttachRequest(call=pb.Call(id=1, save=pb.SaveRequest(keys=os.urandom(32)))))
    assert next(holder.stream).reply.save.ticket, "all the memory there is"
    for number in range(10, 16):
        session = (first, second)[number % 2]
        session._outbox.put(pb.AttachRequest(call=pb.Call(id=number, save=pb.SaveRequest(keys=os.urandom(32), wait_ms=60_000))))
    probe = pb.Call(id=99, lookup=pb.LookupRequest(keys=os.urandom(32)))
    for session in (first, second):
        session._outbox.put(pb.AttachRequest(call=probe))
        assert next(session.stream).reply.id == 99, "those before it wait"
    second._outbox.put(pb.AttachRequest(call=pb.Call(id=50, save=pb.SaveRequest(keys=os.urandom(32), wait_ms=60_000))))
    refused = next(second.stream).reply
    assert (refused.id, refused.error.reason) == (50, pb.ERROR_REASON_OVERLOADED)
    assert "max_concurrent_calls" in refused.error.message
    assert refused.error.retry_after_ms >= 100
    first.close()
    # What waited for a session that has gone counts no more.
    assert until(lambda: len(daemon.status().sessions) == 2)
    second._outbox.put(pb.AttachRequest(call=pb.Call(id=51, save=pb.SaveRequest(keys=os.urandom(32), wait_ms=1))))
    while (reply := next(second.stream).reply).id != 51:
        pass
    assert reply.error.reason != pb.ERROR_REASON_OVERLOADED
    for session in (holder, second):
        session.close()
