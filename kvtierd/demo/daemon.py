"""The demo's daemon and its folder: neither may outlive the demo, however it ends.

The daemon has a session of its own, so that Ctrl-C reaches the demo alone, which then ends everything in order. Should the demo
itself be killed, the kernel kills its children, and the next demo removes the folder that was left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import tomli_w

import kvtierd
from kvtierd.testing.daemon import DaemonProcess

PREFIX: Final = "demo-"
LOCK: Final = "demo.lock"
MAX_SOCKET_PATH: Final = 90
"""A unix socket's path has at most 107 bytes; the second socket's name is a little longer."""
_PR_SET_PDEATHSIG: Final = 1
_TIE: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Asks the kernel for SIGKILL when the parent ends, then becomes the program itself. Not ``preexec_fn``: that may deadlock in a
process with threads."""


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class DemoDaemon(DaemonProcess):
    """A daemon that dies with the thread that launched it.

    Args:
        folder: for sockets, configuration, log and NVMe pool.
        config: as `DaemonProcess`.
    """

    def __init__(self, folder: Path, config: dict[str, dict[str, Any]]) -> None:
        super().__init__(folder, config)
        self._sockets: str | None = None
        if len(os.fsencode(folder)) > MAX_SOCKET_PATH:
            self._sockets = tempfile.mkdtemp(prefix="kvtierd-")
            self.config["server"]["socket"] = f"{self._sockets}/k.sock"

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process without waiting until it serves."""
        path = self.folder / "kvtierd.toml"
        path.write_text(tomli_w.dumps(self.config))
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVTIERD_")} | self.environment
        source = str(Path(kvtierd.__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [source, env.get("PYTHONPATH")]))
        serve = ["-m", "kvtierd", "serve", "--config", str(path)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603 - this interpreter, and a text of our own
                [sys.executable, "-I", "-c", _TIE, str(os.getpid()), *serve],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        return self.process

    @property
    def ended(self) -> int | None:
        """Exit status when the process has ended by itself; None while it runs or when there is none."""
        return None if self.process is None else self.process.poll()

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log().strip().splitlines()
        return lines[-1] if lines else "its log is empty"

    def remove_sockets(self) -> None:
        """Remove the folder of the sockets, where that is another."""
        if self._sockets is not None:
            shutil.rmtree(self._sockets, ignore_errors=True)


@contextlib.contextmanager
def demo_folder(base: Path, *, keep: bool) -> Iterator[Path]:
    """A new folder in ``base``, removed at the end unless it is to be kept. Removes what killed demos have left there.

    Raises:
        OSError: it cannot be made.
    """
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    unlocked = folder / "unlocked"
    with unlocked.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(folder / LOCK)  # locked before it has the name that others look for
        try:
            yield folder
        finally:
            with undisturbed():
                if keep:
                    (folder / LOCK).unlink(missing_ok=True)
                else:
                    shutil.rmtree(folder, ignore_errors=True)


def _sweep(base: Path) -> None:
    """Remove folders whose demo is gone: their lock is free."""
    for path in base.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM, for cleaning up and for starting children, which inherit that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def filesystem_of(folder: Path) -> str:
    """Type of the file system that holds a folder, such as "ext4"; empty when unknown."""
    best, found = -1, ""
    where = str(folder.resolve())
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            mount = mount.replace("\\040", " ").rstrip("/")
            if (where + "/").startswith(mount + "/") and len(mount) >= best:
                best, found = len(mount), kind
    return found
