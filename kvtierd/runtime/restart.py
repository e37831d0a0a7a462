"""What crosses a restart: taking over the blocks found on NVMe, and listing those that a snapshot is to name."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator
from typing import Final

from kvtierd.core.admission import Admission
from kvtierd.core.tier_core import TierCore
from kvtierd.errors import StartupError
from kvtierd.model import NO_END
from kvtierd.runtime.wallclock import WallClock
from kvtierd.tiers.base import BlockIo
from kvtierd.tiers.budget_file import SavedBudget
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.record import Entry

log = logging.getLogger(__name__)

KEEP_BUDGET_S: Final = 5.0
"""How often the write budget is written down at most."""
UNTOLD_GENERATIONS: Final = 1 << 32
"""A start leaves out a random number of generations below this: header pages may have some that no record tells of."""
RECOVER_CHUNK: Final = 20_000
SNAPSHOT_CHUNK: Final = 4096
"""Copies gathered for a snapshot in one go of the event loop."""


async def recover(core: TierCore, store: NvmeStore, clock: WallClock) -> int:
    """Give a fresh core what a store still holds, but for what has expired meanwhile.

    Returns:
        The first generation that was not in use before.

    Raises:
        StartupError: the folders cannot be read.
    """
    began_s = time.monotonic()
    try:
        found = await asyncio.to_thread(store.recover)
    except OSError as e:
        raise StartupError(
            f"what the NVMe tier holds cannot be read ({e}): check the device, or take its folder out of nvme.folders to do without"
        ) from e
    now = clock.now()
    for info in found.realms:
        core.open_realm(info.tenant, info.namespace, info.realm_id, shared=info.shared)
    for extent in found.extents:
        core.recover_extent(extent.extent_id, extent.slot_bytes, extent.slot_count)
    count = expired = 0
    rows = iter(found.blocks)
    while chunk := list(itertools.islice(rows, RECOVER_CHUNK)):
        kept = [row if row[4] == NO_END else (*row[:4], clock.on_core(row[4])) for row in chunk]
        gone = [row for row in kept if row[4] <= now]
        kept = [row for row in kept if row[4] > now] if gone else kept
        doubles = core.recover_blocks(now, kept)
        store.forget([BlockIo(*row[:4], ()) for row in (*doubles, *gone)])
        count += len(kept)
        expired += len(gone)
        await asyncio.sleep(0)
    # Given out again, one that a power cut left in a header page but in no record would let the former bytes pass for a block
    # whose write the device lost.
    first_generation = found.next_generation + secrets.randbelow(UNTOLD_GENERATIONS)
    core.recovered(first_generation, found.next_extent_id, found.next_realm_id)
    core.state.story.clear()
    log.info("recovered %d blocks from NVMe in %.2f s", count, time.monotonic() - began_s)
    if expired:
        log.info("%d blocks on NVMe had expired meanwhile and were forgotten", expired)
    return first_generation


class BudgetKeeper:
    """Carries what is left of the write budget over restarts.

    Args:
        admission: the core's; it is restored at once.
        store: where it is kept.
        clock: wall-clock time is what survives.
        saved: what the store had.
    """

    def __init__(self, admission: Admission, store: NvmeStore, clock: WallClock, saved: SavedBudget | None) -> None:
        self._admission = admission
        self._store = store
        self._clock = clock
        self._kept_at_s = clock.now()
        self._kept_bytes: int | None = None
        if saved is not None and admission.budget_bytes:
            # A wall clock that was set back must not count as time that passed.
            admission.restore(min(clock.on_core(saved.at_wall_s), clock.now()), saved.left_bytes, saved.of_tenants)

    async def keep(self, *, now: bool = False) -> None:
        """Write it down, where it has changed and the last time is a while ago (or ``now``)."""
        at_s = self._clock.now()
        left_bytes = self._admission.left_bytes(at_s)
        if not self._admission.budget_bytes or left_bytes == self._kept_bytes:
            return
        if now or at_s >= self._kept_at_s + KEEP_BUDGET_S:
            self._kept_at_s, self._kept_bytes = at_s, left_bytes
            saved = SavedBudget(left_bytes, self._clock.on_wall(at_s), self._admission.left_of_tenants(at_s))
            await asyncio.to_thread(self._store.save_budget, saved)


async def snapshot_chunks(core: TierCore, clock: WallClock) -> AsyncIterator[list[Entry]]:
    """NVMe copies in portions. Changes between portions are in the journal, which began before the first."""
    for realm in list(core.state.realms.values()):
        keys = realm.own_keys()
        for start in range(0, len(keys), SNAPSHOT_CHUNK):
            entries = core.nvme_entries(realm, keys[start : start + SNAPSHOT_CHUNK])
            yield [row if row[4] == NO_END else (*row[:4], clock.on_wall(row[4])) for row in entries]
            await asyncio.sleep(0)
