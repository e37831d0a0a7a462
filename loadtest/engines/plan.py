"""What a run does and when: requests, and the faults between them."""

from __future__ import annotations

import argparse
import heapq
import math
import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvtierd.model import Namespace
from kvtierd.replay.trace import TRACE_BLOCK_TOKENS, Request, read_trace
from loadtest.workloads import parser_of, trace

MAX_FAULTS = 32
DEFAULT_S = 2.0
MAX_REQUESTS = 200_000
MIX = "save=20,load=70,evict=10"
TENANT = "default"
"""Who asks where a trace names nobody."""


class PlanError(Exception):
    """A run that cannot be. The text says why."""


class Step(Enum):
    """What a request can do, in this order; the value is the word of --mix."""

    LOAD = "load"
    """Look up, and load what is held."""
    SAVE = "save"
    """Save what it has not loaded."""
    EVICT = "evict"
    """Evict its blocks."""


AS_AN_ENGINE = (Step.LOAD, Step.SAVE)
Mix = tuple[tuple[Step, float], ...]
"""Steps with their weights."""


class FaultKind(Enum):
    """What can befall a run; the value is what the report calls it."""

    KILL = "SIGKILL of the daemon, started again"
    STOP = "SIGSTOP of the daemon"
    CLIENT = "SIGKILL of a client process"
    DISK_FULL = "NVMe folder full (ENOSPC)"
    DISK_ERRORS = "NVMe folder failing (EIO, flipped bits)"

    @property
    def word(self) -> str:
        """As the command line has it."""
        return self.name.lower().replace("_", "-")


DISK_KINDS = (FaultKind.DISK_FULL, FaultKind.DISK_ERRORS)


@dataclass(frozen=True)
class Fault:
    """One fault."""

    at_s: float
    kind: FaultKind
    lasts_s: float = DEFAULT_S
    """Until the daemon is started again, goes on, or the disk is well. A client is replaced at once."""


@dataclass(frozen=True)
class Item:
    """One request of a run."""

    number: int
    due_s: float
    """After the begin of the run. Latencies count from here."""
    tenant: str
    blocks: tuple[int, ...]
    steps: tuple[Step, ...]
    """What it does."""


@dataclass(frozen=True)
class Job:
    """What one client process does."""

    number: int
    address: str
    items: list[Item]
    engines: int
    threads: int
    """Of each engine: requests that it works on at the same time."""
    shards: int
    shard_bytes: int
    seed: int

    @property
    def namespace(self) -> Namespace:
        """What its engines attach with."""
        return Namespace(shard_bytes=(self.shard_bytes,) * self.shards, model="load test", revision=f"seed-{self.seed}")


@dataclass(frozen=True)
class Settings:
    """What was asked for."""

    seconds: float
    speedup: float
    processes: int
    engines: int
    threads: int
    shards: int
    shard_bytes: int
    cpu: str
    nvme: str
    evict: float
    seed: int
    late_limit_s: float
    faults: tuple[Fault, ...] = ()
    source: str = ""
    mix: Mix = ()
    """Of requests that do one step each; without one they do what an engine does."""

    def job(self, number: int, address: str, items: list[Item]) -> Job:
        """The work of one process."""
        engines = len(range(number, self.engines, self.processes))
        return Job(number, address, items, engines, self.threads, self.shards, self.shard_bytes, self.seed)


def parse_mix(text: str) -> Mix:
    """``"save=20,load=70,evict=10"``: weights of requests that do one step each; what is not named is not done.

    Raises:
        PlanError: names the part that is none.
    """
    words = {step.value: step for step in Step}
    weights: dict[Step, float] = {}
    for part in text.split(","):
        word, _, weight = (piece.strip() for piece in part.partition("="))
        try:
            step, value = words[word], float(weight)
        except (KeyError, ValueError):
            raise PlanError(f"--mix: {part!r} is not STEP=WEIGHT with a step of {', '.join(words)}, as in {MIX}") from None
        if not (math.isfinite(value) and value >= 0):
            raise PlanError(f"--mix: the weight of {part!r} is not a number from 0 on")
        if step in weights:
            raise PlanError(f"--mix: {word} is there twice")
        weights[step] = value
    if not any(weights.values()):
        raise PlanError("--mix: all weights are 0: one at least must be above")
    return tuple((step, weight) for step, weight in weights.items() if weight)


def parse_faults(text: str) -> tuple[Fault, ...]:
    """``"20:kill:1 35:stop:2 50:client 60:disk-full:5"``: when, what, and for how many seconds.

    Raises:
        PlanError: names the part that is none.
    """
    kinds = {kind.word: kind for kind in FaultKind}
    faults = []
    for part in text.split():
        at, _, rest = part.partition(":")
        word, _, lasts = rest.partition(":")
        try:
            fault = Fault(float(at), kinds[word], float(lasts or DEFAULT_S))
        except (KeyError, ValueError):
            raise PlanError(
                f"the fault {part!r} is not SECOND:KIND or SECOND:KIND:SECONDS with a kind of {', '.join(kinds)}"
            ) from None
        if not (0 <= fault.at_s < float("inf") and 0 <= fault.lasts_s < float("inf")):
            raise PlanError(f"the fault {part!r} has a time that cannot be")
        faults.append(fault)
    faults.sort(key=lambda f: f.at_s)
    if len(faults) > MAX_FAULTS:
        raise PlanError(f"{len(faults)} faults; at most {MAX_FAULTS}")
    last_s: dict[bool, float] = {}
    for fault in faults:
        if fault.kind is FaultKind.CLIENT:
            continue
        disk = fault.kind in DISK_KINDS
        if fault.at_s < last_s.get(disk, 0.0):
            raise PlanError(f"the fault at {fault.at_s:g} s begins before the one ahead of it has ended")
        last_s[disk] = fault.at_s + fault.lasts_s
    return tuple(faults)


def generated(kind: str, seconds: float, rest: list[str]) -> tuple[list[Request], str]:
    """Requests of a generator of ``loadtest/workloads.py``, for so many seconds of its own time.

    Args:
        kind: which.
        seconds: how much is wanted.
        rest: the generator's own options.
    """
    parser = parser_of(kind, argparse.ArgumentParser(prog=f"options of {kind}", add_help=False))
    parser.set_defaults(conversations=None)
    options = parser.parse_args(rest)
    if options.conversations is None:
        options.conversations = max(round(options.rate * seconds), 1)
    requests = []
    for row in trace(kind, options):
        at_s, length, ids = int(row["timestamp"]) / 1000, int(row["input_length"]), row["hash_ids"]  # type: ignore[call-overload]
        if at_s > seconds or len(requests) >= MAX_REQUESTS:
            break
        requests.append(Request(at_s, tuple(ids[: length // TRACE_BLOCK_TOKENS]), str(row["tenant"])))  # type: ignore[index]
    return requests, " ".join([kind, *rest])


def load_requests(path: Path | None, kind: str, settings: Settings, rest: list[str]) -> tuple[list[Request], str]:
    """Requests of a trace or of a generator, as long as the run lasts. Raises PlanError and TraceError."""
    wanted_s = settings.seconds * settings.speedup
    if path is None:
        return generated(kind, wanted_s, rest)
    if rest:
        raise PlanError(f"{' '.join(rest)}: a trace has no options of a generator")
    return [r for r in read_trace(path, MAX_REQUESTS) if r.at_s <= wanted_s], path.name


def items_of(requests: list[Request], settings: Settings) -> list[Item]:
    """The requests in the time of the run."""
    rng = random.Random(f"{settings.seed}/evict")
    steps, weights = [step for step, _ in settings.mix], [weight for _, weight in settings.mix]

    def drawn() -> tuple[Step, ...]:
        if steps:
            return tuple(rng.choices(steps, weights))
        return (*AS_AN_ENGINE, Step.EVICT) if rng.random() < settings.evict else AS_AN_ENGINE

    return [
        Item(number, request.at_s / settings.speedup, request.tenant or TENANT, request.blocks, drawn())
        for number, request in enumerate(request for request in requests if request.blocks)
    ]


def split(items: list[Item], settings: Settings) -> list[list[Item]]:
    """Each process's requests: they go to the engines in turn, whoever's they are."""
    return [
        list(heapq.merge(*(items[engine :: settings.engines] for engine in range(process, settings.engines, settings.processes)),
                         key=lambda item: item.due_s))
        for process in range(settings.processes)
    ]  # fmt: skip
