"""Amounts and TTLs of tenants as messages of the admin API."""

from __future__ import annotations

from kvtierd.units import Share
from kvtierd.v1 import admin_pb2 as pb

__all__ = ["amount_message", "ttl_message"]


def amount_message(amount: int | Share | None) -> pb.Amount:
    """Bytes, a share of the tier, or None for no limit."""
    if amount is None:
        return pb.Amount(unlimited=True)
    return pb.Amount(share=float(amount)) if isinstance(amount, Share) else pb.Amount(bytes=amount)


def ttl_message(ttl: float | str | None) -> pb.OwnTtl:
    """Seconds, "never", or None for the tier's own."""
    if ttl is None:
        return pb.OwnTtl(of_tier=True)
    return pb.OwnTtl(never=True) if ttl == "never" else pb.OwnTtl(seconds=float(ttl))
