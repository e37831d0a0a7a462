"""What befalls the daemon in one round: drawn from the campaign's seed and the round's number alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvtierd.testing.faults.disk import DiskFault

RUN_S: Final = (0.05, 1.6)
"""Time under load until the daemon dies, from and to."""


class Kind(Enum):
    """How a round ends."""

    KILL = "SIGKILL"
    DRAIN = "SIGKILL while a SIGTERM is served"
    START = "SIGKILL, and again while the next daemon starts"
    REPORTED = "the disk answers with errors"
    HIDDEN = "the disk loses and tears writes without a word"
    POWER = "the power is cut: writes that were not synced are lost"
    KEY = "SIGKILL, and the next daemon has another key"


_WITHOUT_DISK: Final = ((Kind.KILL, 6), (Kind.DRAIN, 2), (Kind.START, 2))
_WITH_DISK: Final = ((Kind.KILL, 7), (Kind.DRAIN, 2), (Kind.START, 3), (Kind.REPORTED, 4), (Kind.HIDDEN, 2), (Kind.POWER, 3))
_ENCRYPTED: Final = ((Kind.KEY, 2),)
_REPORTED: Final = (
    DiskFault.WRITE_EIO, DiskFault.WRITE_ENOSPC, DiskFault.WRITE_SHORT, DiskFault.READ_EIO, DiskFault.READ_SHORT,
    DiskFault.READ_FLIP, DiskFault.SYNC_EIO, DiskFault.MAKE_ENOSPC, DiskFault.RENAME_EIO,
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One round."""

    number: int
    kind: Kind
    run_s: float
    rates: dict[DiskFault, float] = field(default_factory=dict)
    only: str = ""
    """Faults befall only paths that contain this."""
    faulty_start: bool = False
    """The next daemon starts while the disk still fails."""
    kill_client: bool = False
    at_once: bool = False
    """The round does not wait until every client has found the daemon again."""
    start_kills_s: tuple[float, ...] = ()
    """How long after its launch a daemon is killed, before one may start."""
    lost_share: float = 0.0
    """Of the unsynced pages, what a cut of the power loses."""

    @property
    def is_honest(self) -> bool:
        """True when every block that is listed afterwards must be there: nothing but the daemon has failed."""
        return self.kind in (Kind.KILL, Kind.DRAIN, Kind.START, Kind.KEY)

    def __str__(self) -> str:
        rates = ", ".join(f"{fault.name.lower()} {rate:.3f}" for fault, rate in self.rates.items())
        where = f" on *{self.only}*" if self.only else ""
        return f"round {self.number}: {self.kind.value} after {self.run_s:.2f} s" + (f" ({rates}{where})" if rates else "")


def draw(seed: int, number: int, *, disk: bool, encrypted: bool = False) -> Plan:
    """The plan of a round.

    Args:
        seed: of the campaign.
        number: of the round.
        disk: True where faults can be put below the daemon.
        encrypted: True where the NVMe tier has a key.
    """
    rng = random.Random(f"{seed}/{number}")
    kinds, weights = zip(*(_WITH_DISK if disk else _WITHOUT_DISK), *(_ENCRYPTED if encrypted else ()), strict=True)
    kind = rng.choices(kinds, weights)[0]
    rates: dict[DiskFault, float] = {}
    only = ""
    if kind is Kind.REPORTED:
        rates = {fault: rng.choice([0.01, 0.1, 0.6]) for fault in rng.sample(_REPORTED, rng.randrange(1, 4))}
        only = rng.choice(["", "", "segment-", "journal-", "snapshot-", "json", "/b/"])
    elif kind is Kind.HIDDEN:
        rates = {fault: rng.choice([0.01, 0.1]) for fault in (DiskFault.WRITE_TORN, DiskFault.WRITE_LOST, DiskFault.READ_FLIP)}
        only = rng.choice(["", "segment-", "journal-"])
    return Plan(
        number,
        kind,
        rng.uniform(*RUN_S),
        rates,
        only,
        faulty_start=bool(rates) and rng.random() < 0.3,
        kill_client=rng.random() < 0.3,
        start_kills_s=tuple(rng.uniform(0.1, 1.1) for _ in range(rng.randrange(1, 4))) if kind in (Kind.START, Kind.KEY) else (),
        lost_share=rng.choice([0.1, 0.5, 1.0]) if kind is Kind.POWER else 0.0,
        at_once=rng.random() < 0.2,
    )
