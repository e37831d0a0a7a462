"""Saving: ask for slots, copy into them, commit.

A ticket belongs to one session, and the thread that copies is the one that commits or aborts: a slot is never given back
while this process still writes into it.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import numpy as np

from kvtierd.client.buffers import Bytes1D, count_keys
from kvtierd.client.copying import GROUP_BYTES, Copier, Job
from kvtierd.client.deadline import Deadline
from kvtierd.client.results import DEADLINE, EVICTED, UNAVAILABLE, SaveResult
from kvtierd.client.session import Session
from kvtierd.client.transport import CallTimeoutError, PendingCall
from kvtierd.errors import DaemonUnavailableError, KvtierdError, Reason, RequestError
from kvtierd.model import KEY_BYTES, MAX_TTL_S
from kvtierd.v1 import kvtier_pb2 as pb

RETRY_MIN_S: Final = 0.002
RETRY_MAX_S: Final = 0.05

_PREFIX: Final = "SAVE_OUTCOME_"
OUTCOMES: Final = {value: name.removeprefix(_PREFIX) for name, value in pb.SaveOutcome.items()}
"""Outcome values to names."""
_RETRYABLE: Final = frozenset([pb.SAVE_OUTCOME_BUSY, pb.SAVE_OUTCOME_IN_PROGRESS, pb.SAVE_OUTCOME_LIMIT])


def rejection(error: KvtierdError) -> str:
    """The name under which a failure counts in ``SaveResult.rejected``."""
    if isinstance(error, CallTimeoutError):
        return DEADLINE
    return error.reason.name if isinstance(error, RequestError) else UNAVAILABLE


def wire_ttl_ms(ttl_s: float | None) -> int:
    """A life of blocks as the protocol has it: milliseconds, rounded up, 0 for None.

    Raises:
        ValueError: not a number above 0, or longer than ten years.
    """
    if ttl_s is None:
        return 0
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ValueError(f"ttl_s must be above 0 and at most {MAX_TTL_S:.0f} seconds (ten years), or None for no end; got {ttl_s}")
    return math.ceil(ttl_s * 1000)


def pick_keys(packed: bytes, indexes: Sequence[int]) -> bytes:
    """Packed keys at ascending positions."""
    first, last = indexes[0], indexes[-1]
    if last - first + 1 == len(indexes):
        return packed[first * KEY_BYTES : (last + 1) * KEY_BYTES]
    return b"".join([packed[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in indexes])


class Saving:
    """One save. Used by one thread, once.

    Args:
        session: entered by the caller.
        copier: what copies.
        packed: packed keys.
        blocks: one list a key with one view a shard, of the right sizes.
        deadline: end of everything.
        wait_s: how long blocks that are BUSY, IN_PROGRESS or over the LIMIT are tried again.
        ttl_ms: life of the blocks; 0 for no end.
    """

    def __init__(
        self,
        session: Session,
        copier: Copier,
        packed: bytes,
        blocks: Sequence[Sequence[Bytes1D]],
        deadline: Deadline,
        wait_s: float,
        ttl_ms: int = 0,
    ) -> None:
        self._session = session
        self._copier = copier
        self._packed = packed
        self._blocks = blocks
        self._deadline = deadline
        self._ttl_ms = ttl_ms
        self._retry_until = Deadline(wait_s)
        self._commits: list[tuple[PendingCall, int]] = []
        self._last: Sequence[int] = ()
        self._result = SaveResult()
        self._error: RequestError | None = None

    def run(self) -> tuple[SaveResult, RequestError | None]:
        """Save. Returns how it ended, and the error if the daemon refused a call as such."""
        todo: Sequence[int] = range(len(self._blocks))
        pause_s = RETRY_MIN_S
        while True:
            again = self._round(todo)
            self._collect()
            if not again or self._deadline.passed or self._retry_until.passed:
                break
            self._deadline.sleep(min(pause_s, self._retry_until.remaining_s))
            pause_s = min(pause_s * 2, RETRY_MAX_S)
            todo = list(again)
        self._result.rejected.update(OUTCOMES[outcome] for outcome in again.values())
        return self._result, self._error

    def _round(self, todo: Sequence[int]) -> dict[int, int]:
        """Save all of ``todo`` in pipelined calls. Returns the blocks that may be tried again with their outcomes."""
        size = self._session.keys_per_call
        parts = [todo[i : i + size] for i in range(0, len(todo), size)]
        self._last = parts[-1] if len(parts) > 1 else ()
        again: dict[int, int] = {}
        done = 0
        pending: PendingCall | None = None
        try:
            pending = self._begin(parts[0])
            for number, part in enumerate(parts):
                response = pending.result(self._deadline)
                pending = failure = None
                if number + 1 < len(parts):
                    try:  # the daemon works on the next part while this thread copies this one
                        pending = self._begin(parts[number + 1])
                    except KvtierdError as e:
                        failure = e
                done += len(part)
                self._fill(part, response, again)
                if pending is None:
                    if failure is not None:
                        raise failure
                    break
        except KvtierdError as e:
            self._result.rejected[rejection(e)] += len(todo) - done
            if isinstance(e, RequestError):
                self._error = e
        finally:
            if pending is not None and not pending.done:
                pending.abandon()
        return again

    def _begin(self, part: Sequence[int]) -> PendingCall:
        message = pb.AttachRequest()
        request = message.call.save
        request.keys = pick_keys(self._packed, part)
        request.ttl_ms = self._ttl_ms
        if part is self._last and part[0] + len(part) <= self._session.max_keys:
            request.before = self._packed[: part[0] * KEY_BYTES]  # else its leaves would be held longer than its roots
        wait_s = min(self._retry_until.remaining_s, self._deadline.remaining_s)
        if wait_s > 0:
            request.wait_ms = self._session.daemon_ms(wait_s)
        return self._session.stream.begin(message, "save")

    def _fill(self, part: Sequence[int], response: pb.SaveResponse, again: dict[int, int]) -> None:
        granted: list[int] = []
        for index, outcome in zip(part, response.outcomes, strict=False):
            if outcome == pb.SAVE_OUTCOME_GRANTED:
                granted.append(index)
            elif outcome == pb.SAVE_OUTCOME_HELD:
                self._result.held += 1
            elif outcome in _RETRYABLE:
                again[index] = outcome
            else:
                self._result.rejected[OUTCOMES.get(outcome, str(outcome))] += 1
        if len(response.outcomes) < len(part):
            self._result.rejected[Reason.INTERNAL.name] += len(part) - len(response.outcomes)
        if granted:
            try:
                copied = self._copy(granted, list(response.slots))
            except BaseException:  # for example a KeyboardInterrupt
                self._abort(response.ticket)
                raise
            self._commit(response.ticket, copied, len(granted))

    def _copy(self, granted: list[int], slots: list[int]) -> list[int]:
        """Copy blocks into their slots. Returns the positions among ``granted`` that are filled."""
        session, shards, rejected = self._session, self._session.shards, self._result.rejected
        copied: list[int] = []
        jobs: list[Job] = []
        for position, index in enumerate(granted):
            try:
                views = session.views(slots[position * shards : (position + 1) * shards])
            except RequestError:
                rejected[EVICTED] += 1
                continue
            except DaemonUnavailableError:
                rejected[UNAVAILABLE] += len(granted) - position
                break
            targets = [np.frombuffer(view, np.uint8) for view in views]
            jobs.append((position, list(zip(targets, self._blocks[index], strict=True))))
            if len(jobs) * session.block_bytes >= GROUP_BYTES:
                copied += self._run(jobs)
                jobs = []
        return copied + self._run(jobs)

    def _run(self, jobs: list[Job]) -> list[int]:
        done = self._copier.run(jobs, len(jobs) * self._session.block_bytes, self._deadline)
        if len(done) < len(jobs):
            self._result.rejected[DEADLINE] += len(jobs) - len(done)
        return done

    def _commit(self, ticket: int, copied: list[int], granted: int) -> None:
        stream = self._session.stream
        if copied:
            message = pb.AttachRequest()
            message.call.commit.ticket = ticket
            if len(copied) < granted:
                message.call.commit.indexes.extend(copied)
            try:
                self._commits.append((stream.begin(message, "commit"), len(copied)))
            except KvtierdError as e:
                self._result.rejected[rejection(e)] += len(copied)
                copied = []
        if len(copied) < granted:
            self._abort(ticket)

    def _abort(self, ticket: int) -> None:
        """Return what is still open of a ticket; nobody waits for it."""
        message = pb.AttachRequest()
        message.call.abort.ticket = ticket
        self._session.stream.post(message)

    def _collect(self) -> None:
        """Wait for the commits that are under way."""
        for pending, count in self._commits:
            try:
                committed = min(pending.result(self._deadline).committed, count)
            except KvtierdError as e:
                self._result.rejected[rejection(e)] += count
                continue
            self._result.saved += committed
            if committed < count:
                self._result.rejected[EVICTED] += count - committed
        self._commits.clear()


class Reservation:
    """Granted slots to fill in place. A context manager: what is not committed when it ends is returned to the daemon.

    Always close it, from any thread; its slots and the session's memory stay in use until then. Do not touch the views
    afterwards.

    Attributes:
        outcomes: one name a key: "GRANTED", "HELD", "BUSY", …; "UNAVAILABLE" for all without a daemon.
        granted: positions of the granted keys, ascending.
        reason: why the call as such failed; None when it did not. UNSPECIFIED stands for "no daemon".
    """

    def __init__(
        self,
        session: Session | None,
        count: int,
        response: pb.SaveResponse | None,
        *,
        outcome: str = "",
        reason: Reason | None = None,
    ) -> None:
        self._session = session
        self._ticket = response.ticket if response is not None else 0
        self._slots = list(response.slots) if response is not None else []
        self.reason = reason
        self.outcomes = [OUTCOMES.get(o, str(o)) for o in response.outcomes] if response is not None else [outcome] * count
        self.granted = [index for index, name in enumerate(self.outcomes) if name == "GRANTED"]
        self._open = {index: position for position, index in enumerate(self.granted)}

    @property
    def session_token(self) -> bytes:
        """Token of the session that the slots belong to; empty without one."""
        return self._session.token if self._session is not None else b""

    @property
    def rejected(self) -> Counter[str]:
        """Keys that are neither granted nor held, by outcome."""
        return Counter(name for name in self.outcomes if name not in ("GRANTED", "HELD"))

    def slots(self, index: int) -> list[int]:
        """Slots of the granted key at position ``index``, one a shard.

        Raises:
            KeyError: not granted, or already committed.
        """
        if self._session is None:
            raise KeyError(index)
        shards, position = self._session.shards, self._open[index]
        return self._slots[position * shards : (position + 1) * shards]

    def views(self, index: int) -> list[memoryview]:
        """Writable memory of the granted key at position ``index``, one view a shard.

        Raises:
            KeyError: not granted, or already committed.
            RequestError: the extent was revoked; leave this key out of the commit.
            DaemonUnavailableError: the daemon is gone.
        """
        slots = self.slots(index)
        if self._session is None:
            raise KeyError(index)
        return self._session.views(slots)

    def commit(self, indexes: Iterable[int] | None = None, timeout_s: float = 1.0) -> int:
        """Publish filled blocks.

        Args:
            indexes: positions of keys; None means all that are still open.
            timeout_s: longest wait for the answer.

        Returns:
            Blocks published; fewer than asked when some were evicted while they were filled or the daemon is gone.

        Raises:
            KeyError: one was not granted or is already committed.
        """
        return self.commit_until(Deadline(timeout_s), indexes)

    def commit_until(self, deadline: Deadline, indexes: Iterable[int] | None = None) -> int:
        """As ``commit``, with a deadline that another thread can bring forward."""
        chosen = list(self._open) if indexes is None else list(dict.fromkeys(indexes))
        positions = [self._open[index] for index in chosen]
        if not positions or self._session is None:
            return 0
        message = pb.AttachRequest()
        message.call.commit.ticket = self._ticket
        if len(positions) < len(self.granted):
            message.call.commit.indexes.extend(positions)
        for index in chosen:
            del self._open[index]
        try:
            response = self._session.stream.begin(message, "commit").result(deadline)
        except KvtierdError:
            return 0
        return min(int(response.committed), len(positions))

    def close(self) -> None:
        """Return what is not committed. Idempotent."""
        session, self._session = self._session, None
        if session is None:
            return
        if self._open:
            message = pb.AttachRequest()
            message.call.abort.ticket = self._ticket
            session.stream.post(message)
            self._open.clear()
        session.leave()

    def __del__(self) -> None:
        # Not closed for the caller: views of the slots may outlive this object, and a slot in use must not be given back.
        if getattr(self, "_session", None) is not None:
            warnings.warn(
                "a Reservation was not closed: its slots stay taken until the process ends", ResourceWarning, stacklevel=1
            )

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Portion:
    """What a save tells of the request that it is a portion of; see ``Client.reserve``.

    Raises:
        ValueError: ``matched`` is no number of blocks.
    """

    before: bytes = b""
    matched: int | None = None
    device: bool = False

    def __post_init__(self) -> None:
        count_keys(self.before)
        if self.matched is not None and not 0 <= self.matched < 2**32:
            raise ValueError(f"matched must be a number of blocks, or None when it is not known; got {self.matched}")


WHOLE: Final = Portion()
"""Nothing is told."""


def reserve(
    session: Session, packed: bytes, deadline: Deadline, wait_s: float, tenant: str = "", ttl_ms: int = 0, portion: Portion = WHOLE
) -> Reservation:
    """Ask for slots. The caller has entered the session; the reservation leaves it.

    Raises:
        KvtierdError: the call failed; the session is not left.
    """
    count, before = count_keys(packed), count_keys(portion.before)
    if count + before > session.max_keys:
        raise RequestError(Reason.TOO_MANY_KEYS, f"{count + before} keys in one reservation; at most {session.max_keys}: split it")
    message = pb.AttachRequest()
    message.call.save.keys = packed
    message.call.save.tenant = tenant
    message.call.save.ttl_ms = ttl_ms
    message.call.save.before = portion.before
    if portion.matched is not None:
        message.call.save.matched = portion.matched
    message.call.save.device = portion.device
    if wait_s > 0:
        message.call.save.wait_ms = session.daemon_ms(min(wait_s, deadline.remaining_s))
    return Reservation(session, count, session.stream.begin(message, "save").result(deadline))
