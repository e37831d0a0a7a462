"""One seed from its first event to the last check."""

from __future__ import annotations

import hashlib
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvtierd.errors import StartupError
from kvtierd.model import Tier
from kvtierd.testing.simulation.contents import Contents
from kvtierd.testing.simulation.disk import Disk
from kvtierd.testing.simulation.files import Files
from kvtierd.testing.simulation.install import installed
from kvtierd.testing.simulation.process import Process
from kvtierd.testing.simulation.scenario import MAX_CAPACITY_BYTES, Life, Scenario, draw_scenario
from kvtierd.testing.simulation.syscalls import SimOs
from kvtierd.testing.simulation.threads import World

STORY_LINES: Final = 60
"""Last events of a run that a failure shows."""
MAX_TOLD_LINES: Final = 100_000
"""Events that are shown of a seed that is looked at alone."""
BLOCK_LINES: Final = 20
"""Last events of each block that it names."""


@dataclass
class Outcome:
    """How a seed went."""

    seed: int
    digest: int
    """Equal for equal runs."""
    events: int
    """Turns of simulated threads."""
    simulated_s: float
    problem: str = ""
    """What was found wrong, in one line; "" for nothing."""
    story: list[str] = field(default_factory=list)
    """What led to it."""

    @property
    def ok(self) -> bool:
        """True when nothing was found wrong."""
        return not self.problem

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.problem or 'ok'} ({self.events} turns, {self.simulated_s:.1f} s simulated)"]
        return "\n".join(lines + self.story)


def run_seed(seed: int, *, tell: bool = False) -> Outcome:
    """Simulate one seed. Whatever goes wrong is in the outcome, with its story; ``tell`` wants all events, whatever the end."""
    world = World(seed, MAX_TOLD_LINES if tell else STORY_LINES)
    run = _Run(world)
    try:
        with _watched_logs(world), installed(world, run.system):
            run.all()
        error = world.failure
    except Exception as e:
        error = world.failure or e
    outcome = Outcome(seed, world.digest, world.steps, world.now - 1000.0)
    if error is not None:
        outcome.problem = f"{type(error).__name__}: {error}"
        outcome.story = _story(run, error)
    elif tell:
        outcome.story = list(world.notes)
    return outcome


def _story(run: _Run, error: BaseException) -> list[str]:
    where = traceback.format_exception(type(error), error, error.__traceback__)
    blocks = run.process.runtime.core.state.story if run.process is not None else ()
    changes = [f"{e.at_s:12.6f}  {e.key[-1]} on {e.tier.name}: {e.start.name} to {e.finish.name} ({e.why})" for e in blocks]
    return [
        "the last events:",
        *run.world.notes,
        "the last changes of copies:",
        *changes[-BLOCK_LINES:],
        "".join(where).rstrip(),
    ]


class _Run:
    """The state of one run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.scenario: Scenario = draw_scenario(world.seed, world.random)
        self.disks = {path: Disk(world, self.scenario.disk_bytes) for path in self.scenario.folders}
        self.files = Files(self.disks)
        self.system = SimOs(world, self.files)
        if self.scenario.encrypted:
            self.system.key = hashlib.sha256(b"simulated").digest()
        self.contents = Contents(world)
        self.process: Process | None = None

    def all(self) -> None:
        """All lives, and the last one without faults."""
        for life in self.scenario.lives:
            self._live(life)
        self._heal()
        self._rest(self.scenario.lives[-1])

    def _process(self, life: Life) -> Process:
        former = self.process
        self.process = process = Process(
            self.world, self.files, self.system, self.contents, life.config, life.memory_faults, life.slow_s
        )
        if former is not None and former.runtime.config.nvme.capacity <= life.config.nvme.capacity:
            # One that did not come as far as to look at its blocks hands on what it was to find itself.
            process.expected = former.on_nvme() if former.recovered else former.expected
        return process

    def _live(self, life: Life) -> None:
        world = self.world
        world.note(f"life: {life.clients} clients, faults {[f.value for f in life.rates]}, dies in {life.die_in_steps} steps")
        for disk in self.disks.values():
            disk.rates, disk.latency_s, disk.healthy = life.rates, life.latency_s, False
            disk.others_bytes = world.random.choice([0, 0, disk.size_bytes // 4])
        process = self._process(life)
        process.evictions_left = life.die_after_evictions
        scenario = self.scenario

        async def work() -> None:
            await process.serve(life.clients, life.operations, scenario.tenants, scenario.namespaces)
            if life.die_in_steps < 0:
                await process.stop()

        try:
            ended = process.run(work(), life.die_in_steps)
        except (StartupError, OSError) as e:
            world.note(f"process: does not start: {e}")
            ended = False
        if not ended and life.power_cut:
            world.note("power: cut")
            self.files.lose_power(world.random)
            self.system.lied = self.system.lied_in_log = True
        self.contents.restarted(forgot=self.system.lied_in_log)
        world.now += world.random.choice([0.0, 0.5, 5.0])

    def _heal(self) -> None:
        for disk in self.disks.values():
            disk.healthy, disk.others_bytes, disk.latency_s = True, 0, 0.0005
            disk.size_bytes = 2 * MAX_CAPACITY_BYTES

    def _rest(self, life: Life) -> None:
        """Faults have stopped: the daemon starts, comes to rest, and keeps what it has over a stop."""
        life.memory_faults = 0.0
        process = self._process(life)
        scenario = self.scenario
        held: list[int] = []
        begun: list[int] = []
        """Copies that were being written when the time for draining was over: each may have come to its end or not."""

        async def work() -> None:
            await process.serve(2, life.operations, scenario.tenants, scenario.namespaces)
            await process.rest()
            await process.stop()
            held.append(len(process.on_nvme()))
            begun.append(process.runtime.core.state.copies[Tier.NVME] - held[0])

        process.run(work())
        self.contents.restarted(forgot=self.system.lied_in_log)
        again = self._process(life)

        async def look() -> None:
            await again.start()
            found = again.runtime.core.state.copies[Tier.NVME]
            text = f"{held[0]} blocks were on NVMe at the stop and {begun[0]} on their way, and {found} after the start"
            assert held[0] <= found <= held[0] + begun[0], text
            await again.scattered_reserve()
            await again.look()

        again.run(look())


@contextmanager
def _watched_logs(world: World) -> Iterator[None]:
    """What the daemon logs is part of the story; an exception that it caught although only a bug raises it is a fault."""
    root = logging.getLogger("kvtierd")
    handler = _Handler(world)
    former = root.level, root.propagate
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    root.propagate = False
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.level, root.propagate = former
        root.setLevel(former[0])


class _Handler(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.WARNING)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.note(f"log: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, OSError):
            self._world.fail(error)
