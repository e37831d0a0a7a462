"""Gauges of a scrape: plain functions from a snapshot of the daemon to metric families."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from kvtierd.core.limits import NO_LIMITS, Limits, TenantClass
from kvtierd.core.stats import StatsSnapshot, TenantStats, TierStats
from kvtierd.model import DEFAULT_TENANT, Tier

__all__ = ["Flags", "gauge_families"]

_OTHER: Final = "other"
_NO_QUOTA: Final = float("inf")
_QUEUE_CLASSES: Final = ("load", "prefetch", "demote")
_IO_PATHS: Final = {
    Tier.HBM: ("cudaipc",),
    Tier.CPU: ("memfd", "tmpfs"),
    Tier.NVME: ("o_direct", "buffered", "kvikio", "gds"),
}
_NVME_ENGINES: Final = ("threads", "kvikio")
_TIER_GAUGES: Final = (
    ("capacity_bytes", "Hard limit of the tier."),
    ("reserved_bytes", "Bytes of extents or segments that exist; never above the capacity."),
    ("used_bytes", "Bytes of slots in use."),
    ("copies", "Copies held, readable or being filled."),
    ("dirty_bytes", "Bytes of readable copies that exist on no lower tier."),
    ("pinned_bytes", "Bytes of copies pinned by tickets or moves."),
)


@dataclass(slots=True)
class Flags:
    """States that the runtime sets rather than counts."""

    version: str
    protocol: str
    python: str
    ready: bool = False
    draining: bool = False
    prefaulted_bytes: int = 0
    huge_page_bytes: int = 0
    io_paths: dict[str, list[str]] = field(default_factory=dict)
    """By tier name: what moves its bytes now."""
    nvme_engine: str = ""
    """Name of the engine of the NVMe tier; empty for none."""
    nvme_encrypted: bool = False
    folders_up: Mapping[str, bool] = field(default_factory=dict)
    """Whether each configured folder of the NVMe tier takes new blocks."""


def gauge_families(
    snapshot: StatsSnapshot | None, flags: Flags, labels: Mapping[str, str], limits: Mapping[str, Limits]
) -> list[Metric]:
    """All gauges.

    Args:
        snapshot: the figures of now; None for none yet.
        flags: states.
        labels: the tenants that have a label of their own, and that; the others are summed as ``other``.
        limits: those of tenants with a label, of whom the snapshot need not know.
    """
    shot = snapshot or StatsSnapshot(tiers=[], tenants=[], blocks=0, sessions=0, tickets=0)
    return [
        *_tier_families(shot.tiers),
        *_tenant_families(shot.tenants, labels, limits),
        _gauge("kvtierd_blocks", "Blocks in the index.", [((), shot.blocks)]),
        _gauge("kvtierd_sessions", "Sessions attached.", [((), shot.sessions)]),
        _gauge("kvtierd_tickets", "Tickets open.", [((), shot.tickets)]),
        _queue_family(shot.queue_depth),
        _gauge(
            "kvtierd_nvme_write_budget_bytes",
            "Bytes a day that NVMe may be written before only a second use is; 0 for no limit.",
            [((), shot.nvme_budget_bytes)],
        ),
        _gauge(
            "kvtierd_nvme_write_budget_left_bytes",
            "What is left of the write budget, which refills by itself; below 0 when written on credit.",
            [((), shot.nvme_budget_left_bytes)],
        ),
        *_flag_families(flags),
    ]


def _gauge(name: str, text: str, samples: Iterable[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _tier_families(tiers: list[TierStats]) -> list[Metric]:
    found = {stats.tier: stats for stats in tiers}
    families = [
        _gauge(f"kvtierd_tier_{name}", text, (((t.name.lower(),), getattr(found.get(t), name, 0)) for t in Tier), ("tier",))
        for name, text in _TIER_GAUGES
    ]
    suspended = (((t.name.lower(),), float(t in found and bool(found[t].suspended))) for t in Tier)
    families.append(
        _gauge("kvtierd_tier_suspended", "1 while the tier takes nothing, for example after I/O errors.", suspended, ("tier",))
    )
    return families


def _tenant_families(tenants: list[TenantStats], labels: Mapping[str, str], limits: Mapping[str, Limits]) -> list[Metric]:
    zero = (0, 0, 0)
    blocks: dict[str, int] = dict.fromkeys([DEFAULT_TENANT, _OTHER, *labels.values()], 0)
    used = dict.fromkeys(blocks, zero)
    limited = dict.fromkeys(blocks, NO_LIMITS) | {label: limits[name] for name, label in labels.items() if name in limits}
    for stats in tenants:
        label = labels.get(stats.tenant, _OTHER)
        blocks[label] += stats.blocks
        used[label] = _add(used[label], stats.used_bytes)
        if label != _OTHER:  # a sum of limits limits nothing
            limited[label] = stats.limits
    quota = {k: tuple(_NO_QUOTA if (n := of.quota(t)) is None else n for t in Tier) for k, of in limited.items()}
    reserve = {k: of.reserve_bytes for k, of in limited.items()}

    def by_tier(values: Mapping[str, tuple[float, ...]]) -> Iterable[tuple[tuple[str, ...], float]]:
        return (((label, tier.name.lower()), row[tier]) for label, row in values.items() for tier in Tier)

    return [
        _gauge("kvtierd_tenant_blocks", "Blocks held for the tenant.", (((k,), n) for k, n in blocks.items()), ("tenant",)),
        _gauge("kvtierd_tenant_used_bytes", "Bytes of slots in use by the tenant.", by_tier(used), ("tenant", "tier")),
        _gauge("kvtierd_tenant_quota_bytes", "Quota of the tenant on the tier; +Inf for none.", by_tier(quota), ("tenant", "tier")),
        _gauge(
            "kvtierd_tenant_reserve_bytes",
            "Reserve of the tenant on the tier.",
            by_tier(reserve),
            ("tenant", "tier"),
        ),
        _gauge(
            "kvtierd_tenant_class",
            "1 for the class of the tenant.",
            (((k, c.value), float(c is limited[k].tenant_class)) for k in blocks if k != _OTHER for c in TenantClass),
            ("tenant", "class"),
        ),
    ]


def _add(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def _queue_family(depth: Mapping[str, int]) -> Metric:
    samples = [((cls,), float(depth.get(cls, 0))) for cls in _QUEUE_CLASSES]
    return _gauge("kvtierd_queue_depth", "Moves that wait for a device, by class.", samples, ("class",))


def _flag_families(flags: Flags) -> list[Metric]:
    paths = []
    for tier, known in _IO_PATHS.items():
        name, active = tier.name.lower(), flags.io_paths.get(tier.name.lower(), [])
        # A path outside the usual ones of the tier still shows, as one that is active.
        paths += [((name, path), float(path in active)) for path in dict.fromkeys([*known, *active])]
    build = (flags.version, flags.protocol, flags.python)
    return [
        _gauge(
            "kvtierd_io_path_active",
            "1 for what moves the bytes of the tier now: for NVMe also to and from the GPU.",
            paths,
            ("tier", "path"),
        ),
        _gauge(
            "kvtierd_nvme_engine",
            "1 for the engine that moves bytes to and from NVMe.",
            (((e,), float(e == flags.nvme_engine)) for e in _NVME_ENGINES),
            ("engine",),
        ),
        _gauge("kvtierd_nvme_encrypted", "1 when blocks on NVMe are encrypted.", [((), float(flags.nvme_encrypted))]),
        _gauge(
            "kvtierd_nvme_folder_up",
            "1 while a folder of the NVMe tier takes new blocks; 0 when it was lost at the start, or fails.",
            (((folder,), float(up)) for folder, up in flags.folders_up.items()),
            ("folder",),
        ),
        _gauge("kvtierd_cpu_prefaulted_bytes", "Bytes of the CPU pool that are faulted in.", [((), flags.prefaulted_bytes)]),
        _gauge("kvtierd_cpu_huge_page_bytes", "Bytes of the CPU pool gathered in huge pages.", [((), flags.huge_page_bytes)]),
        _gauge("kvtierd_ready", "1 while the daemon is ready to serve.", [((), float(flags.ready))]),
        _gauge("kvtierd_draining", "1 while the daemon drains and takes no saves.", [((), float(flags.draining))]),
        _gauge(
            "kvtierd_build_info",
            "Version of the daemon, its protocol and Python.",
            [(build, 1.0)],
            ("version", "protocol", "python"),
        ),
    ]
