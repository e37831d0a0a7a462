"""Runs a real daemon as a child process, for tests, the demo and the benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import tomli_w

from kvtierd.errors import StartupError
from kvtierd.lifetime import tied
from kvtierd.v1 import admin_pb2 as pb
from kvtierd.v1 import admin_pb2_grpc

START_TIMEOUT_S = 60.0


class _Shows(grpc.UnaryUnaryClientInterceptor):
    """Shows a token with each call."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Add the header."""
        return continuation(client_call_details._replace(metadata=[self._header]), request)


class DaemonProcess:
    """One daemon in a folder of its own.

    Args:
        folder: for sockets, configuration, log and, unless configured otherwise, the NVMe pool.
        config: tables that go into the configuration, for example ``{"cpu": {"capacity": "64MiB"}}``.
        tie: let it die with the thread that starts it.
    """

    def __init__(self, folder: Path, config: dict[str, dict[str, Any]] | None = None, *, tie: bool = False) -> None:
        self.folder = folder
        self.log_path = folder / "kvtierd.log"
        self.config: dict[str, dict[str, Any]] = {
            "cpu": {"capacity": "64MiB"},
            "nvme": {"capacity": "256MiB", "folders": [str(folder / "nvme")], "allow_volatile": True, "reserve": "0"},
            "server": {"socket": str(folder / "k.sock"), "metrics": "", "drain_timeout": "10s"},
        }
        for table, keys in (config or {}).items():
            self.config.setdefault(table, {}).update(keys)
        self._tie = tie
        self.token = ""
        """Shown by :meth:`status` and :meth:`admin`, for a daemon that asks for one."""
        self.command = [sys.executable, "-m", "kvtierd"]
        self.environment: dict[str, str] = {}
        """Variables that the process gets besides this one's."""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix:{self.config['server']['socket']}"

    @property
    def pid(self) -> int:
        """Process id of the running daemon."""
        assert self.process is not None
        return self.process.pid

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process without waiting until it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "kvtierd.toml"
        path.write_text(tomli_w.dumps(self.config))
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVTIERD_")} | self.environment
        command = [*self.command, "serve", "--config", str(path)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(tied(command) if self._tie else command, stdout=log, stderr=log, env=env)
        return self.process

    def start(self, timeout_s: float = START_TIMEOUT_S) -> DaemonProcess:
        """Start and wait until it serves.

        Raises:
            StartupError: with the end of its log when it does not.
        """
        process = self.launch()
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if process.poll() is not None:
                raise StartupError(f"the daemon ended with status {process.returncode}:\n{self.log()[-2000:]}")
            with contextlib.suppress(grpc.RpcError, OSError):
                if self._listens():
                    self.status(timeout_s=2.0)
                    return self
            time.sleep(0.02)
        raise StartupError(f"the daemon did not serve within {timeout_s} s:\n{self.log()[-2000:]}")

    def _listens(self) -> bool:
        """Whether anybody does at its address; asked again and again, as it costs next to nothing beside a call that fails.

        Raises OSError for a path that is no address.
        """
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(self.config["server"]["socket"]) == 0

    def log(self) -> str:
        """What the daemon has written to its log."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @contextlib.contextmanager
    def admin(self) -> Iterator[admin_pb2_grpc.KvTierAdminServiceStub]:
        """A stub of the admin API, on a connection of its own: one kept from before may lead to a former daemon at this address."""
        options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(self.address, options=options) as channel:
            shown = _Shows(self.token) if self.token else None
            yield admin_pb2_grpc.KvTierAdminServiceStub(channel if shown is None else grpc.intercept_channel(channel, shown))

    def status(self, timeout_s: float = 10.0) -> pb.GetStatusResponse:
        """The daemon's status. Raises grpc.RpcError when it does not answer."""
        with self.admin() as stub:
            answer: pb.GetStatusResponse = stub.GetStatus(pb.GetStatusRequest(), timeout=timeout_s)
            return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.end(signal.SIGKILL)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and wait. Returns the exit status."""
        return self.end(signal.SIGTERM, timeout_s)

    def end(self, number: signal.Signals, timeout_s: float = 60.0) -> int:
        """Send a signal and wait. Returns the exit status; a daemon that does not end in time is killed."""
        process = self.process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            self.process = None
