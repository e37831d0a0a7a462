"""The descriptor socket itself: a listening SOCK_SEQPACKET socket with the right permissions from its first moment."""

from __future__ import annotations

import socket
from pathlib import Path

from kvtierd.service.peers import Peers
from kvtierd.service.socketpath import SocketPath


class SocketFile:
    """A listening SOCK_SEQPACKET socket at a path."""

    def __init__(self, path: Path, peers: Peers) -> None:
        self._place = SocketPath(path, socket.SOCK_SEQPACKET, key="server.descriptor_socket", name="descriptor socket", peers=peers)
        self._peers = peers

    def listen(self, backlog: int) -> socket.socket:
        """Bind, set permissions, listen. Returns a non-blocking socket. Raises StartupError."""
        place = self._place
        place.claim()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.bind(str(place.path))
            # Nobody can connect before listen(), so the wrong permissions are never in force.
            self._peers.open_socket(place.path)
            place.bound()
            sock.listen(backlog)
        except OSError as e:
            sock.close()
            place.release()
            raise place.unusable(e) from e
        return sock

    def close(self, sock: socket.socket) -> None:
        """Stop listening and remove the file, if it is still this socket's."""
        sock.close()
        self._place.release()
