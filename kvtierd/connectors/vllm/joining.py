"""A worker's connections to sessions that the scheduler's side has begun.

Copies wait here for the daemon, and nowhere else: never beyond the time that they are given, and after a failure not at all for a
while, so that a daemon that this rank cannot reach does not cost each of them the full time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from kvtierd.client import ExtentMap
from kvtierd.connectors.vllm.backoff import Backoff
from kvtierd.connectors.vllm.metadata import SessionInfo
from kvtierd.errors import DaemonUnavailableError, RequestError
from kvtierd.model import slot_extent

T = TypeVar("T")
Join = Callable[[SessionInfo, float, Callable[[], None]], ExtentMap]
JOIN_TIMEOUT_S: Final = 2.0
"""Longest wait for the daemon's descriptor socket: to join, or to be passed memory."""
FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 30.0


class LostMemoryError(RequestError):
    """The memory of these slots cannot be mapped here."""

    def __init__(self, error: RequestError, slots: frozenset[int]) -> None:
        super().__init__(error.reason, error.message)
        self.slots = slots


def left_s(until_s: float) -> float:
    """Seconds from now to a time on the monotonic clock; 0 when it has passed."""
    return max(0.0, until_s - time.monotonic())


class Joined:
    """One session that this process has joined. Its connection stays open until the last copy has left: the daemon takes the
    session's slots back when it closes."""

    def __init__(self, session: SessionInfo) -> None:
        self.session = session
        self._lock = threading.Lock()
        self._extents: ExtentMap | None = None
        self._users = 0
        self._retired = False
        self._pauses = Backoff(1, FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def enter(self, join: Join, until_s: float) -> ExtentMap:
        """Begin a copy; pair with ``leave``. Joins when it is the first, or when the last connection was lost.

        Args:
            join: makes the connection, in at most so many seconds; calls the function when the daemon's side goes away.
            until_s: longest wait, on the monotonic clock.

        Raises:
            KvtierdError: the session has ended, or the daemon cannot be reached, or could not be a moment ago.
        """
        if not self._lock.acquire(timeout=min(2 * JOIN_TIMEOUT_S, left_s(until_s))):
            raise DaemonUnavailableError("the session could not be joined in time")
        try:
            if self._retired:
                raise DaemonUnavailableError("the session has ended")
            if self._extents is None or (self._extents.closed and not self._users):
                if self._extents is not None:
                    self._extents.close()
                    self._extents = None
                self._extents = self._reach(until_s, lambda timeout_s: join(self.session, timeout_s, self._lost))
            self._users += 1
            return self._extents
        finally:
            self._lock.release()

    def map(self, extents: ExtentMap, slots: Sequence[int], until_s: float) -> None:
        """Have the memory of these slots mapped. Called between ``enter`` and ``leave``.

        One extent after the other: pinning them takes its time, and waiting goes on as long as they come.

        Raises:
            DaemonUnavailableError: the daemon does not pass one in time, or did not a moment ago.
            LostMemoryError: one cannot be mapped.
        """
        for extent in dict.fromkeys(map(slot_extent, slots)):
            if extents.holds([extent]):
                continue
            try:
                self._reach(until_s, partial(extents.map, [extent]))
            except RequestError as e:
                raise LostMemoryError(e, frozenset(slot for slot in slots if slot_extent(slot) == extent)) from e

    def _reach(self, until_s: float, call: Callable[[float], T]) -> T:
        """Wait for the daemon, unless it could not be reached a moment ago."""
        begun_s = time.monotonic()
        if self._pauses.pausing(begun_s):
            raise DaemonUnavailableError("the daemon could not be reached from this rank a moment ago")
        try:
            result = call(min(JOIN_TIMEOUT_S, left_s(until_s)))
        except DaemonUnavailableError:
            self._pauses.failed(begun_s, time.monotonic())
            raise
        self._pauses.succeeded()
        return result

    @property
    def retired(self) -> bool:
        """Whether no copy begins any more."""
        return self._retired

    def leave(self) -> None:
        """End a copy."""
        with self._lock:
            self._users -= 1
            self._close_if_done()

    def retire(self) -> None:
        """No copy begins any more."""
        with self._lock:
            self._retired = True
            self._close_if_done()

    def _lost(self) -> None:
        """The daemon's side of the connection has gone, says the connection's own thread, which closing it would wait for."""
        threading.Thread(target=self._let_go, name="kvtierd-lost", daemon=True).start()

    def _let_go(self) -> None:
        with self._lock:
            self._close_if_done()

    def _close_if_done(self) -> None:
        """Unmap a pool that no copy uses and none will: a daemon that has started anew makes another one beside it."""
        extents = self._extents
        if extents is not None and not self._users and (self._retired or extents.closed):
            extents.close()
            self._extents = None
