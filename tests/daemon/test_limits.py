"""Goal: odd amounts and times do no harm: no keys, a million keys, clocks that jump.

Method: a real daemon for amounts; for the wall clock, the source itself: what never reads it cannot be hurt by it.
"""

import ast
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvtierd
from kvtierd.client import Client
from kvtierd.errors import Reason
from kvtierd.model import Tier
from kvtierd.testing.daemon import DaemonProcess
from tests.daemon.conftest import MIB
from tests.daemon.test_roundtrip import to_nvme_only

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]


def test_no_keys_and_a_million_keys(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "16MiB"})
    client = make_client(daemon, 4096, timeout_s=60.0)
    assert client.lookup([]).held == 0
    assert client.save([], []).saved == 0
    assert client.load([], []).loaded == 0
    assert client.evict([]) == 0
    keys = np.random.default_rng(1).integers(0, 256, (1_000_000, 32), dtype=np.uint8).tobytes()
    first = keys[:320]
    assert client.save(first, [bytes(4096)] * 10).saved == 10
    assert client.lookup(keys).held == 10
    assert client.lookup(keys, each=True).held == 10
    assert client.prefetch(keys, deadline_s=5).held == 10
    assert client.evict(keys) == 10


def test_more_tenants_and_namespaces_than_extents(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "8MiB"}, nvme={"capacity": "64MiB"})
    keys = [os.urandom(32) for _ in range(2)]
    clients = [make_client(daemon, MIB, tenant=f"t{i}", model=f"m{i}") for i in range(12)]
    for number, client in enumerate(clients):
        assert client.save(keys, [bytes([number]) * MIB] * 2, wait_s=10).rejected == {}
    for number, client in enumerate(clients):
        out = [np.zeros(MIB, np.uint8) for _ in keys]
        assert client.load(keys, out).loaded == 2, "each realm gets an extent when it needs one"
        assert all((o == number).all() for o in out)
    cpu = daemon.status().tiers[0]
    assert cpu.reserved_bytes <= cpu.capacity_bytes


def test_one_module_reads_the_wall_clock() -> None:
    wall = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}
    rooms = ["core", "tiers", "transfer", "runtime", "service", "client"]
    found = []
    for path in (p for room in rooms for p in (Path(kvtierd.__file__).parent / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in wall:
                found.append("/".join(path.parts[-2:]))
    assert found == ["runtime/wallclock.py"], (
        "deadlines, TTLs and ages use the monotonic clock, so that a jump of the wall clock changes nothing"
    )


def test_a_new_namespace_keeps_its_blocks_while_empty_extents_go(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "32MiB"}, nvme={"capacity": "128MiB"})
    for number in range(6):
        client = make_client(daemon, MIB, model=f"m{number}")
        keys = [os.urandom(32) for _ in range(4)]
        assert client.save(keys, [bytes([number]) * MIB] * 4, wait_s=10).saved == 4
        assert client.lookup(keys).held == 4
        out = [np.zeros(MIB, np.uint8) for _ in keys]
        assert client.load(keys, out).by_tier == {Tier.CPU: 4}, "there is room enough in memory"
        client.evict()


def test_prefetch_of_more_than_a_session_may_hold_ends_by_itself(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "16MiB"}, nvme={"capacity": "128MiB"})
    client = make_client(daemon, MIB, timeout_s=30.0)
    keys = [os.urandom(32) for _ in range(30)]
    for start in range(0, 30, 5):
        assert client.save(keys[start : start + 5], [bytes(MIB)] * 5, wait_s=10).saved == 5
    to_nvme_only(daemon)
    fetched = client.prefetch(keys, deadline_s=25, wait=True)
    assert fetched.done
    assert fetched.held == 30
    assert 1 <= fetched.ready <= 8, "half of CPU memory at the most"
    fetched.cancel()
    assert client.load(keys, [np.zeros(MIB, np.uint8) for _ in keys]).loaded == 30


def test_who_keeps_all_gets_what_a_session_may_hold_without_waiting(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "16MiB"}, nvme={"capacity": "128MiB"})
    client = make_client(daemon, MIB, timeout_s=60.0)
    keys = [os.urandom(32) for _ in range(12)]
    for start in (0, 6):
        assert client.save(keys[start : start + 6], [bytes(MIB)] * 6, wait_s=10).saved == 6
    with client.fetch(keys, keeps=True) as fetched:
        held = [index for index, _ in fetched]
        assert 1 <= len(held) <= 8 and held == list(range(len(held)))
        assert fetched.done and fetched.reason is Reason.LIMIT, "it ended by itself, long before its deadline"
    with client.fetch(keys) as fetched:
        assert [fetched.next_index() for _ in held] == held
        assert not fetched.poll(0.2) and not fetched.done, "this one waits"
        fetched.release(range(4))
        assert fetched.next_index() == len(held)


def test_own_prefetches_do_not_starve_own_loads(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(cpu={"capacity": "16MiB"}, nvme={"capacity": "128MiB"})
    client = make_client(daemon, MIB, timeout_s=30.0)
    first, second = ([os.urandom(32) for _ in range(10)] for _ in range(2))
    for keys in (first, second):
        for start in (0, 5):
            assert client.save(keys[start : start + 5], [bytes(MIB)] * 5, wait_s=10).saved == 5
    to_nvme_only(daemon)
    assert client.prefetch(first, deadline_s=60, wait=True).ready > 0
    assert client.load(second, [np.zeros(MIB, np.uint8) for _ in second], timeout_s=10).loaded == 10
