"""How the command line writes: sizes, times, tables and JSON. Text of others never reaches the terminal unescaped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtierd.v1 import kvtier_pb2

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "PIPE_WIDTH",
    "WIDE",
    "check_writable",
    "clean",
    "console",
    "counted",
    "format_bytes",
    "format_count",
    "format_seconds",
    "make_table",
    "not_in_force",
    "print_json",
    "tier_name",
]

PIPE_WIDTH = 100_000
"""Columns where there is no terminal, so that nothing is wrapped or cut in logs and pipes."""
WIDE = 150
"""Columns from which on tables show whole keys."""
_STEPS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(n: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    value, unit = float(n), 0
    while abs(value) >= 1024 and unit < len(_STEPS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_STEPS[unit]}" if unit == 0 or value >= 100 else f"{value:.1f} {_STEPS[unit]}"


def format_count(n: float) -> str:
    """``1234567`` as ``1,234,567``."""
    return f"{n:,.0f}"


def counted(n: int, one: str, many: str = "") -> str:
    """``1 block``, ``2 blocks``, ``1,234 copies``."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def format_seconds(seconds: float) -> str:
    """``3725`` as ``1 h 2 min``, ``0.25`` as ``250 ms``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if hours == 0:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def clean(text: str) -> str:
    """Text from a client or a file with everything that could steer a terminal replaced by ``?``."""
    return "".join(c if c.isprintable() else "?" for c in text)


def not_in_force(tenant: str, problem: str) -> str:
    """A line about limits of a tenant that were set and do not hold."""
    return clean(f"not in force for {tenant}: {problem}")


def console(*, stderr: bool = False) -> Console:
    """A rich console on the current standard output; plain, and so wide that nothing wraps, where that is no terminal."""
    from rich.console import Console  # not every command shows anything: a daemon's start does without

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, soft_wrap=False)


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, fold: bool = False) -> Table:
    """A table; a column whose name starts with ``>`` is aligned to the right and never cut. Cells are text or rich ``Text``.

    Where the terminal is too narrow, text is cut with an ellipsis, or with ``fold`` goes on in the next line.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if right else "left", no_wrap=right, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else _cell(str(cell), fold) for cell in row))
    return table


def _cell(text: str, fold: bool) -> Text:
    from rich.text import Text

    return Text(clean(text)) if fold else Text(clean(text), no_wrap=True, overflow="ellipsis")


def check_writable(path: Path) -> None:
    """Raise OSError where a file could not be written, before the work whose result it is to hold. Leaves no new file behind."""
    known = path.exists()
    if known and not path.is_file():
        return  # a pipe or a device: to open one is to use it
    with path.open("a"):
        pass
    if not known:
        path.unlink()


def print_json(value: Any, *, one_line: bool = False) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(value, indent=None if one_line else 2, ensure_ascii=False))


def tier_name(value: int) -> str:
    """Lower-case name of the wire's tier; tiers that this version does not know keep their number."""
    found = kvtier_pb2.Tier.DESCRIPTOR.values_by_number.get(value)
    return found.name.removeprefix("TIER_").lower() if found is not None else f"tier {value}"
