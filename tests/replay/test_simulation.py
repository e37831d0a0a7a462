"""Goal: a simulation hits exactly what the rules say, for every way in which the tiers can be set up.

Method: flat LRU is compared, hit for hit, with a dictionary in order of use, on the excerpt that comes with kvtierd and on random
conversations; tiers, options and time are compared with what follows from the rules.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from kvtierd.demo.trace import default_trace
from kvtierd.model import Tier
from kvtierd.replay.simulate import SimSettings, Simulation
from kvtierd.replay.trace import Request, ideal_hits, read_trace

BLOCK = 1 << 20


@pytest.fixture(scope="module")
def excerpt() -> list[Request]:
    return read_trace(default_trace(), partial=True)


def lru_hits(requests: list[Request], capacity: int) -> int:
    """Blocks that an LRU cache finds as prefixes, with each request's blocks used from tail to head."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        for block in request.blocks:
            if block not in held:
                break
            hits += 1
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


def conversations(seed: int, count: int = 300) -> list[Request]:
    """Requests of several conversations that take turns, share a beginning, and branch now and then."""
    r = random.Random(seed)
    talks: list[list[int]] = [[0] for _ in range(12)]
    fresh, at_s, requests = 1, 0.0, []
    for _ in range(count):
        at_s += r.random() * 20
        n = r.randrange(len(talks))
        if r.random() < 0.1:
            talks[n] = talks[r.randrange(len(talks))][: r.randrange(1, 6)]
        grown = r.randrange(1, 8)
        talks[n] = [*talks[n], *range(fresh, fresh + grown)]
        fresh += grown
        if len(talks[n]) > 30:
            talks[n] = [0]
        requests.append(Request(at_s, tuple(talks[n])))
    return requests


def run(requests: list[Request], capacity: dict[Tier, int], **options: Any) -> tuple[Simulation, dict[str, Any]]:
    if len(capacity) == 1:
        options = {"hbm_ttl_s": None, "cpu_ttl_s": None} | options
    simulation = Simulation(SimSettings(capacity, BLOCK, **options), requests)
    figures = simulation.run()
    simulation.core.check()
    return simulation, figures


@pytest.mark.parametrize("capacity", [500, 700, 1300, 4000])
def test_flat_lru_on_the_excerpt(excerpt: list[Request], capacity: int) -> None:
    _, figures = run(excerpt, {Tier.CPU: capacity})
    assert figures["hit_blocks"] == lru_hits(excerpt, capacity)
    assert figures["unsaved_blocks"] == figures["lost_blocks"] == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [70, 150])
def test_flat_lru_on_random_conversations(seed: int, capacity: int) -> None:
    requests = conversations(seed)
    _, figures = run(requests, {Tier.CPU: capacity})
    assert 0 < figures["hit_blocks"] == lru_hits(requests, capacity)


def test_a_cache_that_is_large_enough_hits_all_that_can_be_hit(excerpt: list[Request]) -> None:
    excerpt = excerpt[:200]
    hits, asked = ideal_hits(excerpt)
    for capacity in ({Tier.CPU: 7000}, {Tier.CPU: 400, Tier.NVME: 7000}, {Tier.HBM: 100, Tier.CPU: 400, Tier.NVME: 7000}):
        _, figures = run(excerpt, capacity)
        assert (figures["hit_blocks"], figures["blocks"]) == (hits, asked)
        assert figures["prefix_hit_ratio"] == figures["ideal_prefix_hit_ratio"] == round(hits / asked, 4)


def test_blocks_are_accounted_for(excerpt: list[Request]) -> None:
    simulation, figures = run(excerpt, {Tier.HBM: 30, Tier.CPU: 140, Tier.NVME: 1100})
    state = simulation.core.state
    assert sum(figures["hit_ratio_by_tier"].values()) == pytest.approx(figures["prefix_hit_ratio"], abs=2e-4)
    assert figures["lost_blocks"] == figures["unsaved_blocks"] == 0
    stored = figures["nvme_written_blocks"] - sum(figures["evictions"]["nvme"].values())
    assert stored == state.copies[Tier.NVME] <= 1100
    assert figures["moved_bytes"]["cpu-nvme"] == figures["nvme_written_bytes"] == figures["nvme_written_blocks"] * BLOCK
    assert figures["moved_bytes"]["nvme-cpu"] == figures["nvme_read_bytes"]
    assert figures["nvme_read_blocks"] == round(figures["hit_ratio_by_tier"]["nvme"] * figures["blocks"], -1) or (
        abs(figures["nvme_read_blocks"] - figures["hit_ratio_by_tier"]["nvme"] * figures["blocks"]) <= 1
    )
    assert {"hbm", "cpu", "nvme"} == set(figures["samples"][-1]["used_blocks"])
    used = figures["samples"][-1]["used_blocks"]
    assert used["hbm"] <= 30 and used["cpu"] <= 140 and used["nvme"] <= 1100


def test_three_tiers_lose_little_against_one_of_their_size(excerpt: list[Request]) -> None:
    """Copies that are on two tiers cost room, no more: age counts over all tiers, wherever a block is."""
    _, tiers = run(excerpt, {Tier.HBM: 30, Tier.CPU: 140, Tier.NVME: 1100})
    _, flat = run(excerpt, {Tier.CPU: 1270})
    _, less = run(excerpt, {Tier.CPU: 1100})
    assert less["hit_blocks"] <= tiers["hit_blocks"] <= flat["hit_blocks"]


def test_slower_traffic_lets_ttls_run_out(excerpt: list[Request]) -> None:
    capacity = {Tier.HBM: 100, Tier.CPU: 600, Tier.NVME: 7000}
    _, fast = run(excerpt, capacity)
    _, slow = run(excerpt, capacity, time_scale=20.0)
    assert slow["trace_seconds"] == pytest.approx(20 * fast["trace_seconds"], rel=0.01)
    assert slow["demotions"]["ttl"] > 10 * slow["demotions"]["watermark"]
    assert slow["hit_blocks"] == fast["hit_blocks"], "a TTL moves blocks down, it loses none"
    assert slow["hit_ratio_by_tier"]["nvme"] > fast["hit_ratio_by_tier"]["nvme"]


def test_bandwidth_makes_moves_take_time(excerpt: list[Request]) -> None:
    """With a device as slow as that, blocks are late or find no room, and its time is what its bytes take."""
    capacity = {Tier.CPU: 600, Tier.NVME: 7000}
    _, instant = run(excerpt, capacity, free_target=0.15)
    _, quick = run(excerpt, capacity, nvme_bytes_per_s=5e9, free_target=0.15)
    _, slow = run(excerpt, capacity, nvme_bytes_per_s=2e5, free_target=0.15)
    assert instant["nvme_busy_s"] == {"read": 0.0, "write": 0.0}
    assert quick["nvme_busy_s"]["write"] == pytest.approx(quick["nvme_written_bytes"] / 5e9, abs=0.01)
    assert quick["hit_blocks"] == pytest.approx(instant["hit_blocks"], rel=0.01)
    assert slow["lost_blocks"] + slow["unsaved_blocks"] > 0
    assert slow["nvme_written_bytes"] < quick["nvme_written_bytes"]


def test_second_use_writes_less(excerpt: list[Request]) -> None:
    capacity = {Tier.CPU: 500, Tier.NVME: 600}
    _, every = run(excerpt, capacity)
    _, second = run(excerpt, capacity, second_use=True)
    assert second["nvme_written_blocks"] < every["nvme_written_blocks"] / 2
    assert second["hit_blocks"] > 0.9 * every["hit_blocks"]
    assert second["not_admitted"]["no_room"] == second["evictions"]["cpu"]["not_admitted"] > 0
    assert every["not_admitted"] == {}


def test_a_write_budget_bounds_what_is_written(excerpt: list[Request]) -> None:
    """An hour of the trace refills a 24th: the first part is written whole, the rest only when it is used again."""
    budget = 1000 * BLOCK
    _, figures = run(excerpt, {Tier.CPU: 500, Tier.NVME: 7000}, write_budget_bytes=budget)
    assert 1000 < figures["nvme_written_blocks"] <= 2 * 1000 * (1 + 1 / 24) + 60
    assert figures["not_admitted"]["budget"] > 0 and "no_room" not in figures["not_admitted"]
    assert -budget <= figures["nvme_budget_left_bytes"] < budget


@pytest.mark.parametrize("option", [{"eviction": "arc"}, {"turn_bonus_s": 60.0}])
def test_policies_change_what_is_hit(excerpt: list[Request], option: dict[str, Any]) -> None:
    _, plain = run(excerpt, {Tier.CPU: 500})
    _, other = run(excerpt, {Tier.CPU: 500}, **option)
    assert other["hit_blocks"] != plain["hit_blocks"] and other["hit_blocks"] > 0.8 * plain["hit_blocks"]


def test_tenants_share_nothing() -> None:
    """Two tenants that ask for the same: each pays for itself."""
    single = conversations(3, 100)
    both = [Request(r.at_s, r.blocks, tenant) for r in single for tenant in ("a", "b")]
    _, alone = run(single, {Tier.CPU: 5000})
    _, together = run(both, {Tier.CPU: 5000})
    assert together["tenants"]["a"] == together["tenants"]["b"]
    assert together["tenants"]["a"]["hit_blocks"] == alone["hit_blocks"]
    assert together["distinct_blocks"] == 2 * alone["distinct_blocks"]
    assert together["ideal_prefix_hit_ratio"] == alone["ideal_prefix_hit_ratio"]


def test_a_trace_is_read_with_tenants_and_partial_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 5000, "input_length": 1100, "hash_ids": [7, 8, 9], "tenant": "acme"}\n'
        '{"timestamp": 6000, "input_length": 1024, "hash_ids": [7, 8]}\n'
        '{"timestamp": 7000, "input_length": 1100, "hash_ids": [7, 8]}\n'
    )
    assert read_trace(path, partial=True) == [Request(0.0, (7, 8, 9), "acme"), Request(1.0, (7, 8)), Request(2.0, (7, 8))]
    assert read_trace(path)[0].blocks == (7, 8)


PROMPT = 10
"""Blocks of each request of :func:`tight`."""


def tight(seed: int) -> list[Request]:
    """A request a second for 40 s, of five prompts of equal length."""
    r = random.Random(seed)
    return [Request(float(n), tuple(range(first, first + PROMPT))) for n, first in enumerate(r.choices(range(0, 500, 100), k=41))]


@pytest.mark.parametrize("eviction", ["lru", "arc"])
@pytest.mark.parametrize(
    ("capacity", "bytes_per_s"),
    [
        ({Tier.CPU: 8}, 0.0),
        ({Tier.CPU: 10}, 0.0),
        ({Tier.CPU: 13}, 0.0),
        ({Tier.CPU: 8, Tier.NVME: 12}, 0.0),
        ({Tier.CPU: 12, Tier.NVME: 45}, 1e9),
        ({Tier.CPU: 12, Tier.NVME: 45}, 1e6),
        ({Tier.HBM: 7, Tier.CPU: 14, Tier.NVME: 7}, 0.0),
        ({Tier.HBM: 7, Tier.CPU: 14, Tier.NVME: 7}, 1e6),
    ],
)
def test_tiers_as_small_as_a_request(capacity: dict[Tier, int], bytes_per_s: float, eviction: str) -> None:
    """Goal: what is said to be saved is what was, each block once a request, and the time is the trace's.

    Method: tiers about as large as one request, so that saves need several tries, also over a device on which loads go on after
    the last request; the commits of each request are counted beside the simulation.
    """
    simulation = Simulation(SimSettings(capacity, BLOCK, eviction=eviction, nvme_bytes_per_s=bytes_per_s), tight(5))
    committed: list[int] = []
    save, commit = simulation._save, simulation.core.commit

    def counting_commit(*given: Any) -> Any:
        done = commit(*given)
        committed[-1] += len(done)
        return done

    def counting_save(load: Any) -> None:
        committed.append(0)
        save(load)
        assert committed[-1] <= PROMPT - load.loaded

    simulation._save, simulation.core.commit = counting_save, counting_commit  # type: ignore[method-assign]
    figures = simulation.run()
    simulation.core.check()
    assert figures["trace_seconds"] == 40.0
    assert figures["saved_blocks"] == sum(committed) > 0
    assert figures["saved_blocks"] + figures["unsaved_blocks"] <= figures["blocks"] - figures["hit_blocks"] + figures["lost_blocks"]
    assert bytes_per_s or simulation._now < 40.1, "moves take no time, so no load waits"
