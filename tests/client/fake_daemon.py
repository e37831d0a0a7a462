"""A small daemon for tests of the client's behaviour: the real protocol over a real unix socket and real memfds, all in this
process, with faults on demand. It keeps blocks in memory only and has none of the real daemon's policies.

Faults: ``hang``/``wake`` (like SIGSTOP and SIGCONT: requests are served late), ``kill`` and ``start`` (another boot epoch),
``errors`` (a call is refused), ``refuse`` (Attach is refused), ``gates`` (a key is readable only once its event is set).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvtierd.errors import Reason
from kvtierd.model import KEY_BYTES
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc
from tests.client.fake_memory import Extent, FakeMemory, FakeSession


@dataclass
class Ticket:
    kind: str
    session: bytes
    keys: list[bytes]
    slots: list[list[int]]
    open: set[int] = field(default_factory=set)


def ended(context: grpc.ServicerContext, code: grpc.StatusCode, reason: Reason, message: str, retry_after_ms: int = 0) -> None:
    """End an RPC with the reason, and when to come back, in its details."""
    infos = [error_details_pb2.ErrorInfo(reason=reason.name, domain="kvtierd")]
    if retry_after_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(retry_after_ms)
        infos.append(error_details_pb2.RetryInfo(retry_delay=delay))
    details = [any_pb2.Any() for _ in infos]
    for detail, info in zip(details, infos, strict=True):
        detail.Pack(info)
    context.abort_with_status(rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=details)))


class FakeDaemon(FakeMemory, kvtier_pb2_grpc.KvTierServiceServicer):
    """See the module."""

    def __init__(self, folder: Path, *, max_keys: int = 65536, max_ticket_bytes: int = 1 << 30) -> None:
        self.path = folder / "k.sock"
        self.fd_path = folder / "k.fd.sock"
        self.limits = pb.Limits(max_keys=max_keys, max_tickets=1000, max_deadline_ms=300_000, max_ticket_bytes=max_ticket_bytes)
        self.boot_epoch = 0
        self.errors: dict[str, Reason] = {}
        self.overloads: Counter[str] = Counter()
        """By kind of call: how many more are refused with OVERLOADED."""
        self.retry_after_ms = 20
        self.refuse: Reason | None = None
        self.gates: dict[bytes, threading.Event] = {}
        self.outcomes: dict[bytes, list[int]] = {}
        self.outcomes_of_commit: list[int] = []
        self.calls: Counter[str] = Counter()
        self.failures: list[str] = []
        self.on_call: Callable[[str], None] = lambda kind: None
        self._server: grpc.Server | None = None
        self._running = threading.Event()
        self._running.set()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._reset()

    # -- life ----------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self.blocks: dict[tuple[bytes, bytes], list[int]] = {}
        self.filling: set[tuple[bytes, bytes]] = set()
        self.tickets: dict[int, Ticket] = {}
        self.extents: dict[int, Extent] = {}
        self.sessions: dict[bytes, FakeSession] = {}
        self.connections: list[socket.socket] = []

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def start(self) -> FakeDaemon:
        """Begin another boot."""
        self._reset()
        self.boot_epoch += 1
        self._running.set()
        self._server = grpc.server(
            ThreadPoolExecutor(32),
            options=(("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)),
        )
        kvtier_pb2_grpc.add_KvTierServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.fd_path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept, args=(self._listener,))]
        self._threads[0].start()
        return self

    def kill(self) -> None:
        """End at once, as with SIGKILL; the sockets' files go too."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self._running.set()
        with self._lock:
            for session in self.sessions.values():
                session.replies.put(None)
            connections = list(self.connections)
        for connection in [self._listener, *connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        server.stop(0).wait()
        for thread in self._threads:
            thread.join()
        for path in (self.path, self.fd_path):
            path.unlink(missing_ok=True)
        for extent in self.extents.values():
            os.close(extent.fd)

    def hang(self) -> None:
        """Answer nothing any more."""
        self._running.clear()

    def wake(self) -> None:
        """Serve again, what came meanwhile first."""
        self._running.set()

    def until(self, condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until something is so; it is looked at after each call."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "it did not come to be so"

    def end_streams(self) -> None:
        """End all Attach streams; the daemon lives on."""
        with self._lock:
            for session in self.sessions.values():
                session.replies.put(None)

    def event(self, event: pb.Event) -> None:
        """Send an event to all sessions."""
        with self._lock:
            for session in self.sessions.values():
                session.replies.put(pb.AttachResponse(event=event))

    # -- Attach --------------------------------------------------------------------------------------------------------

    def Attach(self, request_iterator: Iterator[pb.AttachRequest], context: grpc.ServicerContext) -> Iterator[Any]:
        hello = next(request_iterator).hello
        self._running.wait()
        if self.refuse is not None:
            ended(context, grpc.StatusCode.FAILED_PRECONDITION, self.refuse, f"refused: {self.refuse.name}")
        session = FakeSession(
            os.urandom(16), hello.namespace.SerializeToString(deterministic=True), list(hello.namespace.shard_bytes)
        )
        with self._changed:
            self.sessions[session.token] = session
            self.calls["attach"] += 1
            self._changed.notify_all()
        yield pb.AttachResponse(
            welcome=pb.Welcome(
                session=session.token,
                boot_epoch=self.boot_epoch,
                protocol_version=1,
                descriptor_socket=str(self.fd_path),
                slot_bytes=session.slot_bytes,
                limits=self.limits,
                daemon_version="fake",
            )
        )
        reader = threading.Thread(target=self._serve, args=(session, request_iterator))
        reader.start()
        while (reply := session.replies.get()) is not None:
            yield reply

    def _serve(self, session: FakeSession, requests: Iterator[pb.AttachRequest]) -> None:
        try:
            while (request := self._next(requests)) is not None:
                self._running.wait()
                call = request.call
                kind = call.WhichOneof("request")
                self.on_call(kind)
                if kind == "load":
                    threading.Thread(target=self._call, args=(session, call, kind)).start()
                else:
                    self._call(session, call, kind)
        finally:
            session.replies.put(None)

    @staticmethod
    def _next(requests: Iterator[pb.AttachRequest]) -> pb.AttachRequest | None:
        try:
            return next(requests, None)
        except Exception:  # the end of a broken stream has no class of its own
            return None

    def _call(self, session: FakeSession, call: pb.Call, kind: str) -> None:
        def reply(response: Any = None, last: bool = True) -> None:
            message = pb.AttachResponse(reply=pb.Reply(id=call.id, last=last))
            if response is not None:
                response.boot_epoch = self.boot_epoch
                getattr(message.reply, kind).CopyFrom(response)
            session.replies.put(message)

        if self._overloaded(kind):
            error = pb.CallError(code=8, reason=int(Reason.OVERLOADED), message="refused", retry_after_ms=self.retry_after_ms)
            session.replies.put(pb.AttachResponse(reply=pb.Reply(id=call.id, last=True, error=error)))
        elif kind in self.errors:
            error = pb.CallError(code=9, reason=int(self.errors[kind]), message=f"refused: {self.errors[kind].name}")
            session.replies.put(pb.AttachResponse(reply=pb.Reply(id=call.id, last=True, error=error)))
        else:
            try:
                getattr(self, f"_on_{kind}")(session, getattr(call, kind), reply)
            except Exception as e:
                if self.sessions.get(session.token) is session:  # not one of a boot that was killed meanwhile
                    self.failures.append(f"{kind}: {e!r}")
        with self._changed:
            self.calls[kind] += 1
            self._changed.notify_all()

    def _overloaded(self, kind: str) -> bool:
        self.overloads[kind] -= 1
        return self.overloads[kind] >= 0

    def _end_overloaded(self, kind: str, context: grpc.ServicerContext) -> None:
        self.calls[kind] += 1
        if self._overloaded(kind):
            ended(context, grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.OVERLOADED, "refused", self.retry_after_ms)

    @staticmethod
    def _keys(packed: bytes) -> list[bytes]:
        return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]

    def _on_lookup(self, session: FakeSession, request: pb.LookupRequest, reply: Any) -> None:
        tiers = bytearray()
        for key in self._keys(request.keys):
            held = (session.fingerprint, key) in self.blocks
            if not held and not request.each:
                break
            tiers.append(2 if held else 0)
        reply(pb.LookupResponse(held=sum(1 for t in tiers if t), tiers=bytes(tiers)))

    def _on_save(self, session: FakeSession, request: pb.SaveRequest, reply: Any) -> None:
        with self._lock:
            reply(self.save(session, self._keys(request.keys)))

    def save(self, session: FakeSession, keys: list[bytes]) -> pb.SaveResponse:
        """Grant slots."""
        response = pb.SaveResponse()
        ticket = Ticket("save", session.token, [], [])
        for key in keys:
            name = (session.fingerprint, key)
            forced = self.outcomes.get(key)
            if forced:
                response.outcomes.append(forced.pop(0))  # type: ignore[arg-type]
            elif name in self.blocks:
                response.outcomes.append(pb.SAVE_OUTCOME_HELD)
            elif name in self.filling:
                response.outcomes.append(pb.SAVE_OUTCOME_IN_PROGRESS)
            else:
                slots = [self._slot(shard, size) for shard, size in enumerate(session.slot_bytes)]
                self.filling.add(name)
                ticket.open.add(len(ticket.keys))
                ticket.keys.append(key)
                ticket.slots.append(slots)
                response.outcomes.append(pb.SAVE_OUTCOME_GRANTED)
                response.slots.extend(slots)
        if ticket.keys:
            response.ticket = self._new_ticket(ticket)
        return response

    def _new_ticket(self, ticket: Ticket) -> int:
        number = next(n for n in range(1, 1 << 20) if n not in self.tickets)
        self.tickets[number] = ticket
        return number

    def _close(self, session: FakeSession, request: Any, *, publish: bool) -> int:
        with self._lock:
            ticket = self.tickets[request.ticket]
            assert ticket.session == session.token
            assert ticket.kind == "save"
            chosen = list(request.indexes) or sorted(ticket.open)
            assert set(chosen) <= ticket.open, "a position was committed twice or never granted"
            for position in chosen:
                name = (session.fingerprint, ticket.keys[position])
                self.filling.discard(name)
                if publish:
                    self.blocks[name] = ticket.slots[position]
                else:
                    self._free(ticket.slots[position])
                ticket.open.discard(position)
            if not ticket.open:
                del self.tickets[request.ticket]
            return len(chosen)

    def _on_commit(self, session: FakeSession, request: pb.CommitRequest, reply: Any) -> None:
        committed = self._close(session, request, publish=True)
        reply(pb.CommitResponse(committed=self.outcomes_of_commit.pop(0) if self.outcomes_of_commit else committed))

    def _on_abort(self, session: FakeSession, request: pb.AbortRequest, reply: Any) -> None:
        self._close(session, request, publish=False)
        reply(pb.AbortResponse())

    def _on_load(self, session: FakeSession, request: pb.LoadRequest, reply: Any) -> None:
        keys = self._keys(request.keys)
        with self._lock:
            held = [
                (i, k, self.blocks[session.fingerprint, k]) for i, k in enumerate(keys) if (session.fingerprint, k) in self.blocks
            ]
            if not request.each:
                held = [entry for position, entry in enumerate(held) if entry[0] == position]
            number = 0
            if held:
                number = self._new_ticket(Ticket("load", session.token, keys, [], {i for i, _, _ in held}))
        batch = pb.LoadResponse(ticket=number)
        for index, key, slots in held:
            gate = self.gates.get(key)
            if gate is not None:
                if batch.indexes:
                    reply(batch, last=False)
                    batch = pb.LoadResponse(ticket=number)
                if not gate.wait(request.deadline_ms / 1000):
                    with self._lock:  # what was not handed out is a miss, and no longer pinned
                        if number in self.tickets:
                            self._drop(number, {i for i, _, _ in held if i >= index})
                    reply(pb.LoadResponse(ticket=number, done=True, reason=pb.ERROR_REASON_DEADLINE))
                    return
            batch.indexes.append(index)
            batch.slots.extend(slots)
            batch.tiers += b"\4" if gate is not None else b"\2"
        batch.done = True
        batch.reason = 0 if len(held) == len(keys) else pb.ERROR_REASON_NOT_FOUND  # type: ignore[assignment]
        reply(batch)

    def _on_release(self, session: FakeSession, request: pb.ReleaseRequest, reply: Any) -> None:
        with self._lock:
            ticket = self.tickets[request.ticket]
            assert ticket.session == session.token
            assert ticket.kind in ("load", "prefetch")
            self._drop(request.ticket, set(request.indexes) or set(ticket.open))
        reply(pb.ReleaseResponse())

    def _drop(self, number: int, indexes: set[int]) -> None:
        ticket = self.tickets[number]
        ticket.open -= indexes
        if not ticket.open:
            del self.tickets[number]

    def _on_prefetch(self, session: FakeSession, request: pb.PrefetchRequest, reply: Any) -> None:
        with self._lock:
            keys = self._keys(request.keys)
            held = next((i for i, k in enumerate(keys) if (session.fingerprint, k) not in self.blocks), len(keys))
            number = self._new_ticket(Ticket("prefetch", session.token, keys, [], {0})) if held else 0
        reply(pb.PrefetchResponse(ticket=number, held=held, ready=0, done=not held), last=not held)
        if held and request.wait:
            reply(pb.PrefetchResponse(ticket=number, held=held, ready=held, done=True))
        elif held:
            reply()

    def _on_cancel(self, session: FakeSession, request: pb.CancelRequest, reply: Any) -> None:
        with self._lock:
            assert self.tickets.pop(request.ticket).kind == "prefetch"
        reply(pb.CancelResponse())

    def _on_evict(self, session: FakeSession, request: pb.EvictRequest, reply: Any) -> None:
        with self._lock:
            chosen = self._keys(request.keys) or [k for f, k in self.blocks if f == session.fingerprint]
            copies = [self.blocks.pop((session.fingerprint, key), None) for key in chosen]
            for slots in copies:
                self._free(slots or [])
            evicted = sum(slots is not None for slots in copies)
        reply(pb.EvictResponse(evicted=evicted))

    def _on_pin(self, session: FakeSession, request: pb.PinRequest, reply: Any) -> None:
        with self._lock:
            pinned = sum(1 for k in self._keys(request.keys) if (session.fingerprint, k) in self.blocks)
            number = self._new_ticket(Ticket("pin", b"", [], []))
        reply(pb.PinResponse(ticket=number, pinned=pinned))

    def _on_unpin(self, session: FakeSession, request: pb.UnpinRequest, reply: Any) -> None:
        with self._lock:
            assert self.tickets.pop(request.ticket).kind == "pin"
        reply(pb.UnpinResponse())

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def SaveBytes(self, request_iterator: Iterator[pb.SaveBytesRequest], context: grpc.ServicerContext) -> pb.SaveBytesResponse:
        session: FakeSession | None = None
        blocks: dict[bytes, dict[int, bytes]] = {}
        for part in request_iterator:
            self._running.wait()
            session = session or self.sessions[part.session]
            assert len(part.data) <= 2 << 20
            shards = blocks.setdefault(part.key, {})
            shards[part.shard] = shards.get(part.shard, b"") + part.data
        self._end_overloaded("save_bytes", context)
        if "save_bytes" in self.errors:
            ended(context, grpc.StatusCode.RESOURCE_EXHAUSTED, self.errors["save_bytes"], "refused")
        assert session is not None
        with self._lock:
            granted = self.save(session, list(blocks))
            if granted.ticket:
                ticket = self.tickets[granted.ticket]
                for key, slots in zip(ticket.keys, ticket.slots, strict=True):
                    for shard, slot in enumerate(slots):
                        assert len(blocks[key][shard]) == session.shard_bytes[shard]
                        self._store(slot, blocks[key][shard])
                self._close(session, pb.CommitRequest(ticket=granted.ticket), publish=True)
        return pb.SaveBytesResponse(boot_epoch=self.boot_epoch, outcomes=granted.outcomes)

    def LoadBytes(self, request: pb.LoadBytesRequest, context: grpc.ServicerContext) -> Iterator[pb.LoadBytesResponse]:
        self._running.wait()
        self._end_overloaded("load_bytes", context)
        session = self.sessions[request.session]
        missing = False
        for index, key in enumerate(self._keys(request.keys)):
            slots = self.blocks.get((session.fingerprint, key))
            if slots is None:
                missing = True
                if request.each:
                    continue
                break
            for shard, slot in enumerate(slots):
                data = self.slot_view(slot, session.shard_bytes[shard])
                for offset in range(0, len(data), 2 << 20):
                    yield pb.LoadBytesResponse(
                        boot_epoch=self.boot_epoch, index=index, shard=shard, data=data[offset : offset + (2 << 20)]
                    )
        reason = pb.ERROR_REASON_NOT_FOUND if missing else pb.ERROR_REASON_UNSPECIFIED
        yield pb.LoadBytesResponse(boot_epoch=self.boot_epoch, done=True, reason=reason)
