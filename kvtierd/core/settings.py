"""What the core is told when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from kvtierd.model import MAX_REALMS, Tier


@dataclass(frozen=True)
class CoreConfig:
    """What the core needs to know. Bytes and seconds; a tier with capacity 0 is absent."""

    capacity_bytes: tuple[int, int, int]
    extent_bytes: tuple[int, int, int]
    ttl_s: tuple[float | None, float | None, float | None] = (30.0, 600.0, None)
    free_target: float = 0.15
    max_promote_bytes: int = 256 << 20
    """Most payload on its way up at one time; one block always may."""
    max_demote_bytes: int = 256 << 20
    max_tickets: int = 4096
    """Of one session."""
    max_ticket_share: float = 0.5
    """Of CPU memory, for one session's tickets; of a tier, for all pins; of a tenant's share or quota, for its own pins."""
    max_realms: int = MAX_REALMS
    """Places for realms; those without blocks and sessions give theirs up when all are taken."""
    retry_s: float = 5.0
    """Pause after a device refused a write, or after no room was found below for a realm."""
    devices: int = 1
    """GPUs of the HBM tier; each has the same part of its capacity."""
    device_piece_bytes: int = 1
    """An extent of GPU memory takes whole pieces of so many bytes."""
    eviction: str = "lru"
    """Order in which copies go for room: "lru" or "arc"."""
    turn_bonus_s: float = 0.0
    """Credit for the blocks of requests that matched at least two known ones; with "lru" only."""
    second_use: bool = False
    """Once NVMe is full, admit only blocks that are used a second time within ``second_use_window_s``."""
    second_use_window_s: float = 1800.0
    write_budget_bytes: int = 0
    """Bytes a day that NVMe may be written without asking for a second use; 0 for no limit."""
    fair_share: float = 0.5
    """Part of a tier beyond which a tenant takes room only from itself and from idle tenants; above 0, up to 1."""

    def ticket_limit_bytes(self, tier: Tier) -> float:
        """Most of a tier that the tickets of one session may pin."""
        return self.max_ticket_share * self.capacity_bytes[tier]
