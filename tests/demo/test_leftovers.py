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

from kvtierd.demo.daemon import DemoDaemon, filesystem_of
from kvtierd.lifetime import LOCK, keep, scratch_folder, undisturbed

HOLD = """
import sys
from pathlib import Path
from kvtierd.demo.daemon import DemoDaemon
from kvtierd.lifetime import scratch_folder
with scratch_folder(Path(sys.argv[1]), "demo-") as folder:
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
        with scratch_folder(tmp_path, "demo-"):
            assert Path(left).is_dir(), "the folder of a demo that runs is not touched"
        daemon = os.pidfd_open(int(pid))
        try:
            holder.kill()
            holder.wait()
            assert select.select([daemon], [], [], 20)[0], "the daemon ends with its demo"
        finally:
            os.close(daemon)
    assert Path(left).is_dir()
    with scratch_folder(tmp_path, "demo-"):
        assert not Path(left).exists()
    assert not any(tmp_path.iterdir())


TIED = """
import sys
from pathlib import Path
from kvtierd.bench.daemon import BenchDaemon
from kvtierd.testing.daemon import DaemonProcess
folder = Path(sys.argv[1])
daemon = BenchDaemon(folder / "d", {}) if sys.argv[2] == "bench" else DaemonProcess(folder, tie=True)
daemon.start()
print(daemon.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("whose", ["bench", "load test"])
def test_a_daemon_dies_with_who_has_started_it(tmp_path: Path, whose: str) -> None:
    command, environment = [sys.executable, "-c", TIED, str(tmp_path), whose], os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        assert holder.stdout is not None
        daemon = os.pidfd_open(int(holder.stdout.readline()))
        try:
            holder.kill()
            assert select.select([daemon], [], [], 20)[0]
        finally:
            os.close(daemon)


def test_what_is_not_certainly_a_leftover_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files belongs to everybody."""
    elsewhere = tmp_path / "elsewhere"
    for folder in (elsewhere, tmp_path / "demo-foreign", tmp_path / "demo-unlocked", tmp_path / "demo-odd"):
        folder.mkdir()
        (folder / "file").touch()
    (tmp_path / "demo-link").symlink_to(elsewhere)
    (elsewhere / LOCK).touch()
    (tmp_path / "demo-odd" / LOCK).symlink_to(elsewhere / "file")
    with scratch_folder(tmp_path, "demo-"):
        pass
    (tmp_path / "demo-foreign" / LOCK).touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with scratch_folder(tmp_path, "demo-"):
        pass
    assert all((tmp_path / name / "file").exists() for name in ("elsewhere", "demo-foreign", "demo-unlocked", "demo-odd"))
    monkeypatch.undo()
    with scratch_folder(tmp_path, "demo-"):
        assert not (tmp_path / "demo-foreign").exists()


def test_a_kept_folder_stays(tmp_path: Path) -> None:
    with scratch_folder(tmp_path, "demo-") as kept:
        keep(kept)
        (kept / "log").touch()
    with scratch_folder(tmp_path, "demo-"):
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
