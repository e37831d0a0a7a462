"""Limits of one tenant as people write them: the same names and values in the file, on the command line and in what is kept."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from kvtierd.units import Share, amount_text, parse_amount, parse_share, parse_ttl

__all__ = ["MAX_TENANT_NAME", "TIER_NAMES", "Amount", "OwnTtl", "TenantConfig", "WriteShare", "is_tenant_name"]

MAX_TENANT_NAME: Final = 128
TIER_NAMES: Final = ("hbm", "cpu", "nvme")
Amount = Annotated[int | Share | None, PlainValidator(parse_amount), PlainSerializer(amount_text)]
"""Bytes, a share of the tier, or None for no limit."""


def _own_ttl(value: object) -> object:
    return value if value is None else "never" if (seconds := parse_ttl(value)) is None else seconds


OwnTtl = Annotated[float | Literal["never"] | None, PlainValidator(_own_ttl)]
"""Seconds, "never", or None for the tier's own."""
WriteShare = Annotated[float, BeforeValidator(parse_share)]


def is_tenant_name(name: str) -> bool:
    """True for 1 to ``MAX_TENANT_NAME`` printable characters."""
    return bool(name) and name.isprintable() and len(name) <= MAX_TENANT_NAME


class TenantConfig(BaseModel):
    """Limits of one tenant. Amounts are bytes or a share of the tier, such as "20%"."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False, frozen=True)

    tenant_class: str = Field(
        "standard",
        alias="class",
        pattern="^(premium|standard|basic)$",
        description="premium may have reserves; basic is not in HBM and goes first for others.",
    )
    scope: str = Field(
        "private",
        pattern="^(private|shared)$",
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
            reserve = self.reserve(tier)
            if reserve and self.tenant_class != "premium":
                raise ValueError(
                    f'{tier}_reserve is for class "premium", and this tenant is {self.tenant_class}; set class = "premium" or '
                    f"leave the reserve out"
                )
        if self.tenant_class == "basic" and self.hbm_quota:
            raise ValueError('hbm_quota is set, but class "basic" is never in HBM; leave it out or set another class')
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
