"""Asking whether blocks are held, without waiting: a packet each way on a connection of its own to the descriptor socket.

For callers that must not be held up and share their interpreter with busy threads: a gRPC call takes several of gRPC's and the
client's own threads their turn, a packet none.
"""

from __future__ import annotations

import os
from typing import Final

from google.protobuf.message import DecodeError

from kvtierd.client.descriptors import DescriptorSocket
from kvtierd.errors import DaemonUnavailableError
from kvtierd.v1 import fdpass_pb2 as pb

MAX_OPEN: Final = 32
"""Probes that wait for their answers; the daemon dismisses a process that lets many answers lie."""


class Prober:
    """Probes of one session. For one thread, after it was made.

    Args:
        descriptor_socket: path from Welcome.
        session: token from Welcome.
        timeout_s: for joining.

    Raises:
        DaemonUnavailableError: the daemon does not answer.
        RequestError: the daemon refuses.
    """

    def __init__(self, descriptor_socket: str | os.PathLike[str], session: bytes, timeout_s: float = 5.0) -> None:
        join = pb.Join(session=session, shard=-1, numa_node=-1)
        self._socket, _ = DescriptorSocket.join(os.fspath(descriptor_socket), join, timeout_s)
        self.session = session
        self.closed = False
        """No probe is answered any more."""
        self._answers: dict[int, bool | None] = {}
        self._unwanted: set[int] = set()
        self._next = 1

    def ask(self, key: bytes, count: int, tenant: str = "") -> int | None:
        """Ask whether a load of ``count`` blocks would find the first of them, whose key is ``key``. Does not wait.

        Returns:
            A number for :meth:`answer` or :meth:`forget`; None when nothing can be asked now.
        """
        if len(self._answers) >= MAX_OPEN:
            self._receive()
        if self.closed or len(self._answers) >= MAX_OPEN:
            return None
        number = self._next
        try:
            self._socket.send(pb.DescriptorRequest(probe=pb.Probe(id=number, tenant=tenant, key=key, count=count)), 0.0)
        except DaemonUnavailableError:
            self.close()  # gone, or so far behind that it does not help
            return None
        self._next += 1
        self._answers[number] = None
        return number

    def answer(self, number: int) -> bool | None:
        """Whether the block is held; None while that is not known. Gives each answer once."""
        if self._answers.get(number) is None:
            self._receive()
        found = self._answers.get(number)
        if found is not None:
            del self._answers[number]
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next answer. Whether there may be one."""
        return not self.closed and self._socket.wait_readable(timeout_s)

    def forget(self, number: int) -> None:
        """Nobody wants this answer. The probe counts as open until it is here."""
        if number in self._answers and self._answers[number] is None:
            self._unwanted.add(number)
        else:
            self._answers.pop(number, None)

    def close(self) -> None:
        """End the connection. Idempotent."""
        if not self.closed:
            self.closed = True
            self._answers.clear()
            self._unwanted.clear()
            self._socket.close()

    def _receive(self) -> None:
        """Take in the answers that are there."""
        while not self.closed:
            try:
                packet = self._socket.receive()
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, DecodeError):
                self.close()
                return
            packet.close()
            message = packet.message
            if message is None or message.HasField("error"):
                self.close()
                return
            number = message.probed.id if message.HasField("probed") else 0
            if number in self._unwanted:
                self._unwanted.discard(number)
                del self._answers[number]
            elif number in self._answers:
                self._answers[number] = message.probed.held
