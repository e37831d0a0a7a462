"""Puts the simulated system calls, locks and threads in place of the real ones, for the time of a run."""

from __future__ import annotations

import asyncio
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvtierd import plain_file
from kvtierd.runtime import runtime, sessions
from kvtierd.testing.simulation.fileobject import SimFile
from kvtierd.testing.simulation.syscalls import SimOs
from kvtierd.testing.simulation.threads import SimLock, SimPool, SimThreading, World
from kvtierd.tiers import (
    budget_file,
    encryption,
    folder,
    io_engine,
    journal,
    log_file,
    membership,
    nvme,
    nvme_fit,
    nvme_open,
    pool_file,
    segments,
    slot_io,
)
from kvtierd.transfer import executor, lanes


@contextmanager
def installed(world: World, system: SimOs) -> Iterator[None]:
    """The daemon's modules see this world and this system; their own again at the end."""
    former: list[tuple[types.ModuleType, str, Any]] = []
    missing = object()
    for module, name, value in _replacements(world, system):
        former.append((module, name, module.__dict__.get(name, missing)))
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in former:
            if value is missing:
                delattr(module, name)
            else:
                setattr(module, name, value)


def _replacements(world: World, system: SimOs) -> Iterator[tuple[types.ModuleType, str, Any]]:
    threading = SimThreading(world)
    for module in (
        io_engine, folder, membership, nvme_fit, nvme_open, segments, journal, log_file, plain_file, budget_file, pool_file,
    ):  # fmt: skip
        yield module, "os", system
    for module in (folder, journal, log_file, plain_file, budget_file, pool_file):
        yield module, "open", system.open_file
    for module in (folder, segments, journal, slot_io, nvme, lanes):
        yield module, "threading", threading
    for module in (segments, lanes):
        yield module, "ThreadPoolExecutor", _pools(world)
    fcntl = types.SimpleNamespace(flock=system.flock, LOCK_EX=2, LOCK_NB=4)
    yield folder, "fcntl", fcntl
    yield folder, "file_system_of", lambda _path: "ext4"
    yield folder, "mount_point_of", lambda _path: "/"
    yield nvme, "aiofiles", types.SimpleNamespace(open=lambda *args: _AsyncFile(system, *args))
    yield segments, "Segment", _segment_maker(world, segments.Segment)
    yield executor, "time", types.SimpleNamespace(monotonic=lambda: world.now)
    yield nvme_open, "read_key", lambda _config: system.key
    drawn = random.Random(0)  # nonces decide nothing, so the seed's own numbers are left to what does
    yield encryption, "secrets", types.SimpleNamespace(token_bytes=drawn.randbytes)
    numbers = types.SimpleNamespace(randbits=world.random.getrandbits, token_bytes=world.random.randbytes)
    yield runtime, "secrets", numbers
    yield sessions, "secrets", numbers


def _pools(world: World) -> Callable[..., SimPool]:
    return lambda *_args, **_named: SimPool(world)


def _segment_maker(world: World, segment: type[segments.Segment]) -> Callable[..., segments.Segment]:
    """Its lock is made by the class, not by the module's name for locks."""

    def make(*args: Any) -> segments.Segment:
        made = segment(*args)
        made.lock = SimLock(world)  # type: ignore[assignment]
        return made

    return make


class _AsyncFile:
    """As ``aiofiles.open``, as far as the store uses it."""

    def __init__(self, system: SimOs, path: str, mode: str) -> None:
        self._system = system
        self._path = path
        self._mode = mode
        self._file: SimFile | None = None

    async def __aenter__(self) -> _AsyncFile:
        self._file = await asyncio.to_thread(self._system.open_file, self._path, self._mode)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._file is not None
        if error[0] is GeneratorExit:
            return  # the process was killed: nothing runs any more that could close it
        await asyncio.to_thread(self._file.__exit__, *error)

    async def write(self, data: bytes) -> int:
        """Write in a thread."""
        assert self._file is not None
        return int(await asyncio.to_thread(self._file.write, data))
