"""Goal: the asyncio client does what the other one does, never blocks the event loop, and a cancelled call has let go of
buffers and slots when it ends. Method: the fake daemon holds replies back while calls are cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvtierd.client import AsyncClient, DaemonUnavailableError, Reason
from tests.client.conftest import NAMESPACE, SHARD_BYTES, empty_blocks, equal, some_blocks, some_keys
from tests.client.fake_daemon import FakeDaemon


@pytest.fixture
async def client(daemon: FakeDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(NAMESPACE, daemon.address, timeout_s=5, require=True, threads=4) as made:
        yield made
        daemon.wake()
        await asyncio.to_thread(daemon.until, lambda: not daemon.tickets)


async def test_all_calls(client: AsyncClient, daemon: FakeDaemon) -> None:
    keys, blocks, targets = some_keys(4), some_blocks(4), empty_blocks(4)
    assert client.status.attached
    assert client.session_token in daemon.sessions
    assert client.descriptor_socket == str(daemon.fd_path)
    assert (await client.save(keys[:2], blocks[:2])).saved == 2
    async with await client.reserve(keys) as r:
        assert r.granted == [2, 3]
        assert (r.outcomes[0], r.reason, r.session_token) == ("HELD", None, client.session_token)
        for index in r.granted:
            assert r.slots(index)
            r.views(index)[0][:] = blocks[index].tobytes()
        assert await r.commit([2]) == 1
        assert await r.commit() == 1
    assert (await client.lookup(keys)).held == 4
    assert (await client.load(keys, targets)).loaded == 4
    assert equal(blocks, targets)
    async with await client.fetch(keys) as f:
        assert f.session_token == client.session_token
        got = {index: bytes(views[0]) async for index, views in f}
        assert (f.done, f.reason, f.intact) == (True, None, True)
        assert f.slots(1)
        assert bytes(f.views(1)[0]) == got[1]
        f.release([1])
    assert got == {i: b.tobytes() for i, b in enumerate(blocks)}
    (await client.prefetch(keys, 5, wait=True)).cancel()
    pin = await client.pin(keys, 5)
    assert pin.pinned == 4
    assert await client.unpin(pin)
    assert (await client.load_bytes(keys)).loaded == 4
    assert (await client.save_bytes(some_keys(1, first=9), some_blocks(1))).saved == 1
    assert await client.evict() == 5


async def test_many_more_calls_than_threads(client: AsyncClient) -> None:
    async def one(number: int) -> None:
        keys, blocks, targets = some_keys(2, first=number * 2), some_blocks(2, seed=number), empty_blocks(2)
        assert (await client.save(keys, blocks)).saved == 2
        assert (await client.load(keys, targets)).loaded == 2
        assert equal(blocks, targets)

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(one(number))


async def test_the_event_loop_runs_while_calls_wait(client: AsyncClient, daemon: FakeDaemon) -> None:
    daemon.hang()
    call = asyncio.ensure_future(client.lookup(some_keys(1), timeout_s=5))
    for _ in range(10):
        await asyncio.sleep(0.001)
    assert not call.done()
    daemon.wake()
    assert (await call).held == 0


async def test_a_cancelled_load_no_longer_touches_the_buffers(client: AsyncClient, daemon: FakeDaemon) -> None:
    keys = some_keys(2)
    await client.save(keys, some_blocks(2))
    gate = daemon.gates[keys[1]] = threading.Event()
    targets = empty_blocks(2)
    task = asyncio.ensure_future(client.load(keys, targets, timeout_s=60))
    await asyncio.to_thread(daemon.until, lambda: any(t.kind == "load" for t in daemon.tickets.values()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    for target in targets:
        target[:] = 0
    gate.set()
    await asyncio.to_thread(daemon.until, lambda: daemon.calls["load"] == 1 and not daemon.tickets)
    assert not any(np.any(target) for target in targets)
    assert client.status.attached, "cancelling says nothing about the daemon"


async def test_a_cancelled_save_frees_its_slots_only_after_the_copy(
    client: AsyncClient, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the first block is held up; until it ends, neither Commit nor Abort may reach the daemon."""
    copying, go_on = threading.Event(), threading.Event()
    real = np.copyto

    def slow(*args: object) -> None:
        copying.set()
        assert go_on.wait(10)
        real(*args)  # type: ignore[call-overload]

    monkeypatch.setattr("kvtierd.client.copying.np.copyto", slow)
    task = asyncio.ensure_future(client.save(some_keys(3), some_blocks(3)))
    await asyncio.to_thread(copying.wait, 10)
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0.01)
        task.cancel()
    assert not task.done()
    assert len(daemon.tickets) == 1
    assert daemon.calls["abort"] == daemon.calls["commit"] == 0
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(daemon.until, lambda: not daemon.tickets)
    assert (daemon.calls["commit"], daemon.calls["abort"]) == (1, 1)
    assert (await client.lookup(some_keys(3))).held == 1


async def test_a_cancelled_reserve_or_fetch_gives_everything_back(client: AsyncClient, daemon: FakeDaemon) -> None:
    await client.save(some_keys(1), some_blocks(1))
    daemon.hang()
    tasks = [asyncio.ensure_future(c) for c in (client.reserve(some_keys(3, first=5)), client.prefetch(some_keys(1), 60))]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, asyncio.CancelledError) for r in results)
    daemon.wake()
    await asyncio.to_thread(daemon.until, lambda: daemon.calls["abort"] == 1 and daemon.calls["cancel"] == 1)
    assert not daemon.tickets


async def test_leaving_a_fetch_that_waits(client: AsyncClient, daemon: FakeDaemon) -> None:
    keys = some_keys(2)
    await client.save(keys, some_blocks(2))
    gate = daemon.gates[keys[1]] = threading.Event()
    async with await client.fetch(keys, timeout_s=60) as f:
        blocks = aiter(f)
        assert (await anext(blocks))[0] == 0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(blocks), 0.1)
    gate.set()


async def test_without_a_daemon(folder: object) -> None:
    async with AsyncClient(NAMESPACE, f"unix:{folder}/none.sock") as client:
        assert (await client.lookup(some_keys(1))).reason is Reason.UNSPECIFIED
        assert (await client.load(some_keys(1), [bytearray(SHARD_BYTES)])).loaded == 0
    with pytest.raises(DaemonUnavailableError):
        async with AsyncClient(NAMESPACE, f"unix:{folder}/none.sock", require=True, timeout_s=0.1):
            pass
