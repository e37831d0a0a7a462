"""Attached engines: tokens, processes on the descriptor socket, and when a session ends.

A session is alive while its Attach stream is open or any of its processes holds the descriptor socket. The kernel closes
both when a process dies, so no time-out is needed; and as long as one process lives, it may be copying, so nothing is taken
back.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from kvtierd.core.realm import Realm
from kvtierd.core.tickets import Session
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Namespace
from kvtierd.runtime.tokens import Grant

TOKEN_BYTES: Final = 16
MAX_PROCESSES: Final = 2048
"""Processes of one session on the descriptor socket."""
MAX_CALLS: Final = 256
"""Calls of one session at one time, its Attach stream being one of them whatever goes on inside."""


@dataclass(slots=True, eq=False)
class Attached:
    """One session as the shell sees it."""

    token: bytes
    core: Session
    namespace: Namespace
    tenant: str
    client_name: str
    pid: int
    attached_s: float
    stream_open: bool = True
    realm_ids: set[int] = field(default_factory=set)
    """Realms that it acted for; its processes may map their extents."""
    requests: dict[str, int] = field(default_factory=dict)
    """Tickets by the names that the caller gave its requests; some may have ended."""
    processes: set[int] = field(default_factory=set)
    """Connections on the descriptor socket."""
    nodes: dict[int, int] = field(default_factory=dict)
    """NUMA node of each shard's process, as the last one that joined has said; -1 stands for all shards."""
    devices: tuple[int, ...] = ()
    """The GPU of each shard, by its place in the HBM tier, whose memory its processes have opened; () for none."""
    no_device: str = ""
    """Why it is given no GPU memory although a process of it has named its GPU."""
    on_event: Callable[[str], None] | None = None
    """Sends an event's text down the Attach stream."""
    grant: Grant | None = None
    """What its token allows; None where no token was needed."""
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    """Those in progress: its Attach stream, and what is called outside of it."""
    barred: str = ""
    """Why no call of it is served any more, while its processes live on."""

    @property
    def session_id(self) -> int:
        """Number for logs; the token is a secret."""
        return self.core.session_id

    def speaks_for(self, tenant: str) -> bool:
        """Whether it may act for a tenant."""
        return self.grant is None or self.grant.speaks_for(tenant)

    def enter(self) -> None:
        """Make the task that runs now a call of this session. Raises RequestError OVERLOADED when it has as many as it may have."""
        if len(self.calls) >= MAX_CALLS:
            raise RequestError(Reason.OVERLOADED, f"{MAX_CALLS} calls of this session are in progress; retry with back-off")
        _served.set(self)
        task = asyncio.current_task()
        if task is not None:
            self.calls.add(task)
            task.add_done_callback(self.calls.discard)

    @property
    def is_over(self) -> bool:
        """True when every process of the engine has gone."""
        return not self.stream_open and not self.processes


_served: ContextVar[Attached | None] = ContextVar("served", default=None)


def why_barred() -> str:
    """Why the session of the call that runs now is barred; empty when it is not, and for a call of no session."""
    attached = _served.get()
    return "" if attached is None else attached.barred


class Sessions:
    """All sessions, by token and by number."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_token: dict[bytes, Attached] = {}
        self._by_id: dict[int, Attached] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Attached]:
        return iter(list(self._by_id.values()))

    def check_room(self) -> None:
        """Raise RequestError LIMIT when there are as many sessions as allowed."""
        if len(self._by_id) >= self._limit:
            raise RequestError(Reason.LIMIT, f"{self._limit} sessions are attached; raise server.max_sessions or detach some")

    def next_id(self) -> int:
        """A number for a new session."""
        return next(self._ids)

    def add(self, core: Session, realm: Realm, client_name: str, pid: int, now: float) -> Attached:
        """Give a session its token."""
        attached = Attached(secrets.token_bytes(TOKEN_BYTES), core, realm.namespace, realm.tenant.name, client_name, pid, now)
        attached.realm_ids.add(realm.realm_id)
        self._by_token[attached.token] = attached
        self._by_id[core.session_id] = attached
        return attached

    def by_token(self, token: bytes) -> Attached:
        """The session of a token. Raises RequestError UNKNOWN_SESSION."""
        found = self._by_token.get(token)
        if found is None:
            raise RequestError(Reason.UNKNOWN_SESSION, "no such session: it ended, or the daemon was restarted; attach again")
        return found

    def by_id(self, session_id: int) -> Attached | None:
        """The session of a number."""
        return self._by_id.get(session_id)

    def node_of(self, realm_id: int, shard: int) -> int:
        """NUMA node of a process that copies into a realm's shard; -1 when none has said one. Changes nothing."""
        for attached in self._by_id.values():
            if realm_id in attached.realm_ids:
                node = attached.nodes.get(shard, attached.nodes.get(-1, -1))
                if node >= 0:
                    return node
        return -1

    def bar(self, attached: Attached, why: str) -> None:
        """Serve no call of a session any more. It ends when its processes have gone: until then they may be copying."""
        attached.barred = why
        self._by_token.pop(attached.token, None)
        for task in list(attached.calls):
            task.cancel()

    def remove(self, attached: Attached) -> None:
        """Forget a session."""
        self._by_token.pop(attached.token, None)
        self._by_id.pop(attached.session_id, None)
