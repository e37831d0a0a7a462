"""The trace that the demo replays unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvtierd.replay.trace import TraceError

EXCERPT: Final = "conversation_excerpt.jsonl"
EXCERPT_REQUESTS: Final = 100
"""Requests of the excerpt that the demo replays unless told otherwise: 16 minutes, 1,445 distinct blocks. At 1 MiB a block they
are far more than the CPU tier of the demo holds, and a little more than its NVMe tier does."""


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
