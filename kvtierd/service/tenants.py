"""The part of ``KvTierAdminService`` that lists tenants and changes their limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from kvtierd.core.limits import NO_LIMITS, Limits, TenantClass
from kvtierd.core.realm import Tenant
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier
from kvtierd.runtime import Runtime
from kvtierd.service.tenant_messages import amount_message, ttl_message
from kvtierd.tenant_config import TenantConfig
from kvtierd.units import MAX_DURATION_S, MAX_SIZE_BYTES, Share
from kvtierd.v1 import admin_pb2 as pb

__all__ = ["TenantCalls", "class_number", "tier_entries"]

_CLASSES: Final = {pb.TENANT_CLASS_PREMIUM: "premium", pb.TENANT_CLASS_STANDARD: "standard", pb.TENANT_CLASS_BASIC: "basic"}
_SCOPES: Final = {pb.TENANT_SCOPE_PRIVATE: "private", pb.TENANT_SCOPE_SHARED: "shared"}
_KEYS: Final = frozenset(info.alias or name for name, info in TenantConfig.model_fields.items())


class TenantCalls:
    """Answers over a runtime. Every method raises RequestError for what it cannot serve."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime

    def list(self, request: pb.ListTenantsRequest, page_size: int) -> pb.ListTenantsResponse:
        """A page of tenants that are known or have limits, by name. Raises RequestError NOT_FOUND for one that is neither."""
        names = self._rt.core.state.tenants.keys() | self._rt.tenants.names()
        if request.tenant:
            self._check_known(request.tenant)
            names = {request.tenant}
        left = sorted(name for name in names if name > request.page_token)
        sessions = Counter(attached.tenant for attached in self._rt.sessions)
        page = left[:page_size]
        return pb.ListTenantsResponse(
            tenants=[self._info(name, sessions[name]) for name in page], next_page_token=page[-1] if len(left) > page_size else ""
        )

    def _check_known(self, name: str) -> None:
        if name not in self._rt.core.state.tenants and name not in self._rt.tenants.names():
            raise RequestError(Reason.NOT_FOUND, f"no tenant {name!r}; `kvtierd tenants list` lists those known")

    def _info(self, name: str, sessions: int) -> pb.TenantInfo:
        book = self._rt.tenants
        tenant = self._rt.core.state.tenants.get(name) or Tenant(name, book.limits.get(name, NO_LIMITS))
        return pb.TenantInfo(
            tenant=name,
            limits=_limits_message(book.settings(name)),
            tiers=tier_entries(tenant.limits, tenant.used_bytes, tenant.evictions),
            source=book.source(name),
            blocks=tenant.blocks,
            hits=sum(tenant.hits),
            misses=tenant.misses,
            sessions=sessions,
            problem=book.problem(name),
        )

    async def set(self, request: pb.SetTenantRequest) -> pb.SetTenantResponse:
        """Change limits. Raises RequestError as ``Runtime.set_tenant``."""
        changes = changes_of(request.limits)
        unknown = [key for key in request.reset if key not in _KEYS]
        if unknown:
            raise RequestError(
                Reason.BAD_REQUEST, f"reset: there is no key {unknown[0][:40]!r}; keys are {', '.join(sorted(_KEYS))}"
            )
        if not changes and not request.reset:
            raise RequestError(Reason.BAD_REQUEST, "nothing is to be changed; name a limit, or a key to reset")
        await self._rt.set_tenant(request.tenant, changes, request.reset)
        sessions = sum(attached.tenant == request.tenant for attached in self._rt.sessions)
        return pb.SetTenantResponse(tenant=self._info(request.tenant, sessions), kept=self._rt.nvme is not None)

    async def remove(self, request: pb.RemoveTenantRequest) -> pb.RemoveTenantResponse:
        """Take limits away that were set here, and with ``evict`` all blocks too."""
        name, book, state = request.tenant, self._rt.tenants, self._rt.core.state
        self._check_known(name)
        configured = book.is_configured(name)
        is_set = book.source(name) == "api"
        if not (is_set or request.evict):
            where = "has limits in the configuration only: change them there" if configured else "has no limits of its own"
            raise RequestError(Reason.BAD_REQUEST, f"tenant {name!r} {where}; or say evict to forget its blocks")
        tenant = state.tenants.get(name)
        sessions = sum(attached.tenant == name for attached in self._rt.sessions)
        if not (configured or request.evict or request.force) and ((tenant and tenant.blocks) or sessions):
            held = f"{tenant.blocks if tenant else 0} blocks and {sessions} sessions"
            raise RequestError(
                Reason.BAD_REQUEST,
                f"tenant {name!r} has {held}, which would have no limits; say evict to forget its blocks, or force to keep them",
            )
        book.check(name, {})
        evicted = 0
        if request.evict and tenant is not None:
            evicted = await self._rt.evict(list(tenant.realms), None, None, 0.0)
        await self._rt.forget_override(name)
        return pb.RemoveTenantResponse(evicted=evicted, configured=configured)


def class_number(tenant_class: TenantClass) -> Any:
    """The wire's number of a class."""
    return next(number for number, name in _CLASSES.items() if name == tenant_class.value)


def tier_entries(limits: Limits, used_bytes: Any, evictions: Any) -> list[pb.TenantTier]:
    """Limits and use of each tier."""
    entries = []
    for tier in Tier:
        entry = pb.TenantTier(
            tier=int(tier) + 1,  # type: ignore[arg-type]
            quota_bytes=limits.quota(tier),
            reserve_bytes=limits.reserve_bytes[tier],
            used_bytes=used_bytes[tier],
        )
        for (of, why), count in evictions.items():
            if of is tier:
                entry.evictions[why] = count
        entries.append(entry)
    return entries


def changes_of(limits: pb.TenantLimits) -> dict[str, Any]:
    """Keys of the configuration and their values as JSON has them. Raises RequestError BAD_REQUEST for what cannot be."""
    changes: dict[str, Any] = {}
    if limits.tenant_class:
        changes["class"] = _name("class", _CLASSES, limits.tenant_class)
    if limits.scope:
        changes["scope"] = _name("scope", _SCOPES, limits.scope)
    if limits.HasField("write_budget_share"):
        changes["write_budget_share"] = _share("write_budget_share", limits.write_budget_share)
    for tier in Tier:
        name = tier.name.lower()
        of_tier: pb.TierLimits = getattr(limits, name)
        for part in ("quota", "reserve"):
            if of_tier.HasField(part):
                changes[f"{name}_{part}"] = _amount(f"{name}_{part}", getattr(of_tier, part))
        if of_tier.HasField("ttl"):
            changes[f"{name}_ttl"] = _ttl(f"{name}_ttl", of_tier.ttl)
    return changes


def _name(key: str, names: Mapping[Any, str], number: int) -> str:
    if number not in names:
        raise RequestError(Reason.BAD_REQUEST, f"there is no {key} {number}; there are {', '.join(names.values())}")
    return names[number]


def _share(key: str, value: float) -> float:
    if not 0 <= value <= 1:  # false for nan too
        raise RequestError(Reason.BAD_REQUEST, f"{key}: a share lies between 0 and 1; got {value}")
    return value


def _amount(key: str, amount: pb.Amount) -> int | str | None:
    kind = amount.WhichOneof("amount")
    if kind == "share":
        return str(Share(_share(key, amount.share)))
    if kind == "bytes":
        if amount.bytes > MAX_SIZE_BYTES:
            raise RequestError(Reason.BAD_REQUEST, f"{key}: at most {MAX_SIZE_BYTES} bytes; got {amount.bytes}")
        return amount.bytes
    if kind == "unlimited" and amount.unlimited:
        return None
    raise RequestError(Reason.BAD_REQUEST, f"{key}: an amount says bytes, a share, or that it is unlimited")


def _ttl(key: str, ttl: pb.OwnTtl) -> float | str | None:
    kind = ttl.WhichOneof("ttl")
    if kind == "seconds":
        if not (math.isfinite(ttl.seconds) and 0 <= ttl.seconds <= MAX_DURATION_S):
            raise RequestError(Reason.BAD_REQUEST, f"{key}: from 0 to {MAX_DURATION_S:.0f} seconds, or never; got {ttl.seconds}")
        return ttl.seconds
    if kind == "never" and ttl.never:
        return "never"
    if kind == "of_tier" and ttl.of_tier:
        return None
    raise RequestError(Reason.BAD_REQUEST, f"{key}: a TTL says seconds, never, or that it is the tier's")


def _limits_message(config: TenantConfig) -> pb.TenantLimits:
    message = pb.TenantLimits(
        tenant_class=class_number(TenantClass(config.tenant_class)),
        scope=next(n for n, name in _SCOPES.items() if name == config.scope),
        write_budget_share=config.write_budget_share,
    )
    for tier in Tier:
        name = tier.name.lower()
        quota, reserve = amount_message(config.quota(name)), amount_message(config.reserve(name))
        getattr(message, name).CopyFrom(pb.TierLimits(quota=quota, reserve=reserve, ttl=ttl_message(config.ttl(name))))
    return message
