"""Goal: a daemon that is replaced, hangs or has no room on its disk costs hits and nothing else.

Method: one engine lives through daemons that come and go behind one address. Deadlines are checked where a daemon hangs: the
limits leave a slow machine much room, and are far below the time that the daemon is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2, kvtier_pb2
from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import NUM_BLOCKS, llm_arguments, prompts, transfer_config
from tests.vllm.steps import FORGET, MAX_TOKENS, Baseline, attach, barrier, engine, generate, settle, tell, to_nvme, wait_until

A, B, C, D, E = (prompts(seed=seed) for seed in (501, 503, 505, 507, 511))
STOPPED_S = 20.0
SLOWEST_S = 16.0
"""Longest that nine requests at once may take: two lookups of 2 s and a load of 3 s each, and computing on a busy machine."""
OTHER_PROTOCOL = """
import kvtierd
kvtierd.PROTOCOL_VERSION = 99
from kvtierd.service import attach
attach.OLDEST_PROTOCOL = 99
from kvtierd.cli import main
main()
"""
REFUSED = "the client speaks protocol 1, this daemon"
LIMITS = {"lookup_timeout_ms": 2000, "load_timeout_ms": 3000, "save_timeout_ms": 2000}
"""So short that a stopped daemon is given up on, and long enough for a busy machine to read what is on NVMe."""


def test_replaced_and_stopped_daemon(models: Path, daemons: Daemons, engines: Engines, baseline: Baseline) -> None:
    """Another protocol version, the old daemon again, an empty one of the same version, and that one stopped under load."""
    daemon = daemons()
    steps = [
        generate("save", A),
        settle(daemon, blocks=10),
        barrier("other protocol"),
        FORGET,
        generate("refused", A + B),
        barrier("old daemon"),
        attach(daemon),
        FORGET,
        generate("back", A),
        barrier("empty"),
        attach(daemon),
        FORGET,
        generate("missed", A),
        settle(daemon, blocks=10),
        FORGET,
        generate("saved anew", A),
        tell("soak"),
        {"do": "soak", "name": "soak", "prompts": A + B + C, "seconds": STOPPED_S + 6, "max_tokens": MAX_TOKENS},
        attach(daemon),
        settle(daemon, blocks=10),
        FORGET,
        generate("after", A),
        settle(daemon, "settle at last"),
    ]
    process = engines.start([engine("engine", llm_arguments(models / "llama", transfer_config(daemon.address, **LIMITS)), *steps)])
    process.wait_for("other protocol")
    assert daemon.stop() == 0
    usual, daemon.command = daemon.command, [sys.executable, "-c", OTHER_PROTOCOL]
    daemon.start()
    process.go()
    process.wait_for("old daemon")
    wait_until(lambda: REFUSED in process.log(), "the engine's log says why there is no cache")
    assert not daemon.status().sessions
    assert daemon.stop() == 0
    daemon.command = usual
    daemon.start()
    process.go()
    process.wait_for("empty")
    daemon.kill()
    daemon.config["nvme"]["folders"] = [str(daemon.folder / "another")]
    daemon.start()
    process.go()
    process.wait_for("soak")
    time.sleep(2)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        time.sleep(STOPPED_S)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    report = process.finish()
    done, plain = report.only, baseline(llm_arguments(models / "llama"), A + B + C, MAX_TOKENS)
    for step, wanted in (("save", 3), ("refused", 6), ("back", 3), ("missed", 3), ("saved anew", 3), ("after", 3)):
        assert done.tokens(step) == plain[:wanted], step
    assert report.log.count(REFUSED) == 1, "said once, not at each attempt"
    assert done.external("refused") == 0
    assert done.external("back") == 320
    assert done.external("missed") == done.external("back")
    assert done.external("saved anew") == done.external("missed") + 320
    soak = done.results["soak"]
    assert soak["outputs"] == [[tokens] for tokens in plain]
    assert soak["slowest_s"] < SLOWEST_S, "a request waited for a stopped daemon"
    assert done.cached("after") == [192] * 3
    assert done.metric("settle at last", "free_blocks") == NUM_BLOCKS - 1
    assert done.metric("settle at last", "vllm:kvtierd_hook_failures") == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 32 MiB. Needs the right to mount one."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    for command in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip(f"no {command[0]} here")
        if made.returncode:
            pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


def test_full_disk(models: Path, daemons: Daemons, engines: Engines, baseline: Baseline, small_disk: Path) -> None:
    """Others fill the disk when a few blocks are there; later there is room again."""
    daemon = daemons(
        cpu={"capacity": "2MiB", "extent": "1MiB", "ttl": "0.2s"},
        nvme={"folders": [str(small_disk / "nvme")], "capacity": "16MiB", "segment": "1MiB"},
    )
    filler = prompts(6, 400, 0, seed=509)
    everything = A + B + C + D
    steps: list[dict[str, Any]] = [
        attach(daemon),
        generate("before", A),
        settle(daemon, blocks=10),
        barrier("fill"),
        generate("full", everything, one_by_one=False),
        generate("filler", filler, one_by_one=False),
        FORGET,
        generate("still full", everything, one_by_one=False),
        settle(daemon),
        barrier("room"),
        FORGET,
        generate("room", everything),
        generate("new", E),
        settle(daemon),
        barrier("written"),
        FORGET,
        generate("new again", E),
        generate("loaded", everything),
        settle(daemon, "settle at last"),
    ]
    process = engines.start([engine("engine", llm_arguments(models / "llama", transfer_config(daemon.address)), *steps)])
    process.wait_for("fill")
    wait_until(lambda: nvme_of(daemon).copies == 10, "the first blocks are on disk")
    fill(small_disk / "filler")
    process.go()
    process.wait_for("room")
    wait_until(lambda: daemon.status().counters["kvtierd_io_errors_total"] > 0, "a block cannot be written")
    assert "no segment can be made" in daemon.log()
    (small_disk / "filler").unlink()
    to_nvme(daemon)
    process.go()
    process.wait_for("written")
    to_nvme(daemon)
    process.go()
    done = process.finish().only
    plain = baseline(llm_arguments(models / "llama"), everything + E, MAX_TOKENS)
    for step in ("full", "still full", "room", "loaded"):
        assert done.tokens(step) == plain[:12], step
        assert done.finish(step) == ["length"] * 12, step
    assert done.tokens("new") == done.tokens("new again") == plain[12:]
    assert done.metric("room", "vllm:kvtierd_hit_tokens{tier=nvme}") > 0
    assert done.cached("new again") == [192] * 3, "what came when there was room is found on disk"
    assert done.metric("settle at last", "free_blocks") == NUM_BLOCKS - 1
    assert done.metric("settle at last", "vllm:kvtierd_hook_failures") == 0


def nvme_of(daemon: DaemonProcess) -> admin_pb2.TierStatus:
    """What the daemon says of its NVMe tier."""
    (tier,) = (tier for tier in daemon.status().tiers if tier.tier == kvtier_pb2.TIER_NVME)
    return tier
