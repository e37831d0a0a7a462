"""Fixtures: a real daemon as a child process, and clients of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import Client
from kvtierd.model import Namespace
from kvtierd.testing.daemon import DaemonProcess

MIB = 1 << 20


def namespace(*shard_bytes: int, model: str = "m") -> Namespace:
    """An opaque namespace of these shards."""
    return Namespace(shard_bytes=shard_bytes or (MIB,), model=model)


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons that are killed at the end of the test."""
    made: list[DaemonProcess] = []

    def make(name: str = "d", start: bool = True, **config: dict[str, Any]) -> DaemonProcess:
        daemon = DaemonProcess(tmp_path / name, config)
        made.append(daemon)
        return daemon.start() if start else daemon

    yield make
    for daemon in made:
        daemon.kill()


@pytest.fixture
def make_client() -> Iterator[Callable[..., Client]]:
    """Makes attached clients that are closed at the end of the test."""
    made: list[Client] = []

    def make(daemon: DaemonProcess, *shard_bytes: int, model: str = "m", **options: Any) -> Client:
        options.setdefault("timeout_s", 20.0)
        client = Client(namespace(*shard_bytes, model=model), daemon.address, require=True, **options)
        made.append(client)
        return client

    yield make
    for client in made:
        client.close()
