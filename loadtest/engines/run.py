"""Runs it: daemon, client processes, faults; takes in what they tell."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from loadtest.engines.engine import Busy, Record, work
from loadtest.engines.plan import Fault, FaultKind, Item, Settings, split
from loadtest.engines.watch import Event, Watched

LEAD_S = 0.5
POLL_S = 0.1
READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
"""How long requests may take that are under way when the last one has begun."""


class RunError(Exception):
    """A run that cannot go on. The text says why."""


@dataclass
class Child:
    """One client process."""

    number: int
    """Of its share of the requests: a replacement has that of the process that was killed."""
    process: BaseProcess
    pipe: Connection
    killed: bool = False
    ended: bool = False


@dataclass
class Progress:
    """What has come of a run so far."""

    total: int
    seconds: float
    now_s: float = 0.0
    records: list[Record] = field(default_factory=list)
    busy: dict[int, list[Busy]] = field(default_factory=dict)
    """By process."""
    events: list[Event] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Run:
    """One run; :meth:`run` once.

    Args:
        folder: empty, for daemon and disk.
        settings: how.
        items: what.
        show: called several times a second.
    """

    def __init__(self, folder: Path, settings: Settings, items: list[Item], show: Callable[[Progress, Watched], None]) -> None:
        self._settings = settings
        self._shares = split(items, settings)
        self._show = show
        self.watched = Watched(folder, settings)
        self.progress = Progress(len(items), settings.seconds)
        self._children: list[Child] = []
        self._spawn_context = multiprocessing.get_context("spawn")
        self._to_come = list(settings.faults)
        self._to_end: list[tuple[float, Event, Callable[[], None]]] = []
        self._began_s = 0.0

    def run(self) -> Progress:
        """All of it.

        Raises:
            RunError: daemon or clients do not start, or end by themselves.
            StartupError: the daemon does not start.
        """
        try:
            self.watched.start()
            for number in range(self._settings.processes):
                self._spawn(number)
            for child in self._children:
                self._await_ready(child)
            self._began_s = time.monotonic() + LEAD_S
            self.watched.begin(self._began_s)
            for child in self._children:
                child.pipe.send(self._began_s)
            self._follow()
        finally:
            for child in self._children:
                child.process.kill()
                child.process.join()
            self.watched.close()
        return self.progress

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _spawn(self, number: int, after_s: float = 0.0) -> Child:
        items = [item for item in self._shares[number] if item.due_s >= after_s]
        mine, theirs = self._spawn_context.Pipe()
        job = self._settings.job(number, self.watched.daemon.address, items)
        process = self._spawn_context.Process(target=work, args=(job, theirs), name=f"clients {number}", daemon=True)
        process.start()
        theirs.close()
        child = Child(number, process, mine)
        self._children.append(child)
        return child

    def _await_ready(self, child: Child) -> None:
        if not child.pipe.poll(READY_TIMEOUT_S) or child.pipe.recv() != "ready":
            raise RunError(f"{child.process.name} did not start within {READY_TIMEOUT_S:.0f} s")

    def _follow(self) -> None:
        last_due_s = max((share[-1].due_s for share in self._shares if share), default=0.0)
        until_s = max(last_due_s, self._settings.seconds) + END_TIMEOUT_S
        while not all(child.ended for child in self._children) or self._to_end:
            self.progress.now_s = self._now()
            self._faults()
            pipes = {child.pipe: child for child in self._children if not child.ended}
            for pipe in wait(list(pipes), timeout=POLL_S) if pipes else []:
                assert isinstance(pipe, Connection)
                self._take(pipes[pipe])
            if not pipes:
                time.sleep(POLL_S)
            if self.watched.ended is not None:
                raise RunError(f"the daemon ended by itself (status {self.watched.ended}):\n{self.watched.daemon.log()[-2000:]}")
            if self._now() > until_s:
                raise RunError(f"requests have not ended {END_TIMEOUT_S:.0f} s after the last one was due")
            self._show(self.progress, self.watched)

    def _take(self, child: Child) -> None:
        try:
            message = child.pipe.recv()
        except (EOFError, OSError):
            child.process.join()
            if not child.killed:
                raise RunError(f"{child.process.name} ended by itself (status {child.process.exitcode})") from None
            child.ended = True
            return
        if message == "ready":  # a replacement
            child.pipe.send(self._began_s)
        elif message == "ended":
            child.ended = True
        else:
            records, busy = message
            self.progress.records += records
            self.progress.busy.setdefault(child.process.pid or 0, []).append(busy)

    def _faults(self) -> None:
        now_s = self._now()
        for entry in [entry for entry in self._to_end if entry[0] <= now_s]:
            self._to_end.remove(entry)
            entry[2]()
            entry[1].ended_s = self._now()
        while self._to_come and self._to_come[0].at_s <= now_s:
            self._begin(self._to_come.pop(0))

    def _begin(self, fault: Fault) -> None:
        event = Event(fault, self._now())
        self.progress.events.append(event)
        if fault.kind is FaultKind.CLIENT:
            self._replace_client()
            event.ended_s = self._now()
            return
        self._to_end.append((fault.at_s + fault.lasts_s, event, self.watched.inflict(fault)))

    def _replace_client(self) -> None:
        """Kill the first process, with all of its engines, and start another one for what is due from now on."""
        victim = next((child for child in self._children if not child.ended and not child.killed), None)
        if victim is None:
            self.progress.notes.append("no client process was left to be killed")
            return
        victim.killed = True
        victim.process.kill()
        while not victim.ended and victim.pipe.poll(0):
            self._take(victim)
        self._spawn(victim.number, self._now())
