"""Goal: the simulation finds bugs, so that its silence means something.

Method: put one bug after the other into core, recovery, executor and store, and look for a seed that fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtierd.testing.simulation.run import run_seed
from tests.simulation.mutations import MUTATIONS, Mutation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _on_one_core() -> Iterator[None]:
    """One thread of a simulation runs at a time, and hands over far faster on the same core. Of processes each has its own."""
    allowed = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {allowed[worker % len(allowed)]})
    yield
    os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_found(mutation: Mutation) -> None:
    with mutation.applied():
        assert any(not run_seed(seed).ok for seed in mutation.seeds()), f"not found by {mutation.most} seeds"
