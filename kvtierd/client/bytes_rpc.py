"""Saving and loading with the bytes in the messages, for callers that share no memory with the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import grpc
import numpy as np

from kvtierd import tracing
from kvtierd.client.buffers import Bytes1D
from kvtierd.client.control import count_missed
from kvtierd.client.deadline import Deadline
from kvtierd.client.loading import wire_reason
from kvtierd.client.results import LoadedBytes, LoadResult, SaveResult
from kvtierd.client.saving import OUTCOMES, rejection
from kvtierd.client.session import Session
from kvtierd.client.tokens import Metadata
from kvtierd.client.transport import CallTimeoutError, may_try_again, rpc_failure
from kvtierd.errors import DaemonUnavailableError, KvtierdError, Reason, RequestError
from kvtierd.model import KEY_BYTES
from kvtierd.v1 import kvtier_pb2 as pb
from kvtierd.v1 import kvtier_pb2_grpc

PART_BYTES: Final = 2 << 20
"""Most bytes of one message."""


def save_bytes(
    session: Session, packed: bytes, blocks: Sequence[Sequence[Bytes1D]], deadline: Deadline, ttl_ms: int = 0
) -> tuple[SaveResult, RequestError | None]:
    """Save blocks over one stream of messages for each part of the keys. Their life is ``ttl_ms``; 0 for no end.

    Returns:
        How it ended, and the error if the daemon refused a call as such.
    """
    result = SaveResult()
    size = session.keys_per_call
    for start in range(0, len(blocks), size):
        stop = min(start + size, len(blocks))
        try:
            response = _save_part(session, packed, blocks, start, stop, deadline, ttl_ms)
        except KvtierdError as e:
            result.rejected[rejection(e)] += len(blocks) - start
            return result, e if isinstance(e, RequestError) else None
        outcomes = list(response.outcomes)
        result.saved += outcomes.count(pb.SAVE_OUTCOME_GRANTED)
        result.held += outcomes.count(pb.SAVE_OUTCOME_HELD)
        others = (o for o in outcomes if o not in (pb.SAVE_OUTCOME_GRANTED, pb.SAVE_OUTCOME_HELD))
        result.rejected.update(OUTCOMES.get(o, str(o)) for o in others)
        if len(outcomes) < stop - start:
            result.rejected[Reason.INTERNAL.name] += stop - start - len(outcomes)
    return result, None


def _save_part(
    session: Session, packed: bytes, blocks: Sequence[Sequence[Bytes1D]], start: int, stop: int, deadline: Deadline, ttl_ms: int
) -> pb.SaveBytesResponse:
    def messages() -> Iterator[pb.SaveBytesRequest]:
        token, ttl = session.token, ttl_ms
        for index in range(start, stop):
            key = packed[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            for shard, view in enumerate(blocks[index]):
                for offset in range(0, view.nbytes, PART_BYTES):
                    data = view[offset : offset + PART_BYTES].tobytes()
                    yield pb.SaveBytesRequest(session=token, key=key, shard=shard, data=data, ttl_ms=ttl)
                    token, ttl = b"", 0

    call = _stub(session).SaveBytes
    response: pb.SaveBytesResponse = _answered(
        session, lambda: call(messages(), timeout=deadline.remaining_s, metadata=_metadata(session)), deadline
    )
    return response


def load_bytes(session: Session, packed: bytes, deadline: Deadline, *, each: bool) -> LoadedBytes:
    """Load blocks over one stream of messages for each part of the keys.

    Raises:
        RequestError: the daemon refused a call as such.
        DaemonUnavailableError: no part came at all.
    """
    result = LoadedBytes()
    count = len(packed) // KEY_BYTES
    for start in range(0, count, session.keys_per_call):
        keys = packed[start * KEY_BYTES : (start + session.keys_per_call) * KEY_BYTES]
        try:
            result.reason = _load_part(session, keys, start, deadline, result, each=each)
        except RequestError:
            raise
        except KvtierdError as e:
            if not result.blocks:
                raise
            result.reason = Reason.DEADLINE if isinstance(e, CallTimeoutError) else Reason.UNSPECIFIED
            break
        if result.reason is not None and not each:
            count_missed(session, packed, start + session.keys_per_call)
            break
    if each:
        result.loaded = len(result.blocks)
    else:
        while result.loaded in result.blocks:
            result.loaded += 1
        result.blocks = {index: result.blocks[index] for index in range(result.loaded)}
    if result.loaded == count:
        result.reason = None
    elif result.reason is None:
        result.reason = Reason.NOT_FOUND
    return result


def load_into(
    session: Session, packed: bytes, blocks: Sequence[Sequence[Bytes1D]], deadline: Deadline, *, each: bool
) -> LoadResult:
    """Load blocks into buffers.

    Raises:
        KvtierdError: as ``load_bytes``.
    """
    came = load_bytes(session, packed, deadline, each=each)
    for index, shards in came.blocks.items():
        for target, data in zip(blocks[index], shards, strict=True):
            np.copyto(target, np.frombuffer(data, np.uint8))
    # The messages do not name tiers.
    return LoadResult(came.loaded, frozenset(came.blocks), {}, came.reason)


def _load_part(session: Session, keys: bytes, start: int, deadline: Deadline, result: LoadedBytes, *, each: bool) -> Reason | None:
    request = pb.LoadBytesRequest(session=session.token, keys=keys, each=each)
    parts: list[list[bytes]] = []
    filled = -1
    reason: Reason | None = None

    def consume() -> Any:
        nonlocal parts, filled, reason
        request.deadline_ms = session.daemon_ms(deadline.remaining_s)
        for message in _stub(session).LoadBytes(request, timeout=deadline.remaining_s, metadata=_metadata(session)):
            if message.done:
                reason = wire_reason(message.reason)
                continue
            if message.index != filled:
                parts, filled = [[] for _ in range(session.shards)], message.index
            parts[message.shard].append(message.data)
            if message.shard == session.shards - 1:
                block = [b"".join(pieces) for pieces in parts]
                if tuple(map(len, block)) == session.shard_bytes:
                    result.blocks[start + filled] = block

    _answered(session, consume, deadline)
    return reason


def _metadata(session: Session) -> Metadata:
    traceparent = tracing.traceparent()
    return (*session.metadata, ("traceparent", traceparent)) if traceparent else session.metadata


def _stub(session: Session) -> Any:
    return kvtier_pb2_grpc.KvTierServiceStub(session.stream.channel)


def _answered(session: Session, call: Any, deadline: Deadline) -> Any:
    """Run a unary or streaming RPC; turn its failure into this library's error and tell the breaker about it.

    One that an overloaded daemon refuses is made again when it says, if the session is patient.
    """
    while True:
        try:
            response = call()
            break
        except grpc.RpcError as e:
            error = rpc_failure(e)
            session.stream.on_answer(not isinstance(error, CallTimeoutError))
            if not (isinstance(error, RequestError) and session.stream.patient and may_try_again(error, deadline)):
                raise error from e
        except ValueError as e:  # gRPC's answer to a call on a channel that was closed meanwhile
            raise DaemonUnavailableError(f"the session is closed: {e}") from e
    session.stream.on_answer(True)
    if response is not None and response.boot_epoch != session.boot_epoch:
        raise session.stream.break_off("a reply came from another boot of the daemon")
    return response
