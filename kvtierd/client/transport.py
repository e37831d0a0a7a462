"""The Attach stream: calls and replies of one session over one gRPC stream.

Threads: callers put requests into an outbox that gRPC's own sender drains; one reader thread hands each reply to the call
that waits for it. A call inside the stream costs about half of a unary call.

A call that gives up on its deadline may still be granted something by the daemon. Its late reply is therefore not dropped:
the ticket in it is returned at once (`_UNDO`), so that no slot, pin or promotion is held for nobody.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Final

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvtierd import tracing
from kvtierd.client.address import socket_path, socket_problem
from kvtierd.client.deadline import Deadline
from kvtierd.client.tokens import Metadata
from kvtierd.errors import DaemonUnavailableError, KvtierdError, Reason, RequestError
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc

MAX_CALLS_IN_FLIGHT: Final = 1024
"""Calls of one stream that wait for replies, late ones included; more are refused with OVERLOADED."""
MAX_OUTBOX: Final = 4096
"""Requests that gRPC has not taken yet; a daemon that is this far behind is taken for gone."""
MAX_MESSAGE_BYTES: Final = 64 << 20
DISCONNECT_TIMEOUT_S: Final = 5.0
"""Longest wait for the reader thread in `SessionStream.close`."""

RETRY_SPREAD: Final = 0.5
"""Clients that were refused together come back within so much more than the time that they were told to wait, not all at once."""

_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # gRPC would share its own reconnect back-off between channels to one address; the client has its own.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
# What undoes a grant: the reply's field to the request that returns its ticket.
_UNDO: Final = {"save": "abort", "load": "release", "prefetch": "cancel", "pin": "unpin"}


class CallTimeoutError(DaemonUnavailableError):
    """No reply came within the deadline."""


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """Make a channel. It connects at its first call.

    Raises:
        DaemonUnavailableError: the address names a unix socket that does not exist, or that is not for this user.
    """
    path = socket_path(address)
    if path is not None:
        if problem := socket_problem(path):
            raise DaemonUnavailableError(problem)
        return grpc.insecure_channel(f"unix:{path}", options=_CHANNEL_OPTIONS)
    if credentials is not None:
        return grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
    return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)


def rpc_failure(error: Any) -> KvtierdError:
    """Turn the end of an RPC into this library's error: a RequestError when the daemon gave its reason, else unavailable.

    Args:
        error: a ``grpc.RpcError`` as raised by a call, which is the call too.
    """
    try:
        status = rpc_status.from_call(error)
    except (ValueError, AttributeError):  # details that contradict the code, or a peer that is no kvtierd
        status = None
    details = status.details if status is not None else ()
    retry = error_details_pb2.RetryInfo()
    for detail in details:
        detail.Unpack(retry)
    for detail in details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == "kvtierd" and info.reason in Reason.__members__:
            return RequestError(Reason[info.reason], status.message, retry_after_s=retry.retry_delay.ToMilliseconds() / 1000)
    code, text = error.code(), error.details()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallTimeoutError("the daemon did not answer in time")
    return DaemonUnavailableError(f"the daemon cannot be reached: {code.name}: {text}")


def pause_s(error: RequestError, deadline: Deadline) -> float:
    """How long to wait before a call is made again that an overloaded daemon has refused; 0 for not at all.

    It is tried again where the daemon has said when, and that comes before the deadline.
    """
    told_s, left_s = error.retry_after_s, deadline.remaining_s
    if not 0 < told_s < left_s:
        return 0.0
    return told_s + random.random() * min(RETRY_SPREAD * told_s, left_s - told_s)


def may_try_again(error: RequestError, deadline: Deadline) -> bool:
    """Wait as :func:`pause_s` says. True when the call is to be made again then."""
    wait_s = pause_s(error, deadline)
    if not wait_s:
        return False
    deadline.sleep(wait_s)
    return not deadline.passed


class PendingCall:
    """One call that waits for its replies. Belongs to one thread, besides the stream's reader.

    Args:
        stream: where it is sent.
        message: ``message.call`` holds its request and, once it is sent, its id.
        field: name of the reply's field.
    """

    __slots__ = ("_abandoned", "_field", "_head", "_heard", "_replies", "_stream", "done", "message")

    def __init__(self, stream: SessionStream, message: pb.AttachRequest, field: str) -> None:
        self._stream = stream
        self.message = message
        self._field = field
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self._abandoned = False
        self._heard = False
        self._head: Any = None
        self.done = False

    def result(self, deadline: Deadline, *, patient: bool = True) -> Any:
        """Wait for the next reply. A call that an overloaded daemon refuses is made again when it says, if the stream is patient.

        Args:
            deadline: longest wait for the reply, all tries together.
            patient: False to have a refusal raised at once all the same.

        Returns:
            The response message; an empty one when the daemon ends a call of several replies without another. ``done`` is
            True after the last one.

        Raises:
            CallTimeoutError: the deadline passed. The call is abandoned: what a late reply grants is returned.
            DaemonUnavailableError: the stream is lost.
            RequestError: the daemon refused.
        """
        while True:
            try:
                return self._next(deadline)
            except RequestError as e:
                if not (patient and self._stream.patient and may_try_again(e, deadline)):
                    self.done = True
                    raise
            self._shorten(deadline)
            self._stream.send(self)

    def _shorten(self, deadline: Deadline) -> None:
        """Let the daemon wait no longer than the caller still does."""
        call, left_ms = self.message.call, max(1, int(deadline.remaining_s * 1000))
        if self._field == "load":
            call.load.deadline_ms = min(call.load.deadline_ms, left_ms)
        elif self._field == "save":
            call.save.wait_ms = min(call.save.wait_ms, left_ms)

    def _next(self, deadline: Deadline) -> Any:
        if not self.wait(deadline):
            self.abandon()
            # A daemon that has answered a part lives; and who cancels a call says nothing about the daemon.
            if not self._heard and not deadline.cancelled:
                self._stream.on_answer(False)
            raise CallTimeoutError("the daemon did not answer in time")
        item, self._head = self._head, None
        if isinstance(item, KvtierdError):
            self.done = True
            raise DaemonUnavailableError(str(item))
        self._answered()
        if item.HasField("error"):
            error = item.error
            reason = error.reason if error.reason in Reason._value2member_map_ else Reason.INTERNAL
            raise RequestError(Reason(reason), error.message, retry_after_s=error.retry_after_ms / 1000)
        if item.last:
            self.done = True
        response = getattr(item, self._field)
        if response.boot_epoch != self._stream.boot_epoch and item.HasField(self._field):
            raise self._stream.break_off("a reply came from another boot of the daemon")
        return response

    def wait(self, deadline: Deadline) -> bool:
        """Wait until ``result`` would not wait. False when the deadline passed; the call goes on."""
        if self._head is None:
            try:
                self._head = deadline.take(self._replies)
            except Empty:
                return False
            except BaseException:  # for example a KeyboardInterrupt: nobody will take the grant
                self.abandon()
                raise
        return True

    def _answered(self) -> None:
        if not self._heard:
            self._heard = True
            self._stream.on_answer(True)

    def abandon(self) -> None:
        """Nobody waits any more; tickets in replies that come are returned."""
        head, self._head = self._head, None
        if head is not None:
            self._replies.put(head)
        self._abandoned = True
        self.undo_late()

    def forget(self) -> None:
        """Nobody waits any more, and the caller has returned the ticket itself."""
        self._stream.forget(self.message.call.id)

    def deliver(self, item: Any) -> None:
        """Called by the reader with a reply or the error that ended the stream."""
        self._replies.put(item)
        if self._abandoned:
            self.undo_late()

    def undo_late(self) -> None:
        """Return what replies that nobody took have granted. Each reply is taken by one thread only."""
        undo = _UNDO.get(self._field)
        while True:
            try:
                item = self._replies.get_nowait()
            except Empty:
                return
            if not isinstance(item, pb.Reply) or item.WhichOneof("response") != self._field:
                continue
            ticket = getattr(getattr(item, self._field), "ticket", 0)
            if undo is not None and ticket:
                message = pb.AttachRequest()
                getattr(message.call, undo).ticket = ticket
                self.forget()
                self._stream.post(message)


class SessionStream:
    """One Attach stream.

    Args:
        channel: closed together with the stream.
        on_lost: called once by the reader thread when the stream has ended.
        on_event: called by the reader thread with each ``Event``.
        on_answer: called by the waiting thread with each call's first sign: True for an answer, False for none in time.
        patient: whether calls that an overloaded daemon refuses wait and are made again.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        on_lost: Callable[[SessionStream], None],
        on_event: Callable[[pb.Event], None],
        on_answer: Callable[[bool], None],
        *,
        patient: bool = True,
    ) -> None:
        self.channel = channel
        self.patient = patient
        self.on_answer = on_answer
        self._on_lost = on_lost
        self._on_event = on_event
        self._outbox: SimpleQueue[pb.AttachRequest | None] = SimpleQueue()
        self._welcome: SimpleQueue[pb.Welcome | KvtierdError] = SimpleQueue()
        self._pending: dict[int, PendingCall] = {}
        self._ids = itertools.count(1)
        self._call: Any = None
        self._reader: threading.Thread | None = None
        self._opening = threading.Lock()
        self._closed = False
        """Under the lock: a channel that is being closed must not be used to open."""
        self.boot_epoch = 0
        self.lost: KvtierdError | None = None
        """Why the stream has ended; None while it lives."""

    def open(self, hello: pb.Hello, timeout_s: float, metadata: Metadata = ()) -> pb.Welcome:
        """Send Hello and wait for Welcome. At most once. ``metadata`` shows whose session it is.

        Raises:
            DaemonUnavailableError: no daemon, or no answer in time.
            RequestError: the daemon refused the session.
        """
        requests: Iterator[pb.AttachRequest] = iter(self._outbox.get, None)
        self._outbox.put(pb.AttachRequest(hello=hello))
        with self._opening:
            if self._closed:
                raise DaemonUnavailableError("the session is closed")
            self._call = kvtier_pb2_grpc.KvTierServiceStub(self.channel).Attach(requests, metadata=metadata)
            self._reader = threading.Thread(target=self._read, name="kvtierd-client-reader", daemon=True)
            self._reader.start()
        try:
            answer = self._welcome.get(timeout=max(0.0, timeout_s))
        except Empty:
            self.close()
            raise CallTimeoutError("the daemon did not answer in time") from None
        if isinstance(answer, KvtierdError):
            self.close()
            raise answer
        return answer

    def begin(self, message: pb.AttachRequest, field: str) -> PendingCall:
        """Send a call; ``message.call`` holds its request, ``field`` names the request's and reply's field.

        Raises:
            DaemonUnavailableError: the stream is lost.
            RequestError: OVERLOADED when too many calls are in flight.
        """
        if len(self._pending) >= MAX_CALLS_IN_FLIGHT:
            raise RequestError(Reason.OVERLOADED, f"{MAX_CALLS_IN_FLIGHT} calls are in flight; wait for some of them")
        if tracing.on:
            message.call.traceparent = tracing.traceparent()
        pending = PendingCall(self, message, field)
        self.send(pending)
        return pending

    def send(self, pending: PendingCall) -> None:
        """Send a call, or send it once more after its refusal. Raises DaemonUnavailableError when the stream is lost."""
        call_id = pending.message.call.id = next(self._ids)
        self._pending[call_id] = pending
        self._outbox.put(pending.message)
        # Looked at after the call is listed: whoever ends the stream sets this first and then fails all listed calls.
        if self.lost is not None:
            self.forget(call_id)
            pending.done = True
            raise DaemonUnavailableError(str(self.lost))

    def post(self, message: pb.AttachRequest) -> None:
        """Send a call whose reply nobody needs. Does nothing when the stream is lost: the session's tickets ended with it."""
        if self.lost is not None:
            return
        if self._outbox.qsize() >= MAX_OUTBOX:
            self.break_off(f"the daemon is {MAX_OUTBOX} requests behind")
            return
        message.call.id = next(self._ids)
        self._outbox.put(message)

    def forget(self, call_id: int) -> None:
        """Drop a call; its replies are ignored from now on."""
        self._pending.pop(call_id, None)

    def break_off(self, why: str) -> KvtierdError:
        """End the stream from this side. Returns the error to raise."""
        error = DaemonUnavailableError(why)
        self._end(error)
        self._call.cancel()
        return error

    def close(self) -> None:
        """End the stream and wait for its reader. May be called by the reader itself and more than once."""
        with self._opening:
            self._closed = True
        self._end(DaemonUnavailableError("the session is closed"))
        if self._call is not None:
            self._call.cancel()
        self.channel.close()
        reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            reader.join(DISCONNECT_TIMEOUT_S)

    def _read(self) -> None:
        error: KvtierdError = DaemonUnavailableError("the daemon ended the session")
        try:
            for message in self._call:
                kind = message.WhichOneof("message")
                if kind == "reply":
                    self._dispatch(message.reply)
                elif kind == "welcome":
                    self.boot_epoch = message.welcome.boot_epoch
                    self._welcome.put(message.welcome)
                elif kind == "event":
                    self._on_event(message.event)
        except grpc.RpcError as e:
            error = rpc_failure(e)
        finally:
            self._end(error)
            self._on_lost(self)

    def _dispatch(self, reply: pb.Reply) -> None:
        pending = self._pending.pop(reply.id, None) if reply.last else self._pending.get(reply.id)
        if pending is not None:
            pending.deliver(reply)

    def _end(self, error: KvtierdError) -> None:
        if self.lost is None:
            self.lost = error
        # A refusal of the session itself is told to whoever opens it; calls only see that the session is gone.
        self._welcome.put(self.lost)
        self._outbox.put(None)
        failure = DaemonUnavailableError(str(self.lost))
        while self._pending:
            try:
                _, pending = self._pending.popitem()
            except KeyError:
                break
            pending.deliver(failure)
