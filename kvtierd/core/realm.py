"""Realms and tenants: who owns blocks, who is billed, and in which order blocks age.

A realm is one tenant's blocks of one namespace. Each realm has its own index, so that a key can only ever be found in the
realm that saved it: isolation does not depend on a check that could be forgotten.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtierd.core.block import Block, Copy, LruList
from kvtierd.core.presence import Presence
from kvtierd.model import PAGE_BYTES, Namespace, Tier


@dataclass(slots=True, eq=False)
class Tenant:
    """Usage and limits of one tenant."""

    name: str
    quota_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    """By tier; 0 means none."""
    ttl_s: list[float | None] = field(default_factory=lambda: [None, None, None])
    """By tier; None means the tier's own."""
    used_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    leaving_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    """By tier: bytes that are being written down."""
    hits: list[int] = field(default_factory=lambda: [0, 0, 0])
    misses: int = 0
    blocks: int = 0
    realms: list[Realm] = field(default_factory=list)


class TierLru:
    """A realm's copies on one tier that nobody uses, by age.

    Three lists, because each is then sorted by last use without any searching: copies that exist on no lower tier, copies
    that became clean by being written down (they were the oldest), and copies that were clean when they were last used.
    """

    __slots__ = ("clean", "dirty", "written")

    def __init__(self) -> None:
        self.dirty = LruList()
        self.written = LruList()
        self.clean = LruList()

    def oldest_clean(self) -> Copy | None:
        """The oldest copy that also exists below."""
        return _older(self.written.oldest, self.clean.oldest)

    def oldest(self) -> Copy | None:
        """The oldest copy of all."""
        return _older(self.oldest_clean(), self.dirty.oldest)


def _older(a: Copy | None, b: Copy | None) -> Copy | None:
    if a is None or b is None:
        return b if a is None else a
    return a if a.block.used_at_s <= b.block.used_at_s else b


class Realm:
    """One tenant's blocks of one namespace."""

    __slots__ = (
        "fingerprint",
        "index",
        "lru",
        "namespace",
        "nvme_slot_bytes",
        "presence",
        "realm_id",
        "slot_bytes",
        "tenant",
        "tier_bytes",
        "writable",
    )

    def __init__(self, realm_id: int, tenant: Tenant, namespace: Namespace) -> None:
        self.realm_id = realm_id
        self.tenant = tenant
        self.namespace = namespace
        self.fingerprint = namespace.fingerprint()
        self.index: dict[bytes, Block] = {}
        self.presence = Presence(self.index)
        self.slot_bytes = namespace.slot_bytes
        # A slot on NVMe starts with a page that says what it holds.
        self.nvme_slot_bytes = tuple(n + PAGE_BYTES for n in self.slot_bytes)
        self.tier_bytes = (sum(self.slot_bytes), sum(self.slot_bytes), sum(self.nvme_slot_bytes))
        self.lru = tuple(TierLru() for _ in Tier)
        self.writable = True
        """False while the realm is not recorded on disk: its blocks stay in memory until then."""

    def oldest_s(self, tier: Tier) -> float | None:
        """Last use of the realm's least recently used copy on a tier."""
        oldest = self.lru[tier].oldest()
        return None if oldest is None else oldest.block.used_at_s


class TailHeap:
    """Finds the realm whose tail comes first, in O(log realms).

    ``key`` gives a realm's place (None: not now). Places only grow while nothing is pushed, so a stale entry is found when
    it surfaces and is put back at its true place.
    """

    def __init__(self, key: Callable[[Realm], float | None]) -> None:
        self._key = key
        self._heap: list[tuple[float, int]] = []
        self._listed: dict[int, tuple[Realm, float]] = {}

    def push(self, realm: Realm) -> None:
        """Make sure that a realm is found from its present place on."""
        at = self._key(realm)
        if at is None:
            return
        listed = self._listed.get(realm.realm_id)
        if listed is not None and listed[1] <= at:
            return
        self._listed[realm.realm_id] = (realm, at)
        heapq.heappush(self._heap, (at, realm.realm_id))

    def drop(self, realm: Realm) -> None:
        """Forget a realm; its entry goes when it surfaces."""
        self._listed.pop(realm.realm_id, None)

    def first(self) -> tuple[float, Realm] | None:
        """The realm that comes first, with its place."""
        while self._heap:
            at, realm_id = self._heap[0]
            listed = self._listed.get(realm_id)
            if listed is None or listed[1] != at:
                heapq.heappop(self._heap)  # replaced by an earlier entry
                continue
            realm = listed[0]
            true_place = self._key(realm)
            if true_place is None:
                heapq.heappop(self._heap)
                del self._listed[realm_id]
            elif true_place != at:
                heapq.heapreplace(self._heap, (true_place, realm_id))
                self._listed[realm_id] = (realm, true_place)
            else:
                return at, realm
        return None
