"""Goal: no bytes that reach the daemon from outside end it, hang it or make it answer with somebody else's bytes.

Method: the corpus of each target, and a fixed number of changes of it, the same in each run. `make fuzz` goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.changes import changed
from tests.fuzz.targets import TARGETS, corpus_of

CHANGES = {"rpc": 150, "stream": 60, "packet": 100, "slot": 400, "toml": 100, "yaml": 100}
"""Changes tried by target; fewer of those that open a store."""


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    made = TARGETS[request.param](tmp_path)
    yield request.param, made
    if hasattr(made, "close"):
        made.close()


def test_the_corpus_and_changes_of_it(target: tuple[str, Any]) -> None:
    name, run = target
    corpus = corpus_of(name)
    assert corpus, "there is something to begin with"
    for data in corpus:
        run(data)

    @settings(
        max_examples=CHANGES.get(name, 40), derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(changed(corpus))
    def changes(data: bytes) -> None:
        run(data)

    changes()
