"""The run on a terminal: progress while it lasts, tables at its end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.engines.figures import hits, quantiles_ms
from loadtest.engines.plan import Settings
from loadtest.engines.run import Progress
from loadtest.engines.watch import Watched

RECENT_S = 5.0
LINE_EVERY_S = 10.0


class View:
    """Shows progress: a live picture on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console = console
        self._settings = settings
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._next_s = 0.0

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress, watched: Watched) -> None:
        """Called several times a second."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + (0.5 if self._live is not None else LINE_EVERY_S)
        now_s = progress.now_s
        recent = [r for r in progress.records[-5000:] if r.ended_s > now_s - RECENT_S]
        found = hits(recent)
        ms = quantiles_ms(c.ended_s - c.meant_s for r in recent for c in r.calls if c.name == "load")
        sample = watched.samples[-1] if watched.samples else None
        tiers = "no answer" if sample is None or not sample.used_bytes else ", ".join(
            f"{name} {used / 2**20:.0f}/{sample.capacity_bytes[name] / 2**20:.0f} MiB" for name, used in sample.used_bytes.items()
        )  # fmt: skip
        now = [e.fault.kind.value for e in progress.events if e.ended_s is None]
        wrong = sum(r.wrong_bytes for r in progress.records)
        text = (
            f"{max(now_s, 0):5.1f} of {self._settings.seconds:.0f} s  {len(progress.records)} of {progress.total} requests  "
            f"hits {found['hit_ratio']:.0%}  load p50 {ms.get('p50', 0):.1f} p99 {ms.get('p99', 0):.1f} ms  {tiers}  "
            f"{wrong} wrong bytes" + (f"  NOW: {', '.join(now)}" if now else "")
        )
        if self._live is None:
            self._console.print(text, highlight=False, soft_wrap=True)
        else:
            bar = ProgressBar(total=self._settings.seconds, completed=min(max(now_s, 0), self._settings.seconds))
            self._live.update(Group(bar, Text(text)))


def again(fault: dict[str, Any]) -> str:
    """When the first hit came after a fault."""
    seconds = fault["hits_again_after_s"]
    return "none came" if seconds is None else f"{seconds:.2f}"


def _row(name: str, count: int, figures: dict[str, float], alone: dict[str, float]) -> list[str]:
    return [name, f"{count:,}", *(f"{figures[q]:,.1f}" for q in ("p50", "p90", "p99", "p99_9", "max")), f"{alone['p99']:,.1f}"]


def tables(found: dict[str, Any]) -> list[Table | str]:
    """The result for people."""
    speed = Table(title="Latency, ms, from the moment when a call was meant to begin")
    for name in ("call", "count", "p50", "p90", "p99", "p99.9", "max", "p99 of the call alone"):
        speed.add_column(name, justify="left" if name == "call" else "right")
    for name, row in found["latency"].items():
        speed.add_row(*_row(name, row["count"], row["ms"], row["call_alone_ms"]))
    hit = Table(title="Hit ratio, of blocks")
    tiers = list(found["hits"]["by_tier"])
    for name in ("tenant", "blocks asked for", "hits", *tiers):
        hit.add_column(name, justify="left" if name == "tenant" else "right")
    for name, row in [("all", found["hits"]), *found["tenants"].items()]:
        hit.add_row(
            name, f"{row['asked_blocks']:,}", f"{row['hit_ratio']:.1%}", *(f"{row['by_tier'].get(t, 0):.1%}" for t in tiers)
        )
    shown: list[Table | str] = [speed, hit]
    if found["faults"]:
        faults = Table(title="Faults")
        for name in ("at, s", "what", "until, s", "first hit after its end, s"):
            faults.add_column(name, justify="left" if name == "what" else "right")
        for row in found["faults"]:
            faults.add_row(f"{row['began_s']:.1f}", row["what"], f"{row['ended_s']:.1f}", again(row))
        shown.append(faults)
    if found["troubles"]:
        troubles = Table(title="What was not served", show_header=False)
        for name, count in found["troubles"].items():
            troubles.add_row(name, f"{count:,}")
        shown.append(troubles)
    side = found["generator"]
    busy = ", ".join(f"{name} {share['median']:.0%} (at most {share['max']:.0%})" for name, share in side["busy_cores"].items())
    shown.append(
        f"{found['wrong_bytes']} wrong bytes of {found['checked_bytes'] / 2**20:,.0f} MiB checked. Load generator: late by p99 "
        f"{side['late_ms'].get('p99', 0)} ms; {busy} of a core; requests waited for a thread of their engine p99 "
        f"{side['waited_for_a_thread_ms'].get('p99', 0)} ms"
    )
    return shown
