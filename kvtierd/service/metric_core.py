"""Series of what the core counts by itself: evictions, moves, blocks that were not admitted, commands that failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from kvtierd.core.admission import REFUSALS
from kvtierd.model import Tier
from kvtierd.service.metric_cells import CounterVec, HistogramVec
from kvtierd.service.metric_labels import COMMANDS, EVICTION_ALIASES, EVICTION_REASONS, MOVE_S, NOT_IN_HBM, OTHER, TIERS

__all__ = ["CoreCounts", "CoreSeries"]


class CoreCounts(Protocol):
    """Totals that the core keeps by itself, so that nobody has to report each event again."""

    @property
    def evictions(self) -> Mapping[tuple[Tier, str], int]:
        """Copies forgotten, by tier and reason."""

    @property
    def moves(self) -> Mapping[tuple[Tier, Tier, str], int]:
        """Moves ended, by source, target and result ("ok" or what went wrong)."""

    @property
    def move_bytes(self) -> Mapping[tuple[Tier, Tier], int]:
        """Payload moved, by source and target."""

    @property
    def not_admitted(self) -> Mapping[str, int]:
        """Blocks forgotten because NVMe did not take them, by why."""

    @property
    def not_in_hbm(self) -> Mapping[str, int]:
        """Blocks that went to CPU memory although their engine can open that of its GPU, by why."""

    @property
    def failed_commands(self) -> Mapping[str, int]:
        """What the core asked for and the shell could not do, by the name of the command."""


class _EdgeCells:
    """All cells of moves from one tier to another, or within CPU memory."""

    __slots__ = ("blocks", "failures", "moved_bytes", "seconds")

    def __init__(self, series: CoreSeries, src: Tier, dst: Tier) -> None:
        labels = ("pack" if dst is src else "promote" if dst < src else "demote", TIERS[src], TIERS[dst])
        self.blocks = series.moved_blocks.cell(*labels)
        self.moved_bytes = series.moved_bytes.cell(*labels)
        self.failures = series.move_failures.cell(*labels)
        self.seconds = series.move_seconds.cell(*labels)


class CoreSeries:
    """All of them.

    Args:
        counter: makes a counter, from its name, help text and labels.
        histogram: makes a histogram of seconds, with its bounds after the text.
    """

    def __init__(self, counter: Callable[..., CounterVec], histogram: Callable[..., HistogramVec]) -> None:
        edge = ("direction", "src", "dst")
        evictions = counter("evictions", "Copies forgotten, by tier and reason.", "tier", "reason")
        self.moved_blocks = counter("moved_blocks", "Blocks promoted, demoted, or moved together in CPU memory (pack).", *edge)
        self.moved_bytes = counter("moved_bytes", "Bytes promoted, demoted, or moved together in CPU memory (pack).", *edge)
        self.move_failures = counter("move_failures", "Blocks that could not be promoted, demoted or moved together.", *edge)
        self.move_seconds = histogram("move", "Time to move a batch of blocks, between two tiers or together.", MOVE_S, *edge)
        refused = counter("nvme_not_admitted_blocks", "Blocks forgotten because they were not admitted to NVMe, by why.", "reason")
        past = counter("hbm_refused_blocks", "Blocks that went to CPU memory although their engine can open GPU memory.", "reason")
        self._not_in_hbm = {why: past.cell(why) for why in NOT_IN_HBM}
        failed = counter("failed_commands", "Decisions that could not be carried out: an extent without memory.", "command")
        self._not_admitted = {why: refused.cell(why) for why in (*REFUSALS, OTHER)}
        self._failed_commands = {name: failed.cell(name) for name in COMMANDS}
        self._evictions = {(tier, why): evictions.cell(TIERS[tier], why) for tier in Tier for why in EVICTION_REASONS}
        self.edges = {(src, dst): _EdgeCells(self, src, dst) for src in Tier for dst in Tier if src != dst or src is Tier.CPU}

    def take(self, counts: CoreCounts) -> None:
        """Bring the series up to what the core has counted."""
        for name, n in counts.failed_commands.items():
            self._failed_commands[name if name in self._failed_commands else OTHER].value = n
        for why, n in counts.not_in_hbm.items():
            self._not_in_hbm[why if why in self._not_in_hbm else OTHER].value = n
        for why, n in counts.not_admitted.items():
            self._not_admitted[why if why in self._not_admitted else OTHER].value = n
        evictions: dict[tuple[Tier, str], int] = dict.fromkeys(self._evictions, 0)
        for (tier, why), n in counts.evictions.items():
            why = EVICTION_ALIASES.get(why, why)
            evictions[tier, why if (tier, why) in evictions else OTHER] += n
        for key, n in evictions.items():
            self._evictions[key].value = n
        blocks = dict.fromkeys(self.edges, 0)
        failures = dict.fromkeys(self.edges, 0)
        for (src, dst, result), n in counts.moves.items():
            (blocks if result == "ok" else failures)[src, dst] += n
        for pair, edge in self.edges.items():
            edge.blocks.value, edge.failures.value = blocks[pair], failures[pair]
            edge.moved_bytes.value = counts.move_bytes.get(pair, 0)
