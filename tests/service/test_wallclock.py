"""Goal: expiries go over to the wall's clock and back, and a step of that clock moves nothing in memory.

Method: both clocks are numbers that the test sets; a store and a core go through a restart with them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.core.tier_core import TierCore
from kvtierd.model import NO_END, Namespace, Result, Tier, slot_id
from kvtierd.runtime.restart import recover, snapshot_chunks
from kvtierd.runtime.wallclock import WallClock
from kvtierd.tiers.nvme import NvmeStore
from tests.core.shell import config as core_config
from tests.tiers.conformance import block, realm_of, slot_bytes_for
from tests.tiers.nvme_tools import chunks_of, config_for, crash, open_store

SIZE = 4096
REALM = realm_of(SIZE)


class Clocks:
    """A monotonic clock and a wall clock."""

    def __init__(self, now: float, wall: float) -> None:
        self.now, self.wall = now, wall
        self.clock = WallClock(lambda: self.now, lambda: self.wall)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


def test_times_go_over_and_back() -> None:
    clocks = Clocks(50.0, 1_000_000.0)
    assert clocks.clock.on_wall(60.0) == 1_000_010.0
    assert clocks.clock.on_core(1_000_010.0) == 60.0
    assert clocks.clock.on_wall(NO_END) == clocks.clock.on_core(NO_END) == NO_END
    clocks.wall += 3600.0
    assert clocks.clock.on_wall(60.0) == 1_003_610.0, "the life that is left counts, not when it was worked out first"


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("away_s, held", [(1.0, [0, 1, 2]), (10.0, [0, 2]), (99.0, [0, 2]), (100.0, [0])])
async def test_a_restart_takes_over_what_has_not_expired(tmp_path: Path, snapshot: bool, away_s: float, held: list[int]) -> None:
    before = Clocks(500.0, 1_000_000.0)
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(REALM)
    store.add_extent(1, slot_bytes_for(SIZE), 8)
    ends = [NO_END, 510.0, 600.0]
    blocks = [block(REALM, n, n + 1, slot_id(1, n)) for n in range(3)]
    for io, end_s in zip(blocks, ends, strict=True):
        io.expires_s = before.clock.on_wall(end_s)
    assert store.write(blocks) == [Result.OK] * 3
    if snapshot:
        listed = [(io.realm_id, io.key, io.generation, io.slots, io.expires_s) for io in blocks]
        await store.checkpoint(chunks_of(listed))
    crash(store)

    after = Clocks(7.0, before.wall + away_s)  # another boot of the machine
    store, core = await restarted(tmp_path, after)
    namespace = Namespace(shard_bytes=(SIZE,))
    realm, new = core.open_realm(REALM.tenant, namespace)
    assert not new
    keys = [io.key for io in blocks]
    masks = core.lookup(after.now, realm, keys, each=True)[1]
    assert [n for n, mask in enumerate(masks) if mask == Tier.NVME.bit] == held
    assert core.state.copies[Tier.NVME] == len(held)
    left = {n: realm.index[keys[n]].expires_s - after.now for n in held}
    assert left == {n: pytest.approx(ends[n] - 500.0 - away_s) if n else NO_END for n in held}
    core.check()

    after.wall += 1_000_000.0  # somebody sets the clock
    core.tick(after.now)
    assert len(realm.index) == len(held)
    (listed,) = [chunk async for chunk in snapshot_chunks(core, after.clock)]
    assert [row[4] for row in listed] == [NO_END if n == 0 else pytest.approx(after.wall + left[n]) for n in held]
    crash(store)


async def restarted(folder: Path, clocks: Clocks) -> tuple[NvmeStore, TierCore]:
    """A store and a core that took over what it holds."""
    store = NvmeStore.open(config_for(folder))
    core = TierCore(core_config(nvme=256 << 20, extent=1 << 20))
    assert await recover(core, store, clocks.clock) >= 4
    return store, core
