"""Goal: a replay through a running daemon saves, loads and checks real bytes, and counts hits as the simulation does.

Method: a short trace, speeded up, through a daemon with small tiers; the same trace in the simulation.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvtierd.cli import cli
from kvtierd.demo.trace import default_trace
from kvtierd.testing.daemon import DaemonProcess


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    made = DaemonProcess(tmp_path_factory.mktemp("d"), {"cpu": {"capacity": "16MiB"}, "nvme": {"capacity": "256MiB"}})
    yield made.start()
    made.kill()


def test_replay_through_a_daemon(daemon: DaemonProcess, tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    # One request at a time: a request that waits for its predecessor finds all of it.
    arguments = ["replay", str(default_trace()), "--limit", "40", "--address", daemon.address, "--time-scale", "0.001"]
    result = CliRunner().invoke(cli, [*arguments, "--workers", "1", "--output", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    flat = CliRunner().invoke(cli, ["replay", str(default_trace()), "--limit", "40", "--capacity", "100%", "--json"])
    ideal = json.loads(flat.stdout)
    assert found["hit_blocks"] == ideal["hit_blocks"] > 100
    assert found["requests"] == 40 and found["blocks"] == ideal["blocks"]
    assert found["wrong_bytes"] == 0
    assert found["checked_bytes"] == found["hit_blocks"] * (64 << 10), "every hit was loaded and compared"
    assert sum(found["loaded_blocks_by_tier"].values()) == found["hit_blocks"]
    assert found["loaded_blocks_by_tier"]["nvme"] > 0, "more than memory holds came back from NVMe"
    assert found["nvme_written_bytes"] > 0 and found["nvme_read_bytes"] > 0
    assert found["saved_blocks"] == found["distinct_blocks"] and found["unsaved_blocks"] == 0
    assert len(found["samples"]) >= 2 and found["samples"][-1]["used_blocks"]["nvme"] > 0
    assert daemon.status().blocks == 0, "a replay leaves nothing behind"
    assert "prefix hit ratio" in result.output and "wrong bytes" in result.output


def test_several_tenants_and_workers(daemon: DaemonProcess, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 10 * n, "input_length": 1024, "hash_ids": [n % 4, 10 + n % 8], "tenant": f"t{n % 2}"} for n in range(32)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--address", daemon.address, "replay", str(trace), "--workers", "4", "--block-size", "8KiB", "--json", "--keep"]
    result = CliRunner().invoke(cli, [*arguments, "--seed", "7"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["tenants"]) == {"t0", "t1"} and found["tenants"]["t0"]["requests"] == 16
    assert 0 < found["hit_blocks"] <= 64 and found["wrong_bytes"] == 0
    asked = [t.hits + t.misses for t in daemon.status().tenants if t.tenant in found["tenants"]]
    assert asked == [32, 32], "the daemon's own hit rate is of all blocks that requests had"
    again = json.loads(CliRunner().invoke(cli, [*arguments, "--seed", "7"]).stdout)
    assert again["prefix_hit_ratio"] == 1.0, "the same seed finds what was kept"


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (["--address", "unix:/nowhere/k.sock"], "no daemon", 3),
        (["--address", "unix:/nowhere/k.sock", "--capacity", "5%"], "own configuration", 2),
        (["--address", "unix:/nowhere/k.sock", "--simulate"], "exclude each other", 2),
    ],
)
def test_wrong_use(arguments: list[str], words: str, code: int) -> None:
    result = CliRunner().invoke(cli, ["replay", str(default_trace()), *arguments], standalone_mode=False)
    error = result.exception
    assert error is not None and words in getattr(error, "message", str(error))
    assert getattr(error, "exit_code", 1) == code


def test_a_block_that_is_no_page(daemon: DaemonProcess) -> None:
    result = CliRunner().invoke(cli, ["replay", str(default_trace()), "--address", daemon.address, "--block-size", "100"])
    assert result.exit_code == 2 and "multiple of 4096" in result.output


def test_blocks_that_no_memory_holds(daemon: DaemonProcess) -> None:
    arguments = ["--limit", "20", "--block-size", "64GiB"]
    result = CliRunner().invoke(cli, ["replay", str(default_trace()), "--address", daemon.address, *arguments])
    assert result.exit_code == 2 and "lower --block-size or --workers" in result.output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_replay_that_is_ended_ends_and_takes_its_blocks_along(
    daemon: DaemonProcess, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """All requests but the first are an hour away, and each has a worker that waits for it."""
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": at, "input_length": 1024, "hash_ids": [1, 2]} for at in (0, *[3_600_000] * 4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "kvtierd", "replay", str(trace), "--address", daemon.address, "--workers", "4"]
    before = daemon.status().blocks
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while daemon.status().blocks < before + 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code, said
    assert not said.strip()
    assert daemon.status().blocks == before
