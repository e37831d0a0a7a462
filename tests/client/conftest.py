"""Fixtures: a fake daemon and clients of it. At the end no ticket may be left with the daemon, and no thread of a client."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtierd.client import Client, Namespace
from tests.client.fake_daemon import FakeDaemon

SHARD_BYTES = 8192
NAMESPACE = Namespace(shard_bytes=(SHARD_BYTES,))


def some_keys(count: int, first: int = 0) -> list[bytes]:
    """Distinct keys."""
    return [(first + i).to_bytes(32, "big") for i in range(count)]


def some_blocks(count: int, seed: int = 0, size: int = SHARD_BYTES) -> list[Any]:
    """Distinct random blocks of one shard."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]


def empty_blocks(count: int, size: int = SHARD_BYTES) -> list[Any]:
    """Buffers to load into."""
    return [np.zeros(size, np.uint8) for _ in range(count)]


def equal(left: list[Any], right: list[Any]) -> bool:
    """Whether all blocks are equal."""
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's path is limited to 108 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(folder: Path) -> Iterator[FakeDaemon]:
    """A running fake daemon. What was granted in its last boot must have come back at the end."""
    fake = FakeDaemon(folder).start()
    yield fake
    fake.wake()
    for gate in fake.gates.values():
        gate.set()
    try:
        if fake._server is not None:
            fake.until(lambda: all(ticket.kind == "pin" for ticket in fake.tickets.values()))
        assert not fake.failures
    finally:
        fake.kill()


@pytest.fixture
def connect(daemon: FakeDaemon) -> Iterator[Callable[..., Client]]:
    """Make attached clients of the fake daemon; they are closed at the end, and their threads must end then."""
    clients: list[Client] = []

    def make(namespace: Namespace = NAMESPACE, **options: Any) -> Client:
        client = Client(namespace, daemon.address, **({"timeout_s": 5.0} | options))
        clients.append(client)
        assert client.wait_attached(5.0)
        return client

    yield make
    daemon.wake()
    if daemon._server is not None:
        daemon.until(lambda: all(ticket.kind == "pin" for ticket in daemon.tickets.values()))
    for client in clients:
        client.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvtierd-")]


@pytest.fixture
def client(connect: Callable[..., Client]) -> Client:
    """An attached client with blocks of one shard of 8 KiB."""
    return connect()
