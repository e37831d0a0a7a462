"""Goal: whatever disks, clients, operators and crashes do, no load returns wrong bytes, no limit is passed, no confirmed
eviction comes back, and everything comes to rest.

Method: some seeds of the simulation, and by name those that have found something.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvtierd.testing.simulation.run import run_seed
from tests.simulation.mutations import MUTATIONS

FOUND = {
    "an eviction was confirmed while another thread was still writing the removals that it had taken over": 366,
    "a snapshot that could not be begun ended after whoever had asked for it, and asyncio told of it with a traceback": 8334,
    "a segment that was there again after a power cut, with a part of its bytes, was not counted": 7491,
    "several of those, some of them empty": 9684,
    "a generation that no record told of was given out again, and the bytes of before passed for those of a lost write": 20690,
}


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_finds_nothing(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.ok, str(outcome)


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND)
def test_what_a_seed_has_found_is_mended(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.ok, str(outcome)


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Method: once here, and once in a process whose hashes of strings differ."""
    code = "from kvtierd.testing.simulation.run import run_seed; print([run_seed(s).digest for s in (3, 4)])"
    seen = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": n}, capture_output=True, check=True, text=True).stdout
        for n in ("1", "2")
    }
    assert seen == {f"{[run_seed(s).digest for s in (3, 4)]}\n"}


def test_the_seeds_do_what_they_are_for() -> None:
    """Goal: the traffic of the seeds is worth something.

    Method: tell some of them, and look for each kind of event.
    """
    told = "\n".join(line for seed in range(100) for line in run_seed(seed, tell=True).story)
    device = ["eio", "enospc", "short", "torn", "lost", "misdirected", "bit_rot"]
    moves = ["moved CPU to NVME", "moved NVME to CPU", "io_error", "corrupt", "no CPU extent"]
    lives = ["process: killed", "power: cut", "process: stops", "checkpoint", "drain"]
    clients = ["abort of ticket", "prefetch", "pin ", "confirmed"]
    for event in (*device, *moves, *lives, *clients):
        assert event in told, event


def test_a_failure_tells_its_seed_and_its_story() -> None:
    with MUTATIONS[0].applied():
        outcome = next(o for o in map(run_seed, range(20)) if not o.ok)
    text = str(outcome)
    assert text.startswith(f"seed {outcome.seed}: ")
    assert "the last events:" in text and "the last changes of copies:" in text and "client " in text
