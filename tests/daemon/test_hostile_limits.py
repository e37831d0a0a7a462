"""Goal: a machine that runs out of something, and clients that keep what they were told to give back, break no promise.

Method: a real daemon whose descriptors run out, whose sockets' folder goes, or whose client ignores it; what it does afterwards.
"""

import contextlib
import mmap
import os
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtierd.client import Client
from kvtierd.model import PAGE_BYTES, slot_extent
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as admin
from kvtierd.v1 import fdpass_pb2 as fd
from kvtierd.v1 import kvtier_pb2 as pb
from tests.daemon.test_hostile import KIB, RawSession, filled, until

MIB = 1 << 20
MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]


def open_files(daemon: DaemonProcess) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


@contextlib.contextmanager
def no_descriptors_left(daemon: DaemonProcess) -> Any:
    """All descriptors that the daemon may have are taken by idle connections to its metrics port."""
    host, port = daemon.config["server"]["metrics"].split(":")
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    limit = open_files(daemon) + 40
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, hard))
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, int(port))))
        assert until(lambda: open_files(daemon) >= limit - 1)
        yield
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (hard, hard))


@pytest.fixture
def metrics_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_namespace_works_again_after_descriptors_ran_out(
    make_daemon: MakeDaemon, make_client: MakeClient, metrics_address: str
) -> None:
    size = 256 * KIB
    daemon = make_daemon(cpu={"capacity": "16MiB", "extent": "1MiB", "prefault": False}, server={"metrics": metrics_address})
    client = make_client(daemon, size)
    assert client.save([os.urandom(32) for _ in range(4)], [filled(1, size)] * 4).saved == 4
    with no_descriptors_left(daemon):
        for _ in range(2):  # each needs a new extent
            assert client.save([os.urandom(32)], [filled(1, size)], timeout_s=2).saved in (0, 1)
    again = make_client(daemon, size)
    keys = [os.urandom(32) for _ in range(12)]
    assert sum(again.save([key], [filled(2, size)], wait_s=5, timeout_s=6).saved for key in keys) == 12
    assert "no CPU extent of 1048576 bytes can be made" in daemon.log()
    assert "Traceback" not in daemon.log()
    for number in (client, again):
        number.close()
    assert until(lambda: not daemon.status().sessions)
    assert daemon.status().tiers[0].pinned_bytes == 0


def test_blocks_on_nvme_outlive_a_time_without_descriptors(
    make_daemon: MakeDaemon, make_client: MakeClient, metrics_address: str
) -> None:
    size = 256 * KIB
    daemon = make_daemon(cpu={"capacity": "16MiB", "extent": "1MiB", "prefault": False}, server={"metrics": metrics_address})
    client = make_client(daemon, size)
    keys = [os.urandom(32) for _ in range(8)]
    assert client.save(keys, [filled(3, size)] * 8).saved == 8
    assert daemon.stop() == 0
    client.close()
    daemon.start()
    client = make_client(daemon, size)
    out = [np.zeros(size, np.uint8) for _ in keys]
    with no_descriptors_left(daemon):
        client.load(keys, out, timeout_s=1)  # there is no memory for them, nor can their files be opened
    assert daemon.status().blocks == 8, "what could not be read for a moment was not forgotten"
    assert until(lambda: client.load(keys, out, timeout_s=5).loaded == 8)
    assert all((o == 3).all() for o in out)


def filled_extents(session: RawSession, token: bytes, keys_a_save: int) -> set[int]:
    """Save and commit twice. Returns the extents that the blocks lie in."""
    extents: set[int] = set()
    for _ in range(2):
        grant = session.stub.Save(pb.SaveRequest(session=token, keys=os.urandom(32 * keys_a_save), wait_ms=3000))
        extents |= {slot_extent(slot) for slot in grant.slots}
        session.stub.Commit(pb.CommitRequest(session=token, ticket=grant.ticket))
    return extents


def received_descriptors(sock: socket.socket, daemon: DaemonProcess, token: bytes, extents: set[int]) -> list[int]:
    """Join on a bare descriptor socket and ask for extents."""
    sock.connect(str(daemon.folder / "k.fd.sock"))
    sock.send(fd.DescriptorRequest(join=fd.Join(session=token, shard=-1)).SerializeToString())
    sock.recv(4096)
    sock.send(fd.DescriptorRequest(map=fd.MapExtents(extents=sorted(extents))).SerializeToString())
    _, fds, _, _ = socket.recv_fds(sock, 65_536, 64)
    return fds


def test_memory_that_was_taken_back_stays_counted_while_a_client_maps_it(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 64 * KIB
    daemon = make_daemon(cpu={"capacity": "4MiB", "extent": "1MiB"}, nvme={"capacity": "64MiB"})
    session = RawSession(daemon, size)
    token = session.welcome()
    extents = filled_extents(session, token, 30)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        fds = received_descriptors(sock, daemon, token, extents)
        for number in fds:
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(number, 0)
        maps = [mmap.mmap(number, os.fstat(number).st_size) for number in fds]
        for other in range(4):
            client = make_client(daemon, size, model=f"o{other}")
            client.save([os.urandom(32) for _ in range(16)], [filled(1, size)] * 16, wait_s=2)
        for mapping in maps:
            for offset in range(0, len(mapping), PAGE_BYTES):
                mapping[offset]  # a look is enough to make the page anew
        blocks = {os.fstat(number).st_ino: os.fstat(number).st_blocks * 512 for number in fds}
        for name in os.listdir(f"/proc/{daemon.pid}/fd"):
            path = f"/proc/{daemon.pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if "memfd:" in os.readlink(path):
                    info = os.stat(path)
                    blocks[info.st_ino] = info.st_blocks * 512
        for mapping in maps:
            mapping.close()
        for number in fds:
            os.close(number)
    session.close()
    assert sum(blocks.values()) <= 4 * MIB
    other_client = make_client(daemon, size, model="last")
    assert other_client.save([os.urandom(32) for _ in range(16)], [filled(1, size)] * 16, wait_s=10).saved == 16, "it is back"


def test_others_get_room_though_a_client_keeps_more_extents_than_may_leave_at_once(
    make_daemon: MakeDaemon, make_client: MakeClient
) -> None:
    size = 256 * KIB
    daemon = make_daemon(cpu={"capacity": "8MiB", "extent": "1MiB", "prefault": False}, nvme={"capacity": "64MiB"})
    holder = RawSession(daemon, size)
    token = holder.welcome()
    extents = filled_extents(holder, token, 12)
    assert len(extents) == 6
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        fds = received_descriptors(sock, daemon, token, extents)
        for number in fds:
            os.close(number)
        with daemon.admin() as stub:
            stub.Drain(admin.DrainRequest(timeout_s=20, resume=True))
            stub.EvictBlocks(admin.EvictBlocksRequest(tier=2))
        # Empty extents go first, and they are the ones that the holder never gives back; the rest is used by several in turn.
        for turn in range(12):
            client = make_client(daemon, size, model=f"o{turn % 3}")
            assert client.save([os.urandom(32)], [filled(1, size)], wait_s=20, timeout_s=25).saved == 1
            client.close()
    holder.close()


def test_old_daemon_leaves_the_sockets_of_its_successor(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    first = make_daemon("first", server={"socket": str(folder / "k.sock")})
    assert sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock")) == ["k.fd.sock", "k.sock"]
    shutil.rmtree(folder)
    second = make_daemon("second", server={"socket": str(folder / "k.sock")})
    assert first.stop() == 0
    assert second.status().version
    assert second.stop() == 0
    assert not [p for p in folder.iterdir() if not p.name.endswith(".lock")]


def test_strangers_on_the_descriptor_socket_keep_no_client_out(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    size = 64 * KIB
    daemon = make_daemon()
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            stranger.connect(str(daemon.folder / "k.fd.sock"))
        client = make_client(daemon, size)
        assert client.save([os.urandom(32)], [filled(1, size)]).saved == 1


def test_a_call_on_a_session_of_a_daemon_without_descriptors_is_answered(make_daemon: MakeDaemon, metrics_address: str) -> None:
    daemon = make_daemon(cpu={"capacity": "4MiB", "extent": "1MiB", "prefault": False}, server={"metrics": metrics_address})
    session = RawSession(daemon, MIB)
    token = session.welcome()
    with no_descriptors_left(daemon):
        grant = session.stub.Save(pb.SaveRequest(session=token, keys=os.urandom(64)))
        if not grant.ticket:
            assert list(grant.outcomes) == [4, 4]
            assert not grant.slots
    assert until(lambda: bool(session.stub.Save(pb.SaveRequest(session=token, keys=os.urandom(64), wait_ms=500)).ticket))
    with contextlib.suppress(grpc.RpcError):
        session.close()
