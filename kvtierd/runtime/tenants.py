"""Limits of all tenants: those of the configuration, and over them those that the admin API has set, which survive a restart."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from kvtierd.core.limits import NEVER, Limits, TenantClass
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier
from kvtierd.tenant_config import TenantConfig, is_tenant_name
from kvtierd.units import Share, amount_text

log = logging.getLogger(__name__)

MAX_OVERRIDES: Final = 20_000
"""Tenants whose limits the admin API may set."""
Capacity = tuple[int, int, int]
Overrides = dict[str, dict[str, Any]]
"""By tenant: keys of the configuration and their values as JSON has them; None takes the configuration's limit away."""


def limits_of(name: str, config: TenantConfig, capacity_bytes: Capacity) -> Limits:
    """Limits in bytes, of tiers with these capacities.

    Raises:
        ValueError: a quota is less than the reserve on the same tier; says what to do.
    """
    quota: list[int | None] = []
    reserve: list[int] = []
    ttl: list[float | None] = []
    for tier, capacity in zip(Tier, capacity_bytes, strict=True):
        key = tier.name.lower()
        most = config.quota(key)
        quota.append(None if most is None else _bytes_of(most, capacity))
        reserve.append(_bytes_of(config.reserve(key), capacity))
        own = config.ttl(key)
        ttl.append(NEVER if own == "never" else own)  # type: ignore[arg-type]
        if most is not None and quota[-1] is not None and quota[-1] < reserve[-1]:
            raise ValueError(
                f"tenant {name!r}: {key}_quota ({amount_text(most)}) is less than {key}_reserve "
                f"({amount_text(config.reserve(key))}); raise the quota or lower the reserve"
            )
    return Limits(
        (quota[0], quota[1], quota[2]), (reserve[0], reserve[1], reserve[2]), (ttl[0], ttl[1], ttl[2]),
        TenantClass(config.tenant_class), config.scope == "shared", config.write_budget_share,
    )  # fmt: skip


def _bytes_of(amount: int | Share, capacity_bytes: int) -> int:
    return int(amount * capacity_bytes) if isinstance(amount, Share) else amount


def check_reserves(limits: Iterable[Limits], capacity_bytes: Capacity) -> None:
    """Raise ValueError when the reserves of a tier are more than there is of it."""
    totals = [0, 0, 0]
    for one in limits:
        for tier in Tier:
            totals[tier] += one.reserve_bytes[tier]
    for tier, total in zip(Tier, totals, strict=True):
        if total > capacity_bytes[tier]:
            raise ValueError(_too_much(tier, total, capacity_bytes[tier]))


def _too_much(tier: Tier, total: int, capacity: int) -> str:
    name = tier.name.lower()
    if not capacity:
        return f"there is no {tier.name} tier here; leave {name}_reserve out"
    return f"the reserves on {tier.name} would be {total} bytes in all, and it has {capacity}; lower {name}_reserve of some tenants"


def checked_limits(tenants: Mapping[str, TenantConfig], capacity_bytes: Capacity) -> dict[str, Limits]:
    """Limits of all tenants in bytes. Raises ValueError when they cannot be."""
    limits = {name: limits_of(name, config, capacity_bytes) for name, config in tenants.items()}
    check_reserves(limits.values(), capacity_bytes)
    return limits


class TenantBook:
    """Which limits each tenant has, and where they come from.

    Args:
        configured: limits of the configuration, by tenant.
        capacity_bytes: by tier.

    Raises:
        ValueError: the configured limits cannot be; says why.
    """

    def __init__(self, configured: Mapping[str, TenantConfig], capacity_bytes: Capacity) -> None:
        self._configured = dict(configured)
        self._capacity = capacity_bytes
        self.limits = checked_limits(configured, capacity_bytes)
        self.overrides: Overrides = {}
        """What the admin API has set; wins over the configuration key by key."""
        self.aside: Overrides = {}
        """Of these, what does not fit any more; kept, and not in force."""
        self.problems: dict[str, str] = {}
        """Why not."""
        self.sequence = 0
        """How often the overrides were changed."""
        self._reserved = [sum(one.reserve_bytes[tier] for one in self.limits.values()) for tier in Tier]

    def names(self) -> set[str]:
        """Tenants that have limits of their own."""
        return self._configured.keys() | self.overrides.keys() | self.aside.keys()

    def source(self, name: str) -> str:
        """Where a tenant's limits come from: "api", "config", or "" when it has none."""
        return "api" if name in self.overrides else "config" if name in self._configured else ""

    def is_configured(self, name: str) -> bool:
        """True for a tenant that the configuration names."""
        return name in self._configured

    def settings(self, name: str, override: Mapping[str, Any] | None = None) -> TenantConfig:
        """The settings in force, or those with another override. Raises ValueError when they cannot be."""
        base = self._configured.get(name, TenantConfig()).model_dump(mode="json", by_alias=True, exclude_unset=True)
        try:
            return TenantConfig.model_validate(base | dict(self.overrides.get(name, {}) if override is None else override))
        except ValidationError as e:
            raise ValueError("; ".join(_explained(name, item) for item in e.errors())) from None

    def adopt(self, sequence: int, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what was set before the restart. What does not fit any more is put aside with a warning."""
        self.sequence = sequence
        for name, override in overrides.items():
            try:
                limits = self._checked(name, override)
            except ValueError as e:
                log.warning("limits of tenant %r that were set by the admin API are not in force: %s", name, e)
                self.aside[name], self.problems[name] = dict(override), str(e)
                continue
            self._put(name, dict(override), limits)
            over = " over those of the configuration" if name in self._configured else ""
            log.info("tenant %r has limits that were set by the admin API%s: %s", name, over, ", ".join(override))

    def changed(self, name: str, changes: Mapping[str, Any], reset: Iterable[str] = ()) -> dict[str, Any]:
        """The override of a tenant after a change; nothing is changed yet.

        Args:
            name: the tenant.
            changes: keys and values that are set from now on.
            reset: keys that go back to the configuration's.

        Raises:
            RequestError: BAD_REQUEST for what cannot be, LIMIT for too many tenants; says what to do.
        """
        if not is_tenant_name(name):
            raise RequestError(Reason.BAD_REQUEST, "a tenant name has 1 to 128 printable characters")
        if name not in self.overrides and len(self.overrides) >= MAX_OVERRIDES:
            raise RequestError(Reason.LIMIT, f"limits of {MAX_OVERRIDES} tenants are set; remove some that are not needed any more")
        override = self.overrides.get(name, self.aside.get(name, {})) | dict(changes)
        for key in reset:
            override.pop(key, None)
        try:
            self._checked(name, override)
        except ValueError as e:
            raise RequestError(Reason.BAD_REQUEST, str(e)) from e
        return override

    def after(self, name: str, override: dict[str, Any] | None) -> Overrides:
        """All overrides as they will be with another one for a tenant; None for none."""
        kept = {n: o for n, o in (self.aside | self.overrides).items() if n != name}
        return kept if override is None else kept | {name: override}

    def commit(self, name: str, override: dict[str, Any] | None) -> Limits | None:
        """Change the override of a tenant; None takes it away. Returns the limits from now on; None when it has none."""
        self.sequence += 1
        self.aside.pop(name, None)
        self.problems.pop(name, None)
        if override is None:
            self.overrides.pop(name, None)
            limits = limits_of(name, self._configured[name], self._capacity) if name in self._configured else None
            self._put(name, None, limits)
            return limits
        limits = self._checked(name, override)
        self._put(name, override, limits)
        return limits

    def _checked(self, name: str, override: Mapping[str, Any]) -> Limits:
        limits = limits_of(name, self.settings(name, override), self._capacity)
        old = self.limits.get(name, Limits())
        for tier in Tier:
            total = self._reserved[tier] - old.reserve_bytes[tier] + limits.reserve_bytes[tier]
            if limits.reserve_bytes[tier] and total > self._capacity[tier]:
                raise ValueError(_too_much(tier, total, self._capacity[tier]))
        return limits

    def _put(self, name: str, override: dict[str, Any] | None, limits: Limits | None) -> None:
        if override is not None:
            self.overrides[name] = override
        old = self.limits.pop(name, Limits())
        if limits is not None:
            self.limits[name] = limits
        for tier in Tier:
            self._reserved[tier] += (limits or Limits()).reserve_bytes[tier] - old.reserve_bytes[tier]


def _explained(name: str, item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    text = str(item["msg"]).removeprefix("Value error, ")
    text = "unknown key" if item["type"] == "extra_forbidden" else text
    return f"tenant {name!r}: {key}: {text}" if key else f"tenant {name!r}: {text}"
