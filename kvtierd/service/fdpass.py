"""The descriptor socket: passes memfds to the processes of attached engines, and knows which processes are alive.

One SOCK_SEQPACKET connection a process. The kernel closes it when the process dies, however it dies, and only then
(``Authority.process_gone``) may what the process was granted be taken back. So the daemon never hangs up on a process that
joined: one that breaks the protocol or does not read is *dismissed*. Its connection is shut down for sending, which tells it
that the daemon is gone for it, it gets nothing more, and it counts as alive until it closes its end.

Everything runs in one event loop; no method blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from kvtierd.errors import Reason, RequestError
from kvtierd.service.fdconnection import Authority, Connection, ExtentInfo, JoinGrant
from kvtierd.service.fdsocket import SocketFile
from kvtierd.service.logs import Seldom
from kvtierd.service.peers import Peers
from kvtierd.v1 import fdpass_pb2 as pb

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 4096
MAX_STRANGERS: Final = 256
"""Connections that have not joined yet. One more takes the place of the oldest one of the user who has the most."""
MAX_EXTENTS_PER_PACKET: Final = 64
"""Extents in one MapExtents; the kernel passes at most 253 descriptors in one packet."""
MAX_EXTENTS_TOLD: Final = 4096
"""Extents named to a process that joins."""
MAX_PACKET_BYTES: Final = 16 << 10
MAX_UNMAPPED_PER_PACKET: Final = 2048
MAX_REVOKED_PER_PACKET: Final = 1024
PACKETS_PER_TURN: Final = 16
"""Packets read from one connection, and connections accepted, before others have their turn."""
JOIN_TIMEOUT_S: Final = 10.0
"""Time in which a connection must join, and in which one that was refused must close."""
ACCEPT_PAUSE_S: Final = 0.5
"""Pause after the process ran out of descriptors."""


class DescriptorServer:
    """Serves the descriptor socket.

    Args:
        path: of the socket.
        peers: whom the socket lets in.
        authority: decides who gets what, and hears what processes do.
    """

    def __init__(self, path: Path, peers: Peers, authority: Authority) -> None:
        self._file = SocketFile(path, peers)
        self._peers = peers
        self._authority = authority
        self._connections: dict[int, Connection] = {}
        self._ids = itertools.count(1)
        self._revoked: dict[int, set[int]] = {}
        """Revoked extents that processes still hold, with those connections."""
        self._listener: socket.socket | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._seldom = Seldom()
        self._loop: asyncio.AbstractEventLoop

    def __len__(self) -> int:
        return len(self._connections)

    async def start(self) -> None:
        """Listen. Raises StartupError when the path cannot be had; the text names the fix."""
        self._loop = asyncio.get_running_loop()
        self._listener = self._file.listen(MAX_STRANGERS)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        """Close every connection and remove the socket. The authority hears nothing of it: the daemon is going."""
        for timer in self._timers.values():
            timer.cancel()
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._file.close(self._listener)
            self._listener = None
        for connection in self._connections.values():
            self._loop.remove_reader(connection.sock.fileno())
            connection.close()
        self._connections.clear()
        self._timers.clear()
        self._revoked.clear()

    # ---- extents

    def revoke(self, extent_ids: Iterable[int]) -> None:
        """Take extents away from every process that was given one of them.

        ``Authority.extent_released`` follows once for each extent: before this returns when no process was given it, else when
        the last such process has confirmed or died. One that does neither keeps the memory, which counts as long: any access
        through a mapping makes pages anew.
        """
        ids = list(dict.fromkeys(extent_ids))
        free = []
        for extent_id in ids:
            if extent_id in self._revoked:
                continue  # under way already
            holders = self.holders(extent_id)
            if holders:
                self._revoked[extent_id] = holders
            else:
                free.append(extent_id)
        for connection in list(self._connections.values()):
            theirs = [extent_id for extent_id in ids if extent_id in connection.given]
            for start in range(0, len(theirs), MAX_REVOKED_PER_PACKET):
                message = pb.DescriptorResponse(revoked=pb.Revoked(extents=theirs[start : start + MAX_REVOKED_PER_PACKET]))
                self._send(connection, message)
        for extent_id in free:
            self._authority.extent_released(extent_id)

    def turn_away(self, session_id: int, error: RequestError) -> None:
        """Refuse the processes of a session from now on; each counts as alive until it closes its end."""
        for connection in list(self._connections.values()):
            if connection.session_id == session_id:
                self._dismiss(connection, error)

    def holders(self, extent_id: int) -> set[int]:
        """Connections that were given an extent and have not confirmed that it is unmapped."""
        return {c.conn_id for c in self._connections.values() if extent_id in c.given}

    def _give_up(self, connection: Connection, extent_ids: Iterable[int]) -> None:
        """A process holds extents no more: by its word or by its death."""
        done = []
        for extent_id in extent_ids:
            connection.given.discard(extent_id)
            waiting = self._revoked.get(extent_id)
            if waiting is not None:
                waiting.discard(connection.conn_id)
                if not waiting:
                    del self._revoked[extent_id]
                    done.append(extent_id)
        for extent_id in done:
            self._authority.extent_released(extent_id)

    # ---- connections

    def _accept(self) -> None:
        if self._listener is None:
            return
        for _ in range(PACKETS_PER_TURN):
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._warn("descriptors", f"no descriptor left for a new connection: {e}; raise the limit of open files")
                    self._loop.remove_reader(self._listener.fileno())
                    self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._accept_again)
                    return
                continue  # the peer has gone already
            self._admit(sock)

    def _accept_again(self) -> None:
        self._pause = None
        if self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _admit(self, sock: socket.socket) -> None:
        try:
            connection = Connection(next(self._ids), sock)
        except OSError:
            sock.close()
            return
        if self._timers and (len(self._timers) >= MAX_STRANGERS or len(self._connections) >= MAX_CONNECTIONS):
            self._oust_stranger()
        if len(self._connections) >= MAX_CONNECTIONS:
            text = f"{len(self._connections)} processes are connected; this daemon takes no more at present"
            connection.transmit(_error(Reason.LIMIT, text))
            connection.close()
            self._warn("refused", f"refused pid {connection.pid}: {text}")
            return
        self._connections[connection.conn_id] = connection
        self._timers[connection.conn_id] = self._loop.call_later(JOIN_TIMEOUT_S, self._drop, connection)
        self._loop.add_reader(sock.fileno(), self._readable, connection)

    def _oust_stranger(self) -> None:
        """Make place for a connection, so that nobody keeps others out by saying nothing."""
        strangers = [self._connections[conn_id] for conn_id in self._timers]  # the oldest first
        share = Counter(stranger.uid for stranger in strangers)
        oldest = next(stranger for stranger in strangers if share[stranger.uid] == max(share.values()))
        self._readable(oldest)  # its join may have come
        if oldest.conn_id in self._timers:
            self._warn("dropped", f"dropped pid {oldest.pid}, which had not joined: too many others wait")
            oldest.transmit(_error(Reason.LIMIT, "too many connections have not joined; join at once after connecting"))
            self._drop(oldest)

    def _readable(self, connection: Connection) -> None:
        for _ in range(PACKETS_PER_TURN):
            if connection.closed:
                return
            try:
                packet, _, flags, _ = connection.sock.recvmsg(MAX_PACKET_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                self._drop(connection)
                return
            except OSError as e:
                # Whatever this is, it is no death, and must not pass for one.
                self._warn("reading", f"reading from pid {connection.pid} failed: {e}")
                return
            if not packet and connection.hung_up:
                self._drop(connection)
                return
            if connection.dismissed:
                continue
            try:
                self._packet(connection, packet, flags)
            except RequestError as e:
                self._dismiss(connection, e)
            except Exception as e:
                self._warn("bug", f"a packet of pid {connection.pid} could not be served", e)
                self._dismiss(connection, RequestError(Reason.INTERNAL, "the daemon could not serve this packet; see its log"))

    def _packet(self, connection: Connection, packet: bytes, flags: int) -> None:
        """Serve one packet. Raises RequestError when the connection must not go on."""
        if flags & socket.MSG_TRUNC:
            raise RequestError(Reason.BAD_REQUEST, f"a packet has at most {MAX_PACKET_BYTES} bytes")
        if flags & socket.MSG_CTRUNC:
            # No room for control messages was offered, so the kernel has dropped what came.
            raise RequestError(Reason.BAD_REQUEST, "this socket takes no descriptors")
        try:
            request = pb.DescriptorRequest.FromString(packet)
        except DecodeError as e:
            raise RequestError(Reason.BAD_REQUEST, "the packet is no DescriptorRequest") from e
        kind = request.WhichOneof("message")
        if (kind == "join") == connection.joined:
            raise RequestError(Reason.BAD_REQUEST, "join comes first and once on each connection")
        serve: dict[str | None, Callable[[Connection, pb.DescriptorRequest], None]] = {
            "join": self._join,
            "map": self._map,
            "unmapped": self._unmapped,
            "probe": self._probe,
            "device_proof": self._device_proof,
        }
        if kind not in serve:
            raise RequestError(Reason.BAD_REQUEST, "the packet has no known message")
        serve[kind](connection, request)

    def _join(self, connection: Connection, request: pb.DescriptorRequest) -> None:
        join = request.join
        if not self._peers.admit(connection.uid, connection.gids):
            text = f"user {connection.uid} may not join; name it in server.allow_users, or a group of it in server.allow_groups"
            raise RequestError(Reason.PERMISSION, text)
        if join.shard < -1 or join.numa_node < -1:
            raise RequestError(Reason.BAD_REQUEST, "shard and numa_node are -1 or a number from 0")
        grant = self._authority.join(
            session=join.session,
            shard=join.shard,
            pins_memory=join.pins_memory,
            numa_node=join.numa_node,
            pid=connection.pid,
            uid=connection.uid,
            conn_id=connection.conn_id,
        )
        connection.join(grant.session_id, join.shard)
        self._timers.pop(connection.conn_id).cancel()
        joined = pb.Joined(boot_epoch=grant.boot_epoch, slot_bytes=grant.slot_bytes, extents=grant.extents[:MAX_EXTENTS_TOLD])
        self._send(connection, pb.DescriptorResponse(joined=joined))
        if join.device:
            self._authority.device_joined(grant.session_id, connection.conn_id, join.shard, join.device)

    def _map(self, connection: Connection, request: pb.DescriptorRequest) -> None:
        wanted = list(dict.fromkeys(request.map.extents))
        if len(request.map.extents) > MAX_EXTENTS_PER_PACKET:
            raise RequestError(
                Reason.BAD_REQUEST, f"{len(request.map.extents)} extents asked for; at most {MAX_EXTENTS_PER_PACKET} in one packet"
            )
        answer = pb.ExtentDescriptors()
        fds = []
        for extent_id in wanted:
            info = self._authority.may_map(connection.session_id, extent_id, connection.shard)
            # What is revoked stays revoked, and a shard's process gets its own shard's extents, whatever the authority says.
            if info is None or extent_id in self._revoked or connection.shard not in (-1, info.shard):
                answer.unknown.append(extent_id)
                continue
            answer.extents.add(
                id=extent_id,
                size_bytes=info.size_bytes,
                slot_bytes=info.slot_bytes,
                shard=info.shard,
                device_handle=info.device_handle,
            )
            if not info.device_handle:
                fds.append(info.fd)
            connection.given.add(extent_id)
        self._send(connection, pb.DescriptorResponse(extents=answer), fds)

    def _probe(self, connection: Connection, request: pb.DescriptorRequest) -> None:
        probe = request.probe
        held = self._authority.probe(connection.session_id, probe.tenant, probe.key, probe.count)
        self._send(connection, pb.DescriptorResponse(probed=pb.Probed(id=probe.id, held=held)))

    def probe_device(self, conn_id: int, handle: bytes, size_bytes: int) -> None:
        """Have a process show that it can open GPU memory."""
        connection = self._connections.get(conn_id)
        if connection is not None:
            probe = pb.DeviceProbe(handle=handle, size_bytes=size_bytes)
            self._send(connection, pb.DescriptorResponse(device_probe=probe))

    def _device_proof(self, connection: Connection, request: pb.DescriptorRequest) -> None:
        proof = request.device_proof
        self._authority.device_proved(connection.session_id, connection.conn_id, proof.content, proof.error)

    def _unmapped(self, connection: Connection, request: pb.DescriptorRequest) -> None:
        extent_ids = list(request.unmapped.extents)
        if len(extent_ids) > MAX_UNMAPPED_PER_PACKET:
            raise RequestError(Reason.BAD_REQUEST, f"at most {MAX_UNMAPPED_PER_PACKET} extents in one packet")
        self._authority.unmapped(connection.conn_id, extent_ids)
        self._give_up(connection, extent_ids)

    # ---- sending and ending

    def _send(self, connection: Connection, message: pb.DescriptorResponse, fds: Iterable[int] = ()) -> None:
        if connection.dismissed or connection.closed:
            return
        try:
            if connection.send(message, list(fds)):
                self._loop.add_writer(connection.sock.fileno(), self._writable, connection)
        except RequestError as e:
            self._dismiss(connection, e)
        except OSError as e:
            self._lost(connection, e)

    def _writable(self, connection: Connection) -> None:
        try:
            if connection.flush():
                self._loop.remove_writer(connection.sock.fileno())
        except OSError as e:
            self._lost(connection, e)

    def _lost(self, connection: Connection, error: OSError) -> None:
        """Sending failed. A peer that has gone is seen by reading too; anything else must not pass for its death."""
        if isinstance(error, ConnectionError):
            self._loop.remove_writer(connection.sock.fileno())
            connection.mute()
            return
        self._dismiss(connection, RequestError(Reason.IO, f"the daemon could not send: {error.strerror}"))

    def _dismiss(self, connection: Connection, error: RequestError) -> None:
        """Refuse a process from now on; it counts as alive until it closes its end."""
        if connection.dismissed or connection.closed:
            return
        who = f"pid {connection.pid} of session {connection.session_id}" if connection.joined else f"pid {connection.pid}"
        # What strangers do hides nothing of what engines do.
        kind = f"{'joined' if connection.joined else 'stranger'} {error.reason.name}"
        self._warn(kind, f"{who} on the descriptor socket: {error.reason.name}: {error.message}")
        self._loop.remove_writer(connection.sock.fileno())
        connection.dismiss(_error(error.reason, error.message))

    def _warn(self, kind: str, text: str, error: Exception | None = None) -> None:
        """Write a line, seldom: whoever may open the socket can bring about any number of them."""
        more = self._seldom.more(kind)
        if more is not None:
            log.warning("%s%s", text, more, exc_info=error)

    def _drop(self, connection: Connection) -> None:
        """A process closed its end or died, or a stranger's time is up."""
        if connection.closed:
            return
        fileno = connection.sock.fileno()
        self._loop.remove_reader(fileno)
        self._loop.remove_writer(fileno)
        timer = self._timers.pop(connection.conn_id, None)
        if timer is not None:
            timer.cancel()
        del self._connections[connection.conn_id]
        connection.close()
        self._give_up(connection, list(connection.given))
        if connection.joined:
            with contextlib.suppress(RequestError):  # the session may have ended before
                self._authority.process_gone(connection.session_id, connection.conn_id)


def _error(reason: Reason, message: str) -> pb.DescriptorResponse:
    return pb.DescriptorResponse(error=pb.DescriptorError(reason=reason.name, message=message))


__all__ = ["Authority", "DescriptorServer", "ExtentInfo", "JoinGrant"]
