"""Goal: a client with a session of its own gets nothing of another tenant's or namespace's: no answer, ticket or byte.

Method: a real daemon, a victim with blocks, tickets and pins, and intruders of another tenant and of another namespace, who make
bare calls with what they have, have guessed, or have seen. What time tells is tried elsewhere.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from kvtierd.client import Client, Prober
from kvtierd.model import PAGE_BYTES, slot_extent
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as admin
from kvtierd.v1 import fdpass_pb2 as fd
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc
from tests.daemon.conftest import MIB
from tests.daemon.test_hostile import until
from tests.daemon.test_roundtrip import to_nvme_only

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
SIZE = 20_000
"""No multiple of the page size, so that each slot has a rest that nobody fills."""
PATTERN = b"the victim's own bytes, seen nowhere else".ljust(50, b"!")
WATCHED = range(1, 400)
"""Numbers of extents and tickets that an intruder guesses; they are counted up from 1."""
INTRUDERS = [("intruder", "m"), ("victim", "other")]
"""Tenant and model: another tenant of the same namespace, and another namespace of the same tenant."""


def planted(count: int = 1) -> list[bytes]:
    return [(PATTERN * (SIZE // len(PATTERN) + 1))[:SIZE]] * count


@dataclass
class Scene:
    """A victim with blocks in memory, and an intruder who knows their keys."""

    daemon: DaemonProcess
    victim: Client
    intruder: Client
    keys: list[bytes]
    stub: Any

    def still_whole(self) -> bool:
        """The victim has all of its blocks."""
        out = [np.zeros(SIZE, np.uint8) for _ in self.keys]
        loaded = self.victim.load(self.keys, out).loaded
        return loaded == len(self.keys) and all(o.tobytes() == planted()[0] for o in out)


@pytest.fixture(params=INTRUDERS, ids=["tenant", "namespace"])
def scene(request: pytest.FixtureRequest, make_daemon: MakeDaemon, make_client: MakeClient) -> Iterator[Scene]:
    daemon = make_daemon(cpu={"capacity": "16MiB", "extent": "1MiB"}, nvme={"capacity": "64MiB"})
    tenant, model = request.param
    victim = make_client(daemon, SIZE, tenant="victim")
    intruder = make_client(daemon, SIZE, tenant=tenant, model=model)
    keys = [os.urandom(32) for _ in range(20)]
    assert victim.save(keys, planted(20)).saved == 20
    with grpc.insecure_channel(daemon.address) as channel:
        yield Scene(daemon, victim, intruder, keys, kvtier_pb2_grpc.KvTierServiceStub(channel))


def code_of(call: Callable[[], object]) -> str:
    """How a bare call ends."""
    try:
        call()
    except grpc.RpcError as e:
        return e.code().name  # type: ignore[attr-defined, no-any-return]
    return "OK"


def without_chance(message: Any) -> bytes:
    """An answer without what differs from call to call anyway: its ticket and slots."""
    for name in ("ticket", "slots"):
        if name in message.DESCRIPTOR.fields_by_name:
            message.ClearField(name)
    data: bytes = message.SerializeToString(deterministic=True)
    return data


# ---- answers


def test_keys_of_others_are_answered_as_keys_that_nobody_has(scene: Scene) -> None:
    token, stub = scene.intruder.session_token, scene.stub
    nobody = [os.urandom(32) for _ in scene.keys]

    def answers(keys: list[bytes]) -> list[bytes]:
        packed = b"".join(keys)
        granted = stub.Save(pb.SaveRequest(session=token, keys=packed))
        stub.Abort(pb.AbortRequest(session=token, ticket=granted.ticket))
        assert set(granted.outcomes) == {pb.SAVE_OUTCOME_GRANTED}, "a key that others hold is not called held"
        got = [
            stub.Lookup(pb.LookupRequest(session=token, keys=packed)),
            stub.Lookup(pb.LookupRequest(session=token, keys=packed, each=True)),
            *stub.Load(pb.LoadRequest(session=token, keys=packed, deadline_ms=1000)),
            *stub.LoadBytes(pb.LoadBytesRequest(session=token, keys=packed, deadline_ms=1000, each=True)),
            *stub.Prefetch(pb.PrefetchRequest(session=token, keys=packed, deadline_ms=1000)),
            stub.Pin(pb.PinRequest(session=token, keys=packed, expires_s=10)),
            stub.Evict(pb.EvictRequest(session=token, keys=packed)),
            granted,
        ]
        return [without_chance(message) for message in got]

    for on_nvme in (False, True):
        if on_nvme:
            to_nvme_only(scene.daemon)
        assert answers(scene.keys) == answers(nobody)
        assert scene.victim.lookup(scene.keys).held == 20
    assert scene.stub.Evict(pb.EvictRequest(session=token)).evicted == 0, "all that it has is nothing"
    assert scene.still_whole()


def test_a_probe_finds_nothing_of_others(scene: Scene) -> None:
    for client, held in ((scene.victim, True), (scene.intruder, False)):
        prober = Prober(client.descriptor_socket, client.session_token)
        number = prober.ask(scene.keys[0], len(scene.keys))
        assert number is not None
        found: list[bool | None] = [None]
        assert until(lambda p=prober, n=number, f=found: f.append(p.answer(n)) or f[-1] is not None)
        prober.close()
        assert found[-1] is held


# ---- sessions, tickets and pins


def test_a_session_cannot_be_made_up(scene: Scene) -> None:
    real = scene.victim.session_token
    made_up = [b"", b"\0", bytes(16), os.urandom(16), real[:-1], real + b"\0", bytes([real[0] ^ 1]) + real[1:], b"1", b"x" * 10_000]
    for session in made_up:
        for name, request in (
            ("Lookup", pb.LookupRequest(session=session, keys=scene.keys[0])),
            ("Save", pb.SaveRequest(session=session, keys=os.urandom(32))),
            ("Commit", pb.CommitRequest(session=session, ticket=1)),
            ("Abort", pb.AbortRequest(session=session, ticket=1)),
            ("Release", pb.ReleaseRequest(session=session, ticket=1)),
            ("Cancel", pb.CancelRequest(session=session, ticket=1)),
            ("Evict", pb.EvictRequest(session=session, keys=scene.keys[0])),
            ("Pin", pb.PinRequest(session=session, keys=scene.keys[0], expires_s=1)),
            ("Unpin", pb.UnpinRequest(session=session, ticket=1)),
        ):
            call = getattr(scene.stub, name)
            assert code_of(lambda c=call, r=request: c(r, timeout=10)) == "UNAUTHENTICATED", name
        load = pb.LoadRequest(session=session, keys=scene.keys[0], deadline_ms=100)
        assert code_of(lambda r=load: list(scene.stub.Load(r, timeout=10))) == "UNAUTHENTICATED"
        part = pb.SaveBytesRequest(session=session, key=scene.keys[0], data=bytes(SIZE))
        assert code_of(lambda p=part: scene.stub.SaveBytes(iter([p]), timeout=10)) == "UNAUTHENTICATED"
        with joined(scene.daemon, session) as (_, answer):
            assert answer.error.reason == "UNKNOWN_SESSION"
    assert scene.still_whole()


def test_tickets_of_others_are_unknown(scene: Scene) -> None:
    token = scene.intruder.session_token
    fresh = [os.urandom(32) for _ in range(3)]
    pin = scene.victim.pin(scene.keys[:2], 60)
    assert pin.pinned == 2
    with scene.victim.reserve(fresh) as reservation, scene.victim.fetch(scene.keys) as fetch:
        assert len(fetch.poll(10)) == 20
        for ticket in WATCHED:
            for name, request in (
                ("Commit", pb.CommitRequest(session=token, ticket=ticket)),
                ("Abort", pb.AbortRequest(session=token, ticket=ticket)),
                ("Release", pb.ReleaseRequest(session=token, ticket=ticket)),
                ("Cancel", pb.CancelRequest(session=token, ticket=ticket)),
            ):
                call = getattr(scene.stub, name)
                assert code_of(lambda c=call, r=request: c(r, timeout=10)) == "NOT_FOUND", name
            if scene.intruder.status.attached and ticket_is_foreign(scene):
                unpin = pb.UnpinRequest(session=token, ticket=ticket)
                assert code_of(lambda r=unpin: scene.stub.Unpin(r, timeout=10)) == "NOT_FOUND"
        assert fetch.intact
        for index in reservation.granted:
            reservation.views(index)[0][:] = planted()[0]
        assert reservation.commit() == 3
        assert all(fetch.views(i)[0].tobytes() == planted()[0] for i in range(20))
    assert pin.unpin()


def ticket_is_foreign(scene: Scene) -> bool:
    """Pins are their tenant's, whatever its namespaces are."""
    return "intruder" in {s.tenant for s in scene.daemon.status().sessions}


# ---- memory


@contextlib.contextmanager
def joined(daemon: DaemonProcess, session: bytes) -> Iterator[tuple[socket.socket, fd.DescriptorResponse]]:
    """A bare connection that has asked to join, and what it was told."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(str(daemon.folder / "k.fd.sock"))
        sock.send(fd.DescriptorRequest(join=fd.Join(session=session, shard=-1, numa_node=-1)).SerializeToString())
        yield sock, fd.DescriptorResponse.FromString(sock.recv(1 << 16))


def mapped(sock: socket.socket, extents: list[int]) -> tuple[list[int], list[mmap.mmap], list[int]]:
    """Ask for extents: those that came, mapped, and those that are said to be unknown."""
    ids, maps, unknown = [], [], []
    for start in range(0, len(extents), 60):
        some = extents[start : start + 60]
        sock.send(fd.DescriptorRequest(map=fd.MapExtents(extents=some)).SerializeToString())
        while True:
            data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 64)
            answer = fd.DescriptorResponse.FromString(data)
            if answer.HasField("extents"):
                break
        ids += [extent.id for extent in answer.extents.extents]
        unknown += list(answer.extents.unknown)
        for number in fds:
            maps.append(mmap.mmap(number, os.fstat(number).st_size))
            os.close(number)
    return ids, maps, unknown


def test_extents_of_others_are_answered_as_extents_that_do_not_exist(scene: Scene) -> None:
    slots = scene.stub.Save(pb.SaveRequest(session=scene.victim.session_token, keys=os.urandom(32)))
    theirs = {slot_extent(slot) for slot in slots.slots}
    with joined(scene.daemon, scene.victim.session_token) as (sock, answer):
        victims, maps, _ = mapped(sock, list(WATCHED))
        for mapping in maps:
            mapping.close()
        assert theirs <= set(victims)
        assert set(answer.joined.extents) == set(victims)
    assert scene.intruder.save([os.urandom(32)], [bytes(SIZE)], wait_s=5).saved == 1
    wanted = [*dict.fromkeys([*WATCHED, *victims, 2**31, 2**32 - 1, 0])]
    with joined(scene.daemon, scene.intruder.session_token) as (sock, answer):
        own, maps, unknown = mapped(sock, wanted)
        assert own, "it has some of its own"
        assert not set(own) & set(victims)
        assert set(unknown) == set(wanted) - set(own)
        assert not set(answer.joined.extents) & set(victims)
        for mapping in maps:
            assert PATTERN not in mapping[:]
            mapping.close()


def written_down(daemon: DaemonProcess) -> None:
    """Write down what NVMe takes, and forget all copies in memory."""
    with daemon.admin() as stub:
        stub.Drain(admin.DrainRequest(timeout_s=5, resume=True), timeout=30)
        stub.EvictBlocks(admin.EvictBlocksRequest(tier=pb.TIER_CPU), timeout=30)


@pytest.mark.parametrize("through_nvme", [False, True])
def test_fresh_memory_holds_nothing_of_whom_it_belonged_to(
    make_daemon: MakeDaemon, make_client: MakeClient, through_nvme: bool
) -> None:
    daemon = make_daemon(cpu={"capacity": "4MiB", "extent": "1MiB"}, nvme={"capacity": "8MiB", "segment": "1MiB"})
    looked_at = loaded = 0
    for turn in range(4):
        victim = make_client(daemon, SIZE, tenant=f"victim-{turn}")
        for _ in range(6):
            assert victim.save([os.urandom(32) for _ in range(40)], planted(40), wait_s=10).saved
        victim.close()
        if through_nvme:
            written_down(daemon)
        # Memory, and slots on NVMe, go from the victim to the intruder, who fills a part of each slot that it gets.
        intruder = make_client(daemon, SIZE, tenant=f"intruder-{turn}")
        keys = [os.urandom(32) for _ in range(90)]
        for start in range(0, 90, 30):
            assert intruder.save(keys[start : start + 30], [b"m" * SIZE] * 30, wait_s=10).saved
        if through_nvme:
            written_down(daemon)
            out = [np.zeros(SIZE, np.uint8) for _ in keys]
            found = intruder.load(keys, out, timeout_s=20, each=True).indexes
            assert all((out[i] == ord("m")).all() for i in found)
            loaded += len(found)
        with joined(daemon, intruder.session_token) as (sock, answer):
            _, maps, _ = mapped(sock, list(answer.joined.extents))
            for mapping in maps:
                looked_at += len(mapping)
                assert PATTERN not in mapping[:], "bytes of the tenant before"
                mapping.close()
        intruder.close()
    assert looked_at >= 6 * MIB, "more than memory has"
    assert loaded >= 50 * through_nvme


def test_memory_that_was_taken_back_shows_nothing_and_changes_nothing(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "8MiB", "extent": "1MiB"}, nvme={"capacity": "64MiB"})
    intruder = make_client(daemon, SIZE, tenant="intruder")
    for _ in range(10):
        assert intruder.save([os.urandom(32) for _ in range(40)], [bytes(SIZE)] * 40, wait_s=5).saved
    with joined(daemon, intruder.session_token) as (sock, answer):
        held, maps, _ = mapped(sock, list(answer.joined.extents)[:3])
        sock.setblocking(False)
        revoked: set[int] = set()
        victims: list[tuple[Client, list[bytes]]] = []

        def taken_back() -> bool:
            """Another victim comes; has it taken something that the intruder maps, and goes on mapping?"""
            victim = make_client(daemon, SIZE, tenant=f"victim-{len(victims)}")
            keys = [os.urandom(32) for _ in range(30)]
            victim.save(keys, planted(30), wait_s=1)
            victims.append((victim, keys))
            with contextlib.suppress(BlockingIOError):
                while True:
                    revoked.update(fd.DescriptorResponse.FromString(sock.recv(1 << 16)).revoked.extents)
            return not revoked.isdisjoint(held)

        assert until(taken_back, 60)
        for mapping in maps:
            assert PATTERN not in mapping[:]
            for offset in range(0, len(mapping), PAGE_BYTES):
                mapping[offset : offset + 8] = b"intruder"
        loaded = 0
        for victim, keys in victims:
            out = [np.zeros(SIZE, np.uint8) for _ in keys]
            found = victim.load(keys, out, timeout_s=20, each=True).indexes
            assert all(out[i].tobytes() == planted()[0] for i in found)
            loaded += len(found)
        assert loaded
        for mapping in maps:
            assert PATTERN not in mapping[:]
            mapping.close()


# ---- files


def test_what_is_written_to_disk_is_the_daemons_users_only(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    inherited = os.umask(0)
    try:
        daemon = make_daemon(cpu={"capacity": "8MiB"}, nvme={"capacity": "16MiB"}, tenants={"victim": {"cpu_quota": "50%"}})
    finally:
        os.umask(inherited)
    client = make_client(daemon, SIZE, tenant="victim")
    assert client.save([os.urandom(32) for _ in range(20)], planted(20)).saved == 20
    with daemon.admin() as stub:
        stub.SetTenant(admin.SetTenantRequest(tenant="victim", reset=["cpu_quota"]))
        assert stub.Drain(admin.DrainRequest(timeout_s=20, resume=True)).dirty_bytes == 0
        assert stub.Checkpoint(admin.CheckpointRequest()).copies == 20
    assert daemon.stop() == 0
    top = daemon.folder / "nvme"
    places = [top, *top.rglob("*")]
    assert len(places) > 4, "segments, journal, snapshot and tenants"
    assert {oct(place.stat().st_mode & 0o077) for place in places} == {"0o0"}
