"""Tickets: what a session has been granted and has not given back yet.

A ticket is ended by its owner (Commit, Abort, Release, Cancel, Unpin) or by the end of the session. No time-out ends a save
or a load, because a live client may still be copying; deadlines only turn what was never handed out into a miss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kvtierd.core.block import Block, Copy
from kvtierd.core.realm import Realm
from kvtierd.errors import Reason, RequestError

GRANTED: Final = 1
"""Outcome of a key of a Save that got slots (``kvtierd.v1.SaveOutcome``)."""


class Entry(IntEnum):
    """State of one key of a load or prefetch."""

    MISSING = 0
    WAITING = 1
    """Held where its reader cannot read it; that copy is pinned until there is one that it can."""
    READY = 2
    """Readable and pinned, not handed out yet."""
    TAKEN = 3
    """Handed out; the client may be copying."""
    RELEASED = 4


@dataclass(slots=True, eq=False)
class Session:
    """One attached engine (all of its processes) or remote caller."""

    session_id: int
    realm: Realm
    tickets: dict[int, SaveTicket | ReadTicket] = field(default_factory=dict)
    ticket_bytes: int = 0
    """Bytes of blocks that its tickets hold in memory."""
    moving_bytes: int = 0
    """Bytes on their way up that its tickets wait for."""

    @property
    def held_bytes(self) -> int:
        """What counts against the session's share of memory."""
        return self.ticket_bytes + self.moving_bytes

    def ticket(self, ticket_id: int) -> SaveTicket | ReadTicket:
        """An open ticket. Raises RequestError UNKNOWN_TICKET."""
        found = self.tickets.get(ticket_id)
        if found is None:
            raise RequestError(Reason.UNKNOWN_TICKET, f"ticket {ticket_id} is not open in this session")
        return found

    def check_tickets(self, limit: int) -> None:
        """Raise RequestError LIMIT when as many tickets are open as may be."""
        if len(self.tickets) >= limit:
            raise RequestError(Reason.LIMIT, f"{len(self.tickets)} tickets are open; commit, abort or release some first")


@dataclass(slots=True, eq=False)
class SaveTicket:
    """Slots that a client fills. ``open[i]`` is None once key i was committed or aborted."""

    ticket_id: int
    session: Session
    realm: Realm
    open: list[Copy | None]
    left: int
    ttl_s: float | None
    """Life of its blocks from their commit on; None when they do not expire."""
    held: list[Block] = field(default_factory=list)
    """The request's blocks that were there already, root first; some of them may still be filled by its own earlier saves."""
    began_s: float = 0.0
    """When it was made."""


@dataclass(slots=True, eq=False)
class ReadTicket:
    """Blocks that a client reads or will read."""

    ticket_id: int
    session: Session
    realm: Realm
    prefetch: bool
    each: bool
    deadline_s: float
    copies: list[Copy | None]
    """The pinned copy of each key: one that its reader cannot read while WAITING, another one once READY."""
    entries: bytearray
    """An :class:`Entry` a key."""
    found_on: bytes
    """Mask of the tier that each key was found on when the ticket was made."""
    devices: tuple[int, ...] = ()
    """The GPU of each shard whose memory its reader can open; () for none."""
    keeps: bool = False
    """Its reader gives nothing back before it has all that it gets."""
    waiting: int = 0
    cursor: int = 0
    """Keys before this one were handed out or are missing."""
    open: int = 0
    """Keys that are not RELEASED or MISSING."""
    reason: Reason = Reason.UNSPECIFIED
    """Why the rest is missing."""
    closed: bool = False
    began_s: float = 0.0
    """When it was made."""
    risen_bytes: int = 0
    """What it has sent to GPU memory."""

    def check_taken(self, index: int) -> None:
        """Raise RequestError UNKNOWN_TICKET unless key ``index`` was handed out and not released: only then is it pinned."""
        if self.entries[index] != Entry.TAKEN:
            raise RequestError(Reason.UNKNOWN_TICKET, f"index {index} of ticket {self.ticket_id} was released")

    @property
    def gives_back(self) -> bool:
        """True when room that its session lacks may come from it."""
        return not self.prefetch and not (self.keeps and self.waiting)

    @property
    def ready(self) -> int:
        """Keys whose bytes are in memory or were handed out."""
        return sum(e in (Entry.READY, Entry.TAKEN, Entry.RELEASED) for e in self.entries)


@dataclass(slots=True, eq=False)
class PinTicket:
    """Copies that an operator or client keeps in place until a time."""

    ticket_id: int
    tenants: set[str]
    copies: list[Copy]
    expires_s: float
    size_bytes: list[int]
    """By tier."""
    tenant: str | None
    """Name of the tenant who has pinned them; None for an operator. He may be forgotten meanwhile, and come back."""


@dataclass(frozen=True, slots=True)
class SaveGrant:
    """Answer to a Save: one outcome a key (``kvtierd.v1.SaveOutcome``) and the slots of the granted keys in order."""

    ticket_id: int
    outcomes: list[int]
    slots: list[int]
    held: list[Block]

    def keep(self, left: list[int], refused: int) -> SaveGrant:
        """This grant with only these of its granted keys, counted among the granted; the others get the outcome ``refused``."""
        granted = [i for i, outcome in enumerate(self.outcomes) if outcome == GRANTED]
        if len(left) == len(granted):
            return self
        width = len(self.slots) // len(granted)
        outcomes = list(self.outcomes)
        for n in set(range(len(granted))).difference(left):
            outcomes[granted[n]] = refused
        slots = [slot for n in left for slot in self.slots[n * width : (n + 1) * width]]
        return SaveGrant(self.ticket_id if left else 0, outcomes, slots, self.held)
