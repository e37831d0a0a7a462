"""What holds for all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# How long a test takes says how busy the machine is.
settings.register_profile("kvtierd", deadline=None)
settings.load_profile("kvtierd")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show why a test that passed at the second try had failed at the first."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"why {report.nodeid} was run again")
        terminalreporter.line(report.longreprtext)
