"""Goal: the simulation finds bugs, so that its silence means something.

Method: put one bug after the other into core, recovery, executor and store, and look for a seed that fails.
"""

from __future__ import annotations

import os
from contextlib import closing

import pytest

from kvtierd.testing.simulation.campaign import outcomes
from tests.simulation.mutations import MUTATIONS, Mutation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_found(mutation: Mutation) -> None:
    mutation.made()  # in a process of the campaign a mistake would only be seen as silence
    seeds = range(mutation.first, mutation.first + mutation.seeds)
    with closing(outcomes(seeds, len(os.sched_getaffinity(0)), mutation.apply)) as found:
        assert any(not outcome.ok for outcome in found), f"not found by seeds {seeds.start} to {seeds.stop - 1}"
