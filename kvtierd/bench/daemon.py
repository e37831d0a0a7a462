"""A daemon of one's own for a measurement: a child process with its files in a temporary folder on a disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias

import grpc
import tomli_w

from kvtierd.bench.measure import BenchError, filesystem_of, status_bytes
from kvtierd.lifetime import scratch_folder, tied
from kvtierd.v1 import admin_pb2, admin_pb2_grpc

POLL_S: Final = 0.005
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
CALL_TIMEOUT_S: Final = 10.0
PREFAULT_TIMEOUT_S: Final = 60.0
LOG_TAIL: Final = 2000
RESERVE_BYTES: Final = 512 << 20
"""Free space that a measurement leaves alone."""

Tables: TypeAlias = Mapping[str, Mapping[str, object]]
"""Configuration of a daemon by table and key."""


@contextlib.contextmanager
def work_folder(parent: Path | None) -> Iterator[Path]:
    """A temporary folder on a disk, removed at the end.

    Args:
        parent: where to make it; None means the user's cache folder.

    Raises:
        BenchError: it cannot be made, or is not on a disk.
    """
    where = parent or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(where, "kvtierd-bench-"))
        except OSError as e:
            raise BenchError(f"cannot make a folder in {where}: {e.strerror}; name another with --folder") from e
        if filesystem_of(folder).startswith(("tmpfs", "ramfs", "overlay")):
            raise BenchError(f"{where} is no disk ({filesystem_of(folder)}); name a folder on one with --folder")
        yield folder


def need_space(folder: Path, size_bytes: int) -> None:
    """Check that a folder has room. Raises BenchError when it has not."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes + RESERVE_BYTES:
        raise BenchError(
            f"this needs {(size_bytes + RESERVE_BYTES) / 2**30:.1f} GiB in {folder}; {free / 2**30:.1f} GiB are free: "
            "name a larger disk with --folder, or measure less"
        )


class BenchDaemon:
    """A daemon in a child process. A context manager: ends the child and removes its files.

    Args:
        folder: where its files go; made, and removed at the end.
        tables: configuration by table; sockets and the NVMe folder are set here.
    """

    def __init__(self, folder: Path, tables: Tables) -> None:
        self._folder = folder
        # A unix socket's path has at most 107 bytes, and the folder may be a deep one.
        self._sockets = contextlib.ExitStack()
        self._socket = self._sockets.enter_context(scratch_folder(Path(tempfile.gettempdir()), "kvtb-")) / "d.sock"
        self.address = f"unix:{self._socket}"
        self._log = folder / "log"
        config: dict[str, Any] = {name: dict(table) for name, table in tables.items()}
        config["server"] = {"socket": str(self._socket), "metrics": ""} | config.get("server", {})
        config["nvme"] = {"folders": [str(folder / "nvme")]} | config.get("nvme", {})
        config["log"] = {"level": "warning"}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kvtierd.toml").write_text(tomli_w.dumps(config))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running child."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> float:
        """Start it. Returns the seconds until it answered its first call.

        Raises:
            BenchError: it ended or did not answer in time; the text has the end of its log.
        """
        clean = {k: v for k, v in os.environ.items() if not k.startswith("KVTIERD_")}
        env = clean | {"KVTIERD_CONFIG": str(self._folder / "kvtierd.toml")}
        began_s = time.perf_counter()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter
                tied([sys.executable, "-m", "kvtierd", "serve"]), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        while not self._answers():
            if self._process.poll() is not None:
                raise BenchError(f"the daemon ended with status {self._process.returncode}:\n{self.log_tail()}")
            if time.perf_counter() - began_s > START_TIMEOUT_S:
                raise BenchError(f"the daemon did not answer within {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}")
            time.sleep(POLL_S)
        return time.perf_counter() - began_s

    def _answers(self) -> bool:
        # A plain connect first: a gRPC channel that was refused once backs off for a second, which would blur the time.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket))
            except OSError:
                return False
        try:
            status(self.address)
        except grpc.RpcError:
            return False
        return True

    def log_tail(self) -> str:
        """The end of its log."""
        try:
            return self._log.read_text(errors="replace")[-LOG_TAIL:].strip()
        except OSError:
            return ""

    def kill(self) -> None:
        """End it the hard way, as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order; the hard way when it takes too long."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def status_bytes(self, name: str) -> int:
        """See :func:`kvtierd.bench.measure.status_bytes`."""
        return status_bytes(self.pid, name)

    def wait_prefaulted(self, size_bytes: int) -> None:
        """Wait until about ``size_bytes`` of its shared memory are there, so that its own start does not disturb."""
        until_s = time.perf_counter() + PREFAULT_TIMEOUT_S
        while self.status_bytes("RssShmem") < 0.97 * size_bytes and time.perf_counter() < until_s:
            time.sleep(0.05)

    def __enter__(self) -> BenchDaemon:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # What is measured is not kept: nothing to write down first.
        self.kill()
        self._sockets.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def status(address: str) -> admin_pb2.GetStatusResponse:
    """The daemon's status. Raises grpc.RpcError."""
    with _admin(address) as stub:
        answer: admin_pb2.GetStatusResponse = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        return answer


def drain(address: str, timeout_s: float) -> float:
    """Have everything written to NVMe, then go on as before. Returns the seconds it took, connecting left out.

    Raises:
        BenchError: something was left when the time was over.
    """
    with _admin(address) as stub:
        stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=CALL_TIMEOUT_S)
        began_s = time.perf_counter()
        answer = stub.Drain(admin_pb2.DrainRequest(timeout_s=timeout_s, resume=True), timeout=timeout_s + CALL_TIMEOUT_S)
        took_s = time.perf_counter() - began_s
    if answer.dirty_bytes:
        raise BenchError(f"{answer.dirty_bytes} bytes were not written to NVMe within {timeout_s:.0f} s")
    return took_s


@contextlib.contextmanager
def _admin(address: str) -> Iterator[Any]:
    with grpc.insecure_channel(address) as channel:
        yield admin_pb2_grpc.KvTierAdminServiceStub(channel)
