"""Fixtures: a daemon's memory and descriptor socket, under both kinds of event loops, and clients of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client.extents import ExtentMap
from tests.cpu.tools import LOOPS, Daemon, Raw, Worker, memfds


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No thread and no memfd of the package outlives a test."""
    before = len(list(memfds()))
    yield
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvtierd-")]
    assert len(list(memfds())) == before


@pytest.fixture(params=sorted(LOOPS))
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    """A running daemon with sessions 1 and 2."""
    running = Daemon(tmp_path / "fd.sock", request.param).start()
    running.session(1)
    running.session(2)
    yield running
    running.stop()


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[Callable[[], Raw]]:
    """Makes raw connections."""
    made: list[Raw] = []

    def make() -> Raw:
        made.append(Raw(daemon.path))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def extent_map(daemon: Daemon) -> Iterator[Callable[..., ExtentMap]]:
    """Makes extent maps of session 1."""
    made: list[ExtentMap] = []

    def make(session: bytes = b"token-1", **options: Any) -> ExtentMap:
        made.append(ExtentMap(daemon.path, session, **({"timeout_s": 10.0} | options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def worker(daemon: Daemon) -> Iterator[Callable[..., Worker]]:
    """Starts worker processes of session 1."""
    made: list[Worker] = []

    def make(session: bytes = b"token-1", **options: Any) -> Worker:
        made.append(Worker(daemon.path, session, **options))
        return made[-1]

    yield make
    for each in made:
        each.kill()
