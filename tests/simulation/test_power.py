"""Goal: the simulation finds bugs, so that its silence means something.

Method: put one bug after the other into core, recovery, executor and store, and look for a seed that fails.
"""

from __future__ import annotations

import pytest

from kvtierd.testing.simulation.run import run_seed
from tests.simulation.mutations import MUTATIONS, Mutation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_found(mutation: Mutation) -> None:
    with mutation.applied():
        assert any(not run_seed(seed).ok for seed in range(mutation.seeds)), f"not found within {mutation.seeds} seeds"
