"""Bytes that are no message: refused with a reason, where gRPC would call it an error of the daemon's and log a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from kvtierd.service import status

NO_MESSAGE: Final = status.as_request_error(DecodeError())


class DecodingServer:
    """Takes a service's handlers in the place of a server, and hands them on so that they refuse what cannot be decoded.

    Requests that are streams are decoded where they are read, which raises DecodeError there.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """As the server's. Those that are registered count before these."""
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """As the server's."""
        self._server.add_registered_method_handlers(service, {name: _refusing(handler) for name, handler in handlers.items()})


def _refusing(handler: Any) -> Any:
    if handler.request_streaming:
        return handler
    serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler

    async def served(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request is NO_MESSAGE:
            await status.abort(context, NO_MESSAGE)
        return await serve(request, context)

    return make(served, _decoder(handler.request_deserializer), handler.response_serializer)


def _decoder(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(raw: bytes) -> Any:
        try:
            return decode(raw)
        except DecodeError:
            return NO_MESSAGE

    return decoded
