"""``KvTierAdminService``: what operators and the command line use."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterable
from typing import Any, Final

import grpc

from kvtierd import __version__
from kvtierd.config import Config
from kvtierd.core.block import Block, Copy, CopyState
from kvtierd.core.realm import Realm
from kvtierd.core.stats import StatsSnapshot
from kvtierd.core.tickets import SaveTicket
from kvtierd.errors import Reason, RequestError
from kvtierd.model import KEY_BYTES, NO_END, Tier, split_keys
from kvtierd.runtime import Runtime
from kvtierd.service import status
from kvtierd.service.calls import checked_expiry, checked_span, tier_of
from kvtierd.service.config_text import config_toml
from kvtierd.service.metrics import Metrics
from kvtierd.service.tenants import TenantCalls, class_number, tier_entries
from kvtierd.v1 import admin_pb2 as pb
from kvtierd.v1 import admin_pb2_grpc

MAX_PAGE: Final = 1000
MIN_PREFIX: Final = 4
"""Bytes of a key or fingerprint that an operator must give."""
_TOKEN: Final = re.compile(r"([0-9]{1,18})\.([0-9]{1,18})")
RECOVERED: Final = "recovered at start from NVMe"
"""Why a copy is there that no remembered event made."""
PREFIX_SCAN: Final = 20_000
"""Keys that are compared in one go of the event loop."""
PAGE_SCAN: Final = 100_000
"""Blocks that one page looks at."""

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.KvTierAdminServiceServicer):
    """The admin API."""

    def __init__(self, runtime: Runtime, metrics: Metrics, config: Config) -> None:
        self._rt = runtime
        self._metrics = metrics
        self._config = config
        self._tenants = TenantCalls(runtime)

    async def _checked(self, context: Context, work: Any) -> Any:
        try:
            return await work if asyncio.iscoroutine(work) else work()
        except Exception as e:
            await status.abort(context, status.as_request_error(e))

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> Any:
        """See the proto."""
        return await self._checked(context, self._status)

    def _status(self) -> pb.GetStatusResponse:
        rt = self._rt
        now = rt.now()
        shot = rt.core.snapshot(now)
        paths = {tier: " + ".join(names) for tier, names in rt.io_paths().items()}
        return pb.GetStatusResponse(
            boot_epoch=rt.boot_epoch,
            version=__version__,
            uptime_s=now - rt.started_s,
            tiers=[
                pb.TierStatus(
                    tier=_wire_tier(t.tier),
                    capacity_bytes=t.capacity_bytes,
                    reserved_bytes=t.reserved_bytes,
                    used_bytes=t.used_bytes,
                    copies=t.copies,
                    dirty_bytes=t.dirty_bytes,
                    pinned_bytes=t.pinned_bytes,
                    path=paths.get(t.tier, ""),
                    suspended=t.suspended,
                    configured_bytes=self._config.nvme.capacity if t.tier is Tier.NVME else t.capacity_bytes,
                    folders=self._folders() if t.tier is Tier.NVME else [],
                    encrypted=t.tier is Tier.NVME and rt.nvme is not None and rt.nvme.encrypted,
                )
                for t in shot.tiers
            ],
            tenants=[
                pb.TenantStatus(
                    tenant=t.tenant,
                    blocks=t.blocks,
                    used_bytes=t.used_bytes,
                    quota_bytes=[n or 0 for n in t.quota_bytes],
                    hits=sum(t.hits),
                    misses=t.misses,
                    limits=tier_entries(t.limits, t.used_bytes, t.evictions),
                    tenant_class=class_number(t.limits.tenant_class),
                )
                for t in itertools.islice(shot.tenants, MAX_PAGE)
            ],
            sessions=[
                pb.SessionStatus(
                    id=str(s.session_id),
                    client_name=s.client_name,
                    tenant=s.tenant,
                    model=s.namespace.model,
                    fingerprint=s.core.realm.fingerprint[:8].hex(),
                    processes=len(s.processes),
                    tickets=len(s.core.tickets),
                    ticket_bytes=s.core.ticket_bytes,
                    age_s=now - s.attached_s,
                    pid=s.pid,
                    devices=rt.devices.names(s) if rt.devices else "",
                    no_device=s.no_device,
                )
                for s in itertools.islice(rt.sessions, MAX_PAGE)
            ],
            counters=self._metrics.totals() | self._moves() | _budget(shot),
            blocks=shot.blocks,
            draining=rt.core.state.draining,
            tenant_problems={name: rt.tenants.problem(name) for name in itertools.islice(rt.tenants.problems, MAX_PAGE)},
        )

    def _moves(self) -> dict[str, float]:
        """Blocks moved down and up, which the metrics tell apart by label only."""
        done = [(src, dst, n) for (src, dst, result), n in self._rt.core.state.counts.moves.items() if result == "ok"]
        return {
            "demotions": float(sum(n for src, dst, n in done if dst > src)),
            "promotions": float(sum(n for src, dst, n in done if dst < src)),
        }

    def _folders(self) -> list[pb.FolderStatus]:
        health = self._rt.nvme.health() if self._rt.nvme else {}
        return [pb.FolderStatus(path=path, problem="" if state == "ok" else state) for path, state in health.items()]

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> Any:
        """See the proto."""

        async def work() -> pb.GetMetricsResponse:
            return pb.GetMetricsResponse(text=(await self._metrics.text()).decode())

        return await self._checked(context, work())

    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> Any:
        """See the proto."""
        return await self._checked(context, lambda: pb.GetConfigResponse(toml=config_toml(self._config)))

    async def GetReuse(self, request: pb.GetReuseRequest, context: Context) -> Any:
        """See the proto."""
        return await self._checked(context, self._reuse)

    def _reuse(self) -> pb.GetReuseResponse:
        seen = self._rt.reuse.figures(self._rt.now())
        return pb.GetReuseResponse(
            distances=[pb.ReuseDistance(upper_bytes=size, uses=uses) for size, uses in seen.distances.items()],
            cold_uses=seen.cold,
            found_uses=seen.found,
            added_uses=seen.added,
            sampled=seen.sampled,
            continued_requests=seen.continued,
            new_requests=seen.new_roots,
            lost_requests=seen.lost_roots,
            block_tokens=max((a.core.realm.namespace.block_tokens for a in self._rt.sessions), default=0),
        )

    async def Drain(self, request: pb.DrainRequest, context: Context) -> Any:
        """See the proto."""

        async def work() -> pb.DrainResponse:
            timeout_s = min(checked_span("timeout_s", request.timeout_s), self._config.server.max_deadline)
            left = await self._rt.drain(timeout_s or self._config.server.drain_timeout, resume=request.resume)
            return pb.DrainResponse(dirty_bytes=left)

        return await self._checked(context, work())

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Context) -> Any:
        """See the proto."""

        async def work() -> pb.CheckpointResponse:
            try:
                return pb.CheckpointResponse(copies=await self._rt.checkpoint())
            except OSError as e:
                raise RequestError(
                    Reason.IO, f"no snapshot can be written ({e.strerror or e}): the former one and the journals stay; see the log"
                ) from e

        return await self._checked(context, work())

    # ---- blocks

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Context) -> Any:
        """See the proto. The listing is a moving picture: blocks that come and go meanwhile may be missed."""
        return await self._checked(context, lambda: self._page(request))

    def _page(self, request: pb.ListBlocksRequest) -> pb.ListBlocksResponse:
        size = _page_size(request.page_size)
        tier = tier_of(request.tier)
        realm_id, offset = _parse_token(request.page_token)
        response = pb.ListBlocksResponse()
        scanned = 0
        for realm in self._realms(request.tenant):
            if realm.realm_id < realm_id:
                continue
            start = offset if realm.realm_id == realm_id else 0
            for position, block in enumerate(itertools.islice(realm.index.values(), start, None), start):
                if len(response.blocks) >= size or scanned >= PAGE_SCAN:
                    response.next_page_token = f"{realm.realm_id}.{position}"
                    return response
                scanned += 1
                if block.realm is realm and (tier is None or block.copy_on(tier) is not None):
                    response.blocks.append(self._info(block))
        return response

    def _realms(self, tenant: str) -> list[Realm]:
        realms = self._rt.core.state.realms
        chosen: Iterable[Realm] = realms.values()
        if tenant:
            owner = self._rt.core.state.tenants.get(tenant)
            if owner is None:
                raise RequestError(Reason.NOT_FOUND, f"no tenant {tenant!r}; `kvtierd status` lists those known")
            chosen = owner.realms
        return sorted(chosen, key=lambda realm: realm.realm_id)

    def _info(self, block: Block) -> pb.BlockInfo:
        copies = [block.copy_on(tier) for tier in Tier]
        return pb.BlockInfo(
            key=block.key,
            tenant=block.realm.tenant.name,
            fingerprint=block.realm.fingerprint,
            bytes=block.realm.namespace.block_bytes,
            states=["" if c is None else c.state.name.lower() for c in copies],
            pins=sum(c.pins for c in copies if c is not None),
            idle_s=max(self._rt.now() - block.used_at_s, 0.0),
            expires_in_s=None if block.expires_s == NO_END else max(block.expires_s - self._rt.now(), 0.0),
        )

    async def GetStory(self, request: pb.GetStoryRequest, context: Context) -> Any:
        """See the proto."""
        return await self._checked(context, self._story(request.key))

    async def _story(self, prefix: bytes) -> pb.GetStoryResponse:
        if len(prefix) < MIN_PREFIX:
            raise RequestError(Reason.BAD_KEY, f"give at least {MIN_PREFIX} bytes ({2 * MIN_PREFIX} hex digits) of the key")
        events = self._rt.core.story(prefix)[-MAX_PAGE:]
        block = next((b for e in events for r in self._realms("") if (b := r.index.get(e.key)) is not None), None)
        if block is None:
            block = await self._block_that_begins(prefix)
        response = pb.GetStoryResponse()
        if block is not None:
            response.block.CopyFrom(self._info(block))
            if block.nvme is not None and block.nvme.generation < self._rt.recovered_before:
                response.events.add(
                    key=block.key, tier=_wire_tier(Tier.NVME), to="ready", why=RECOVERED, **{"from": CopyState.ABSENT.name.lower()}
                )
        elif not events:
            raise RequestError(Reason.NOT_FOUND, f"no block {prefix.hex()} is held or remembered")
        for event in events:
            response.events.add(
                at_s=event.at_s - self._rt.started_s,
                key=event.key,
                tier=_wire_tier(event.tier),
                to=event.finish.name.lower(),
                why=event.why,
                **{"from": event.start.name.lower()},
            )
        return response

    async def _block_that_begins(self, prefix: bytes) -> Block | None:
        """A block whose key begins so. Looking through millions of keys is done in portions, so that others are served."""
        for realm in self._realms(""):
            if len(prefix) >= KEY_BYTES:
                if (block := realm.index.get(prefix)) is not None:
                    return block
                continue
            keys = list(realm.index)
            for start in range(0, len(keys), PREFIX_SCAN):
                found = next((k for k in keys[start : start + PREFIX_SCAN] if k.startswith(prefix)), None)
                if found is not None and (block := realm.index.get(found)) is not None:
                    return block
                await asyncio.sleep(0)
        return None

    async def EvictBlocks(self, request: pb.EvictBlocksRequest, context: Context) -> Any:
        """See the proto."""

        async def work() -> pb.EvictBlocksResponse:
            idle_s = checked_span("idle_s", request.idle_s)
            narrowed = request.tenant or request.fingerprint or request.keys or request.tier or idle_s
            if not (narrowed or request.all):
                raise RequestError(Reason.BAD_REQUEST, "this would evict everything; name a selector, or set all")
            if request.fingerprint and len(request.fingerprint) < MIN_PREFIX:
                raise RequestError(Reason.BAD_REQUEST, f"give at least {MIN_PREFIX} bytes of the fingerprint")
            realms = [r for r in self._realms(request.tenant) if r.fingerprint.startswith(request.fingerprint)]
            keys = split_keys(request.keys) if request.keys else None
            before = set(self._evicted_in_use())
            evicted = await self._rt.evict(realms, keys, tier_of(request.tier), idle_s)
            ids = {r.realm_id for r in realms}
            held = {c: p for c, p in self._evicted_in_use().items() if c not in before and c.block.realm.realm_id in ids}
            pinned = sum(held.values())
            return pb.EvictBlocksResponse(evicted=evicted, evicted_pinned=pinned, evicted_in_use=len(held) - pinned)

        return await self._checked(context, work())

    def _evicted_in_use(self) -> dict[Copy, bool]:
        """Evicted copies whose memory a pin (True), or else a load or save (False), keeps."""
        core = self._rt.core
        held: dict[Copy, bool] = {}
        for session in core.sessions.values():
            for ticket in session.tickets.values():
                copies = ticket.open if isinstance(ticket, SaveTicket) else ticket.copies
                held.update((c, False) for c in copies if c is not None and c.state is CopyState.DOOMED)
        held.update((c, True) for t in core.pins.values() for c in t.copies if c.state is CopyState.DOOMED)
        return held

    async def PinBlocks(self, request: pb.PinBlocksRequest, context: Context) -> Any:
        """See the proto."""

        def work() -> pb.PinBlocksResponse:
            keys = split_keys(request.keys)
            ticket = self._rt.pin(self._realms(request.tenant), keys, checked_expiry(request.expires_s))
            if not ticket.copies:
                raise RequestError(Reason.NOT_FOUND, "none of these blocks is held")
            return pb.PinBlocksResponse(ticket=ticket.ticket_id, pinned=len(ticket.copies))

        return await self._checked(context, work)

    async def ListPins(self, request: pb.ListPinsRequest, context: Context) -> Any:
        """See the proto. Pins that come and go between two pages may be missed."""
        return await self._checked(context, lambda: self._pins(request))

    def _pins(self, request: pb.ListPinsRequest) -> pb.ListPinsResponse:
        size = _page_size(request.page_size)
        ticket_id, offset = _parse_token(request.page_token)
        self._realms(request.tenant)  # an unknown tenant is an error, not an empty list
        response = pb.ListPinsResponse()
        now = self._rt.now()
        # Tickets are counted up, so pins are in the order of their tickets.
        for ticket in (t for t in self._rt.core.pins.values() if t.ticket_id >= ticket_id):
            start = offset if ticket.ticket_id == ticket_id else 0
            for position, copy in enumerate(itertools.islice(ticket.copies, start, None), start):
                if len(response.pins) >= size:
                    response.next_page_token = f"{ticket.ticket_id}.{position}"
                    return response
                realm = copy.block.realm
                if not request.tenant or realm.tenant.name == request.tenant:
                    response.pins.add(
                        ticket=ticket.ticket_id,
                        key=copy.block.key,
                        tenant=realm.tenant.name,
                        fingerprint=realm.fingerprint,
                        tier=_wire_tier(copy.tier),
                        bytes=realm.tier_bytes[copy.tier],
                        expires_in_s=max(ticket.expires_s - now, 0.0),
                        evicted=copy.state is CopyState.DOOMED,
                    )
        return response

    async def UnpinBlocks(self, request: pb.UnpinBlocksRequest, context: Context) -> Any:
        """See the proto."""

        def work() -> pb.UnpinBlocksResponse:
            self._rt.unpin(request.ticket, None)
            return pb.UnpinBlocksResponse()

        return await self._checked(context, work)

    # ---- tenants

    async def ListTenants(self, request: pb.ListTenantsRequest, context: Context) -> Any:
        """See the proto. Tenants that come and go between two pages may be missed."""
        return await self._checked(context, lambda: self._tenants.list(request, _page_size(request.page_size)))

    async def SetTenant(self, request: pb.SetTenantRequest, context: Context) -> Any:
        """See the proto."""
        return await self._checked(context, self._tenants.set(request))

    async def RemoveTenant(self, request: pb.RemoveTenantRequest, context: Context) -> Any:
        """See the proto."""
        return await self._checked(context, self._tenants.remove(request))


def _budget(shot: StatsSnapshot) -> dict[str, float]:
    """The write budget of NVMe, where there is one."""
    if not shot.nvme_budget_bytes:
        return {}
    return {
        "nvme_write_budget_bytes": float(shot.nvme_budget_bytes),
        "nvme_write_budget_left_bytes": float(shot.nvme_budget_left_bytes),
    }


def _page_size(asked: int) -> int:
    """Entries of a page, 100 when none are asked for. Raises RequestError BAD_REQUEST."""
    if asked > MAX_PAGE:
        raise RequestError(Reason.BAD_REQUEST, f"page_size is at most {MAX_PAGE}; got {asked}")
    return asked or 100


def _parse_token(token: str) -> tuple[int, int]:
    """Where a page begins: the number of a realm or ticket, and a position in it. Raises RequestError BAD_REQUEST."""
    if not token:
        return 0, 0
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise RequestError(
            Reason.BAD_REQUEST, "page_token is not one of this daemon's: pass the next_page_token of the page before, or nothing"
        )
    return int(match[1]), int(match[2])


def _wire_tier(tier: Tier) -> Any:
    return int(tier) + 1
