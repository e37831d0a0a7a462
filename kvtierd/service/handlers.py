"""What comes before every call of kvtierd's own services, put around their handlers once, when they are registered: the door, and
bytes that are no message, which are refused with a reason where gRPC would call it an error of the daemon's and log a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from kvtierd.service import status
from kvtierd.service.door import Door

NO_MESSAGE: Final = status.as_request_error(DecodeError())


class HandlerServer:
    """Stands in the place of a server where services are added to it, and registers their handlers there.

    Args:
        server: where they are registered.
        door: asks for tokens; None where there are none.
    """

    def __init__(self, server: grpc.aio.Server, door: Door | None) -> None:
        self._server = server
        self._door = door

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Nothing: each of these is registered too, and a way around what is put before those would be one too many."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """As the server's. Of two handlers of one method the later counts."""
        wrapped = {name: self._wrapped(handler, service) for name, handler in handlers.items()}
        self._server.add_registered_method_handlers(service, wrapped)

    def _wrapped(self, handler: Any, service: str) -> Any:
        kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        serve, door = getattr(handler, kind), self._door

        async def served(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            if door is not None:
                await door.check(context, service)
            if request is NO_MESSAGE:
                await status.abort(context, NO_MESSAGE)
            return await serve(request, context)

        # Requests that are streams are decoded where they are read, which raises DecodeError there.
        decode = handler.request_deserializer if handler.request_streaming else _decoder(handler.request_deserializer)
        return handler._replace(**{kind: served, "request_deserializer": decode})


def _decoder(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(raw: bytes) -> Any:
        try:
            return decode(raw)
        except DecodeError:
            return NO_MESSAGE

    return decoded


__all__ = ["HandlerServer"]
