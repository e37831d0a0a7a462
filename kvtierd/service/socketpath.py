"""The path of a unix socket: one daemon at a time, nothing stale in the way, and only one's own file removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Final

from kvtierd.errors import StartupError
from kvtierd.service.peers import Peers

MAX_PATH_BYTES: Final = 107
"""Longest path of a unix socket that Linux takes."""
PRIVATE_NAME_BYTES: Final = 6
"""Length of the name under which a socket is made: that of ``k.sock``, so that it seldom costs anything."""


class SocketPath:
    """Owns a path from :meth:`claim` to :meth:`release`.

    Args:
        path: of the socket.
        kind: SOCK_STREAM or SOCK_SEQPACKET, to ask whether somebody listens.
        key: configuration key that names the path, for error texts.
        name: what the socket is, for error texts.
        peers: whom the socket lets in.
        private: the folder must be one's own (or root's).
    """

    def __init__(self, path: Path, kind: socket.SocketKind, *, key: str, name: str, peers: Peers, private: bool = False) -> None:
        self.path = path
        self._peers = peers
        self._kind = kind
        self._key = key
        self._name = name
        self._private = private
        self._fix = f"set {key} to another path"
        self._lock = -1
        self._identity: tuple[int, int, int] | None = None
        self._maker: Path | None = None

    def claim(self) -> None:
        """Take the path: make its folder, lock it, remove a file that a dead daemon left. Raises StartupError."""
        if max(len(os.fsencode(self.path)), len(os.fsencode(self.path.parent)) + 1 + PRIVATE_NAME_BYTES) > MAX_PATH_BYTES:
            raise StartupError(
                f"the socket path {self.path} is longer than {MAX_PATH_BYTES} bytes; set {self._key} to a shorter one"
            )
        try:
            self._make_folder()
            if self._private and self.path.parent.stat().st_uid not in (os.getuid(), 0):
                raise StartupError(f"{self.path.parent} belongs to another user; set {self._key} to a folder of your own")
            self._take_lock()
            self._remove_stale()
        except OSError as e:
            self._drop_lock()
            raise self.unusable(e) from e
        except StartupError:
            self._drop_lock()
            raise

    def unusable(self, error: OSError) -> StartupError:
        """What to raise when the socket cannot be had."""
        return StartupError(f"cannot listen on the {self._name} {self.path}: {error.strerror}; {self._fix}")

    def private(self) -> Path:
        """A path beside the real one that nobody else uses, to bind to; :meth:`publish` follows.

        For servers that remove the path that they were told to bind when they end: by then another one's socket may be there.
        """
        self._maker = self.path.with_name("~" + secrets.token_hex(PRIVATE_NAME_BYTES)[: PRIVATE_NAME_BYTES - 1])
        return self._maker

    def publish(self) -> None:
        """Give a socket that was bound to :meth:`private` its permissions and its real path. Raises StartupError."""
        assert self._maker is not None
        try:
            self._peers.open_socket(self._maker)
            self._maker.rename(self.path)
            self.bound()
        except OSError as e:
            raise self.unusable(e) from e

    def bound(self) -> None:
        """Note that the file at the path is one's own now. Raises OSError."""
        self._identity = self._found()

    def _found(self) -> tuple[int, int, int]:
        """Which file is at the path. The time is told apart too: the number of a file that is gone is given out again."""
        info = self.path.lstat()
        return info.st_dev, info.st_ino, info.st_ctime_ns

    def release(self) -> None:
        """Remove the file, if it is still one's own, and let others have the path."""
        with contextlib.suppress(OSError):
            if self._found() == self._identity:
                self.path.unlink()
        if self._maker is not None:
            self._maker.unlink(missing_ok=True)
        self._drop_lock()

    def _make_folder(self) -> None:
        folder = self.path.parent
        made = not folder.is_dir()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._peers.open_folder(folder, made=made)

    def _take_lock(self) -> None:
        """Two daemons that find the same stale file must not both remove it. The lock file stays."""
        self._lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise StartupError(f"another kvtierd has the {self._name} {self.path}; stop it, or {self._fix}") from e

    def _drop_lock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise StartupError(f"{self.path} exists and is no socket; remove it, or {self._fix}")
        with socket.socket(socket.AF_UNIX, self._kind) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                self.path.unlink(missing_ok=True)
                return
            except BlockingIOError:
                pass  # somebody listens and is busy
            except OSError as e:
                raise StartupError(f"{self.path} is in use or cannot be checked: {e.strerror}; remove it, or {self._fix}") from e
        raise StartupError(f"another program listens on {self.path}; stop it, or {self._fix}")
