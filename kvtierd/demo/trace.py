"""Conversation traces in the Mooncake schema: one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRACE_BLOCK_TOKENS: Final = 512
MAX_REQUESTS: Final = 1_000_000
MAX_ID: Final = 2**32 - 1
EXCERPT: Final = "conversation_excerpt.jsonl"
EXCERPT_REQUESTS: Final = 100
"""Requests of the excerpt that the demo replays unless told otherwise: 16 minutes, 1,445 distinct blocks. At 1 MiB a block they
are far more than the CPU tier of the demo holds, and a little more than its NVMe tier does."""


class TraceError(Exception):
    """A trace that cannot be read. The text names file, line and reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    at_s: float
    """Seconds after the first request."""
    blocks: tuple[int, ...]
    """Ids of the full 512-token blocks of the prompt; equal ids mean equal prefixes."""


def default_trace() -> Path:
    """The excerpt that comes with kvtierd: beside the installed package, or in the source tree.

    Raises:
        TraceError: neither is there.
    """
    here = Path(__file__).parent
    for path in (here / "data" / EXCERPT, here.parents[1] / "loadtest" / "traces" / EXCERPT):
        if path.is_file():
            return path
    raise TraceError("the built-in trace is missing; name one with --trace")


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """Requests in order of time.

    Raises:
        TraceError: the file cannot be read, or a line is not a request.
    """
    requests: list[Request] = []
    first_ms: float | None = None
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                if len(requests) >= (limit or MAX_REQUESTS):
                    break
                at_ms, blocks = _parse(line, f"{path}, line {number}")
                first_ms = at_ms if first_ms is None else first_ms
                requests.append(Request(max(at_ms - first_ms, 0.0) / 1000, blocks))
    except OSError as e:
        raise TraceError(f"cannot read the trace {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise TraceError(f"{path} is no text file: a trace has one JSON object a line") from e
    if not requests:
        raise TraceError(f"the trace {path} has no requests")
    return requests


def _parse(line: str, where: str) -> tuple[float, tuple[int, ...]]:
    try:
        row = json.loads(line)
        at_ms, length, ids = row["timestamp"], row["input_length"], row["hash_ids"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise TraceError(f"{where}: not a JSON object with timestamp, input_length and hash_ids ({type(e).__name__}: {e})") from e
    is_number = _is_whole(length) and (_is_whole(at_ms) or isinstance(at_ms, float))
    if not (is_number and isinstance(ids, list) and all(_is_whole(i) for i in ids)):
        raise TraceError(f"{where}: timestamp and input_length are numbers, hash_ids is a list of whole numbers")
    if not (length >= 0 and 0 <= at_ms < float("inf") and all(0 <= i <= MAX_ID for i in ids)):
        raise TraceError(f"{where}: timestamp and input_length are at least 0, hash_ids from 0 to {MAX_ID}")
    full = length // TRACE_BLOCK_TOKENS
    if len(ids) < full:
        raise TraceError(f"{where}: {length} tokens fill {full} blocks of {TRACE_BLOCK_TOKENS}, but hash_ids has {len(ids)}")
    return float(at_ms), tuple(ids[:full])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def ideal_hits(requests: list[Request]) -> tuple[int, int]:
    """(blocks found as a prefix by a cache that forgets nothing, blocks asked for)."""
    seen: set[int] = set()
    hits = asked = 0
    for request in requests:
        asked += len(request.blocks)
        for block in request.blocks:
            if block not in seen:
                break
            hits += 1
        seen.update(request.blocks)
    return hits, asked
