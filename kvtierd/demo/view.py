"""What the demo shows: a live view on a terminal, lines elsewhere, a table and a plot at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvtierd.demo.content import BLOCK_BYTES, SHAPE
from kvtierd.demo.run import Progress
from kvtierd.model import Tier

TIERS: Final = (Tier.CPU, Tier.NVME)
LINE_EVERY_S: Final = 5.0
SHOWN_EVENTS: Final = 5
_COLOURS: Final = {Tier.CPU: "cyan", Tier.NVME: "magenta"}


class View:
    """Shows progress on a console; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._next_line_s = 0.0
        self._told_events = 0

    def __enter__(self) -> View:
        self._console.print(f"model: {SHAPE}")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Show the progress so far."""
        if self._live is not None:
            self._live.update(_picture(progress))
            return
        for at_s, text in progress.events[self._told_events :]:
            self._console.print(f"{at_s:6.1f} s  {text}", soft_wrap=True)
        self._told_events = len(progress.events)
        if time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_EVERY_S
            self._console.print(_line(progress), soft_wrap=True)


def _line(progress: Progress) -> str:
    at_s = progress.samples[-1].at_s if progress.samples else 0.0
    return f"{max(at_s, 0.0):6.1f} s  {len(progress.outcomes)}/{progress.total} requests  {_tiers(progress)}  {_hits(progress)}"


def _tiers(progress: Progress) -> str:
    if not progress.samples:
        return ""
    used = progress.samples[-1].used_bytes
    return "  ".join(f"{tier.name} {used.get(tier, 0) >> 20} MiB" for tier in TIERS)


def _hits(progress: Progress) -> str:
    asked = sum(o.asked for o in progress.outcomes)
    if not asked:
        return ""
    shares = "  ".join(f"{tier.name} {progress.hits(tier) / asked:.1%}" for tier in TIERS)
    return f"prefix hits: {shares}  wrong bytes: {progress.wrong_bytes}"


def _picture(progress: Progress) -> Group:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        "requests", ProgressBar(progress.total, len(progress.outcomes), width=50), f"{len(progress.outcomes)}/{progress.total}"
    )
    sample = progress.samples[-1] if progress.samples else None
    for tier in TIERS:
        used = sample.used_bytes.get(tier, 0) if sample else 0
        capacity = sample.capacity_bytes.get(tier, 1) if sample else 1
        bar = ProgressBar(capacity, used, width=50, complete_style=_COLOURS[tier])
        grid.add_row(tier.name, bar, f"{used >> 20:,} of {capacity >> 20:,} MiB")
    counters = dict(progress.counters)
    for name, value in (sample.counters if sample else {}).items():
        counters[name] = counters.get(name, 0.0) + value
    saved = sum(o.saved for o in progress.outcomes) * BLOCK_BYTES / 1e9
    loaded = sum(sum(o.hits.values()) for o in progress.outcomes) * BLOCK_BYTES / 1e9
    moves = f"saved {saved:.2f} GB   loaded {loaded:.2f} GB   demoted {counters.get('demotions', 0):,.0f}   " + (
        f"promoted {counters.get('promotions', 0):,.0f} blocks"
    )
    events = Text("\n".join(f"{at_s:6.1f} s  {text}" for at_s, text in progress.events[-SHOWN_EVENTS:]), style="yellow")
    return Group(Panel(Group(grid, Text(moves), Text(_hits(progress))), title="kvtierd demo"), events)


def result_table(figures: dict[str, Any]) -> Table:
    """The figures at the end."""
    table = Table(title="kvtierd demo", show_header=False)
    by_tier = figures["hit_ratio_by_tier"]
    wrong = figures["wrong_bytes"]
    rows = [
        ("requests", f"{figures['requests']:,} ({figures['blocks_asked']:,} blocks asked for)"),
        (
            "prefix hit ratio",
            f"{figures['prefix_hit_ratio']:.1%} (a cache that forgets nothing: {figures['ideal_prefix_hit_ratio']:.1%})",
        ),
        ("  from CPU", f"{by_tier['cpu']:.1%}"),
        ("  from NVMe", f"{by_tier['nvme']:.1%}"),
        ("saved", f"{figures['saved_gb']:.2f} GB at {figures['save_gb_per_s']:.2f} GB/s a client"),
        ("loaded", f"{figures['loaded_gb']:.2f} GB at {figures['load_gb_per_s']:.2f} GB/s a client"),
        ("demotions", f"{figures['demotions']:,} blocks"),
        ("promotions", f"{figures['promotions']:,} blocks"),
        ("evictions", f"{figures['evictions']:,} copies"),
        (
            "restarts survived",
            f"{figures['restarts_survived']} ({figures['nvme_hits_after_restart']:,} blocks from NVMe afterwards)",
        ),
        ("wrong bytes", f"[bold {'green' if not wrong else 'red'}]{wrong}[/]"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def plot(progress: Progress, path: Path) -> None:
    """Draw the occupancy of the tiers over time. Raises ImportError without matplotlib, OSError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for tier, colour in ((Tier.CPU, "tab:cyan"), (Tier.NVME, "tab:purple")):
        times = [s.at_s for s in progress.samples]
        axes.plot(times, [s.used_bytes.get(tier, 0) / 2**20 for s in progress.samples], color=colour, label=tier.name)
        capacity = max((s.capacity_bytes.get(tier, 0) for s in progress.samples), default=0) / 2**20
        axes.axhline(capacity, color=colour, linestyle=":", linewidth=1)
    if progress.killed_at_s is not None:
        axes.axvspan(progress.killed_at_s, progress.back_at_s or progress.killed_at_s, color="tab:red", alpha=0.3)
        axes.annotate(
            "killed and restarted", (progress.killed_at_s, 0.5), xycoords=("data", "axes fraction"), rotation=90, ha="right"
        )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("MiB in use (dotted: capacity)")
    axes.set_title("kvtierd demo: occupancy of the tiers")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
