"""The socket under :class:`~kvtierd.client.extents.ExtentMap`: packets, descriptors, time limits."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError

from kvtierd.errors import DaemonUnavailableError, Reason, RequestError
from kvtierd.v1 import fdpass_pb2 as pb

MAX_PACKET_BYTES: Final = 64 << 10
MAX_EXTENTS_PER_PACKET: Final = 64


class Signal:
    """An eventfd that is closed with its last reference, so that a late signal never hits a reused descriptor."""

    __slots__ = ("fd",)

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """Wake whoever polls; never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Take the signal in."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(slots=True)
class Packet:
    """A message with its descriptors, which belong to the packet until they are duplicated. No message: end of file."""

    message: pb.DescriptorResponse | None
    fds: list[int]

    def close(self) -> None:
        """Close the descriptors."""
        while self.fds:
            os.close(self.fds.pop())


class DescriptorSocket:
    """A connection that has joined. Not thread-safe but for one sender and one receiver at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def join(cls, path: str, join: pb.Join, timeout_s: float) -> tuple[DescriptorSocket, pb.Joined]:
        """Connect and join.

        Raises:
            DaemonUnavailableError: nobody listens, or the daemon does not answer in time.
            RequestError: the daemon refuses.
        """
        until_s = time.monotonic() + timeout_s
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            connection = cls(sock)
            try:
                sock.connect(path)
                connection.send(pb.DescriptorRequest(join=join), until_s)
                if not connection._wait(select.POLLIN, until_s):
                    raise DaemonUnavailableError(f"no answer on the descriptor socket {path} within {timeout_s:.3g} s")
                answer = connection.receive()
            except (OSError, DecodeError) as e:
                raise DaemonUnavailableError(f"no daemon on the descriptor socket {path}: {e}") from e
            answer.close()
            if answer.message is not None and answer.message.HasField("error"):
                raise refusal(answer.message.error)
            if answer.message is None or not answer.message.HasField("joined"):
                raise DaemonUnavailableError(f"the daemon hung up on the descriptor socket {path} while this process joined")
        except BaseException:
            sock.close()
            raise
        return connection, answer.message.joined

    def fileno(self) -> int:
        """Descriptor to poll."""
        return self._sock.fileno()

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait for a packet. Whether there is one, or the end of the connection."""
        return self._wait(select.POLLIN, time.monotonic() + timeout_s)

    def send(self, request: pb.DescriptorRequest, until_s: float) -> None:
        """Send a packet, waiting for room until ``until_s`` (monotonic). Raises DaemonUnavailableError."""
        data = request.SerializeToString()
        while True:
            try:
                self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError as e:
                if not self._wait(select.POLLOUT, until_s):
                    raise DaemonUnavailableError("the daemon does not read from the descriptor socket") from e
            except OSError as e:
                raise DaemonUnavailableError(f"the descriptor socket is gone: {e}") from e
            else:
                return

    def receive(self) -> Packet:
        """Take a packet that is there. Raises OSError, DecodeError."""
        room = socket.CMSG_SPACE(MAX_EXTENTS_PER_PACKET * 4)
        data, ancillary, _flags, _ = self._sock.recvmsg(MAX_PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
        packet = Packet(None, list(fds))
        if data:
            try:
                packet.message = pb.DescriptorResponse.FromString(data)
            except DecodeError:
                packet.close()
                raise
        return packet

    def close(self) -> None:
        """Close it: for the daemon, the end of this process."""
        self._sock.close()

    def _wait(self, events: int, until_s: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, events)
        return bool(poll.poll(max(until_s - time.monotonic(), 0) * 1000))


def refusal(error: pb.DescriptorError) -> RequestError:
    """The exception for an error that the daemon sent."""
    reason = Reason[error.reason] if error.reason in Reason.__members__ else Reason.INTERNAL
    return RequestError(reason, error.message)
