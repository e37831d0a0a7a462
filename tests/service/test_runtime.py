"""Goal: one command that cannot be run takes no other along, and the runtime tells the core and its callers the truth.

Method: the real runtime and core, with parts of the machine that refuse at chosen moments.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvtierd.config import Config, CpuConfig, NvmeConfig
from kvtierd.core.saves import BUSY
from kvtierd.core.slots import UNMADE_PAUSE_S
from kvtierd.core.tickets import GRANTED
from kvtierd.model import Namespace, Tier
from kvtierd.runtime import Attached, Runtime
from kvtierd.service.authority import RuntimeAuthority

SIZE = 64 << 10
SPACE = Namespace(shard_bytes=(SIZE,), model="m")
WAIT_S = 3 * UNMADE_PAUSE_S


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    cpu = CpuConfig(capacity=1 << 20, extent=2 * SIZE, prefault=False)
    nvme = NvmeConfig(capacity=32 << 20, folders=[tmp_path / "nvme"], reserve=0, allow_volatile=True)
    made = Runtime(Config(cpu=cpu, nvme=nvme))
    await made.start()
    yield made
    made.core.check()
    await made.stop()


async def attach(runtime: Runtime, model: str = "m") -> Attached:
    return await runtime.attach(Namespace(shard_bytes=(SIZE,), model=model), "t", "test", 1)


def keys(*numbers: int) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in numbers]


async def save(runtime: Runtime, attached: Attached, *numbers: int, wait_s: float = 0.0) -> list[int]:
    realm = runtime.core.state.realms[attached.core.realm.realm_id]
    grant = await runtime.save(attached, realm, keys(*numbers), wait_s)
    if grant.ticket_id:
        runtime.commit(attached, grant.ticket_id, ())
    return grant.outcomes


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    pytest.fail("the condition did not come true within 10 s")


class Refusing:
    """In the place of a method: fails a number of times, then does its work."""

    def __init__(self, method: Callable[..., object], error: Exception, times: int) -> None:
        self.method, self.error, self.left = method, error, times

    def __call__(self, *args: object) -> object:
        if self.left > 0:
            self.left -= 1
            raise self.error
        return self.method(*args)


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError(), RuntimeError("a bug")])
async def test_saves_are_busy_while_no_extent_can_be_made(
    runtime: Runtime, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attached = await attach(runtime)
    assert await save(runtime, attached, 1) == [GRANTED]
    monkeypatch.setattr(runtime.cpu, "create", Refusing(runtime.cpu.create, error, 2))
    assert await save(runtime, attached, 2, 3, 4, 5) == [GRANTED, BUSY, BUSY, BUSY], "one slot was there"
    assert await save(runtime, attached, 3, 4) == [BUSY, BUSY]
    runtime.core.check()
    assert await save(runtime, attached, 3, 4, wait_s=WAIT_S) == [GRANTED, GRANTED]
    assert runtime.core.state.counts.failed_commands == {"NewExtent": 2}
    assert caplog.text.count("no CPU extent of 131072 bytes can be made") == 1, "it is told once"
    assert ("Traceback" in caplog.text) == (not isinstance(error, OSError))
    assert runtime.cpu.reserved_bytes == runtime.core.state.pools[Tier.CPU].reserved_bytes


async def test_what_else_was_to_be_done_is_done(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """One realm gets no extent in the very batch that writes another's blocks down."""
    first, second = await attach(runtime), await attach(runtime, "other")
    assert await save(runtime, first, *range(8)) == [GRANTED] * 8
    monkeypatch.setattr(runtime.cpu, "create", Refusing(runtime.cpu.create, OSError(errno.ENOMEM, "no memory"), 1))
    runtime.runner._applying = True  # gather commands of two events in one batch
    runtime.core.drain(runtime.now(), on=True)
    runtime.core.state.draining = False
    asked = asyncio.ensure_future(save(runtime, second, 1))
    await asyncio.sleep(0)
    runtime.runner._applying = False
    runtime.apply()
    await asked
    await until(lambda: runtime.core.state.copies[Tier.NVME] == 8 and not runtime.core.state.moves)
    assert runtime.core.state.counts.failed_commands == {"NewExtent": 1}


async def test_moves_that_cannot_be_queued_end_and_lose_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attached = await attach(runtime)
    realm = attached.core.realm
    assert await save(runtime, attached, 1, 2) == [GRANTED, GRANTED]
    assert await runtime.drain(10, resume=True) == 0
    await runtime.evict([realm], keys(1, 2), Tier.CPU, 0.0)
    monkeypatch.setattr(runtime.runner.executor, "submit", Refusing(runtime.runner.executor.submit, RuntimeError("a bug"), 1))
    ticket = runtime.load(attached, realm, keys(1, 2), 5.0, each=True)
    assert runtime.collect(ticket) == ([], [], True)
    assert not runtime.core.state.moves
    assert "a bug" in caplog.text
    again = runtime.load(attached, realm, keys(1, 2), 10.0, each=True)
    await until(lambda: again.ready == 2)
    assert runtime.collect(again)[0] == [0, 1]


async def test_memory_comes_back_though_no_thread_could_be_had(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtierd.runtime.commands.RETRY_S", 0.01)
    attached = await attach(runtime)
    assert await save(runtime, attached, 1, 2) == [GRANTED, GRANTED]
    await runtime.evict([attached.core.realm], keys(1, 2), None, 0.0)
    monkeypatch.setattr(runtime.cpu, "retire", Refusing(runtime.cpu.retire, RuntimeError("can't start new thread"), 3))
    pool = runtime.core.state.pools[Tier.CPU]
    (extent,) = pool.extents.values()
    pool.retire(extent)
    runtime.apply()
    assert pool.reserved_bytes == 2 * SIZE, "it counts until it is gone"
    await until(lambda: pool.reserved_bytes == 0)
    assert runtime.cpu.reserved_bytes == 0
    assert runtime.core.state.counts.failed_commands == {"RetireExtent": 3}
    assert "cannot be given back yet" in caplog.text


async def test_memory_is_taken_where_the_processes_of_a_shard_run(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process says on which NUMA node its device is; -1 says nothing, and a process of all shards stands for each of them."""
    nodes: dict[int, int] = {}
    right = runtime.cpu.create

    def create(extent_id: int, slot_bytes: int, slot_count: int, numa_node: int = -1) -> None:
        nodes[extent_id] = numa_node
        right(extent_id, slot_bytes, slot_count, numa_node)

    monkeypatch.setattr(runtime.cpu, "create", create)
    authority = RuntimeAuthority(runtime)
    joins = itertools.count(1)

    async def taken(model: str, *said: tuple[int, int]) -> list[int]:
        """Nodes of the extents of a namespace of two shards whose processes say these nodes."""
        attached = await runtime.attach(Namespace(shard_bytes=(SIZE, SIZE), model=model), "t", "test", 1)
        for shard, node in said:
            authority.join(attached.token, shard, False, node, 1, os.getuid(), next(joins))
        nodes.clear()
        assert await save(runtime, attached, 1) == [GRANTED]
        extents = runtime.core.state.pools[Tier.CPU].extents
        return [node for _, node in sorted((extents[extent_id].group.shard, node) for extent_id, node in nodes.items())]

    assert await taken("unknown", (-1, -1), (0, -1)) == [-1, -1]
    assert await taken("by shard", (-1, -1), (0, 1), (1, 0)) == [1, 0]
    assert await taken("one", (0, -1), (1, 3)) == [-1, 3]
    assert await taken("all", (-1, 2)) == [2, 2]
