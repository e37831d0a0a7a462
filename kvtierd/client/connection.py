"""What every call of a client needs: the state of its connection, and running an operation in its session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvtierd.client.deadline import Deadline
from kvtierd.client.link import Link
from kvtierd.client.results import PASSING, ClientStatus
from kvtierd.client.session import Session
from kvtierd.errors import DaemonUnavailableError, KvtierdError, RequestError

T = TypeVar("T")


class Connection:
    """A link to one daemon. Thread-safe.

    Args:
        link: not started yet.
        timeout_s: deadline of calls that name none.
        require: raise instead of answering "nothing" when there is no daemon.
    """

    def __init__(self, link: Link, timeout_s: float, require: bool) -> None:
        self._link = link
        self.timeout_s = timeout_s
        self.require = require

    @property
    def status(self) -> ClientStatus:
        """State at this moment."""
        return self._link.status

    @property
    def session_token(self) -> bytes:
        """Token that a worker process joins the session with; empty without a session. Another after each re-attach."""
        session = self._link.session
        return session.token if session is not None else b""

    @property
    def descriptor_socket(self) -> str:
        """Path that a worker process joins the session at; empty without a session."""
        session = self._link.session
        return session.welcome.descriptor_socket if session is not None else ""

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait for a session, through failed attempts too. False when there is none in time."""
        return self._link.wait_attached(timeout_s)

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self.timeout_s if timeout_s is None else timeout_s)

    def _call(self, deadline: Deadline, run: Callable[[Session], T], nothing: Callable[[KvtierdError], T]) -> T:
        """Run an operation in a session; a failure that a cache's user lives with becomes ``nothing(error)``."""

        def run_and_leave(session: Session) -> T:
            result = run(session)
            session.leave()
            return result

        return self._hold(deadline, run_and_leave, nothing)

    def _hold(self, deadline: Deadline, run: Callable[[Session], T], nothing: Callable[[KvtierdError], T]) -> T:
        """As ``_call``, for results that keep the session and leave it themselves; a failure leaves it here."""
        try:
            session = self._link.acquire(deadline)
        except (DaemonUnavailableError, RequestError) as e:
            if self.require:
                raise
            return nothing(e)
        try:
            return run(session)
        except BaseException as e:
            session.leave()
            if not isinstance(e, DaemonUnavailableError | RequestError):
                raise
            self._passes(e)
            return nothing(e)

    def _passes(self, error: KvtierdError) -> None:
        if self.require or (isinstance(error, RequestError) and error.reason not in PASSING):
            raise error
