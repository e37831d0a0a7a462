"""A real daemon under many engine-like clients, in an open loop, with faults.

    .venv/bin/python -m loadtest.engines --seconds 80 --faults "20:kill:1 35:stop:2 50:client 60:disk-full:4"
    .venv/bin/python -m loadtest.engines --workload agents --contexts 1 --tenants 4      # options of loadtest/workloads.py
    .venv/bin/python -m loadtest.engines --mix save=20,load=70,evict=10                  # each request does one of them
    .venv/bin/python -m loadtest.engines --trace loadtest/traces/conversation_excerpt.jsonl --speedup 20

Engines look up each request's blocks, load what is held, save the rest, and check every byte; with --mix, a request does one of
these alone: load (with its lookup), save, or evict. Requests begin when the trace says, faster by --speedup; latencies count from
then. Ends with status 1 where a byte was wrong, with 2 where the run cannot be or has failed, and with 3 where the load generator
itself was too slow for its figures to mean the daemon. Results go to --output as report.html, summary.md and result.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvtierd.cli.output import check_writable
from kvtierd.errors import StartupError
from kvtierd.lifetime import end_in_order, scratch_folder
from kvtierd.model import PAGE_BYTES
from kvtierd.replay.trace import TraceError
from kvtierd.units import parse_size
from loadtest.engines.figures import result
from loadtest.engines.plan import MIX, FaultKind, PlanError, Settings, items_of, load_requests, parse_faults, parse_mix
from loadtest.engines.run import Run, RunError
from loadtest.engines.show import View, tables
from loadtest.workloads import KINDS, number

WRONG, FAILED, LATE, INTERRUPTED = 1, 2, 3, 130
RESULTS = ("report.html", "summary.md", "result.json")
EXAMPLE = "20:kill:1 35:stop:2 50:client 60:disk-full:5 70:disk-errors:5"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m loadtest.engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = made.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, help="requests in the Mooncake schema, in place of a generator")
    source.add_argument("--workload", choices=list(KINDS), default="rag-chat", help="which generator (default rag-chat)")
    for name, kind, least, most, default, what in (
        ("seconds", float, 0.1, 1e6, 80, "length of the run"),
        ("speedup", float, 1e-3, 1e6, 4, "seconds of the trace in one of the run"),
        ("processes", int, 1, 64, 2, "client processes"),
        ("engines", int, 1, 256, 8, "engines, each a session, in all processes together"),
        ("threads", int, 1, 256, 32, "requests that an engine works on at the same time"),
        ("shards", int, 1, 64, 2, "tensor parallel ranks of an engine"),
        ("shard-kib", int, 1, 1 << 20, 32, "size of one rank's part of a block"),
        ("late-limit", float, 0, 1e6, 0.1, "most p99 of the generator's own delay, s"),
    ):
        made.add_argument(f"--{name}", type=number(kind, least, most), default=default, help=f"{what} (default {default})")
    steps = made.add_mutually_exclusive_group()
    evict = "share of requests that evict their blocks at the end (default 0.02)"
    steps.add_argument("--evict", type=number(float, 0, 1), default=0.02, help=evict)
    steps.add_argument("--mix", help=f"weights of requests that do one step each, such as {MIX}, in place of what engines do")
    made.add_argument("--cpu", type=_size, default="96MiB", help="the daemon's CPU tier (default 96MiB)")
    made.add_argument("--nvme", type=_size, default="512MiB", help="the daemon's NVMe tier (default 512MiB)")
    made.add_argument("--faults", default="", help=f'schedule of SECOND:KIND:SECONDS, such as "{EXAMPLE}"')
    made.add_argument("--run-seed", type=int, default=1, help="of keys and evictions; --seed is the generator's")
    made.add_argument("--folder", type=Path, help="new or empty, for daemon and NVMe pool (default: a temporary folder)")
    made.add_argument("--output", type=Path, default=Path("loadtest/out/engines"), help="where results go")
    return made


def _size(text: str) -> str:
    try:
        parse_size(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    return text


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises PlanError for what cannot be."""
    if args.engines < args.processes:
        raise PlanError(f"--engines {args.engines}: each of {args.processes} processes has one at least")
    faults = parse_faults(args.faults)
    if late := [f for f in faults if f.at_s > args.seconds or (f.kind is not FaultKind.CLIENT and f.lasts_s > args.seconds)]:
        raise PlanError(
            f"the fault at {late[0].at_s:g} s for {late[0].lasts_s:g} s does not fit into the run of {args.seconds:g} s: "
            "take it out of --faults (of make load: LOAD_FAULTS), or raise --seconds"
        )
    shard_bytes = -(-args.shard_kib * 1024 // PAGE_BYTES) * PAGE_BYTES
    return Settings(
        args.seconds, args.speedup, args.processes, args.engines, args.threads, args.shards, shard_bytes, args.cpu, args.nvme,
        args.evict, args.run_seed, args.late_limit, faults, mix=() if args.mix is None else parse_mix(args.mix),
    )  # fmt: skip


def prepare(args: argparse.Namespace) -> None:
    """See before the run that its results will not be lost. Raises PlanError."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlanError("the report needs matplotlib, which the extra `plot` brings")
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        for name in RESULTS:
            check_writable(args.output / name)
    except OSError as e:
        raise PlanError(f"results cannot be written to --output {args.output}: {e.strerror}") from e
    if args.folder is None:
        return
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        used = next(args.folder.iterdir(), None)
    except OSError as e:
        raise PlanError(f"--folder {args.folder} cannot be used: {e.strerror}") from e
    if used is not None:
        raise PlanError(f"--folder {args.folder} is not empty: blocks of a former run would be hits of this one")


def write(found: dict[str, Any], output: Path) -> None:
    """The results as files. Raises OSError."""
    from loadtest.engines.page import markdown, page  # matplotlib; the client processes, which import this module, need none

    made = {"result.json": json.dumps(found) + "\n", "report.html": page(found), "summary.md": markdown(found)}
    for name in RESULTS:
        (output / name).write_text(made[name])


def main(arguments: list[str] | None = None) -> int:
    args, rest = parser().parse_known_args(arguments)
    console = Console(highlight=False)
    end_in_order()
    try:
        settings = settings_of(args)
        requests, source = load_requests(args.trace, args.workload, settings, rest)
        settings = replace(settings, source=source)
        items = items_of(requests, settings)
        if not items:
            raise PlanError(f"{source} has no request within {settings.seconds * settings.speedup:g} s")
        prepare(args)
    except (PlanError, TraceError) as e:
        parser().error(str(e))
    command = "python -m loadtest.engines " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    try:
        with scratch_folder(Path(tempfile.gettempdir()), "kvtierd-load-") as scratch, View(console, settings) as view:
            run = Run(args.folder or scratch, settings, items, view.show)
            progress = run.run()
        found = result(command, settings, items, progress, run.watched)
        for table in tables(found):
            console.print(table)
        write(found, args.output)
    except (PlanError, RunError, StartupError, OSError) as e:
        console.print(Text("the run has failed: ", style="bold red").append(str(e), style="default"))
        return FAILED
    except KeyboardInterrupt:
        console.print("interrupted: there are no results")
        return INTERRUPTED
    console.print(f"in {args.output}: {', '.join(RESULTS)}")
    if found["wrong_bytes"]:
        console.print(Text(f"{found['wrong_bytes']} wrong bytes", style="bold red"))
        return WRONG
    for problem in found["generator"]["problems"]:
        console.print(Text("not to be trusted: ", style="bold red").append(problem, style="default"))
    return LATE if found["generator"]["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
