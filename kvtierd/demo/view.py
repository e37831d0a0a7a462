"""What the demo shows while it runs: a live view on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvtierd.demo.content import SHAPE
from kvtierd.demo.progress import TIERS, Progress, Sample
from kvtierd.model import Tier

LINE_EVERY_S: Final = 5.0
CURVE_CHARS: Final = 24
"""Characters of a tier's occupancy over time."""
BAR_CHARS: Final = 32
COLOURS: Final = {Tier.CPU: "cyan", Tier.NVME: "magenta"}
_STEPS: Final = " ▁▂▃▄▅▆▇█"


class View:
    """Shows progress on a console; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._next_line_s = 0.0
        self._told_events = 0

    def __enter__(self) -> View:
        self._console.print(f"model: {SHAPE}", highlight=False, soft_wrap=True)
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Show the progress so far."""
        if self._live is not None:
            self._live.update(picture(progress))
        # With a live view events scroll past above it, so that they are still there when it has gone.
        for at_s, text in progress.events[self._told_events :]:
            self._print(f"{at_s:6.1f} s  {text}", "bold yellow")
        self._told_events = len(progress.events)
        if self._live is None and time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_EVERY_S
            self._print(_line(progress))

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(Text(text), style=style, highlight=False, soft_wrap=True)


def _line(progress: Progress) -> str:
    at_s = progress.samples[-1].at_s if progress.samples else 0.0
    used = progress.samples[-1].used_bytes if progress.samples else {}
    tiers = "  ".join(f"{tier.name} {used.get(tier, 0) >> 20} MiB" for tier in TIERS)
    return f"{max(at_s, 0.0):6.1f} s  {len(progress.outcomes)}/{progress.total} requests  {tiers}  {_hits(progress)}"


def _hits(progress: Progress) -> str:
    asked = progress.asked
    shares = "  ".join(f"{tier.name} {progress.hits(tier) / asked if asked else 0.0:.1%}" for tier in TIERS)
    return f"prefix hits: {shares}  wrong bytes: {progress.wrong_bytes}"


def curve(samples: list[Sample], tier: Tier, chars: int) -> str:
    """Occupancy of a tier over the whole time, one character a step."""
    if not samples:
        return " " * chars
    begin_s, span_s = samples[0].at_s, max(samples[-1].at_s - samples[0].at_s, 1e-9)
    shares = [0.0] * chars
    for sample in samples:
        place = min(int((sample.at_s - begin_s) / span_s * chars), chars - 1)
        shares[place] = max(shares[place], sample.used_bytes.get(tier, 0) / max(sample.capacity_bytes.get(tier, 0), 1))
    return "".join(_STEPS[min(round(share * (len(_STEPS) - 1)), len(_STEPS) - 1)] for share in shares)


def picture(progress: Progress) -> Panel:
    """The live view."""
    grid = Table.grid(padding=(0, 1))
    done = len(progress.outcomes)
    grid.add_row("requests", ProgressBar(max(progress.total, 1), done, width=BAR_CHARS), f"{done}/{progress.total}", "")
    sample = progress.samples[-1] if progress.samples else None
    away = progress.killed_at_s is not None and progress.back_at_s is None
    for tier in TIERS:
        used = sample.used_bytes.get(tier, 0) if sample else 0
        dirty = sample.dirty_bytes.get(tier, 0) if sample else 0
        capacity = sample.capacity_bytes.get(tier, 0) if sample else 0
        text = f"{used >> 20:>5,} of {capacity >> 20:,} MiB" + (f", {dirty >> 20:,} only here" if tier is Tier.CPU else "")
        bar = ProgressBar(max(capacity, 1), used, width=BAR_CHARS, complete_style=COLOURS[tier], finished_style=COLOURS[tier])
        grid.add_row(tier.name, bar, Text(curve(progress.samples, tier, CURVE_CHARS), style=COLOURS[tier]), text)
    speed = f"saved {progress.saved_gb:.2f} GB at {progress.save_gb_per_s:.2f} GB/s   " + (
        f"loaded and checked {progress.loaded_gb:.2f} GB at {progress.load_gb_per_s:.2f} GB/s"
    )
    moves = f"demoted {progress.counter('demotions'):,}   promoted {progress.counter('promotions'):,}   " + (
        f"evicted {progress.counter('kvtierd_evictions_total'):,}"
    )
    daemon = Text("daemon: ") + (Text("killed", style="bold red") if away else Text("serving", style="green"))
    for number, attached in enumerate(progress.attached):
        state = Text("attached", style="green") if attached else Text("without a cache", style="bold red")
        daemon += Text(f"   client-{number}: ") + state
    body: list[RenderableType] = [grid, Text(""), Text(_hits(progress), style="bold"), Text(speed), Text(moves), daemon]
    return Panel(Group(*body), title="kvtierd demo", expand=False)
