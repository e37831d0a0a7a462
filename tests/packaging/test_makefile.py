"""Goal: make sets up its environment when it must, and leaves it alone otherwise.

Method: the Makefile runs in a folder of its own with a Python that only records how it was called, so that nothing is
installed; a target is made twice, after a mere change of time stamps, and after a change of pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
    --version) echo Python 3.11.0 ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; cp "$0" "$3/bin/kvtierd" ;;
    *"$FAIL_ON"*) [ -z "$FAIL_ON" ] || exit 1 ;;
esac
"""


class Checkout:
    """A folder with the Makefile and the recording Python."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.python = folder / "fake-python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)

    def make(self, target: str, fail_on: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
        """Run make; returns its result and the calls of Python other than --version."""
        self.calls.write_text("")
        result = subprocess.run(
            ["make", "--no-print-directory", target, f"PYTHON={self.python}"],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "CALLS": str(self.calls), "FAIL_ON": fail_on},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return result, [line for line in self.calls.read_text().splitlines() if line != "--version"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def installs(calls: list[str]) -> list[str]:
    return [call.split()[-1] for call in calls if " install " in call]


def test_demo_installs_little_and_once(checkout: Checkout) -> None:
    result, calls = checkout.make("demo")
    assert result.returncode == 0, result.stderr
    assert installs(calls) == [".[plot]"]
    assert calls[-1] == "demo"
    assert checkout.make("demo")[1] == ["demo"]


def test_time_stamps_alone_change_nothing(checkout: Checkout) -> None:
    checkout.make("test")
    os.utime(checkout.folder / "pyproject.toml", (2**32, 2**32))
    assert installs(checkout.make("test")[1]) == []
    assert checkout.make("demo")[1] == ["demo"]


def test_changed_project_makes_a_new_environment(checkout: Checkout) -> None:
    checkout.make("test")
    left_behind = checkout.folder / ".venv" / "left-behind"
    left_behind.touch()
    with (checkout.folder / "pyproject.toml").open("a") as f:
        f.write("# changed\n")
    assert installs(checkout.make("test")[1]) == [".[plot]", ".[dev,plot]"]
    assert not left_behind.exists()


def test_a_failed_installation_is_not_taken_for_done(checkout: Checkout) -> None:
    result, _ = checkout.make("test", fail_on=".[dev,plot]")
    assert result.returncode != 0
    assert installs(checkout.make("test")[1]) == [".[dev,plot]"]


def test_missing_venv_module_is_explained(checkout: Checkout) -> None:
    result, calls = checkout.make("demo", fail_on="import ensurepip, venv")
    assert result.returncode != 0
    assert "apt-get install python3-venv" in result.stderr
    assert installs(calls) == []


def test_old_python_is_explained(checkout: Checkout) -> None:
    result, _ = checkout.make("demo", fail_on="sys.version_info")
    assert result.returncode != 0
    assert "needs Python 3.11 or newer" in result.stderr


def test_slow_tests_may_be_absent_but_not_fail(checkout: Checkout) -> None:
    """pytest's exit code 5 says that nothing was selected; any other is a failure."""
    script = checkout.python.read_text()
    for code, expected in ((0, True), (5, True), (1, False), (2, False)):
        checkout.python.write_text(script.replace("    --version)", f'    "-m pytest"*) exit {code} ;;\n    --version)'))
        shutil.rmtree(checkout.folder / ".venv", ignore_errors=True)
        assert (checkout.make("test-slow")[0].returncode == 0) is expected, code


def test_every_target_is_in_the_help(checkout: Checkout) -> None:
    result, _ = checkout.make("help")
    wanted = {"venv", "demo", "test", "test-slow", "test-helm", "lint", "proto", "proto-check", "proto-baseline"}
    wanted |= {"help", "bench", "bench-peers", "build", "clean"}
    shown = [line.split()[1] for line in result.stdout.splitlines()]
    assert wanted <= set(shown)
