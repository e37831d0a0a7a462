"""Limits of all tenants: those of the configuration, and over them those that the admin API has set, which survive a restart.

A limit that cannot be in force leaves the others of its tenant in force; the configuration's takes its place where that can be.
It is kept, and comes into force when it fits.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from kvtierd.core.limits import NEVER, NO_LIMITS, Limits, TenantClass
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier
from kvtierd.tenant_config import (
    TIER_NAMES,
    LimitError,
    TenantConfig,
    bytes_of,
    check_quotas,
    check_reserves,
    fault_text,
    name_problem,
    no_tier,
)

log = logging.getLogger(__name__)

MAX_OVERRIDES: Final = 20_000
"""Tenants whose limits the admin API may set."""
Capacity = tuple[int, int, int]
Overrides = dict[str, dict[str, Any]]
"""By tenant: keys of the configuration and their values as JSON has them; None takes the configuration's limit away."""


def check_name(name: str) -> None:
    """Raise RequestError BAD_REQUEST when no tenant can have this name."""
    if problem := name_problem(name):
        raise RequestError(Reason.BAD_REQUEST, problem)


def limits_of(config: TenantConfig, capacity_bytes: Capacity) -> Limits:
    """Limits in bytes, of tiers with these capacities."""
    quota: list[int | None] = []
    reserve: list[int] = []
    ttl: list[float | None] = []
    for tier, capacity in zip(TIER_NAMES, capacity_bytes, strict=True):
        most = config.quota(tier)
        quota.append(None if most is None else bytes_of(most, capacity))
        reserve.append(bytes_of(config.reserve(tier), capacity))
        own = config.ttl(tier)
        ttl.append(NEVER if own == "never" else own)  # type: ignore[arg-type]
    return Limits(
        (quota[0], quota[1], quota[2]), (reserve[0], reserve[1], reserve[2]), (ttl[0], ttl[1], ttl[2]),
        TenantClass(config.tenant_class), config.scope == "shared", config.write_budget_share,
    )  # fmt: skip


class TenantBook:
    """Which limits each tenant has, and where they come from.

    Args:
        configured: limits of the configuration, by tenant.
        capacity_bytes: by tier; less than what is configured where a folder is lost, say.
    """

    def __init__(self, configured: Mapping[str, TenantConfig], capacity_bytes: Capacity) -> None:
        self._configured = dict(configured)
        self._capacity = capacity_bytes
        self.limits: dict[str, Limits] = {}
        """In force, of tenants that have any of their own."""
        self.overrides: Overrides = {}
        """What the admin API has set; wins over the configuration key by key."""
        self.problems: dict[str, dict[str, str]] = {}
        """By tenant and key: why this limit is not in force."""
        self.sequence = 0
        """How often the overrides were changed."""
        self._reserved = [0, 0, 0]
        for name in self._configured:
            self._settle(name)

    def names(self) -> set[str]:
        """Tenants that have limits of their own."""
        return self._configured.keys() | self.overrides.keys()

    def source(self, name: str) -> str:
        """Where a tenant's limits come from: "api", "config", or "" when it has none."""
        return "api" if name in self.overrides else "config" if name in self._configured else ""

    def is_configured(self, name: str) -> bool:
        """True for a tenant that the configuration names."""
        return name in self._configured

    def settings(self, name: str) -> TenantConfig:
        """The settings in force."""
        return self._fitted(name, self.overrides.get(name, {}))[0]

    def problem(self, name: str) -> str:
        """Which limits of a tenant are not in force, and why; empty when all are."""
        return "; ".join(f"{key}: {why}" for key, why in self.problems.get(name, {}).items())

    def text(self, name: str) -> str:
        """The settings in force in words, those that limit nothing left out."""
        told = self.settings(name).model_dump(mode="json", by_alias=True, exclude_defaults=True)
        numbers = {key: f"{value:g}" if isinstance(value, float) else value for key, value in told.items()}
        return ", ".join(f"{key} {value}" for key, value in numbers.items()) or "none"

    def adopt(self, sequence: int, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what was set before the restart."""
        self.sequence = sequence
        self.overrides = {name: dict(override) for name, override in overrides.items()}
        for name, override in self.overrides.items():
            self._settle(name)
            over = " over those of the configuration" if name in self._configured else ""
            log.info("tenant %r has limits that were set by the admin API%s: %s", name, over, ", ".join(override))
        self._settle_problems()  # what did not fit before another's reserve was lowered

    def tell_problems(self) -> None:
        """Log each limit that is not in force."""
        for name, problems in self.problems.items():
            for key, why in problems.items():
                log.warning("%s of tenant %r is not in force: %s", key, name, why)

    def changed(self, name: str, changes: Mapping[str, Any], reset: Iterable[str] = ()) -> dict[str, Any]:
        """The override of a tenant after a change; nothing is changed yet.

        Args:
            name: the tenant.
            changes: keys and values that are set from now on.
            reset: keys that go back to the configuration's.

        Raises:
            RequestError: BAD_REQUEST for what cannot be, LIMIT for too many tenants; says what to do.
        """
        check_name(name)
        taken = set(reset)
        if both := sorted(changes.keys() & taken):
            raise RequestError(Reason.BAD_REQUEST, f"{both[0]} is to be set and to be reset; leave one of the two out")
        for key, value in changes.items():
            tier = key.partition("_")[0]
            if value not in (None, 0) and tier in TIER_NAMES and not self._capacity[TIER_NAMES.index(tier)]:
                raise RequestError(Reason.BAD_REQUEST, no_tier(key))
        if name not in self.overrides and len(self.overrides) >= MAX_OVERRIDES:
            raise RequestError(Reason.LIMIT, f"limits of {MAX_OVERRIDES} tenants are set; remove some that are not needed any more")
        override = {key: value for key, value in self.overrides.get(name, {}).items() if key not in taken} | dict(changes)
        self.check(name, override, changes)
        return override

    def check(self, name: str, override: Mapping[str, Any], changes: Collection[str] = ()) -> None:
        """Refuse an override by which a limit would not be in force that is now, or that is to be changed.

        Raises:
            RequestError: BAD_REQUEST; says what to do.
        """
        known = self.problems.get(name, {})
        for key, why in self._fitted(name, override)[2].items():
            if key in changes or key not in known:
                raise RequestError(Reason.BAD_REQUEST, why)

    def after(self, name: str, override: dict[str, Any] | None) -> Overrides:
        """All overrides as they will be with another one for a tenant; None for none."""
        kept = {n: o for n, o in self.overrides.items() if n != name}
        return kept if override is None else kept | {name: override}

    def commit(self, name: str, override: dict[str, Any] | None) -> dict[str, Limits | None]:
        """Change the override of a tenant; None takes it away.

        Returns:
            By tenant: the limits from now on, None for none; of others too where theirs fit now.
        """
        self.sequence += 1
        self.overrides = self.after(name, override)
        limits = self._settle(name)
        return self._settle_problems() | {name: limits}

    def _settle_problems(self) -> dict[str, Limits | None]:
        """Put into force what fits by now. Returns the limits of those tenants that have others for it."""
        found: dict[str, Limits | None] = {}
        for name in list(self.problems):
            before = self.limits.get(name)
            after = self._settle(name)
            if after != before:
                found[name] = after
        return found

    def _settle(self, name: str) -> Limits | None:
        """Put into force what can be of a tenant's limits, which are returned, and note the rest."""
        _, limits, problems = self._fitted(name, self.overrides.get(name, {}))
        old = self.limits.pop(name, NO_LIMITS)
        if limits is not None:
            self.limits[name] = limits
        for tier in Tier:
            self._reserved[tier] += (limits or NO_LIMITS).reserve_bytes[tier] - old.reserve_bytes[tier]
        self.problems.pop(name, None)
        if problems:
            self.problems[name] = problems
        return limits

    def _fitted(self, name: str, override: Mapping[str, Any]) -> tuple[TenantConfig, Limits | None, dict[str, str]]:
        """What can be in force of a tenant's limits: as settings and in bytes; and by key why the rest cannot. Changes nothing."""
        if problem := name_problem(name):
            return TenantConfig(), None, dict.fromkeys(override, problem)
        ours = dict(override)
        config = self._configured.get(name)
        base = {} if config is None else config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        problems: dict[str, str] = {}
        while True:
            try:
                settings = _settings(base | ours)
                limits = self._in_bytes(name, settings)
            except LimitError as e:
                problems.setdefault(e.key, str(e))
                del (ours if e.key in ours else base)[e.key]
            else:
                return settings, limits if override or config else None, problems

    def _in_bytes(self, name: str, settings: TenantConfig) -> Limits:
        """Limits in bytes. Raises LimitError for one that cannot be in force beside those of the others."""
        check_quotas(settings, self._capacity)
        limits = limits_of(settings, self._capacity)
        old = self.limits.get(name, NO_LIMITS)
        for tier, key in zip(Tier, TIER_NAMES, strict=True):
            if limits.reserve_bytes[tier]:
                others = self._reserved[tier] - old.reserve_bytes[tier]
                check_reserves(key, others + limits.reserve_bytes[tier], self._capacity[tier])
        return limits


def _settings(values: Mapping[str, Any]) -> TenantConfig:
    """Settings of these keys and values. Raises LimitError for the first that cannot be."""
    try:
        return TenantConfig.model_validate(values)
    except ValidationError as e:
        item = e.errors()[0]
        error = item.get("ctx", {}).get("error")
        if isinstance(error, LimitError):
            raise error from None
        raise LimitError(str(item["loc"][0]), fault_text(item)) from None
