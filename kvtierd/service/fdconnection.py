"""One connection of the descriptor socket, and what its server asks the rest of the daemon."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvtierd.errors import Reason, RequestError
from kvtierd.service.peers import credentials_of
from kvtierd.v1 import fdpass_pb2 as pb

MAX_QUEUED_PACKETS: Final = 64
"""Packets that wait for a process that does not read, on top of the kernel's own buffer."""
MAX_QUEUED_DESCRIPTORS: Final = 256
"""Duplicated descriptors in these packets."""


@dataclass(frozen=True, slots=True)
class JoinGrant:
    """What a process that joins learns; ``session_id`` stays in the daemon."""

    boot_epoch: int
    slot_bytes: Sequence[int]
    session_id: int
    extents: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ExtentInfo:
    """An extent that a process may map; ``fd`` is passed on at once or duplicated. GPU memory has a handle in its place."""

    size_bytes: int
    slot_bytes: int
    shard: int
    fd: int
    device_handle: bytes = b""


class Authority(Protocol):
    """Decides what processes get, and hears what they do. Called in the event loop; must not block."""

    def join(self, session: bytes, shard: int, pins_memory: bool, numa_node: int, pid: int, uid: int, conn_id: int) -> JoinGrant:
        """Let a process into a session. ``pid`` and ``uid`` come from the kernel. Raises RequestError to refuse."""

    def may_map(self, session_id: int, extent_id: int, shard: int) -> ExtentInfo | None:
        """An extent that a session's process for this shard (-1: for all) may map; None when it may not, or there is none."""

    def probe(self, session_id: int, tenant: str, key: bytes, count: int) -> bool:
        """Whether a load of ``count`` blocks would find the first of them; if not, all of them count as missed.

        Raises:
            RequestError: the session has ended, or the key is none.
        """

    def device_joined(self, session_id: int, conn_id: int, shard: int, uuid: str) -> None:
        """A process that has just joined names its GPU. :meth:`DescriptorServer.probe_device` may follow."""

    def device_proved(self, session_id: int, conn_id: int, content: bytes, error: str) -> None:
        """What a process has read of GPU memory, or why it could not. Raises RequestError when the session has ended."""

    def unmapped(self, conn_id: int, extent_ids: list[int]) -> None:
        """A process says that it maps these no more."""

    def process_gone(self, session_id: int, conn_id: int) -> None:
        """A process that joined has closed its connection or died."""

    def extent_released(self, extent_id: int) -> None:
        """No process maps a revoked extent any more. Called once for each revoked extent."""


class Connection:
    """One process.

    Attributes:
        conn_id: number of the connection; never reused.
        pid: process id of the peer in this process's namespace; 0 when it is in another one.
        uid: user of the peer.
        gids: groups of the peer.
        given: extents whose descriptors were sent and that were not confirmed as unmapped.
        joined: whether it has joined a session.
        dismissed: whether it gets no more answers.

    Raises:
        OSError: the peer has gone.
    """

    def __init__(self, conn_id: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.conn_id = conn_id
        self.sock = sock
        self.pid, self.uid, self.gids = credentials_of(sock)
        self.session_id = -1
        self.shard = -1
        self.given: set[int] = set()
        self.joined = False
        self.dismissed = False
        self.closed = False
        self._queue: deque[tuple[bytes, list[int]]] = deque()

    def join(self, session_id: int, shard: int) -> None:
        """Note what the authority granted."""
        self.session_id = session_id
        self.shard = shard
        self.joined = True

    def transmit(self, message: pb.DescriptorResponse) -> None:
        """Send a last word if there is room for it."""
        with contextlib.suppress(OSError):
            self.sock.send(message.SerializeToString())

    def send(self, message: pb.DescriptorResponse, fds: list[int]) -> bool:
        """Send a packet, or queue it with duplicates of its descriptors.

        Returns:
            Whether the caller must now wait until the socket can be written to, and then :meth:`flush`.

        Raises:
            RequestError: OVERLOADED when the peer does not read.
            OSError: the socket failed.
        """
        data = message.SerializeToString()
        if not self._queue and self._sendmsg(data, fds):
            return False
        queued_fds = sum(len(packet[1]) for packet in self._queue)
        if len(self._queue) >= MAX_QUEUED_PACKETS or queued_fds + len(fds) > MAX_QUEUED_DESCRIPTORS:
            text = f"{len(self._queue)} packets with {queued_fds} descriptors wait for a process that does not read"
            raise RequestError(Reason.OVERLOADED, text)
        copies: list[int] = []
        self._queue.append((data, copies))
        # An extent's descriptor may be closed before the packet leaves, and its number may be something else's then.
        copies.extend(map(os.dup, fds))  # those made before a failure are in the queue, and are closed with it
        return True

    def flush(self) -> bool:
        """Send what is queued, as far as it goes. Returns whether nothing is left. Raises OSError."""
        while self._queue:
            data, fds = self._queue[0]
            if not self._sendmsg(data, fds):
                return False
            self._queue.popleft()
            _close_all(fds)
        return True

    def _sendmsg(self, data: bytes, fds: list[int]) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.sock.sendmsg([data], ancillary)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as e:
            if e.errno == errno.ENOBUFS:
                return False
            raise
        return True

    @property
    def hung_up(self) -> bool:
        """True when the peer has closed its end; an empty packet reads like that, but is none."""
        poll = select.poll()
        poll.register(self.sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def dismiss(self, last_word: pb.DescriptorResponse) -> None:
        """Drop what is queued, say why, and send nothing more. The peer sees an end of file."""
        self.mute()
        self.transmit(last_word)
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def mute(self) -> None:
        """Drop what is queued and send nothing more."""
        self.dismissed = True
        self._drop_queue()

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self._drop_queue()
        self.sock.close()

    def _drop_queue(self) -> None:
        while self._queue:
            _close_all(self._queue.popleft()[1])


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
