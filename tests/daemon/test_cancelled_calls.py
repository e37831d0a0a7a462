"""Goal: a unary call whose caller gives up leaves nothing granted: no slot reserved, no block pinned.

Method: raw gRPC calls to a real daemon. An answer larger than what the connection buffers cannot be delivered to a caller that
does not read it, so that the moment of giving up is certain; calls that are cancelled at random end what they had by name.
"""

from __future__ import annotations

import os
import queue
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from kvtierd.client import Client
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as admin
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc
from tests.daemon.conftest import MIB
from tests.daemon.test_hostile import RawSession, until
from tests.daemon.test_roundtrip import to_nvme_only

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
BLOCK = 4096
MANY = 8000
"""Blocks of one load or save whose answer is larger than what a connection buffers (64 KiB)."""
WAITING = 256
"""Calls of one stream that may wait at one time."""
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]


class Caller:
    """A session, and unary calls for it on a connection of their own; Save and Pin as calls whose answer can stay unread."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon
        self.session = RawSession(daemon, BLOCK)
        self.token = self.session.welcome()
        self.channel = grpc.insecure_channel(daemon.address, options=SMALL_WINDOW)
        self.stub = kvtier_pb2_grpc.KvTierServiceStub(self.channel)
        self.unread_save = self.channel.unary_stream(
            "/kvtierd.v1.KvTierService/Save", pb.SaveRequest.SerializeToString, pb.SaveResponse.FromString
        )

    def nothing_held(self) -> bool:
        """No ticket is open and nothing is pinned."""
        status = self.daemon.status()
        return not any(s.tickets or s.ticket_bytes for s in status.sessions) and not status.tiers[0].pinned_bytes

    def holds(self, tickets: int) -> bool:
        """So many tickets are open."""
        return sum(s.tickets for s in self.daemon.status().sessions) == tickets

    def save(self, keys: bytes) -> None:
        """Save blocks, whatever their slots contain."""
        answer = self.stub.Save(pb.SaveRequest(session=self.token, keys=keys, wait_ms=5000))
        assert set(answer.outcomes) == {pb.SAVE_OUTCOME_GRANTED}
        self.stub.Commit(pb.CommitRequest(session=self.token, ticket=answer.ticket))


@pytest.fixture
def caller(make_daemon: MakeDaemon) -> Iterator[Caller]:
    found = Caller(make_daemon(cpu={"capacity": "128MiB", "prefault": False}, nvme={"capacity": "0"}))
    yield found
    found.session.close()
    found.channel.close()


@pytest.mark.parametrize("how", ["cancel", "close the connection"])
@pytest.mark.parametrize("kind", ["save", "load"])
def test_an_answer_that_is_not_delivered_is_taken_back(caller: Caller, kind: str, how: str) -> None:
    keys = os.urandom(32 * MANY)
    if kind == "load":
        caller.save(keys)
        assert caller.nothing_held()
        call = caller.stub.Load(pb.LoadRequest(session=caller.token, keys=keys, deadline_ms=60_000))
    else:
        call = caller.unread_save(pb.SaveRequest(session=caller.token, keys=keys + os.urandom(32 * 4 * MANY)))
    assert until(lambda: caller.holds(1)), "granted"
    if how == "cancel":
        call.cancel()
    else:
        caller.channel.close()
    assert until(caller.nothing_held)
    assert "Traceback" not in caller.daemon.log()


def test_an_answer_that_is_read_late_is_not_taken_back(caller: Caller) -> None:
    keys = os.urandom(32 * MANY)
    call = caller.unread_save(pb.SaveRequest(session=caller.token, keys=keys))
    assert until(lambda: caller.holds(1))
    (answer,) = list(call)
    assert len(answer.slots) == MANY
    assert caller.stub.Commit(pb.CommitRequest(session=caller.token, ticket=answer.ticket)).committed == MANY
    (step,) = caller.stub.Load(pb.LoadRequest(session=caller.token, keys=keys, deadline_ms=60_000))
    assert caller.holds(1)
    caller.stub.Release(pb.ReleaseRequest(session=caller.token, ticket=step.ticket))
    assert caller.nothing_held()


def test_a_save_that_waits_for_room_and_is_cancelled_gets_nothing(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(cpu={"capacity": "1MiB", "prefault": False}, nvme={"capacity": "0"}, server={"max_ticket_share": 1.0})
    holder, waiter = Caller(daemon), Caller(daemon)
    held = holder.stub.Save(pb.SaveRequest(session=holder.token, keys=os.urandom(32 * MIB // BLOCK)))
    assert len(held.slots) == MIB // BLOCK
    call = waiter.stub.Save.future(pb.SaveRequest(session=waiter.token, keys=os.urandom(32), wait_ms=60_000))
    time.sleep(0.3)  # give it the time to wait; nothing depends on it
    call.cancel()
    assert until(lambda: holder.holds(1))
    holder.stub.Abort(pb.AbortRequest(session=holder.token, ticket=held.ticket))
    assert until(holder.nothing_held)
    for caller in (holder, waiter):
        caller.session.close()
        caller.channel.close()


def full_memory(daemon: DaemonProcess) -> tuple[Caller, bytes, bytes, int]:
    """Memory full of slots being filled but for one block.

    Returns:
        Their caller, the key of the block in memory, that of a block which is on NVMe only, and the ticket of the slots.
    """
    caller = Caller(daemon)
    upper, lower = os.urandom(32), os.urandom(32)
    caller.save(upper + lower)
    to_nvme_only(daemon)
    (step,) = caller.stub.Load(pb.LoadRequest(session=caller.token, keys=upper, deadline_ms=60_000))
    caller.stub.Release(pb.ReleaseRequest(session=caller.token, ticket=step.ticket))
    held = caller.stub.Save(pb.SaveRequest(session=caller.token, keys=os.urandom(32 * (MIB // BLOCK - 1))))
    assert len(held.slots) == MIB // BLOCK - 1
    return caller, upper, lower, held.ticket


SMALL: dict[str, dict[str, Any]] = {
    "cpu": {"capacity": "1MiB", "prefault": False}, "nvme": {"capacity": "64MiB"}, "server": {"max_ticket_share": 1.0},
}  # fmt: skip


def test_a_load_that_is_cancelled_half_way_gives_everything_back(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(**SMALL)
    filler, upper, lower, _ = full_memory(daemon)
    caller = Caller(daemon)
    call = caller.stub.Load(pb.LoadRequest(session=caller.token, keys=upper + lower, deadline_ms=200_000))
    step = next(call)
    assert (list(step.indexes), step.done) == ([0], False)
    assert caller.holds(2)
    call.cancel()
    assert until(lambda: caller.holds(1)), "the slots being filled are another call's"
    for one in (caller, filler):
        one.session.close()
        one.channel.close()


def test_a_load_that_is_cancelled_after_its_last_message_is_ended_by_name(caller: Caller) -> None:
    keys = os.urandom(32 * 64)
    caller.save(keys)
    call = caller.stub.Load(pb.LoadRequest(session=caller.token, keys=keys, deadline_ms=60_000, request_id="mine"))
    assert next(call).done
    call.cancel()  # whether the daemon has noticed its end before is open
    caller.stub.Release(pb.ReleaseRequest(session=caller.token, request_id="mine"))
    assert until(caller.nothing_held)


@pytest.mark.parametrize("kind", ["load", "prefetch"])
def test_calls_that_are_refused_because_too_many_wait_keep_nothing(make_daemon: MakeDaemon, kind: str) -> None:
    """Goal: a load or prefetch that the stream refuses as overload pins nothing. Method: more calls than may wait, all waiting."""
    daemon = make_daemon(**SMALL)
    filler, _, lower, _ = full_memory(daemon)
    assert filler.stub.Save(pb.SaveRequest(session=filler.token, keys=os.urandom(32))).ticket, "the last slot"
    hello = pb.Hello(protocol_version=1, namespace=pb.Namespace(shard_bytes=[BLOCK], model="m"))
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    outbox.put(pb.AttachRequest(hello=hello))
    for number in range(WAITING + 40):
        call = pb.Call(id=number)
        if kind == "load":
            call.load.MergeFrom(pb.LoadRequest(keys=lower, deadline_ms=200_000))
        else:
            call.prefetch.MergeFrom(pb.PrefetchRequest(keys=lower, deadline_ms=200_000, wait=True))
        outbox.put(pb.AttachRequest(call=call))
    stream = filler.stub.Attach(iter(outbox.get, None))
    refused = 0
    for message in stream:
        refused += message.reply.error.reason == pb.ERROR_REASON_OVERLOADED
        if refused == 40:
            break
    assert max(s.tickets for s in daemon.status().sessions) == WAITING, "those that wait, and no others"
    outbox.put(None)
    stream.cancel()
    assert until(lambda: filler.holds(2))
    filler.session.close()
    filler.channel.close()


def give_up(call: Any, rng: random.Random) -> bool:
    """Cancel a call at a random moment. Returns whether its answer had not come yet."""
    time.sleep(rng.random() * 0.002)
    return bool(call.cancel()) or not call.done() or call.cancelled()


def test_calls_that_are_given_up_at_any_moment_are_ended_by_name(caller: Caller) -> None:
    rng = random.Random(7)
    keys = os.urandom(32 * 4)
    caller.save(keys)
    for number in range(150):
        name = f"call {number}"
        give_up(caller.stub.Load(pb.LoadRequest(session=caller.token, keys=keys, deadline_ms=1000, request_id=name)), rng)
        caller.stub.Release(pb.ReleaseRequest(session=caller.token, request_id=name))
        give_up(caller.stub.Save.future(pb.SaveRequest(session=caller.token, keys=os.urandom(32), request_id=name + "s")), rng)
        caller.stub.Abort(pb.AbortRequest(session=caller.token, request_id=name + "s"))
    assert until(caller.nothing_held)
    assert "Traceback" not in caller.daemon.log()


def test_a_pin_that_is_cancelled_can_be_found_and_ended(caller: Caller) -> None:
    keys = os.urandom(32 * 4)
    caller.save(keys)
    rng = random.Random(3)
    for _ in range(50):
        give_up(caller.stub.Pin.future(pb.PinRequest(session=caller.token, keys=keys, expires_s=3600)), rng)
    with caller.daemon.admin() as stub:
        for ticket in {pin.ticket for pin in stub.ListPins(admin.ListPinsRequest(page_size=1000)).pins}:
            stub.UnpinBlocks(admin.UnpinBlocksRequest(ticket=ticket))
    assert until(caller.nothing_held)


def test_names_of_requests_are_checked(caller: Caller) -> None:
    stub, token = caller.stub, caller.token
    first = stub.Save(pb.SaveRequest(session=token, keys=os.urandom(32), request_id="a"))
    for request, part in (
        (pb.SaveRequest(session=token, keys=os.urandom(32), request_id="a"), "names an open ticket"),
        (pb.SaveRequest(session=token, keys=os.urandom(32), request_id="a" * 65), "at most 64"),
        (pb.AbortRequest(session=token, ticket=first.ticket, request_id="a"), "exclude each other"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            (stub.Save if isinstance(request, pb.SaveRequest) else stub.Abort)(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert part in refused.value.details()  # type: ignore[attr-defined]
    stub.Abort(pb.AbortRequest(session=token, request_id="a"))
    stub.Abort(pb.AbortRequest(session=token, request_id="a"))
    assert caller.nothing_held()
    again = stub.Save(pb.SaveRequest(session=token, keys=os.urandom(32), request_id="a"))
    assert again.ticket
