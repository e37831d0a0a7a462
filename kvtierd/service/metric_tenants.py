"""Which tenants have a label of their own in the metrics, and what each has counted since it was last asked."""

from __future__ import annotations

import heapq
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from kvtierd.core.stats import TenantStats
from kvtierd.model import DEFAULT_TENANT, Tier
from kvtierd.service.metric_labels import EVICTION_ALIASES, EVICTION_REASONS, MAX_TENANT_LABELS, OTHER

MAX_RELABELS: Final = 10
"""Tenants that one scrape gives the label of another, which must hold less than half as much, or have no limits of its own."""


class TenantNews(NamedTuple):
    """What a tenant has counted since the last time."""

    tenant: str
    hits: tuple[int, ...]
    misses: int
    evictions: Counter[str]


def labels_that_change(
    tenants: list[TenantStats], labelled: Collection[str], configured: Collection[str]
) -> tuple[list[str], list[str]]:
    """Tenants that are to get a label, and those that are to lose theirs for it: the configured ones come first, then the largest.

    Args:
        tenants: those that are known.
        labelled: those that have a label. The default tenant keeps it.
        configured: those that have limits of their own; they need not be known.
    """
    held = {t.tenant: sum(t.used_bytes) for t in tenants}

    def rank(name: str) -> tuple[bool, int]:
        return name in configured, held.get(name, 0 if name in configured else -1)

    without = [name for name in {**held, **dict.fromkeys(configured)} if name not in labelled and name != OTHER]
    if not without:
        return [], []
    free = max(MAX_TENANT_LABELS - len(labelled), 0)
    most = heapq.nlargest(free + MAX_RELABELS, without, key=rank)
    gain, lose = most[:free], []
    if len(most) > free:
        least = sorted((name for name in labelled if name != DEFAULT_TENANT), key=rank)
        for name, other in zip(most[free:], least, strict=False):
            (is_first, more), (was_first, less) = rank(name), rank(other)
            if is_first < was_first or (is_first == was_first and more <= 2 * less):
                break
            gain.append(name)
            lose.append(other)
    return gain, lose


class TenantCounts:
    """Remembers what every tenant had counted, so that a counter may get the rest whatever label it has now."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[tuple[int, int, int], int, dict[tuple[Tier, str], int]]] = {}

    def news(self, tenants: Iterable[TenantStats]) -> Iterator[TenantNews]:
        """Tenants that have counted something since the last call; to be taken to its end."""
        counted = {}
        for stats in tenants:
            now = counted[stats.tenant] = (stats.hits, stats.misses, dict(stats.evictions))
            before = self._before.get(stats.tenant, ((0, 0, 0), 0, {}))
            if now == before:
                continue
            if stats.misses < before[1] or any(map(operator.lt, stats.hits, before[0])):
                before = ((0, 0, 0), 0, {})  # it was forgotten and came back
            evictions = Counter[str]()
            for (tier, why), n in now[2].items():
                name = EVICTION_ALIASES.get(why, why)
                evictions[name if name in EVICTION_REASONS else OTHER] += max(n - before[2].get((tier, why), 0), 0)
            hits = tuple(n - old for n, old in zip(stats.hits, before[0], strict=True))
            yield TenantNews(stats.tenant, hits, stats.misses - before[1], evictions)
        self._before = counted
