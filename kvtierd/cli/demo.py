"""``kvtierd demo``: the main job, to be seen in one minute."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from kvtierd.cli import CliConfigError, CliError
from kvtierd.cli.options import NumberRange
from kvtierd.config import parse_size
from kvtierd.demo.content import BLOCK_BYTES
from kvtierd.demo.daemon import filesystem_of
from kvtierd.demo.progress import summary, verdict
from kvtierd.demo.report import plot, result_table
from kvtierd.demo.run import Demo, DemoError, Options
from kvtierd.demo.trace import EXCERPT_REQUESTS, default_trace
from kvtierd.demo.view import View
from kvtierd.demo.worker import BATCH
from kvtierd.lifetime import keep, scratch_folder
from kvtierd.replay.trace import Request, TraceError, read_trace

LATE_S: Final = 30.0
"""How much longer than planned the replay of the excerpt may take on a slow machine."""


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


@click.command()
@click.option(
    "--trace", "trace_path", type=click.Path(path_type=Path), help="Trace in the Mooncake schema; a built-in excerpt without."
)
@click.option(
    "--limit", type=click.IntRange(1), help=f"Only so many requests; all of a --trace, {EXCERPT_REQUESTS} of the excerpt without."
)
@click.option("--seconds", type=NumberRange(1, 86_400), default=40.0, show_default=True, help="Time to replay the trace in.")
@click.option(
    "--time-limit",
    type=NumberRange(1, 86_400),
    help=f"Seconds after which a late replay is cut short; --seconds + {LATE_S:.0f} for the excerpt, none for a --trace without.",
)
@click.option("--cpu-capacity", callback=_size, default="256MiB", show_default=True, help="CPU tier.")
@click.option("--nvme-capacity", callback=_size, default="1GiB", show_default=True, help="NVMe tier.")
@click.option("--cpu-ttl", type=NumberRange(0.1), default=5.0, show_default=True, help="Idle seconds in CPU memory.")
@click.option("--clients", type=click.IntRange(1, 64), default=2, show_default=True, help="Client processes.")
@click.option("--seed", type=int, default=1, show_default=True, help="Makes keys and contents.")
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(path_type=Path),
    default=Path("kvtierd-demo.png"),
    show_default=True,
    help="Plot to write.",
)
@click.option("--no-plot", is_flag=True, help="Write no plot.")
@click.option("--no-kill", is_flag=True, help="Do not kill the daemon half-way.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to put sockets and the NVMe pool; the cache folder without.")
@click.option("--keep", is_flag=True, help="Keep that folder, with the daemon's log and the pool, at the end.")
@click.option("--corrupt-one", is_flag=True, help="Flip one loaded bit before the check: the demo must then fail.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output; the rest goes to standard error."
)
def demo(**given: Any) -> None:
    """Replay a conversation trace through a daemon with small tiers.

    Client processes save and load real bytes through shared memory and check every byte that they load; half-way the daemon is
    killed with SIGKILL and started again. Ends with status 1 when anything was wrong.
    """
    try:
        requests = read_trace(given["trace_path"] or default_trace(), given["limit"] or _usual_limit(given))
    except TraceError as e:
        raise CliConfigError(str(e)) from e
    least = BATCH * BLOCK_BYTES * given["clients"]
    if given["cpu_capacity"] < least:
        raise CliConfigError(f"--cpu-capacity: {given['clients']} clients need at least {least >> 20}MiB")
    if not given["no_plot"]:
        given["no_plot"] = not _can_plot(given["plot_path"])
    base = given["folder"] or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtierd"
    console = Console(stderr=given["as_json"])
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder(base, "demo-"))
        except OSError as e:
            raise CliConfigError(f"cannot make a folder in {base}: {e.strerror}; name another with --folder") from e
        if given["keep"]:
            keep(folder)
        try:
            wrong = _run(given, requests, folder, console)
        except DemoError as e:
            raise CliError(str(e)) from e
        if given["keep"]:
            console.print(f"kept: {folder}", soft_wrap=True, highlight=False)
    if wrong:
        raise CliError(wrong)


def _usual_limit(given: dict[str, Any]) -> int | None:
    return EXCERPT_REQUESTS if given["trace_path"] is None else None


def _run(given: dict[str, Any], requests: list[Request], folder: Path, console: Console) -> str:
    """Run the demo and show it. Returns what was wrong."""
    excerpt = given["trace_path"] is None and len(requests) <= EXCERPT_REQUESTS
    options = Options(
        requests=requests,
        folder=folder,
        cpu_bytes=given["cpu_capacity"],
        nvme_bytes=given["nvme_capacity"],
        cpu_ttl_s=given["cpu_ttl"],
        clients=given["clients"],
        seed=given["seed"],
        seconds=given["seconds"],
        time_limit_s=given["time_limit"] or (given["seconds"] + LATE_S if excerpt else None),
        kill=not given["no_kill"],
        keep=given["keep"],
        corrupt_one=given["corrupt_one"],
    )
    kind = filesystem_of(folder)
    if kind in ("tmpfs", "ramfs", "overlay"):
        note = "memory, not a disk" if kind != "overlay" else "a container's own layer"
        console.print(f"note: {folder} is on {kind} ({note}); --folder names another place", soft_wrap=True, highlight=False)
    with View(console) as view:
        progress = Demo(options, view.show).run()
    figures = summary(progress)
    wrong = verdict(progress, figures, kill=options.kill, nvme=options.nvme_bytes > 0)
    if given["as_json"]:
        click.echo(json.dumps(figures | {"failure": wrong}, indent=2))
    else:
        console.print(result_table(figures))
    if not given["no_plot"]:
        try:
            plot(progress, given["plot_path"])
        except OSError as e:
            raise CliError(f"cannot write the plot {given['plot_path']}: {e.strerror or e}") from e
        console.print(f"plot: {given['plot_path'].resolve()}", soft_wrap=True, highlight=False)
    return wrong


def _can_plot(path: Path) -> bool:
    """Whether a plot can be drawn; says so when matplotlib is missing. Raises CliConfigError when it could not be written."""
    if importlib.util.find_spec("matplotlib") is None:
        click.echo("no plot: it needs matplotlib, which the extra `plot` brings", err=True)
        return False
    target = path if path.exists() else path.parent
    if path.is_dir() or not (path.parent.is_dir() and os.access(target, os.W_OK)):
        raise CliConfigError(f"cannot write the plot to {path.absolute()}; pass --plot PATH or --no-plot")
    if path.suffix.lower() not in ("", ".png"):
        raise CliConfigError(f"the plot is a PNG image; {path.name} should end in .png")
    return True
