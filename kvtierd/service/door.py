"""Who may call at all: tokens are asked for before a call reaches its servicer, whatever servicer that is.

Health and reflection are open: they tell nothing of any tenant, and what probes a daemon has no token.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final

import grpc

from kvtierd.errors import Reason, RequestError
from kvtierd.runtime import decisions
from kvtierd.runtime.tokens import Grant, Tokens
from kvtierd.service import status
from kvtierd.service.metrics import Metrics
from kvtierd.v1 import admin_pb2

ADMIN: Final = admin_pb2.DESCRIPTOR.services_by_name["KvTierAdminService"].full_name
HEADER: Final = "authorization"
SCHEME: Final = "bearer "
MAX_HEADER_CHARS: Final = 4096

_caller: ContextVar[Grant | None] = ContextVar("caller", default=None)

Context = grpc.aio.ServicerContext[Any, Any]


def caller() -> Grant | None:
    """Whose token the call in progress has shown; None for one that needs none and shows none."""
    return _caller.get()


class Door:
    """Lets calls of kvtierd's own services through or refuses them; ``service/handlers.py`` puts it in front of them.

    Args:
        tokens: of the daemon.
        unix: which calls on unix sockets need one: "all", "admin" or "none".
        metrics: count refusals.
    """

    def __init__(self, tokens: Tokens, unix: str, metrics: Metrics) -> None:
        self._tokens = tokens
        self._unix = unix
        self._metrics = metrics

    async def check(self, context: Context, service: str) -> None:
        """Note whose call it is, or end it with the reason PERMISSION."""
        try:
            _caller.set(self._checked(context, admin=service == ADMIN))
        except RequestError as e:
            self._metrics.rejected(e.reason)
            if decisions.wanted():
                decisions.tell("refuse", service=service, peer=context.peer(), reason=e.reason.name.lower(), text=e.message)
            await status.abort(context, e)

    def _checked(self, context: Context, *, admin: bool) -> Grant | None:
        """Whose call it is. Raises RequestError PERMISSION."""
        on_unix = context.peer().startswith("unix:")
        header = next((value for key, value in context.invocation_metadata() or () if key == HEADER), None)
        if header is None:
            if on_unix and (self._unix == "none" or (self._unix == "admin" and not admin)):
                return None
            text = "this daemon asks for a token: name a file that holds one with --token-file, KVTIERD_TOKEN_FILE or token_file"
            raise RequestError(Reason.PERMISSION, text)
        text = header if isinstance(header, str) else header.decode(errors="replace")
        grant = None
        if len(text) <= MAX_HEADER_CHARS and text[: len(SCHEME)].lower() == SCHEME:
            grant = self._tokens.find(text[len(SCHEME) :].strip())
        if grant is None:
            raise RequestError(
                Reason.PERMISSION, "the daemon does not know this token; it was taken away, or belongs to another one"
            )
        if admin and not grant.admin:
            raise RequestError(
                Reason.PERMISSION, f"the token {grant.name!r} is not for the admin API; use one that has admin = true"
            )
        return grant


__all__ = ["Door", "caller"]
