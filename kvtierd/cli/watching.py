"""Looking at a daemon again and again: drawn over on a terminal, one after the other in a pipe or as JSON lines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from kvtierd.cli.output import clean, print_json
from kvtierd.errors import DaemonUnavailableError

__all__ = ["watch"]

T = TypeVar("T")


def watch(
    out: Console, look: Callable[[], T], render: Callable[[T], RenderableType], facts: Callable[[T], dict[str, Any]], *,
    first: RenderableType, every_s: float, as_json: bool, count: int | None = None, screen: bool = False,
) -> None:  # fmt: skip
    """Show look after look until Ctrl-C. A daemon that goes away is waited for.

    Args:
        out: where to.
        look: asks the daemon.
        render: what people see of a look.
        facts: the same as JSON values.
        first: what a terminal shows until the first look.
        every_s: pause before each look.
        as_json: write one JSON object a line.
        count: end after so many looks.
        screen: take the whole terminal.
    """
    live = not as_json and out.is_terminal
    looks = 0
    try:
        with Live(first, console=out, auto_refresh=False, screen=screen) if live else contextlib.nullcontext() as drawn:
            while count is None or looks < count:
                time.sleep(every_s)
                try:
                    seen = look()
                except DaemonUnavailableError as e:
                    if drawn is None:
                        click.echo(f"{e}; waiting for it", err=True)
                    else:
                        drawn.update(Text(f"{clean(str(e))}; waiting for it", style="red"), refresh=True)
                    continue
                looks += 1
                if as_json:
                    print_json(facts(seen), one_line=True)
                elif drawn is None:
                    out.print(render(seen), Text(""))
                else:
                    drawn.update(render(seen), refresh=True)
    except KeyboardInterrupt:
        return
