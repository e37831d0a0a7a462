"""Errors on the wire: gRPC status with a ``google.rpc.ErrorInfo`` whose reason is an ErrorReason and domain "kvtierd"."""

from __future__ import annotations

import logging
from typing import Any, Final

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvtierd.errors import Reason, RequestError

log = logging.getLogger(__name__)

ERROR_DOMAIN: Final = "kvtierd"
MAX_TEXT: Final = 400
"""Characters of an error; gRPC breaks calls whose trailers are longer than 16 KiB, and escapes each byte with three."""
CODES: Final = {
    Reason.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.BAD_KEY: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TOO_MANY_KEYS: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.PROTOCOL_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.UNKNOWN_LAYOUT: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.LAYOUT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.UNKNOWN_SESSION: grpc.StatusCode.UNAUTHENTICATED,
    Reason.UNKNOWN_TICKET: grpc.StatusCode.NOT_FOUND,
    Reason.PERMISSION: grpc.StatusCode.PERMISSION_DENIED,
    Reason.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.QUOTA: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.TOO_LARGE: grpc.StatusCode.OUT_OF_RANGE,
    Reason.LIMIT: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.IO: grpc.StatusCode.DATA_LOSS,
    Reason.CORRUPT: grpc.StatusCode.DATA_LOSS,
    Reason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


def code_of(reason: Reason) -> grpc.StatusCode:
    """gRPC status code of a reason."""
    return CODES.get(reason, grpc.StatusCode.UNKNOWN)


def code_number(reason: Reason) -> int:
    """Number of the gRPC status code of a reason."""
    number: int = code_of(reason).value[0]
    return number


def as_request_error(error: Exception) -> RequestError:
    """What a caller is told of an error: itself when it was raised on purpose, else INTERNAL (the log has the rest).

    A text that quotes a caller's words is cut to what fits into the trailers of a call.
    """
    if isinstance(error, RequestError):
        if len(error.message) <= MAX_TEXT:
            return error
        return RequestError(error.reason, error.message[: MAX_TEXT - 1] + "…", retry_after_s=error.retry_after_s)
    if isinstance(error, DecodeError):  # by reading from a stream
        return RequestError(Reason.BAD_REQUEST, "the bytes are no message of this call; see proto/ for what it takes")
    log.error("a call failed by a bug", exc_info=error)
    return RequestError(Reason.INTERNAL, f"the daemon failed ({type(error).__name__}); its log has the details")


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> None:
    """End a call with an error and its reason."""
    infos = [error_details_pb2.ErrorInfo(reason=error.reason.name, domain=ERROR_DOMAIN)]
    if error.retry_after_s:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        infos.append(error_details_pb2.RetryInfo(retry_delay=delay))
    details = [any_pb2.Any() for _ in infos]
    for detail, info in zip(details, infos, strict=True):
        detail.Pack(info)
    status = rpc_status.to_status(status_pb2.Status(code=code_number(error.reason), message=error.message, details=details))
    await context.abort(code_of(error.reason), error.message, status.trailing_metadata)
