"""What happened between two scrapes of a daemon: rates of counters and quantiles of histograms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Scrape", "Window", "parse"]

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """All samples of one scrape: for each name, values by labels; and when it was made (monotonic seconds)."""

    at_s: float
    samples: Mapping[str, Mapping[Labels, float]]

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 when there is none."""
        return self.samples.get(name, {}).get(frozenset(labels.items()), 0.0)

    def sum(self, name: str, **labels: str) -> float:
        """All samples of a name that have these labels."""
        wanted = labels.items()
        return sum(value for have, value in self.samples.get(name, {}).items() if wanted <= have)

    def rows(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each sample of a name."""
        for labels, value in self.samples.get(name, {}).items():
            yield dict(labels), value


def parse(text: str, at_s: float) -> Scrape:
    """Read Prometheus's text format.

    Raises:
        ValueError: it is something else.
    """
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = float(sample.value)
    return Scrape(at_s, samples)


@dataclass(frozen=True)
class Window:
    """Two scrapes of the same daemon; of a daemon that started anew in between only the later one counts."""

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        """Between the scrapes; never 0."""
        return max(self.after.at_s - self.before.at_s, 1e-9)

    def _gone_by(self, name: str, labels: Mapping[str, str]) -> float:
        before, after = self.before.sum(name, **labels), self.after.sum(name, **labels)
        return after - before if after >= before else after

    def count(self, name: str, **labels: str) -> float:
        """How much a counter has grown, over all samples that have these labels."""
        return self._gone_by(name, labels)

    def rate(self, name: str, **labels: str) -> float:
        """The same per second."""
        return self._gone_by(name, labels) / self.seconds

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """A quantile of what a histogram has seen in between, as Prometheus's ``histogram_quantile`` gives it; None for nothing."""
        bounds = sorted({float(have["le"]) for have, _ in self.after.rows(f"{name}_bucket") if labels.items() <= have.items()})
        counts = dict.fromkeys(bounds, 0.0)
        for have, value in self.after.rows(f"{name}_bucket"):
            if labels.items() <= have.items():
                earlier = self.before.value(f"{name}_bucket", **have)
                counts[float(have["le"])] += value - earlier if value >= earlier else value
        total = counts[bounds[-1]] if bounds else 0.0
        if not total:
            return None
        rank, low, below = share * total, 0.0, 0.0
        for bound in bounds:
            if counts[bound] >= rank:
                if math.isinf(bound):
                    return low  # beyond the last bound: that is all that is known
                inside = counts[bound] - below
                return low + (bound - low) * ((rank - below) / inside if inside else 1.0)
            low, below = bound, counts[bound]
        return low
