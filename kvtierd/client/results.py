"""What the client's calls answer. Plain values: no result needs the daemon any more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from kvtierd.client.breaker import BreakerState
from kvtierd.errors import Reason
from kvtierd.model import Tier

UNAVAILABLE: Final = "UNAVAILABLE"
"""Rejection: there was no daemon, or it went away."""
DEADLINE: Final = "DEADLINE"
"""Rejection: the deadline passed before the block was copied or its commit was confirmed."""
EVICTED: Final = "EVICTED"
"""Rejection: the block was evicted while it was filled, or its extent was revoked."""


PASSING: Final = frozenset(
    [
        Reason.BUSY,
        Reason.QUOTA,
        Reason.LIMIT,
        Reason.DRAINING,
        Reason.DEADLINE,
        Reason.IO,
        Reason.CORRUPT,
        Reason.NOT_FOUND,
        Reason.OVERLOADED,
        Reason.INTERNAL,
        Reason.UNKNOWN_SESSION,
        Reason.UNKNOWN_TICKET,
    ]
)
"""Refusals that a cache's user lives with as a miss. The others are mistakes of the caller and raise RequestError."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What is held."""

    held: int = 0
    """Length of the prefix held, in keys; with ``each``, the number of keys held."""
    tiers: bytes = b""
    """One byte a key (the prefix only, or every key with ``each``): bit 0 HBM, bit 1 CPU, bit 2 NVMe."""
    reason: Reason | None = None
    """Why the daemon gave no full answer; None when it did. UNSPECIFIED stands for "no daemon"."""


@dataclass(slots=True)
class SaveResult:
    """How a save ended. ``saved + held + sum(rejected.values())`` is the number of keys asked for."""

    saved: int = 0
    """Blocks copied and published by this call."""
    held: int = 0
    """Blocks that were already here."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Blocks not saved by reason: a ``SaveOutcome`` without its prefix ("BUSY", "QUOTA", "IN_PROGRESS", …), "UNAVAILABLE",
    "DEADLINE" or "EVICTED". A block rejected by "DEADLINE" may still have been published."""

    @property
    def complete(self) -> bool:
        """True when every block is in the cache now."""
        return not self.rejected


@dataclass(slots=True)
class LoadResult:
    """How a load ended. Buffers of blocks that are not loaded have unspecified content."""

    loaded: int = 0
    """Length of the prefix loaded, in keys; with ``each``, the number of blocks loaded."""
    indexes: frozenset[int] = frozenset()
    """Positions of the loaded blocks; ``range(loaded)`` without ``each``."""
    by_tier: dict[Tier, int] = field(default_factory=dict)
    """Loaded blocks by the tier that each was on when the load arrived."""
    reason: Reason | None = None
    """Why the rest is missing; None when all was loaded. UNSPECIFIED stands for "no daemon", NOT_FOUND for an ordinary miss."""


@dataclass(slots=True)
class LoadedBytes:
    """Blocks that came with their bytes."""

    loaded: int = 0
    """As in `LoadResult`."""
    blocks: dict[int, list[bytes]] = field(default_factory=dict)
    """Position in the request to one bytes object a shard. Only whole blocks."""
    reason: Reason | None = None
    """As in `LoadResult`."""


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """State of a client at one moment."""

    attached: bool
    """True when there is a session and calls go to it."""
    breaker: BreakerState
    """State of the circuit breaker."""
    boot_epoch: int
    """Boot of the daemon that the session belongs to; 0 without a session."""
    daemon_version: str
    """Version of the daemon; empty without a session."""
    draining: bool
    """True when the daemon has said that it is shutting down."""
    error: str
    """Why there is no session; empty when there is one."""


def told(result: object) -> dict[str, int | str]:
    """What a span says of a result: how many blocks it is about, and why there are not more."""
    found: dict[str, int | str] = {}
    for name in ("held", "saved", "loaded"):
        count = getattr(result, name, None)
        if isinstance(count, int):
            found[name] = count
    for tier, count in getattr(result, "by_tier", {}).items():
        found[f"loaded_{tier.name.lower()}"] = count
    reason = getattr(result, "reason", None)
    if isinstance(reason, Reason):
        found["reason"] = reason.name.lower()
    return found
