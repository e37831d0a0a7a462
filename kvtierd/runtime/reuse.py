"""What a larger cache would hit: distances between uses of the same block, from a sample of the blocks.

The distance of a use is how many bytes of other blocks were used since the last one, so a cache of that size that forgets the least
recently used would have had it. Whether a block is in the sample is decided by its hash, so all of its uses are, and the distance
within the sample is a fixed part of the real one (Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015). The
part is a 16th at first and halved whenever the sample is full, so it takes bounded memory, and a use costs little.

A use is a block that a load found, or one that a save adds. Weights are halved every hour, so that what is told is about lately.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from xxhash import xxh3_64_intdigest

from kvtierd.core.realm import Realm
from kvtierd.core.saves import HELD, Request
from kvtierd.core.tickets import GRANTED
from kvtierd.model import Tier

MAX_SAMPLED: Final = 4096
"""Blocks in the sample."""
FIRST_PART: Final = 16
"""One in so many blocks is in the sample at first; a power of two."""
MAX_ROOTS: Final = 16_384
"""Beginnings of requests that are remembered."""
STEPS_PER_DOUBLING: Final = 4
HALF_LIFE_S: Final = 3600.0

Key = tuple[int, bytes]
"""Realm id and key: blocks of two realms are two blocks."""


@dataclass(slots=True)
class Reuse:
    """What was seen, in numbers of block uses; requests where it says so."""

    distances: dict[int, float] = field(default_factory=dict)
    """Uses by distance: at most so many bytes."""
    cold: float = 0.0
    """Uses of blocks that were not seen before."""
    found: float = 0.0
    """Uses that a load found (not a sample: all of them)."""
    added: float = 0.0
    """Uses that a save added (all of them)."""
    sampled: float = 1.0
    """The part of all blocks that is in the sample."""
    continued: float = 0.0
    """Requests that found a beginning."""
    new_roots: float = 0.0
    """Requests that found nothing and whose first block was never seen."""
    lost_roots: float = 0.0
    """Requests that found nothing although their first block was seen before."""


class ReuseSampler:
    """Follows the uses of blocks. Not thread-safe; a use that is not sampled costs a hash."""

    def __init__(self, max_sampled: int = MAX_SAMPLED, first_part: int = FIRST_PART) -> None:
        self._max = max_sampled
        self._mask = first_part - 1
        self._places: dict[Key, int] = {}
        """Where each block's last use is in the order of uses."""
        self._tree = _Sums(2 * max_sampled)
        self._next = 0
        self._distances: defaultdict[int, float] = defaultdict(float)
        self._seen = Reuse()
        self._roots: OrderedDict[Key, None] = OrderedDict()
        self._aged_s: float | None = None

    def loaded(self, now: float, realm: Realm, keys: Sequence[bytes], found_on: bytes) -> None:
        """A load came: which of its keys were found."""
        found = [key for key, mask in zip(keys, found_on, strict=False) if mask]
        self.used(now, realm.realm_id, found, realm.tier_bytes[Tier.CPU], found=True)

    def saved(self, now: float, realm: Realm, keys: Sequence[bytes], outcomes: Sequence[int], request: Request) -> None:
        """A save was answered: the granted keys were not there, and its first portion tells of the request's beginning."""
        added = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == GRANTED]
        self.used(now, realm.realm_id, added, realm.tier_bytes[Tier.CPU], found=False)
        if keys and len(request.before) == (request.matched or 0):
            root = request.before[0] if request.before else keys[0]
            self.began(now, realm.realm_id, root, found=bool(request.matched) or outcomes[0] == HELD)

    def used(self, now: float, realm_id: int, keys: Sequence[bytes], size_bytes: int, *, found: bool) -> None:
        """Blocks of a realm, of so many bytes each, were found by a load, or added by a save."""
        self._age(now)
        if found:
            self._seen.found += len(keys)
        else:
            self._seen.added += len(keys)
        mask = self._mask
        for key in keys:
            if not xxh3_64_intdigest(key, realm_id) & mask:
                self._use((realm_id, key), size_bytes)
                mask = self._mask

    def began(self, now: float, realm_id: int, root: bytes, *, found: bool) -> None:
        """A request that begins with this block came, and found it or not."""
        self._age(now)
        key = (realm_id, root)
        if found:
            self._seen.continued += 1.0
        elif key in self._roots:
            self._seen.lost_roots += 1.0
        else:
            self._seen.new_roots += 1.0
        self._roots[key] = None
        self._roots.move_to_end(key)
        if len(self._roots) > MAX_ROOTS:
            self._roots.popitem(last=False)

    def figures(self, now: float) -> Reuse:
        """What was seen lately."""
        self._age(now)
        seen = self._seen
        distances = {upper_bytes(step): weight for step, weight in sorted(self._distances.items())}
        if distances:
            # A few blocks have most of the uses, and are in the sample or not: what is missing (or too much) counts as close.
            closest = next(iter(distances))
            distances[closest] = max(distances[closest] + seen.found + seen.added - seen.cold - sum(distances.values()), 0.0)
        return replace(seen, distances=distances, sampled=1.0 / (self._mask + 1))

    def _use(self, key: Key, size_bytes: int) -> None:
        weight = self._mask + 1.0
        place = self._places.get(key)
        if place is None:
            self._seen.cold += weight
        else:
            self._tree.set(place, 0)
            distance = (self._tree.after(place) + size_bytes) * weight
            self._distances[_step(distance)] += weight
        if self._next == self._tree.size:
            self._compact()
        self._places[key] = self._next
        self._tree.set(self._next, size_bytes)
        self._next += 1
        if len(self._places) > self._max:
            self._halve()

    def _halve(self) -> None:
        """Sample half as many blocks from now on."""
        self._mask = 2 * self._mask + 1
        for realm_id, key in [place for place in self._places if xxh3_64_intdigest(place[1], place[0]) & self._mask]:
            self._tree.set(self._places.pop((realm_id, key)), 0)

    def _compact(self) -> None:
        """Close the gaps in the order of uses."""
        order = sorted(self._places.items(), key=lambda item: item[1])
        sizes = [self._tree.at(place) for _, place in order]
        self._tree = _Sums(self._tree.size)
        for place, ((key, _), size_bytes) in enumerate(zip(order, sizes, strict=True)):
            self._places[key] = place
            self._tree.set(place, size_bytes)
        self._next = len(order)

    def _age(self, now: float) -> None:
        if self._aged_s is None:
            self._aged_s = now
        periods = (now - self._aged_s) // HALF_LIFE_S
        if periods < 1:
            return
        factor = 0.5**periods
        self._aged_s += periods * HALF_LIFE_S
        for step in self._distances:
            self._distances[step] *= factor
        for name in ("cold", "found", "added", "continued", "new_roots", "lost_roots"):
            setattr(self._seen, name, getattr(self._seen, name) * factor)


def _step(size_bytes: float) -> int:
    return math.ceil(STEPS_PER_DOUBLING * math.log2(size_bytes))


def upper_bytes(step: int) -> int:
    """The largest distance that a step counts."""
    return math.floor(2 ** (step / STEPS_PER_DOUBLING))


class _Sums:
    """Numbers at places, and sums of all that come after a place, each in O(log size): a binary indexed tree (Fenwick, 1994)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values = [0] * size
        self._tree = [0] * (size + 1)
        self._total = 0

    def at(self, place: int) -> int:
        return self._values[place]

    def set(self, place: int, value: int) -> None:
        change = value - self._values[place]
        self._values[place] = value
        self._total += change
        index = place + 1
        while index <= self.size:
            self._tree[index] += change
            index += index & -index

    def after(self, place: int) -> int:
        upto, index = 0, place + 1
        while index:
            upto += self._tree[index]
            index -= index & -index
        return self._total - upto
