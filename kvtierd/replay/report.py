"""What a replay shows to people: a table, and a plot of tiers and hits over time."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any, Final

from rich.table import Table

COLOURS: Final = {"hbm": "tab:orange", "cpu": "tab:cyan", "nvme": "tab:purple"}
MAX_TENANT_ROWS: Final = 10
GIB: Final = 2**30


def result_table(figures: dict[str, Any]) -> Table:
    """The figures as a table of two columns."""
    table = Table(title="kvtierd replay", show_header=False)
    for name, value in (*_hit_rows(figures), *_move_rows(figures), *_tenant_rows(figures)):
        table.add_row(name, value)
    return table


def _hit_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    parameters = figures["parameters"]
    scale = parameters["time_scale"]
    pace = "at its own speed" if scale == 1 else f"{scale:g} times slower" if scale > 1 else f"{1 / scale:g} times faster"
    rows = [
        ("requests", f"{figures['requests']:,}, {figures['blocks']:,} blocks, {figures['distinct_blocks']:,} of them distinct"),
        ("trace", f"{pace}: {figures['trace_seconds']:,.0f} s"),
    ]
    if "capacity_blocks" in parameters:
        capacity = "  ".join(f"{tier} {n:,}" for tier, n in parameters["capacity_blocks"].items())
        rows.append(("capacity, blocks", capacity))
        options = [parameters["eviction"]]
        options += [f"turn bonus {parameters['turn_bonus_s']:g} s"] if parameters["turn_bonus_s"] else []
        options += ["second use"] if parameters["admission"] != "all" else []
        options += (
            [f"write budget {parameters['write_budget_bytes'] / GIB:,.0f} GiB a day"] if parameters["write_budget_bytes"] else []
        )
        rows.append(("policy", ", ".join(options)))
    ideal = f"a cache that forgets nothing: {figures['ideal_prefix_hit_ratio']:.2%}"
    rows.append(("prefix hit ratio", f"[bold]{figures['prefix_hit_ratio']:.2%}[/] ({ideal})"))
    return rows + [(f"  from {tier}", f"{ratio:.2%}") for tier, ratio in figures["hit_ratio_by_tier"].items()]


def _move_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("saved", f"{figures['saved_blocks']:,} blocks ({figures['unsaved_blocks']:,} more found no room)")]
    if figures["lost_blocks"]:
        rows.append(("lost between lookup and load", f"{figures['lost_blocks']:,} blocks"))
    rows += [(f"moved {edge}", f"{n / GIB:,.2f} GiB") for edge, n in figures.get("moved_bytes", {}).items()]
    rows.append(("written to NVMe", f"{figures['nvme_written_bytes'] / GIB:,.2f} GiB"))
    rows.append(("read from NVMe", f"{figures['nvme_read_bytes'] / GIB:,.2f} GiB"))
    for title, name in (("demotions", "demotions"), ("not admitted to NVMe", "not_admitted")):
        if figures.get(name):
            rows.append((title, "  ".join(f"{why} {n:,}" for why, n in figures[name].items())))
    for tier, reasons in figures.get("evictions", {}).items():
        rows.append((f"evictions from {tier}", "  ".join(f"{why} {n:,}" for why, n in reasons.items()) or "none"))
    if "wrong_bytes" in figures:
        wrong = figures["wrong_bytes"]
        colour = "green" if not wrong else "red"
        rows.append(("wrong bytes", f"[bold {colour}]{wrong:,}[/] of {figures['checked_bytes'] / 2**20:,.0f} MiB checked"))
        late = figures["late_s"]
        rows.append(("requests began late", f"p50 {late['p50']:.3f} s, p99 {late['p99']:.3f} s, at most {late['max']:.3f} s"))
    rows.append(("taken", f"{figures['seconds']:,.1f} s"))
    return rows


def _tenant_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    tenants = figures["tenants"]
    if len(tenants) < 2:
        return []
    first = sorted(tenants.items(), key=lambda item: -item[1]["blocks"])
    rows = [(f"  tenant {name}", f"{t['prefix_hit_ratio']:.2%} of {t['blocks']:,} blocks") for name, t in first[:MAX_TENANT_ROWS]]
    more = len(first) - len(rows)
    return [*rows, ("", f"… {more:,} more tenants")] if more else rows


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the occupancy of each tier and the hit ratio so far over time, as PNG, or as a page with the picture for ``.html``.

    Raises:
        ImportError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    samples = figures["samples"]
    times = [s["at_s"] for s in samples]
    capacity = figures["parameters"].get("capacity_blocks", {})
    for tier in figures["hit_ratio_by_tier"]:
        used = [s["used_blocks"].get(tier, 0) for s in samples]
        share = [100 * n / capacity[tier] for n in used] if tier in capacity else used
        upper.plot(times, share, color=COLOURS[tier], label=tier)
    upper.set_ylabel("occupancy, % of the tier" if capacity else "blocks held")
    upper.legend(loc="lower right")
    lower.plot(times, [100 * s["prefix_hit_ratio"] for s in samples], color="tab:green", label="so far")
    lower.axhline(100 * figures["ideal_prefix_hit_ratio"], color="tab:gray", linestyle=":", label="a cache that forgets nothing")
    lower.set_ylabel("prefix hit ratio, %")
    lower.set_xlabel("seconds of the trace")
    lower.set_ylim(bottom=0)
    lower.legend(loc="lower right")
    if path.suffix.lower() != ".html":
        figure.savefig(path, dpi=110, format="png")
        return
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in figures["parameters"].items())
    title = f"kvtierd replay: {figures['prefix_hit_ratio']:.2%} prefix hits"
    head = f'<!doctype html><meta charset="utf-8"><title>{title}</title><h1>{title}</h1>'
    path.write_text(f"{head}{svg[svg.index('<svg') :]}<table>{rows}</table>\n")
