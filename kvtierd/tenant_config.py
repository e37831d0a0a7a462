"""Tenants as people write them: which names there may be, and limits with the same keys and values in the file, on the command line
and in what is kept. What cannot be of them is decided here, for a configuration as for a daemon that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from kvtierd.units import Share, amount_text, parse_amount, parse_share, parse_ttl, shown, size_text

__all__ = [
    "MAX_TENANT_NAME", "TIER_NAMES", "Amount", "LimitError", "OwnTtl", "TenantConfig", "WriteShare", "bytes_of", "check_quotas",
    "check_reserves", "check_tenants", "fault_text", "name_problem", "no_tier",
]  # fmt: skip

MAX_TENANT_NAME: Final = 128
RESERVED_NAME: Final = "other"
"""What the metrics call the sum of all tenants without a label of their own."""
MAX_NAMED: Final = 5
"""Tenants that one refusal names."""
TIER_NAMES: Final = ("hbm", "cpu", "nvme")
_TITLES: Final = {"hbm": "HBM", "cpu": "CPU", "nvme": "NVMe"}
Capacities = tuple[int | None, int | None, int | None]
"""Bytes for blocks by tier: 0 where there is no such tier, None where only the daemon's start tells."""
Amount = Annotated[int | Share | None, PlainValidator(parse_amount), PlainSerializer(amount_text)]
"""Bytes, a share of the tier, or None for no limit."""


class LimitError(ValueError):
    """A limit that cannot be in force. ``key`` is its name; the text says why, and what to do."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


def _own_ttl(value: object) -> object:
    return value if value is None else "never" if (seconds := parse_ttl(value)) is None else seconds


OwnTtl = Annotated[float | Literal["never"] | None, PlainValidator(_own_ttl)]
"""Seconds, "never", or None for the tier's own."""
WriteShare = Annotated[float, BeforeValidator(parse_share)]


def name_problem(name: str) -> str:
    """Why no tenant can have this name; empty when one can."""
    if not (0 < len(name) <= MAX_TENANT_NAME and name.isprintable()):
        return f"a tenant name has 1 to {MAX_TENANT_NAME} printable characters"
    if " " in name:
        return "a tenant name has no spaces"
    if not {"", ".", ".."}.isdisjoint(name.split("/")):
        return "a tenant name is no path: what stands before, between or after its slashes is never empty, '.' or '..'"
    if name == RESERVED_NAME:
        return f"{name!r} cannot be a tenant's name: the metrics call the sum of all tenants without a label of their own so"
    return ""


class TenantConfig(BaseModel):
    """Limits of one tenant. Amounts are bytes or a share of the tier, such as "20%"."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False, frozen=True)

    tenant_class: Literal["premium", "standard", "basic"] = Field(
        "standard",
        alias="class",
        description="premium may have reserves; basic is not in HBM and goes first for others.",
    )
    scope: Literal["private", "shared"] = Field(
        "private",
        description="Whether other tenants whose scope is shared find what this one saves, and the other way round.",
    )
    hbm_quota: Amount = Field(
        None, description='Most that it may hold on the HBM tier: 0 for nothing, "none" or not set for no limit.'
    )
    hbm_reserve: Amount = Field(0, description="What of the HBM tier others never take; for premium.")
    hbm_ttl: OwnTtl = Field(None, description="Own TTL on HBM; not set means the tier's.")
    cpu_quota: Amount = Field(
        None, description='Most that it may hold on the CPU tier: 0 for nothing, "none" or not set for no limit.'
    )
    cpu_reserve: Amount = Field(0, description="What of the CPU tier others never take; for premium.")
    cpu_ttl: OwnTtl = Field(None, description="Own TTL on CPU; not set means the tier's.")
    nvme_quota: Amount = Field(
        None, description='Most that it may hold on the NVMe tier: 0 for nothing, "none" or not set for no limit.'
    )
    nvme_reserve: Amount = Field(0, description="What of the NVMe tier others never take; for premium.")
    nvme_ttl: OwnTtl = Field(None, description="Own TTL on NVMe; not set means the tier's.")
    write_budget_share: WriteShare = Field(
        1.0, description="Most of nvme.write_budget that it may use, 0 to 1; what it leaves, others may use."
    )

    @model_validator(mode="after")
    def _consistent(self) -> TenantConfig:
        for tier in TIER_NAMES:
            if self.reserve(tier) and self.tenant_class != "premium":
                raise LimitError(
                    f"{tier}_reserve",
                    f'{tier}_reserve is for class "premium", and this tenant is {self.tenant_class}; set class = "premium" or '
                    f"leave the reserve out",
                )
        if self.tenant_class == "basic" and self.hbm_quota:
            raise LimitError("hbm_quota", 'hbm_quota is set, but class "basic" is never in HBM; leave it out or set another class')
        return self

    def quota(self, tier: str) -> int | Share | None:
        """Quota on a tier; None for no limit."""
        found: int | Share | None = getattr(self, f"{tier}_quota")
        return found

    def reserve(self, tier: str) -> int | Share:
        """Reserve on a tier."""
        found: int | Share | None = getattr(self, f"{tier}_reserve")
        return 0 if found is None else found

    def ttl(self, tier: str) -> float | str | None:
        """Own TTL on a tier: seconds, "never", or None for the tier's."""
        found: float | str | None = getattr(self, f"{tier}_ttl")
        return found


def bytes_of(amount: int | Share, capacity_bytes: int) -> int:
    """An amount in bytes, of a tier with this capacity."""
    return int(amount * capacity_bytes) if isinstance(amount, Share) else amount


def no_tier(key: str) -> str:
    """Why a limit on a tier that is not there cannot be."""
    return f"there is no {_TITLES[key.partition('_')[0]]} tier here; leave {key} out"


def check_quotas(config: TenantConfig, capacity_bytes: Capacities) -> None:
    """Raise LimitError for a reserve that is more than the quota on the same tier."""
    for tier, capacity in zip(TIER_NAMES, capacity_bytes, strict=True):
        quota, reserve = config.quota(tier), config.reserve(tier)
        if quota is None or (capacity is None and isinstance(quota, Share) is not isinstance(reserve, Share)):
            continue
        if quota < reserve if capacity is None else bytes_of(quota, capacity) < bytes_of(reserve, capacity):
            text = f"{tier}_quota ({_words(quota)}) is less than {tier}_reserve ({_words(reserve)})"
            raise LimitError(f"{tier}_reserve", f"{text}; raise the quota or lower the reserve")


def check_reserves(tier: str, reserved_bytes: int, capacity_bytes: int) -> None:
    """Raise LimitError when all reserves on a tier together are more than it has for blocks."""
    if reserved_bytes > capacity_bytes:
        key, all_, has = f"{tier}_reserve", size_text(reserved_bytes), size_text(capacity_bytes)
        text = f"the reserves on {_TITLES[tier]} would be {all_} in all, and it has {has} for blocks; lower {key} of some tenants"
        raise LimitError(key, text if capacity_bytes else no_tier(key))


def check_tenants(tenants: Mapping[str, TenantConfig], capacity_bytes: Capacities) -> None:
    """Raise ValueError when not all limits of a configuration can be in force together."""
    for name, config in tenants.items():
        try:
            check_quotas(config, capacity_bytes)
        except LimitError as e:
            raise ValueError(f"tenants.{name}: {e}") from None
    for tier, capacity in zip(TIER_NAMES, capacity_bytes, strict=True):
        reserves = {name: config.reserve(tier) for name, config in tenants.items() if config.reserve(tier)}
        if capacity is None or not reserves:
            continue
        try:
            check_reserves(tier, sum(bytes_of(reserve, capacity) for reserve in reserves.values()), capacity)
        except LimitError as e:
            more = f" and {len(reserves) - MAX_NAMED} more" if len(reserves) > MAX_NAMED else ""
            raise ValueError(f"{e} (it is set for {', '.join(list(reserves)[:MAX_NAMED])}{more})") from None


def _words(amount: int | Share) -> str:
    return str(amount) if isinstance(amount, Share) else size_text(amount)


def fault_text(item: Mapping[str, Any]) -> str:
    """What is wrong with one value, in words, from an entry of a ``ValidationError``'s errors."""
    if item["type"] == "literal_error":
        expected = item["ctx"]["expected"].replace("'", '"')
        return f"{shown(item['input'])} is not possible; write {expected}"
    return "unknown key" if item["type"] == "extra_forbidden" else str(item["msg"]).removeprefix("Value error, ")
