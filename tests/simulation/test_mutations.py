"""Goal: the bugs that show the simulation's power follow the code.

Method: make each of them, without a run; a change of the code that leaves one behind is seen here in seconds.
"""

from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_bug_fits_the_code(mutation: Mutation) -> None:
    _, name, function = mutation.made()
    assert function.__name__ == name
