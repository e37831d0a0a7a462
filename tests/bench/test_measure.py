"""Goal: the benchmark's arithmetic and its options are right, without any measurement.

Method: values that can be checked by hand; options that contradict each other must be refused with the fix in the text.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from kvtierd.bench.index import make_keys
from kvtierd.bench.measure import (
    BenchError,
    Report,
    Row,
    close_environment,
    digits,
    environment,
    filesystem_of,
    median,
    percentile,
    spread,
)
from kvtierd.bench.runner import PARTS, plan
from kvtierd.cli.bench import bench
from kvtierd.model import KEY_BYTES


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert percentile(values, 50) == 3.0
    assert percentile(values, 99) == 5.0
    assert percentile(values, 1) == 1.0
    assert percentile([7.0], 50) == 7.0
    assert percentile([], 50) == median([]) == 0.0
    assert spread(values) == [2.0, 4.0]


@pytest.mark.parametrize(("value", "shown"), [(1234567.0, 1235000.0), (0.00123456, 0.001235), (0.0, 0.0)])
def test_digits_keeps_four(value: float, shown: float) -> None:
    assert digits(value) == shown


def test_a_row_meets_its_target_or_misses_it() -> None:
    assert Row("a", "GB/s", 8.0, 10.0, 0.8).met is True
    assert Row("a", "GB/s", 7.9, 10.0, 0.8).met is False
    assert Row("a", "GB/s", 7.9, 10.0).met is None
    assert Row("a", "GB/s", 7.9, None, 0.8).ratio is None


def test_a_report_nests_values_and_ratios() -> None:
    report = Report()
    report.put("save_gb_per_s", "2", value=1.0)
    report.put("save_gb_per_s", "8", value=2.0)
    report.ratio("save", "2", row=Row("save", "GB/s", 1.0, 2.0))
    assert report.values == {"save_gb_per_s": {"2": 1.0, "8": 2.0}, "ratios": {"save": {"2": 0.5}}}
    assert len(report.rows) == 1


def test_keys_differ_and_come_again() -> None:
    packed = make_keys(10, 1000)
    keys = {packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)}
    assert len(keys) == 1000
    assert make_keys(11, 1) in keys
    assert make_keys(10, 1000) == packed


def test_keys_collide_as_often_as_real_hashes() -> None:
    """Evenly spread keys would flatter an index: a word's low bits must repeat as random ones do."""
    count, slots = 100_000, 1 << 17
    words = np.frombuffer(make_keys(0, count), np.uint64).reshape(-1, KEY_BYTES // 8)
    expected = slots * (1 - (1 - 1 / slots) ** count)
    for column in range(words.shape[1]):
        for bits in (words[:, column] % np.uint64(slots), words[:, column] >> np.uint64(64 - 17)):
            assert abs(len(np.unique(bits)) - expected) < 0.02 * expected


def test_a_change_of_the_code_during_a_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = environment(None)
    close_environment(found)
    assert found["source_changed"] is False
    monkeypatch.setattr("kvtierd.bench.measure.source_digest", lambda: "another")
    close_environment(found)
    assert found["source_changed"] is True


def test_a_filesystem_has_a_name() -> None:
    assert filesystem_of(Path("/proc")).startswith("proc")


def test_a_running_daemon_is_not_drained_or_killed() -> None:
    assert plan(address="unix:/x").parts == {"save", "load", "lookup"}
    assert plan().parts == set(PARTS)
    with pytest.raises(BenchError, match="nvme: needs a daemon that nobody else uses"):
        plan(address="unix:/x", parts=frozenset(["nvme"]))


def test_sizes_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(BenchError, match="--buffer-mib"):
        plan(buffer_mib=16, chunk_mib=(32,))
    with pytest.raises(BenchError, match="more than 1000 blocks"):
        plan(index_blocks=1000)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "save,fly"], "fly: not one of save, load"),
        (["--chunk-mib", "2,x"], "whole MiB"),
        (["--chunk-mib", "0"], "1 to 1024 MiB"),
        (["--address", "unix:/x", "--only", "index"], "leave --address out"),
    ],
)
def test_wrong_options_end_with_status_2(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_an_absent_daemon_ends_with_status_3(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtierd", "bench", "--address", f"unix:{tmp_path}/no.sock"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3
    assert f"no daemon at {tmp_path}/no.sock; start one" in done.stderr
