"""Blocks that expire: when, who is next, and what happens then.

A block's expiry is a time of the core's clock, ``NO_END`` for most. From that time on it is a miss for every lookup, load, prefetch
and pin, whether :func:`expire_due` has come round to it or not: callers ask :meth:`Expiries.overdue` first, so that nobody pays
where nothing is due. A pin or a load that has the block keeps its memory, as with any eviction; a load that still waits for the
block to come up from NVMe gets it too. A save of the same key that comes before the copies are forgotten brings the block back,
as a key stands for its bytes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Final

from kvtierd.core.block import Block, CopyState
from kvtierd.core.commands import Renew
from kvtierd.model import NO_END

if TYPE_CHECKING:
    from kvtierd.core.state import CoreState

MAX_EXPIRED_PER_TICK: Final = 2048
"""Blocks that one tick looks at; the rest follows in the next tick."""
RENEW_SHARE: Final = 1 / 16
"""An expiry on disk is written anew when it is off by more than this share of the life that is left, so that saving the same
blocks again and again does not fill the journal. A daemon that is killed may forget such a block that much too early."""


class Expiries:
    """Which blocks expire, earliest first.

    A heap with one entry a block. An expiry is only ever put off, so an entry that surfaces too early is put back; entries of
    blocks that went, or that expire no more, are dropped as they surface, or in bulk once they are the larger part.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Block]] = []
        self._order = itertools.count()
        self._late: dict[Block, None] = {}
        """Expired blocks that a load still waits for; no more than there are open loads' keys."""
        self.count = 0
        """Blocks in the index that expire."""

    def begin(self, block: Block, at_s: float) -> None:
        """Let a block that has no end so far expire at a time."""
        assert block.expires_s == NO_END
        block.expires_s = at_s
        if at_s != NO_END:
            self.count += 1
            self._push(block)

    def put_off(self, block: Block, at_s: float) -> None:
        """Let a block that expires do so later, or with NO_END not at all."""
        assert block.expires_s < at_s
        block.expires_s = at_s
        late = block in self._late
        if at_s == NO_END:
            self.gone(block)
        elif late:
            del self._late[block]
            self._push(block)

    def gone(self, block: Block) -> None:
        """A block that expired, or would have, has left the index or has no end any more."""
        self.count -= 1
        self._late.pop(block, None)
        self._tidy()

    def hold(self, block: Block) -> None:
        """Come back to an expired block at the next tick: somebody waits for it."""
        self._late[block] = None

    @property
    def holds(self) -> bool:
        """True when expired blocks wait for a load."""
        return bool(self._late)

    def overdue(self, now: float) -> bool:
        """True when there may be blocks in the index whose time has come."""
        return bool(self._late) or (bool(self._heap) and self._heap[0][0] <= now)

    def first(self) -> float | None:
        """When to look again; None when nothing expires."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float, limit: int) -> list[Block]:
        """Take blocks whose time has come. The caller evicts or holds each. At most ``limit`` entries are looked at."""
        due = list(self._late)
        self._late.clear()
        for _ in range(limit):
            if not self._heap or self._heap[0][0] > now:
                break
            block = heapq.heappop(self._heap)[2]
            if not _expires(block):
                continue
            if block.expires_s <= now:
                due.append(block)
            else:
                self._push(block)
        return due

    def _push(self, block: Block) -> None:
        heapq.heappush(self._heap, (block.expires_s, next(self._order), block))
        self._tidy()

    def _tidy(self) -> None:
        """Drop dead entries where they are the larger part."""
        if len(self._heap) > 2 * self.count + 64:
            self._heap = [(b.expires_s, n, b) for _, n, b in self._heap if _expires(b)]
            heapq.heapify(self._heap)

    def check(self, blocks: Iterable[Block]) -> None:
        """Assert that exactly the blocks of the index that expire are known, each once and not too late."""
        expiring = [b for b in blocks if b.expires_s != NO_END]
        assert len(expiring) == self.count
        listed = [(at_s, b) for at_s, _, b in self._heap if _expires(b)]
        assert all(at_s <= b.expires_s for at_s, b in listed)
        assert {b for _, b in listed} | set(self._late) == set(expiring)
        assert len(listed) + len(self._late) == self.count
        assert len(self._heap) <= 2 * self.count + 64


def _expires(block: Block) -> bool:
    """True for a block of the index that has an end."""
    return block.expires_s != NO_END and block.realm.index.get(block.key) is block


def extend(state: CoreState, now: float, blocks: Iterable[Block], at_s: float) -> None:
    """Blocks were saved again: those that expire before ``at_s`` live until then. Nothing is shortened."""
    if not state.expiries.count:
        return
    for block in blocks:
        if block.expires_s >= at_s:
            continue
        state.expiries.put_off(block, at_s)
        copy = block.nvme
        if copy is None or copy.state is not CopyState.READY:
            continue  # one that is being written is compared with its record when it becomes readable
        if at_s == NO_END or at_s - copy.expires_s > RENEW_SHARE * (at_s - now):
            copy.expires_s = at_s
            state.commands.append(Renew(block.realm.realm_id, block.key, copy.generation, copy.all_slots(), at_s))


def expire_due(state: CoreState, now: float, awaited: Callable[[], Collection[Block]]) -> None:
    """Forget blocks whose time has come.

    Args:
        state: is changed.
        now: the time.
        awaited: gives the blocks that loads wait for; asked at most once, and only when a block that is due has users.
    """
    wanted: Collection[Block] | None = None
    for block in state.expiries.due(now, MAX_EXPIRED_PER_TICK):
        if any(copy.pins for copy in block.copies()):
            wanted = awaited() if wanted is None else wanted
            if block in wanted:
                state.expiries.hold(block)
                continue
        state.evict_block(now, block, "expired")
