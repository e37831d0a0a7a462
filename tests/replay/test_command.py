"""Goal: the command says what it measured as JSON, as a table and as a plot, and names what is wrong with its input.

Method: the excerpt that comes with kvtierd through the command line, and wrong calls one by one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvtierd.cli import cli
from kvtierd.demo.trace import default_trace

TRACE = str(default_trace())
RATIO = (int, float)
SCHEMA: dict[str, Any] = {
    "parameters": dict, "requests": int, "blocks": int, "distinct_blocks": int, "hit_blocks": int, "prefix_hit_ratio": RATIO,
    "ideal_prefix_hit_ratio": RATIO, "hit_ratio_by_tier": dict, "tenants": dict, "samples": list, "saved_blocks": int,
    "unsaved_blocks": int, "lost_blocks": int, "moved_bytes": dict, "nvme_written_bytes": int, "nvme_read_bytes": int,
    "nvme_written_blocks": int, "nvme_read_blocks": int, "nvme_budget_left_bytes": int, "nvme_busy_s": dict, "demotions": dict,
    "evictions": dict, "not_admitted": dict, "trace_seconds": RATIO, "seconds": RATIO,
}  # fmt: skip


def replay(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["replay", *arguments])


def test_json_has_a_fixed_shape() -> None:
    result = replay(TRACE, "--simulate", "--capacity", "1:5:40@20%", "--limit", "60", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() == SCHEMA.keys()
    assert all(isinstance(found[name], kind) for name, kind in SCHEMA.items())
    assert list(found["hit_ratio_by_tier"]) == ["hbm", "cpu", "nvme"]
    assert found["requests"] == 60 and found["parameters"]["mode"] == "simulate"
    assert set(found["demotions"]) == {"ttl", "watermark", "pressure", "extent"}
    assert 0 < found["prefix_hit_ratio"] <= found["ideal_prefix_hit_ratio"] < 1
    assert len(found["samples"]) == 60 and found["samples"][-1]["prefix_hit_ratio"] == found["prefix_hit_ratio"]


def test_every_option_reaches_the_core() -> None:
    options = {
        "--time-scale": ("20", "time_scale", 20.0),
        "--block-size": ("2MiB", "block_bytes", 2 << 20),
        "--turn-bonus": ("60s", "turn_bonus_s", 60.0),
        "--admission": ("second-use", "admission", "second-use"),
        "--second-use-window": ("10min", "second_use_window_s", 600.0),
        "--write-budget": ("1GiB", "write_budget_bytes", 1 << 30),
        "--cpu-ttl": ("never", "ttl_s", {"hbm": 30.0, "cpu": None, "nvme": None}),
        "--free-target": ("0.3", "free_target", 0.3),
        "--nvme-gb-per-s": ("2.5", "nvme_bytes_per_s", 2.5e9),
        "--capacity": ("20,40,80", "capacity_blocks", {"hbm": 20, "cpu": 40, "nvme": 80}),
    }
    result = replay(TRACE, "--limit", "30", "--json", *(part for name, (text, _, _) in options.items() for part in (name, text)))
    assert result.exit_code == 0, result.output
    parameters = json.loads(result.stdout)["parameters"]
    assert {key: parameters[key] for _, key, _ in options.values()} == {key: value for _, key, value in options.values()}
    assert (
        json.loads(replay(TRACE, "--limit", "9", "--json", "--capacity", "9%", "--eviction", "arc").stdout)["parameters"][
            "eviction"
        ]
        == "arc"
    )


def test_table_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "r.json"
    png, page = tmp_path / "p.png", tmp_path / "p.html"
    result = replay(TRACE, "--capacity", "100,1000", "--limit", "60", "--plot", str(png), "--output", str(out))
    assert result.exit_code == 0, result.output
    assert "prefix hit ratio" in result.output and "written to NVMe" in result.output and "evictions from cpu" in result.output
    assert png.read_bytes().startswith(b"\x89PNG") and json.loads(out.read_text())["requests"] == 60
    assert replay(TRACE, "--capacity", "100,1000", "--limit", "60", "--plot", str(page)).exit_code == 0
    assert page.read_text().startswith("<!doctype html>") and "<svg" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([TRACE], "--capacity is missing"),
        ([TRACE, "--capacity", "5"], None),
        ([TRACE, "--capacity", "lots"], "no capacity"),
        ([TRACE, "--capacity", "5%", "--turn-bonus", "1s", "--eviction", "arc"], "--eviction lru"),
        ([TRACE, "--capacity", "5%", "--time-scale", "0"], "time-scale"),
        ([TRACE, "--capacity", "5%", "--workers", "2"], "needs --address"),
        ([TRACE, "--capacity", "5%", "--block-size", "0"], "1 byte to 4 GiB"),
        ([TRACE, "--capacity", "5%", "--write-budget", "1GiB"], "--write-budget: that needs NVMe, and --capacity has none"),
        ([TRACE, "--capacity", "9", "--nvme-ttl", "1h", "--nvme-gb-per-s", "2"], "--nvme-ttl, --nvme-gb-per-s: that needs NVMe"),
        ([TRACE, "--capacity", "9", "--cpu-ttl", "1h", "--free-target", "0.1"], "--cpu-ttl, --free-target: that needs NVMe"),
        ([TRACE, "--capacity", "9", "--admission", "second-use"], "--admission: that needs NVMe"),
        ([TRACE, "--capacity", "9,90", "--hbm-ttl", "1h"], "--hbm-ttl: that needs HBM"),
        ([TRACE, "--capacity", "9,90", "--second-use-window", "1h"], "--second-use-window: that goes with --admission second-use"),
        ([TRACE, "--capacity", "9,90", "--cpu-ttl", "1h", "--second-use-window", "1h", "--write-budget", "1GiB"], None),
        ([TRACE, "--capacity", "5%", "--write-budget", "lots"], "not a size"),
        ([TRACE, "--capacity", "5%", "--plot", "x.gif"], ".png or a .html"),
        ([TRACE, "--capacity", "5%", "--plot", "/nowhere/x.png"], "name another file in a folder that is there"),
        ([TRACE, "--capacity", "5%", "--output", "/nowhere/x.json"], "name another file in a folder that is there"),
        ([TRACE, "--capacity", "5%", "--time-scale", "nan"], "'nan' is not a number"),
        ([TRACE, "--capacity", "5,5", "--free-target", "nan"], "'nan' is not a number"),
        ([TRACE, "--capacity", "5,5", "--nvme-gb-per-s", "inf"], "'inf' is not a number"),
        (["/nowhere/t.jsonl", "--capacity", "5%"], "cannot read the trace"),
    ],
)
def test_wrong_calls_say_what_is_wrong(arguments: list[str], words: str | None) -> None:
    result = replay(*arguments, "--limit", "3")
    text = result.output + getattr(result.exception, "message", "")
    assert (result.exit_code == 0) == (words is None), text
    assert words is None or words in text


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n{"timestamp": 1, "input_length": 512}\n')
    result = replay(str(path), "--capacity", "5")
    assert result.exit_code == 2 and "line 2" in result.output
    path.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1], "tenant": 5}\n')
    assert "tenant is a text" in replay(str(path), "--capacity", "5").output


def test_the_command_alone_imports_neither_matplotlib_nor_the_core() -> None:
    """Help has to be quick."""
    code = (
        "import sys; from click.testing import CliRunner; from kvtierd.cli import cli; "
        "assert 'replay' in CliRunner().invoke(cli, ['--help']).output; "
        "sys.exit(any(m.startswith(('matplotlib', 'kvtierd.core', 'kvtierd.replay', 'grpc')) for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_figures_are_shown_where_their_file_cannot_be_written() -> None:
    result = replay(TRACE, "--capacity", "5%", "--limit", "9", "--output", "/dev/full")
    assert result.exit_code == 1
    assert "prefix hit ratio" in result.output and "cannot write /dev/full: No space left" in result.output


def test_a_file_that_is_to_be_written_is_left_as_it_was_until_then(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("old")
    for path in (old, new):
        assert replay("/nowhere", "--capacity", "5%", "--output", str(path)).exit_code == 2
    assert old.read_text() == "old" and not new.exists()
