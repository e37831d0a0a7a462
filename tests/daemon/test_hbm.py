"""Goal: blocks are in GPU memory where an engine can open that, with the right bytes on every way out, and else in CPU memory.

Method: a real daemon, a client as an engine's scheduler and processes' extent maps as its workers, over a stand-in for the CUDA
driver whose memory is shared memory. What is freed while somebody has it open ends the daemon, new memory is full of rubbish, and
memory that was freed reads as zeros. Where there is a GPU, what needs no faults of its driver runs over that as well.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtierd import cuda
from kvtierd.client import Client, ExtentMap
from kvtierd.cuda import STAGE_BYTES, CudaError, Device, find_devices
from kvtierd.model import Tier, in_device
from kvtierd.testing.cuda import FakeGpus
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2

MIB = 1 << 20
BLOCK = MIB
MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]


class RealGpus:
    """Those of this machine."""

    def __init__(self) -> None:
        try:
            self.uuids = [device.uuid for device in find_devices()]
        except CudaError as e:
            pytest.skip(f"there is no GPU here: {e}")

    def environment(self) -> dict[str, str]:
        return {}

    def fail(self, function: str) -> None:
        pytest.skip(f"a real driver's {function} does not fail when it is told to")


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
def gpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpus | RealGpus]:
    if request.param == "real":
        yield RealGpus()
        return
    made = FakeGpus(tmp_path / "gpu", count=2, size_bytes=64 * MIB)
    for name, value in made.environment().items():
        if name != "LD_LIBRARY_PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "_LIBRARY", str(made.library))
    cuda._driver.cache_clear()
    yield made
    cuda._driver.cache_clear()


@pytest.fixture
def make(gpus: FakeGpus | RealGpus, make_daemon: MakeDaemon) -> MakeDaemon:
    def made(start: bool = True, **config: dict[str, Any]) -> DaemonProcess:
        hbm = {"capacity": "16MiB", "extent": "4MiB", "ttl": "never"} | config.pop("hbm", {})
        daemon = make_daemon(start=False, hbm=hbm, **config)
        daemon.environment = gpus.environment()
        return daemon.start() if start else daemon

    return made


class Engine:
    """One engine: its scheduler's client and one worker on a GPU."""

    made: ClassVar[list[Engine]] = []

    def __init__(self, daemon: DaemonProcess, client: Client, gpu: int = 0) -> None:
        self.daemon = daemon
        self.client = client
        self._own = {bytes(BLOCK)}
        self.device = Device(gpu)
        self.worker = ExtentMap(client.descriptor_socket, client.session_token, device=self.device)
        self.made.append(self)

    def ready(self) -> Engine:
        """Wait until it is given GPU memory."""
        wait_for(lambda: self.status().devices)
        return self

    def status(self) -> Any:
        return next(s for s in self.daemon.status().sessions if s.id)

    def save(self, *numbers: int) -> list[bool]:
        """Save blocks with bytes of their own. Whether each went to GPU memory."""
        with self.client.reserve([key(n) for n in numbers], device=True, wait_s=5.0) as reservation:
            assert reservation.granted == list(range(len(numbers))), reservation.outcomes
            places = []
            for index, number in enumerate(numbers):
                (slot,) = reservation.slots(index)
                view = self.worker.view(slot, BLOCK)
                if in_device(slot):
                    assert self.device.read(view.address, BLOCK) in self._own, "nothing of others is there"
                    self.device.write(view.address, content(number))
                else:
                    view[:] = content(number)
                places.append(in_device(slot))
                self._own.add(content(number))
                del view
            assert reservation.commit() == len(numbers)
        return places

    def load(self, *numbers: int, device: bool = True) -> list[bool]:
        """Load blocks and look at every byte. Whether each came from GPU memory."""
        places = []
        with self.client.fetch([key(n) for n in numbers], timeout_s=20.0, device=device) as fetch:
            while (index := fetch.next_index()) is not None:
                (slot,) = fetch.slots(index)
                view = self.worker.view(slot, BLOCK)
                got = self.device.read(view.address, BLOCK) if in_device(slot) else bytes(view)
                assert got == content(numbers[index])
                places.append(in_device(slot))
                del view
        return places

    def tiers(self, *numbers: int) -> list[int]:
        return list(self.client.lookup([key(n) for n in numbers], each=True).tiers)

    def close(self) -> None:
        self.worker.close()
        self.client.close()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """A test that fails, or finds that a real driver does not fail when it is told to, leaves no engine open."""
    yield
    while Engine.made:
        Engine.made.pop().close()


def need_two(gpus: FakeGpus | RealGpus) -> None:
    """Skip where there is one only."""
    if len(gpus.uuids) < 2:
        pytest.skip("needs two GPUs")


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return number.to_bytes(4, "big") * (BLOCK // 4)


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it did not come true in time"
        time.sleep(0.01)


def hbm(daemon: DaemonProcess) -> Any:
    return next(t for t in daemon.status().tiers if t.tier == Tier.HBM + 1)


def test_saves_and_loads_in_gpu_memory(make: MakeDaemon, make_client: MakeClient) -> None:
    """Goal: the whole way: saved on the GPU, found there by the next engine, down by its TTL, nothing left when all have gone."""
    daemon = make(hbm={"ttl": "1s"})
    assert hbm(daemon).reserved_bytes == 0, "nothing is taken before an engine comes"
    first, second = (Engine(daemon, make_client(daemon)).ready() for _ in range(2))
    assert first.save(1, 2, 3) == [True] * 3
    assert second.load(1, 2, 3) == [True] * 3
    assert second.load(1, 2, device=False) == [False] * 2, "who cannot open it gets a copy in CPU memory"
    wait_for(lambda: first.tiers(1, 2, 3) == [Tier.CPU.bit] * 3)
    assert first.load(1, 2, 3) == [False] * 3
    assert first.save(4) == [True]
    first.close()
    time.sleep(0.1)
    assert second.load(4)
    second.close()
    wait_for(lambda: hbm(daemon).reserved_bytes == 0 and not hbm(daemon).copies)
    last = Engine(daemon, make_client(daemon))
    assert last.load(1, 2, 3, 4) == [False] * 4
    counters = daemon.status().counters
    assert counters["kvtierd_saved_blocks_total"] == 4 and "kvtierd_hbm_refused_blocks_total" in counters
    last.close()


def test_a_full_pool_goes_on_in_cpu_memory(make: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make()
    engine = Engine(daemon, make_client(daemon)).ready()
    assert all(engine.save(n)[0] for n in range(16))
    places = engine.save(*range(16, 40))  # in one call: more than there is room for, however fast blocks move down
    assert not all(places)
    assert hbm(daemon).reserved_bytes == 16 * MIB
    assert len(engine.load(*range(20))) == len(engine.load(*range(20, 40))) == 20
    assert daemon.status().counters["kvtierd_hbm_refused_blocks_total"] >= places.count(False)
    engine.close()


def test_memory_goes_from_one_tenant_to_another(make: MakeDaemon, make_client: MakeClient) -> None:
    """Goal: an extent is taken from its holders before it is freed, and the next tenant sees nothing of what was in it."""
    daemon = make(hbm={"capacity": "8MiB"})
    one, two = (Engine(daemon, make_client(daemon, tenant=name)).ready() for name in ("one", "two"))
    assert all(one.save(n)[0] for n in range(8))
    numbers = itertools.count(100)
    wait_for(lambda: two.save(next(numbers)) == [True])
    assert len(one.load(*range(8))) == 8
    one.close()
    two.close()


@pytest.mark.parametrize("gpu, fault, words", [
    (0, "cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle_v2: CUDA_ERROR_NOT_SUPPORTED"),
    (0, "cuIpcGetMemHandle", "the daemon cannot use the GPU: cuIpcGetMemHandle"),
    (0, "cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2"),
    (1, "", "has no pool (hbm.devices)"),
])  # fmt: skip
def test_engines_without_access_use_cpu_memory(
    make: MakeDaemon, make_client: MakeClient, gpus: FakeGpus, gpu: int, fault: str, words: str
) -> None:
    if fault:
        gpus.fail(fault)
    else:
        need_two(gpus)
    daemon = make(hbm={"devices": [gpus.uuids[0]]})
    engine = Engine(daemon, make_client(daemon), gpu)
    wait_for(lambda: words in engine.status().no_device)
    assert not engine.status().devices
    assert engine.save(1, 2) == [False] * 2
    assert engine.load(1, 2) == [False] * 2
    assert words in daemon.log()
    engine.close()


def test_an_engine_on_another_gpu_reads_copies(make: MakeDaemon, make_client: MakeClient, gpus: FakeGpus | RealGpus) -> None:
    """Goal: a namespace's blocks are on the GPU of the engine that was first; an engine on another one gets copies."""
    need_two(gpus)
    daemon = make()
    first, second = (Engine(daemon, make_client(daemon), gpu).ready() for gpu in (0, 1))
    wait_for(lambda: all(s.devices for s in daemon.status().sessions))
    assert first.save(1, 2) == [True] * 2
    assert second.load(1, 2) == [False] * 2
    assert second.save(3) == [False]
    assert first.load(1, 2, 3) == [True, True, False]
    first.close()
    wait_for(lambda: hbm(daemon).reserved_bytes == 0)
    assert second.save(4) == [True], "when that has gone, its own GPU serves"
    assert second.load(1, 2, 3, 4) == [False, False, False, True]
    second.close()


def test_shards_are_on_the_gpus_of_their_workers(make: MakeDaemon, make_client: MakeClient, gpus: FakeGpus | RealGpus) -> None:
    """Goal: of two ranks each has its shards on its own GPU, and GPU memory is given only while both are there."""
    need_two(gpus)
    daemon = make()
    client = make_client(daemon, BLOCK, BLOCK)
    gpus_of = [Device(rank) for rank in range(2)]
    ranks = [ExtentMap(client.descriptor_socket, client.session_token, rank, device=gpus_of[rank]) for rank in range(2)]
    wait_for(lambda: daemon.status().sessions[0].devices.count("GPU-") == 2)
    with client.reserve([key(1)], device=True) as reservation:
        slots = reservation.slots(0)
        assert all(map(in_device, slots))
        for rank, slot in enumerate(slots):
            gpus_of[rank].write(ranks[rank].view(slot).address, content(rank))
        assert reservation.commit() == 1
    ranks[1].close()
    wait_for(lambda: not daemon.status().sessions[0].devices)
    wait_for(lambda: client.lookup([key(1)]).tiers == bytes([Tier.CPU.bit]))
    with client.fetch([key(1)]) as fetch:
        index = fetch.next_index()
        assert index == 0 and [bytes(view) for view in fetch.views(0)] == [content(0), content(1)]
    ranks[0].close()


def test_no_memory_left_on_the_gpu(make: MakeDaemon, make_client: MakeClient, gpus: FakeGpus) -> None:
    """Goal: where the engine has taken all of the GPU, saves go on in CPU memory."""
    daemon = make()
    engine = Engine(daemon, make_client(daemon)).ready()
    gpus.fail("cuMemAlloc_v2")
    assert engine.save(1, 2) == [False] * 2
    assert engine.load(1, 2) == [False] * 2
    assert daemon.log().count("no HBM extent") == 1
    engine.close()


def test_a_copy_that_cannot_be_read_is_a_miss(make: MakeDaemon, make_client: MakeClient, gpus: FakeGpus) -> None:
    daemon = make()
    engine = Engine(daemon, make_client(daemon)).ready()
    assert engine.save(1, 2) == [True] * 2
    gpus.fail("cuMemcpyDtoHAsync_v2")
    assert engine.load(1, device=False) == []
    gpus.heal("cuMemcpyDtoHAsync_v2")
    assert engine.load(2, device=False) == [False]
    assert engine.tiers(1) == [0]
    engine.close()


def test_bytes_go_up_and_down_as_they_are(gpus: FakeGpus | RealGpus) -> None:
    """Goal: both ways through pinned memory, for sizes that fit no stage, and after a copy that failed.

    Method: pieces of odd sizes, more than two stages of them.
    """
    device = Device(0)
    sizes = [1, STAGE_BYTES - 7, 3 * MIB + 5, 2 * STAGE_BYTES + 1, 0, 4096]
    sent = [bytearray(os.urandom(size)) for size in sizes]
    address = device.allocate(sum(sizes))
    places = [address + sum(sizes[:n]) for n in range(len(sizes))]

    def came() -> list[bytearray]:
        got = [bytearray(size) for size in sizes]
        device.copy_to_host(list(zip(places, got, strict=True)))
        return got

    if isinstance(gpus, FakeGpus):
        gpus.fail("cuMemcpyHtoDAsync_v2")
        with pytest.raises(CudaError, match="cuMemcpyHtoDAsync_v2"):
            device.copy_from_host(list(zip(places, sent, strict=True)))
        assert came() == [bytearray(size) for size in sizes]
        gpus.heal("cuMemcpyHtoDAsync_v2")
    device.copy_from_host(list(zip(places, sent, strict=True)))
    assert came() == sent
    device.copy_from_host([])
    device.free(address)


@pytest.mark.parametrize("tier", [Tier.CPU, Tier.NVME])
def test_a_prefetch_goes_on_to_gpu_memory(make: MakeDaemon, make_client: MakeClient, tier: Tier) -> None:
    """Goal: what waits for the engine is on the GPU when it is loaded, from whichever tier, with the right bytes."""
    daemon = make(hbm={"capacity": "32MiB"})
    saver = make_client(daemon)
    numbers = range(12)
    keys = [key(n) for n in numbers]
    assert saver.save_bytes(keys, [[content(n)] for n in numbers]).saved == 12
    if tier is Tier.NVME:
        with daemon.admin() as admin:
            admin.Drain(admin_pb2.DrainRequest(timeout_s=20, resume=True))
        assert saver.evict(keys, tier=Tier.CPU) == 12
    saver.close()
    engine = Engine(daemon, make_client(daemon)).ready()
    prefetch = engine.client.prefetch(keys, 20.0)
    assert prefetch.held == 12
    wait_for(lambda: all(mask & Tier.HBM.bit for mask in engine.tiers(*numbers)))
    assert engine.load(*numbers) == [True] * 12
    assert daemon.status().counters["promotions"] == (12 if tier is Tier.CPU else 24)
    engine.close()


def test_a_prefetch_stays_where_the_gpu_fails(make: MakeDaemon, make_client: MakeClient, gpus: FakeGpus) -> None:
    daemon = make()
    saver = make_client(daemon)
    assert saver.save_bytes([key(1)], [[content(1)]]).saved == 1
    saver.close()
    engine = Engine(daemon, make_client(daemon)).ready()
    gpus.fail("cuMemcpyHtoDAsync_v2")
    engine.client.prefetch([key(1)], 20.0)
    wait_for(lambda: hbm(daemon).suspended)
    assert "cannot be written" in daemon.log() and engine.tiers(1) == [Tier.CPU.bit]
    assert engine.load(1) == [False] and engine.save(2) == [False]
    gpus.heal("cuMemcpyHtoDAsync_v2")
    wait_for(lambda: not hbm(daemon).suspended)
    assert engine.save(3) == [True]
    engine.close()


WORKER = """
import sys, time
from kvtierd.client import ExtentMap
from kvtierd.cuda import Device
device = Device(0)
worker = ExtentMap(sys.argv[1], bytes.fromhex(sys.argv[2]), device=device)
for line in sys.stdin:
    view = worker.view(int(line), 1 << 20)
    print("writing", flush=True)
    while True:
        device.write(view.address, b"half" * 100_000)
"""


def test_a_worker_is_killed_in_a_copy(make: MakeDaemon, make_client: MakeClient, gpus: FakeGpus) -> None:
    """Goal: what a dead worker has half written is never seen, and its memory comes back once its engine has gone."""
    daemon = make()
    client = make_client(daemon)
    command = [sys.executable, "-c", WORKER, client.descriptor_socket, client.session_token.hex()]
    env = os.environ | gpus.environment()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as worker:
        wait_for(lambda: daemon.status().sessions[0].devices)
        reservation = client.reserve([key(1)], device=True)
        (slot,) = reservation.slots(0)
        assert in_device(slot) and worker.stdin and worker.stdout
        print(slot, file=worker.stdin, flush=True)
        assert worker.stdout.readline() == "writing\n"
        worker.send_signal(signal.SIGKILL)
    wait_for(lambda: not daemon.status().sessions[0].devices)
    assert hbm(daemon).reserved_bytes > 0, "the slot stays taken for as long as the engine has a process"
    reservation.close()
    wait_for(lambda: hbm(daemon).reserved_bytes == 0)
    assert client.lookup([key(1)]).held == 0


def test_the_daemon_is_killed_in_a_copy(make: MakeDaemon, make_client: MakeClient) -> None:
    """Goal: a worker that copies when the daemon dies finds its memory in place, and what it copied counts for nothing."""
    daemon = make()
    engine = Engine(daemon, make_client(daemon)).ready()
    assert engine.save(1) == [True]
    with engine.client.fetch([key(1)], device=True) as fetch:
        assert fetch.next_index() == 0
        view = engine.worker.view(fetch.slots(0)[0], BLOCK)
        daemon.kill()
        assert engine.device.read(view.address, BLOCK) == content(1)
        wait_for(lambda: not fetch.intact and engine.worker.closed)
        del view
    engine.worker.close()
    daemon.start()
    assert engine.client.wait_attached(20.0)
    again = Engine(daemon, engine.client).ready()
    assert again.tiers(1) == [0]
    assert again.save(1) == [True] and again.load(1) == [True]
    again.close()


@pytest.mark.parametrize("hbm_config, words", [
    ({"capacity": "1GiB"}, ["hbm.capacity", "67108864"]),
    ({"devices": ["GPU-none"]}, ["hbm.devices", "GPU-none", "0 (GPU-"]),
])  # fmt: skip
def test_what_cannot_be_is_refused_at_the_start(
    make: MakeDaemon, gpus: FakeGpus | RealGpus, hbm_config: dict[str, Any], words: list[str]
) -> None:
    if isinstance(gpus, RealGpus):
        pytest.skip("its size is not known")
    daemon = make(start=False, hbm=hbm_config)
    assert daemon.launch().wait(60) in (1, 2)
    daemon.process = None
    for word in words:
        assert word in daemon.log()
    assert "Traceback" not in daemon.log()
