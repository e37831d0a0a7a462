"""Values of the metrics' labels, closed sets all of them, and bounds of histograms."""

from __future__ import annotations

from typing import Final, get_args

import grpc

from kvtierd.core.commands import Command
from kvtierd.model import Tier
from kvtierd.v1 import admin_pb2, kvtier_pb2

MAX_TENANT_LABELS: Final = 100
"""Tenants with their own label; the configured ones come first, then those that hold most; the rest counts as ``other``."""
OTHER: Final = "other"
TIERS: Final = tuple(tier.name.lower() for tier in Tier)
TRANSFER_PATHS: Final = ("shm", "grpc", "cudaipc", OTHER)
EVICTION_REASONS: Final = ("pressure", "ttl", "not_admitted", "expired", "quota", "request", "corrupt", "io", "capacity", OTHER)
NOT_IN_HBM: Final = ("busy", "quota", "limit", "class", "other_gpu", "suspended", "too_large", OTHER)
QUEUE_CLASSES: Final = ("load", "prefetch", "demote", OTHER)
PREFETCH_OUTCOMES: Final = ("ready", "partial", "miss", "expired", "cancelled", "rejected", OTHER)
COMMANDS: Final = (*sorted(command.__name__ for command in get_args(Command)), OTHER)
KV_EVENTS: Final = ("stored", "removed", "cleared")
IO_OPS: Final = ("read", "write", OTHER)
IO_PATHS: Final = ("memfd", "tmpfs", "o_direct", "buffered", "kvikio", "gds", "cudaipc", OTHER)
RPC_CODES: Final = tuple(code.name for code in grpc.StatusCode)
RPC_METHODS: Final = (
    *sorted(
        method.name
        for pb2, service in ((kvtier_pb2, "KvTierService"), (admin_pb2, "KvTierAdminService"))
        for method in pb2.DESCRIPTOR.services_by_name[service].methods
    ),
    OTHER,
)
ALWAYS_SHOWN_CODES: Final = ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "INTERNAL")
CODE_NAMES: Final = {code.value[0]: code.name for code in grpc.StatusCode}
# Reasons as the core and the stores spell them.
EVICTION_ALIASES: Final = {"io_error": "io", "no_space": "capacity", "evict": "request"}

FAST_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MOVE_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
