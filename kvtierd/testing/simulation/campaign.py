"""Many seeds, one process a core, and the story of each that fails."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any, Final

from kvtierd.testing.simulation.run import Outcome, run_seed

MAX_STORIES: Final = 5
"""Failures told in full; of the others only the seeds are named."""
CHUNK: Final = 10
"""Seeds that a process takes at a time."""
TELL_EVERY_S: Final = 60.0


def main() -> int:
    """Run and report. Returns the exit status: 1 when any seed fails."""
    parser = argparse.ArgumentParser(prog="python -m kvtierd.testing.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--seed", type=int, help="run this one alone, and show its story whether it fails or not")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one for each core)")
    args = parser.parse_args()
    if args.seeds < 1 or args.jobs < 0:
        parser.error("--seeds is at least 1, and --jobs at least 0 (one for each core)")
    if args.seed is not None:
        outcome = run_seed(args.seed, tell=True)
        print(outcome)
        return int(not outcome.ok)
    return _many(range(args.first, args.first + args.seeds), args.jobs or len(os.sched_getaffinity(0)))


def _many(seeds: range, jobs: int) -> int:
    began_s = told_s = time.monotonic()
    failed: list[int] = []
    done = events = 0
    simulated_s = 0.0
    for outcome in _outcomes(seeds, jobs):
        done += 1
        events += outcome.events
        simulated_s += outcome.simulated_s
        if not outcome.ok:
            failed.append(outcome.seed)
            print(outcome if len(failed) <= MAX_STORIES else f"seed {outcome.seed}: {outcome.problem}", flush=True)
        if time.monotonic() > told_s + TELL_EVERY_S:
            told_s = time.monotonic()
            print(f"{done} of {len(seeds)} seeds, {len(failed)} failed, {told_s - began_s:.0f} s", flush=True)
    took_s = time.monotonic() - began_s
    print(
        f"{done} seeds ({seeds.start} to {seeds.stop - 1}) in {took_s:.0f} s with {jobs} processes: {len(failed)} failed; "
        f"{events} turns of threads, {simulated_s / 3600:.0f} h simulated"
    )
    if failed:
        print(f"failed: {' '.join(map(str, sorted(failed)))}; see one again with make simulate SEED=N", file=sys.stderr)
    return int(bool(failed))


def _outcomes(seeds: range, jobs: int) -> Iterator[Outcome]:
    """Run seeds in so many processes, each on a core of its own where there are as many."""
    context = get_context("spawn")
    cores = context.Queue()
    allowed = sorted(os.sched_getaffinity(0))
    for n in range(jobs):
        cores.put(allowed[n % len(allowed)])
    with context.Pool(jobs, _begin, (cores,)) as pool:
        yield from pool.imap_unordered(run_seed, seeds, CHUNK)


def _begin(cores: Any) -> None:
    # One thread runs at a time, and hands over far faster on the same core.
    os.sched_setaffinity(0, {cores.get()})
