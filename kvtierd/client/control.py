"""Calls that move no bytes through this process: lookup, prefetch, evict, pin."""

from __future__ import annotations

from typing import Final

from kvtierd.client.buffers import count_keys
from kvtierd.client.deadline import Deadline
from kvtierd.client.link import Link
from kvtierd.client.results import LookupResult
from kvtierd.client.session import Session
from kvtierd.client.transport import PendingCall
from kvtierd.errors import KvtierdError, Reason
from kvtierd.model import KEY_BYTES, Tier
from kvtierd.v1 import kvtier_pb2 as pb

_WIRE_TIER: Final = {Tier.HBM: pb.TIER_HBM, Tier.CPU: pb.TIER_CPU, Tier.NVME: pb.TIER_NVME}


def _parts(session: Session, packed: bytes) -> list[bytes]:
    size = session.max_keys * KEY_BYTES
    return [packed] if len(packed) <= size else [packed[i : i + size] for i in range(0, len(packed), size)]


def count_missed(session: Session, packed: bytes, start: int) -> None:
    """Have the daemon count the blocks from ``start`` on as missed, which a load does not ask for, as it met a miss before them.

    Unless the first of them is held. Nobody waits for it.
    """
    if key := packed[start * KEY_BYTES : (start + 1) * KEY_BYTES]:
        message = pb.AttachRequest()
        message.call.lookup.keys = key
        message.call.lookup.missed = len(packed) // KEY_BYTES - start
        session.stream.post(message)


def lookup(session: Session, packed: bytes, deadline: Deadline, *, each: bool, tenant: str = "") -> LookupResult:
    """See ``Client.lookup``.

    Raises:
        KvtierdError: the call failed.
    """
    held, tiers = 0, b""
    for part in _parts(session, packed):
        message = pb.AttachRequest()
        request = message.call.lookup
        request.keys = part
        request.tenant = tenant
        request.each = each
        response: pb.LookupResponse = session.stream.begin(message, "lookup").result(deadline)
        held += response.held
        tiers += response.tiers
        if not each and response.held < count_keys(part):
            break
    return LookupResult(held, tiers)


def evict(session: Session, packed: bytes | None, tier: Tier | None, idle_s: float, deadline: Deadline, tenant: str = "") -> int:
    """See ``Client.evict``.

    Raises:
        KvtierdError: the call failed.
    """
    evicted = 0
    for part in [b""] if packed is None else _parts(session, packed):
        message = pb.AttachRequest()
        request = message.call.evict
        request.keys = part
        request.tenant = tenant
        request.idle_s = idle_s
        if tier is not None:
            request.tier = _WIRE_TIER[tier]
        evicted += session.stream.begin(message, "evict").result(deadline).evicted
    return evicted


class Prefetch:
    """A prefetch under way.

    Attributes:
        held: keys of the prefix that are held.
        ready: of these, how many were ready in CPU memory (or HBM) when the daemon last told.
        done: True when nothing more will become ready.
        reason: why there is none; None when there is one. UNSPECIFIED stands for "no daemon".
    """

    def __init__(self, link: Link, *, reason: Reason | None = None) -> None:
        self._link = link
        self._tickets: list[int] = []
        self._session: Session | None = None
        self.held = 0
        self.ready = 0
        self.done = reason is not None
        self.reason = reason

    def add(self, session: Session, response: pb.PrefetchResponse) -> None:
        """Count one part's last answer in."""
        self._session = session
        if response.ticket:
            self._tickets.append(response.ticket)
        self.held += response.held
        self.ready += response.ready
        self.done = response.done

    def cancel(self) -> None:
        """Drop promotions that have not begun and return the pins. Idempotent; nobody waits for it."""
        tickets, self._tickets = self._tickets, []
        session = self._session
        # Another session has other tickets under the same numbers.
        if session is None or session is not self._link.session:
            return
        for ticket in tickets:
            message = pb.AttachRequest()
            message.call.cancel.ticket = ticket
            session.stream.post(message)


def prefetch(
    link: Link,
    session: Session,
    packed: bytes,
    deadline: Deadline,
    deadline_s: float,
    *,
    wait: bool,
    request_id: str,
    tenant: str = "",
) -> Prefetch:
    """See ``Client.prefetch``.

    Raises:
        KvtierdError: the first call failed; a later failure ends the prefetch with what there is.
    """
    handle = Prefetch(link)
    for part in _parts(session, packed):
        message = pb.AttachRequest()
        request = message.call.prefetch
        request.keys = part
        request.tenant = tenant
        request.deadline_ms = max(1, min(int(deadline_s * 1000), session.welcome.limits.max_deadline_ms or 1))
        request.request_id = request_id
        request.wait = wait
        last: pb.PrefetchResponse | None = None
        try:
            pending = session.stream.begin(message, "prefetch")
            last = _last_answer(pending, deadline, wait=wait)
        except KvtierdError as e:
            if handle._session is None:
                raise
            handle.reason = Reason.DEADLINE if deadline.passed else getattr(e, "reason", Reason.UNSPECIFIED)
            break
        handle.add(session, last)
        if last.held < count_keys(part):
            break
    return handle


def _last_answer(pending: PendingCall, deadline: Deadline, *, wait: bool) -> pb.PrefetchResponse:
    """Wait for the last answer if asked to; at the deadline the latest one counts, and the prefetch goes on."""
    response: pb.PrefetchResponse = pending.result(deadline)
    while wait and not (pending.done or response.done) and pending.wait(deadline):
        following: pb.PrefetchResponse = pending.result(deadline)
        if following.boot_epoch:  # not just the end of the call
            response = following
    if not pending.done:
        pending.forget()
    return response


class Pin:
    """A pin on blocks. It outlives the session, but not the daemon's boot.

    Attributes:
        pinned: blocks pinned; the others are not held.
        reason: why there is none; None when there is one. UNSPECIFIED stands for "no daemon".
    """

    def __init__(self, link: Link, pinned: int = 0, ticket: int = 0, boot_epoch: int = 0, reason: Reason | None = None) -> None:
        self._link = link
        self._ticket = ticket
        self._boot_epoch = boot_epoch
        self.pinned = pinned
        self.reason = reason

    def unpin(self, timeout_s: float = 1.0) -> bool:
        """Take the pin back. False when there is none, or the daemon cannot be told (it expires by itself)."""
        return self.unpin_until(Deadline(timeout_s))

    def unpin_until(self, deadline: Deadline) -> bool:
        """As ``unpin``, with a deadline that another thread can bring forward."""
        ticket, self._ticket = self._ticket, 0
        if not ticket:
            return False
        try:
            session = self._link.acquire(deadline)
        except KvtierdError:
            return False
        try:
            if session.boot_epoch != self._boot_epoch:
                return False
            message = pb.AttachRequest()
            message.call.unpin.ticket = ticket
            session.stream.begin(message, "unpin").result(deadline)
        except KvtierdError:
            return False
        finally:
            session.leave()
        return True


def pin(link: Link, session: Session, packed: bytes, expires_s: float, deadline: Deadline, tenant: str = "") -> Pin:
    """See ``Client.pin``.

    Raises:
        KvtierdError: the call failed.
    """
    message = pb.AttachRequest()
    request = message.call.pin
    request.keys = packed
    request.tenant = tenant
    request.expires_s = expires_s
    response: pb.PinResponse = session.stream.begin(message, "pin").result(deadline)
    return Pin(link, response.pinned, response.ticket, session.boot_epoch)
