"""The page docs/metrics.md, made from the metrics themselves: ``python -m kvtierd.service.metrics_reference > docs/metrics.md``."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from kvtierd.service.metric_labels import MAX_TENANT_LABELS
from kvtierd.service.metrics import Metrics

__all__ = ["reference"]

OPEN_LABELS: Final = {
    "tenant": f"a tenant's name: {MAX_TENANT_LABELS} in all, the configured ones and those that hold most; "
    "`other` for the rest, so no tenant can be called that",
    "folder": "a configured folder of the NVMe tier",
    "version": "the daemon's",
    "protocol": "of its API",
    "python": "its version",
    "code": "gRPC status, upper case",
    "method": "RPC without its service; `other` for what is not kvtierd's",
    "command": "what the core had decided",
}
"""Labels whose values are explained rather than listed."""
OWN_LABELS: Final = frozenset(["le"])
HEAD: Final = """# Metrics

`kvtierd serve` shows these on `http://127.0.0.1:9464/metrics` (`server.metrics` in the configuration), beside the usual ones of the
process and of Python; `kvtierd top` shows the most telling ones as they change. Every series exists from the start, at zero.
Counters count since the daemon's start. [deploy/prometheus](../deploy/prometheus) has recording and alerting rules,
[deploy/grafana](../deploy/grafana) a dashboard. What the connector tells inside of vLLM is in [vllm.md](vllm.md).

This page is made from the code: `make docs`.
"""


def reference() -> str:
    """The page as Markdown."""
    families = Metrics(CollectorRegistry()).collect()
    parts = [HEAD]
    for kind, title in (("gauge", "Gauges"), ("counter", "Counters"), ("histogram", "Histograms")):
        rows = [_row(family) for family in sorted(families, key=lambda f: f.name) if family.type == kind]
        parts.append(f"## {title}\n\n| name | labels | |\n| --- | --- | --- |\n" + "".join(rows))
    parts.append(_labels(families))
    return "\n".join(parts)


def _label_names(family: Metric) -> tuple[str, ...]:
    return tuple(getattr(family, "_labelnames"))  # noqa: B009 - the library keeps them, but tells the type checker nothing of it


def _values(families: list[Metric]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in families:
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label not in OWN_LABELS:
                    found.setdefault(label, set()).add(value)
    return found


def _row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = ", ".join(f"`{label}`" for label in _label_names(family))
    return f"| `{name}` | {labels} | {family.documentation} |\n"


def _labels(families: list[Metric]) -> str:
    known = _values(families)
    names = sorted({label for family in families for label in _label_names(family)})
    rows = []
    for name in names:
        values = OPEN_LABELS.get(name) or ", ".join(f"`{value}`" for value in sorted(known.get(name, ())))
        rows.append(f"| `{name}` | {values} |\n")
    return "## Labels\n\n| label | values |\n| --- | --- |\n" + "".join(rows)


if __name__ == "__main__":
    print(reference(), end="")
