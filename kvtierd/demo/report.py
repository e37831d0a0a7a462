"""What the demo leaves behind: a table and a plot."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.table import Table

from kvtierd.demo.progress import TIERS, Progress
from kvtierd.model import Tier


def result_table(figures: dict[str, Any]) -> Table:
    """The figures at the end."""
    table = Table(title="kvtierd demo", show_header=False)
    by_tier = figures["hit_ratio_by_tier"]
    wrong = figures["wrong_bytes"]
    ideal = f"a cache that forgets nothing: {figures['ideal_prefix_hit_ratio']:.1%}"
    of_all = "" if figures["requests"] == figures["requests_in_trace"] else f" of {figures['requests_in_trace']:,}"
    after = f"{figures['recovered_blocks']:,} blocks recovered, {figures['nvme_hits_after_restart']:,} loaded from NVMe afterwards"
    rows = [
        ("requests", f"{figures['requests']:,}{of_all} ({figures['blocks_asked']:,} blocks of 1 MiB)"),
        ("prefix hit ratio", f"{figures['prefix_hit_ratio']:.1%} ({ideal})"),
        ("  from CPU", f"{by_tier['cpu']:.1%}"),
        ("  from NVMe", f"{by_tier['nvme']:.1%}"),
        ("saved", f"{figures['saved_gb']:.2f} GB at {figures['save_gb_per_s']:.2f} GB/s a client"),
        ("loaded and checked", f"{figures['loaded_gb']:.2f} GB at {figures['load_gb_per_s']:.2f} GB/s a client"),
        ("not saved", f"{figures['rejected']:,} blocks (no daemon, or no space in time)"),
        ("demotions", f"{figures['demotions']:,} blocks"),
        ("promotions", f"{figures['promotions']:,} blocks"),
        ("evictions", f"{figures['evictions']:,} copies"),
        ("restarts survived", f"{figures['restarts_survived']} ({after})"),
        ("wrong bytes", f"[bold {'green' if not wrong else 'red'}]{wrong:,}[/]"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def plot(progress: Progress, path: Path) -> None:
    """Draw the tiers and the hits over time. Raises ImportError without matplotlib, OSError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    colours = {Tier.CPU: "tab:cyan", Tier.NVME: "tab:purple"}
    times = [s.at_s for s in progress.samples]
    for tier in TIERS:
        used = [s.used_bytes.get(tier, 0) / 2**20 for s in progress.samples]
        capacity = max((s.capacity_bytes.get(tier, 0) for s in progress.samples), default=0) / 2**20
        upper.plot(times, used, color=colours[tier], label=tier.name)
        upper.axhline(capacity, color=colours[tier], linestyle=":", linewidth=1)
    dirty = [s.dirty_bytes.get(Tier.CPU, 0) / 2**20 for s in progress.samples]
    upper.fill_between(times, dirty, color=colours[Tier.CPU], alpha=0.25, linewidth=0, label="only in CPU memory")
    outcomes = sorted(progress.outcomes, key=lambda o: o.at_s)
    lower.stackplot(
        [o.at_s for o in outcomes],
        *(list(accumulate(outcome.hits.get(tier, 0) for outcome in outcomes)) for tier in TIERS),
        labels=[f"from {tier.name}" for tier in TIERS],
        colors=[colours[tier] for tier in TIERS],
        alpha=0.7,
    )
    if progress.killed_at_s is not None:
        end_s = progress.back_at_s or progress.took_s
        for axes in (upper, lower):
            axes.axvspan(progress.killed_at_s, end_s, color="tab:red", alpha=0.3, linewidth=0)
        upper.annotate(
            "kill -9 and restart", (progress.killed_at_s, 0.5), xycoords=("data", "axes fraction"), rotation=90, ha="right"
        )
    upper.set_xlim(left=0)
    upper.set_ylim(bottom=0)
    upper.set_ylabel("MiB in use (dotted: capacity)")
    upper.set_title("kvtierd demo: the tiers, and what was loaded from them")
    upper.legend(loc="upper left")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("seconds")
    lower.set_ylabel("MiB loaded and checked")
    lower.legend(loc="upper left")
    figure.savefig(path, dpi=120)
