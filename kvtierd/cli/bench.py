"""``kvtierd bench``: how fast the daemon is here, against what the machine can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvtierd.bench.measure import BenchError, Report
from kvtierd.bench.runner import PARTS, plan, run
from kvtierd.bench.show import show
from kvtierd.cli import CliConfigError, CliError, CliUnreachableError
from kvtierd.cli.options import Settings
from kvtierd.cli.output import check_writable
from kvtierd.errors import DaemonUnavailableError, KvtierdError
from kvtierd.v1 import admin_pb2


def _parts(_context: click.Context, _parameter: click.Parameter, value: str | None) -> frozenset[str]:
    names = frozenset(part.strip() for part in (value or "").split(",") if part.strip())
    unknown = sorted(names - set(PARTS))
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(PARTS)}")
    return names


def _sizes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in (value or "").split(",") if part.strip())
    except ValueError as e:
        raise click.BadParameter("write whole MiB with commas between, such as 2,8,32") from e
    if any(not 1 <= size <= 1024 for size in sizes):
        raise click.BadParameter("a block has 1 to 1024 MiB here")
    return sizes


@click.command()
@click.option("--only", "parts", callback=_parts, metavar="PARTS", help=f"Measure only some, with commas: {', '.join(PARTS)}.")
@click.option("--full", is_flag=True, help="A large index, more rounds and all sizes: about six minutes instead of one.")
@click.option("--address", default="", help="Measure this running daemon (save, load and lookup only) instead of an own one.")
@click.option("--folder", type=click.Path(path_type=Path), help="Folder on the disk to measure; the cache folder when left out.")
@click.option("--index-blocks", type=click.IntRange(1001, 20_000_000), help="Blocks in the large index.")
@click.option("--chunk-mib", callback=_sizes, metavar="SIZES", help="Sizes of a block; 2,8,32 when left out.")
@click.option("--buffer-mib", type=click.IntRange(1, 65536), help="MiB that one pass saves; by default more than the CPU's cache.")
@click.option("--round-mib", type=click.IntRange(4, 65536), help="MiB that one round writes to and reads from NVMe.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Also write the JSON to this file.")
@click.option("--check", is_flag=True, help="End with status 1 when a target is missed.")
def bench(*, as_json: bool, output: Path | None, check: bool, **options: Any) -> None:
    """Measure this machine: kvtierd against memory copies and raw O_DIRECT.

    Starts a daemon of its own in a temporary folder and removes everything at the end. Limits and figures are taken in turn,
    so that other work on the machine hits both alike; still, a quiet machine gives the better answer.
    """
    errors = Console(stderr=True)
    try:
        chosen = plan(**{**options, "address": options["address"] or _global_address()})
    except BenchError as e:
        raise click.UsageError(str(e)) from e
    if output is not None:
        _check(output)
    if chosen.address:
        _reach(chosen.address)
    try:
        with errors.status("starting") as spinner:
            report = run(chosen, spinner.update)
    except DaemonUnavailableError as e:
        raise CliUnreachableError(str(e)) from e
    except KvtierdError as e:
        raise CliError(str(e)) from e
    _write(report, as_json=as_json, output=output)
    missed = [row.name for row in report.rows if row.met is False]
    if missed and check:
        raise CliError("below the target: " + "; ".join(missed))


def _reach(address: str) -> None:
    """Before anything is measured. Raises DaemonUnavailableError and RequestError."""
    settings = click.get_current_context().ensure_object(Settings)
    settings.address = address
    with settings.connect() as daemon:
        daemon.call(daemon.stub.GetStatus, admin_pb2.GetStatusRequest())


def _check(output: Path) -> None:
    """Before the minutes that it takes, not after them."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        check_writable(output)
    except OSError as e:
        raise CliConfigError(f"cannot write {output}: {e.strerror}; name another file") from e


def _write(report: Report, *, as_json: bool, output: Path | None) -> None:
    text = json.dumps(report.values, indent=2)
    if as_json:
        click.echo(text)
    else:
        show(report, Console())
    try:
        if output is not None:
            output.write_text(text + "\n")
    except OSError as e:
        raise CliError(f"cannot write {output}: {e.strerror}") from e


def _global_address() -> str:
    """``kvtierd --address X bench``. The variable does not count: a benchmark must not hit a daemon that others use by accident."""
    context = click.get_current_context().parent
    if context is None or context.get_parameter_source("address") is not click.core.ParameterSource.COMMANDLINE:
        return ""
    return str(context.params["address"])
