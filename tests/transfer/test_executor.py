"""Goal: moves run in the order of their class, bounded, in large jobs, and each is reported once.

Method: a store whose calls wait until the test lets them go, so that the order is chosen by the test and not by luck.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

import pytest

from kvtierd.core.block import Block, Copy
from kvtierd.core.commands import Move, Priority, StartMoves
from kvtierd.core.order import Order
from kvtierd.core.realm import Realm, Tenant
from kvtierd.cuda import Device
from kvtierd.errors import StartupError
from kvtierd.model import Namespace, Result, Tier
from kvtierd.tiers.base import BlockIo, DeviceRange
from kvtierd.transfer.executor import BATCH_BYTES, Executor, MoveReport

SIZE = 1 << 20
REALM = Realm(1, Tenant("t"), Namespace(shard_bytes=(SIZE,)), tuple(Order() for _ in Tier))


class GatedStore:
    """Notes the keys of each call and waits until the gate opens."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[bytes]]] = []
        self.blocks: list[BlockIo] = []
        self.gate = threading.Event()
        self.end = threading.Event()
        """Calls for a block named "held" wait for this one as well."""
        self.fail_with: Exception | None = None

    def _call(self, kind: str, blocks: Sequence[BlockIo]) -> list[Result]:
        self.calls.append((kind, [b.key for b in blocks]))
        self.blocks += blocks
        assert self.gate.wait(30)
        if blocks[0].key.startswith(b"held"):
            assert self.end.wait(30)
        if self.fail_with is not None:
            raise self.fail_with
        return [Result.OK for _ in blocks]

    def write(self, blocks: Sequence[BlockIo]) -> list[Result]:
        return self._call("write", blocks)

    def read(self, blocks: Sequence[BlockIo]) -> list[Result]:
        return self._call("read", blocks)

    def forget(self, blocks: Sequence[BlockIo]) -> None:
        raise AssertionError("the executor never forgets anything")


class PlainMemory:
    """One page-aligned slot for all."""

    def view(self, slot: int) -> memoryview:
        return memoryview(bytearray(SIZE + 4096))


class Gpu:
    """Where slots would be on a GPU that nobody touches."""

    device = cast("Device", "the GPU")

    def address(self, slot: int) -> tuple[Device, int]:
        return self.device, slot << 21


def command(priority: Priority, *names: str, size: int = SIZE, upper: Tier = Tier.CPU) -> StartMoves:
    down = priority is Priority.DEMOTE
    src, dst = (upper, Tier.NVME) if down else (Tier.NVME, upper)
    moves = []
    for name in names:
        block = Block(name.encode().ljust(32), REALM, 0.0)
        moves.append(Move(len(moves), Copy(block, src, 1), Copy(block, dst, 2), priority, 0.0, "test", size))
    return StartMoves(src, dst, priority, tuple(moves))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(30_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("the condition did not come true within 30 s")


def names(store: GatedStore) -> list[str]:
    return [key.decode().strip() for _, keys in store.calls for key in keys]


async def test_loads_go_before_prefetches_before_demotions() -> None:
    store, reports = GatedStore(), list[MoveReport]()
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 2, reports.append, float)
    executor.submit(command(Priority.DEMOTE, "busy", size=BATCH_BYTES))
    executor.submit(command(Priority.LOAD, "held", size=BATCH_BYTES))
    await until(lambda: len(store.calls) == 2)
    executor.submit(command(Priority.DEMOTE, "d", size=BATCH_BYTES))
    executor.submit(command(Priority.PREFETCH, "p", size=BATCH_BYTES))
    executor.submit(command(Priority.LOAD, "l", size=BATCH_BYTES))
    assert executor.queued == 3
    store.gate.set()  # one thread is free from now on, the other stays held
    await until(lambda: len(reports) == 4)
    assert names(store)[2:] == ["l", "p", "d"]
    store.end.set()
    await executor.idle()
    assert len(reports) == 5
    await executor.close()


async def test_demotions_leave_threads_for_loads() -> None:
    store, reports = GatedStore(), list[MoveReport]()
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 4, reports.append, float)
    for i in range(10):
        executor.submit(command(Priority.DEMOTE, f"d{i}"))
    await until(lambda: len(store.calls) == 3)
    assert (executor.running, executor.queued) == (3, 7)
    executor.submit(command(Priority.LOAD, "load"))
    await until(lambda: "load" in names(store))
    store.gate.set()
    await executor.idle()
    await executor.close()


async def test_threads_go_on_while_the_event_loop_is_busy() -> None:
    """Method: it does nothing but wait until both threads have moved everything, and hears of it afterwards."""
    store, reports = GatedStore(), list[MoveReport]()
    store.gate.set()
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 2, reports.append, float)
    executor.submit(command(Priority.LOAD, *[f"{n}" for n in range(8)], size=BATCH_BYTES))
    until_s = time.monotonic() + 30
    while len(store.calls) < 8 and time.monotonic() < until_s:
        time.sleep(0.001)
    assert (len(store.calls), len(reports)) == (8, 0)
    await executor.idle()
    assert len(reports) == 8
    await executor.close()


async def test_small_blocks_share_jobs_and_keep_their_order() -> None:
    store, reports = GatedStore(), list[MoveReport]()
    store.gate.set()
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 2, reports.append, float)
    executor.submit(command(Priority.DEMOTE, *[f"{i:02}" for i in range(10)], size=SIZE))
    await executor.idle()
    assert [len(keys) for _, keys in store.calls] == [4, 4, 2], "about 4 MiB a job"
    assert names(store) == [f"{i:02}" for i in range(10)]
    assert sorted(m.move_id for r in reports for m, _ in r.results) == list(range(10)), "each is reported once"
    await executor.close()


async def test_a_store_that_raises_leaves_blocks_where_they_are(caplog: pytest.LogCaptureFixture) -> None:
    store, reports = GatedStore(), list[MoveReport]()
    store.gate.set()
    store.fail_with = RuntimeError("a bug")
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 2, reports.append, float)
    executor.submit(command(Priority.LOAD, "x"))
    await executor.idle()
    assert [result for r in reports for _, result in r.results] == [Result.IO_ERROR]
    assert "a bug" in caplog.text
    await executor.close()


async def test_the_way_down_and_up_between_gpu_and_nvme() -> None:
    """Each names the store's slot and the GPU's memory."""
    store, reports = GatedStore(), list[MoveReport]()
    store.gate.set()
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 2, reports.append, float, Gpu())
    for priority in (Priority.DEMOTE, Priority.LOAD, Priority.PREFETCH):
        executor.submit(command(priority, "x", upper=Tier.HBM))
        await executor.idle()
    await executor.close()
    assert [kind for kind, _ in store.calls] == ["write", "read", "read"]
    assert [[result for _, result in r.results] for r in reports] == [[Result.OK]] * 3
    for b, (stored, device) in zip(store.blocks, [(2, 1), (1, 2), (1, 2)], strict=True):
        assert b.slots == (stored,) and not b.buffers
        assert list(b.ranges) == [DeviceRange(Gpu.device, device << 21, SIZE)]


async def test_what_hangs_on_the_direct_way_holds_up_nothing_else() -> None:
    store, reports = GatedStore(), list[MoveReport]()
    store.gate.set()
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 2, reports.append, float, Gpu())
    assert await executor.in_direct_thread(threading.current_thread) is not threading.current_thread()
    executor.use_direct(True)
    for n in range(4):
        executor.submit(command(Priority.LOAD, f"held {n}", size=BATCH_BYTES, upper=Tier.HBM))
    await until(lambda: len(store.calls) == 2)
    assert executor.queued == 2, "all its threads hang"
    executor.submit(command(Priority.LOAD, "cpu"))
    await until(lambda: len(reports) == 1)
    executor.use_direct(False)
    await until(lambda: len(store.calls) == 5)  # what waited goes by the threads of the others
    assert executor.queued == 0
    store.end.set()
    await executor.idle()
    assert len(reports) == 5
    executor.submit(command(Priority.DEMOTE, "later", upper=Tier.HBM))
    await executor.idle()
    await executor.close()


async def test_a_hang_on_the_direct_way_does_not_hold_up_the_end() -> None:
    store, reports = GatedStore(), list[MoveReport]()
    store.gate.set()
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 2, reports.append, float, Gpu())
    await executor.in_direct_thread(lambda: None)
    executor.use_direct(True)
    for n in range(3):
        executor.submit(command(Priority.DEMOTE, f"held {n}", size=BATCH_BYTES, upper=Tier.HBM))
    await until(lambda: len(store.calls) == 1)
    assert not await executor.close(0.01)
    assert reports == [], "it has not ended"
    assert executor.running == 1
    store.end.set()
    await until(lambda: len(reports) == 1)


async def test_moves_that_come_after_the_end_are_dropped_quietly(caplog: pytest.LogCaptureFixture) -> None:
    store, reports = GatedStore(), list[MoveReport]()
    executor = Executor(PlainMemory(), {Tier.NVME: store}, 2, reports.append, float)
    executor.submit(command(Priority.LOAD, "running"))
    await until(lambda: len(store.calls) == 1)
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0)
    executor.submit(command(Priority.LOAD, "late"))  # as the report of a move that ends meanwhile may ask for
    store.gate.set()
    await closing
    executor.submit(command(Priority.LOAD, "later"))
    await until(lambda: len(reports) == 1)
    assert names(store) == ["running"]
    assert (executor.running, executor.queued) == (0, 0)
    assert not caplog.records


async def test_too_few_threads_are_noticed_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, left = threading.Thread.start, iter(range(3))

    def start_some(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    with pytest.raises(StartupError, match=r"8 threads.*ulimit -u.*lower nvme.depth"):
        Executor(PlainMemory(), {}, 8, lambda _report: None, float)


async def test_a_move_within_memory_copies_the_shards_that_move() -> None:
    """Method: of a block of two shards the first stays where it is; nothing but the payload of the second is written."""
    realm = Realm(1, Tenant("t"), Namespace(shard_bytes=(5000, 6000)), tuple(Order() for _ in Tier))
    slots = {n: memoryview(bytearray([n]) * 8192) for n in (1, 2, 3)}

    class Memory:
        def view(self, slot: int) -> memoryview:
            return slots[slot]

    block = Block(b"moves".ljust(32), realm, 0.0)
    move = Move(1, Copy(block, Tier.CPU, (1, 2)), Copy(block, Tier.CPU, (1, 3)), Priority.DEMOTE, 0.0, "packed", 11_000)
    reports = list[MoveReport]()
    executor = Executor(Memory(), {}, 2, reports.append, float)
    executor.submit(StartMoves(Tier.CPU, Tier.CPU, Priority.DEMOTE, (move,)))
    await executor.idle()
    await until(lambda: len(reports) == 1)
    assert reports[0].results == [(move, Result.OK)]
    assert bytes(slots[1]) == bytes([1]) * 8192
    assert bytes(slots[3]) == bytes([2]) * 6000 + bytes([3]) * 2192
    await executor.close()
