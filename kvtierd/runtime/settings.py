"""What the core is told of a configuration."""

from __future__ import annotations

from kvtierd.config import Config
from kvtierd.core.settings import CoreConfig
from kvtierd.cuda import PIECE_BYTES


def core_config(config: Config, nvme_bytes: int, devices: int = 0) -> CoreConfig:
    """Settings of a core.

    Args:
        config: everything else.
        nvme_bytes: capacity of the NVMe tier as it was opened; 0 for none.
        devices: GPUs of the HBM tier; 0 for no such tier.
    """
    in_flight = config.nvme.max_bytes_in_flight
    return CoreConfig(
        capacity_bytes=(devices * config.hbm.pool_bytes, config.cpu.capacity, nvme_bytes),
        extent_bytes=(config.hbm.extent_bytes, config.cpu.extent_bytes, config.nvme.segment_bytes),
        devices=max(devices, 1),
        device_piece_bytes=PIECE_BYTES,
        ttl_s=(config.hbm.ttl, config.cpu.ttl, config.nvme.ttl),
        free_target=config.cpu.free_target,
        # A move takes its target's slots when it is queued; on small tiers that must not push out much ahead of time.
        max_promote_bytes=min(in_flight, config.cpu.capacity // 8),
        max_demote_bytes=min(in_flight, max(nvme_bytes // 32, config.cpu.capacity // 32)),
        max_tickets=config.server.max_tickets,
        max_ticket_share=config.server.max_ticket_share,
        eviction=config.policy.eviction,
        turn_bonus_s=config.policy.turn_bonus,
        fair_share=config.policy.fair_share,
        second_use=config.nvme.admission == "second-use",
        second_use_window_s=config.nvme.second_use_window,
        write_budget_bytes=config.nvme.write_budget,
    )
