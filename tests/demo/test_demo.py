"""Goal: the demo replays a trace for real, and fails when anything is wrong.

Method: traces and contents alone first; then the command as a child process with a small part of the trace.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtierd.demo import content
from kvtierd.demo.trace import Request, TraceError, default_trace, ideal_hits, read_trace


def run_demo(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtierd.cli", "demo", "--folder", str(tmp_path / "f"), "--json", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)


def test_excerpt_is_what_its_readme_says() -> None:
    path = default_trace()
    assert path.stat().st_size <= 300_000
    requests = read_trace(path)
    hits, asked = ideal_hits(requests)
    distinct = len({b for r in requests for b in r.blocks})
    assert (len(requests), asked, distinct) == (403, 9586, 6008)
    assert round(hits / asked, 3) == 0.373


def test_partial_blocks_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 5000, "input_length": 1100, "output_length": 1, "hash_ids": [7, 8, 9]}\n\n')
    assert read_trace(path) == [Request(0.0, (7, 8))]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no requests"),
        ("nonsense\n", "line 1"),
        ('{"timestamp": 1, "input_length": 512}\n', "hash_ids"),
        ('{"timestamp": 1, "input_length": 512, "hash_ids": ["a"]}\n', "whole numbers"),
        ("[1]\n", "line 1"),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=words):
        read_trace(path)
    shown = run_demo(tmp_path, "--trace", str(path), "--no-plot")
    assert shown.returncode == 2
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_check_sees_every_kind_of_wrong_byte() -> None:
    a, b = content.key_of(1, 1), content.key_of(2, 1)
    words = np.empty(content.BLOCK_BYTES // 8, np.uint64)
    content.fill(a, words)
    assert content.wrong_bytes(a, words) == 0
    assert content.wrong_bytes(b, words) > content.BLOCK_BYTES * 0.9, "another block differs almost everywhere"
    words[77] ^= np.uint64(1 << 60)
    assert content.wrong_bytes(a, words) == 1
    content.fill(a, words)
    torn = np.empty_like(words)
    content.fill(b, torn)
    words[-512:] = torn[-512:]
    assert content.wrong_bytes(a, words) > 3000
    content.fill(a, words)
    assert content.wrong_bytes(a, np.roll(words, 1)) > content.BLOCK_BYTES * 0.9
    assert content.wrong_bytes(a, np.zeros_like(words)) > content.BLOCK_BYTES * 0.9


def test_missing_trace_and_unwritable_plot(tmp_path: Path) -> None:
    assert "cannot read the trace" in run_demo(tmp_path, "--trace", "nowhere", "--no-plot").stderr
    shown = run_demo(tmp_path, "--plot", "no/such/folder/x.png")
    assert shown.returncode == 2
    assert "--plot" in shown.stderr


def test_small_demo_end_to_end(tmp_path: Path) -> None:
    shown = run_demo(
        tmp_path, "--limit", "60", "--seconds", "6", "--cpu-capacity", "64MiB", "--nvme-capacity", "400MiB", "--plot", "p.png"
    )
    assert shown.returncode == 0, shown.stderr
    figures = json.loads(shown.stdout)
    assert figures["wrong_bytes"] == 0
    assert figures["restarts_survived"] == 1
    assert figures["nvme_hits_after_restart"] > 0
    assert figures["demotions"] > 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert not any((tmp_path / "f").iterdir()), "nothing is left behind"


def test_one_wrong_bit_makes_the_demo_fail(tmp_path: Path) -> None:
    shown = run_demo(tmp_path, "--limit", "60", "--seconds", "4", "--no-kill", "--no-plot", "--corrupt-one")
    assert shown.returncode == 1
    assert "wrong bytes" in shown.stderr
    assert json.loads(shown.stdout)["wrong_bytes"] == 1
