"""Goal: the demo replays a trace for real, and fails when anything is wrong.

Method: the command as a child process with a small part of the trace; runs in this process where something has to be broken in
the middle.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.demo.progress import Progress, summary, verdict
from kvtierd.demo.run import Demo, Options
from kvtierd.demo.trace import default_trace
from kvtierd.replay.trace import read_trace

SMALL = ["--limit", "60", "--cpu-capacity", "64MiB", "--nvme-capacity", "400MiB"]


def command(tmp_path: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "kvtierd", "demo", "--folder", str(tmp_path / "f"), "--json", *args]


def run_demo(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(tmp_path, *args), capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)


def test_small_demo_end_to_end(tmp_path: Path) -> None:
    shown = run_demo(tmp_path, *SMALL, "--seconds", "6", "--plot", "p.png")
    assert shown.returncode == 0, shown.stderr
    figures = json.loads(shown.stdout)
    assert figures["wrong_bytes"] == 0
    assert figures["requests"] == 60
    assert figures["restarts_survived"] == 1
    assert figures["recovered_blocks"] > 0
    assert figures["nvme_hits_after_restart"] > 0
    assert figures["demotions"] > 0
    assert figures["failure"] == ""
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert not any((tmp_path / "f").iterdir()), "nothing is left behind"
    for words in ("killed (SIGKILL)", "goes on without a cache", "is attached again", "the daemon is back with"):
        assert words in shown.stderr


def test_one_wrong_bit_makes_the_demo_fail(tmp_path: Path) -> None:
    shown = run_demo(tmp_path, *SMALL, "--seconds", "4", "--no-kill", "--no-plot", "--corrupt-one")
    assert shown.returncode == 1
    assert "wrong bytes" in shown.stderr
    assert json.loads(shown.stdout)["wrong_bytes"] == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--trace", "nowhere", "--no-plot"], "cannot read the trace"),
        (["--trace", "empty.jsonl", "--no-plot"], "no requests"),
        (["--plot", "no/such/folder/x.png"], "--plot"),
        (["--plot", "."], "--plot"),
        (["--plot", "x.pdf"], ".png"),
        (["--cpu-capacity", "8MiB", "--no-plot"], "--cpu-capacity"),
        (["--nvme-capacity", "much", "--no-plot"], "256MiB"),
        (["--no-plot", "--folder", "empty.jsonl"], "--folder"),
    ],
)
def test_wrong_input_is_one_clear_error(tmp_path: Path, args: list[str], words: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    shown = run_demo(tmp_path, *args)
    assert shown.returncode == 2
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr
    assert len([line for line in shown.stderr.splitlines() if line.startswith("Error")]) == 1


def test_without_matplotlib_there_is_a_note_and_no_plot(tmp_path: Path) -> None:
    hide = "import sys, importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'matplotlib' else f(n, *a)"
    args = ["demo", *SMALL, "--no-kill", "--seconds", "3", "--folder", str(tmp_path / "f")]
    code = f"{hide}\nfrom kvtierd.cli import main\nmain({args!r})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "no plot" in shown.stderr
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        command(tmp_path, *SMALL, "--no-plot", "--seconds", "60"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
        text=True,
        start_new_session=True,
    )
    assert demo.stderr is not None
    with demo.stderr:
        while "requests" not in demo.stderr.readline():
            assert demo.poll() is None
        ends = [os.pidfd_open(pid) for pid in children_of(demo.pid)]
        try:
            assert len(ends) >= 3, "a daemon and two clients"
            demo.send_signal(number)
            assert demo.wait(30) in (130, 143)
            assert "Traceback" not in demo.stderr.read()
            assert all(select.select([end], [], [], 10)[0] for end in ends)
        finally:
            for end in ends:
                os.close(end)
    assert not any((tmp_path / "f").iterdir())


def children_of(parent: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # threads come and go
            children += map(int, (task / "children").read_text().split())
    return children


def small_run(
    tmp_path: Path, disturb: Callable[[Demo, Progress], None], seconds: float = 6.0, limit_s: float | None = None
) -> Demo:
    """Run in this process; ``disturb`` is called with each look at the progress."""
    options = Options(
        requests=read_trace(default_trace(), 60),
        folder=tmp_path,
        cpu_bytes=64 << 20,
        nvme_bytes=400 << 20,
        cpu_ttl_s=5.0,
        clients=2,
        seed=1,
        seconds=seconds,
        time_limit_s=limit_s,
        kill=True,
    )
    demo = Demo(options, lambda progress: disturb(demo, progress))
    demo.run()
    return demo


def test_a_client_that_crashes_fails_the_demo(tmp_path: Path) -> None:
    def disturb(demo: Demo, progress: Progress) -> None:
        victim = demo._workers[0].process.pid
        if len(progress.outcomes) >= 4 and not progress.failure and victim is not None:
            os.kill(victim, signal.SIGKILL)

    progress = small_run(tmp_path, disturb).progress
    assert "client-0 ended before its requests did" in verdict(progress, summary(progress), kill=True, nvme=True)


def test_a_daemon_that_does_not_come_back_fails_the_demo(tmp_path: Path) -> None:
    def disturb(demo: Demo, progress: Progress) -> None:
        demo._daemon.config["cpu"]["capacity"] = "nonsense"

    progress = small_run(tmp_path, disturb).progress
    assert "the daemon did not come back: " in verdict(progress, summary(progress), kill=True, nvme=True)


def test_a_daemon_that_dies_by_itself_fails_the_demo(tmp_path: Path) -> None:
    def disturb(demo: Demo, progress: Progress) -> None:
        if len(progress.outcomes) >= 4 and not progress.killed_at_s and not progress.failure:
            os.kill(demo._daemon.pid, signal.SIGKILL)

    progress = small_run(tmp_path, disturb).progress
    assert "the daemon ended by itself" in verdict(progress, summary(progress), kill=True, nvme=True)


def test_a_daemon_that_forgets_everything_fails_the_demo(tmp_path: Path) -> None:
    def disturb(demo: Demo, progress: Progress) -> None:
        demo._daemon.config["nvme"]["capacity"] = 0

    progress = small_run(tmp_path, disturb).progress
    assert progress.recovered_blocks == 0
    assert verdict(progress, summary(progress), kill=True, nvme=True) == "nothing was loaded from NVMe after the restart"


def test_a_late_replay_is_cut_short_and_says_so(tmp_path: Path) -> None:
    progress = small_run(tmp_path, lambda demo, progress: None, seconds=60.0, limit_s=6.0).progress
    assert progress.cut_short
    assert 0 < len(progress.outcomes) < 60
    assert progress.restarts == 1, "half of the time counts as half-way too"
    assert not progress.failure
    assert progress.took_s < 20
