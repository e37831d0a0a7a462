"""The demo's daemon, which does not outlive the demo.

It has a session of its own, so that Ctrl-C reaches the demo alone, which then ends everything in order.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import tomli_w

import kvtierd
from kvtierd.lifetime import scratch_folder, tied
from kvtierd.testing.daemon import DaemonProcess

SOCKETS_PREFIX: Final = "kvtierd-sockets-"
MAX_SOCKET_PATH: Final = 90
"""A unix socket's path has at most 107 bytes; the second socket's name is a little longer."""


class DemoDaemon(DaemonProcess):
    """A daemon that dies with the thread that launched it.

    Args:
        folder: for sockets, configuration, log and NVMe pool.
        config: as `DaemonProcess`.
    """

    def __init__(self, folder: Path, config: dict[str, dict[str, Any]]) -> None:
        super().__init__(folder, config)
        self._sockets = contextlib.ExitStack()
        if len(os.fsencode(folder)) > MAX_SOCKET_PATH:
            sockets = self._sockets.enter_context(scratch_folder(Path(tempfile.gettempdir()), SOCKETS_PREFIX))
            self.config["server"]["socket"] = f"{sockets}/k.sock"

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
                tied([sys.executable, *serve]),
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
        self._sockets.close()


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
