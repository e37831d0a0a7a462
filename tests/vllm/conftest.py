"""Fixtures: tiny models, daemons, and engines in processes of their own.

The tests need vLLM in the environment that runs them; ``make test-vllm`` makes such an environment.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.daemon import DaemonProcess
from kvtierd.testing.vllm.environment import engine_environment
from kvtierd.testing.vllm.model import ARCHITECTURES
from tests.vllm.runner import EngineProcess, Report

HERE = Path(__file__).parent
OTHER_SEED = 99
NOT_PLAIN = ("kv_transfer_config", "pipeline_parallel_size", "tensor_parallel_size", "worker_cls")
"""Arguments of ``vllm.LLM`` that a plain engine is made without."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is in this folder where vLLM is missing; let fixtures take their time where it is not."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.timeout(900))
        if missing:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: run make test-vllm"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with one model of each architecture, and ``llama-other``: a llama with other weights."""
    folder = tmp_path_factory.mktemp("models")
    wanted = [f"{name}={name}" for name in ARCHITECTURES] + [f"llama-other=llama:{OTHER_SEED}"]
    made = subprocess.run(
        [sys.executable, "-m", "kvtierd.testing.vllm.model", str(folder), *wanted],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-4000:]
    return folder


class Daemons:
    """Makes daemons that are killed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.made: list[DaemonProcess] = []

    def __call__(self, name: str = "daemon", start: bool = True, **config: dict[str, Any]) -> DaemonProcess:
        """A daemon in a folder of its own."""
        daemon = DaemonProcess(self._folder / name, config)
        self.made.append(daemon)
        return daemon.start() if start else daemon

    def close(self) -> None:
        """Kill them."""
        for daemon in self.made:
            daemon.kill()


class Engines:
    """Starts engine processes that are killed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[EngineProcess] = []

    def start(self, engines: list[dict[str, Any]], **options: Any) -> EngineProcess:
        """Start a process and do not wait for it."""
        process = EngineProcess(self._folder / f"engine{len(self._made)}", engines, **options)
        self._made.append(process)
        return process

    def run(self, engines: list[dict[str, Any]], **options: Any) -> Report:
        """Start a process and wait for its report."""
        return self.start(engines, **options).finish()

    def close(self) -> None:
        """Kill them."""
        for process in self._made:
            process.kill()


def _closing(made: Any) -> Iterator[Any]:
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    """Daemons of one test."""
    yield from _closing(Daemons(tmp_path))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Engines of one test."""
    yield from _closing(Engines(tmp_path))


@pytest.fixture(scope="module")
def module_daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    """Daemons of one file of tests."""
    yield from _closing(Daemons(tmp_path_factory.mktemp("daemons")))


@pytest.fixture(scope="module")
def module_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines of one file of tests."""
    yield from _closing(Engines(tmp_path_factory.mktemp("engines")))


@pytest.fixture(scope="session")
def baseline(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[int]]]:
    """Output without kvtierd: ``baseline(arguments, prompts, max_tokens)`` runs an engine once for each distinct question.

    It is one of a single process, whatever the arguments say."""
    known: dict[str, list[list[int]]] = {}
    folder = tmp_path_factory.mktemp("baseline")

    def tokens(arguments: dict[str, Any], prompts: list[dict[str, Any]], max_tokens: int) -> list[list[int]]:
        plain = {key: value for key, value in arguments.items() if key not in NOT_PLAIN} | {"distributed_executor_backend": "uni"}
        asked = [{"tokens": prompt["tokens"]} for prompt in prompts]
        question = repr((sorted(plain.items()), asked, max_tokens))
        if question not in known:
            step = {"do": "generate", "name": "plain", "prompts": asked, "one_by_one": True, "max_tokens": max_tokens}
            process = EngineProcess(folder / f"run{len(known)}", [{"name": "plain", "llm": plain, "steps": [step]}])
            known[question] = process.finish().only.tokens("plain")
        return known[question]

    return tokens
