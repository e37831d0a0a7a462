"""Goal: by the KV events of a real daemon alone, a router knows what it holds on which tier: through saves, moves, evictions, a
restart and a kill.

Method: a daemon that publishes, a client that saves and loads, and a subscriber whose notes are compared with the daemon's list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import Client
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as pb
from tests.service.subscriber import AllBlocksCleared, Subscriber

KIB64 = 64 << 10
WAIT_S = 20.0


def keys(first: int, last: int) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in range(first, last)]


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    events = {"endpoint": f"ipc://{tmp_path}/e.sock", "replay_endpoint": f"ipc://{tmp_path}/r.sock"}
    return make_daemon(cpu={"capacity": "1MiB", "extent": "256KiB"}, events=events)


@pytest.fixture
def router(daemon: DaemonProcess, tmp_path: Path) -> Iterator[Subscriber]:
    made = Subscriber(f"ipc://{tmp_path}/e.sock", f"ipc://{tmp_path}/r.sock")
    yield made
    made.close()


def listed(daemon: DaemonProcess) -> dict[str, set[bytes | int]]:
    """What the daemon says it holds, by medium."""
    found: dict[str, set[bytes | int]] = {}
    with daemon.admin() as stub:
        for block in stub.ListBlocks(pb.ListBlocksRequest(page_size=1000)).blocks:
            for medium, state in zip(("GPU", "CPU", "STORAGE"), block.states, strict=True):
                if state == "ready":
                    found.setdefault(medium, set()).add(block.key)
    return found


def settles(router: Subscriber, daemon: DaemonProcess) -> bool:
    """True once the subscriber, having taken all messages, knows what the daemon says."""
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        router.ask(router.numbers[-1] + 1 if router.numbers else 0)
        if {m: k for m, k in router.held.items() if k} == listed(daemon):
            return True
        time.sleep(0.05)
    return False


def drained(router: Subscriber) -> list[Any]:
    """The events of all messages that have come."""
    events = []
    while more := router.take(200):
        events += more
    return events


def save(client: Client, wanted: list[bytes]) -> None:
    """Save all, though only some of them have room at one time."""
    for key in wanted:
        assert client.save([key], [bytes([key[-1]]) * KIB64], timeout_s=20.0, wait_s=15.0).complete


def test_a_router_knows_what_is_held(daemon: DaemonProcess, router: Subscriber, make_client: Callable[..., Client]) -> None:
    client = make_client(daemon, KIB64)
    save(client, keys(0, 40))
    assert settles(router, daemon)
    assert router.held["STORAGE"], "more than CPU memory takes"
    assert client.load(keys(0, 8), [bytearray(KIB64) for _ in range(8)]).loaded == 8
    assert client.evict(keys(20, 24)) > 0
    assert settles(router, daemon)
    assert not router.held["STORAGE"] & set(keys(20, 24))
    before = set(router.held["STORAGE"])
    client.close()

    daemon.kill()
    daemon.start()
    assert settles(router, daemon), "the notes from before are void"
    assert before <= router.held["STORAGE"]
    assert not router.held.get("CPU")
    assert router.numbers == sorted(router.numbers)

    # What is published while it is connected comes without asking, the last word too.
    client = make_client(daemon, KIB64)
    for key in keys(100, 200):
        save(client, [key])
        if any(key in getattr(event, "block_hashes", ()) for event in drained(router)):
            break
    else:
        pytest.fail("the subscriber is not connected again")
    client.close()
    assert daemon.stop() == 0
    assert isinstance(drained(router)[-1], AllBlocksCleared)
    assert router.held == {}
