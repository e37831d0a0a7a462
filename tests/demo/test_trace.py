"""Goal: traces are read as their README says, and what is wrong in them is named with its line.

Method: the excerpt that comes with kvtierd, and files with one fault each.
"""

from pathlib import Path

import pytest

from kvtierd.demo.trace import EXCERPT_REQUESTS, default_trace
from kvtierd.replay.trace import Request, TraceError, ideal_hits, read_trace


def figures(requests: list[Request]) -> tuple[int, int, int, float]:
    hits, asked = ideal_hits(requests)
    return len(requests), asked, len({b for r in requests for b in r.blocks}), round(hits / asked, 3)


def test_excerpt_is_what_its_readme_says() -> None:
    path = default_trace()
    assert path.stat().st_size <= 300_000
    assert figures(read_trace(path)) == (403, 9586, 6008, 0.373)
    assert figures(read_trace(path, EXCERPT_REQUESTS)) == (100, 2253, 1445, 0.359)


def test_partial_blocks_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 5000, "input_length": 1100, "output_length": 1, "hash_ids": [7, 8, 9]}\n\n')
    assert read_trace(path) == [Request(0.0, (7, 8))]


def test_limit_stops_before_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\nnonsense\n')
    assert len(read_trace(path, 1)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "no requests"),
        (b"nonsense\n", "line 1"),
        (b'{"timestamp": 1, "input_length": 512, "hash_ids": [1]}\n{"timestamp": 1\n', "line 2"),
        (b'{"timestamp": 1, "input_length": 512}\n', "hash_ids"),
        (b'{"timestamp": 1, "input_length": 512, "hash_ids": ["a"]}\n', "whole numbers"),
        (b'{"timestamp": 1, "input_length": 512, "hash_ids": [true]}\n', "whole numbers"),
        (b'{"timestamp": "1", "input_length": 512, "hash_ids": [1]}\n', "are numbers"),
        (b'{"timestamp": NaN, "input_length": 512, "hash_ids": [1]}\n', "at least 0"),
        (b'{"timestamp": 1, "input_length": -1, "hash_ids": []}\n', "at least 0"),
        (b'{"timestamp": 1, "input_length": 512, "hash_ids": [4294967296]}\n', "from 0 to 4294967295"),
        (b'{"timestamp": 1, "input_length": 1024, "hash_ids": [1]}\n', "1024 tokens fill 2 blocks"),
        (b'{"timestamp": 1, "input_length": 600, "hash_ids": []}\n', "line 1: 600 tokens fill 1 blocks"),
        (b'{"timestamp": 1, "input_length": 600, "hash_ids": [1, 2, 3]}\n', "line 1: 600 tokens make 2 blocks of 512, but"),
        (b"[1]\n", "line 1"),
        (b"[" * 100_000, "line 1"),
        (b"\xff\xfe\x00\n", "no text file"),
    ],
)
def test_bad_traces_are_refused_with_their_line(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_a_trace_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read the trace .*No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"cannot read the trace .*Is a directory"):
        read_trace(tmp_path)
