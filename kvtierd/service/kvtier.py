"""``KvTierService``: unary and streaming RPCs over :class:`~kvtierd.service.calls.Calls`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc

from kvtierd.errors import Reason, RequestError
from kvtierd.model import KEY_BYTES
from kvtierd.runtime import Attached, Runtime
from kvtierd.runtime.sessions import why_barred
from kvtierd.service import status
from kvtierd.service.attach import AttachStream
from kvtierd.service.bytes_path import BytesSaver
from kvtierd.service.calls import Calls, Whose, checked_ttl, note_save
from kvtierd.service.handlers import HandlerServer
from kvtierd.service.metrics import Metrics
from kvtierd.service.spans import call_span, traceparent_of
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc

PART_BYTES: Final = 2 << 20
"""Most payload of one LoadBytes message."""

OWN_SPANS: Final = frozenset(["Attach", "Load", "LoadBytes", "Prefetch"])
"""Methods that last longer than a call, or whose tickets have the span."""

Context = grpc.aio.ServicerContext[Any, Any]
_Call = Callable[[Attached, Any], Awaitable[Any]]
_Undo = Callable[[Attached, Any], None]


class KvTierServicer(kvtier_pb2_grpc.KvTierServiceServicer):
    """The data API."""

    def __init__(self, runtime: Runtime, calls: Calls, metrics: Metrics) -> None:
        self._rt = runtime
        self._calls = calls
        self._metrics = metrics
        self.streams: set[asyncio.Task[Any]] = set()
        """Tasks of open Attach streams, which shutdown cancels."""

    async def _serve(self, context: Context, method: str, whose: Callable[[], Whose], work: Callable[[], Awaitable[Any]]) -> Any:
        """Run a call: time it, count it, and turn what goes wrong into a status with a reason."""
        began_s = time.perf_counter()
        try:
            self._calls.admission.check(method.lower())
            with call_span(method.lower(), "" if method in OWN_SPANS else traceparent_of(context)):
                answer = await work()
        except (asyncio.CancelledError, grpc.aio.BaseError) as e:
            if isinstance(e, asyncio.CancelledError) and (why := why_barred()):
                await self._turn_away(context, method, whose, why, began_s)
            self._calls.answered(method, "CANCELLED", began_s)
            if isinstance(e, asyncio.CancelledError):
                raise
            # What was written could not be sent: nobody is there to take it, which is no fault of the daemon's.
            raise asyncio.CancelledError from e
        except Exception as e:
            told = status.as_request_error(e)
            self._calls.refused(method, told, whose)
            self._calls.answered(method, status.code_number(told.reason), began_s)
            await status.abort(context, told)
        else:
            self._calls.answered(method, "OK", began_s)
            return answer

    async def _turn_away(self, context: Context, method: str, whose: Callable[[], Whose], why: str, began_s: float) -> None:
        """End a call whose session was barred meanwhile; its task was cancelled, of which gRPC would tell the caller nothing."""
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        told = RequestError(Reason.PERMISSION, why)
        self._calls.refused(method, told, whose)
        self._calls.answered(method, status.code_number(told.reason), began_s)
        await status.abort(context, told)

    async def _unary(self, context: Context, method: str, request: Any, call: Callable[[Attached, Any], Any]) -> Any:
        async def work() -> Any:
            answer = call(self._calls.session(request.session), request)
            return await answer if asyncio.iscoroutine(answer) else answer

        return await self._serve(context, method, partial(self._calls.whose, request), work)

    async def Attach(self, request_iterator: Any, context: Context) -> None:
        """See the proto."""
        task = asyncio.current_task()
        assert task is not None
        self.streams.add(task)
        try:
            stream = AttachStream(self._rt, self._calls, self._metrics, context)
            await self._serve(context, "Attach", stream.whose, stream.run)
        except asyncio.CancelledError:
            if not self._rt.stopping:
                raise
            # A cancelled handler leaves its call open, and the server would wait for its end.
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the daemon is shutting down")
        finally:
            self.streams.discard(task)

    async def Lookup(self, request: pb.LookupRequest, context: Context) -> Any:
        """See the proto."""
        return await self._unary(context, "Lookup", request, self._calls.lookup)

    async def _granting(self, context: Context, method: str, request: Any, call: _Call, undo: _Undo) -> None:
        """Serve a unary call that grants something: it writes its answer itself, and takes back what it cannot deliver."""

        async def work() -> None:
            attached = self._calls.session(request.session)
            answer = await call(attached, request)
            try:
                await context.write(answer)
            except BaseException:
                # The call has not ended well for its caller, so that nobody uses what was granted.
                undo(attached, answer)
                raise

        await self._serve(context, method, partial(self._calls.whose, request), work)

    async def Save(self, request: pb.SaveRequest, context: Context) -> None:
        """See the proto; registered by :func:`add_to_server`."""
        await self._granting(context, "Save", request, self._calls.save, self._calls.undo_save)

    async def Commit(self, request: pb.CommitRequest, context: Context) -> Any:
        """See the proto."""
        return await self._unary(context, "Commit", request, self._calls.commit)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> Any:
        """See the proto."""
        return await self._unary(context, "Abort", request, self._calls.abort)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> Any:
        """See the proto."""
        return await self._unary(context, "Release", request, self._calls.release)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> Any:
        """See the proto."""
        return await self._unary(context, "Cancel", request, self._calls.cancel)

    async def Evict(self, request: pb.EvictRequest, context: Context) -> Any:
        """See the proto."""
        return await self._unary(context, "Evict", request, self._calls.evict)

    async def Pin(self, request: pb.PinRequest, context: Context) -> None:
        """See the proto; registered by :func:`add_to_server`."""
        await self._granting(context, "Pin", request, self._calls.pin, lambda _, answer: self._calls.undo_pin(answer))

    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> Any:
        """See the proto."""
        return await self._unary(context, "Unpin", request, self._calls.unpin)

    # ---- streams

    async def Load(self, request: pb.LoadRequest, context: Context) -> None:
        """See the proto."""

        async def work() -> None:
            attached = self._calls.session(request.session)
            ticket = await self._calls.begin_load(attached, request, traceparent_of(context))
            try:
                async with contextlib.aclosing(self._calls.load_steps(ticket)) as steps:
                    async for step in steps:
                        await context.write(step)
            except BaseException:
                self._calls.undo_load(attached, ticket)
                raise

        await self._serve(context, "Load", partial(self._calls.whose, request), work)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Context) -> None:
        """See the proto."""

        async def work() -> None:
            ticket = await self._calls.begin_prefetch(self._calls.session(request.session), request, traceparent_of(context))
            async for step in self._calls.prefetch_steps(ticket, wait=request.wait):
                await context.write(step)

        await self._serve(context, "Prefetch", partial(self._calls.whose, request), work)

    async def SaveBytes(self, request_iterator: AsyncIterator[pb.SaveBytesRequest], context: Context) -> Any:
        """See the proto."""
        first = pb.SaveBytesRequest()

        async def work() -> pb.SaveBytesResponse:
            nonlocal first
            saver: BytesSaver | None = None
            began_s = self._rt.now()
            try:
                async for part in request_iterator:
                    if saver is None:
                        first = part
                        attached = self._calls.session(part.session)
                        realm = await self._calls.realm(attached, part.tenant)
                        saver = BytesSaver(self._rt, attached, realm, checked_ttl(part.ttl_ms))
                    if len(part.key) != KEY_BYTES:
                        raise RequestError(Reason.BAD_KEY, f"a key takes {KEY_BYTES} bytes; got {len(part.key)}")
                    await saver.add(part.key, part.shard, part.data)
                outcomes = saver.finish() if saver else []
            except BaseException:
                if saver is not None:
                    saver.give_up()
                raise
            if saver is not None:
                self._calls.count_saved(saver.published, "grpc", self._rt.now() - began_s)
                note_save(realm.tenant.name, outcomes)
            return pb.SaveBytesResponse(boot_epoch=self._rt.boot_epoch, outcomes=outcomes)  # type: ignore[arg-type]

        return await self._serve(context, "SaveBytes", lambda: self._calls.whose(first), work)

    async def LoadBytes(self, request: pb.LoadBytesRequest, context: Context) -> None:
        """See the proto."""

        async def work() -> None:
            attached = self._calls.session(request.session)
            ticket = await self._calls.begin_load(attached, request, traceparent_of(context))
            shards = ticket.realm.namespace.shard_bytes
            reason = 0
            try:
                async for step in self._calls.load_steps(ticket, "grpc"):
                    for position, index in enumerate(step.indexes):
                        for shard, size in enumerate(shards):
                            slot = step.slots[position * len(shards) + shard]
                            for start in range(0, size, PART_BYTES):
                                self._rt.check_alive(attached)
                                # Its slots may be somebody else's once the block was released, while a part was sent.
                                ticket.check_taken(index)
                                view = self._rt.cpu.view(slot)[start : min(start + PART_BYTES, size)]
                                data = bytes(view)
                                view.release()
                                await context.write(
                                    pb.LoadBytesResponse(boot_epoch=self._rt.boot_epoch, index=index, shard=shard, data=data)
                                )
                        self._rt.release_if_open(attached, ticket.ticket_id, [index])
                    reason = step.reason
            finally:
                self._rt.release_if_open(attached, ticket.ticket_id, [])
            await context.write(pb.LoadBytesResponse(boot_epoch=self._rt.boot_epoch, done=True, reason=reason))  # type: ignore[arg-type]

        await self._serve(context, "LoadBytes", partial(self._calls.whose, request), work)


def add_to_server(servicer: KvTierServicer, server: HandlerServer) -> None:
    """Register the data API.

    Unary calls that grant something are served as streams of one message, which is the same on the wire: writing the answer is
    then a step that can be seen to fail, while what a unary handler returns is lost without a word when its caller has gone.
    """
    service = pb.DESCRIPTOR.services_by_name["KvTierService"].full_name
    granting: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Save": grpc.unary_stream_rpc_method_handler(servicer.Save, pb.SaveRequest.FromString, pb.SaveResponse.SerializeToString),
        "Pin": grpc.unary_stream_rpc_method_handler(servicer.Pin, pb.PinRequest.FromString, pb.PinResponse.SerializeToString),
    }
    kvtier_pb2_grpc.add_KvTierServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(service, granting)
