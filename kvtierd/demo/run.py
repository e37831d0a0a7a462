"""Runs the demo: daemon, client processes, the kill half-way, and the figures of all of it."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import grpc

from kvtierd.demo.content import BLOCK_BYTES, SHAPE
from kvtierd.demo.trace import Request, ideal_hits
from kvtierd.demo.worker import Job, Outcome, work
from kvtierd.errors import StartupError
from kvtierd.model import Tier
from kvtierd.testing.daemon import DaemonProcess

POLL_S: Final = 0.25
CLIENT_TIMEOUT_S: Final = 120.0
"""How long the demo waits for a client that says nothing."""


class DemoError(Exception):
    """The demo cannot go on. The text says why."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    requests: list[Request]
    folder: Path
    cpu_bytes: int
    nvme_bytes: int
    cpu_ttl_s: float
    clients: int
    seed: int
    seconds: float
    kill: bool
    corrupt_one: bool = False


@dataclass
class Sample:
    """The tiers at one moment."""

    at_s: float
    used_bytes: dict[Tier, int]
    capacity_bytes: dict[Tier, int]
    counters: dict[str, float]
    sessions: int


@dataclass
class Progress:
    """All that is known while the demo runs, and at its end."""

    total: int
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    """(seconds after the begin, what happened)."""
    killed_at_s: float | None = None
    back_at_s: float | None = None
    restarts: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    """Sums over all boots of the daemon."""
    failure: str = ""
    took_s: float = 0.0

    def hits(self, tier: Tier, after_s: float = 0.0) -> int:
        """Blocks that were loaded from a tier by requests that began at ``after_s`` or later."""
        return sum(o.hits.get(tier, 0) for o in self.outcomes if o.at_s >= after_s)

    @property
    def wrong_bytes(self) -> int:
        """Bytes that were not what their key holds."""
        return sum(o.wrong_bytes for o in self.outcomes)

    def say(self, at_s: float, text: str) -> None:
        """Note an event."""
        self.events.append((at_s, text))


class Demo:
    """One run. :meth:`run` blocks; ``show`` is called about four times a second with the progress so far."""

    def __init__(self, options: Options, show: Callable[[Progress], None]) -> None:
        self._options = options
        self._show = show
        self.progress = Progress(len(options.requests))
        self._daemon = DaemonProcess(
            options.folder,
            {
                "cpu": {"capacity": options.cpu_bytes, "ttl": options.cpu_ttl_s},
                "nvme": {"capacity": options.nvme_bytes, "allow_volatile": False},
            },
        )
        self._started_s = 0.0
        self._last_counters: dict[str, float] = {}
        self._restarting: threading.Thread | None = None

    def run(self) -> Progress:
        """Run it. Raises DemoError when daemon or clients cannot be started."""
        try:
            self._daemon.start()
        except StartupError as e:
            raise DemoError(f"the daemon did not start: {e}") from e
        workers: list[tuple[BaseProcess, Connection]] = []
        try:
            self._started_s = time.monotonic() + 2.0  # the clients need a moment to start
            workers = list(self._start_workers())
            self._follow(workers)
        finally:
            for process, pipe in workers:
                if process.is_alive():
                    process.terminate()
                process.join(5)
                pipe.close()
            if self._restarting is not None:
                self._restarting.join()
            self._take_sample()
            self._add_counters()
            with contextlib.suppress(Exception):
                self._daemon.stop(20)
            self._daemon.kill()
            self.progress.took_s = max(time.monotonic() - self._started_s, 0.0)
        return self.progress

    def _now(self) -> float:
        return time.monotonic() - self._started_s

    def _start_workers(self) -> Iterator[tuple[BaseProcess, Connection]]:
        options = self._options
        span_s = max(options.requests[-1].at_s, 1e-3)
        spawn = multiprocessing.get_context("spawn")
        for client in range(options.clients):
            share = [(i, r) for i, r in enumerate(options.requests) if i % options.clients == client]
            job = Job(
                self._daemon.address,
                share,
                options.seed,
                span_s / max(options.seconds, 1e-3),
                self._started_s,
                corrupt_one=options.corrupt_one and client == 0,
            )
            mine, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(target=work, args=(job, theirs), name=f"demo-client-{client}")
            process.start()
            theirs.close()
            yield process, mine

    def _follow(self, workers: list[tuple[BaseProcess, Connection]]) -> None:
        """Take in outcomes until every client has ended; kill and restart the daemon half-way."""
        progress = self.progress
        pipes: dict[Any, BaseProcess] = {pipe: process for process, pipe in workers}
        pipe_of: dict[Any, Connection] = {pipe: pipe for _, pipe in workers}
        attached = dict.fromkeys(pipes, True)
        next_poll_s = last_news_s = time.monotonic()
        while pipes:
            for ready in wait(list(pipes), timeout=POLL_S):
                try:
                    outcome: Outcome | None = pipe_of[ready].recv()
                except EOFError:
                    pipes.pop(ready).join(5)
                    progress.failure = progress.failure or "a client process ended before its requests did"
                    continue
                last_news_s = time.monotonic()
                if outcome is None:
                    pipes.pop(ready)
                    continue
                progress.outcomes.append(outcome)
                if outcome.attached != attached[ready]:
                    attached[ready] = outcome.attached
                    name = pipes[ready].name
                    progress.say(self._now(), f"{name} {'is attached again' if outcome.attached else 'goes on without a cache'}")
            if self._options.kill and self._restarting is None and len(progress.outcomes) >= progress.total // 2:
                self._kill()
            if time.monotonic() >= next_poll_s:
                next_poll_s = time.monotonic() + POLL_S
                self._take_sample()
                self._show(progress)
            if time.monotonic() - last_news_s > CLIENT_TIMEOUT_S:
                progress.failure = f"no client has answered for {CLIENT_TIMEOUT_S:.0f} s"
                return

    # ---- the daemon

    def _kill(self) -> None:
        progress = self.progress
        self._take_sample()
        self._add_counters()
        progress.killed_at_s = self._now()
        progress.say(progress.killed_at_s, "the daemon was killed (SIGKILL)")
        self._daemon.kill()
        self._restarting = threading.Thread(target=self._restart, name="demo-restart")
        self._restarting.start()

    def _restart(self) -> None:
        progress = self.progress
        try:
            self._daemon.start()
            status = self._daemon.status()
        except (StartupError, grpc.RpcError) as e:
            progress.failure = f"the daemon did not come back: {e}"
            return
        progress.back_at_s = self._now()
        progress.restarts += 1
        progress.say(progress.back_at_s, f"the daemon is back with {status.blocks:,} blocks from NVMe")

    def _take_sample(self) -> None:
        try:
            status = self._daemon.status(timeout_s=1.0)
        except grpc.RpcError:
            return  # killed and not back yet
        at_s = self._now()
        used = {Tier(t.tier - 1): t.used_bytes for t in status.tiers}
        capacity = {Tier(t.tier - 1): t.capacity_bytes for t in status.tiers}
        self._last_counters = dict(status.counters)
        self.progress.samples.append(Sample(at_s, used, capacity, self._last_counters, len(status.sessions)))

    def _add_counters(self) -> None:
        """Add the counters of a boot that ends."""
        for name, value in self._last_counters.items():
            self.progress.counters[name] = self.progress.counters.get(name, 0.0) + value
        self._last_counters = {}


def summary(options: Options, progress: Progress) -> dict[str, Any]:
    """The figures of a run, for JSON and for the table."""
    outcomes = progress.outcomes
    asked = sum(o.asked for o in outcomes)
    ideal, total = ideal_hits(options.requests)
    hits = {tier.name.lower(): progress.hits(tier) for tier in (Tier.CPU, Tier.NVME)}
    after_restart = progress.hits(Tier.NVME, progress.back_at_s) if progress.back_at_s is not None else 0
    saved, loaded = sum(o.saved for o in outcomes), sum(hits.values())
    load_s, save_s = sum(o.load_s for o in outcomes), sum(o.save_s for o in outcomes)
    gb = BLOCK_BYTES / 1e9

    def counter(name: str) -> int:
        return int(progress.counters.get(f"kvtierd_{name}_total", 0))

    return {
        "shape": SHAPE,
        "requests": len(outcomes),
        "blocks_asked": asked,
        "prefix_hit_ratio": loaded / asked if asked else 0.0,
        "hit_ratio_by_tier": {name: count / asked if asked else 0.0 for name, count in hits.items()},
        "ideal_prefix_hit_ratio": ideal / total if total else 0.0,
        "saved_gb": saved * gb,
        "loaded_gb": loaded * gb,
        "save_gb_per_s": saved * gb / save_s if save_s else 0.0,
        "load_gb_per_s": loaded * gb / load_s if load_s else 0.0,
        "demotions": int(progress.counters.get("demotions", 0)),
        "promotions": int(progress.counters.get("promotions", 0)),
        "evictions": counter("evictions"),
        "rejected": sum(o.rejected for o in outcomes),
        "restarts_survived": progress.restarts,
        "nvme_hits_after_restart": after_restart,
        "wrong_bytes": progress.wrong_bytes,
        "seconds": progress.took_s,
    }


def verdict(options: Options, progress: Progress, figures: dict[str, Any]) -> str:
    """Empty when the run proves what it should, else why not."""
    if progress.failure:
        return progress.failure
    if progress.wrong_bytes:
        return f"{progress.wrong_bytes} wrong bytes were loaded"
    if len(progress.outcomes) < progress.total:
        return f"only {len(progress.outcomes)} of {progress.total} requests were replayed"
    if options.kill and not progress.restarts:
        return "the daemon did not come back"
    if options.kill and options.nvme_bytes and not figures["nvme_hits_after_restart"]:
        return "nothing was loaded from NVMe after the restart"
    return ""
