"""Goal: callers that leave at the worst moment, and a machine that runs out of something, cost neither bytes nor service.

Method: a real daemon; raw gRPC calls that do what the library would not; what is left afterwards is looked at.
"""

import contextlib
import os
import queue
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from kvtierd.client import Client
from kvtierd.model import PAGE_BYTES
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as admin
from kvtierd.v1 import fdpass_pb2 as fd
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc
from tests.daemon.conftest import MIB

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
KIB = 1 << 10


class RawSession:
    """An Attach stream without the library, on a connection of its own."""

    def __init__(self, daemon: DaemonProcess, *shard_bytes: int, model: str = "m") -> None:
        self.channel = grpc.insecure_channel(daemon.address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = kvtier_pb2_grpc.KvTierServiceStub(self.channel)
        self._outbox: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        hello = pb.Hello(protocol_version=1, namespace=pb.Namespace(shard_bytes=shard_bytes, model=model))
        self._outbox.put(pb.AttachRequest(hello=hello))
        requests: Iterator[Any] = iter(self._outbox.get, None)
        self.stream = self.stub.Attach(requests)

    def welcome(self) -> bytes:
        """Wait for Welcome. Returns the token."""
        token: bytes = next(self.stream).welcome.session
        return token

    def send(self, message: pb.AttachRequest) -> None:
        """Send something down the stream."""
        self._outbox.put(message)

    def close(self) -> None:
        """End the stream and the connection."""
        self._outbox.put(None)
        self.stream.cancel()
        self.channel.close()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """Wait for a condition. Returns whether it came true."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def no_session(daemon: DaemonProcess) -> bool:
    return not daemon.status().sessions


def filled(number: int, size: int) -> np.ndarray:
    return np.full(size, number, np.uint8)


# ---- wrong bytes


def test_bytes_that_arrive_after_their_session_has_ended_reach_no_slot(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 256 * KIB
    daemon = make_daemon(cpu={"capacity": "1MiB", "prefault": False}, nvme={"capacity": "0"})
    session = RawSession(daemon, size)
    parts: queue.SimpleQueue[pb.SaveBytesRequest | None] = queue.SimpleQueue()
    piece = b"\xaa" * (64 * KIB)
    key = os.urandom(32)
    parts.put(pb.SaveBytesRequest(session=session.welcome(), key=key, data=piece))
    with grpc.insecure_channel(daemon.address) as channel:
        call = kvtier_pb2_grpc.KvTierServiceStub(channel).SaveBytes.future(iter(parts.get, None))
        assert until(lambda: daemon.status().tiers[0].used_bytes > 0)
        session.close()
        assert until(lambda: no_session(daemon))
        # Another client gets all slots there are, so also the one that the stream had.
        client = make_client(daemon, size)
        keys = [os.urandom(32) for _ in range(4)]
        assert client.save(keys[:2], [filled(1, size)] * 2).saved == 2
        assert client.save(keys[2:], [filled(1, size)] * 2).saved == 2
        for _ in range(3):
            parts.put(pb.SaveBytesRequest(key=key, data=piece))
        parts.put(None)
        with contextlib.suppress(grpc.RpcError):
            call.result(10)
    for key in keys:
        out = np.zeros(size, np.uint8)
        assert client.load([key], [out]).loaded == 1
        assert (out == 1).all(), "the block has bytes of a stream whose session had ended"


def test_bytes_of_a_save_that_its_session_aborted_reach_no_slot(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 256 * KIB
    daemon = make_daemon(cpu={"capacity": "1MiB", "prefault": False}, nvme={"capacity": "0"})
    session = RawSession(daemon, size)
    token = session.welcome()
    parts: queue.SimpleQueue[pb.SaveBytesRequest | None] = queue.SimpleQueue()
    piece, key = b"\xaa" * (64 * KIB), os.urandom(32)
    parts.put(pb.SaveBytesRequest(session=token, key=key, data=piece))
    call = session.stub.SaveBytes.future(iter(parts.get, None))
    assert until(lambda: daemon.status().tiers[0].used_bytes > 0)
    for ticket in range(1, 20):  # tickets are counted, so they can be guessed
        with contextlib.suppress(grpc.RpcError):
            session.stub.Abort(pb.AbortRequest(session=token, ticket=ticket))
    client = make_client(daemon, size)
    keys = [os.urandom(32) for _ in range(4)]
    for pair in (keys[:2], keys[2:]):
        client.save(pair, [filled(1, size)] * 2)
    for _ in range(3):
        parts.put(pb.SaveBytesRequest(key=key, data=piece))
    parts.put(None)
    with contextlib.suppress(grpc.RpcError):
        call.result(10)
    for key in keys:
        out = np.zeros(size, np.uint8)
        if client.load([key], [out]).loaded:
            assert (out == 1).all(), "the block has bytes of a save that had been aborted"
    session.close()


def test_a_stream_of_bytes_ends_with_its_session(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 16 * MIB
    daemon = make_daemon(cpu={"capacity": "32MiB", "extent": "16MiB", "prefault": False}, nvme={"capacity": "0"})
    client = make_client(daemon, size)
    key = os.urandom(32)
    assert client.save([key], [filled(1, size)]).saved == 1
    session = RawSession(daemon, size)
    with grpc.insecure_channel(daemon.address) as channel:
        request = pb.LoadBytesRequest(session=session.welcome(), keys=key, deadline_ms=20_000)
        call = kvtier_pb2_grpc.KvTierServiceStub(channel).LoadBytes(request)
        got = bytearray(next(call).data)  # and no more for now: the daemon waits for its reader
        session.close()
        assert until(lambda: len(daemon.status().sessions) == 1)
        assert client.evict([key]) == 1
        for number in (2, 3):
            assert client.save([os.urandom(32)], [filled(number, size)]).saved == 1
        with contextlib.suppress(grpc.RpcError):
            for part in call:
                got += part.data
    assert bytes(got) == b"\x01" * len(got), "the stream went on reading a slot that is another block's"


def test_evicted_block_stays_away_though_it_was_being_written_down(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 48 * MIB
    for attempt in range(6):
        config: dict[str, Any] = {"cpu": {"capacity": "256MiB", "ttl": "never"}, "nvme": {"capacity": "512MiB", "direct": "off"}}
        daemon = make_daemon(f"d{attempt}", **config)
        client = make_client(daemon, size)
        key = os.urandom(32)
        assert client.save([key], [filled(1, size)]).saved == 1
        with daemon.admin() as stub:
            drain = stub.Drain.future(admin.DrainRequest(timeout_s=20, resume=True))
            time.sleep(0.005 + 0.003 * attempt)
            assert client.evict([key]) >= 1
            drain.result(20)
        saved = client.save([key], [filled(2, size)]).saved
        client.close()
        daemon.kill()
        client = make_client(daemon.start(), size)
        out = np.zeros(size, np.uint8)
        if client.load([key], [out]).loaded:
            assert (out == 2).all(), f"the evicted version came back (the new one: {saved} saved)"
        client.close()
        daemon.kill()
        shutil.rmtree(daemon.folder / "nvme")


# ---- what callers that leave must not take along


def test_attach_that_is_cancelled_leaves_no_session(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(server={"max_sessions": 20})
    with ThreadPoolExecutor(8) as closing:
        for number in range(100):
            session = RawSession(daemon, PAGE_BYTES)
            grpc.channel_ready_future(session.channel).result(10)
            time.sleep(number % 10 * 0.0004)
            session.stream.cancel()
            closing.submit(session.close)  # takes 0.2 s where somebody has waited for the channel
    assert until(lambda: no_session(daemon)), f"{len(daemon.status().sessions)} sessions of callers that have gone"
    RawSession(daemon, PAGE_BYTES).welcome()


def test_namespace_whose_first_attach_was_cancelled_reaches_nvme(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    with ThreadPoolExecutor(8) as closing:
        for number in range(30):
            session = RawSession(daemon, PAGE_BYTES, model=f"m{number}")
            grpc.channel_ready_future(session.channel).result(10)
            time.sleep(0.001 + number % 10 * 0.0006)
            session.stream.cancel()
            closing.submit(session.close)
    key = os.urandom(32)
    saved = sum(
        make_client(daemon, PAGE_BYTES, model=f"m{number}").save([key], [filled(number, PAGE_BYTES)], wait_s=5).saved
        for number in range(30)
    )
    assert saved == 30
    assert daemon.stop() == 0
    assert daemon.start().status().blocks == 30


def test_save_that_waits_for_room_ends_with_its_session(make_daemon: MakeDaemon) -> None:
    size = 256 * KIB
    daemon = make_daemon(cpu={"capacity": "1MiB", "prefault": False}, nvme={"capacity": "0"})
    holders = [RawSession(daemon, size) for _ in range(2)]
    for holder in holders:
        keys = os.urandom(64)
        assert list(holder.stub.Save(pb.SaveRequest(session=holder.welcome(), keys=keys)).outcomes) == [1, 1]
    waiter = RawSession(daemon, size)
    token = waiter.welcome()
    with grpc.insecure_channel(daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        call = stub.Save.future(pb.SaveRequest(session=token, keys=os.urandom(32), wait_ms=20_000))
        time.sleep(0.3)
        waiter.close()
        assert until(lambda: len(daemon.status().sessions) == 2)
        for holder in holders:
            holder.close()
        with contextlib.suppress(grpc.RpcError):
            call.result(10)
    assert until(lambda: no_session(daemon))
    cpu = daemon.status().tiers[0]
    assert (cpu.used_bytes, cpu.pinned_bytes) == (0, 0), "slots were granted to a session that had ended"


def test_drain_that_is_cancelled_resumes(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, MIB)
    assert client.save([os.urandom(32) for _ in range(40)], [filled(1, MIB)] * 40, wait_s=5).saved == 40
    with daemon.admin() as stub:
        drain = stub.Drain.future(admin.DrainRequest(timeout_s=100, resume=True))
        time.sleep(0.01)
        drain.cancel()
    assert until(lambda: not daemon.status().draining), "the daemon refuses saves and sessions until it is restarted"


# ---- limits


def test_sessions_never_exceed_their_limit(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(server={"max_sessions": 4})
    sessions = [RawSession(daemon, PAGE_BYTES, model=f"m{number}") for number in range(40)]
    attached = 0
    for session in sessions:
        with contextlib.suppress(grpc.RpcError):
            session.welcome()
            attached += 1
    assert attached <= 4
    for session in sessions:
        session.close()


# ---- what held


def test_sigterm_with_stuck_clients_is_quick_and_loses_nothing(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 64 * KIB
    daemon = make_daemon(cpu={"capacity": "8MiB"}, server={"drain_timeout": "3s"})
    client = make_client(daemon, size)
    keys = [os.urandom(32) for _ in range(40)]
    assert client.save(keys, [filled(7, size)] * 40).saved == 40
    session = RawSession(daemon, size)
    token = session.welcome()
    session.stub.Save(pb.SaveRequest(session=token, keys=os.urandom(640)))  # never committed
    pinned = session.stub.Load(pb.LoadRequest(session=token, keys=b"".join(keys), deadline_ms=60_000))
    assert len(next(pinned).indexes) == 40  # never released
    unread = session.stub.LoadBytes(pb.LoadBytesRequest(session=token, keys=b"".join(keys), deadline_ms=60_000))
    next(unread)
    waiting = session.stub.Save.future(pb.SaveRequest(session=token, keys=os.urandom(32 * 200), wait_ms=300_000))
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(5)]
    for stranger in strangers:
        stranger.connect(str(daemon.folder / "k.sock"))
    began_s = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began_s < 8
    waiting.cancel()
    for stranger in strangers:
        stranger.close()
    client.close()
    client = make_client(daemon.start(), size)
    out = [np.zeros(size, np.uint8) for _ in keys]
    assert client.load(keys, out).loaded == 40
    assert all((o == 7).all() for o in out)


def test_nonsense_on_both_sockets_changes_nothing(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 64 * KIB
    daemon = make_daemon()
    client = make_client(daemon, size)
    keys = [os.urandom(32) for _ in range(10)]
    assert client.save(keys, [filled(3, size)] * 10).saved == 10
    session = RawSession(daemon, size)
    token = session.welcome()
    joined = fd.DescriptorRequest(join=fd.Join(session=token, shard=-1)).SerializeToString()
    for number in range(100):
        with socket.socket(socket.AF_UNIX) as stream, contextlib.suppress(OSError):
            stream.connect(str(daemon.folder / "k.sock"))
            stream.send(os.urandom(number * 20 + 1) if number % 2 else b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(200))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets, contextlib.suppress(OSError):
            packets.connect(str(daemon.folder / "k.fd.sock"))
            for packet in ((b"", joined, os.urandom(number + 1))[number % 3], joined, joined, b"\xff" * 20_000):
                packets.send(packet)
    raw = grpc.insecure_channel(daemon.address, options=[("grpc.max_send_message_length", -1)])
    for method in ("Lookup", "Save", "Commit", "Abort", "Release", "Cancel", "Evict", "Pin", "Unpin"):
        for message in (b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0f", b"", bytes(9 * MIB)):
            with pytest.raises(grpc.RpcError):
                raw.unary_unary(f"/kvtierd.v1.KvTierService/{method}")(message, timeout=10)
    raw.close()
    session.close()
    out = [np.zeros(size, np.uint8) for _ in keys]
    assert client.load(keys, out).loaded == 10
    assert all((o == 3).all() for o in out)
    assert daemon.stop() == 0


@pytest.mark.parametrize("cut", [0, 1, 12, 63, 64, 65, 127, 128, 129, -1, -63, -64, -65])
def test_journal_that_was_cut_costs_blocks_but_no_bytes(make_daemon: MakeDaemon, make_client: MakeClient, cut: int) -> None:
    size = 20_000
    daemon = make_daemon(cpu={"capacity": "4MiB"}, nvme={"capacity": "32MiB", "segment": "1MiB", "snapshot_journal": "2KiB"})
    client = make_client(daemon, size)
    keys = [os.urandom(32) for _ in range(100)]
    for number, key in enumerate(keys):
        assert client.save([key], [filled(number, size)], wait_s=5).saved == 1
    with daemon.admin() as stub:
        assert stub.Drain(admin.DrainRequest(timeout_s=20, resume=True)).dirty_bytes == 0
    client.evict(keys[::7])
    client.close()
    daemon.kill()
    journals = sorted((daemon.folder / "nvme").glob("journal-*.kvj"), key=lambda p: int(p.stem.split("-")[1]))
    length = journals[-1].stat().st_size
    os.truncate(journals[-1], min(max(cut if cut >= 0 else length + cut, 0), length))
    client = make_client(daemon.start(), size)
    out = [np.zeros(size, np.uint8) for _ in keys]
    loaded = client.load(keys, out, each=True).indexes
    assert all((out[i] == i).all() for i in loaded)
    more = [os.urandom(32) for _ in range(20)]
    assert client.save(more, [filled(9, size)] * 20, wait_s=5).saved == 20
    assert daemon.stop() == 0


def test_block_that_is_being_read_keeps_its_bytes_while_others_churn(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 64 * KIB
    daemon = make_daemon(cpu={"capacity": "2MiB"}, nvme={"capacity": "16MiB", "segment": "1MiB"})
    client = make_client(daemon, size)
    key = os.urandom(32)
    assert client.save([key], [filled(5, size)]).saved == 1
    with client.fetch([key], timeout_s=5) as fetch:
        assert fetch.poll(5) == [0]
        other = make_client(daemon, size)
        assert other.evict([key]) >= 1
        for _ in range(20):
            other.save([os.urandom(32) for _ in range(8)], [filled(6, size)] * 8, wait_s=1)
        assert bytes(fetch.views(0)[0]) == b"\x05" * size
        assert fetch.intact


def test_bytes_of_a_load_that_its_session_released_are_not_read_on(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    key, size = b"k" * 32, 48 << 20
    daemon = make_daemon(cpu={"capacity": "64MiB"}, nvme={"capacity": 0})
    reader = make_client(daemon, size, bytes_only=True)
    writer = make_client(daemon, size, model="other")
    assert reader.save_bytes([key], [bytes(size)]).saved == 1
    with grpc.insecure_channel(daemon.address) as channel:
        stub = kvtier_pb2_grpc.KvTierServiceStub(channel)
        request = pb.LoadBytesRequest(session=reader.session_token, keys=key, deadline_ms=20_000)
        parts = stub.LoadBytes(request, timeout=30)
        first = next(parts)
        assert first.data == bytes(len(first.data))
        for ticket in range(1, 50):  # tickets are numbered; a session may release its own at any time
            with contextlib.suppress(grpc.RpcError):
                stub.Release(pb.ReleaseRequest(session=reader.session_token, ticket=ticket), timeout=10)
        reader.evict([key])
        assert writer.save([key], [b"\1" * size], wait_s=10).saved == 1, "the memory has another owner now"
        received: list[pb.LoadBytesResponse] = []
        with pytest.raises(grpc.RpcError, match="was released"):
            received.extend(parts)
        assert not any(any(part.data) for part in received), "bytes of the new owner"


CLOSE_LOOP = """
import random, sys, time
from kvtierd.client import Client
from kvtierd.model import Namespace
for _ in range(1500):
    client = Client(Namespace(shard_bytes=(4096,)), sys.argv[1])
    time.sleep(random.random() * 0.003)
    client.close()
"""


def test_closing_while_attaching_does_not_harm_the_process(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    command = [sys.executable, "-c", CLOSE_LOOP, daemon.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
