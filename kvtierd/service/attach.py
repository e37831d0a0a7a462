"""The Attach stream: a session's life and the calls inside it.

Calls that can be answered at once are answered in order, without a task of their own, which is what makes the stream twice as
fast as unary calls. Those that must wait (a load from NVMe, a save that waits for room) get a task; their number is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import grpc

from kvtierd import PROTOCOL_VERSION, __version__
from kvtierd.errors import Reason, RequestError
from kvtierd.model import MAX_KEYS_PER_CALL, Namespace
from kvtierd.runtime import Attached, Runtime
from kvtierd.service.calls import Calls, Whose
from kvtierd.service.door import caller
from kvtierd.service.metrics import Metrics
from kvtierd.service.spans import call_span
from kvtierd.service.status import as_request_error, code_number
from kvtierd.v1 import kvtier_pb2 as pb

log = logging.getLogger(__name__)

MAX_WAITING_CALLS: Final = 256
"""Calls of one stream that may wait at one time."""
HELLO_TIMEOUT_S: Final = 10.0
CANCEL_WAIT_S: Final = 2.0
"""How long a stream that has ended waits for its calls to notice."""
MAX_CLIENT_NAME: Final = 64
OLDEST_PROTOCOL: Final = 1

Stream = grpc.aio.ServicerContext[Any, Any]


def _nothing() -> None:
    """What there is to take back of a message that grants nothing."""


def namespace_of(message: pb.Namespace) -> Namespace:
    """The namespace that a message describes; sizes of 0 count as 1 where a size is meant."""
    return Namespace(
        shard_bytes=tuple(message.shard_bytes),
        model=message.model or "opaque",
        revision=message.revision,
        kv_dtype=message.kv_dtype or "opaque",
        kv_layout=message.kv_layout or "opaque",
        attention=message.attention or "opaque",
        block_tokens=message.block_tokens,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_size=message.head_size,
        tp_size=message.tp_size or 1,
        pp_size=message.pp_size or 1,
        dcp_size=message.dcp_size or 1,
        hash_algorithm=message.hash_algorithm,
        extra=dict(message.extra),
    )


def _name_of(hello: pb.Hello) -> str:
    """A client's name for logs and status: one line, never empty."""
    name = "".join(c if c.isprintable() else "?" for c in hello.client_name[:MAX_CLIENT_NAME]).strip()
    return name or "unnamed client"


class AttachStream:
    """One open Attach stream."""

    def __init__(self, runtime: Runtime, calls: Calls, metrics: Metrics, context: Stream) -> None:
        self._rt = runtime
        self._calls = calls
        self._metrics = metrics
        self._context = context
        self._write_lock = asyncio.Lock()
        self._waiting: set[asyncio.Task[None]] = set()
        self._attached: Attached | None = None
        self._tenant = ""

    def whose(self) -> Whose:
        """Its session, once it has begun, and whom its client acts for."""
        return self._attached, self._tenant

    async def run(self) -> None:
        """Serve the stream until the client ends it. Raises RequestError when the session cannot begin."""
        hello = await self._hello()
        self._tenant = hello.tenant
        attached = await self._rt.attach(namespace_of(hello.namespace), hello.tenant, _name_of(hello), hello.pid, caller())
        self._attached = attached
        attached.enter()
        try:
            await self._welcome_in(attached, hello)
            while True:
                request = await self._context.read()
                if request is grpc.aio.EOF:
                    break
                if request.WhichOneof("message") != "call":
                    raise RequestError(Reason.BAD_REQUEST, "only the first message of the stream may be a Hello")
                await self._answer(attached, request.call)
        finally:
            attached.on_event = None
            attached.stream_open = False
            try:
                await self._end_waiting()
            finally:
                self._rt.end_if_over(attached)

    async def _end_waiting(self) -> None:
        """Cancel the calls that wait. A session ends with its engine even if one of them does not listen."""
        for task in list(self._waiting):
            task.cancel()
        if self._waiting:
            _, deaf = await asyncio.wait(self._waiting, timeout=CANCEL_WAIT_S)
            if deaf:
                log.warning("%d calls of an ended stream go on", len(deaf))
            for task in deaf:
                task.cancel()

    async def _hello(self) -> pb.Hello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                request = await self._context.read()
        except TimeoutError:
            raise RequestError(Reason.BAD_REQUEST, f"no Hello within {HELLO_TIMEOUT_S:.0f} s") from None
        if request is grpc.aio.EOF or request.WhichOneof("message") != "hello":
            raise RequestError(Reason.BAD_REQUEST, "the first message of the stream must be a Hello")
        hello: pb.Hello = request.hello
        if not OLDEST_PROTOCOL <= hello.protocol_version <= PROTOCOL_VERSION:
            older = "daemon" if hello.protocol_version > PROTOCOL_VERSION else "client"
            raise RequestError(
                Reason.PROTOCOL_VERSION,
                f"the client speaks protocol {hello.protocol_version}, this daemon ({__version__}) {OLDEST_PROTOCOL} to "
                f"{PROTOCOL_VERSION}: update the {older}",
            )
        return hello

    async def _welcome_in(self, attached: Attached, hello: pb.Hello) -> None:
        self._metrics.session_opened()
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            self._spawn(loop, self._send_event(text))

        attached.on_event = tell
        await self._write(pb.AttachResponse(welcome=self._welcome(attached, bytes_only=hello.bytes_only)))

    def _welcome(self, attached: Attached, *, bytes_only: bool) -> pb.Welcome:
        server = self._rt.config.server
        return pb.Welcome(
            session=attached.token,
            boot_epoch=self._rt.boot_epoch,
            protocol_version=PROTOCOL_VERSION,
            descriptor_socket="" if bytes_only else str(server.fd_socket),
            fingerprint=attached.core.realm.fingerprint,
            slot_bytes=attached.core.realm.slot_bytes,
            limits=pb.Limits(
                max_keys=MAX_KEYS_PER_CALL,
                max_tickets=server.max_tickets,
                max_deadline_ms=int(server.max_deadline * 1000),
                max_ticket_bytes=int(server.max_ticket_share * self._rt.config.cpu.capacity),
            ),
            daemon_version=__version__,
        )

    # ---- calls

    async def _answer(self, attached: Attached, call: pb.Call) -> None:
        kind = call.WhichOneof("request") or ""
        began_s = time.perf_counter()
        try:
            self._calls.admission.check(kind)
            if kind == "load":
                await self._load(attached, call)
            elif kind == "prefetch":
                await self._prefetch(attached, call)
            elif (kind == "save" and call.save.wait_ms) or kind == "evict":
                self._spawn_call(call, self._simple(attached, call, kind))
            else:
                await self._simple(attached, call, kind)
        except grpc.aio.BaseError:
            raise  # the stream has gone, and with it whoever asked
        except Exception as e:
            await self._fail(call, e, began_s)
        else:
            self._calls.answered(kind.capitalize(), "OK", began_s)

    async def _simple(self, attached: Attached, call: pb.Call, kind: str) -> None:
        with call_span(kind, call.traceparent):
            await self._reply(attached, call, kind)

    async def _reply(self, attached: Attached, call: pb.Call, kind: str) -> None:
        calls = self._calls
        reply = pb.Reply(id=call.id, last=True)
        undo: Callable[[], None] = _nothing
        if kind == "lookup":
            reply.lookup.CopyFrom(await calls.lookup(attached, call.lookup))
        elif kind == "save":
            reply.save.CopyFrom(await calls.save(attached, call.save))
            undo = functools.partial(calls.undo_save, attached, reply.save)
        elif kind == "commit":
            reply.commit.CopyFrom(calls.commit(attached, call.commit))
        elif kind == "abort":
            reply.abort.CopyFrom(calls.abort(attached, call.abort))
        elif kind == "release":
            reply.release.CopyFrom(calls.release(attached, call.release))
        elif kind == "cancel":
            reply.cancel.CopyFrom(calls.cancel(attached, call.cancel))
        elif kind == "evict":
            reply.evict.CopyFrom(await calls.evict(attached, call.evict))
        elif kind == "pin":
            reply.pin.CopyFrom(await calls.pin(attached, call.pin))
            undo = functools.partial(calls.undo_pin, reply.pin)
        elif kind == "unpin":
            reply.unpin.CopyFrom(calls.unpin(attached, call.unpin))
        else:
            raise RequestError(Reason.BAD_REQUEST, "the call carries no request that this daemon knows")
        await self._write(pb.AttachResponse(reply=reply), undo)

    async def _load(self, attached: Attached, call: pb.Call) -> None:
        request = call.load
        ticket = await self._calls.begin_load(attached, request, call.traceparent)
        undo = functools.partial(self._calls.undo_step, attached)
        step = self._calls.load_step(ticket)
        if step is not None:
            reply = pb.Reply(id=call.id, last=step.done, load=step)
            await self._write(pb.AttachResponse(reply=reply), functools.partial(undo, step))
        if step is None or not step.done:
            try:
                self._spawn_call(call, self._send_steps(call.id, self._calls.load_steps(ticket), "load", undo))
            except RequestError:
                self._calls.abandon_load(ticket)
                raise

    async def _prefetch(self, attached: Attached, call: pb.Call) -> None:
        ticket = await self._calls.begin_prefetch(attached, call.prefetch, call.traceparent)
        steps = self._calls.prefetch_steps(ticket, wait=call.prefetch.wait)
        try:
            self._spawn_call(call, self._send_steps(call.id, steps, "prefetch"))
        except RequestError:
            self._calls.undo_prefetch(attached, ticket)
            raise

    async def _send_steps(
        self, call_id: int, steps: AsyncIterator[Any], kind: str, undo: Callable[[Any], None] = lambda _: None
    ) -> None:
        """Send each step as a reply; the last one is known only when the next is not there, or when it says so."""
        last = False
        async for step in steps:
            last = bool(step.done)
            reply = pb.Reply(id=call_id, last=last)
            getattr(reply, kind).CopyFrom(step)
            await self._write(pb.AttachResponse(reply=reply), functools.partial(undo, step))
        if not last:
            await self._write(pb.AttachResponse(reply=pb.Reply(id=call_id, last=True)))

    # ---- sending

    def _spawn_call(self, call: pb.Call, work: Any) -> None:
        if len(self._waiting) >= MAX_WAITING_CALLS:
            work.close()
            raise RequestError(Reason.OVERLOADED, f"{MAX_WAITING_CALLS} calls of this session are waiting; retry with back-off")
        try:
            self._calls.admission.check_waiting()
        except RequestError:
            work.close()
            raise
        task = self._spawn(asyncio.get_running_loop(), self._guard(call, work))
        self._calls.admission.waiting += 1
        task.add_done_callback(self._waits_no_more)

    def _waits_no_more(self, _task: asyncio.Task[None]) -> None:
        self._calls.admission.waiting -= 1

    def _spawn(self, loop: asyncio.AbstractEventLoop, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = loop.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return task

    async def _guard(self, call: pb.Call, work: Any) -> None:
        began_s = time.perf_counter()
        try:
            await work
        except grpc.aio.BaseError:
            return  # the stream has gone, and with it whoever asked
        except Exception as e:
            # When it is the stream that has gone, nobody is there to be told.
            with contextlib.suppress(Exception):
                await self._fail(call, e, began_s)

    async def _fail(self, call: pb.Call, error: Exception, began_s: float) -> None:
        told = as_request_error(error)
        kind = call.WhichOneof("request") or ""
        tenant = getattr(getattr(call, kind), "tenant", "") if kind else ""
        self._calls.refused(kind.capitalize(), told, lambda: (self._attached, tenant))
        self._calls.answered(kind.capitalize(), code_number(told.reason), began_s)
        failure = pb.CallError(code=code_number(told.reason), reason=int(told.reason), message=told.message)  # type: ignore[arg-type]
        failure.retry_after_ms = round(told.retry_after_s * 1000)
        await self._write(pb.AttachResponse(reply=pb.Reply(id=call.id, last=True, error=failure)))

    async def _send_event(self, text: str) -> None:
        event = pb.Event(kind=pb.Event.KIND_DRAINING, detail=text)
        with contextlib.suppress(Exception):  # a client that has just left needs no event
            await self._write(pb.AttachResponse(event=event))

    async def _write(self, message: pb.AttachResponse, undo: Callable[[], None] = _nothing) -> None:
        """Send a message; ``undo`` takes back what it grants when it cannot be sent.

        A cancelled write is left alone: the message may have arrived, and what it grants ends with the session.
        """
        try:
            async with self._write_lock:
                await self._context.write(message)
        except Exception:
            undo()
            raise
