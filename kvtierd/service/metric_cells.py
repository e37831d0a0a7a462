"""Counters and histograms that cost well under a microsecond an event.

prometheus_client takes a lock and a name lookup for each increment. The daemon counts on one event loop only, so plain
attributes do: a caller holds on to a cell and adds to it; a scrape copies the cells into the library's own families, which
write the text. Reading from another thread is safe: a cell only ever grows, and a list is copied in one step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

__all__ = ["CounterCell", "CounterVec", "HistogramCell", "HistogramVec"]


class CounterCell:
    """One series of a counter. Callers add to ``value`` and never subtract."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class HistogramCell:
    """One series of a histogram; ``bounds`` are the upper ends of its buckets, without the infinite one."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class CounterVec:
    """A counter with labels. ``name`` ends in ``_total``; the owner keeps the label values bounded."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        assert name.endswith("_total"), f"counter {name} must end in _total"
        self.name = name
        self._text = text
        self._labels = tuple(labels)
        self._cells: dict[tuple[str, ...], CounterCell] = {}
        self._dropped: float = 0

    def drop(self, first_label: str) -> None:
        """Forget the series whose first label has this value; :meth:`sum` goes on counting what they had."""
        for values in [v for v in self._cells if v[0] == first_label]:
            self._dropped += self._cells.pop(values).value

    def cell(self, *values: str) -> CounterCell:
        """The series with these label values, made at zero when it is new."""
        assert len(values) == len(self._labels), f"{self.name} takes labels {self._labels}, got {values}"
        found = self._cells.get(values)
        if found is None:
            found = self._cells[values] = CounterCell()
        return found

    def cells(self) -> list[tuple[tuple[str, ...], CounterCell]]:
        """All series; a copy, so that the loop may add series meanwhile."""
        return list(self._cells.items())

    def sum(self) -> float:
        """Total over all series, those that were dropped too."""
        return self._dropped + sum(cell.value for _, cell in self.cells())

    def family(self, *, empty: bool = False) -> Metric:
        """The library's family for a scrape; ``empty`` leaves the samples out."""
        family = CounterMetricFamily(self.name, self._text, labels=self._labels)
        if not empty:
            for values, cell in self.cells():
                family.add_metric(values, cell.value)
        return family


class HistogramVec:
    """A histogram with labels; ``name`` ends in its unit."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        assert list(bounds) == sorted(set(bounds)), f"buckets of {name} must rise"
        self.name = name
        self._text = text
        self._labels = tuple(labels)
        self._bounds = tuple(bounds)
        self._le = [*(str(float(b)) for b in bounds), "+Inf"]
        self._cells: dict[tuple[str, ...], HistogramCell] = {}

    def cell(self, *values: str) -> HistogramCell:
        """The series with these label values, made empty when it is new."""
        assert len(values) == len(self._labels), f"{self.name} takes labels {self._labels}, got {values}"
        found = self._cells.get(values)
        if found is None:
            found = self._cells[values] = HistogramCell(self._bounds)
        return found

    def family(self, *, empty: bool = False) -> Metric:
        """The library's family for a scrape; ``empty`` leaves the samples out."""
        family = HistogramMetricFamily(self.name, self._text, labels=self._labels)
        if not empty:
            for values, cell in list(self._cells.items()):
                family.add_metric(values, list(self._cumulative(cell)), cell.total)
        return family

    def _cumulative(self, cell: HistogramCell) -> Iterator[tuple[str, float]]:
        below = 0
        for le, count in zip(self._le, cell.counts[:], strict=True):
            below += count
            yield le, below
