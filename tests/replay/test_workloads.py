"""Goal: made-up traffic is what it says it is, the same for the same seed, and a trace that can be replayed.

Method: the generator as a command; lengths, prefixes and times of what it writes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtierd.replay.trace import read_trace

SCRIPT = Path(__file__).resolve().parents[2] / "loadtest" / "workloads.py"
workloads = pytest.importorskip("loadtest.workloads")  # source distributions have no load tests
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="source distributions have no load tests")


def made(*args: object) -> list[dict[str, Any]]:
    answer = subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.parametrize("kind", ["rag-chat", "agents", "documents"])
def test_a_trace_can_be_read_and_comes_again(kind: str, tmp_path: Path) -> None:
    rows = made(kind, "--conversations", 60)
    assert rows == made(kind, "--conversations", 60)
    assert rows != made(kind, "--conversations", 60, "--seed", 2)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    requests = read_trace(path)
    assert len(requests) == len(rows)
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(requests))
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 512) for row in rows)


def test_rag_chat_has_the_lengths_that_were_asked_for() -> None:
    rows = made("rag-chat", "--conversations", 1500, "--tenants", 3, "--system-prompts", 3, "--contexts", 50)
    assert 5.4 < len(rows) / 1500 < 6.6, "turns"
    shortest = min(row["input_length"] for row in rows)
    assert 9500 < shortest < 9600, "system prompt, context and a short question"
    assert len({row["tenant"] for row in rows}) == 3
    # The system prompt's two whole blocks are the tenant's own, and its contexts are those of the collection.
    assert len({row["hash_ids"][0] for row in rows}) == 3
    assert 120 <= len({row["hash_ids"][17] for row in rows}) <= 150
    popular = [row["hash_ids"][17] for row in rows]
    assert max(map(popular.count, set(popular))) > 3 * len(popular) / 150, "some are asked for more often"


def test_a_turn_goes_on_from_the_last_one() -> None:
    rows = made("agents", "--conversations", 1, "--turns", 30, "--seed", 3)
    assert len(rows) > 3
    for before, after in itertools.pairwise(rows):
        whole = before["input_length"] // 512
        assert after["hash_ids"][:whole] == before["hash_ids"][:whole]
        assert after["timestamp"] > before["timestamp"]
        assert after["input_length"] > before["input_length"] + before["output_length"]


def test_tenants_share_what_has_the_same_beginning() -> None:
    rows = made("documents", "--conversations", 300, "--tenants", 4, "--system-prompts", 1, "--contexts", 5)
    first = {row["tenant"]: row["hash_ids"][:90] for row in rows if row["hash_ids"][1] == rows[0]["hash_ids"][1]}
    assert len(first) == 4 and len({tuple(ids) for ids in first.values()}) == 1


@pytest.mark.parametrize("kind", ["rag-chat", "agents", "documents"])
@pytest.mark.parametrize(
    "option", ["conversations", "rate", "tokens-per-s", "tenants", "system-prompts", "user-tokens", "turns", "think-s", "contexts"]
)
def test_options_that_cannot_be_are_named(kind: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = workloads.parser_of(kind, argparse.ArgumentParser())
    for value in ("0", "-1", "nan", "inf", "x"):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--{option}={value}"])
        assert f"argument --{option}: {value!r} is not a" in capsys.readouterr().err


def test_who_reads_only_the_beginning_sees_no_traceback() -> None:
    command = [sys.executable, SCRIPT, "rag-chat", "--conversations", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["timestamp"] == 0
        process.stdout.close()
        assert process.stderr.read() == b""
