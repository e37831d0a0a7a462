"""A real daemon under many engine-like clients, in an open loop, with faults.

    .venv/bin/python -m loadtest.engines --seconds 80 --faults "20:kill:1 35:stop:2 50:client 60:disk-full:4"
    .venv/bin/python -m loadtest.engines --workload agents --contexts 1 --tenants 4      # options of loadtest/workloads.py
    .venv/bin/python -m loadtest.engines --trace loadtest/traces/conversation_excerpt.jsonl --speedup 20

Engines look up each request's blocks, load what is held, save the rest, and check every byte. Requests begin when the trace says,
faster by --speedup; latencies count from then. Ends with status 1 where a byte was wrong, with 2 where the run cannot be or has
failed, and with 3 where the load generator itself was too slow for its figures to mean the daemon. Results go to --output as
report.html, summary.md and result.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from kvtierd.errors import StartupError
from kvtierd.model import PAGE_BYTES
from kvtierd.replay.trace import TraceError
from loadtest.engines.figures import result
from loadtest.engines.plan import PlanError, Settings, items_of, load_requests, parse_faults
from loadtest.engines.run import Run, RunError
from loadtest.engines.show import View, tables
from loadtest.workloads import KINDS

WRONG, FAILED, LATE = 1, 2, 3
EXAMPLE = "20:kill:1 35:stop:2 50:client 60:disk-full:5 70:disk-errors:5"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m loadtest.engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--trace", type=Path, help="requests in the Mooncake schema, in place of a generator")
    made.add_argument("--workload", choices=list(KINDS), default="rag-chat", help="which generator (default rag-chat)")
    made.add_argument("--seconds", type=float, default=80, help="length of the run (default 80)")
    made.add_argument("--speedup", type=float, default=4, help="seconds of the trace in one of the run (default 4)")
    made.add_argument("--processes", type=int, default=2, help="client processes (default 2)")
    made.add_argument("--engines", type=int, default=8, help="engines, each a session, in all processes together (default 8)")
    made.add_argument("--threads", type=int, default=32, help="requests that an engine works on at the same time (default 32)")
    made.add_argument("--shards", type=int, default=2, help="tensor parallel ranks of an engine (default 2)")
    made.add_argument("--shard-kib", type=int, default=32, help="size of one rank's part of a block (default 32)")
    made.add_argument("--cpu", default="96MiB", help="the daemon's CPU tier (default 96MiB)")
    made.add_argument("--nvme", default="512MiB", help="the daemon's NVMe tier (default 512MiB)")
    made.add_argument(
        "--evict", type=float, default=0.02, help="share of requests that evict their blocks at the end (default 0.02)"
    )
    made.add_argument("--faults", default="", help=f'schedule of SECOND:KIND:SECONDS, such as "{EXAMPLE}"')
    made.add_argument("--run-seed", type=int, default=1, help="of keys and evictions; --seed is the generator's")
    made.add_argument("--late-limit", type=float, default=0.1, help="most p99 of the generator's own delay, s (default 0.1)")
    made.add_argument("--folder", type=Path, help="where daemon and NVMe pool live (default: a temporary folder)")
    made.add_argument("--output", type=Path, default=Path("loadtest/out/engines"), help="where results go")
    return made


def settings_of(args: argparse.Namespace) -> Settings:
    """Raises PlanError for what cannot be."""
    for name in ("seconds", "speedup", "processes", "engines", "threads", "shards", "shard_kib"):
        if not 0 < getattr(args, name) < 1e6:
            raise PlanError(f"--{name.replace('_', '-')} is more than 0")
    if args.engines < args.processes:
        raise PlanError(f"--engines {args.engines}: each of {args.processes} processes has one at least")
    if not 0 <= args.evict <= 1:
        raise PlanError("--evict is a share, from 0 to 1")
    faults = parse_faults(args.faults)
    if late := [f for f in faults if f.at_s > args.seconds]:
        raise PlanError(f"the fault at {late[0].at_s:g} s comes after the run of {args.seconds:g} s")
    shard_bytes = -(-args.shard_kib * 1024 // PAGE_BYTES) * PAGE_BYTES
    return Settings(
        args.seconds, args.speedup, args.processes, args.engines, args.threads, args.shards, shard_bytes, args.cpu, args.nvme,
        args.evict, args.run_seed, args.late_limit, faults,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    args, rest = parser().parse_known_args(arguments)
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: with daemon and clients ended
    try:
        settings = settings_of(args)
        requests, source = load_requests(args.trace, args.workload, settings, rest)
        settings = replace(settings, source=source)
        items = items_of(requests, settings)
        if not items:
            raise PlanError(f"{source} has no request within {settings.seconds * settings.speedup:g} s")
    except (PlanError, TraceError) as e:
        parser().error(str(e))
    command = "python -m loadtest.engines " + shlex.join(sys.argv[1:] if arguments is None else arguments)
    with tempfile.TemporaryDirectory(prefix="kvtierd-load-") as scratch:
        folder = args.folder or Path(scratch)
        try:
            with View(console, settings) as view:
                run = Run(folder, settings, items, view.show)
                progress = run.run()
        except (PlanError, RunError, StartupError) as e:
            console.print(f"[bold red]the run has failed:[/] {e}", markup=True, highlight=False)
            return FAILED
        found = result(command, settings, items, progress, run.watched)
    from loadtest.engines.page import markdown, page  # matplotlib; the client processes, which import this module, need none

    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "result.json").write_text(json.dumps(found) + "\n")
    (args.output / "report.html").write_text(page(found))
    (args.output / "summary.md").write_text(markdown(found))
    for table in tables(found):
        console.print(table)
    console.print(f"in {args.output}: report.html, summary.md, result.json", highlight=False)
    if found["wrong_bytes"]:
        console.print(f"[bold red]{found['wrong_bytes']} wrong bytes[/]")
        return WRONG
    for problem in found["generator"]["problems"]:
        console.print(f"[bold red]not to be trusted:[/] {problem}", highlight=False)
    return LATE if found["generator"]["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
