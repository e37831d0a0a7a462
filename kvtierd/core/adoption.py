"""Taking over the blocks that a restart has found: on NVMe, and in memory that was kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvtierd.core.block import Block, Copy, CopyState
from kvtierd.core.realm import Realm
from kvtierd.core.state import CoreState
from kvtierd.model import NO_END, Tier, slot_extent

Recovered = tuple[int, bytes, int, tuple[int, ...], float]
"""A block found after a restart: realm id, key, generation, slots, expiry on the core's clock."""

RecoveredCopy = tuple[bytes, tuple[int, ...], float]
"""A block found in memory: key, slots, expiry on the core's clock."""


def adopt_blocks(state: CoreState, now: float, rows: Iterable[Recovered]) -> list[Recovered]:
    """Make recovered blocks READY on NVMe: what :meth:`CoreState.set_state` does for ABSENT to READY, without its cost.

    A restart takes over millions of blocks that have no other copy, no pins and no story, so only their part of the work
    is done here. ``check`` proves that the outcome is the same.

    Returns:
        Those whose key is there already.
    """
    extents = state.pools[Tier.NVME].extents
    doubles: list[Recovered] = []
    adopted: Counter[int] = Counter()
    for row in rows:
        realm_id, key, generation, slots, expires_s = row
        realm = state.realms[realm_id]
        if key in realm.index:
            doubles.append(row)
            continue
        block = realm.index[key] = Block(key, realm, now)
        block.nvme = copy = Copy(block, Tier.NVME, slots[0] if len(slots) == 1 else slots, generation)
        block.mask = Tier.NVME.bit
        copy.state = CopyState.READY
        if expires_s != NO_END:
            copy.expires_s = expires_s
            state.expiries.begin(block, expires_s)
        for slot in slots:
            extent = extents[slot >> 32]
            owners = extent.owners
            assert owners[slot & 0xFFFF_FFFF] is None, "recovery never gives one slot twice"
            owners[slot & 0xFFFF_FFFF] = copy
            extent.used += 1
            extent.used_at_s = now
        realm.orders[Tier.NVME].lanes[0].dirty.append(copy)
        realm.presence.changed(key)
        adopted[realm_id] += 1
    for realm_id, count in adopted.items():
        realm = state.realms[realm_id]
        size = count * realm.tier_bytes[Tier.NVME]
        realm.held += count
        realm.tenant.blocks += count
        realm.tenant.used_bytes[Tier.NVME] += size
        if realm.tenant.used_bytes[Tier.NVME] > realm.tenant.notable_bytes[Tier.NVME]:
            state.grew(realm.tenant, Tier.NVME, size)
        state.copies[Tier.NVME] += count
        state.dirty_bytes[Tier.NVME] += size
        state.pools[Tier.NVME].used_bytes += size
        state.turns.changed(realm, Tier.NVME)
    return doubles


def adopt_copies(state: CoreState, now: float, realm: Realm, rows: Iterable[RecoveredCopy]) -> int:
    """Make recovered blocks READY in CPU memory, after those on NVMe.

    Args:
        state: the core's.
        now: counts as their last use, in the order given: oldest first.
        realm: whose they are.
        rows: what was found; their extents are adopted already.

    Returns:
        How many were taken; those whose key another realm has saved since are not.
    """
    pool = state.pools[Tier.CPU]
    taken = 0
    for key, slots, expires_s in rows:
        block = realm.index.get(key)
        if block is None:
            block = Block(key, realm, now)
            if expires_s != NO_END:
                state.expiries.begin(block, expires_s)
        elif block.realm is not realm or block.cpu is not None:
            continue
        for slot in slots:
            extent = pool.extents[slot_extent(slot)]
            extent.used += 1
            pool.used_bytes += extent.slot_bytes
        state.set_state(now, Copy(block, Tier.CPU, slots[0] if len(slots) == 1 else slots), CopyState.READY, "recover")
        taken += 1
    return taken
