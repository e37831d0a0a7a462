"""One session with one boot of the daemon: the Attach stream, what Welcome said, and the mapped extents.

A session may end (the daemon restarted, the stream broke) while threads still copy into or out of its slots. The daemon
takes a session's slots back when its descriptor sockets close, so that socket stays open until the last operation has left:
``enter`` and ``leave`` count operations, and ``retire`` closes at once or at the last ``leave``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from kvtierd import PROTOCOL_VERSION
from kvtierd.client.deadline import Deadline
from kvtierd.client.extents import ExtentMap
from kvtierd.client.tokens import Metadata, authorization
from kvtierd.client.transport import SessionStream, open_channel
from kvtierd.errors import DaemonUnavailableError, Reason, RequestError
from kvtierd.model import KEY_BYTES, Namespace
from kvtierd.v1 import kvtier_pb2 as pb

MAX_NAME_CHARS: Final = 64
TICKET_SHARE: Final = 4
"""One call takes at most one in this many of the bytes that a session's tickets may hold, so that calls can be pipelined."""
ANSWER_MARGIN_S: Final = 0.02
"""How much earlier than the caller's deadline the daemon is asked to answer."""


@dataclass(frozen=True)
class SessionSettings:
    """What a client attaches with.

    Attributes:
        address: ``unix:PATH``, an absolute path, or ``host:port``.
        namespace: what the blocks are.
        tenant: empty means "default".
        name: for logs and status.
        pins_memory: the process registers mapped memory with a device.
        shard: shard whose extents this process maps; -1 for all.
        bytes_only: never open the descriptor socket; bytes travel in messages.
        credentials: TLS for ``host:port``.
        token_file: file of the token to show; empty for none.
        patient: whether calls that an overloaded daemon refuses wait and are made again.
    """

    address: str
    namespace: Namespace
    tenant: str = ""
    name: str = ""
    pins_memory: bool = False
    shard: int = -1
    bytes_only: bool = False
    credentials: grpc.ChannelCredentials | None = None
    token_file: str = ""
    patient: bool = True

    def hello(self) -> pb.Hello:
        """The message that opens a session."""
        ns = self.namespace
        fields = {k: v for k, v in ns.__dict__.items() if k not in ("shard_bytes", "extra")}
        return pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            namespace=pb.Namespace(**fields, shard_bytes=ns.shard_bytes, extra=ns.extra),
            tenant=self.tenant,
            client_name=self.name[:MAX_NAME_CHARS],
            pins_memory=self.pins_memory,
            bytes_only=self.bytes_only,
            pid=os.getpid(),
        )


class Session:
    """An open session. Thread-safe.

    Args:
        settings: what it was opened with.
        stream: the open stream.
        welcome: the daemon's answer.
        extents: mapped memory; None when bytes travel in messages.
        metadata: what calls outside of the stream carry too, to show whose they are.
    """

    def __init__(
        self,
        settings: SessionSettings,
        stream: SessionStream,
        welcome: pb.Welcome,
        extents: ExtentMap | None,
        metadata: Metadata = (),
    ) -> None:
        self.settings = settings
        self.stream = stream
        self.welcome = welcome
        self.extents = extents
        self.metadata = metadata
        self.draining = False
        self.shard_bytes = settings.namespace.shard_bytes
        self.shards = len(self.shard_bytes)
        self.block_bytes = sum(self.shard_bytes)
        self.token = welcome.session
        self.boot_epoch = welcome.boot_epoch
        self._lock = threading.Lock()
        self._users = 0
        self._retired = False
        self._closed = False
        self.max_keys = max(1, welcome.limits.max_keys)
        slots = welcome.slot_bytes or settings.namespace.slot_bytes
        self.slot_bytes = sum(slots)
        room = welcome.limits.max_ticket_bytes // TICKET_SHARE // max(1, self.slot_bytes)
        self.keys_per_call = max(1, min(self.max_keys, room))

    @property
    def alive(self) -> bool:
        """True while the stream and the descriptor socket are open."""
        return self.stream.lost is None and (self.extents is None or not self.extents.closed)

    def enter(self) -> bool:
        """Begin an operation. False when the session has been retired."""
        with self._lock:
            if self._retired:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """End an operation."""
        with self._lock:
            self._users -= 1
            close = self._retired and self._users == 0 and not self._closed
            self._closed |= close
        if close:
            self._close()

    def retire(self) -> None:
        """No new operation may begin; the last one that leaves closes the session."""
        with self._lock:
            self._retired = True
            close = self._users == 0 and not self._closed
            self._closed |= close
        if close:
            self._close()

    def _close(self) -> None:
        if self.extents is not None:
            self.extents.close()
        self.stream.close()

    def views(self, slots: list[int]) -> list[memoryview]:
        """Mapped memory of one block's slots, one view a shard, each of the shard's exact size.

        Raises:
            RequestError: a slot's extent has been revoked.
            DaemonUnavailableError: the descriptor socket is gone.
        """
        if self.extents is None:
            raise RequestError(Reason.BAD_REQUEST, "this session has no shared memory; use save_bytes and load_bytes")
        view = self.extents.view
        return [view(slot, size) for slot, size in zip(slots, self.shard_bytes, strict=True)]

    def daemon_ms(self, seconds: float) -> int:
        """A wait for the daemon that ends a little before the caller's own, in milliseconds, at least 1."""
        shorter_s = seconds - min(ANSWER_MARGIN_S, seconds * 0.2)
        limit = self.welcome.limits.max_deadline_ms or 1
        return max(1, min(int(shorter_s * 1000), limit))

    def ping(self, deadline: Deadline) -> None:
        """Ask for a key that nobody has, to see whether the daemon answers.

        Raises:
            DaemonUnavailableError: it does not.
        """
        message = pb.AttachRequest()
        message.call.lookup.keys = bytes(KEY_BYTES)
        self.stream.begin(message, "lookup").result(deadline)


class Opening:
    """A session that is being opened, so that another thread can break it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: SessionStream | None = None
        self._broken_off = False

    def open(
        self,
        settings: SessionSettings,
        timeout_s: float,
        on_lost: Callable[[SessionStream], None],
        on_event: Callable[[pb.Event], None],
        on_answer: Callable[[bool], None],
    ) -> Session:
        """Attach and join the descriptor socket.

        Raises:
            ConfigError: the token's file cannot be read.
            DaemonUnavailableError: no daemon, no answer in time, or the descriptor socket cannot be reached.
            RequestError: the daemon refused.
        """
        metadata = authorization(settings.token_file)
        deadline = Deadline(timeout_s)
        channel = open_channel(settings.address, settings.credentials)
        stream = SessionStream(channel, on_lost, on_event, on_answer, patient=settings.patient)
        with self._lock:
            self._stream = stream
            broken_off = self._broken_off
        if broken_off:
            stream.close()
            raise DaemonUnavailableError("the client is closed")
        welcome = stream.open(settings.hello(), deadline.remaining_s, metadata)
        try:
            extents = self._join(settings, welcome, deadline)
        except BaseException:
            stream.close()
            raise
        return Session(settings, stream, welcome, extents, metadata)

    def _join(self, settings: SessionSettings, welcome: pb.Welcome, deadline: Deadline) -> ExtentMap | None:
        if settings.bytes_only:
            return None
        if not welcome.descriptor_socket:
            raise DaemonUnavailableError("the daemon has no descriptor socket; pass bytes_only=True to send bytes in messages")
        return ExtentMap(
            welcome.descriptor_socket,
            welcome.session,
            shard=settings.shard,
            pins_memory=settings.pins_memory,
            timeout_s=max(0.001, deadline.remaining_s),
        )

    def break_off(self) -> None:
        """End it from another thread."""
        with self._lock:
            self._broken_off = True
            stream = self._stream
        if stream is not None:
            stream.close()
