"""Goal: what the sampler says of larger caches is what such caches would have hit.

Method: random uses with a skew, against a plain LRU cache of each size, with and without sampling.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from kvtierd.advice import Figures
from kvtierd.core.realm import Realm
from kvtierd.core.saves import HELD, Request
from kvtierd.core.tickets import GRANTED
from kvtierd.core.tier_core import TierCore
from kvtierd.model import Namespace
from kvtierd.runtime.reuse import HALF_LIFE_S, MAX_ROOTS, ReuseSampler
from tests.core.shell import config

SIZE = 4096


def keys_of(uses: list[int]) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in uses]


def skewed(count: int, blocks: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [min(int(rng.paretovariate(0.6)), blocks) for _ in range(count)]


def lru_hits(uses: list[int], places: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for n in uses:
        hits += n in held
        held[n] = None
        held.move_to_end(n)
        if len(held) > places:
            held.popitem(last=False)
    return hits / len(uses)


def predicted(sampler: ReuseSampler, places: int) -> float:
    seen = sampler.figures(0.0)
    return Figures(0, 0, seen.distances, seen.cold).hits_at(places * SIZE)


@pytest.mark.parametrize(("most", "within"), [(20_000, 0.0), (1000, 0.03), (250, 0.06)])
def test_distances_are_those_of_a_cache(most: int, within: float) -> None:
    uses = skewed(60_000, 5_000, seed=3)
    sampler = ReuseSampler(most, first_part=1)
    for start in range(0, len(uses), 100):
        sampler.used(0.0, 1, keys_of(uses[start : start + 100]), SIZE, found=False)
    assert (sampler.figures(0.0).sampled < 1.0) is (most < 5000)
    # Sizes that a step of the histogram ends at, where the whole sample is exact.
    for places in (16, 64, 256, 1024, 4096):
        assert predicted(sampler, places) == pytest.approx(lru_hits(uses, places), abs=within + 1e-9)
    assert sampler.figures(0.0).added == 60_000


def test_the_order_of_uses_is_closed_up_without_a_change() -> None:
    """Far more uses than places in the order of uses, of few blocks."""
    sampler = ReuseSampler(8, first_part=1)
    uses = [n for _ in range(500) for n in (1, 2, 3, 4)]
    sampler.used(0.0, 1, keys_of(uses), SIZE, found=True)
    seen = sampler.figures(0.0)
    assert seen.distances == {4 * SIZE: 1996.0} and seen.cold == 4.0 and seen.found == 2000.0


def test_blocks_of_two_realms_and_sizes_are_two() -> None:
    sampler = ReuseSampler(first_part=1)
    sampler.used(0.0, 1, keys_of([1]), SIZE, found=False)
    sampler.used(0.0, 2, keys_of([1]), 3 * SIZE, found=False)
    sampler.used(0.0, 1, keys_of([1]), SIZE, found=True)
    assert sampler.figures(0.0).distances == {4 * SIZE: 1.0}


def test_a_part_stands_for_all() -> None:
    sampler = ReuseSampler()
    for _ in range(3):
        sampler.used(0.0, 1, keys_of(list(range(20_000))), SIZE, found=True)
    seen = sampler.figures(0.0)
    assert seen.sampled == 1 / 16
    assert seen.cold == pytest.approx(20_000, rel=0.1)
    assert sum(seen.distances.values()) == pytest.approx(40_000, rel=0.1)
    assert all(0.9 < size / (20_000 * SIZE) < 1.4 for size in seen.distances)


def test_older_uses_count_less() -> None:
    sampler = ReuseSampler(first_part=1)
    sampler.used(50.0, 1, keys_of([1, 1]), SIZE, found=True)
    sampler.began(50.0, 1, bytes(32), found=False)
    sampler.used(50.0 + HALF_LIFE_S, 1, keys_of([1]), SIZE, found=True)
    seen = sampler.figures(50.0 + 2 * HALF_LIFE_S)
    assert (seen.found, seen.cold, seen.new_roots, seen.distances) == (1.0, 0.25, 0.25, {SIZE: 0.75})


def open_realm() -> Realm:
    return TierCore(config()).open_realm("t", Namespace((SIZE,)))[0]


def test_saves_tell_of_the_beginnings_of_requests() -> None:
    realm, sampler = open_realm(), ReuseSampler(first_part=1)
    a, b, c, d = keys_of([1, 2, 3, 4])
    sampler.saved(0.0, realm, [a, b], [GRANTED, GRANTED], Request())  # new
    sampler.saved(0.0, realm, [c], [GRANTED], Request([a, b], 0))  # its next portion
    sampler.saved(0.0, realm, [d], [GRANTED], Request([a, b, c], 3))  # found three
    sampler.saved(0.0, realm, [a, b], [HELD, GRANTED], Request())  # found one, without saying so
    sampler.saved(0.0, realm, [a, b], [GRANTED, GRANTED], Request(matched=0))  # had been forgotten
    sampler.saved(0.0, realm, [], [], Request())
    sampler.loaded(0.0, realm, [a, b, c], bytes([2, 4, 0]))
    seen = sampler.figures(0.0)
    assert (seen.new_roots, seen.continued, seen.lost_roots) == (1.0, 2.0, 1.0)
    assert (seen.added, seen.found) == (7.0, 2.0)


def test_beginnings_take_bounded_memory() -> None:
    sampler = ReuseSampler(first_part=1)
    for n in range(MAX_ROOTS + 10):
        sampler.began(0.0, 1, n.to_bytes(32, "big"), found=False)
    sampler.began(0.0, 1, (MAX_ROOTS + 9).to_bytes(32, "big"), found=False)
    sampler.began(0.0, 1, (3).to_bytes(32, "big"), found=False)  # forgotten
    seen = sampler.figures(0.0)
    assert (seen.new_roots, seen.lost_roots) == (MAX_ROOTS + 11, 1.0)
