"""``kvtierd demo``: the main job, to be seen in one minute."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvtierd.cli import CliConfigError, CliError
from kvtierd.config import parse_size
from kvtierd.demo.run import Demo, DemoError, Options, summary, verdict
from kvtierd.demo.trace import TraceError, default_trace, read_trace
from kvtierd.demo.view import View, plot, result_table


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as e:
        raise click.BadParameter(str(e)) from e


@click.command()
@click.option(
    "--trace", "trace_path", type=click.Path(path_type=Path), help="Trace in the Mooncake schema; a built-in excerpt without."
)
@click.option("--limit", type=click.IntRange(1), help="Only so many requests of the trace.")
@click.option("--seconds", type=click.FloatRange(1, 86_400), default=40.0, show_default=True, help="Time to replay the trace in.")
@click.option("--cpu-capacity", callback=_size, default="256MiB", show_default=True, help="CPU tier.")
@click.option("--nvme-capacity", callback=_size, default="1GiB", show_default=True, help="NVMe tier.")
@click.option("--cpu-ttl", type=click.FloatRange(0.1), default=5.0, show_default=True, help="Idle seconds in CPU memory.")
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
@click.option("--keep", is_flag=True, help="Keep that folder at the end.")
@click.option("--corrupt-one", is_flag=True, help="Flip one loaded bit before the check: the demo must then fail.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def demo(**given: Any) -> None:
    """Replay a conversation trace through a daemon with small tiers.

    Client processes save and load real bytes through shared memory and check every byte that they load; half-way the daemon is
    killed with SIGKILL and started again. Ends with status 1 when anything was wrong.
    """
    try:
        requests = read_trace(given["trace_path"] or default_trace(), given["limit"])
    except TraceError as e:
        raise CliConfigError(str(e)) from e
    if not given["no_plot"]:
        _check_plot(given["plot_path"])
    folder = _make_folder(given["folder"])
    options = Options(
        requests=requests,
        folder=folder,
        cpu_bytes=given["cpu_capacity"],
        nvme_bytes=given["nvme_capacity"],
        cpu_ttl_s=given["cpu_ttl"],
        clients=given["clients"],
        seed=given["seed"],
        seconds=given["seconds"],
        kill=not given["no_kill"],
        corrupt_one=given["corrupt_one"],
    )
    console = Console(stderr=given["as_json"])
    try:
        with View(console) as view:
            run = Demo(options, view.show)
            progress = run.run()
        figures = summary(options, progress)
        if given["as_json"]:
            click.echo(json.dumps(figures, indent=2))
        else:
            console.print(result_table(figures))
        if not given["no_plot"]:
            plot(progress, given["plot_path"])
            console.print(f"plot: {given['plot_path']}")
        wrong = verdict(options, progress, figures)
    except DemoError as e:
        raise CliError(str(e)) from e
    except OSError as e:
        raise CliError(f"{e.strerror}: {e.filename}") from e
    finally:
        if given["keep"]:
            console.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if wrong:
        raise CliError(wrong)


def _check_plot(path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise CliConfigError("the plot needs matplotlib: pip install 'kvtierd[plot]', or pass --no-plot")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise CliConfigError(f"cannot write the plot into {path.parent.resolve()}; pass --plot PATH or --no-plot")


def _make_folder(parent: Path | None) -> Path:
    """A new folder on a disk: not /tmp, which is in memory on many systems."""
    base = parent or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtierd"
    try:
        base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="demo-", dir=base))
    except OSError as e:
        raise CliConfigError(f"cannot make a folder in {base}: {e.strerror}; pass --folder") from e
