"""Goal: whoever dies or hangs, and whenever, no byte is wrong, no limit is passed, nothing is left over, and everybody goes on.

Method: three client processes make random calls; their only right bytes follow from the keys. Meanwhile the daemon is killed and
started again, clients are killed and replaced, and the daemon is stopped for a while as a hung one. All of it follows from the
seed, which a failure names.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as admin
from tests.daemon.chaos_client import WRONG, progress_of

CLIENTS = 3
SECONDS = 6.0
HANG_S = 0.5
PATIENCE_S = 20.0
SIZES = (4096, 100_000, 1 << 20)


class Process:
    """One client process."""

    def __init__(self, folder: Path, number: int, address: str, seed: float, size: int) -> None:
        self.path = str(folder / f"progress-{number}")
        self.log_path = folder / f"client-{number}.log"
        arguments = json.dumps({"address": address, "seed": str(seed), "size": size, "path": self.path})
        script = Path(__file__).with_name("chaos_client.py")
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), arguments],
                stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip

    @property
    def progress(self) -> tuple[int, int, int]:
        """Calls, blocks saved, blocks loaded."""
        return progress_of(self.path) if os.path.exists(self.path) else (0, 0, 0)

    def check(self) -> None:
        """It lives: it ends by itself only when bytes are wrong, or by a bug."""
        status = self.process.poll()
        assert status != WRONG, self.log_path.read_text()
        assert status is None, f"a client ended with {status}: {self.log_path.read_text()[-2000:]}"

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()


class Chaos:
    """A daemon, its clients and what befalls them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.size = SIZES[seed % len(SIZES)]
        self.cpu_bytes = max(1 << 20, self.size * 40)
        self.nvme_bytes = max(4 << 20, self.size * 150)
        config: dict[str, dict[str, Any]] = {
            "cpu": {"capacity": self.cpu_bytes, "ttl": 1.0},
            "nvme": {"capacity": self.nvme_bytes, "snapshot_journal": 16384},
        }
        self.daemon = DaemonProcess(folder, config)
        self.clients: list[Process] = []
        self.gone: list[Process] = []
        self.spawned = 0

    def start(self) -> None:
        """The daemon, then its clients."""
        self.daemon.start()
        self.clients = [self.spawn() for _ in range(CLIENTS)]

    def spawn(self) -> Process:
        """One more client."""
        self.spawned += 1
        return Process(self.folder, self.spawned, self.daemon.address, self.random.random(), self.size)

    def step(self) -> None:
        """Something happens, and what must hold is looked at."""
        time.sleep(self.random.uniform(0.2, 1.2))
        what = self.random.random()
        if what < 0.4:
            self.daemon.kill()
            self.daemon.start()
        elif what < 0.7:
            index = self.random.randrange(CLIENTS)
            self.clients[index].kill()
            self.gone.append(self.clients[index])
            self.clients[index] = self.spawn()
        elif what < 0.85:
            os.kill(self.daemon.pid, signal.SIGSTOP)
            time.sleep(HANG_S)
            os.kill(self.daemon.pid, signal.SIGCONT)
        self.check_limits()
        for client in self.clients:
            client.check()

    def check_limits(self) -> None:
        """No tier holds more than it may, by its own word and by the machine's."""
        for tier in self.daemon.status().tiers:
            assert tier.used_bytes <= tier.reserved_bytes <= tier.capacity_bytes, tier
        files = sum(p.stat().st_blocks * 512 for p in (self.folder / "nvme").glob("*") if p.is_file())
        assert files <= self.nvme_bytes

    def everybody_goes_on(self) -> None:
        """Every client gets blocks out of the daemon that runs now, and some get new ones in."""
        before = [client.progress for client in self.clients]

        def more(what: int) -> list[bool]:
            return [client.progress[what] > then[what] for client, then in zip(self.clients, before, strict=True)]

        self.until(lambda: all(more(2)) and any(more(1)), "each client loads again, and one saves")

    def end_clients(self) -> None:
        """All at once, in the middle of whatever they do."""
        for client in self.clients:
            client.kill()

    def nothing_is_left(self) -> None:
        """No session, ticket or pin outlives its process, and no slot its block."""
        self.until(lambda: not self.daemon.status().sessions, "sessions of dead clients end")
        self.until(lambda: not any(t.pinned_bytes for t in self.daemon.status().tiers), "what they held is let go")
        with self.daemon.admin() as stub:
            stub.EvictBlocks(admin.EvictBlocksRequest(all=True), timeout=PATIENCE_S)
        self.until(lambda: not any(t.used_bytes or t.copies for t in self.daemon.status().tiers), "every slot comes back")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that must come true."""
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            for client in self.clients:
                status = client.process.poll()
                assert status in (None, -signal.SIGKILL), client.log_path.read_text()[-2000:]
            assert time.monotonic() < until_s, f"{what}: {self.daemon.status()}\n{self.daemon.log()[-4000:]}"
            time.sleep(0.05)

    def close(self) -> None:
        """Leave no process behind."""
        for client in self.clients:
            client.kill()
        if self.daemon.process is not None:
            self.daemon.process.send_signal(signal.SIGCONT)
        self.daemon.kill()


def run(folder: Path, seed: int, seconds: float) -> Chaos:
    """One whole run. Raises AssertionError for whatever must not be."""
    chaos = Chaos(folder, seed)
    try:
        chaos.start()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            chaos.step()
        chaos.daemon.kill()
        chaos.daemon.start()
        chaos.everybody_goes_on()
        chaos.end_clients()
        chaos.nothing_is_left()
        assert chaos.daemon.stop() == 0
    finally:
        chaos.close()
    log = chaos.daemon.log()
    assert "Traceback" not in log, log[-6000:]
    assert "CRITICAL" not in log, log[-6000:]
    for client in [*chaos.clients, *chaos.gone]:
        assert "Traceback" not in client.log_path.read_text()
    assert sum(client.progress[2] for client in [*chaos.clients, *chaos.gone]), "something was loaded"
    return chaos


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_is_wrong_or_left_whoever_dies(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    run(tmp_path, seed, SECONDS)
