"""Goal: whoever measures the policy on a trace of their own writes over no published figures, and mixes none of two traces.

Method: the command on two tiny traces, one after the other, into one folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("loadtest.engines.plan")  # source distributions have no load tests


def trace(path: Path, blocks: int) -> Path:
    request = {"input_length": 512 * blocks, "output_length": 1, "hash_ids": list(range(blocks))}
    path.write_text("".join(json.dumps({"timestamp": 1000 * n} | request) + "\n" for n in range(3)))
    return path


def measured(path: Path, output: Path, only: str) -> dict[str, Any]:
    command = [sys.executable, "loadtest/replay.py", str(path), "--only", only, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((output / "policy.json").read_text())
    assert only.partition(": ")[2] in (output / "policy.md").read_text()
    return found


def test_results_are_of_one_trace_and_where_they_are_told_to_be(tmp_path: Path) -> None:
    published = (ROOT / "loadtest" / "results" / "policy.json").read_bytes()
    first, other = trace(tmp_path / "first.jsonl", 4), trace(tmp_path / "other.jsonl", 6)
    out = tmp_path / "out"
    assert {row["option"] for row in measured(first, out, "2 TiB: ARC")["cases"]} == {"ARC"}
    assert {row["option"] for row in measured(first, out, "2 TiB: LRU")["cases"]} == {"ARC", "LRU"}, "what it has of it is kept"
    found = measured(other, out, "2 TiB: LRU")
    assert {row["option"] for row in found["cases"]} == {"LRU"}
    assert found["distinct"] == 6
    assert (ROOT / "loadtest" / "results" / "policy.json").read_bytes() == published
    assert "Mooncake" not in (out / "policy.md").read_text(), "that is another trace"


def test_a_trace_that_is_too_short_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "loadtest/replay.py", str(trace(tmp_path / "t.jsonl", 4)), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "take a longer trace" in done.stderr
