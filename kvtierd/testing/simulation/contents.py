"""What clients have saved, and what a load may therefore return.

Every save writes bytes of its own, so that bytes say which save they come from. A block that was evicted for room, or whose removal
had not reached the journal when the process was killed, may come back after a restart: keys are hashes of contents, so both are the
same block to an engine. One whose eviction was confirmed may not, unless power was lost: journals are not synced.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvtierd.core.realm import Realm
from kvtierd.model import NO_END
from kvtierd.testing.simulation.threads import World

Place = tuple[str, bytes, bytes]
"""Tenant, fingerprint of the namespace, key."""


class WrongBytesError(AssertionError):
    """A load returned something else than what was saved."""


@dataclass(slots=True)
class Version:
    """One save of one block."""

    number: int
    expires_s: float
    """On the wall's clock."""
    sure_s: float
    """Its expiry as its first record has it: later ones may be lost with the process."""
    evicted: bool = False
    """Its eviction was confirmed."""


def place_of(realm: Realm, key: bytes) -> Place:
    """Where a block is for its clients, whatever the realm's number after a restart."""
    return realm.tenant.name, realm.fingerprint, key


def pattern(number: int, shard: int, size_bytes: int) -> bytes:
    """The bytes of one save's shard."""
    unit = hashlib.blake2b(f"{number}/{shard}".encode()).digest()
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


class Contents:
    """All saves of a run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers = itertools.count(1)
        self._saved: dict[Place, list[Version]] = {}
        self._now: dict[Place, list[Version]] = {}
        """What may be found at present."""

    def new_number(self) -> int:
        """For the bytes of a save that begins."""
        return next(self._numbers)

    def committed(self, place: Place, number: int, ttl_s: float | None) -> None:
        """A block was published: nothing else is found any more."""
        until_s = NO_END if ttl_s is None else self._world.wall() + ttl_s
        version = Version(number, until_s, until_s)
        self._saved.setdefault(place, []).append(version)
        self._now[place] = [version]

    def held(self, place: Place, ttl_s: float | None) -> None:
        """A save found the block held: it lives as long as this save asks, at least."""
        until_s = NO_END if ttl_s is None else self._world.wall() + ttl_s
        for version in self._now.get(place, ()):
            version.expires_s = max(version.expires_s, until_s)

    def evicting(self, places: Sequence[Place]) -> list[Version]:
        """Blocks are evicted: from now on they are not found. Returns what is to be confirmed."""
        return [version for place in places for version in self._now.pop(place, [])]

    @staticmethod
    def evicted(versions: Sequence[Version]) -> None:
        """The eviction was confirmed."""
        for version in versions:
            version.evicted = True

    def restarted(self, *, forgot: bool) -> None:
        """Another process has begun. ``forgot``: the disk may lack what was confirmed."""
        for place, versions in self._saved.items():
            self._now[place] = [v for v in versions if forgot or not v.evicted]

    def possible(self, place: Place) -> list[Version]:
        """What a load that begins now may return."""
        wall_s = self._world.wall()
        return [v for v in self._now.get(place, ()) if v.expires_s > wall_s]

    def until_s(self, place: Place) -> float | None:
        """When what may be found at a place has expired, on the wall's clock; None when nothing may."""
        return max((v.expires_s for v in self._now.get(place, ())), default=None)

    def sure_s(self, place: Place) -> float:
        """Until when a block must be found after the process was killed, on the wall's clock."""
        return min((v.sure_s for v in self._now.get(place, ())), default=0.0)

    def check(self, place: Place, among: Sequence[Version], shards: Sequence[memoryview]) -> Version:
        """Which save the bytes come from. Raises WrongBytesError."""
        for version in among:
            if all(bytes(s) == pattern(version.number, i, s.nbytes) for i, s in enumerate(shards)):
                return version
        other = [
            f"save {n} (shard {i})"
            for i, s in enumerate(shards)
            for n in (v.number for versions in self._saved.values() for v in versions)
            if bytes(s) == pattern(n, i, s.nbytes)
        ]
        wanted = ", ".join(str(v.number) for v in among) or "nothing"
        seen = ", ".join(other) or f"bytes of no save: {bytes(shards[0])[:16].hex()}..."
        raise WrongBytesError(f"block {place[2][-2:].hex()} of tenant {place[0]}: expected save {wanted}, found {seen}")
