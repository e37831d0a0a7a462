"""Goal: how long an answer takes tells a tenant nothing of what another private one holds.

Method: many lookups and loads of one client, interleaved at random: keys that another tenant holds, and keys that nobody ever had.
A permutation test of the difference of trimmed means says how likely such a difference is by chance; below one in ten thousand it
is called a leak. The same test must find what there is to be found, or it would find nothing at all: loads of keys that the client
holds itself, and, as a lookup does the same work whether a key is held or not, lookups of more keys.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvtierd.client import Client
from kvtierd.testing.daemon import DaemonProcess
from tests.daemon.conftest import MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROUNDS = 3000
SHUFFLES = 40_000
FALSE_ALARM = 1e-4
KEYS = 8
"""Keys of one call."""

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]


def trimmed_means(seconds: np.ndarray) -> np.ndarray:
    """Means of rows without their largest fifth, which is other work on the machine."""
    kept = np.sort(seconds, axis=-1)[..., : int(seconds.shape[-1] * 0.8)]
    return np.asarray(kept.mean(axis=-1))


def chance(one: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> float:
    """How likely such a difference is when the labels mean nothing. Pairs are of one moment, so labels swap in pairs."""
    pairs = np.stack([one, other])
    seen = abs(float(np.subtract(*trimmed_means(pairs))))
    beyond = 0
    for _ in range(SHUFFLES // 100):
        swap = rng.random((100, pairs.shape[1])) < 0.5
        first, second = np.where(swap, pairs[1], pairs[0]), np.where(swap, pairs[0], pairs[1])
        beyond += int((np.abs(trimmed_means(first) - trimmed_means(second)) >= seen).sum())
    return (beyond + 1) / (SHUFFLES + 1)


def times(
    call: Callable[[list[bytes]], object], kinds: list[list[bytes]], rng: np.random.Generator, rounds: int = ROUNDS
) -> list[np.ndarray]:
    """Seconds of calls with keys of each kind: rounds in which each kind has its turn, in random order."""
    seconds = np.zeros((len(kinds), rounds))
    for round_ in range(rounds):
        for kind in rng.permutation(len(kinds)):
            chosen = [kinds[kind][i] for i in rng.integers(len(kinds[kind]), size=KEYS)]
            began = time.perf_counter()
            call(chosen)
            seconds[kind, round_] = time.perf_counter() - began
    return list(seconds)


def test_the_test_keeps_its_promise() -> None:
    """Goal: chance() is right about noise and about a small shift. Method: figures with the tails that such times have."""
    rng = np.random.default_rng(1)
    noise = rng.lognormal(0.0, 0.6, (2, ROUNDS))
    assert chance(noise[0], noise[1], rng) > 0.001
    assert chance(noise[0] + 0.1, noise[1], rng) < FALSE_ALARM


@pytest.mark.parametrize("what", ["lookup", "load"])
def test_another_tenants_blocks_take_as_long_as_none(make_daemon: MakeDaemon, make_client: MakeClient, what: str) -> None:
    """Also with blocks of the other in memory and on NVMe, and of a tenant with limits and one that is shared."""
    daemon = make_daemon(tenants={"victim": {"class": "premium", "cpu_reserve": "25%"}, "club": {"scope": "shared"}})
    rng = np.random.default_rng(7)
    spy, victim, club = (make_client(daemon, tenant=name) for name in ("spy", "victim", "club"))
    theirs, shared, mine, nobodys = ([os.urandom(32) for _ in range(20)] for _ in range(4))
    for client, keys in ((victim, theirs), (club, shared), (spy, mine)):
        assert client.save(keys, [bytes(MIB)] * len(keys), wait_s=10).saved == len(keys)
    buffers = [bytearray(MIB) for _ in range(KEYS)]

    def call(keys: list[bytes]) -> object:
        return spy.lookup(keys, each=True) if what == "lookup" else spy.load(keys, buffers, each=True)

    times(call, [nobodys], rng)  # warm
    of_theirs, of_shared, of_nobodys = times(call, [theirs, shared, nobodys], rng)
    for found in (of_theirs, of_shared):
        likely = chance(found, of_nobodys, rng)
        # Two looks of each kind of call: a slow moment of the machine must come twice at the same place.
        if likely < FALSE_ALARM:
            again, none = times(call, [theirs if found is of_theirs else shared, nobodys], rng)
            likely = chance(again, none, rng)
        assert likely >= FALSE_ALARM, f"{what}: other tenants' keys can be told from nobody's, by chance 1 in {1 / likely:.0f}"
    control = call if what == "load" else lambda keys: spy.lookup(keys * (64 if keys[0] in mine else 1), each=True)
    own, none = times(control, [mine, nobodys], rng, ROUNDS // 5)
    assert chance(own, none, rng) < FALSE_ALARM, "the test finds what there is"
