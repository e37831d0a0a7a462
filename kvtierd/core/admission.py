"""What NVMe takes: everything while there is room and daily write budget, and past that only what is used a second time.

The decision is one for all blocks that a request saved or matched together (:class:`Prefix`), and it falls when the first of
them is about to be written. Blocks of a request leave from tail to head, so deciding each block by itself would store tails whose
heads are refused later, and a prefix without its head is of no use.

*Second use*: a request matches the block, or saves it again after it was forgotten, within the window. Of what was forgotten for
room a number is remembered, a bounded lot of them.

*Budget*: bytes a day, kept as a bucket that fills continuously, up to one day's. What is admitted is taken out. While something
is in it, everything is admitted; when it is empty, what is used a second time still is, on credit, up to another day's budget. So
over a long time no more is written than the budget says. Within one day it may be three times that, from full to all on credit.
A tenant with a share of the budget has a bucket of its own besides, of that share; both must have something in them. A share is a
ceiling: what one tenant leaves, the others may write up to theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kvtierd.core.block import Block
from kvtierd.core.order import ghost_of

if TYPE_CHECKING:
    from kvtierd.core.realm import Tenant

DAY_S: Final = 86_400.0
MAX_SEEN: Final = 1 << 19
"""Forgotten blocks that are remembered, the latest; about 70 MB when there are so many."""
NO_ROOM: Final = "no_room"
NO_BUDGET: Final = "budget"
TOO_IDLE: Final = "idle"
"""Its TTL there has passed already."""
REFUSALS: Final = (NO_ROOM, NO_BUDGET, TOO_IDLE)
"""Why a block is not admitted."""


class Prefix:
    """Blocks that are admitted together or not at all."""

    __slots__ = ("again", "refusal", "size_bytes")

    def __init__(self, *, again: bool) -> None:
        self.again = again
        """True for blocks that are used a second time."""
        self.size_bytes = 0
        """What they take on NVMe."""
        self.refusal: str | None = None
        """None while nothing is decided, "" when they are admitted, else why not."""


class _Bucket:
    """Bytes that may be written; fills continuously, as much a day as it holds."""

    __slots__ = ("_at_s", "_level_bytes", "size_bytes")

    def __init__(self, size_bytes: float) -> None:
        self.size_bytes = size_bytes
        self._level_bytes = float(size_bytes)
        self._at_s = 0.0

    def left(self, now: float) -> float:
        """What is in it; below 0 when written on credit."""
        gained = self.size_bytes * max(now - self._at_s, 0.0) / DAY_S
        return min(self._level_bytes + gained, float(self.size_bytes))

    def set(self, at_s: float, left_bytes: float) -> None:
        """Say what was in it at a time."""
        self._level_bytes = min(max(left_bytes, -float(self.size_bytes)), float(self.size_bytes))
        self._at_s = at_s

    def take(self, now: float, size_bytes: int) -> None:
        """Take something out."""
        self._level_bytes, self._at_s = self.left(now) - size_bytes, now

    def allows(self, now: float, *, again: bool) -> bool:
        """True when something may be written; a second use on credit too."""
        return self.left(now) > (-self.size_bytes if again else 0)


class Admission:
    """Decides what is written to NVMe.

    Args:
        second_use: ask for a second use once NVMe is full.
        window_s: time within which the second use counts.
        budget_bytes: a day; 0 for none.
    """

    def __init__(self, *, second_use: bool, window_s: float, budget_bytes: int) -> None:
        self._second_use = second_use
        self._window_s = window_s
        self.budget_bytes = budget_bytes
        self.enabled = second_use or budget_bytes > 0
        """False when everything is admitted, so that nobody pays for what decides nothing."""
        self._budget = _Bucket(budget_bytes)
        self._of_tenant: dict[str, _Bucket] = {}
        """By tenant, where it has a share."""
        self._restored: dict[str, tuple[float, float]] = {}
        """Of tenants that have not written yet since the start: what was left for them, and when."""
        self._seen: dict[tuple[int, int], float] = {}
        """By realm and key: when a forgotten block was last used; in the order of forgetting."""

    # ---- budget

    def left_bytes(self, now: float) -> int:
        """What is in the bucket; below 0 when written on credit. 0 without a budget."""
        return int(self._budget.left(now))

    def left_of_tenants(self, now: float) -> dict[str, float]:
        """The same of each tenant that has a share."""
        waiting = {name: left for name, (_, left) in self._restored.items()}
        return waiting | {name: bucket.left(now) for name, bucket in self._of_tenant.items()}

    def spend(self, now: float, tenant: Tenant, size_bytes: int) -> None:
        """So much of a tenant's is being written; it counts whether the device takes it or not."""
        if self.budget_bytes:
            self._budget.take(now, size_bytes)
            own = self._bucket(now, tenant)
            if own is not None:
                own.take(now, size_bytes)

    def restore(self, at_s: float, left_bytes: float, of_tenants: Mapping[str, float] | None = None) -> None:
        """Go on with what was left at a time, which may lie before this core's first."""
        self._budget.set(at_s, left_bytes)
        self._restored = {name: (at_s, left) for name, left in (of_tenants or {}).items()}

    def _bucket(self, now: float, tenant: Tenant) -> _Bucket | None:
        """The bucket of a tenant that has a share, of its present size; None for others."""
        share = tenant.limits.write_budget_share
        if share >= 1:
            self._of_tenant.pop(tenant.name, None)
            return None
        size = share * self.budget_bytes
        bucket = self._of_tenant.get(tenant.name)
        if bucket is None:
            bucket = self._of_tenant[tenant.name] = _Bucket(size)
            if tenant.name in self._restored:
                bucket.set(*self._restored.pop(tenant.name))
        elif bucket.size_bytes != size:
            left = bucket.left(now)
            bucket.size_bytes = size
            bucket.set(now, left)
        return bucket

    # ---- use

    def saved_again(self, now: float, block: Block) -> bool:
        """True for a block that is being saved and was forgotten within the window."""
        seen_s = self._seen.pop((block.realm.realm_id, ghost_of(block.key)), None)
        return seen_s is not None and now - seen_s <= self._window_s

    def forgotten(self, block: Block) -> None:
        """A block has gone for room: its next save may be its second use."""
        key = (block.realm.realm_id, ghost_of(block.key))
        self._seen.pop(key, None)
        self._seen[key] = block.used_at_s
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    def used(self, now: float, blocks: list[Block], size_bytes: int) -> None:
        """A request has matched these blocks, each of which takes so much on NVMe. Call it before they are touched."""
        again, first = Prefix(again=True), Prefix(again=False)
        for block in blocks:
            prefix = again if now - block.used_at_s <= self._window_s else first
            prefix.size_bytes += size_bytes
            block.prefix = prefix

    # ---- decision

    def refusal(self, now: float, block: Block, size_bytes: int, room_bytes: int) -> str:
        """ "" when a block may be written, else why not: one of ``REFUSALS``.

        Args:
            now: the time.
            block: which.
            size_bytes: what it takes on NVMe.
            room_bytes: what is free there.
        """
        prefix = block.prefix
        if prefix is None:
            prefix = block.prefix = Prefix(again=False)
            prefix.size_bytes = size_bytes
        if prefix.refusal is None:
            prefix.refusal = self._decide(now, block.realm.tenant, prefix, room_bytes)
        return prefix.refusal

    def _decide(self, now: float, tenant: Tenant, prefix: Prefix, room_bytes: int) -> str:
        if self.budget_bytes:
            own = self._bucket(now, tenant)
            if not self._budget.allows(now, again=prefix.again) or (own is not None and not own.allows(now, again=prefix.again)):
                return NO_BUDGET
        if self._second_use and not prefix.again and room_bytes < prefix.size_bytes:
            return NO_ROOM
        return ""
