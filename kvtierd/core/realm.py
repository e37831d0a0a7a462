"""Realms and tenants: who owns blocks, who is billed, and in which order blocks age.

A realm is one tenant's blocks of one namespace. Each private realm has its own index, so that a key can only ever be found in the
realm that saved it: isolation does not depend on a check that could be forgotten. The shared realms of one namespace have one index
for all: each finds the blocks of the others, and a block belongs to the realm, and so to the tenant, that saved it first. A tenant
whose scope is changed gets another realm; what it saved before stays what it was.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtierd.core.block import Block
from kvtierd.core.limits import NO_LIMITS, Limits
from kvtierd.core.order import Order
from kvtierd.core.presence import Presence
from kvtierd.model import PAGE_BYTES, Namespace, Tier


@dataclass(slots=True, eq=False)
class Tenant:
    """Usage and limits of one tenant."""

    name: str
    limits: Limits = NO_LIMITS
    used_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    leaving_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    """By tier: bytes that are being written down."""
    going_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    """By tier: those of them that go then, unless somebody uses them meanwhile."""
    notable_bytes: list[int] = field(default_factory=lambda: [0, 0, 0])
    """By tier: whoever grows beyond this may have to be looked after (see ``core/shares.py``)."""
    largest_bytes: int = 0
    """The largest of its realms' blocks, on any tier."""
    used_at_s: float = float("-inf")
    """Last time that it asked for anything."""
    hits: list[int] = field(default_factory=lambda: [0, 0, 0])
    misses: int = 0
    evictions: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    """Copies forgotten, by tier and reason."""
    blocks: int = 0
    realms: list[Realm] = field(default_factory=list)
    tails: dict[tuple[Tier, tuple[int, ...]], tuple[TailHeap, TailHeap]] = field(default_factory=dict)
    """Its realms in the order of their oldest copies, by tier, where somebody has asked (``core/turns.py``)."""


class Realm:
    """One tenant's blocks of one namespace.

    Args:
        realm_id: never used twice.
        tenant: who is billed for its blocks.
        namespace: layout of its blocks.
        orders: by tier: its copies that nobody uses.
        shared: whether other tenants' shared realms find its blocks.
        twin: another shared realm of the namespace, if there is one.
    """

    __slots__ = (
        "devices",
        "fingerprint",
        "held",
        "index",
        "namespace",
        "nvme_slot_bytes",
        "orders",
        "presence",
        "realm_id",
        "shared",
        "slot_bytes",
        "tenant",
        "tier_bytes",
        "writable",
    )

    def __init__(
        self,
        realm_id: int,
        tenant: Tenant,
        namespace: Namespace,
        orders: tuple[Order, ...],
        *,
        shared: bool = False,
        twin: Realm | None = None,
    ) -> None:
        self.realm_id = realm_id
        self.tenant = tenant
        self.namespace = namespace
        self.fingerprint = namespace.fingerprint()
        self.shared = shared
        self.index: dict[bytes, Block] = {} if twin is None else twin.index
        """Blocks by key; of a shared realm also those of the other shared ones of the namespace."""
        self.presence: Presence = Presence(self.index) if twin is None else twin.presence
        self.held = 0
        """Blocks of its own in the index."""
        self.slot_bytes = namespace.slot_bytes
        # A slot on NVMe starts with a page that says what it holds.
        self.nvme_slot_bytes = tuple(n + PAGE_BYTES for n in self.slot_bytes)
        self.tier_bytes = (sum(self.slot_bytes), sum(self.slot_bytes), sum(self.nvme_slot_bytes))
        self.orders = orders
        """By tier: its copies that nobody uses."""
        self.devices: tuple[int, ...] = ()
        """The GPU of each shard whose memory its blocks may be in, or are; the same for as long as it has extents there."""
        self.writable = True
        """False while the realm is not recorded on disk: its blocks stay in memory until then."""

    def group(self, tier: Tier, shard: int) -> tuple[tuple[int, int], int, int, int, int]:
        """What names a shard's group of slots in memory, for ``SlotPool.group``."""
        place = self.devices[shard] if tier is Tier.HBM else 0
        return (self.realm_id, shard), self.slot_bytes[shard], shard, self.realm_id, place

    def is_open_to(self, devices: tuple[int, ...]) -> bool:
        """Whether who can open the memory of these GPUs, one a shard, can read what the realm has in GPU memory."""
        return bool(devices) and self.devices == devices

    def own_keys(self) -> list[bytes]:
        """Keys of its own blocks."""
        return [key for key, block in self.index.items() if block.realm is self] if self.shared else list(self.index)

    def oldest_s(self, tier: Tier) -> float | None:
        """Last use, with its credit, of the realm's least recently used copy on a tier."""
        order = self.orders[tier]
        oldest = order.oldest()
        return None if oldest is None else order.rank_s(oldest)


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
