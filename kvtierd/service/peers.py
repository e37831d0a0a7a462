"""Who on this machine may use the daemon's sockets: its own user, root, and those whom the configuration names.

The kernel keeps others out: the socket files carry access control lists, because gRPC does not tell whose connection a call came
over. On the descriptor socket the daemon asks for the peer's user and groups as well.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kvtierd.errors import StartupError

log = logging.getLogger(__name__)

ACL: Final = "system.posix_acl_access"
READ_WRITE: Final = 6
SEARCH: Final = 1
_HEAD: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_OWNER, _USER, _OWN_GROUP, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NO_ID: Final = 0xFFFFFFFF
_SO_PEERGROUPS: Final = 59
_MAX_GROUPS: Final = 256
"""Groups of a peer that Python can ask for; one with more counts as a member of its first group only."""
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


class Peers:
    """Whom the sockets let in.

    Args:
        mode: permissions of the sockets.
        users: allowed beside the daemon's own user and root.
        groups: whose members are allowed.
    """

    def __init__(self, mode: int, users: Iterable[int] = (), groups: Iterable[int] = ()) -> None:
        self._mode = mode
        self._users = frozenset(users)
        self._groups = frozenset(groups)

    @property
    def named(self) -> bool:
        """Whether others are allowed by name."""
        return bool(self._users or self._groups)

    def admit(self, uid: int, gids: Iterable[int]) -> bool:
        """Whether a user with these groups may come in."""
        if uid in (os.getuid(), 0):
            return True
        if self.named:
            return uid in self._users or not self._groups.isdisjoint(gids)
        return bool(self._mode & 0o066)  # whoever could connect was meant to

    def open_socket(self, path: Path) -> None:
        """Give a socket file its permissions. Raises OSError, StartupError."""
        path.chmod(self._mode)
        if self.named:
            self._allow(path, READ_WRITE)

    def open_folder(self, path: Path, *, made: bool) -> None:
        """Let those who are allowed through the sockets' folder, if the daemon makes it or once has.

        Raises:
            OSError: the folder cannot be looked at.
            StartupError: it can have no access control list.
        """
        if not self.named:
            return
        if made or (path.stat().st_uid == os.getuid() and ACL in os.listxattr(path)):
            self._allow(path, SEARCH)
        elif not path.stat().st_mode & stat.S_IXOTH:
            log.warning(
                "%s may keep out whom server.allow_users and server.allow_groups name; let them through, as by chmod o+x", path
            )

    def _allow(self, path: Path, bits: int) -> None:
        owner = path.stat().st_mode >> 6 & 7
        try:
            os.setxattr(path, ACL, _HEAD + b"".join(_ENTRY.pack(*entry) for entry in self._entries(owner, bits)))
        except OSError as e:
            raise StartupError(
                f"{path} can have no access control list ({e.strerror}), which server.allow_users and server.allow_groups need; "
                "set server.socket to a folder on another file system, or leave them out and set server.socket_mode"
            ) from e

    def _entries(self, owner: int, bits: int) -> Iterator[tuple[int, int, int]]:
        """Tag, permissions and number, in the kernel's order."""
        yield _OWNER, owner, _NO_ID
        for uid in sorted(self._users):
            yield _USER, bits, uid
        yield _OWN_GROUP, 0, _NO_ID
        for gid in sorted(self._groups):
            yield _GROUP, bits, gid
        yield _MASK, bits, _NO_ID
        yield _OTHERS, 0, _NO_ID


def credentials_of(sock: socket.socket) -> tuple[int, int, list[int]]:
    """Process id, user and groups of the peer of a connected unix socket, as they were when it connected. Raises OSError."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    try:
        more = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:
        more = b""
    return pid, uid, [gid, *struct.unpack(f"{len(more) // 4}I", more)]
