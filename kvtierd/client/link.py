"""Keeping a session open: a background thread that attaches, comes back after a restart, and tries whether a silent daemon
answers again. Calls never pay for any of this: without a working session they fail at once.

The circuit is closed while a session works (or is first opened). It opens when the session is lost, when attaching fails, or
when several calls in a row get no answer; then this thread, and only it, makes the trials.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Final

from kvtierd.client.breaker import BreakerState, CircuitBreaker
from kvtierd.client.deadline import Deadline
from kvtierd.client.results import ClientStatus
from kvtierd.client.session import Opening, Session, SessionSettings
from kvtierd.client.transport import SessionStream
from kvtierd.errors import DaemonUnavailableError, KvtierdError, RequestError
from kvtierd.v1 import kvtier_pb2 as pb

ATTACH_TIMEOUT_S: Final = 2.0
PROBE_TIMEOUT_S: Final = 0.5
MAX_PROBES: Final = 3
"""Probes without an answer after which a session is given up and a new one is tried."""

log = logging.getLogger("kvtierd.client")


class Link:
    """The current session of a client, or why there is none. Thread-safe.

    Args:
        settings: what to attach with.
        breaker: own breaker for tests; None for the defaults.
    """

    def __init__(self, settings: SessionSettings, breaker: CircuitBreaker | None = None) -> None:
        self.settings = settings
        self._breaker = breaker or CircuitBreaker()
        self._cond = threading.Condition()
        self._session: Session | None = None
        self._opening: Opening | None = None
        self._error: KvtierdError = DaemonUnavailableError("not attached yet")
        self._logged = ""
        self._misses = 0
        self._probes = 0
        self._retiring: list[Session] = []
        self._closed = False
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to attach in the background, if that has not begun."""
        with self._cond:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvtierd-client-link", daemon=True)
                self._thread.start()

    def acquire(self, deadline: Deadline) -> Session:
        """The current session, entered; pair with ``session.leave()``.

        Waits only while the very first attach is under way.

        Raises:
            DaemonUnavailableError: there is none.
            RequestError: the daemon refused the session.
        """
        if os.getpid() != self._pid:
            raise DaemonUnavailableError("this client was made before a fork: make a new one in this process")
        session = self._session
        if session is not None and self._breaker.admits and session.alive and session.enter():
            return session
        self.start()
        with self._cond:
            while not self._closed:
                session = self._session
                if session is not None and not session.alive:
                    self._lose(session, "the daemon closed the descriptor socket")
                elif session is not None and self._breaker.admits and session.enter():
                    return session
                if not self._breaker.admits or not self._cond.wait(deadline.remaining_s):
                    break
            error = self._error
        if isinstance(error, RequestError):
            raise RequestError(error.reason, error.message)
        raise DaemonUnavailableError("the client is closed" if self._closed else str(error))

    def wait_attached(self, timeout_s: float) -> bool:
        """Wait until there is a working session, through failed attempts too. False when there is none in time."""
        self.start()
        with self._cond:
            if self._session is not None and not self._session.alive:
                self._lose(self._session, "the daemon closed the descriptor socket")
            return self._cond.wait_for(lambda: self._closed or self._works(), timeout_s) and not self._closed

    def _works(self) -> bool:
        return self._session is not None and self._session.alive and self._breaker.admits

    @property
    def session(self) -> Session | None:
        """The current session, not entered; it may end at any moment."""
        return self._session

    @property
    def status(self) -> ClientStatus:
        """State at this moment."""
        with self._cond:
            session = self._session
            return ClientStatus(
                attached=self._works(),
                breaker=self._breaker.state,
                boot_epoch=session.boot_epoch if session else 0,
                daemon_version=session.welcome.daemon_version if session else "",
                draining=session.draining if session else False,
                error="" if self._works() else str(self._error),
            )

    def close(self) -> None:
        """End the session and the thread. Operations under way see the daemon as gone. In a forked child it does nothing."""
        if os.getpid() != self._pid:
            return  # locks may be held for good here, and the session is the parent's
        with self._cond:
            self._closed = True
            self._error = DaemonUnavailableError("the client is closed")
            if self._session is not None:
                self._session.stream.break_off("the client is closed")
                self._retiring.append(self._session)
                self._session = None
            opening, thread = self._opening, self._thread
            self._cond.notify_all()
        if opening is not None:
            opening.break_off()
        if thread is not None:
            thread.join()
        self._retire()

    def on_answer(self, answered: bool) -> None:
        """A call was answered or got no answer in time."""
        if answered:
            if self._misses or not self._breaker.admits:
                with self._cond:
                    self._misses = self._probes = 0
                    if self._session is not None:
                        self._breaker.success()
                    self._cond.notify_all()
            return
        with self._cond:
            self._misses += 1
            self._breaker.failure(time.monotonic())
            if not self._breaker.admits:
                self._failed(DaemonUnavailableError("the daemon does not answer"))
            self._cond.notify_all()

    def _on_event(self, event: pb.Event) -> None:
        if event.kind == pb.Event.KIND_DRAINING:
            session = self._session
            if session is not None:
                session.draining = True
            log.info("the daemon is shutting down: %s", event.detail)

    def _on_lost(self, stream: SessionStream) -> None:
        with self._cond:
            session = self._session
            if session is not None and session.stream is stream:
                self._lose(session, str(stream.lost))

    def _lose(self, session: Session, why: str) -> None:
        """Give the current session up, under the lock. The link's thread retires it: that may have to wait for threads."""
        self._session = None
        self._retiring.append(session)
        self._breaker.trip(time.monotonic())
        self._failed(DaemonUnavailableError(why))
        session.stream.break_off(why)
        self._cond.notify_all()

    def _failed(self, error: KvtierdError) -> None:
        self._error = error
        if str(error) != self._logged:  # once, not at each of the attempts that end the same way
            self._logged = str(error)
            log.warning("no KV cache for now: %s", error)

    def _run(self) -> None:
        while True:
            with self._cond:
                while not self._closed and not self._turn():
                    retry_at = self._breaker.retry_at
                    self._cond.wait(None if retry_at is None else max(0.0, retry_at - time.monotonic()))
                if self._closed:
                    return
                session, state = self._session, self._breaker.state
                self._opening = opening = Opening()
            self._retire()
            if session is None and state is not BreakerState.OPEN:
                self._attach(opening)
            elif session is not None and state is BreakerState.HALF_OPEN:
                self._probe(session)

    def _retire(self) -> None:
        while self._retiring:
            self._retiring.pop().retire()

    def _turn(self) -> bool:
        """Whether there is something to do now. Begins the trial when one is due."""
        if self._breaker.state is BreakerState.CLOSED:
            return self._session is None or bool(self._retiring)
        # A trial that ended in neither way would leave the circuit half open for good, so that state counts as due.
        half_open = self._breaker.state is BreakerState.HALF_OPEN or self._breaker.begin_trial(time.monotonic())
        return half_open or bool(self._retiring)

    def _probe(self, session: Session) -> None:
        try:
            session.ping(Deadline(PROBE_TIMEOUT_S))
        except KvtierdError:
            with self._cond:
                self._probes += 1
                if self._probes < MAX_PROBES or self._session is not session:
                    return
                self._probes = 0
                self._lose(session, "the daemon does not answer")

    def _attach(self, opening: Opening) -> None:
        try:
            session = opening.open(self.settings, ATTACH_TIMEOUT_S, self._on_lost, self._on_event, self.on_answer)
        except KvtierdError as e:
            self._attach_failed(e)
            return
        except Exception as e:
            log.exception("attaching failed in an unexpected way")
            self._attach_failed(DaemonUnavailableError(f"attaching failed: {e}"))
            return
        with self._cond:
            keep = not self._closed and session.alive
            if keep:
                self._session = session
                self._misses = self._probes = 0
                self._breaker.success()
                self._logged = ""
            self._cond.notify_all()
        if keep:
            log.info("attached to kvtierd %s at %s", session.welcome.daemon_version, self.settings.address)
        else:
            session.retire()
            self._attach_failed(DaemonUnavailableError("the session ended as it began"))

    def _attach_failed(self, error: KvtierdError) -> None:
        with self._cond:
            if not self._closed:
                self._failed(error)
            self._breaker.trip(time.monotonic())
            self._cond.notify_all()
