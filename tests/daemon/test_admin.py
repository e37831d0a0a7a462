"""Goal: what an operator asks a real daemon is answered so that nothing surprises: pins, evictions, stories, namespaces.

Method: a real daemon, the admin API, and raw calls where the library would not make them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import grpc
import pytest

from kvtierd.client import Client
from kvtierd.model import MAX_REALMS
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as admin
from kvtierd.v1 import kvtier_pb2 as pb
from tests.daemon.conftest import MIB
from tests.daemon.test_hostile import RawSession, no_session, until

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
PLACES = MAX_REALMS
"""Namespaces that a daemon keeps at one time."""


def save(client: Client, count: int) -> list[bytes]:
    """Blocks of new keys."""
    keys = [os.urandom(32) for _ in range(count)]
    assert client.save(keys, [bytes(MIB)] * count, wait_s=10).saved == count
    return keys


def test_pins_are_listed_page_by_page_until_they_end(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    keys = save(make_client(daemon, tenant="a"), 5)
    other = save(make_client(daemon, tenant="b"), 1)
    with daemon.admin() as stub:
        first = stub.PinBlocks(admin.PinBlocksRequest(keys=b"".join(keys), expires_s=600)).ticket
        second = stub.PinBlocks(admin.PinBlocksRequest(keys=other[0] + keys[0], expires_s=60)).ticket
        found, token = [], ""
        while True:
            page = stub.ListPins(admin.ListPinsRequest(page_size=2, page_token=token))
            assert len(page.pins) <= 2
            found += page.pins
            token = page.next_page_token
            if not token:
                break
        assert [(p.ticket, p.key) for p in found[:5]] == [(first, k) for k in keys]
        assert {(p.ticket, p.key, p.tenant) for p in found[5:]} == {(second, other[0], "b"), (second, keys[0], "a")}
        assert all(0 < p.expires_in_s <= 600 and p.tier == pb.TIER_CPU and p.bytes == MIB and not p.evicted for p in found)
        assert [p.key for p in stub.ListPins(admin.ListPinsRequest(tenant="b")).pins] == other
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListPins(admin.ListPinsRequest(tenant="nobody"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
        for ticket in (first, second):
            stub.UnpinBlocks(admin.UnpinBlocksRequest(ticket=ticket))
        assert not stub.ListPins(admin.ListPinsRequest()).pins


def test_evicting_what_is_in_use_says_whose_memory_stays(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon)
    pinned, loaded, free = save(client, 3)
    session = RawSession(daemon, MIB)
    token = session.welcome()
    (step,) = session.stub.Load(pb.LoadRequest(session=token, keys=loaded, deadline_ms=1000))
    with daemon.admin() as stub:
        ticket = stub.PinBlocks(admin.PinBlocksRequest(keys=pinned, expires_s=600)).ticket
        answer = stub.EvictBlocks(admin.EvictBlocksRequest(all=True))
        assert (answer.evicted, answer.evicted_pinned, answer.evicted_in_use) == (3, 1, 1)
        assert client.lookup([pinned, loaded, free], each=True).held == 0
        assert daemon.status().tiers[0].used_bytes == 2 * MIB
        (pin,) = stub.ListPins(admin.ListPinsRequest()).pins
        assert pin.evicted
        again = stub.EvictBlocks(admin.EvictBlocksRequest(all=True))
        assert (again.evicted, again.evicted_pinned, again.evicted_in_use) == (0, 0, 0), "each eviction speaks of its own"
        stub.UnpinBlocks(admin.UnpinBlocksRequest(ticket=ticket))
    session.stub.Release(pb.ReleaseRequest(session=token, ticket=step.ticket))
    assert daemon.status().tiers[0].used_bytes == 0
    session.close()


def test_the_story_of_a_block_goes_on_after_a_restart(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon)
    old, _ = save(client, 2)
    client.close()
    assert daemon.stop() == 0
    daemon.start()
    (new,) = save(make_client(daemon), 1)
    with daemon.admin() as stub:
        for key in (old, old[:4]):
            story = stub.GetStory(admin.GetStoryRequest(key=key))
            assert [(e.why, e.tier, e.to, e.at_s) for e in story.events] == [
                ("recovered at start from NVMe", pb.TIER_NVME, "ready", 0.0)
            ]
            assert story.block.key == old
        assert [e.why for e in stub.GetStory(admin.GetStoryRequest(key=new[:4])).events][:2] == ["save", "commit"]
        stub.EvictBlocks(admin.EvictBlocksRequest(keys=old))
        assert "recovered" not in str(stub.GetStory(admin.GetStoryRequest(key=old)).events), "there is no such copy any more"
        with pytest.raises(grpc.RpcError, match="is held or remembered"):
            stub.GetStory(admin.GetStoryRequest(key=os.urandom(4)))


def test_capacity_says_what_journals_take(make_daemon: MakeDaemon) -> None:
    cpu, nvme = make_daemon(nvme={"capacity": "256MiB"}).status().tiers
    assert cpu.configured_bytes == cpu.capacity_bytes
    assert (nvme.configured_bytes, nvme.capacity_bytes) == (256 * MIB, 248 * MIB)


@pytest.mark.parametrize("name, shown", [("", "unnamed client"), (" \n", "?"), ("a\nERROR b", "a?ERROR b"), ("x" * 99, "x" * 64)])
def test_names_of_clients_make_one_tidy_line(make_daemon: MakeDaemon, make_client: MakeClient, name: str, shown: str) -> None:
    daemon = make_daemon()
    make_client(daemon, name=name)
    assert [s.client_name for s in daemon.status().sessions] == [shown]
    assert f"attached: {shown}, tenant default" in daemon.log()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_daemon_full_of_namespaces_says_so_and_recovers_when_they_are_unused(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(nvme={"capacity": "0"})
    session = RawSession(daemon, 4096)
    token = session.welcome()

    def act_for(number: int) -> None:
        session.stub.Lookup(pb.LookupRequest(session=token, keys=bytes(32), tenant=f"t{number}"))

    for number in range(PLACES - 1):  # the session's own namespace has one of the places
        act_for(number)
    with pytest.raises(grpc.RpcError) as refused:
        act_for(PLACES)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert "evict" in refused.value.details()  # type: ignore[attr-defined]
    act_for(0)
    late = RawSession(daemon, 8192)
    with pytest.raises(grpc.RpcError, match=f"{PLACES} namespaces"):
        late.welcome()
    session.close()
    assert until(lambda: no_session(daemon))
    later = RawSession(daemon, 8192)
    assert later.welcome()
    assert len(daemon.status().tenants) == 1, "tenants that own nothing are forgotten with their namespaces"
    later.close()
    late.close()
