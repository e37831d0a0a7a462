"""Fixtures: a real daemon for a module's tests, and small engines that are closed at the end of the test."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.daemon import DaemonProcess


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A running daemon. Tests that kill it start one of their own."""
    made = DaemonProcess(tmp_path_factory.mktemp("d"))
    try:
        yield made.start()
    finally:
        made.kill()


@pytest.fixture
def own_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A running daemon of this test's own."""
    made = DaemonProcess(tmp_path / "d")
    try:
        yield made.start()
    finally:
        made.kill()


@pytest.fixture
def nothing_is_left_open() -> Iterator[None]:
    """What keeps slots with the daemon says so when it is thrown away unclosed."""
    gc.collect()  # what other tests have left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert not [str(w.message) for w in caught if "was not closed" in str(w.message)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all engines of a module, so that they share blocks."""
    return tmp_path_factory.mktemp("m")


@pytest.fixture
def engines(model_folder: Path, daemon: DaemonProcess) -> Iterator[Callable[..., Any]]:
    """Makes engines at the module's daemon, or at an ``address``; attached where there is a daemon."""
    from tests.connectors.small_engine import SmallEngine

    made: list[SmallEngine] = []

    def make(address: str = "", attach: bool = True, **more: Any) -> SmallEngine:
        engine = SmallEngine(model_folder, address or daemon.address, **more)
        made.append(engine)
        if attach:
            assert all(client.wait_attached(30) for client in engine.side._pools.clients)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def workers() -> Iterator[Callable[..., Any]]:
    """Makes workers at a daemon."""
    from tests.connectors.one_worker import Worker

    made: list[Worker] = []

    def make(daemon: DaemonProcess, *args: Any, **more: Any) -> Worker:
        made.append(Worker(daemon, *args, **more))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
