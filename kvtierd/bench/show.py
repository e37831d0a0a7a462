"""The report as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvtierd.bench.index import SMALL_INDEX
from kvtierd.bench.measure import Report, Row


def show(report: Report, console: Console) -> None:
    """Print a report."""
    env = report.values["environment"]
    console.print(
        f"{env['cpu']}, {env['cores']} cores, Linux {env['kernel']}, Python {env['python']}, kvtierd {env['kvtierd']}"
        + (f", {env['filesystem']}" if env.get("filesystem") else ""),
        highlight=False,
        soft_wrap=True,
    )
    if env["source_changed"]:
        console.print("[red]The code of kvtierd changed during this run: the figures belong to no single version.[/red]")
    speeds = [row for row in report.rows if row.unit == "GB/s"]
    others = [row for row in report.rows if row.unit != "GB/s"]
    if speeds:
        console.print(_speeds(speeds, report.values.get("copy_threads")))
    if others:
        console.print(_costs(others, report.values.get("index_blocks", SMALL_INDEX)))


def _speeds(rows: list[Row], copy_threads: object) -> Table:
    caption = "machine: a copy by one thread, or raw O_DIRECT"
    if copy_threads is not None:
        caption += f"; the client copies with {copy_threads}"
    table = Table(title="Speed against the machine's own, medians", caption=caption)
    table.add_column("measured")
    for name in ("machine GB/s", "kvtierd GB/s", "ratio", "target"):
        table.add_column(name, justify="right")
    for row in rows:
        colour = {None: "", True: "green", False: "red"}[row.met]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(
            row.name,
            "" if row.limit is None else f"{row.limit:.2f}",
            f"{row.figure:.2f}",
            f"[{colour}]{ratio}[/{colour}]" if colour else ratio,
            "" if row.target is None else f"≥ {row.target:g}",
        )
    return table


def _costs(rows: list[Row], blocks: int) -> Table:
    table = Table(title="Index")
    table.add_column("measured")
    for name in (f"{SMALL_INDEX:,} blocks or none", f"{blocks:,} blocks", "unit", "times"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            "" if row.limit is None else f"{row.limit:.3g}",
            f"{row.figure:.3g}",
            row.unit,
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
    return table
