"""``kvtierd replay``: what a request trace would hit, in a simulation of the daemon's policy or in a running daemon."""

from __future__ import annotations

import importlib.util
import json
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from rich.console import Console

from kvtierd.cli import CliConfigError, CliError
from kvtierd.cli.options import NumberRange, Settings, duration
from kvtierd.cli.output import check_writable
from kvtierd.config import parse_size, parse_ttl
from kvtierd.model import Tier
from kvtierd.replay.capacity import SPELLINGS, CapacityError, parse_capacity
from kvtierd.replay.report import plot, result_table
from kvtierd.replay.trace import Request, TraceError, read_trace
from kvtierd.v1 import admin_pb2

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

MAX_BLOCK_BYTES: Final = 1 << 32
SIMULATED_ONLY: Final = (
    "capacity", "eviction", "turn_bonus", "admission", "second_use_window", "write_budget", "hbm_ttl", "cpu_ttl", "nvme_ttl",
    "free_target", "nvme_gb_per_s",
)  # fmt: skip
"""Options that say what a running daemon's configuration says."""
DAEMON_ONLY: Final = ("workers", "seed", "keep")
OF_TIERS: Final = {
    Tier.HBM: ("HBM", ["hbm_ttl"]),
    Tier.NVME: ("NVMe", ["cpu_ttl", "nvme_ttl", "admission", "second_use_window", "write_budget", "free_target", "nvme_gb_per_s"]),
}
"""Options that say nothing without a tier. A TTL and a free target of memory have blocks go to the tier below."""


def _read(read: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    def callback(_ctx: click.Context, _param: click.Parameter, value: str | None) -> T | None:
        try:
            return None if value is None else read(value)
        except ValueError as e:
            raise click.BadParameter(str(e)) from e

    return callback


_SIZE: Final = _read(parse_size)


def _ttl(text: str) -> tuple[float | None]:
    """In a tuple, so that "never" is told from an option that was left out."""
    return (parse_ttl(text),)


def _policy_options(function: F) -> F:
    for option in reversed(
        [
            click.option("--eviction", type=click.Choice(["lru", "arc"]), default="lru", show_default=True, help="Who goes first."),
            click.option(
                "--turn-bonus",
                type=duration,
                default="0",
                metavar="DURATION",
                help="Credit for blocks of further turns, such as 60s.",
            ),
            click.option(
                "--admission",
                type=click.Choice(["all", "second-use"]),
                default="all",
                show_default=True,
                help="What NVMe takes once it is full.",
            ),
            click.option(
                "--second-use-window",
                type=duration,
                default="30min",
                show_default=True,
                metavar="DURATION",
                help="Time for a second use.",
            ),
            click.option(
                "--write-budget", callback=_SIZE, default="0", metavar="SIZE", help="Bytes a day for NVMe; 0 for no limit."
            ),
            click.option(
                "--hbm-ttl", callback=_read(_ttl), metavar="DURATION", help="Idle time in HBM; 30s when left out, or never."
            ),
            click.option(
                "--cpu-ttl",
                callback=_read(_ttl),
                metavar="DURATION",
                help="Idle time in CPU memory; 10min when left out, or never.",
            ),
            click.option("--nvme-ttl", callback=_read(_ttl), metavar="DURATION", help="Idle time on NVMe; never when left out."),
            click.option(
                "--free-target",
                type=NumberRange(0, 0.9),
                help="Share of memory kept free or clean; left out 0.15 with --nvme-gb-per-s, else none, as moves take no time.",
            ),
            click.option(
                "--nvme-gb-per-s",
                type=NumberRange(0),
                default=0.0,
                help="Bandwidth of NVMe, each way; 0 for moves without time.",
            ),
        ]
    ):
        function = option(function)
    return function


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--simulate", is_flag=True, help="Drive the daemon's core in virtual time; what happens without --address.")
@click.option("--address", metavar="ADDRESS", help="Replay through the daemon at this unix socket or host:port instead.")
@click.option("--capacity", metavar="SPEC", help=f"Size of the tiers: {SPELLINGS}.")
@click.option(
    "--time-scale",
    type=NumberRange(0, 100_000, min_open=True),
    default=1.0,
    show_default=True,
    help="Factor on the time between requests: 20 is traffic that is 20 times slower.",
)
@click.option("--limit", type=click.IntRange(1), help="Only the first requests.")
@click.option("--block-size", callback=_SIZE, metavar="SIZE", help="Bytes of a block; 64MiB simulated, 64KiB with --address.")
@_policy_options
@click.option("--workers", type=click.IntRange(1, 256), default=4, show_default=True, help="Requests at one time, with --address.")
@click.option("--seed", type=int, help="Part of every key, with --address; a random one when left out, so that runs share nothing.")
@click.option("--keep", is_flag=True, help="Leave the blocks in the daemon, with --address.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Also write the JSON to this file.")
@click.option(
    "--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False), help="Draw occupancy and hits: .png or .html."
)
@click.pass_context
def replay(ctx: click.Context, /, *, trace: Path, as_json: bool, output: Path | None, plot_path: Path | None, **given: Any) -> None:
    """Replay a request trace and report its prefix hits.

    TRACE has one JSON object a line, as Mooncake's traces: timestamp (ms), input_length (tokens), hash_ids (one for each 512
    tokens; a last, partial block without one counts nowhere) and optionally tenant. A block is hit when it is part of the prefix
    that is present when its request arrives.

    The simulation runs the policy of this version of the daemon itself. One tier is CPU memory without a TTL; two are CPU memory
    and NVMe; three are HBM, CPU memory and NVMe.
    """
    if given["simulate"] and given["address"]:
        raise click.UsageError("--simulate and --address exclude each other")
    address = given["address"] or _global_address(ctx)
    through_daemon = bool(address) and not given["simulate"]
    _check_options(ctx, DAEMON_ONLY if not through_daemon else SIMULATED_ONLY, through_daemon)
    _check_files(output, plot_path)
    try:
        requests = read_trace(trace, given["limit"], partial=True)
    except TraceError as e:
        raise CliConfigError(str(e)) from e
    figures = _through_daemon(ctx, address, requests, given) if through_daemon else _simulate(ctx, requests, given)
    figures["parameters"]["trace"] = trace.name
    _write(figures, as_json=as_json, output=output, plot_path=plot_path)
    if figures.get("wrong_bytes"):
        raise CliError(f"{figures['wrong_bytes']:,} loaded bytes were wrong")


def _check_options(ctx: click.Context, senseless: tuple[str, ...], through_daemon: bool) -> None:
    _refuse(ctx, senseless, "a running daemon has its own configuration" if through_daemon else "that needs --address")


def _refuse(ctx: click.Context, senseless: Iterable[str], why: str) -> None:
    """Raise UsageError where one of these options is on the command line."""
    given = [name for name in senseless if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"{', '.join('--' + name.replace('_', '-') for name in given)}: {why}")


def _simulate(ctx: click.Context, requests: list[Request], given: dict[str, Any]) -> dict[str, Any]:
    from kvtierd.replay.simulate import SimSettings, Simulation

    if given["capacity"] is None:
        raise click.UsageError(f"--capacity is missing: {SPELLINGS}")
    if given["eviction"] == "arc" and given["turn_bonus"]:
        raise click.UsageError("--turn-bonus goes with --eviction lru")
    distinct = len({(r.tenant, b) for r in requests for b in r.blocks})
    try:
        capacity = parse_capacity(given["capacity"], distinct)
    except CapacityError as e:
        raise click.BadParameter(str(e), param_hint="--capacity") from e
    for tier, (name, options) in OF_TIERS.items():
        if tier not in capacity:
            _refuse(ctx, options, f"that needs {name}, and --capacity has none")
    if given["admission"] == "all" and not given["write_budget"]:
        _refuse(ctx, ["second_use_window"], "that goes with --admission second-use or --write-budget")
    block_bytes = 64 << 20 if given["block_size"] is None else given["block_size"]
    if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
        raise click.BadParameter("a block has 1 byte to 4 GiB", param_hint="--block-size")
    one_tier = len(capacity) == 1
    settings = SimSettings(
        capacity,
        block_bytes,
        time_scale=given["time_scale"],
        hbm_ttl_s=_or(given["hbm_ttl"], None if one_tier else 30.0),
        cpu_ttl_s=_or(given["cpu_ttl"], None if one_tier else 600.0),
        nvme_ttl_s=_or(given["nvme_ttl"], None),
        free_target=(0.15 if given["nvme_gb_per_s"] else 0.0) if given["free_target"] is None else given["free_target"],
        eviction=given["eviction"],
        turn_bonus_s=given["turn_bonus"],
        second_use=given["admission"] == "second-use",
        second_use_window_s=given["second_use_window"],
        write_budget_bytes=given["write_budget"],
        nvme_bytes_per_s=given["nvme_gb_per_s"] * 1e9,
    )
    return Simulation(settings, requests).run()


def _or(given: tuple[float | None] | None, default_s: float | None) -> float | None:
    return default_s if given is None else given[0]


def _through_daemon(ctx: click.Context, address: str, requests: list[Request], given: dict[str, Any]) -> dict[str, Any]:
    from kvtierd.replay.daemon import DaemonReplay, DaemonSettings, ReplayError

    settings = ctx.ensure_object(Settings)
    settings.address = address
    seed = secrets.randbits(31) if given["seed"] is None else given["seed"]
    with settings.connect() as daemon:

        def status() -> admin_pb2.GetStatusResponse:
            answer: admin_pb2.GetStatusResponse = daemon.call(daemon.stub.GetStatus, admin_pb2.GetStatusRequest())
            return answer

        how = DaemonSettings(
            address,
            block_bytes=64 << 10 if given["block_size"] is None else given["block_size"],
            time_scale=given["time_scale"],
            workers=given["workers"],
            seed=seed,
            keep=given["keep"],
            token_file=None if settings.token_file is None else str(settings.token_file),
        )
        try:
            return DaemonReplay(how, requests, status).run()
        except ReplayError as e:
            raise CliConfigError(str(e)) from e


def _global_address(ctx: click.Context) -> str:
    """``kvtierd --address X replay``. The variable does not count: a replay must not fill a daemon by accident."""
    parent = ctx.parent
    if parent is None or parent.get_parameter_source("address") is not click.core.ParameterSource.COMMANDLINE:
        return ""
    return str(parent.params["address"])


def _check_files(output: Path | None, plot_path: Path | None) -> None:
    """Before a long replay, not after it."""
    if plot_path is not None and plot_path.suffix.lower() not in (".png", ".html"):
        raise CliConfigError(f"{plot_path.name}: a plot is a .png or a .html file")
    if plot_path is not None and importlib.util.find_spec("matplotlib") is None:
        raise CliConfigError("a plot needs matplotlib, which the extra `plot` brings")
    for path in (output, plot_path):
        try:
            if path is not None:
                check_writable(path)
        except OSError as e:
            raise CliConfigError(f"cannot write {path}: {e.strerror}; name another file in a folder that is there") from e


def _write(figures: dict[str, Any], *, as_json: bool, output: Path | None, plot_path: Path | None) -> None:
    text = json.dumps(figures, indent=2)
    if as_json:
        click.echo(text)
    else:
        Console().print(result_table(figures))
    try:
        if output is not None:
            output.write_text(text + "\n")
        if plot_path is not None:
            plot(figures, plot_path)
    except OSError as e:
        raise CliError(f"cannot write {e.filename or plot_path or output}: {e.strerror or e}") from e
