"""What a simulated disk does wrong, and how long it takes. Drawn from the run's seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvtierd.testing.simulation.threads import World


class Fault(Enum):
    """What goes wrong with one operation."""

    EIO = "eio"
    ENOSPC = "enospc"
    SHORT = "short"
    """Only a part is moved, and the count says so."""
    TORN = "torn"
    """A write stops within; the count says that all was written."""
    LOST = "lost"
    """A write does nothing; the count says that all was written."""
    MISDIRECTED = "misdirected"
    """A write goes, or a read comes from, some pages further on."""
    BIT_ROT = "bit_rot"
    """One bit is wrong after a write, for good, or in what a read brings."""


TOLD = (Fault.EIO, Fault.ENOSPC, Fault.SHORT)
"""Faults that the device reports."""
HIDDEN = (Fault.TORN, Fault.LOST, Fault.MISDIRECTED, Fault.BIT_ROT)
"""Faults that it does not."""


@dataclass
class Disk:
    """One device.

    Args:
        world: time and randomness.
        size_bytes: of its file system.
        rates: probability of each fault for each operation.
        latency_s: of most operations; some take a hundred times as long.
    """

    world: World
    size_bytes: int
    rates: dict[Fault, float] = field(default_factory=dict)
    latency_s: float = 0.0005
    others_bytes: int = 0
    """What others have on it."""
    used_bytes: int = 0
    """What the daemon's files take."""
    healthy: bool = True
    """While true nothing goes wrong."""

    @property
    def free_bytes(self) -> int:
        """Room that is left."""
        return max(self.size_bytes - self.others_bytes - self.used_bytes, 0)

    def wait(self) -> None:
        """Take the time of one operation."""
        chance = self.world.random.random()
        self.world.pause(self.latency_s * (0.2 + chance) * (100.0 if chance > 0.98 else 1.0))

    def draw(self, among: tuple[Fault, ...]) -> Fault | None:
        """What goes wrong with an operation, of what can."""
        if self.healthy:
            return None
        for fault, rate in self.rates.items():
            if fault in among and self.world.random.random() < rate:
                return fault
        return None
