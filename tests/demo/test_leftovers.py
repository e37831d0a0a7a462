"""Goal: however a demo ends, neither its daemon nor its folder stays.

Method: a child process that holds a demo's folder and daemon is killed; its daemon's end is awaited by a pidfd.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtierd.demo.daemon import LOCK, DemoDaemon, demo_folder, filesystem_of, undisturbed

HOLD = """
import sys
from pathlib import Path
from kvtierd.demo.daemon import DemoDaemon, demo_folder
with demo_folder(Path(sys.argv[1]), keep=False) as folder:
    daemon = DemoDaemon(folder, {})
    daemon.start()
    print(daemon.pid, folder, flush=True)
    sys.stdin.read()
"""


def test_a_killed_demo_takes_its_daemon_along_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdin is not None
    with holder.stdout, holder.stdin:
        pid, left = holder.stdout.readline().split()
        with demo_folder(tmp_path, keep=False):
            assert Path(left).is_dir(), "the folder of a demo that runs is not touched"
        daemon = os.pidfd_open(int(pid))
        try:
            holder.kill()
            holder.wait()
            assert select.select([daemon], [], [], 20)[0], "the daemon ends with its demo"
        finally:
            os.close(daemon)
    assert Path(left).is_dir()
    with demo_folder(tmp_path, keep=False):
        assert not Path(left).exists()
    assert not any(tmp_path.iterdir())


def test_a_kept_folder_stays(tmp_path: Path) -> None:
    with demo_folder(tmp_path, keep=True) as kept:
        (kept / "log").touch()
    with demo_folder(tmp_path, keep=False):
        pass
    assert (kept / "log").exists()
    assert not (kept / LOCK).exists()


def test_a_deep_folder_gets_short_sockets(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    daemon = DemoDaemon(deep, {})
    try:
        daemon.start()
        assert daemon.status().blocks == 0
    finally:
        daemon.kill()
        daemon.remove_sockets()
    assert not Path(daemon.address.removeprefix("unix:")).parent.exists()


def test_cleaning_up_is_not_disturbed() -> None:
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_file_systems_are_named() -> None:
    assert filesystem_of(Path("/proc")) == "proc"
    assert filesystem_of(Path("/")) != ""
