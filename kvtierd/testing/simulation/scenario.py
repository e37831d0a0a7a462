"""What a seed stands for: the daemon's configuration, its clients, what the disks do, and how each life of the process ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvtierd.config import Config, CpuConfig, NvmeConfig, PolicyConfig, ServerConfig, TenantConfig
from kvtierd.model import Namespace
from kvtierd.testing.simulation.disk import HIDDEN, TOLD, Fault

KIB: Final = 1024
SHAPES: Final = [(4096,), (8192,), (4096, 4096), (5000,), (4096, 12_288, 1)]
"""Bytes of each shard."""
CAPACITIES: Final = (256 * KIB, 512 * KIB, 1024 * KIB)
MAX_CAPACITY_BYTES: Final = max(CAPACITIES)
ENCRYPTED_OF: Final = 4
"""One seed of so many encrypts what is on NVMe: the last."""
FOLDERS: Final = ("/simulated/a", "/simulated/b")
KINDS: Final = {"none": (), "told": TOLD, "hidden": HIDDEN, "all": (*TOLD, *HIDDEN)}


@dataclass
class Life:
    """One run of the process."""

    config: Config
    clients: int
    operations: int
    rates: dict[Fault, float]
    die_in_steps: int
    """Turns of threads until the process is killed; -1 to end in good order."""
    die_after_evictions: int
    """Evictions that are confirmed until the process is killed, a moment later; 0 for not."""
    power_cut: bool
    """The kill takes the machine along."""
    memory_faults: float
    slow_s: float
    latency_s: float
    """Of most operations of a disk."""


@dataclass
class Scenario:
    """Everything that is drawn before the first event."""

    tenants: list[str]
    namespaces: list[Namespace]
    folders: list[str]
    disk_bytes: int
    encrypted: bool
    """What is on NVMe is encrypted."""
    lives: list[Life] = field(default_factory=list)


def draw_scenario(seed: int, draw: random.Random | None = None) -> Scenario:
    """The scenario of a seed, drawn from its numbers, of which a run goes on to use the rest."""
    draw = random.Random(seed) if draw is None else draw
    shapes = draw.sample(SHAPES, draw.choice([1, 1, 2]))
    folders = list(FOLDERS[: draw.choice([1, 1, 2])])
    capacity = draw.choice(CAPACITIES)
    scenario = Scenario(
        tenants=["a", "b", "c"][: draw.choice([1, 2, 2, 3])],
        namespaces=[Namespace(shard_bytes=shape, model="simulated") for shape in shapes],
        folders=folders,
        disk_bytes=int(capacity * draw.choice([1.2, 2.0, 4.0])),
        encrypted=seed % ENCRYPTED_OF == ENCRYPTED_OF - 1,
    )
    base = _base(draw)
    faults = KINDS[draw.choice(list(KINDS))]
    for _ in range(draw.choice([1, 2, 2])):
        if draw.random() < 0.3:
            capacity = draw.choice(CAPACITIES)
        scenario.lives.append(_life(draw, scenario, base, capacity, faults))
    return scenario


def _life(draw: random.Random, scenario: Scenario, base: dict[str, Any], capacity: int, faults: tuple[Fault, ...]) -> Life:
    rate = draw.choice([0.005, 0.02, 0.08])
    killed = draw.random() < 0.7
    return Life(
        config=_config(draw, scenario, base, capacity),
        clients=draw.randint(2, 5),
        operations=14,
        rates={fault: rate * (3 if fault is Fault.SHORT else 1) for fault in faults if draw.random() < 0.6},
        die_in_steps=int(draw.expovariate(1 / 400)) if killed else -1,
        power_cut=killed and draw.random() < 0.4,
        die_after_evictions=draw.randint(1, 3) if killed and draw.random() < 0.3 else 0,
        memory_faults=draw.choice([0.0, 0.0, 0.0, 0.1]),
        slow_s=draw.choice([0.001, 0.02, 0.3]),
        latency_s=draw.choice([0.0005, 0.0005, 0.005, 0.02]),
    )


def _base(draw: random.Random) -> dict[str, Any]:
    """What stays over restarts."""
    return {
        "segment": draw.choice([32, 64, 128]) * KIB,
        "direct": draw.choice(["auto", "off"]),
        "snapshot_journal": draw.choice([1, 4, 64]) * KIB,
    }


def _config(draw: random.Random, scenario: Scenario, base: dict[str, Any], capacity: int) -> Config:
    """A daemon that is far smaller than the configuration would allow, so that little traffic fills it."""
    memory = draw.choice([128, 256, 512]) * KIB
    arc = draw.random() < 0.2
    quotas = {
        name: TenantConfig(
            cpu_quota=draw.choice([None, 64 * KIB, 128 * KIB]),
            nvme_quota=draw.choice([None, None, 128 * KIB, 256 * KIB]),
            cpu_ttl=draw.choice([None, 1.0]),
        )
        for name in scenario.tenants
        if draw.random() < 0.4
    }
    return Config.model_construct(
        cpu=CpuConfig(
            capacity=memory, extent=draw.choice([16, 32]) * KIB, ttl=draw.choice([0.5, 3.0, None]),
            free_target=draw.choice([0.0, 0.15, 0.5, 0.9]), prefault=False,
        ),
        nvme=NvmeConfig(
            capacity=capacity, folders=[Path(f) for f in scenario.folders], ttl=draw.choice([None, None, 5.0]), reserve=0,
            depth=draw.choice([2, 4, 8]), io="threads", max_bytes_in_flight=draw.choice([16, 64, 256]) * KIB,
            admission=draw.choice(["all", "all", "second-use"]), second_use_window=draw.choice([1.0, 60.0]),
            write_budget=draw.choice([0, 0, 128 * KIB]), **base,
        ),
        policy=PolicyConfig(eviction="arc" if arc else "lru", turn_bonus=0.0 if arc else draw.choice([0.0, 2.0])),
        server=ServerConfig(max_tickets=draw.choice([4, 64]), max_ticket_share=draw.choice([0.3, 0.6, 1.0])),
        tenants=quotas,
    )  # fmt: skip
