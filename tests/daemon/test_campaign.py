"""Goal: the real daemon mixes nothing up, however often it is killed and whatever its disk does, and holds no more when it works
for long.

Method: short forms of the campaign and of the soak (docs/faults.md), by counts of kills and of calls.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from kvtierd.core.slots import MIN_EXTENTS
from kvtierd.model import PAGE_BYTES
from kvtierd.testing.faults.campaign import run
from kvtierd.testing.faults.checks import check_hidden
from kvtierd.testing.faults.contents import REALMS, own_key
from kvtierd.testing.faults.disk import DiskFault, compiler
from kvtierd.testing.faults.plan import Kind, draw
from kvtierd.testing.soak import GROWTH_BYTES, GROWTH_BYTES_A_BLOCK, Sample, Soak, verdict

KILLS = 15
SEEDS = {False: 5, True: 16}
"""Without and with encryption."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("encrypted", SEEDS)
def test_a_short_campaign(tmp_path: Path, encrypted: bool) -> None:
    disk = compiler() is not None
    print(f"seed {SEEDS[encrypted]}")
    counts = run(tmp_path, SEEDS[encrypted], KILLS, disk=disk, encrypted=encrypted)
    assert counts["SIGKILLs of the daemon"] >= KILLS
    assert counts["listed blocks loaded and compared"] > 1000
    assert counts["evictions that held"] > 0
    if disk:
        assert sum(count for name, count in counts.items() if name.startswith("fault ")) > 0


def test_plans_follow_from_the_seed() -> None:
    plans = [draw(3, number, disk=True) for number in range(200)]
    assert plans == [draw(3, number, disk=True) for number in range(200)]
    assert {plan.kind for plan in plans} == set(Kind) - {Kind.KEY}
    assert {draw(3, number, disk=True, encrypted=True).kind for number in range(200)} == set(Kind)
    assert {fault for plan in plans for fault in plan.rates} == set(DiskFault)
    assert not any(plan.is_honest and plan.rates for plan in plans)
    assert {plan.kind for plan in (draw(3, n, disk=False) for n in range(200))} == {Kind.KILL, Kind.DRAIN, Kind.START}


def test_a_block_on_disk_as_it_is_is_seen(tmp_path: Path) -> None:
    realm, keys = REALMS[2], [own_key(1, number) for number in range(3)]
    segment, page = tmp_path / "segment-1-8192-8.kv", bytes(PAGE_BYTES)
    segment.write_bytes(b"".join(page + os.urandom(PAGE_BYTES) for _ in range(8)))
    check_hidden([tmp_path], {realm: keys})
    plain = realm.content(keys[2])[1].tobytes()
    segment.write_bytes(page + os.urandom(PAGE_BYTES) + page + plain)
    check_hidden([tmp_path], {realm: keys[:2]})
    with pytest.raises(AssertionError, match=f"the block {keys[2].hex()} .* is on disk as it is"):
        check_hidden([tmp_path], {realm: keys})


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_short_soak(tmp_path: Path) -> None:
    soak = Soak(tmp_path, seed=1)
    try:
        soak.start()
        for rounds in range(100, 1900, 100):
            while soak.rounds < rounds:
                time.sleep(0.05)
                if any(worker.problem for worker in soak.workers):
                    break
            soak.look()
        found = verdict(soak.samples, extents_to_come=MIN_EXTENTS)
        soak.end()
    finally:
        soak.close()
    assert not found, found
    assert soak.blocks > 10_000


def test_growth_is_seen() -> None:
    flat = [Sample(n, 1000 * n, 100 << 20, 50, 20, 300) for n in range(30)]
    assert verdict(flat) == []
    for name, step in (("descriptors", 1), ("threads", 1), ("mappings", 5)):
        growing = [dataclasses.replace(s, **{name: getattr(s, name) + step * n}) for n, s in enumerate(flat)]
        assert [text.split(":")[0] for text in verdict(growing)] == [name]
    costly = [dataclasses.replace(s, memory_bytes=s.memory_bytes + int(s.blocks * 2000)) for s in flat]
    assert [text.split(":")[0] for text in verdict(costly)] == ["memory"]
    within = [dataclasses.replace(s, memory_bytes=s.memory_bytes + int(s.blocks * GROWTH_BYTES_A_BLOCK)) for s in flat]
    assert verdict(within) == [], f"up to {GROWTH_BYTES} bytes are the allocator's"
