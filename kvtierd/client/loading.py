"""Loading: ask for slots, copy out of them as they become readable, release.

Copies are trusted only if the session was still whole after the copy: memory of another boot, or of an extent that was taken
back, may have been cleared or refilled while it was read.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Final

import numpy as np

from kvtierd.client.buffers import Bytes1D, count_keys
from kvtierd.client.control import count_missed
from kvtierd.client.copying import GROUP_BYTES, Copier, Job
from kvtierd.client.deadline import Deadline
from kvtierd.client.results import LoadResult
from kvtierd.client.session import Session
from kvtierd.client.transport import CallTimeoutError, PendingCall
from kvtierd.errors import DaemonUnavailableError, KvtierdError, Reason, RequestError
from kvtierd.model import KEY_BYTES, Tier
from kvtierd.v1 import kvtier_pb2 as pb

_TIER_OF_MASK: Final = tuple(Tier(max(0, (mask & -mask).bit_length() - 1)) for mask in range(8))


def reason_of(error: KvtierdError) -> Reason:
    """The reason that a result names for a failure; UNSPECIFIED stands for "no daemon"."""
    if isinstance(error, CallTimeoutError):
        return Reason.DEADLINE
    return error.reason if isinstance(error, RequestError) else Reason.UNSPECIFIED


def wire_reason(value: int) -> Reason | None:
    """A reason from a message; None when it is unspecified."""
    if not value:
        return None
    return Reason(value) if value in Reason._value2member_map_ else Reason.INTERNAL


class LoadCall:
    """One Load call. Used by one thread at a time.

    Args:
        session: entered by the caller.
        packed: packed keys, at most the session's limit.
        deadline: what is not ready by then is a miss.
        each: load every key that is held instead of stopping at the first miss.
        tenant: to act for; empty means the session's own.
        device: take slots in GPU memory too, where processes of the session have opened that.
        keeps: nothing is released before the load is over.
    """

    def __init__(
        self,
        session: Session,
        packed: bytes,
        deadline: Deadline,
        *,
        each: bool,
        tenant: str = "",
        device: bool = False,
        keeps: bool = False,
    ) -> None:
        message = pb.AttachRequest()
        request = message.call.load
        request.keys = packed
        request.tenant = tenant
        request.deadline_ms = session.daemon_ms(deadline.remaining_s)
        request.each = each
        request.device = device
        request.keeps = keeps
        self._stream = session.stream
        self._pending: PendingCall = session.stream.begin(message, "load")
        self._ticket = 0
        self._held = 0
        self._over = False
        self.done = False
        self.reason: Reason | None = None

    def take(self, deadline: Deadline, *, patient: bool = True) -> pb.LoadResponse:
        """The next blocks that are readable. ``patient`` as in ``PendingCall.result``.

        Raises:
            KvtierdError: see ``PendingCall.result``; the load is over then.
        """
        try:
            response: pb.LoadResponse = self._pending.result(deadline, patient=patient)
        except KvtierdError as e:
            self.reason = reason_of(e)
            self.done = True
            raise
        self._ticket = response.ticket or self._ticket
        self._held += len(response.indexes)
        if response.done or self._pending.done:
            self.done = self._over = True
            self.reason = wire_reason(response.reason)
        return response

    def wait(self, deadline: Deadline) -> bool:
        """Wait until ``take`` would not wait. False when the deadline passed; the load goes on."""
        return self._pending.wait(deadline)

    def release(self, indexes: Sequence[int]) -> None:
        """Unpin some blocks; nobody waits for it."""
        if indexes and self._ticket:
            self._held -= len(indexes)
            self._post(indexes)

    def end(self) -> None:
        """Unpin everything and end the load. Idempotent."""
        if self._ticket:
            if self._held or not self._over:  # else the ticket has ended by itself
                self._post(())
            self._ticket = 0
            self._pending.forget()
        elif not self._pending.done:
            self._pending.abandon()
        self.done = True

    def _post(self, indexes: Sequence[int]) -> None:
        message = pb.AttachRequest()
        message.call.release.ticket = self._ticket
        message.call.release.indexes.extend(indexes)
        self._stream.post(message)


class Loading:
    """One load into the caller's buffers. Used by one thread, once.

    Args:
        session: entered by the caller.
        copier: what copies.
        packed: packed keys.
        blocks: one list a key with one writable view a shard, of the right sizes.
        deadline: end of everything.
        each: load every key that is held.
    """

    def __init__(
        self,
        session: Session,
        copier: Copier,
        packed: bytes,
        blocks: Sequence[Sequence[Bytes1D]],
        deadline: Deadline,
        *,
        each: bool,
    ) -> None:
        self._session = session
        self._copier = copier
        self._packed = packed
        self._blocks = blocks
        self._deadline = deadline
        self._each = each
        self._loaded: dict[int, Tier] = {}
        self._reason: Reason | None = None

    def run(self) -> LoadResult:
        """Load.

        Raises:
            RequestError: the daemon refused a call as such.
        """
        size = self._session.keys_per_call
        starts = range(0, len(self._blocks), size)
        following: LoadCall | None = None
        call: LoadCall | None = None
        try:
            for start in starts:
                call = following or self._begin(start)
                following = None
                while not call.done:
                    response = call.take(self._deadline)
                    if following is None and start + size < len(self._blocks):
                        following = self._begin(start + size)  # promoted while this part is copied
                    self._copy(call, response, start)
                call.end()
                self._reason = self._reason or call.reason
                complete = len(self._loaded) == min(start + size, len(self._blocks))
                if self._reason in (Reason.DEADLINE, Reason.DRAINING) or not (self._each or complete):
                    count_missed(self._session, self._packed, start + (size if following is None else 2 * size))
                    break
        except RequestError as e:
            self._reason = e.reason
            raise
        except DaemonUnavailableError as e:
            self._reason = reason_of(e)
        finally:
            for open_call in (call, following):
                if open_call is not None:
                    open_call.end()
        return self._result()

    def _begin(self, start: int) -> LoadCall:
        stop = start + self._session.keys_per_call
        return LoadCall(self._session, self._packed[start * KEY_BYTES : stop * KEY_BYTES], self._deadline, each=self._each)

    def _copy(self, call: LoadCall, response: pb.LoadResponse, start: int) -> None:
        """Copy what a reply names."""
        session, shards = self._session, self._session.shards
        slots = list(response.slots)
        jobs: list[Job] = []
        for number, index in enumerate(response.indexes):
            try:
                views = session.views(slots[number * shards : (number + 1) * shards])
            except RequestError:  # its extent was revoked: a miss
                self._reason = Reason.NOT_FOUND
                continue
            sources = [np.frombuffer(view, np.uint8) for view in views]
            jobs.append((number, list(zip(self._blocks[start + index], sources, strict=True))))
            if len(jobs) * session.block_bytes >= GROUP_BYTES:
                self._run(call, response, start, jobs)
                jobs = []
        self._run(call, response, start, jobs)

    def _run(self, call: LoadCall, response: pb.LoadResponse, start: int, jobs: list[Job]) -> None:
        """Copy one group, and count it if it can be trusted."""
        done = self._copier.run(jobs, len(jobs) * self._session.block_bytes, self._deadline)
        if not self._session.alive:
            raise DaemonUnavailableError("the daemon went away during the copy")
        indexes, tiers = response.indexes, response.tiers
        for number in done:
            self._loaded[start + indexes[number]] = _TIER_OF_MASK[tiers[number] & 7] if number < len(tiers) else Tier.CPU
        if len(done) < len(jobs):
            raise CallTimeoutError("the deadline passed while blocks were copied")
        if not call.done:
            call.release([indexes[number] for number in done])

    def _result(self) -> LoadResult:
        count = len(self._loaded)
        if not self._each:
            count = 0
            while count in self._loaded:
                count += 1
        indexes = frozenset(self._loaded) if self._each else frozenset(range(count))
        by_tier: dict[Tier, int] = {}
        for index in indexes:
            tier = self._loaded[index]
            by_tier[tier] = by_tier.get(tier, 0) + 1
        complete = count == len(self._blocks)
        reason = None if complete else Reason.NOT_FOUND if self._reason is None else self._reason
        return LoadResult(count, indexes, by_tier, reason)


class Fetch:
    """Blocks to read in place, as they become readable. A context manager and an iterator of ``(index, views)``.

    Always close it, from any thread; blocks stay pinned and mapped until then. Do not touch the views afterwards.

    Attributes:
        reason: why the rest is missing, once ``done``; None when all was held. UNSPECIFIED stands for "no daemon".
    """

    def __init__(self, session: Session | None, call: LoadCall | None, deadline: Deadline, reason: Reason | None = None) -> None:
        self._session = session
        self._call = call
        self._deadline = deadline
        self._slots: dict[int, list[int]] = {}
        self.tiers: dict[int, Tier] = {}
        self._queue: list[int] = []
        self.reason = reason

    @property
    def done(self) -> bool:
        """True when nothing more will become readable."""
        return self._call is None or self._call.done

    @property
    def session_token(self) -> bytes:
        """Token of the session that the slots belong to; empty without one."""
        return self._session.token if self._session is not None else b""

    @property
    def intact(self) -> bool:
        """True while what was read can be trusted: look at it *after* the last copy."""
        return self._session is not None and self._session.alive

    def slots(self, index: int) -> list[int]:
        """Slots of a readable block, one a shard.

        Raises:
            KeyError: not readable, or released.
        """
        return self._slots[index]

    def views(self, index: int) -> list[memoryview]:
        """Memory of a readable block, one view a shard.

        Raises:
            KeyError: not readable, or released.
            KvtierdError: its memory is gone.
        """
        if self._session is None:
            raise KeyError(index)
        return self._session.views(self._slots[index])

    def poll(self, timeout_s: float = 0.0) -> list[int]:
        """Positions that have become readable since the last look, ascending.

        Args:
            timeout_s: wait this long for the first of them; 0 does not wait.
        """
        ready, self._queue = self._queue, []
        if not ready:
            self._receive(Deadline(timeout_s), keep_waiting=True)
            ready, self._queue = self._queue, []
        return ready

    def poll_slots(self, timeout_s: float = 0.0) -> tuple[list[int], list[int], bytes]:
        """As ``poll``, for callers that hand slots on to other processes: everything at once, without work per block.

        Blocks told here are not known to ``slots`` and ``views``, and stay pinned until ``close``.

        Returns:
            Positions; their slots, one a shard, flat; one byte each with the tiers it was on (bit 0 HBM, bit 1 CPU, bit 2 NVMe).
        """
        response = self._take(Deadline(timeout_s), keep_waiting=True)
        if response is None:
            return [], [], b""
        return list(response.indexes), list(response.slots), response.tiers

    def __iter__(self) -> Iterator[tuple[int, list[memoryview]]]:
        """Blocks as they become readable, up to the deadline."""
        while (index := self.next_index()) is not None:
            try:
                views = self.views(index)
            except KvtierdError as e:
                self.reason = reason_of(e)
                continue
            yield index, views

    def next_index(self) -> int | None:
        """Wait for the next readable block, up to the fetch's deadline; None when there will be none."""
        while not self._queue:
            if self.done:
                return None
            self._receive(self._deadline, keep_waiting=False)
        return self._queue.pop(0)

    def cancel(self) -> None:
        """End the waiting of another thread."""
        self._deadline.cancel()

    def _take(self, deadline: Deadline, *, keep_waiting: bool) -> pb.LoadResponse | None:
        call = self._call
        if call is None or self._session is None or call.done:
            return None
        if keep_waiting and not call.wait(deadline) and not self._deadline.passed:
            return None
        try:
            response = call.take(self._deadline, patient=not keep_waiting)
        except KvtierdError as e:
            self.reason = reason_of(e)
            return None
        if call.done:
            self.reason = call.reason
        return response

    def _receive(self, deadline: Deadline, *, keep_waiting: bool) -> None:
        session = self._session
        response = self._take(deadline, keep_waiting=keep_waiting)
        if response is None or session is None:
            return
        slots, tiers, shards = list(response.slots), response.tiers, session.shards
        for number, index in enumerate(response.indexes):
            self._slots[index] = slots[number * shards : (number + 1) * shards]
            self.tiers[index] = _TIER_OF_MASK[tiers[number] & 7] if number < len(tiers) else Tier.CPU
            self._queue.append(index)

    def release(self, indexes: Iterable[int]) -> None:
        """Unpin some blocks early."""
        chosen = [index for index in indexes if self._slots.pop(index, None) is not None]
        if self._call is not None:
            self._call.release(chosen)

    def close(self) -> None:
        """Unpin everything. Idempotent."""
        session, self._session = self._session, None
        call, self._call = self._call, None
        self._queue.clear()
        self._slots.clear()
        if call is not None:
            call.end()
        if session is not None:
            session.leave()

    def __del__(self) -> None:
        # Not closed for the caller: views of the slots may outlive this object, and a slot in use must stay pinned.
        if getattr(self, "_session", None) is not None:
            warnings.warn("a Fetch was not closed: its blocks stay pinned until the process ends", ResourceWarning, stacklevel=1)

    def __enter__(self) -> Fetch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def fetch(
    session: Session, packed: bytes, deadline: Deadline, *, each: bool, tenant: str = "", device: bool = False, keeps: bool = False
) -> Fetch:
    """Begin to load. The caller has entered the session; the fetch leaves it.

    Raises:
        KvtierdError: the call failed; the session is not left.
    """
    count = count_keys(packed)
    if count > session.max_keys:
        raise RequestError(Reason.TOO_MANY_KEYS, f"{count} keys in one fetch; at most {session.max_keys}: split it")
    return Fetch(session, LoadCall(session, packed, deadline, each=each, tenant=tenant, device=device, keeps=keeps), deadline)
