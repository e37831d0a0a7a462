"""What the core tells its shell to do, and the moves that it waits for. The shell reports each move's result exactly once."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kvtierd.core.block import Copy
from kvtierd.core.slots import NewExtent, RetireExtent
from kvtierd.core.tickets import ReadTicket
from kvtierd.model import Tier


class Priority(IntEnum):
    """Order in which moves get a device: somebody waits for a load, hopes for a prefetch, and never sees a demotion."""

    LOAD = 0
    PREFETCH = 1
    DEMOTE = 2


@dataclass(slots=True, eq=False)
class Move:
    """Copying one block from one tier to another. ``src`` is pinned and ``dst`` is FILLING until the result is in.

    Within CPU memory ``dst`` is a place (``core/packing.py``); shards whose slots are the same in both do not move.
    """

    move_id: int
    src: Copy
    dst: Copy
    priority: Priority
    started_s: float
    why: str
    size_bytes: int
    """Payload over all shards."""
    drop_source: bool = False
    """True when the source goes once it is clean, unless somebody used the block meanwhile."""
    waiters: list[tuple[ReadTicket, int]] = field(default_factory=list)

    @property
    def is_within(self) -> bool:
        """True when the block stays on its tier."""
        return self.src.tier is self.dst.tier

    @property
    def rises(self) -> bool:
        """True when the block goes on from CPU memory to GPU memory."""
        return self.src.tier is Tier.CPU and self.dst.tier is Tier.HBM


@dataclass(frozen=True, slots=True)
class StartMoves:
    """Start moves of one direction and priority, also within CPU memory; slots that follow each other may be moved in one I/O."""

    src_tier: Tier
    dst_tier: Tier
    priority: Priority
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """A copy on NVMe is gone: record it before its slots are written again."""

    realm_id: int
    key: bytes
    generation: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Renew:
    """A copy on NVMe expires later than its record says: record it."""

    realm_id: int
    key: bytes
    generation: int
    slots: tuple[int, ...]
    expires_s: float
    """On the core's clock; NO_END when it does not expire any more."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A load or prefetch has news for its caller."""

    ticket: ReadTicket


@dataclass(frozen=True, slots=True)
class SpaceFreed:
    """Somebody who was refused for lack of space may try again."""


Command = StartMoves | Forget | Renew | Progress | SpaceFreed | NewExtent | RetireExtent
