"""One client process of the demo: replays its share of the requests, and checks every byte that it loads."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from kvtierd.client import Client
from kvtierd.demo.content import BLOCK_BYTES, Words, fill, key_of, namespace, wrong_bytes
from kvtierd.demo.trace import Request
from kvtierd.model import Tier

BATCH: Final = 32
"""Blocks of one call."""
TIMEOUT_S: Final = 5.0
SAVE_WAIT_S: Final = 1.0


@dataclass(frozen=True)
class Job:
    """What a worker does."""

    address: str
    requests: list[tuple[int, Request]]
    """(number in the trace, request)."""
    seed: int
    speedup: float
    """Trace seconds in one real second."""
    started_s: float
    """``time.monotonic`` at which the replay begins."""
    corrupt_one: bool = False
    """Flip one loaded bit before the check, to show that the check sees it."""


@dataclass
class Outcome:
    """How one request went."""

    number: int
    at_s: float
    """Seconds after the begin of the replay."""
    asked: int = 0
    hits: dict[Tier, int] = field(default_factory=dict)
    saved: int = 0
    held: int = 0
    rejected: int = 0
    wrong_bytes: int = 0
    load_s: float = 0.0
    save_s: float = 0.0
    attached: bool = True


def work(job: Job, pipe: Connection) -> None:
    """Entry point of the process. Sends an Outcome a request, then None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    logging.getLogger("kvtierd.client").setLevel(logging.ERROR)  # the view shows who has no cache
    buffers = np.empty((BATCH, BLOCK_BYTES // 8), np.uint64)
    with Client(namespace(job.seed), job.address, timeout_s=TIMEOUT_S, name="demo") as client:
        client.wait_attached(TIMEOUT_S)
        corrupt = job.corrupt_one
        for number, request in job.requests:
            due_s = job.started_s + request.at_s / job.speedup
            time.sleep(max(due_s - time.monotonic(), 0.0))
            outcome = Outcome(number, time.monotonic() - job.started_s, len(request.blocks))
            keys = [key_of(block, job.seed) for block in request.blocks]
            corrupt = _load(client, keys, buffers, outcome, corrupt=corrupt)
            _save(client, keys[sum(outcome.hits.values()) :], buffers, outcome)
            outcome.attached = client.status.attached
            pipe.send(outcome)
    pipe.send(None)
    pipe.close()


def _batches(keys: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), BATCH):
        yield keys[start : start + BATCH]


def _load(client: Client, keys: list[bytes], buffers: Words, outcome: Outcome, *, corrupt: bool) -> bool:
    """Load the prefix that is held and check it. Returns whether a bit is still to be flipped."""
    for batch in _batches(keys):
        began_s = time.perf_counter()
        result = client.load(batch, list(buffers[: len(batch)]))
        outcome.load_s += time.perf_counter() - began_s
        if corrupt and result.loaded:
            buffers[0, 4242] ^= np.uint64(1 << 17)
            corrupt = False
        outcome.wrong_bytes += sum(wrong_bytes(key, buffers[i]) for i, key in enumerate(batch[: result.loaded]))
        for tier, count in result.by_tier.items():
            outcome.hits[tier] = outcome.hits.get(tier, 0) + count
        if result.loaded < len(batch):
            break
    return corrupt


def _save(client: Client, keys: list[bytes], buffers: Words, outcome: Outcome) -> None:
    """Save what was not found, as an engine would after computing it."""
    for batch in _batches(keys):
        for row, key in zip(buffers, batch, strict=False):
            fill(key, row)
        began_s = time.perf_counter()
        result = client.save(batch, list(buffers[: len(batch)]), wait_s=SAVE_WAIT_S)
        outcome.save_s += time.perf_counter() - began_s
        outcome.saved += result.saved
        outcome.held += result.held
        outcome.rejected += sum(result.rejected.values())
