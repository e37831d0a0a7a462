"""Prometheus from Debian's package, in a folder of its own: ``make test-prometheus`` fetches it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".prometheus" / "usr" / "bin"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These need tools that are no Python packages, so they have a target of their own."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder of ``prometheus`` and ``promtool``."""
    assert (TOOLS / "promtool").exists(), "run make test-prometheus, which fetches Debian's package"
    return TOOLS
