"""What comes before every call of kvtierd's own services, put around their handlers once, when they are added: the door, and
bytes that are no message, which are refused with a reason where gRPC would call it an error of the daemon's and log a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from kvtierd.service import status
from kvtierd.service.door import Door

NO_MESSAGE: Final = status.as_request_error(DecodeError())


class HandlerServer(grpc.GenericRpcHandler):
    """Stands in the place of a server where services are added to it, and serves their methods there.

    Older versions of gRPC's asyncio server take the handlers of methods without a word and serve none of them; all of them ask
    handlers like this one.

    Args:
        server: where the methods are served.
        door: asks for tokens; None where there are none.
    """

    def __init__(self, server: grpc.aio.Server, door: Door | None) -> None:
        self._door = door
        self._handlers: dict[str, Any] = {}
        server.add_generic_rpc_handlers((self,))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call; None where there is no such method."""
        return self._handlers.get(handler_call_details.method)

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Nothing: each of these is added below too, and a way around what is put before those would be one too many."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serve methods. Of two handlers of one method the later counts."""
        self._handlers |= {f"/{service}/{name}": self._wrapped(handler, service) for name, handler in handlers.items()}

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
