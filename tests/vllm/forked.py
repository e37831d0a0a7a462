"""Engine processes forked from one that has imported vLLM already, which takes an engine longer than all else that it does.

They share what a process decides at its start, as the seed of ``hash``: what must not depend on that is tested with programs
of their own.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
import subprocess
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest import mock

from kvtierd.testing.vllm.environment import engine_environment


class ForkedEngine:
    """What a test needs of ``subprocess.Popen``, for an engine that is forked.

    Args:
        job: file with what it is to do.
        report: file for its report.
        log: file for its output.
        control: its end of the line to the test.
        environment: all of its variables.
    """

    def __init__(self, job: Path, report: Path, log: Path, control: socket.socket, environment: dict[str, str]) -> None:
        self._process = _context().Process(target=_run, args=(job, report, log, control, environment))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative after a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("engine", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self._process.kill()


@functools.cache
def _context() -> ForkServerContext:
    """Starts the process that is forked from, in an engine's environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.vllm.preload"])
    with mock.patch.dict(os.environ, engine_environment(), clear=True):
        forkserver.ensure_running()
    return context


def _run(job: Path, report: Path, log: Path, control: socket.socket, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.close(output)
    from tests.vllm.engine import run

    run(job, report, control)
