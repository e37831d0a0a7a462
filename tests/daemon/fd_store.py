"""What systemd does for a unit with a file descriptor store, as far as kvtierd uses it; run as a script it starts the unit."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from kvtierd.testing.daemon import DaemonProcess


class FdStore:
    """Keeps the descriptors that a daemon sends, and passes them to the next one that it starts."""

    def __init__(self, folder: Path) -> None:
        self.kept: dict[str, int] = {}
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        self._pass = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._pass.bind(str(folder / "pass"))
        self._pass.listen()
        self._folder = folder
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._receive, self._serve)]
        for thread in self._threads:
            thread.start()

    def own(self, daemon: DaemonProcess) -> None:
        """Have a daemon started as a unit of this store."""
        daemon.command = [sys.executable, __file__, str(self._folder), *daemon.command]

    def _receive(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._notify, 4096, 4)
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            name = fields.get("FDNAME", "")
            if fields.get("FDSTORE") == "1":
                self.kept[name] = fds[0]
            elif fields.get("FDSTOREREMOVE") == "1" and name in self.kept:
                os.close(self.kept.pop(name))
            elif name == "quit":
                return

    def _serve(self) -> None:
        while True:
            peer, _ = self._pass.accept()
            with peer:
                names = list(self.kept)
                if peer.recv(1) == b"q":
                    return
                socket.send_fds(peer, [":".join(names).encode() or b":"], [self.kept[n] for n in names])

    def close(self) -> None:
        """End the threads and let go of everything."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
            s.sendto(b"FDNAME=quit", str(self._folder / "notify"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.connect(str(self._folder / "pass"))
            s.send(b"q")
        for thread in self._threads:
            thread.join()
        for fd in self.kept.values():
            os.close(fd)
        self._notify.close()
        self._pass.close()


def _start(folder: str, command: list[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(os.path.join(folder, "pass"))
        peer.send(b"s")
        data, fds, _, _ = socket.recv_fds(peer, 65_536, 250)
    os.environ["NOTIFY_SOCKET"] = os.path.join(folder, "notify")
    if fds:
        # Those that are in the way of their places go elsewhere first.
        high = [os.dup2(fd, 1000 + i) for i, fd in enumerate(fds)]
        for place, fd in enumerate(high, 3):
            os.dup2(fd, place, inheritable=True)
            os.close(fd)
        os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(fds)), "LISTEN_FDNAMES": data.decode()}
    os.execvp(command[0], command)


if __name__ == "__main__":
    _start(sys.argv[1], sys.argv[2:])
