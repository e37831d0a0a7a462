"""One client process of the demo: replays its share of the requests, and checks every byte that it loads."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from kvtierd.client import Client
from kvtierd.demo.content import BLOCK_BYTES, Words, fill, keys_of, namespace, spoil, wrong_bytes
from kvtierd.lifetime import die_with_parent
from kvtierd.model import Tier
from kvtierd.replay.trace import Request

BATCH: Final = 32
"""Blocks of one call."""
TIMEOUT_S: Final = 5.0
SAVE_WAIT_S: Final = 1.0
RESTART_WAIT_S: Final = 20.0
"""How long the last quarter of the requests waits for a daemon that is away."""
ATTACH_POLL_S: Final = 0.1


@dataclass(frozen=True)
class Job:
    """What a worker does."""

    name: str
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


@dataclass(frozen=True)
class Ended:
    """Last message of a worker."""

    error: str = ""
    """Empty, or what it failed with."""


def work(job: Job, pipe: Connection) -> None:
    """Entry point of the process. Sends an Outcome a request, then Ended; ends early when anything comes in or the parent goes.

    A pipe and not an event of ``multiprocessing``: setting that one hangs when a process was killed while it waited for it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()
    logging.getLogger("kvtierd.client").setLevel(logging.ERROR)  # the view shows who has no cache
    error = ""
    with contextlib.suppress(BrokenPipeError):  # nobody is left to listen
        try:
            for outcome in _replay(job, pipe):
                pipe.send(outcome)
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        pipe.send(Ended(error))
    pipe.close()


def _replay(job: Job, pipe: Connection) -> Iterator[Outcome]:
    with Client(namespace(job.seed), job.address, timeout_s=TIMEOUT_S, name=job.name) as client:
        client.wait_attached(TIMEOUT_S)
        replay = Replay(client, job.seed, corrupt=job.corrupt_one)
        held_back = len(job.requests) * 3 // 4
        for position, (number, request) in enumerate(job.requests):
            due_s = job.started_s + request.at_s / job.speedup
            if pipe.poll(max(due_s - time.monotonic(), 0.0)):
                return
            if position >= held_back and not _wait_attached(client, pipe):
                return
            outcome = Outcome(number, time.monotonic() - job.started_s, len(request.blocks))
            replay.run(request, outcome)
            outcome.attached = client.status.attached
            yield outcome


def _wait_attached(client: Client, pipe: Connection) -> bool:
    """Wait for the daemon. False when the worker is to end.

    The replay is far faster than the trace was, a restart is not: without this, the whole replay may be over before it.
    """
    until_s = time.monotonic() + RESTART_WAIT_S
    while not client.wait_attached(ATTACH_POLL_S) and time.monotonic() < until_s:
        if pipe.poll(0):
            return False
    return True


class Replay:
    """Replays requests through a client, with buffers of its own.

    Args:
        client: where to save and load.
        seed: the demo's.
        corrupt: flip one bit of the first block that is loaded, before it is checked.
    """

    def __init__(self, client: Client, seed: int, *, corrupt: bool = False) -> None:
        self._client = client
        self._seed = seed
        self._corrupt = corrupt
        self._buffers: Words = np.empty((BATCH, BLOCK_BYTES // 8), np.uint64)

    def run(self, request: Request, outcome: Outcome) -> None:
        """Load and check the prefix that is held, then save the rest, as an engine would after computing it."""
        keys = keys_of(request.blocks, self._seed)
        self._load(keys, outcome)
        self._save(keys[sum(outcome.hits.values()) :], outcome)

    def _load(self, keys: list[bytes], outcome: Outcome) -> None:
        # What is held is asked first: a load asks for what there is, and what there is fits the buffers that were spoilt for it.
        keys = keys[: self._client.lookup(keys).held]
        for batch in _batches(keys):
            buffers = self._buffers[: len(batch)]
            spoil(buffers)  # else a block that was not copied could be right from the last time
            began_s = time.perf_counter()
            result = self._client.load(batch, list(buffers))
            outcome.load_s += time.perf_counter() - began_s
            if self._corrupt and result.loaded:
                buffers[0, 4242] ^= np.uint64(1 << 17)
                self._corrupt = False
            outcome.wrong_bytes += sum(wrong_bytes(key, buffers[i]) for i, key in enumerate(batch[: result.loaded]))
            for tier, count in result.by_tier.items():
                outcome.hits[tier] = outcome.hits.get(tier, 0) + count
            if result.loaded < len(batch):
                break

    def _save(self, keys: list[bytes], outcome: Outcome) -> None:
        for batch in _batches(keys):
            buffers = self._buffers[: len(batch)]
            for row, key in zip(buffers, batch, strict=True):
                fill(key, row)
            began_s = time.perf_counter()
            result = self._client.save(batch, list(buffers), wait_s=SAVE_WAIT_S)
            outcome.save_s += time.perf_counter() - began_s
            outcome.saved += result.saved
            outcome.held += result.held
            outcome.rejected += sum(result.rejected.values())


def _batches(keys: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), BATCH):
        yield keys[start : start + BATCH]
