"""Goal: what is saved is what is loaded, on every tier and by every way in.

Method: a real daemon and real clients over real sockets, memory and files; random bytes are compared.
"""

import os
from collections.abc import Callable

import grpc
import numpy as np
import pytest

from kvtierd.cli.rates import parse
from kvtierd.client import Client
from kvtierd.model import Tier
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as pb
from kvtierd.v1 import kvtier_pb2, kvtier_pb2_grpc
from tests.daemon.conftest import MIB

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]


def blocks(count: int, size: int) -> tuple[list[bytes], list[np.ndarray]]:
    rng = np.random.default_rng(size)
    return [os.urandom(32) for _ in range(count)], [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]


def to_nvme_only(daemon: DaemonProcess) -> None:
    """Write everything down and forget the copies in memory."""
    with daemon.admin() as stub:
        assert stub.Drain(pb.DrainRequest(timeout_s=20, resume=True), timeout=30).dirty_bytes == 0
        stub.EvictBlocks(pb.EvictBlocksRequest(tier=kvtier_pb2.TIER_CPU), timeout=30)


@pytest.mark.parametrize("size", [1, 4096, 640 * 1024, MIB, 33 * MIB])
def test_save_and_load_through_memory_and_nvme(make_daemon: MakeDaemon, make_client: MakeClient, size: int) -> None:
    daemon = make_daemon(cpu={"capacity": "256MiB"}, nvme={"capacity": "512MiB"})
    client = make_client(daemon, size)
    keys, data = blocks(3, size)
    assert client.save(keys, data).saved == 3
    assert client.lookup(keys).tiers == bytes([Tier.CPU.bit]) * 3
    for only_nvme in (False, True):
        if only_nvme:
            to_nvme_only(daemon)
            assert client.lookup(keys).tiers == bytes([Tier.NVME.bit]) * 3
        out = [np.zeros(size, np.uint8) for _ in keys]
        result = client.load(keys, out)
        assert result.loaded == 3, result
        assert result.by_tier == {Tier.NVME if only_nvme else Tier.CPU: 3}
        for a, b in zip(data, out, strict=True):
            assert np.array_equal(a, b)
    # The promotion kept the copy on NVMe.
    assert client.lookup(keys).tiers == bytes([Tier.NVME.bit | Tier.CPU.bit]) * 3


def test_shards_of_different_sizes(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    sizes = (5000, MIB, 1)
    client = make_client(daemon, *sizes)
    keys = [os.urandom(32) for _ in range(4)]
    data = [[np.frombuffer(os.urandom(n), np.uint8) for n in sizes] for _ in keys]
    assert client.save(keys, data).saved == 4
    to_nvme_only(daemon)
    out = [[np.zeros(n, np.uint8) for n in sizes] for _ in keys]
    assert client.load(keys, out).loaded == 4
    for want, got in zip(data, out, strict=True):
        for a, b in zip(want, got, strict=True):
            assert np.array_equal(a, b)


def test_load_stops_at_the_first_miss_and_each_does_not(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    client = make_client(make_daemon(), MIB)
    keys, data = blocks(4, MIB)
    client.save([keys[0], keys[1], keys[3]], [data[0], data[1], data[3]])
    out = [np.zeros(MIB, np.uint8) for _ in keys]
    assert client.load(keys, out).loaded == 2
    result = client.load(keys, out, each=True)
    assert result.indexes == {0, 1, 3}
    assert np.array_equal(out[3], data[3])


def test_more_than_memory_holds_streams_from_nvme(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "16MiB"}, nvme={"capacity": "256MiB"})
    client = make_client(daemon, MIB)
    keys, data = blocks(60, MIB)
    for start in range(0, 60, 4):
        assert client.save(keys[start : start + 4], data[start : start + 4], wait_s=20).saved == 4
    out = [np.zeros(MIB, np.uint8) for _ in keys]
    assert client.load(keys, out).loaded == 60
    assert all(np.array_equal(a, b) for a, b in zip(data, out, strict=True))


def test_bytes_path(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    sizes = (5 * MIB, 100)
    remote = make_client(daemon, *sizes, bytes_only=True)
    local = make_client(daemon, *sizes)
    keys = [os.urandom(32) for _ in range(3)]
    data = [[os.urandom(n) for n in sizes] for _ in keys]
    assert remote.save_bytes(keys, data).saved == 3
    out = [[np.zeros(n, np.uint8) for n in sizes] for _ in keys]
    assert local.load(keys, out).loaded == 3
    assert all(o.tobytes() == d for got, want in zip(out, data, strict=True) for o, d in zip(got, want, strict=True))
    to_nvme_only(daemon)
    got = remote.load_bytes(keys)
    assert [got.blocks[i] for i in range(3)] == data
    assert all(not s.tickets for s in daemon.status().sessions), "nothing stays pinned"


def test_evict_pin_and_prefetch(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, MIB)
    keys, data = blocks(6, MIB)
    client.save(keys, data)
    pin = client.pin(keys[:2], expires_s=60)
    assert pin.pinned == 2
    to_nvme_only(daemon)
    fetched = client.prefetch(keys, deadline_s=10, wait=True)
    assert (fetched.held, fetched.ready) == (6, 6)
    fetched.cancel()
    assert all(t & Tier.CPU.bit for t in client.lookup(keys).tiers)
    assert client.evict(keys[3:]) > 0
    assert client.lookup(keys).held == 3
    assert pin.unpin()


def test_tenants_do_not_see_each_other(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    alice, bob = make_client(daemon, MIB, tenant="alice"), make_client(daemon, MIB, tenant="bob")
    other_model = make_client(daemon, MIB, tenant="alice", model="other")
    keys, data = blocks(2, MIB)
    alice.save(keys, data)
    assert alice.lookup(keys).held == 2
    assert bob.lookup(keys).held == other_model.lookup(keys).held == 0
    assert bob.evict(keys) == 0
    assert bob.pin(keys, 10).pinned == 0
    assert alice.lookup(keys).held == 2
    # On one unix socket any client may act for any tenant.
    assert bob.evict(keys[:1], tenant="alice") > 0
    assert bob.lookup(keys, each=True, tenant="alice").held == alice.lookup(keys, each=True).held == 1


def test_the_times_of_saves_and_loads_are_counted_by_path(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    """Goal: what dashboard, rules and `kvtierd top` show of saves and loads is there, whichever way bytes went."""
    daemon = make_daemon()
    client = make_client(daemon, 4096)
    keys, data = blocks(3, 4096)
    assert client.save(keys[:2], data[:2]).saved == 2
    assert client.load(keys[:2], [np.zeros(4096, np.uint8) for _ in range(2)]).loaded == 2
    with grpc.insecure_channel(daemon.address) as channel:
        stub, token = kvtier_pb2_grpc.KvTierServiceStub(channel), client.session_token
        stub.SaveBytes(iter([kvtier_pb2.SaveBytesRequest(session=token, key=keys[2], data=bytes(data[2]))]), timeout=30)
        answers = list(stub.LoadBytes(kvtier_pb2.LoadBytesRequest(session=token, keys=keys[2], deadline_ms=9000), timeout=30))
    assert b"".join(answer.data for answer in answers) == bytes(data[2])
    with daemon.admin() as admin:
        seen = parse(admin.GetMetrics(pb.GetMetricsRequest(), timeout=30).text, 0.0)
    for call, words in (("save", "saved"), ("load", "loaded")):
        for path, count in (("shm", 2), ("grpc", 1)):
            assert seen.sum(f"kvtierd_{words}_blocks_total", path=path) == count
            assert seen.value(f"kvtierd_{call}_seconds_count", path=path) == 1
            assert 0 < seen.value(f"kvtierd_{call}_seconds_sum", path=path) < 60
