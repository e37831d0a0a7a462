"""Goal: the descriptor socket's file has the right permissions, is owned by one daemon at a time, and nothing stale blocks it.

Method: real sockets and files in the way.
"""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.errors import StartupError
from tests.cpu.tools import Daemon, Raw

Connect = Callable[[], Raw]


def test_the_socket_has_its_permissions_and_goes_with_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "fd.sock"
    running = Daemon(path, mode=0o640).start()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    running.stop()
    assert not path.exists()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "fd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    running = Daemon(path).start()
    client = Raw(path)
    assert client.join(running.session(1)).HasField("joined")
    client.close()
    running.stop()


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_socket_that_somebody_serves_is_left_alone(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "fd.sock"
    with socket.socket(socket.AF_UNIX, kind) as alive:
        alive.bind(str(path))
        alive.listen(0)
        for _ in range(2):
            with pytest.raises(StartupError, match=r"set server.descriptor_socket"):
                Daemon(path).start()
        assert path.exists()


def test_a_second_daemon_on_the_path_is_refused(daemon: Daemon, raw: Connect) -> None:
    with pytest.raises(StartupError, match="another kvtierd"):
        Daemon(daemon.path).start()
    assert raw().join(b"token-1").HasField("joined"), "the first one goes on"


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "fd.sock"
    path.write_text("precious")
    with pytest.raises(StartupError, match="is no socket"):
        Daemon(path).start()
    assert path.read_text() == "precious"


def test_impossible_paths_are_explained(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="longer than 107 bytes"):
        Daemon(tmp_path / ("x" * 120)).start()
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot listen on the descriptor socket"):
        Daemon(tmp_path / "file" / "fd.sock").start()
