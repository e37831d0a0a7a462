"""Goal: `kvtierd bench` measures everything it names with a real daemon, and leaves nothing behind.

Method: tiny sizes; the keys and the sanity of the JSON are checked, never a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvtierd.bench.daemon import BenchDaemon
from kvtierd.bench.measure import MIB, filesystem_of
from kvtierd.cli.bench import bench

TINY = ["--chunk-mib", "1,2", "--buffer-mib", "8", "--round-mib", "8", "--index-blocks", "3000"]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    if filesystem_of(tmp_path).startswith(("tmpfs", "overlay")):
        pytest.skip("the temporary folder is not on a disk")
    return tmp_path


def run_bench(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(bench, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def assert_positive(value: Any) -> None:
    for number in value.values() if isinstance(value, dict) else [value]:
        assert_positive(number) if isinstance(number, dict) else None
        assert isinstance(number, dict) or number > 0


def test_everything_is_measured_and_nothing_is_left(disk: Path) -> None:
    found = run_bench(*TINY, "--folder", str(disk))
    assert found["copy_threads"] >= 1
    for key in ("memcpy_gb_per_s", "save_gb_per_s", "load_gb_per_s", "save_2_chunks_gb_per_s", "load_2_chunks_gb_per_s"):
        assert set(found[key]) == {"1", "2"}
        assert_positive(found[key])
    for key in ("disk_raw_read_gb_per_s", "disk_raw_write_gb_per_s", "nvme_read_gb_per_s", "nvme_write_gb_per_s", "recovery_s"):
        assert_positive(found[key])
    assert found["index_blocks"] == 3000
    assert 0 < found["index_bytes_per_block"] < 1e6
    assert set(found["lookup_ms"]) == {"512", "8192"}
    assert all(0 < times["p50"] <= times["p99"] for times in found["lookup_ms"].values())
    assert set(found["block_cost_us"]) == {"save", "lookup", "load", "evict"}
    assert set(found["ratios"]) >= {"save", "load", "nvme_read", "nvme_write"}
    assert_positive(found["ratios"])
    assert set(found["environment"]) >= {"cpu", "cores", "kernel", "python", "kvtierd", "date", "command", "filesystem"}
    assert list(disk.iterdir()) == []


def test_only_what_was_asked_for_is_measured(disk: Path) -> None:
    output = disk / "out" / "bench.json"
    found = run_bench(*TINY, "--folder", str(disk), "--only", "load", "--output", str(output))
    assert "load_gb_per_s" in found
    assert not {"save_gb_per_s", "lookup_ms", "nvme_read_gb_per_s", "index_blocks"} & found.keys()
    assert json.loads(output.read_text()) == found


def test_a_running_daemon_is_measured_and_goes_on(disk: Path) -> None:
    tables = {"cpu": {"capacity": 64 * MIB}, "nvme": {"capacity": 64 * MIB, "reserve": 0}}
    with BenchDaemon(disk / "daemon", tables) as daemon:
        daemon.start()
        found = run_bench(*TINY, "--address", daemon.address)
        assert {"save_gb_per_s", "load_gb_per_s", "lookup_ms"} <= found.keys()
        assert "filesystem" not in found["environment"]
        assert daemon.status_bytes("VmRSS") > 0


def test_tables_name_what_missed_its_target(disk: Path) -> None:
    result = CliRunner().invoke(bench, [*TINY, "--folder", str(disk), "--only", "save"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "Speed against the machine's own" in result.stdout
    assert "≥ 0.8" in result.stdout


def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtierd.cli.bench.run", lambda *_: pytest.fail("measured"))
    file = tmp_path / "file"
    file.touch()
    result = CliRunner().invoke(bench, ["--output", str(file / "bench.json")])
    assert result.exit_code == 2 and "name another file" in result.output


def test_figures_are_shown_where_their_file_cannot_be_written(disk: Path) -> None:
    result = CliRunner().invoke(bench, [*TINY, "--folder", str(disk), "--only", "save", "--output", "/dev/full"])
    assert result.exit_code == 1
    assert "Speed against the machine's own" in result.stdout and "cannot write /dev/full: No space left" in result.output


def test_the_smallest_round_of_nvme_is_measured(disk: Path) -> None:
    found = run_bench("--folder", str(disk), "--only", "nvme", "--round-mib", "4", "--chunk-mib", "2")
    assert_positive(found["nvme_write_gb_per_s"])
    assert_positive(found["nvme_read_gb_per_s"])
