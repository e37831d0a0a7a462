"""The data calls, from a request message to an answer message. Unary RPCs and the Attach stream share them."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from kvtierd import tracing
from kvtierd.core.block import Block
from kvtierd.core.realm import Realm
from kvtierd.core.saves import HELD, OUTCOME_NAMES, WHOLE, Request
from kvtierd.core.tickets import ReadTicket, SaveTicket
from kvtierd.errors import Reason, RequestError
from kvtierd.model import KEY_BYTES, MAX_KEYS_PER_CALL, MAX_TTL_S, Tier, count_keys, split_keys
from kvtierd.model import in_device as is_in_device
from kvtierd.runtime import Attached, Runtime, decisions
from kvtierd.service.admission import Admission
from kvtierd.service.door import caller
from kvtierd.service.logs import SlowLog
from kvtierd.service.metrics import Metrics
from kvtierd.service.spans import ReadSpans, found
from kvtierd.v1 import kvtier_pb2 as pb

MAX_REQUEST_ID: Final = 64
"""Most characters of a caller's name of a request."""
MAX_TENANT_TOLD: Final = 64
"""Most characters of a tenant's name in a line of the log, which may be no name at all."""
MAX_PIN_S: Final = 30 * 86_400.0
"""Longest life of a pin."""


UNHURRIED: Final = frozenset(["Attach", "Prefetch"])
"""Calls that last as long as their client wants."""


Whose = tuple[Attached | None, str]
"""The session that a call is of, where that is known, and the tenant that it names."""


def nobody() -> Whose:
    """Of a call that came with no session."""
    return None, ""


class Calls:
    """Data calls over a runtime. Every method raises RequestError for what it cannot serve."""

    def __init__(self, runtime: Runtime, metrics: Metrics, slow: SlowLog, spans: ReadSpans, admission: Admission) -> None:
        self._rt = runtime
        self._spans = spans
        self._metrics = metrics
        self._slow = slow
        self.admission = admission
        self._epoch = runtime.boot_epoch

    def session(self, token: bytes) -> Attached:
        """The session of a call outside of its Attach stream, by its token. Raises RequestError as ``Attached.enter`` too."""
        attached = self._rt.sessions.by_token(token)
        if attached.grant is not None and caller() != attached.grant:
            raise RequestError(Reason.PERMISSION, "the session belongs to another token; show that one with each call")
        attached.enter()
        return attached

    async def realm(self, attached: Attached, tenant: str) -> Realm:
        """The realm that a session acts on; a tenant of "" is its own."""
        is_own = not tenant or tenant == attached.tenant
        if is_own and (realm := attached.core.realm).shared is realm.tenant.limits.shared:
            return realm
        if attached.grant is not None and not is_own:
            attached.grant.check_tenant(tenant)
        realm = await self._rt.realm(tenant or attached.tenant, attached.namespace)
        self._rt.check_alive(attached)
        attached.realm_ids.add(realm.realm_id)
        if is_own:
            attached.core.realm = realm  # the tenant's scope was changed; what is open stays in the realm that it began in
        return realm

    def answered(self, method: str, code: int | str, began_s: float) -> None:
        """Count a call that began at ``began_s`` (``time.perf_counter``) and has ended with a status."""
        seconds = time.perf_counter() - began_s
        self._metrics.rpc(method, code, seconds)
        if method not in UNHURRIED:
            self._slow.check(method, seconds)

    def refused(self, method: str, error: RequestError, whose: Callable[[], Whose] = nobody) -> None:
        """Count and tell a call that is answered with an error; ``whose`` it is, is asked where somebody reads that."""
        self._metrics.rejected(error.reason)
        if decisions.wanted():
            attached, tenant = whose()
            own, session = ("", 0) if attached is None else (attached.tenant, attached.session_id)
            tenant = tenant[:MAX_TENANT_TOLD] or own
            decisions.tell(
                "refuse",
                call=method, session=session, tenant=tenant, reason=error.reason.name.lower(), text=error.message,
            )  # fmt: skip

    def whose(self, request: Any) -> Whose:
        """The session and tenant that a request of a unary call names, whether it may or not."""
        with contextlib.suppress(RequestError):
            return self._rt.sessions.by_token(request.session), getattr(request, "tenant", "")
        return None, getattr(request, "tenant", "")

    # ---- requests that have a name

    def _check_name(self, attached: Attached, name: str) -> None:
        """Raise RequestError BAD_REQUEST for a name that cannot be or that is in use."""
        if len(name) > MAX_REQUEST_ID:
            raise RequestError(Reason.BAD_REQUEST, f"a request_id has at most {MAX_REQUEST_ID} characters; got {len(name)}")
        if name and attached.requests.get(name) in attached.core.tickets:
            raise RequestError(
                Reason.BAD_REQUEST, f"request_id {name!r} names an open ticket; end that one (Abort, Release), or use another name"
            )

    def _give_name(self, attached: Attached, name: str, ticket_id: int) -> None:
        if not name or not ticket_id:
            return
        if len(attached.requests) >= 2 * self._rt.config.server.max_tickets:
            attached.requests = {n: t for n, t in attached.requests.items() if t in attached.core.tickets}
        attached.requests[name] = ticket_id

    def _ticket_of(self, attached: Attached, request: pb.AbortRequest | pb.ReleaseRequest) -> int | None:
        """The ticket that a request names; None when it is named by a name of which nothing is open."""
        if not request.request_id:
            return request.ticket
        if request.ticket:
            raise RequestError(Reason.BAD_REQUEST, "ticket and request_id exclude each other; the ticket is the quicker way")
        found = attached.requests.pop(request.request_id, None)
        return found if found in attached.core.tickets else None

    @staticmethod
    def _note_tenant(attached: Attached, ticket_id: int) -> None:
        """Note in the span of a call whose ticket it is about; before the ticket ends."""
        if (span := tracing.current()) is not tracing.NO_SPAN and (ticket := attached.core.tickets.get(ticket_id)):
            span.set(tenant=ticket.realm.tenant.name)

    def _seconds(self, ms: int) -> float:
        return min(ms / 1000, self._rt.config.server.max_deadline)

    async def lookup(self, attached: Attached, request: pb.LookupRequest) -> pb.LookupResponse:
        """See ``KvTierService.Lookup``."""
        realm = await self.realm(attached, request.tenant)
        count = count_keys(request.keys)
        if request.missed and count:
            first = request.keys[:KEY_BYTES]
            is_held = self._rt.core.expect(self._rt.now(), realm, first, min(request.missed, MAX_KEYS_PER_CALL))
            return pb.LookupResponse(boot_epoch=self._epoch, held=int(is_held))
        held, tiers = self._rt.lookup(realm, request.keys, each=request.each)
        self._metrics.lookup(realm.tenant.name, held, count)
        if (span := tracing.current()) is not tracing.NO_SPAN:
            span.set(tenant=realm.tenant.name, keys=count, held=held, **found(tiers))
        return pb.LookupResponse(boot_epoch=self._epoch, held=held, tiers=tiers)

    # ---- save

    async def save(self, attached: Attached, request: pb.SaveRequest) -> pb.SaveResponse:
        """See ``KvTierService.Save``."""
        realm = await self.realm(attached, request.tenant)
        keys = split_keys(request.keys)
        self._check_name(attached, request.request_id)
        whole = portion_of(request, len(keys))
        if request.device and attached.devices:
            whole = replace(whole, devices=attached.devices)
        grant = await self._rt.save(attached, realm, keys, self._seconds(request.wait_ms), checked_ttl(request.ttl_ms), whole)
        self._give_name(attached, request.request_id, grant.ticket_id)
        for outcome in grant.outcomes:
            if outcome > HELD:
                self._metrics.rejected(OUTCOME_NAMES[outcome])
        note_save(realm.tenant.name, grant.outcomes)
        return pb.SaveResponse(boot_epoch=self._epoch, ticket=grant.ticket_id, outcomes=grant.outcomes, slots=grant.slots)  # type: ignore[arg-type]

    def undo_save(self, attached: Attached, answer: pb.SaveResponse) -> None:
        """Take slots back whose grant did not reach the caller."""
        if answer.ticket in attached.core.tickets:  # the session may have ended meanwhile
            self._rt.abort(attached, answer.ticket, ())

    def commit(self, attached: Attached, request: pb.CommitRequest) -> pb.CommitResponse:
        """See ``KvTierService.Commit``."""
        self._note_tenant(attached, request.ticket)
        ticket = attached.core.tickets.get(request.ticket)
        published = self._rt.commit(attached, request.ticket, request.indexes)
        seconds = self._rt.now() - ticket.began_s if isinstance(ticket, SaveTicket) else None
        in_device = [block for block in published if block.hbm is not None]
        self.count_saved(in_device, "cudaipc", seconds)
        self.count_saved([block for block in published if block.hbm is None] if in_device else published, "shm", seconds)
        tracing.current().set(blocks=len(published))
        return pb.CommitResponse(boot_epoch=self._epoch, committed=len(published))

    def count_saved(self, published: list[Block], path: str, seconds: float | None) -> None:
        """Count committed blocks in the metrics; ``seconds`` since their slots were granted."""
        if published:
            realm, count = published[0].realm, len(published)
            self._metrics.saved(realm.tenant.name, count, count * realm.namespace.block_bytes, path, seconds)

    def abort(self, attached: Attached, request: pb.AbortRequest) -> pb.AbortResponse:
        """See ``KvTierService.Abort``."""
        ticket_id = self._ticket_of(attached, request)
        if ticket_id is not None:
            self._note_tenant(attached, ticket_id)
            self._rt.abort(attached, ticket_id, request.indexes)
        return pb.AbortResponse(boot_epoch=self._epoch)

    # ---- load

    async def begin_load(
        self, attached: Attached, request: pb.LoadRequest | pb.LoadBytesRequest, traceparent: str = ""
    ) -> ReadTicket:
        """Start a load; answers come from :meth:`load_step`."""
        realm = await self.realm(attached, request.tenant)
        keys = split_keys(request.keys)
        name = request.request_id if isinstance(request, pb.LoadRequest) else ""
        devices = attached.devices if isinstance(request, pb.LoadRequest) and request.device else ()
        self._check_name(attached, name)
        keeps = isinstance(request, pb.LoadRequest) and request.keeps
        deadline_s = self._seconds(request.deadline_ms)
        ticket = self._rt.load(attached, realm, keys, deadline_s, each=request.each, devices=devices, keeps=keeps)
        self._give_name(attached, name, ticket.ticket_id)
        self._spans.begin(ticket, traceparent)
        return ticket

    def undo_load(self, attached: Attached, ticket: ReadTicket) -> None:
        """Unpin everything of a load that did not end well for its caller."""
        self._spans.end(ticket)
        self._rt.unwatch(ticket)
        self._rt.release_if_open(attached, ticket.ticket_id, ())

    def undo_step(self, attached: Attached, step: pb.LoadResponse) -> None:
        """Unpin what a step hands out that did not reach the caller."""
        if step.indexes:
            self._rt.release_if_open(attached, step.ticket, step.indexes)

    def load_step(self, ticket: ReadTicket, path: str = "shm") -> pb.LoadResponse | None:
        """What became readable since the last step; None when nothing did. What is not in a GPU's memory goes the ``path``."""
        indexes, slots, done = self._rt.collect(ticket)
        if not indexes and not done:
            return None
        if done:
            self._spans.end(ticket)
        tenant = ticket.realm.tenant.name
        in_device = sum(map(is_in_device, slots)) // len(ticket.realm.slot_bytes) if ticket.devices else 0
        seconds = self._rt.now() - ticket.began_s if done else None
        for count, way in ((in_device, "cudaipc"), (len(indexes) - in_device, path)):
            if count:
                self._metrics.loaded(tenant, count, count * ticket.realm.namespace.block_bytes, way, seconds)
        return pb.LoadResponse(
            boot_epoch=self._epoch,
            ticket=0 if not ticket.entries else ticket.ticket_id,
            indexes=indexes,
            slots=slots,
            tiers=bytes(map(ticket.found_on.__getitem__, indexes)),
            done=done,
            reason=int(ticket.reason) if done else 0,  # type: ignore[arg-type]
        )

    async def load_steps(self, ticket: ReadTicket, path: str = "shm") -> AsyncGenerator[pb.LoadResponse, None]:
        """Steps until the load is done. When the caller stops early, the rest is unpinned."""
        finished = False
        try:
            while not finished:
                step = self.load_step(ticket, path)
                if step is None:
                    await self._rt.wait_progress(ticket)
                    continue
                finished = step.done
                yield step
        finally:
            if not finished:
                self.abandon_load(ticket)

    def abandon_load(self, ticket: ReadTicket) -> None:
        """The caller of a load has gone: unpin what it was not given."""
        self._spans.end(ticket)
        self._rt.abandon(ticket)

    def release(self, attached: Attached, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        """See ``KvTierService.Release``."""
        ticket_id = self._ticket_of(attached, request)
        if ticket_id is not None:
            self._note_tenant(attached, ticket_id)
            self._rt.release(attached, ticket_id, request.indexes)
        return pb.ReleaseResponse(boot_epoch=self._epoch)

    # ---- prefetch

    async def begin_prefetch(self, attached: Attached, request: pb.PrefetchRequest, traceparent: str = "") -> ReadTicket:
        """Start a prefetch; answers come from :meth:`prefetch_step`."""
        realm = await self.realm(attached, request.tenant)
        ticket = self._rt.prefetch(attached, realm, split_keys(request.keys), self._seconds(request.deadline_ms))
        self._spans.begin(ticket, traceparent)
        return ticket

    def prefetch_step(self, ticket: ReadTicket) -> pb.PrefetchResponse:
        """How far a prefetch is."""
        held, ready, done = self._rt.core.progress(ticket)
        return pb.PrefetchResponse(
            boot_epoch=self._epoch, ticket=0 if not held else ticket.ticket_id, held=held, ready=ready, done=done
        )

    async def prefetch_steps(self, ticket: ReadTicket, *, wait: bool) -> AsyncIterator[pb.PrefetchResponse]:
        """One step, or with ``wait`` one a change until nothing more will come."""
        try:
            step = self.prefetch_step(ticket)
            yield step
            while wait and not step.done:
                await self._rt.wait_progress(ticket)
                step = self.prefetch_step(ticket)
                yield step
            if step.done:
                self._metrics.prefetch("miss" if not step.held else "ready" if step.ready == step.held else "partial")
        finally:
            self._rt.unwatch(ticket)

    def undo_prefetch(self, attached: Attached, ticket: ReadTicket) -> None:
        """Drop a prefetch whose caller was not told of it."""
        self._rt.unwatch(ticket)
        if ticket.ticket_id in attached.core.tickets:
            self._rt.cancel(attached, ticket.ticket_id)

    def cancel(self, attached: Attached, request: pb.CancelRequest) -> pb.CancelResponse:
        """See ``KvTierService.Cancel``."""
        self._note_tenant(attached, request.ticket)
        self._rt.cancel(attached, request.ticket)
        self._metrics.prefetch("cancelled")
        return pb.CancelResponse(boot_epoch=self._epoch)

    # ---- evict and pin

    async def evict(self, attached: Attached, request: pb.EvictRequest) -> pb.EvictResponse:
        """See ``KvTierService.Evict``."""
        realm = await self.realm(attached, request.tenant)
        keys = split_keys(request.keys) if request.keys else None
        evicted = await self._rt.evict([realm], keys, tier_of(request.tier), checked_span("idle_s", request.idle_s))
        tracing.current().set(tenant=realm.tenant.name, evicted=evicted)
        return pb.EvictResponse(boot_epoch=self._epoch, evicted=evicted)

    async def pin(self, attached: Attached, request: pb.PinRequest) -> pb.PinResponse:
        """See ``KvTierService.Pin``."""
        realm = await self.realm(attached, request.tenant)
        ticket = self._rt.pin([realm], split_keys(request.keys), checked_expiry(request.expires_s), tenant=realm.tenant)
        tracing.current().set(tenant=realm.tenant.name, keys=count_keys(request.keys), pinned=len(ticket.copies))
        return pb.PinResponse(boot_epoch=self._epoch, ticket=ticket.ticket_id if ticket.copies else 0, pinned=len(ticket.copies))

    def undo_pin(self, answer: pb.PinResponse) -> None:
        """Take a pin back whose ticket did not reach the caller."""
        if answer.ticket in self._rt.core.pins:
            self._rt.unpin(answer.ticket, None)

    def unpin(self, attached: Attached, request: pb.UnpinRequest) -> pb.UnpinResponse:
        """See ``KvTierService.Unpin``."""
        tracing.current().set(tenant=attached.tenant)
        self._rt.unpin(request.ticket, attached.tenant)
        return pb.UnpinResponse(boot_epoch=self._epoch)


def note_save(tenant: str, outcomes: Sequence[int]) -> None:
    """Note in the span of a save what became of its keys."""
    if (span := tracing.current()) is not tracing.NO_SPAN:
        span.set(tenant=tenant, keys=len(outcomes), **Counter(OUTCOME_NAMES[outcome] for outcome in outcomes))


def tier_of(tier: int) -> Tier | None:
    """Tier of the wire's number; None for any. Raises RequestError for an unknown one."""
    if tier == pb.TIER_UNSPECIFIED:
        return None
    if tier not in (pb.TIER_HBM, pb.TIER_CPU, pb.TIER_NVME):
        raise RequestError(Reason.BAD_REQUEST, f"tier {tier} does not exist")
    return Tier(tier - 1)


def checked_expiry(seconds: float) -> float:
    """A pin's life. Raises RequestError when it is not positive or too long."""
    if not (math.isfinite(seconds) and 0 < seconds <= MAX_PIN_S):
        raise RequestError(Reason.BAD_REQUEST, f"expires_s must lie between 0 and {MAX_PIN_S:.0f}; got {seconds}")
    return seconds


def checked_ttl(ms: int) -> float | None:
    """A block's life in seconds; None for no end. Raises RequestError when it is too long."""
    if ms > MAX_TTL_S * 1000:
        raise RequestError(Reason.BAD_REQUEST, f"ttl_ms is at most {MAX_TTL_S * 1000:.0f} (ten years), or 0 for no end; got {ms}")
    return ms / 1000 if ms else None


def portion_of(request: pb.SaveRequest, count: int) -> Request:
    """What a Save of ``count`` keys tells of its request. Raises RequestError when it is malformed or too long."""
    matched = request.matched if request.HasField("matched") else None
    if not request.before:
        return WHOLE if matched is None else Request(matched=matched)
    before = split_keys(request.before)
    if len(before) + count > MAX_KEYS_PER_CALL:
        raise RequestError(
            Reason.TOO_MANY_KEYS,
            f"{count} keys and {len(before)} before them in one call; at most {MAX_KEYS_PER_CALL} together: split the call",
        )
    return Request(before, matched)


def checked_span(name: str, seconds: float) -> float:
    """A time span in seconds. Raises RequestError when it is negative or no number."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise RequestError(Reason.BAD_REQUEST, f"{name} must be 0 or more seconds; got {seconds}")
    return seconds
