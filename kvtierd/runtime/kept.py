"""CPU memory that crosses a restart: what a daemon leaves behind when it ends, and what the next one takes over.

Only memory that no process still reads or writes is left: a client whose load or save is cut off by the end goes on copying for a
moment, and must not meet the next daemon's blocks. What was left is compared with its checksums before it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

from kvtierd.core.block import Copy, CopyState
from kvtierd.core.realm import Realm
from kvtierd.core.tickets import SaveTicket, Session
from kvtierd.core.tier_core import TierCore
from kvtierd.errors import RequestError
from kvtierd.memory import punch
from kvtierd.model import Namespace, Tier, slot_extent, slot_index
from kvtierd.runtime.wallclock import WallClock
from kvtierd.tiers.base import RealmInfo
from kvtierd.tiers.cpu import CpuPool
from kvtierd.tiers.keeper import Keeper
from kvtierd.tiers.kept_index import KeptCopy, KeptExtent, KeptRealm, digest_of, pack_index, unpack_index

log = logging.getLogger(__name__)

OpenRealm = Callable[[str, Namespace], Awaitable[Realm]]


def extents_in_use(session: Session) -> set[int]:
    """Extents of CPU memory that a session's processes may be reading or writing."""
    copies: list[Copy] = []
    for ticket in session.tickets.values():
        copies += [c for c in (ticket.open if isinstance(ticket, SaveTicket) else ticket.copies) if c is not None]
    return {slot_extent(slot) for copy in copies if copy.tier is Tier.CPU for slot in copy.all_slots()}


def keep(core: TierCore, cpu: CpuPool, keeper: Keeper, clock: WallClock, in_use: set[int]) -> int:
    """Leave the CPU tier to the next daemon. Blocking; nothing else may be at work on the core or the memory.

    Args:
        core: what is where.
        cpu: the memory.
        keeper: who keeps it.
        clock: expiries are kept in wall-clock time.
        in_use: extents that processes may still be reading or writing, besides those that are pinned.

    Returns:
        How many blocks were left. 0, said in the log, when the keeper failed.
    """
    began_s = time.monotonic()
    quiet = _quiet_extents(core, cpu, in_use)
    realms = [kept for realm in core.state.realms.values() if (kept := _kept_realm(realm, quiet, cpu, clock)).copies]
    memory = {e.extent_id: cpu.fd(e.extent_id) for kept in realms for e in kept.extents}
    count = sum(len(kept.copies) for kept in realms)
    if not count:
        return 0
    try:
        keeper.put(pack_index(realms), memory)
    except OSError as e:
        log.error("CPU memory cannot be kept for the next start: %s; NVMe keeps what it has", e)
        return 0
    log.info("%d blocks in CPU memory are kept for the next start (%.2f s)", count, time.monotonic() - began_s)
    return count


def _quiet_extents(core: TierCore, cpu: CpuPool, in_use: set[int]) -> set[int]:
    # A pin of an operator keeps a copy in place and reads nothing.
    in_place = Counter(copy for ticket in core.pins.values() for copy in ticket.copies)
    return {
        extent.extent_id
        for extent in core.state.pools[Tier.CPU].extents.values()
        if extent.extent_id not in in_use
        and cpu.has_extent(extent.extent_id)
        and all(o is None or (o.state is CopyState.READY and o.pins == in_place[o]) for o in extent.owners)
    }


def _kept_realm(realm: Realm, quiet: set[int], cpu: CpuPool, clock: WallClock) -> KeptRealm:
    kept = KeptRealm(RealmInfo(realm.realm_id, realm.tenant.name, realm.namespace, realm.shared))
    shards: dict[int, int] = {}
    for block in sorted((realm.index[key] for key in realm.own_keys()), key=lambda block: block.used_at_s):
        copy = block.cpu
        if copy is None or copy.state is not CopyState.READY or any(slot_extent(s) not in quiet for s in copy.all_slots()):
            continue
        slots = copy.all_slots()
        shards.update((slot_extent(slot), shard) for shard, slot in enumerate(slots))
        digest = digest_of([cpu.view(slot) for slot in slots])
        kept.copies.append(KeptCopy(block.key, slots, clock.on_wall(block.expires_s), digest))
    for extent_id, shard in shards.items():
        slot_bytes = realm.slot_bytes[shard]
        kept.extents.append(KeptExtent(extent_id, shard, slot_bytes, cpu.size_bytes(extent_id) // slot_bytes))
    return kept


async def take_over(core: TierCore, cpu: CpuPool, keeper: Keeper, clock: WallClock, open_realm: OpenRealm) -> int:
    """Give a fresh core what the last daemon left in memory, after what is on NVMe.

    Returns:
        How many blocks were taken over.
    """
    began_s = time.monotonic()
    index, memory = await asyncio.to_thread(keeper.take)
    count = lost = 0
    try:
        for kept in unpack_index(index) if index else ():
            taken = await _take_realm(core, cpu, kept, memory, clock, open_realm)
            count += taken
            lost += len(kept.copies) - taken
            await asyncio.sleep(0)
    finally:
        for fd in memory.values():
            with contextlib.suppress(OSError):
                punch(fd, os.fstat(fd).st_size)  # a file that has a name would hold its memory
            os.close(fd)
        core.memory_recovered()
    if count or lost:
        log.info("took over %d blocks in CPU memory in %.2f s", count, time.monotonic() - began_s)
    if lost:
        log.warning("%d blocks in CPU memory were not taken over: expired, no longer the same bytes, or without room", lost)
    return count


async def _take_realm(
    core: TierCore, cpu: CpuPool, kept: KeptRealm, memory: dict[int, int], clock: WallClock, open_realm: OpenRealm
) -> int:
    try:
        realm = await open_realm(kept.info.tenant, kept.info.namespace)
    except RequestError as e:
        log.warning("what tenant %r had in CPU memory is not taken over: %s", kept.info.tenant, e)
        return 0
    if realm.shared is not kept.info.shared:
        return 0
    for extent in kept.extents:
        fd = memory.get(extent.extent_id)
        if fd is None or not _fits(core, realm, extent, fd):
            continue
        try:
            cpu.adopt(extent.extent_id, fd, extent.slot_bytes, extent.slot_count)
        except OSError as e:
            log.error("memory that was kept cannot be used: %s", e)
            continue
        del memory[extent.extent_id]
        core.recover_memory(realm, extent.extent_id, extent.shard, extent.slot_count)
    now = clock.now()
    good = await asyncio.to_thread(_verified, cpu, realm, kept, {e.extent_id: e for e in kept.extents})
    rows = [(c.key, c.slots, clock.on_core(c.expires_wall_s)) for c in good]
    return core.recover_copies(now, realm, [row for row in rows if row[2] > now])


def _fits(core: TierCore, realm: Realm, extent: KeptExtent, fd: int) -> bool:
    """Whether memory is what the realm's shard needs, and there is room for it."""
    if (
        not 0 <= extent.shard < len(realm.slot_bytes)
        or extent.slot_bytes != realm.slot_bytes[extent.shard]
        or extent.slot_count < 1
    ):
        return False
    size_bytes = extent.slot_bytes * extent.slot_count
    pool = core.state.pools[Tier.CPU]
    return os.fstat(fd).st_size == size_bytes and pool.reserved_bytes + size_bytes <= pool.capacity_bytes


def _verified(cpu: CpuPool, realm: Realm, kept: KeptRealm, extents: Mapping[int, KeptExtent]) -> list[KeptCopy]:
    """The copies whose slots are there, each for its shard and used once, and still have the same bytes. Blocking."""
    good: list[KeptCopy] = []
    seen: set[int] = set()
    for copy in kept.copies:
        if len(copy.slots) != len(realm.slot_bytes) or not seen.isdisjoint(copy.slots) or len(set(copy.slots)) != len(copy.slots):
            continue
        if not all(_is_there(cpu, slot, shard, extents) for shard, slot in enumerate(copy.slots)):
            continue
        if digest_of([cpu.view(slot) for slot in copy.slots]) == copy.digest:
            good.append(copy)
            seen.update(copy.slots)
    return good


def _is_there(cpu: CpuPool, slot: int, shard: int, extents: Mapping[int, KeptExtent]) -> bool:
    extent = extents.get(slot_extent(slot))
    return (
        extent is not None and cpu.has_extent(extent.extent_id) and extent.shard == shard and slot_index(slot) < extent.slot_count
    )
