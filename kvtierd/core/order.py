"""In which order copies leave a tier: least recently used first, with credit for some, or adaptive (ARC).

One :class:`Order` keeps the copies that nobody uses of one realm on one tier. They lie in *lanes*, which a block is in with all of
its copies, and a lane has five lists, because each is then sorted by last use without any searching:

* *dirty*: on no lower tier; used while here. *sunk*: on no lower tier; came by being written down, and was not used since;
* *written*: became clean by being written down (they were the oldest). *clean*: was clean when it was last used;
* *refused*: on no lower tier, and the tier below did not admit it.

Copies in the last three may be forgotten at once; they are called spare here. A :class:`Policy` says which lane a block belongs
to and compares the lanes, which is all that the rest of the core asks it. Every operation is O(1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from kvtierd.core.block import Copy, LruList

TURN_BLOCKS: Final = 2
"""Known blocks that a request has to match to count as a further turn of a conversation."""


class Lane:
    """The five lists of one lane."""

    __slots__ = ("clean", "dirty", "refused", "sunk", "written")

    def __init__(self) -> None:
        self.dirty = LruList()
        self.sunk = LruList()
        self.written = LruList()
        self.clean = LruList()
        self.refused = LruList()

    @property
    def length(self) -> int:
        """Copies in the lane."""
        return self.dirty.length + self.sunk.length + self.written.length + self.clean.length + self.refused.length

    def oldest_spare(self) -> Copy | None:
        """The oldest copy that may be forgotten at once."""
        first = _older(self.written.oldest, self.clean.oldest)
        return first if self.refused.oldest is None else _older(first, self.refused.oldest)

    def oldest_dirty(self) -> Copy | None:
        """The oldest copy that would have to be written down first."""
        return _older(self.sunk.oldest, self.dirty.oldest)

    def oldest(self) -> Copy | None:
        """The oldest copy of all."""
        return _older(self.oldest_spare(), self.oldest_dirty())


def _older(a: Copy | None, b: Copy | None) -> Copy | None:
    if a is None or b is None:
        return b if a is None else a
    return a if a.block.used_at_s <= b.block.used_at_s else b


class Order:
    """Least recently used first. With two lanes, copies in the second count as used ``credit_s`` later than they were."""

    __slots__ = ("credit_s", "lanes")

    def __init__(self, lanes: int = 1, credit_s: float = 0.0) -> None:
        self.lanes = tuple(Lane() for _ in range(lanes))
        self.credit_s = credit_s

    def lane(self, copy: Copy) -> Lane:
        """The lane that a copy belongs to."""
        return self.lanes[copy.block.lane]

    def rank_s(self, copy: Copy) -> float:
        """Last use of a copy, with its credit."""
        return copy.block.used_at_s + (self.credit_s if copy.block.lane else 0.0)

    # ---- by age, whatever the policy

    def oldest(self) -> Copy | None:
        """The copy of the lowest rank; its TTL runs out first."""
        return self._oldest(Lane.oldest)

    def oldest_spare(self) -> Copy | None:
        """The copy of the lowest rank among those that may be forgotten at once."""
        return self._oldest(Lane.oldest_spare)

    def oldest_dirty(self) -> Copy | None:
        """The copy of the lowest rank among those that would have to be written down first."""
        return self._oldest(Lane.oldest_dirty)

    def _oldest(self, of: Callable[[Lane], Copy | None]) -> Copy | None:
        first = of(self.lanes[0])
        if len(self.lanes) == 1:
            return first
        second = of(self.lanes[1])
        if first is None or second is None:
            return first or second
        return first if self.rank_s(first) <= self.rank_s(second) else second

    @property
    def dirty_count(self) -> int:
        """Copies that would have to be written down first."""
        return sum(lane.dirty.length + lane.sunk.length for lane in self.lanes)

    # ---- who goes for room

    def next_spare(self) -> Copy | None:
        """Whom to forget next."""
        return self._oldest(Lane.oldest_spare)

    def next_dirty(self) -> Copy | None:
        """Whom to write down next."""
        return self._oldest(Lane.oldest_dirty)

    # ---- memory of what went

    def went(self, copy: Copy) -> None:
        """A copy is about to go for room."""

    def came_back(self, key: int) -> bool:  # noqa: ARG002 - age needs no memory
        """A request wants a block that has no copy here. True when one went from here not long ago."""
        return False

    def sank(self, key: int) -> None:
        """A block comes down to this tier, without a request for it."""

    def check(self) -> None:
        """Assert what holds between two events."""


class ArcOrder(Order):
    """ARC of Megiddo and Modha (FAST'03): lane 0 is T1, used once; lane 1 is T2, used again; ghosts B1 and B2.

    ``target`` is how many copies T1 should have. A request for what went from T1 raises it, one for what went from T2 lowers it.
    The ghosts are numbers made of keys, no more of them than there are copies.
    """

    __slots__ = ("ghosts", "target")

    def __init__(self) -> None:
        super().__init__(lanes=2)
        self.ghosts: tuple[dict[int, None], dict[int, None]] = ({}, {})
        self.target = 0.0

    def next_spare(self) -> Copy | None:
        """See :class:`Order`."""
        return self._next(Lane.oldest_spare)

    def next_dirty(self) -> Copy | None:
        """See :class:`Order`."""
        return self._next(Lane.oldest_dirty)

    def _next(self, of: Callable[[Lane], Copy | None]) -> Copy | None:
        once, again = self.lanes
        first, second = (once, again) if once.length > self.target else (again, once)
        return of(first) or of(second)

    def went(self, copy: Copy) -> None:
        """See :class:`Order`."""
        b1, b2 = self.ghosts
        key = ghost_of(copy.block.key)
        b1.pop(key, None)
        b2.pop(key, None)
        self.ghosts[copy.block.lane][key] = None
        once, again = self.lanes
        most = once.length + again.length
        while b1 and len(b1) > max(most - once.length, 1):
            del b1[next(iter(b1))]
        while b2 and len(b1) + len(b2) > max(most, 1):
            del b2[next(iter(b2))]

    def came_back(self, key: int) -> bool:
        """See :class:`Order`."""
        b1, b2 = self.ghosts
        if key in b1:
            self.target = min(self.target + max(1.0, len(b2) / len(b1)), float(self.lanes[0].length + self.lanes[1].length))
            del b1[key]
            return True
        if key in b2:
            self.target = max(self.target - max(1.0, len(b1) / len(b2)), 0.0)
            del b2[key]
            return True
        return False

    def sank(self, key: int) -> None:
        """See :class:`Order`."""
        for ghosts in self.ghosts:
            ghosts.pop(key, None)

    def check(self) -> None:
        """See :class:`Order`."""
        assert not self.ghosts[0].keys() & self.ghosts[1].keys()
        assert self.target >= 0.0


def ghost_of(key: bytes) -> int:
    """What is remembered of a key: 8 bytes of it. Two keys that share them are taken for each other, which costs a wrong guess."""
    return int.from_bytes(key[:8], "little") ^ int.from_bytes(key[-8:], "little")


class Policy(Protocol):
    """What an eviction policy decides besides the order itself."""

    def order(self) -> Order:
        """An empty order for one realm on one tier."""

    def lane_of_used(self, matched: int) -> int:
        """Lane of known blocks that a request uses, of which it has matched so many."""

    def lane_of_new(self, matched: int, *, returns: bool) -> int:
        """Lane of a block that a request saves, which has matched so many; ``returns``: some order knew it."""


class Lru:
    """Least recently used first, with a credit for the blocks of further turns, if any."""

    def __init__(self, turn_bonus_s: float = 0.0) -> None:
        self._bonus_s = turn_bonus_s

    def order(self) -> Order:
        """See :class:`Policy`."""
        return Order(2, self._bonus_s) if self._bonus_s else Order()

    def lane_of_used(self, matched: int) -> int:
        """See :class:`Policy`."""
        return int(bool(self._bonus_s) and matched >= TURN_BLOCKS)

    def lane_of_new(self, matched: int, *, returns: bool) -> int:  # noqa: ARG002 - age alone counts
        """See :class:`Policy`."""
        return self.lane_of_used(matched)


class Arc:
    """Adaptive: see :class:`ArcOrder`."""

    def order(self) -> Order:
        """See :class:`Policy`."""
        return ArcOrder()

    def lane_of_used(self, matched: int) -> int:  # noqa: ARG002 - any second use counts
        """See :class:`Policy`."""
        return 1

    def lane_of_new(self, matched: int, *, returns: bool) -> int:  # noqa: ARG002
        """See :class:`Policy`."""
        return int(returns)


def policy_of(eviction: str, turn_bonus_s: float) -> Policy:
    """The policy of this name."""
    assert eviction in ("lru", "arc") and not (eviction == "arc" and turn_bonus_s)
    return Arc() if eviction == "arc" else Lru(turn_bonus_s)
