"""Blocks and their copies: every state, every allowed change, every invariant.

A *block* is the KV of one run of tokens for all shards. It has at most one live *copy* a tier. States of a copy::

                  commit / move done
       +---------+ ----------------> +-------+
       | FILLING |                   | READY |<--- recovered after a restart
       +---------+                   +-------+
              |                        |   |
              | aborted, failed,       |   | evicted while
              | evicted                |   | somebody uses it
              v                        |   v
            +---------------------------------+
            | DOOMED: out of the index, slots |
            | kept until the last pin is gone |
            +---------------------------------+
                           |           |
                           v           v evicted
                         ABSENT      ABSENT

Who performs a change: FILLING starts with a granted Save (client writes) or a move (executor writes). READY follows from
Commit or a finished move. Everything else is an eviction, an abort, a failure or the end of a session.

Invariants (``check_block`` restates them):

* a FILLING copy has exactly one pin, its writer's;
* a READY copy without pins is in exactly one LRU list of its realm, in the lane of its block; no other copy is in any;
* ``mask`` has exactly the bits of the READY copies; a block in the index has at least one copy;
* a DOOMED copy has at least one pin and is no longer reachable from its block.

A block may have an expiry (``core/expiry.py``): then it is evicted as by a request, with the reason "expired".
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvtierd.model import NO_END, Tier

if TYPE_CHECKING:
    from kvtierd.core.admission import Prefix
    from kvtierd.core.realm import Realm


class CopyState(IntEnum):
    """State of a copy; ABSENT is the state before the first and after the last, and of a place (``core/packing.py``)."""

    ABSENT = 0
    FILLING = 1
    READY = 2
    DOOMED = 3


TRANSITIONS: Final = frozenset(
    {
        (CopyState.ABSENT, CopyState.FILLING),  # a Save is granted, or a move starts
        (CopyState.ABSENT, CopyState.READY),  # recovered after a restart
        (CopyState.FILLING, CopyState.READY),  # Commit, or the move ended well
        (CopyState.FILLING, CopyState.DOOMED),  # Abort, session ended, the move failed, or evicted while somebody writes
        (CopyState.READY, CopyState.ABSENT),  # evicted
        (CopyState.READY, CopyState.DOOMED),  # evicted while somebody reads
        (CopyState.DOOMED, CopyState.ABSENT),  # the last user let go
    }
)


class Block:
    """One block: its key, where its copies are, when it was last used and when it expires. Kept small: there are millions.

    ``lane`` is the lane of every order that its copies are in (``core/order.py``); ``prefix`` are the blocks that NVMe admits
    together with it (``core/admission.py``), None where nobody has asked.
    """

    __slots__ = ("cpu", "expires_s", "hbm", "key", "lane", "mask", "nvme", "prefix", "realm", "used_at_s")

    def __init__(self, key: bytes, realm: Realm, used_at_s: float) -> None:
        self.key = key
        self.realm = realm
        self.used_at_s = used_at_s
        self.expires_s = NO_END
        self.mask = 0
        self.lane = 0
        self.prefix: Prefix | None = None
        self.hbm: Copy | None = None
        self.cpu: Copy | None = None
        self.nvme: Copy | None = None

    def copy_on(self, tier: Tier) -> Copy | None:
        """The live copy on a tier."""
        return self.nvme if tier is Tier.NVME else self.cpu if tier is Tier.CPU else self.hbm

    def set_copy(self, tier: Tier, copy: Copy | None) -> None:
        """Attach or detach the copy on a tier."""
        if tier is Tier.NVME:
            self.nvme = copy
        elif tier is Tier.CPU:
            self.cpu = copy
        else:
            self.hbm = copy

    def copies(self) -> list[Copy]:
        """Live copies, fastest tier first."""
        return [c for c in (self.hbm, self.cpu, self.nvme) if c is not None]


class Copy:
    """One copy of a block on one tier; also a node of its LRU list.

    ``expires_s`` is, for a copy on NVMe, the block's expiry as its record on disk has it.
    """

    __slots__ = ("block", "expires_s", "generation", "lru", "newer", "older", "pins", "slots", "state", "tier")

    def __init__(self, block: Block, tier: Tier, slots: int | tuple[int, ...], generation: int = 0) -> None:
        self.block = block
        self.tier = tier
        self.state = CopyState.ABSENT
        self.slots = slots
        self.pins = 0
        self.generation = generation
        self.expires_s = NO_END
        self.older: Copy | None = None
        self.newer: Copy | None = None
        self.lru: LruList | None = None

    def all_slots(self) -> tuple[int, ...]:
        """Slots in shard order. A single slot is stored bare, which saves 64 bytes a copy."""
        return (self.slots,) if isinstance(self.slots, int) else self.slots

    @property
    def is_clean(self) -> bool:
        """True when a lower tier has the block too, so that nothing is lost with this copy."""
        return self.block.mask >> (self.tier + 1) != 0


class LruList:
    """Intrusive list of READY copies from the least to the most recently used. All operations are O(1)."""

    __slots__ = ("length", "newest", "oldest")

    def __init__(self) -> None:
        self.oldest: Copy | None = None
        self.newest: Copy | None = None
        self.length = 0

    def append(self, copy: Copy) -> None:
        """Add as the most recently used."""
        assert copy.lru is None
        copy.lru = self
        copy.older, copy.newer = self.newest, None
        if self.newest is None:
            self.oldest = copy
        else:
            self.newest.newer = copy
        self.newest = copy
        self.length += 1

    def append_oldest(self, copy: Copy) -> None:
        """Add as the least recently used."""
        assert copy.lru is None
        copy.lru = self
        copy.older, copy.newer = None, self.oldest
        if self.oldest is None:
            self.newest = copy
        else:
            self.oldest.older = copy
        self.oldest = copy
        self.length += 1

    def remove(self, copy: Copy) -> None:
        """Take out."""
        assert copy.lru is self
        if copy.older is None:
            self.oldest = copy.newer
        else:
            copy.older.newer = copy.newer
        if copy.newer is None:
            self.newest = copy.older
        else:
            copy.newer.older = copy.older
        copy.older = copy.newer = copy.lru = None
        self.length -= 1


def fastest(mask: int) -> int:
    """The fastest tier of a mask."""
    return (mask & -mask).bit_length() - 1


def ready_copy(block: Block) -> Copy:
    """The fastest readable copy of a block that has one."""
    copy = block.copy_on(Tier(fastest(block.mask)))
    assert copy is not None
    return copy


def flat_slots(copies: Iterable[Copy | None]) -> list[int]:
    """Slots of copies that are all there, one after the other in shard order."""
    found: list[int] = []
    for copy in copies:
        assert copy is not None
        slots = copy.slots
        if isinstance(slots, int):  # looked at here: a tuple for each would take longer than all else
            found.append(slots)
        else:
            found.extend(slots)
    return found


def check_block(block: Block) -> None:
    """Assert every invariant of one block in the index."""
    copies = block.copies()
    assert copies, "a block in the index has a copy"
    mask = 0
    for copy in copies:
        assert copy.block is block
        if copy.state is CopyState.FILLING:
            assert copy.pins == 1 and copy.lru is None
        elif copy.state is CopyState.READY:
            lru = copy.lru
            assert (lru is None) == (copy.pins > 0)
            if lru is not None:
                lane = block.realm.orders[copy.tier].lane(copy)
                assert lru in ((lane.written, lane.clean) if copy.is_clean else (lane.dirty, lane.sunk, lane.refused))
            mask |= 1 << copy.tier
        else:
            raise AssertionError(f"a live copy is {copy.state.name}")
    assert mask == block.mask
