"""The file of the descriptor socket: one daemon at a time, right permissions, and nothing stale in the way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final

from kvtierd.errors import StartupError

MAX_PATH_BYTES: Final = 107
"""Longest path of a unix socket."""
_FIX: Final = "set server.descriptor_socket to another path"


class SocketFile:
    """A listening SOCK_SEQPACKET socket at a path."""

    def __init__(self, path: Path, mode: int) -> None:
        self._path = path
        self._mode = mode
        self._lock = -1
        self._identity: tuple[int, int] | None = None

    def listen(self, backlog: int) -> socket.socket:
        """Bind, set permissions, listen. Returns a non-blocking socket. Raises StartupError."""
        path = self._path
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise StartupError(f"the socket path {path} is longer than {MAX_PATH_BYTES} bytes; set server.descriptor_socket")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._remove_stale()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.setblocking(False)
                sock.bind(str(path))
                # Nobody can connect before listen(), so the wrong permissions are never in force.
                path.chmod(self._mode)
                info = path.lstat()
                self._identity = (info.st_dev, info.st_ino)
                sock.listen(backlog)
            except BaseException:
                sock.close()
                raise
        except OSError as e:
            self._drop_lock()
            raise StartupError(f"cannot listen on the descriptor socket {path}: {e.strerror}; {_FIX}") from e
        except StartupError:
            self._drop_lock()
            raise
        return sock

    def close(self, sock: socket.socket) -> None:
        """Stop listening and remove the file, if it is still this socket's."""
        sock.close()
        with contextlib.suppress(OSError):
            info = self._path.lstat()
            if (info.st_dev, info.st_ino) == self._identity:
                self._path.unlink()
        self._drop_lock()

    def _take_lock(self) -> None:
        """Two daemons that find the same stale file must not both remove it. The lock file stays."""
        self._lock = os.open(self._path.with_name(self._path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise StartupError(f"another kvtierd serves descriptors on {self._path}; stop it, or {_FIX}") from e

    def _drop_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_stale(self) -> None:
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise StartupError(f"{self._path} exists and is no socket; remove it, or {_FIX}")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self._path))
            except (ConnectionRefusedError, FileNotFoundError):
                self._path.unlink(missing_ok=True)
                return
            except BlockingIOError:
                pass  # somebody listens and is busy
            except OSError as e:
                raise StartupError(f"{self._path} is in use or cannot be checked: {e.strerror}; remove it, or {_FIX}") from e
        raise StartupError(f"another program listens on {self._path}; stop it, or {_FIX}")
