"""Goal: sessions live and die with their processes, and only then is anything taken back.

Method: real client processes that are killed while they hold slots, watched through the daemon's status.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import grpc
import numpy as np
import pytest

from kvtierd import PROTOCOL_VERSION
from kvtierd.client import Client
from kvtierd.errors import Reason
from kvtierd.model import MAX_TTL_S, Namespace
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import kvtier_pb2 as kv
from kvtierd.v1 import kvtier_pb2_grpc
from tests.daemon.conftest import MIB

MAX_TTL_MS = int(MAX_TTL_S * 1000)
MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]


def hold_slots(address: str, keys: list[bytes], pipe: Connection) -> None:
    """Child process: take slots and wait to be killed while holding them."""
    client = Client(Namespace(shard_bytes=(MIB,), model="m"), address, require=True, timeout_s=20)
    reservation = client.reserve(keys)
    pipe.send((client.session_token, [len(v) for v in reservation.views(0)]))
    time.sleep(600)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 15) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def test_killed_client_gives_its_slots_back_and_a_stopped_one_does_not(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    keys = [os.urandom(32) for _ in range(5)]
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    child = spawn.Process(target=hold_slots, args=(daemon.address, keys, there))
    child.start()
    try:
        assert here.poll(60)
        _, sizes = here.recv()
        assert sizes == [MIB]
        cpu = lambda: daemon.status().tiers[0]  # noqa: E731
        assert cpu().pinned_bytes == 5 * MIB
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        client = make_client(daemon, MIB)
        assert client.save(keys, [np.zeros(MIB, np.uint8)] * 5).rejected == {"IN_PROGRESS": 5}
        time.sleep(1.0)  # whatever a time-out would do, it would have done something by now or never
        assert cpu().pinned_bytes == 5 * MIB, "a live process keeps its slots, however slow it is"
        os.kill(child.pid, signal.SIGKILL)
        wait_for(lambda: cpu().pinned_bytes == 0, "the slots of a dead process come back")
        assert client.save(keys, [np.zeros(MIB, np.uint8)] * 5).saved == 5
        assert len(daemon.status().sessions) == 1
    finally:
        child.kill()
        child.join()


def attach(stub: kvtier_pb2_grpc.KvTierServiceStub, hello: kv.Hello) -> kv.Welcome:
    stream = stub.Attach(iter([kv.AttachRequest(hello=hello)]), timeout=10)
    return next(stream).welcome


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (kv.Hello(protocol_version=99), Reason.PROTOCOL_VERSION),
        (kv.Hello(protocol_version=PROTOCOL_VERSION), Reason.LAYOUT_MISMATCH),
        (
            kv.Hello(protocol_version=PROTOCOL_VERSION, namespace=kv.Namespace(shard_bytes=[4096], kv_layout="sideways")),
            Reason.UNKNOWN_LAYOUT,
        ),
        (
            kv.Hello(protocol_version=PROTOCOL_VERSION, namespace=kv.Namespace(shard_bytes=[4096], attention="mha", tp_size=2)),
            Reason.LAYOUT_MISMATCH,
        ),
        (
            kv.Hello(protocol_version=PROTOCOL_VERSION, namespace=kv.Namespace(shard_bytes=[4096]), tenant="x" * 500),
            Reason.BAD_REQUEST,
        ),
    ],
)
def test_bad_hello_is_refused_with_its_reason(make_daemon: MakeDaemon, hello: kv.Hello, reason: Reason) -> None:
    daemon = make_daemon()
    with grpc.insecure_channel(daemon.address) as channel, pytest.raises(grpc.RpcError) as caught:
        attach(kvtier_pb2_grpc.KvTierServiceStub(channel), hello)
    details = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
    assert reason.name.encode() in details
    assert not daemon.status().sessions


def test_calls_with_bad_arguments_are_refused(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, MIB)
    other = make_client(daemon, MIB)
    token = client.session_token
    with grpc.insecure_channel(daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)

        def reason(call: Callable[..., object], request: object) -> str:
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=10)
            metadata = dict(caught.value.trailing_metadata() or ())
            return metadata.get("grpc-status-details-bin", b"").decode("latin1") + caught.value.code().name

        assert "BAD_KEY" in reason(stub.Lookup, kv.LookupRequest(session=token, keys=b"x" * 33))
        assert "TOO_MANY_KEYS" in reason(stub.Save, kv.SaveRequest(session=token, keys=b"x" * 32 * 65_537))
        assert "RESOURCE_EXHAUSTED" in reason(stub.Save, kv.SaveRequest(session=token, keys=b"x" * 32_000_000))
        assert "UNKNOWN_SESSION" in reason(stub.Lookup, kv.LookupRequest(session=b"nobody", keys=b"x" * 32))
        assert "UNKNOWN_TICKET" in reason(stub.Commit, kv.CommitRequest(session=token, ticket=12345))
        grant = stub.Save(kv.SaveRequest(session=token, keys=b"k" * 32), timeout=10)
        assert "UNKNOWN_TICKET" in reason(stub.Commit, kv.CommitRequest(session=other.session_token, ticket=grant.ticket))
        assert "UNKNOWN_TICKET" in reason(stub.Commit, kv.CommitRequest(session=token, ticket=grant.ticket, indexes=[7]))
        assert stub.Commit(kv.CommitRequest(session=token, ticket=grant.ticket), timeout=10).committed == 1
        assert "UNKNOWN_TICKET" in reason(stub.Commit, kv.CommitRequest(session=token, ticket=grant.ticket))
        assert "UNKNOWN_TICKET" in reason(stub.Release, kv.ReleaseRequest(session=token, ticket=grant.ticket))
        assert "BAD_REQUEST" in reason(stub.Pin, kv.PinRequest(session=token, keys=b"k" * 32, expires_s=-1))
        for ttl_ms in (MAX_TTL_MS + 1, 2**64 - 1):
            assert "BAD_REQUEST" in reason(stub.Save, kv.SaveRequest(session=token, keys=b"t" * 32, ttl_ms=ttl_ms))
            part = kv.SaveBytesRequest(session=token, key=b"t" * 32, data=b"x", ttl_ms=ttl_ms)
            assert "BAD_REQUEST" in reason(stub.SaveBytes, iter([part]))
        assert stub.Save(kv.SaveRequest(session=token, keys=b"k" * 32, ttl_ms=MAX_TTL_MS), timeout=10).outcomes == [2], "held"
        assert stub.Lookup(kv.LookupRequest(session=token), timeout=10).held == 0, "no keys is no error"
        assert stub.Save(kv.SaveRequest(session=token), timeout=10).ticket == 0
    assert client.lookup([b"k" * 32]).held == 1


def test_bytes_of_a_session_that_ended_go_nowhere(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "8MiB"}, nvme={"capacity": 0})
    leaving = make_client(daemon, 4 * MIB, bytes_only=True)
    token = leaving.session_token
    half_sent, go_on = threading.Event(), threading.Event()

    def parts() -> Iterator[kv.SaveBytesRequest]:
        yield kv.SaveBytesRequest(session=token, key=b"a" * 32, data=b"x" * (2 * MIB))
        half_sent.set()
        assert go_on.wait(30)
        yield kv.SaveBytesRequest(key=b"a" * 32, data=b"x" * (2 * MIB))

    with grpc.insecure_channel(daemon.address) as channel:
        call = kvtier_pb2_grpc.KvTierServiceStub(channel).SaveBytes.future(parts(), timeout=30)
        assert half_sent.wait(30)
        wait_for(lambda: daemon.status().tiers[0].pinned_bytes > 0, "the block has its slot")
        leaving.close()
        wait_for(lambda: not daemon.status().sessions, "the session ends with its stream")
        staying = make_client(daemon, 4 * MIB)
        keys = [b"b" * 32, b"c" * 32]
        assert staying.save(keys, [bytes(4 * MIB)] * 2, wait_s=5).saved == 2, "all of memory is free again"
        go_on.set()
        with pytest.raises(grpc.RpcError) as caught:
            call.result()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    out = [np.ones(4 * MIB, np.uint8) for _ in keys]
    assert staying.load(keys, out).loaded == 2
    assert not any(o.any() for o in out), "late parts must not land in slots of others"
