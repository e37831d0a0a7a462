"""Conversation traces in the Mooncake schema: one JSON object a line.

``hash_ids`` has one id for each 512 tokens of the prompt, and one for a last, partial block; that one may be missing, as in traces
of engines that hash whole blocks only: such a block counts nowhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtierd.tenant_config import name_problem

TRACE_BLOCK_TOKENS: Final = 512
MAX_REQUESTS: Final = 1_000_000
MAX_ID: Final = 2**32 - 1


class TraceError(Exception):
    """A trace that cannot be read. The text names file, line and reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    at_s: float
    """Seconds after the first request."""
    blocks: tuple[int, ...]
    """Ids of the 512-token blocks of the prompt; equal ids mean equal prefixes."""
    tenant: str = ""
    """Empty where the trace names none."""


def read_trace(path: Path, limit: int | None = None, *, partial: bool = False) -> list[Request]:
    """Requests in the order of the file, which is that of time.

    Args:
        path: the file.
        limit: most requests that are read.
        partial: take a last block that the prompt fills in part along, where it has an id.

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
                at_ms, blocks, tenant = _parse(line, f"{path}, line {number}", partial)
                first_ms = at_ms if first_ms is None else first_ms
                requests.append(Request(max(at_ms - first_ms, 0.0) / 1000, blocks, tenant))
    except OSError as e:
        raise TraceError(f"cannot read the trace {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise TraceError(f"{path} is no text file: a trace has one JSON object a line") from e
    if not requests:
        raise TraceError(f"the trace {path} has no requests")
    return requests


def _parse(line: str, where: str, partial: bool) -> tuple[float, tuple[int, ...], str]:
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
    full, begun = length // TRACE_BLOCK_TOKENS, -(-length // TRACE_BLOCK_TOKENS)
    if len(ids) < full:
        raise TraceError(f"{where}: {length} tokens fill {full} blocks of {TRACE_BLOCK_TOKENS}, but hash_ids has {len(ids)}")
    if len(ids) > begun:
        raise TraceError(f"{where}: {length} tokens make {begun} blocks of {TRACE_BLOCK_TOKENS}, but hash_ids has {len(ids)}")
    tenant = row.get("tenant", "")
    if not isinstance(tenant, str):
        raise TraceError(f"{where}: tenant is a text")
    if tenant and (problem := name_problem(tenant)):
        raise TraceError(f"{where}: {problem}")
    return float(at_ms), tuple(ids if partial else ids[:full]), tenant


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def ideal_hits(requests: list[Request]) -> tuple[int, int]:
    """(blocks found as a prefix by a cache that forgets nothing, blocks asked for). Tenants share nothing."""
    caches: dict[str, set[int]] = {}
    hits = asked = 0
    for request in requests:
        seen = caches.setdefault(request.tenant, set())
        asked += len(request.blocks)
        for block in request.blocks:
            if block not in seen:
                break
            hits += 1
        seen.update(request.blocks)
    return hits, asked
