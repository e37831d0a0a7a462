"""Goal: a daemon that cannot start says why in one line that names the fix; one that can clears up after a dead one.

Method: real processes with bad configurations, occupied folders and sockets; exit status and log are checked.
"""

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import Client
from kvtierd.model import Tier
from kvtierd.testing.daemon import DaemonProcess
from tests.daemon.conftest import MIB

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]


def refuse(daemon: DaemonProcess) -> str:
    """Start a daemon that must not start; returns what it said."""
    status = daemon.launch().wait(60)
    daemon.process = None
    text = daemon.log()
    assert status in (1, 2), text
    assert "Traceback" not in text, text
    return text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"cpu": {"capasity": "1GiB"}}, ["cpu.capasity", "did you mean cpu.capacity"]),
        ({"cpu": {"capacity": "1GiX"}}, ["cpu.capacity", "GiX", "256MiB"]),
        ({"cpu": {"ttl": "10 parsecs"}}, ["cpu.ttl", "parsecs"]),
        ({"cpu": {"capacity": "900TiB"}}, ["cpu.capacity"]),
        ({"nvme": {"capacity": "900TiB"}}, ["nvme.capacity"]),
        ({"nvme": {"folders": ["/proc/kvtierd"]}}, ["/proc/kvtierd"]),
        ({"server": {"listen": "127.0.0.1:9460"}}, ["insecure"]),
        ({"server": {"socket": "/tmp/" + "x" * 120}}, ["server.socket"]),
        ({"hbm": {"capacity": "1GiB"}}, ["hbm.capacity"]),
    ],
)
def test_bad_configuration_is_refused(make_daemon: MakeDaemon, config: dict[str, Any], words: list[str]) -> None:
    text = refuse(make_daemon(start=False, **config))
    for word in words:
        assert word in text


def test_volatile_folder_is_refused(make_daemon: MakeDaemon) -> None:
    if not os.path.ismount("/dev/shm"):
        pytest.fail("needs /dev/shm on tmpfs, which every Linux has")
    folder = Path(f"/dev/shm/kvtierd-test-{os.getpid()}")
    text = refuse(make_daemon(start=False, nvme={"folders": [str(folder)], "allow_volatile": False}))
    assert "tmpfs" in text
    assert "allow_volatile" in text
    assert not any(folder.glob("*.kvt"))
    if folder.exists():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_second_daemon_on_the_same_folder(make_daemon: MakeDaemon) -> None:
    first = make_daemon("one")
    second = make_daemon("two", start=False)
    second.config["nvme"]["folders"] = first.config["nvme"]["folders"]
    text = refuse(second)
    assert str(first.pid) in text
    assert first.status().version


def test_second_daemon_on_the_same_socket(make_daemon: MakeDaemon) -> None:
    first = make_daemon("one")
    second = make_daemon("two", start=False)
    second.config["server"]["socket"] = first.config["server"]["socket"]
    assert "another kvtierd" in refuse(second)
    assert first.status().version


def test_foreign_listener_on_the_socket_is_left_alone(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(start=False)
    daemon.folder.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(daemon.config["server"]["socket"])
        listener.listen()
        assert "another program listens" in refuse(daemon)


def test_stale_sockets_and_files_are_dealt_with(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    daemon.kill()
    assert (daemon.folder / "k.sock").exists(), "a killed daemon leaves its socket file"
    daemon.start()
    assert make_client(daemon, MIB).lookup([b"k" * 32]).held == 0
    assert (daemon.folder / "k.sock").stat().st_mode & 0o777 == 0o600
    assert (daemon.folder / "k.fd.sock").stat().st_mode & 0o777 == 0o600
    assert daemon.stop() == 0
    assert not (daemon.folder / "k.sock").exists()
    (daemon.folder / "k.sock").write_text("not a socket")
    assert "is no socket" in refuse(daemon)


def test_without_nvme(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(nvme={"capacity": 0}, cpu={"capacity": "8MiB"})
    client = make_client(daemon, MIB)
    keys = [os.urandom(32) for _ in range(20)]
    assert client.save(keys, [bytes(MIB)] * 20, wait_s=5).rejected == {}
    held = client.lookup(keys, each=True)
    assert 1 <= held.held <= 8, "memory alone keeps the newest"
    assert held.tiers[-1]
    assert [t.tier for t in daemon.status().tiers] == [2]


def test_lowered_capacity_is_kept(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon(nvme={"capacity": "64MiB", "segment": "4MiB"})
    client = make_client(daemon, MIB)
    keys = [os.urandom(32) for _ in range(40)]
    assert client.save(keys, [bytes(MIB)] * 40, wait_s=10).saved == 40
    client.close()
    assert daemon.stop() == 0
    daemon.config["nvme"]["capacity"] = "16MiB"
    daemon.start()
    nvme = daemon.status().tiers[-1]
    assert nvme.used_bytes <= nvme.reserved_bytes <= nvme.capacity_bytes <= 16 * MIB
    assert 0 < make_client(daemon, MIB).lookup(keys, each=True).held < 16


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_the_start_is_an_orderly_one(
    make_daemon: MakeDaemon, make_client: MakeClient, tmp_path: Path, number: signal.Signals
) -> None:
    key, waits, go = tmp_path / "key", tmp_path / "waits", tmp_path / "go"
    key.write_text(os.urandom(32).hex())
    command = f"sh -c 'touch {waits}; while [ ! -e {go} ]; do sleep 0.05; done; cat {key}'"
    with tempfile.TemporaryDirectory(prefix="kvtierd-test-", dir="/dev/shm") as kept:
        cpu = {"capacity": "8MiB", "keep": kept}
        daemon = make_daemon(start=False, cpu=cpu, nvme={"capacity": "64MiB", "encryption_key_command": command})
        go.touch()
        daemon.start()
        keys = [os.urandom(32) for _ in range(4)]
        assert make_client(daemon, MIB).save(keys, [bytes(MIB)] * 4).saved == 4
        assert daemon.stop() == 0
        go.unlink()
        waits.unlink()
        daemon.launch()
        while not waits.exists():
            time.sleep(0.02)
        assert daemon.process is not None
        daemon.process.send_signal(number)
        time.sleep(0.1)
        go.touch()
        assert daemon.end(number) == 0
        assert "the start is finished first" in daemon.log()
        assert not (daemon.folder / "k.sock").exists()
        daemon.start()
        held = make_client(daemon, MIB).lookup(keys, each=True)
        assert all(mask & Tier.CPU.bit for mask in held.tiers), "memory that was taken over was kept again"
        assert daemon.stop() == 0
