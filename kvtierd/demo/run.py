"""Runs the demo: daemon, client processes, the kill half-way."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import grpc

from kvtierd.demo.daemon import DemoDaemon
from kvtierd.demo.progress import Progress, Sample
from kvtierd.demo.worker import Ended, Job, Outcome, work
from kvtierd.errors import StartupError
from kvtierd.lifetime import undisturbed
from kvtierd.model import Tier
from kvtierd.replay.trace import Request

POLL_S: Final = 0.25
STATUS_TIMEOUT_S: Final = 1.0
DOWN_S: Final = 1.0
"""How long a killed daemon stays away, so that one can see the clients go on without it."""
RESTART_TIMEOUT_S: Final = 60.0
CLIENT_TIMEOUT_S: Final = 120.0
"""How long the demo waits for clients that say nothing although they have something to do."""
STOP_TIMEOUT_S: Final = 15.0
"""How long it waits for the request that a client is at when the time is over."""
LEAD_S: Final = 2.0
"""The clients need a moment to start before the replay begins."""
RESERVE_BYTES: Final = 256 << 20
"""Free space of the file system that the daemon leaves alone."""


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
    """Time that the replay takes where the machine keeps up."""
    time_limit_s: float | None
    """Time after which the replay is cut short; None for none."""
    kill: bool
    keep: bool = False
    corrupt_one: bool = False


@dataclass
class Worker:
    """One client process."""

    number: int
    process: BaseProcess
    pipe: Connection


class Demo:
    """One run. :meth:`run` blocks; ``show`` is called about four times a second with the progress so far."""

    def __init__(self, options: Options, show: Callable[[Progress], None]) -> None:
        self._options = options
        self._show = show
        self.progress = Progress(options.requests, options.clients)
        self._daemon = DemoDaemon(
            options.folder,
            {
                "cpu": {"capacity": options.cpu_bytes, "ttl": options.cpu_ttl_s},
                # What the demo stores is thrown away, so any file system will do.
                "nvme": {"capacity": options.nvme_bytes, "allow_volatile": True, "reserve": RESERVE_BYTES},
            },
        )
        self._workers: list[Worker] = []
        self._started_s = 0.0
        self._down_until_s: float | None = None
        """While the daemon is away: when it is started again, or inf once that is done and it has not answered yet."""
        self._news_s = 0.0

    def run(self) -> Progress:
        """Run it.

        Raises:
            DemoError: the daemon cannot be started.
        """
        try:
            try:
                self._daemon.start()
            except StartupError as e:
                raise DemoError(f"the daemon did not start: {self._daemon.last_words()}") from e
            self._started_s = self._news_s = time.monotonic() + LEAD_S
            self._start_workers()
            self._follow()
        finally:
            with undisturbed():
                self._clean_up()
        return self.progress

    def _now(self) -> float:
        return time.monotonic() - self._started_s

    # ---- clients

    def _start_workers(self) -> None:
        options = self._options
        spawn = multiprocessing.get_context("spawn")
        span_s = max(options.requests[-1].at_s, 1e-3)
        for client in range(options.clients):
            job = Job(
                f"client-{client}",
                self._daemon.address,
                [(i, r) for i, r in enumerate(options.requests) if i % options.clients == client],
                options.seed,
                span_s / options.seconds,
                self._started_s,
                corrupt_one=options.corrupt_one and client == 0,
            )
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=work, args=(job, theirs), name=job.name, daemon=True)
            self._workers.append(Worker(client, process, mine))
            with undisturbed():
                process.start()
            theirs.close()

    def _follow(self) -> None:
        """Take in outcomes until every client has ended; meanwhile kill and restart the daemon."""
        progress = self.progress
        open_workers: dict[Connection, Worker] = {w.pipe: w for w in self._workers}
        next_poll_s = 0.0
        while open_workers and not progress.failure:
            for ready in wait(list(open_workers), timeout=POLL_S):
                assert isinstance(ready, Connection)
                if not self._receive(open_workers[ready]):
                    del open_workers[ready]
            if time.monotonic() >= next_poll_s:
                self._look_after_daemon()
                self._show(progress)
                next_poll_s = time.monotonic() + POLL_S
            self._watch_time()
        if progress.restarts == 0 and progress.killed_at_s is not None:
            self._await_daemon()
        self._show(progress)

    def _receive(self, worker: Worker) -> bool:
        """Take in one message. Returns False when it was the last one."""
        progress = self.progress
        name = worker.process.name
        try:
            message: Outcome | Ended = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(STOP_TIMEOUT_S)
            progress.fail(f"{name} ended before its requests did (status {worker.process.exitcode})")
            return False
        self._news_s = time.monotonic()
        if isinstance(message, Ended):
            if message.error:
                progress.fail(f"{name} failed: {message.error}")
            return False
        progress.outcomes.append(message)
        if message.attached != progress.attached[worker.number]:
            progress.attached[worker.number] = message.attached
            progress.say(self._now(), f"{name} {'is attached again' if message.attached else 'goes on without a cache'}")
        return True

    def _watch_time(self) -> None:
        """Cut the replay short at the time limit, and give clients up that are stuck."""
        progress, options = self.progress, self._options
        done, now_s = len(progress.outcomes), time.monotonic()
        if options.time_limit_s is not None and not progress.cut_short and self._now() > options.time_limit_s:
            progress.cut_short = True
            progress.say(self._now(), f"the time is over after {done} of {progress.total} requests")
            self._stop()
            self._news_s = now_s
        span_s = max(options.requests[-1].at_s, 1e-3)
        next_due_s = self._started_s + options.requests[min(done, progress.total - 1)].at_s / span_s * options.seconds
        if progress.cut_short and now_s > self._news_s + STOP_TIMEOUT_S:
            progress.fail(f"a client did not stop within {STOP_TIMEOUT_S:.0f} s")
        elif now_s > max(next_due_s, self._news_s) + CLIENT_TIMEOUT_S:
            progress.fail(f"no client has answered for {CLIENT_TIMEOUT_S:.0f} s")

    def _stop(self) -> None:
        """Ask the clients to end after the request that they are at."""
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has ended already
                worker.pipe.send(None)

    # ---- the daemon

    def _look_after_daemon(self) -> None:
        """Look at its status; kill it when it is time, and start it again."""
        progress, options = self.progress, self._options
        if self._down_until_s is not None:
            self._bring_back()
            return
        self._take_sample()
        if self._daemon.ended is not None:
            progress.fail(f"the daemon ended by itself (status {self._daemon.ended}): {self._daemon.last_words()}")
            return
        half = len(progress.outcomes) >= progress.total // 2
        half = half or (options.time_limit_s is not None and self._now() > options.time_limit_s / 2)
        if options.kill and progress.killed_at_s is None and half and progress.outcomes:
            progress.killed_at_s = self._now()
            self._daemon.kill()
            progress.end_boot()
            progress.lose_memory(progress.killed_at_s)
            progress.say(progress.killed_at_s, "the daemon was killed (SIGKILL)")
            self._down_until_s = time.monotonic() + DOWN_S

    def _bring_back(self) -> None:
        """Start a killed daemon when its pause is over, and see whether it answers."""
        progress = self.progress
        assert self._down_until_s is not None and progress.killed_at_s is not None
        if time.monotonic() < self._down_until_s:
            return
        if self._daemon.process is None:
            # On this thread: the daemon dies with the thread that launched it.
            self._daemon.launch()
        if self._daemon.ended is not None:
            progress.fail(f"the daemon did not come back: {self._daemon.last_words()}")
        elif (blocks := self._take_sample()) is not None:
            self._down_until_s = None
            progress.back_at_s = self._now()
            progress.restarts += 1
            progress.recovered_blocks = blocks
            progress.say(progress.back_at_s, f"the daemon is back with {blocks:,} blocks from NVMe")
        elif self._now() > progress.killed_at_s + RESTART_TIMEOUT_S:
            progress.fail(f"the daemon did not come back within {RESTART_TIMEOUT_S:.0f} s: {self._daemon.last_words()}")

    def _await_daemon(self) -> None:
        """The clients have ended while the daemon was away: it must come back all the same."""
        while self._down_until_s is not None and not self.progress.failure:
            self._bring_back()
            time.sleep(POLL_S)

    def _take_sample(self) -> int | None:
        """Look at the tiers and counters. Returns the copies on NVMe, None when it does not answer."""
        try:
            status = self._daemon.status(timeout_s=STATUS_TIMEOUT_S)
        except grpc.RpcError:
            return None
        tiers = {Tier(t.tier - 1): t for t in status.tiers}
        self.progress.add_sample(
            Sample(
                self._now(),
                {tier: t.used_bytes for tier, t in tiers.items()},
                {tier: t.dirty_bytes for tier, t in tiers.items()},
                {tier: t.capacity_bytes for tier, t in tiers.items()},
            )
        )
        self.progress.set_counters(status.counters)
        return int(tiers[Tier.NVME].copies) if Tier.NVME in tiers else 0

    def _clean_up(self) -> None:
        """End every process."""
        self._stop()
        for worker in self._workers:
            if worker.process.pid is not None:
                if self.progress.failure or len(self.progress.outcomes) < self.progress.total:
                    worker.process.terminate()
                worker.process.join(2)
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()
                worker.process.close()
            worker.pipe.close()
        if self._daemon.process is not None:
            self._take_sample()
            self.progress.took_s = max(self._now(), 0.0)
        if self._options.keep:
            with contextlib.suppress(Exception):
                self._daemon.stop(20)  # writes down what is only in memory
        self._daemon.kill()
        self._daemon.remove_sockets()
