"""Goal: blocks go directly between GPU memory and NVMe where that is tried out to work, and by CPU memory after the first failure.

Method: a real daemon over stand-ins for the CUDA driver, kvikio and cupy, which fail, damage, wait and hang as they are told.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from kvtierd import cuda
from kvtierd.client import Client
from kvtierd.model import Tier
from kvtierd.testing.cuda import FakeGpus
from kvtierd.testing.daemon import DaemonProcess

from .test_hbm import MIB, Engine, MakeClient, MakeDaemon, wait_for

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"
NUMBERS = range(1, 9)


class Machine:
    """A daemon with a GPU, and what steers kvikio."""

    def __init__(self, gpus: FakeGpus, make_daemon: MakeDaemon, make_client: MakeClient, faults: Path) -> None:
        self.gpus, self._make, self._make_client, self._faults = gpus, make_daemon, make_client, faults
        self.environment = gpus.environment() | {"PYTHONPATH": str(STAND_INS), "FAKE_KVIKIO_FAULTS": str(faults)}
        self.daemon: DaemonProcess
        self.engines: list[Engine] = []

    def make(self, gds: str, *, start: bool = True, **nvme: Any) -> DaemonProcess:
        hbm = {"capacity": "16MiB", "extent": "4MiB", "ttl": "never"}
        self.daemon = self._make(start=False, hbm=hbm, nvme={"gds": gds} | nvme)
        self.daemon.environment = self.environment
        return self.daemon.start() if start else self.daemon

    def engine(self) -> Engine:
        """One more that is given GPU memory."""
        self.engines.append(Engine(self.daemon, self._make_client(self.daemon)))
        return self.engines[-1].ready()

    def fault(self, what: str, kind: str) -> None:
        """What happens to transfers from now on; "" for nothing."""
        path = self._faults / what
        path.write_text(kind) if kind else path.unlink()

    def path(self) -> str:
        return str(next(t for t in self.daemon.status().tiers if t.tier == Tier.NVME + 1).path)

    def is_direct(self) -> bool:
        return "+" in self.path()

    def drain_and_start_again(self) -> None:
        assert self.daemon.stop() == 0
        self.close()
        self.daemon.start()

    def close(self) -> None:
        """Close the engines."""
        while self.engines:
            self.engines.pop().close()

    def refused(self) -> str:
        """The log of a start that fails."""
        assert self.daemon.launch().wait(60) == 1
        self.daemon.process = None
        assert "Traceback" not in self.daemon.log()
        return self.daemon.log()


@pytest.fixture
def machine(tmp_path: Path, make_daemon: MakeDaemon, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> Any:
    gpus = FakeGpus(tmp_path / "gpu", size_bytes=128 * MIB)
    for name, value in gpus.environment().items():
        if name != "LD_LIBRARY_PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "_LIBRARY", str(gpus.library))
    cuda._driver.cache_clear()
    (tmp_path / "faults").mkdir()
    made = Machine(gpus, make_daemon, make_client, tmp_path / "faults")
    yield made
    made.close()
    cuda._driver.cache_clear()


def test_kvikio_alone_where_one_insists(machine: Machine) -> None:
    machine.make("on")
    assert machine.path().endswith(" + kvikio")
    assert "blocks go directly between GPU-" in machine.daemon.log()
    engine = machine.engine()
    assert all(engine.save(*NUMBERS))
    machine.drain_and_start_again()
    again = machine.engine()
    assert again.load(*NUMBERS) == [True] * len(NUMBERS), "they come up to GPU memory"
    assert "Traceback" not in machine.daemon.log()


@pytest.mark.gpu
def test_kvikio_on_a_gpu(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    """The real ones, of which the daemon's environment has to know."""
    pytest.importorskip("kvikio")
    pytest.importorskip("cupy")
    daemon = make_daemon(start=False, hbm={"capacity": "1GiB", "devices": ["0"], "ttl": "never"}, nvme={"gds": "on"})
    for starts in range(2):
        daemon.start()
        engine = Engine(daemon, make_client(daemon)).ready()
        if not starts:
            assert all(engine.save(*NUMBERS))
        assert engine.load(*NUMBERS) == [True] * len(NUMBERS)
        assert any(t.path.endswith((" + kvikio", " + gds")) for t in daemon.status().tiers)
        assert daemon.stop() == 0
        engine.close()
    assert "go by CPU memory" not in daemon.log()


def test_by_itself_where_there_is_gpudirect_storage(machine: Machine) -> None:
    machine.environment["FAKE_GDS"] = "1"
    machine.gpus.fail("cuMemcpyDtoHAsync_v2", wait_ms=1000)  # so that the direct way is faster
    machine.make("auto")
    assert not machine.is_direct(), "nothing is made on a GPU before an engine joins"
    machine.engine()
    wait_for(lambda: machine.path().endswith(" + gds"))


@pytest.mark.parametrize("gds, words", [("", "compatibility mode"), ("compat", "properties.allow_compat_mode to false")])
def test_not_without_gpudirect_storage(machine: Machine, gds: str, words: str) -> None:
    if gds:
        machine.environment["FAKE_GDS"] = gds
    machine.make("auto")
    engine = machine.engine()
    wait_for(lambda: "NVMe by CPU memory" in machine.daemon.log())
    assert words in machine.daemon.log() and 'nvme.gds = "off"' in machine.daemon.log()
    assert all(engine.save(*NUMBERS)) and not machine.is_direct()


def test_not_where_it_is_slower(machine: Machine) -> None:
    machine.environment["FAKE_GDS"] = "1"
    machine.fault("pread", "slow")
    machine.make("auto")
    machine.engine()
    wait_for(lambda: "by CPU memory, which is faster" in machine.daemon.log())
    assert not machine.is_direct()


def test_not_where_kvikio_is_missing(machine: Machine) -> None:
    del machine.environment["PYTHONPATH"]
    machine.make("auto")
    machine.engine()
    wait_for(lambda: "install kvtierd[cuda12]" in machine.daemon.log())
    machine.daemon.stop()
    machine.make("on", start=False)
    assert "install kvtierd[cuda12]" in machine.refused()


@pytest.mark.parametrize("fault", ["fail", "short", "corrupt"])
def test_a_trial_that_fails(machine: Machine, fault: str) -> None:
    """By itself the daemon does without; where one insists it does not start."""
    machine.environment["FAKE_GDS"] = "1"
    machine.fault("pwrite", fault)
    machine.make("auto")
    engine = machine.engine()
    wait_for(lambda: "go by CPU memory from now on" in machine.daemon.log())
    assert all(engine.save(*NUMBERS)) and not machine.is_direct()
    machine.daemon.stop()
    machine.make("on", start=False)
    log = machine.refused()
    assert 'nvme.gds is "on", but blocks cannot go directly' in log and 'nvme.gds to "auto"' in log
    assert not list(Path(machine.daemon.folder / "nvme").glob("*.tmp"))


def test_a_trial_that_hangs(machine: Machine) -> None:
    machine.fault("pwrite", "hang")
    machine.make("on", start=False, gds_timeout="1s")
    assert "nvme.gds_timeout" in machine.refused()


@pytest.mark.parametrize("what, fault", [("pwrite", "fail"), ("pwrite", "short"), ("pread", "fail"), ("pread", "corrupt")])
def test_what_fails_later_loses_nothing(machine: Machine, what: str, fault: str) -> None:
    machine.make("on")
    engine = machine.engine()
    assert all(engine.save(*NUMBERS))
    if what == "pwrite":
        machine.fault(what, fault)
        assert machine.daemon.stop() == 0
        machine.fault(what, "")
        machine.daemon.start()
    else:
        machine.drain_and_start_again()
        machine.fault(what, fault)
    again = machine.engine()
    assert len(again.load(*NUMBERS)) == len(NUMBERS)
    assert machine.daemon.log().count("go by CPU memory from now on") == 1
    wait_for(lambda: machine.is_direct() is (what == "pwrite"))


def test_a_hang_ends_neither_loads_nor_the_daemon(machine: Machine) -> None:
    """Blocks whose transfer hangs are missed; the others are loaded, and the daemon ends when it is told to."""
    machine.make("on", gds_timeout="1s", depth=2)
    engine = machine.engine()
    assert all(engine.save(*NUMBERS))
    machine.drain_and_start_again()
    machine.fault("pread", "hang")
    client: Client = machine.engine().client
    client.prefetch([n.to_bytes(32, "big") for n in NUMBERS], 20.0)
    wait_for(lambda: not machine.is_direct())
    assert "nvme.gds_timeout" in machine.daemon.log()
    others = machine.engine()
    assert others.save(100) and len(others.load(100)) == 1
    process = machine.daemon.process
    assert process is not None
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 0
    assert "still hangs; the daemon ends without it" in machine.daemon.log()
    machine.fault("pread", "")
    machine.daemon.process = None
    machine.daemon.start()
    assert len(machine.engine().load(*NUMBERS)) == len(NUMBERS)
