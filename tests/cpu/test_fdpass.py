"""Goal: the descriptor server gives memory to whom the authority says only, knows who lives, and survives any client.

Method: the real server under asyncio and uvloop, real sockets that send what no proper client would, and a real memory pool.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.errors import Reason, RequestError
from kvtierd.service import fdpass
from kvtierd.service.fdconnection import MAX_QUEUED_DESCRIPTORS, MAX_QUEUED_PACKETS, Connection
from kvtierd.v1 import fdpass_pb2 as pb
from tests.cpu.tools import SLOT, SLOTS, Daemon, Raw, until

Connect = Callable[[], Raw]


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


# ---- joining and mapping


def test_join_tells_the_boot_and_who_it_is(daemon: Daemon, raw: Connect) -> None:
    answer = raw().join(b"token-1", shard=1, pins=True)
    assert answer.joined.boot_epoch == 77
    assert list(answer.joined.slot_bytes) == [SLOT, SLOT]
    (join,) = daemon.authority.joins
    assert (join["pid"], join["uid"]) == (os.getpid(), os.getuid()), "the kernel's word, not the client's"
    assert (join["shard"], join["pins"], join["node"]) == (1, True, -1)


def test_a_wrong_token_is_refused_and_nothing_follows(daemon: Daemon, raw: Connect) -> None:
    client = raw()
    answer = client.join(b"guess")
    assert (answer.error.reason, answer.error.message) == ("UNKNOWN_SESSION", "no such session; attach again")
    assert client.ended
    client.close()
    until(lambda: daemon.connections == 0)
    assert daemon.authority.gone == [], "it never joined"


def test_the_authority_decides_about_users(daemon: Daemon, raw: Connect) -> None:
    daemon.authority.fail_with = RequestError(Reason.PERMISSION, "not this user")
    assert raw().join(b"token-1").error.reason == "PERMISSION"


def test_a_bug_of_the_authority_ends_one_connection_only(daemon: Daemon, raw: Connect) -> None:
    daemon.authority.fail_with = ZeroDivisionError()
    assert raw().join(b"token-1").error.reason == "INTERNAL"
    daemon.authority.fail_with = None
    assert raw().join(b"token-1").HasField("joined")


def test_descriptors_come_in_order_and_are_the_pools_memory(daemon: Daemon, raw: Connect) -> None:
    first, second = daemon.extent(), daemon.extent()
    client = raw()
    client.join(b"token-1")
    answer, fds = client.map(second, first)
    try:
        assert [e.id for e in answer.extents] == [second, first]
        assert (answer.extents[0].size_bytes, answer.extents[0].slot_bytes) == (SLOT * SLOTS, SLOT)
        os.pwrite(fds[0], b"second", 3 * SLOT)
        assert bytes(daemon.pool.view(second << 32 | 3)[:6]) == b"second"
        for size in (0, SLOT * SLOTS * 2):
            with pytest.raises(PermissionError):
                os.ftruncate(fds[0], size)
    finally:
        close_all(fds)


@pytest.mark.parametrize(("session", "shard"), [(2, 0), (1, 1)], ids=["another session's", "another shard's"])
def test_foreign_extents_are_unknown(daemon: Daemon, raw: Connect, session: int, shard: int) -> None:
    extent_id = daemon.extent(session, shard)
    client = raw()
    client.join(b"token-1", shard=0)
    answer, fds = client.map(extent_id, 999)
    assert (list(answer.unknown), len(answer.extents), fds) == ([extent_id, 999], 0, [])
    assert daemon.call(daemon.server.holders, extent_id) == set()


def test_a_process_for_all_shards_gets_all(daemon: Daemon, raw: Connect) -> None:
    extents = [daemon.extent(1, 0), daemon.extent(1, 1)]
    client = raw()
    client.join(b"token-1", shard=-1)
    answer, fds = client.map(*extents)
    close_all(fds)
    assert [e.shard for e in answer.extents] == [0, 1]


# ---- packets that no proper client sends

BAD_PACKETS = {
    "no protobuf": b"\xff\xff\xff\xff",
    "unknown message": b"\x7a\x00",
    "too long": pb.DescriptorRequest(join=pb.Join(session=bytes(fdpass.MAX_PACKET_BYTES))).SerializeToString(),
    "map before join": pb.DescriptorRequest(map=pb.MapExtents(extents=[1])).SerializeToString(),
    "shard -2": pb.DescriptorRequest(join=pb.Join(session=b"token-1", shard=-2)).SerializeToString(),
    "empty": b"",
}


@pytest.mark.parametrize("packet", BAD_PACKETS.values(), ids=BAD_PACKETS)
def test_a_malformed_packet_is_answered_and_ends_the_connection(daemon: Daemon, raw: Connect, packet: bytes) -> None:
    client = raw()
    client.sock.send(packet)
    answer, _ = client.receive()
    assert answer.error.reason == "BAD_REQUEST"
    assert client.ended
    client.close()
    until(lambda: daemon.connections == 0)


JOINED_BAD_PACKETS = {
    "second join": pb.DescriptorRequest(join=pb.Join(session=b"token-1")),
    "too many extents": pb.DescriptorRequest(map=pb.MapExtents(extents=range(1, 66))),
    "too many confirmations": pb.DescriptorRequest(unmapped=pb.ExtentsUnmapped(extents=range(2049))),
}


@pytest.mark.parametrize("request_", JOINED_BAD_PACKETS.values(), ids=JOINED_BAD_PACKETS)
def test_a_process_that_is_dismissed_counts_as_alive_until_it_goes(
    daemon: Daemon, raw: Connect, request_: pb.DescriptorRequest
) -> None:
    """It may still be copying: what it was granted must not be given to another one."""
    extent_id = daemon.extent()
    client = raw()
    client.join(b"token-1", pins=True)
    close_all(client.map(extent_id)[1])
    client.sock.send(request_.SerializeToString())
    assert client.receive()[0].error.reason == "BAD_REQUEST"
    assert client.ended
    client.send(map=pb.MapExtents(extents=[extent_id]))
    daemon.retire(extent_id)
    assert daemon.connections == 1
    assert (daemon.authority.gone, daemon.authority.released) == ([], [])
    client.close()
    until(lambda: daemon.connections == 0)
    assert daemon.authority.gone == [(1, 1)]
    assert daemon.authority.released == [extent_id]


def test_descriptors_sent_to_the_daemon_are_refused(daemon: Daemon, raw: Connect, tmp_path: Path) -> None:
    client = raw()
    client.join(b"token-1")
    before = len(os.listdir("/proc/self/fd"))
    with (tmp_path / "x").open("w") as file:
        for _ in range(2):
            client.send_with_descriptor(file.fileno())
        assert client.receive()[0].error.reason == "BAD_REQUEST"
        assert client.ended
    assert len(os.listdir("/proc/self/fd")) == before, "none was taken in"


def test_64_extents_fit_into_one_packet(daemon: Daemon, raw: Connect) -> None:
    extents = [daemon.extent() for _ in range(15)]
    client = raw()
    client.join(b"token-1")
    wanted = extents + list(range(900, 949))
    answer, fds = client.map(*wanted)
    close_all(fds)
    assert (len(fds), len(answer.unknown)) == (15, 49)


def test_the_most_descriptors_of_one_packet_arrive(daemon: Daemon, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    extent_id = daemon.extent()
    monkeypatch.setattr(
        daemon.authority,
        "may_map",
        lambda _session, _extent, _shard: fdpass.ExtentInfo(SLOT, SLOT, 0, daemon.pool.fd(extent_id)),
    )
    client = raw()
    client.join(b"token-1")
    _, fds = client.map(*range(1, 65))
    close_all(fds)
    assert len(fds) == 64


# ---- liveness and limits


def test_a_stranger_is_not_waited_for(daemon: Daemon, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdpass, "JOIN_TIMEOUT_S", 0.05)
    client = raw()
    assert client.ended
    assert daemon.connections == 0
    assert daemon.authority.gone == []


def test_connections_are_limited(daemon: Daemon, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdpass, "MAX_CONNECTIONS", 3)
    first, second = raw(), raw()
    assert first.join(b"token-1").HasField("joined")
    assert second.join(b"token-1").HasField("joined")
    assert raw().join(b"token-1").HasField("joined")
    assert raw().receive()[0].error.reason == "LIMIT"
    first.close()
    until(lambda: daemon.connections == 2)
    assert raw().join(b"token-1").HasField("joined"), "a place is free again"


def test_a_process_that_never_reads_is_dismissed_and_holds_nothing_up(daemon: Daemon, raw: Connect) -> None:
    extent_id = daemon.extent()
    deaf, other = raw(), raw()
    deaf.join(b"token-1")
    other.join(b"token-1")
    before = len(os.listdir("/proc/self/fd"))
    served = daemon.server._connections[1]
    for number in range(20_000):
        if served.dismissed:
            break
        deaf.send(map=pb.MapExtents(extents=[extent_id, 900 + number % 50]))
    until(lambda: served.dismissed)
    _, fds = other.map(extent_id)
    close_all(fds)
    assert len(os.listdir("/proc/self/fd")) == before, "what was queued is closed"
    assert daemon.authority.gone == []
    deaf.close()
    until(lambda: daemon.authority.gone == [(1, 1)])


def test_a_slow_reader_gets_everything_in_order(daemon: Daemon, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets that did not fit into the socket wait with descriptors of their own, though the extent is retired meanwhile."""
    extent_id = daemon.extent()
    daemon.pool.view(extent_id << 32)[:4] = b"mine"
    client = raw()
    client.join(b"token-1")
    queue_length = daemon.call(lambda: daemon.server._connections[1]._queue)
    count = 0
    while not queue_length:
        client.send(map=pb.MapExtents(extents=[extent_id]))
        count += 1
        until(lambda count=count: len(daemon.authority.asked) == count)  # type: ignore[misc]
    daemon.retire(extent_id)
    for _ in range(count):
        answer, fds = client.receive()
        assert answer.extents.extents[0].id == extent_id
        assert os.fstat(fds[0]).st_size == SLOT * SLOTS, "still the extent"
        close_all(fds)
    assert list(client.receive()[0].revoked.extents) == [extent_id]
    assert client.silent
    assert client.map(extent_id)[0].unknown == [extent_id]


def test_the_queue_is_bounded_by_packets_and_descriptors() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(1, ours)
    message = pb.DescriptorResponse(revoked=pb.Revoked(extents=[1]))
    try:
        while not connection.send(message, []):
            pass  # into the kernel's buffer
        for _ in range(MAX_QUEUED_PACKETS - 1):
            assert connection.send(message, [])
        with pytest.raises(RequestError, match=f"{MAX_QUEUED_PACKETS} packets"):
            connection.send(message, [])
        connection.mute()
        for _ in range(MAX_QUEUED_DESCRIPTORS // 32):
            assert connection.send(message, [theirs.fileno()] * 32)
        with pytest.raises(RequestError, match=f"with {MAX_QUEUED_DESCRIPTORS} descriptors"):
            connection.send(message, [theirs.fileno()])
    finally:
        connection.close()
        theirs.close()


# ---- revoking


def test_an_extent_that_nobody_has_is_released_at_once(daemon: Daemon, raw: Connect) -> None:
    extent_id = daemon.extent()
    client = raw()
    client.join(b"token-1", pins=True)
    daemon.retire(extent_id)
    assert daemon.authority.released == [extent_id]
    assert client.silent, "it was not told about an extent that it does not have"


@pytest.mark.parametrize("pins", [False, True])
def test_a_process_counts_until_it_has_confirmed(daemon: Daemon, raw: Connect, pins: bool) -> None:
    extent_id = daemon.extent()
    client = raw()
    client.join(b"token-1", pins=pins)
    close_all(client.map(extent_id)[1])
    daemon.retire(extent_id)
    assert list(client.receive()[0].revoked.extents) == [extent_id]
    assert daemon.authority.released == [], "it may make pages anew by a mere look"
    assert daemon.pool.reserved_bytes == SLOT * SLOTS
    client.unmapped(extent_id)
    until(lambda: daemon.authority.unmappings == [(1, [extent_id])])
    until(lambda: daemon.authority.released == [extent_id])
    assert daemon.pool.reserved_bytes == 0


def test_a_process_that_never_confirms_counts_until_it_dies(daemon: Daemon, raw: Connect) -> None:
    extent_id = daemon.extent()
    client = raw()
    client.join(b"token-1")
    close_all(client.map(extent_id)[1])
    daemon.retire(extent_id)
    assert daemon.authority.released == []
    client.close()
    until(lambda: daemon.authority.released == [extent_id])


def test_every_holder_must_confirm_or_die(daemon: Daemon, raw: Connect) -> None:
    extent_id, kept = daemon.extent(), daemon.extent()
    clients = [raw() for _ in range(3)]
    for client in clients:
        client.join(b"token-1", pins=True)
        close_all(client.map(extent_id, kept)[1])
    assert daemon.holders(extent_id) == daemon.holders(kept) == {1, 2, 3}
    daemon.retire(extent_id)
    for client in clients:
        assert list(client.receive()[0].revoked.extents) == [extent_id]
    clients[0].unmapped(extent_id)
    until(lambda: daemon.holders(extent_id) == {2, 3})
    clients[1].close()
    until(lambda: daemon.holders(extent_id) == {3})
    assert daemon.authority.released == []
    assert daemon.pool.reserved_bytes == 2 * SLOT * SLOTS, "it still counts"
    clients[2].unmapped(extent_id)
    until(lambda: daemon.authority.released == [extent_id])
    assert daemon.holders(kept) == {1, 3}
    assert daemon.pool.reserved_bytes == SLOT * SLOTS


def test_revoking_twice_releases_once(daemon: Daemon, raw: Connect) -> None:
    extent_id = daemon.extent()
    client = raw()
    client.join(b"token-1", pins=True)
    close_all(client.map(extent_id)[1])
    daemon.retire(extent_id)
    daemon.call(daemon.server.revoke, [extent_id, extent_id])
    client.unmapped(extent_id)
    client.unmapped(extent_id)
    until(lambda: len(daemon.authority.unmappings) == 2)
    assert daemon.authority.released == [extent_id]


def test_an_extent_given_back_unasked_is_held_no_more(daemon: Daemon, raw: Connect) -> None:
    extent_id = daemon.extent()
    client = raw()
    client.join(b"token-1", pins=True)
    close_all(client.map(extent_id)[1])
    client.unmapped(extent_id)
    until(lambda: daemon.holders(extent_id) == set())
    close_all(client.map(extent_id)[1])
    assert daemon.holders(extent_id) == {1}, "and it may be mapped again"


def test_a_revoked_extent_is_not_given_out_whatever_the_authority_says(daemon: Daemon, raw: Connect) -> None:
    extent_id = daemon.extent()
    client = raw()
    client.join(b"token-1", pins=True)
    close_all(client.map(extent_id)[1])
    daemon.call(daemon.server.revoke, [extent_id])
    assert client.receive()[0].HasField("revoked")
    assert list(client.map(extent_id)[0].unknown) == [extent_id]


# ---- the end


def test_closing_hangs_up_without_calling_it_a_death(daemon: Daemon, raw: Connect) -> None:
    client = raw()
    client.join(b"token-1")
    asyncio.run_coroutine_threadsafe(daemon.server.close(), daemon._loop).result(10)
    assert client.ended
    assert daemon.authority.gone == []
    assert not daemon.path.exists()


def test_running_out_of_descriptors_pauses_accepting_only(daemon: Daemon, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdpass, "ACCEPT_PAUSE_S", 0.02)
    assert daemon.server._listener is not None
    listener: socket.socket = daemon.server._listener
    failures: list[int] = []

    class Full:
        def accept(self) -> tuple[socket.socket, str]:
            if len(failures) < 3:
                failures.append(1)
                raise OSError(24, "too many open files")
            accepted: tuple[socket.socket, str] = listener.accept()
            return accepted

        def fileno(self) -> int:
            return listener.fileno()

    daemon.server._listener = Full()  # type: ignore[assignment]
    try:
        assert raw().join(b"token-1").HasField("joined")
        assert len(failures) == 3
    finally:
        daemon.server._listener = listener
