"""Goal: whom server.allow_users and server.allow_groups name may use both sockets, nobody else, and a refusal says what to do.

Method: a real daemon; children that become other users before they connect. What needs no other user is tried without.
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvtierd
from kvtierd.client import Client
from kvtierd.config import load_config
from kvtierd.errors import ConfigError, StartupError
from kvtierd.service import peers
from kvtierd.service.peers import Peers, credentials_of
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import fdpass_pb2 as fd

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
NAMED, MEMBER, STRANGER, GROUP = 47_110, 47_111, 47_112, 47_120

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become other users")
READ_FROM = str(Path(kvtierd.__file__).parents[1])
SAVE_AS = """
import os, sys
uid, gid, groups, address = int(sys.argv[1]), int(sys.argv[1]), [int(g) for g in sys.argv[2].split(",") if g], sys.argv[3]
sys.path.insert(0, sys.argv[4])
import kvtierd.client, kvtierd.v1.kvtier_pb2_grpc, grpc_status.rpc_status, encodings.idna
from kvtierd.client import Client
from kvtierd.model import Namespace
os.setgroups(groups); os.setgid(gid); os.setuid(uid)
try:
    with Client(Namespace(shard_bytes=(4096,)), address, require=True, timeout_s=float(sys.argv[5])) as client:
        print("saved", client.save([os.urandom(32)], [bytes(4096)]).saved)
except Exception as e:
    print(type(e).__name__, e)
"""

JOIN_AS = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[2])
sock.send(bytes.fromhex(sys.argv[3]))
print(sock.recv(65536).hex())
"""


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A folder that every user may look into; pytest's own are for one user."""
    with tempfile.TemporaryDirectory(prefix="kvt") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def save_as(daemon: DaemonProcess, uid: int, *groups: int, timeout_s: float = 10.0) -> str:
    """What becomes of a save by a process of another user, which goes on trying until its time is over."""
    command = [sys.executable, "-c", SAVE_AS, str(uid), ",".join(map(str, groups)), daemon.address, READ_FROM, str(timeout_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


@needs_root
def test_named_users_and_members_of_named_groups_come_in_and_nobody_else(make_daemon: MakeDaemon, open_dir: Path) -> None:
    path = open_dir / "run" / "k.sock"
    daemon = make_daemon(server={"socket": str(path), "allow_users": [NAMED], "allow_groups": [str(GROUP)]})
    assert "saved 1" in save_as(daemon, NAMED)
    assert "saved 1" in save_as(daemon, MEMBER, 5, GROUP), "also by a group that is not its first one"
    told = save_as(daemon, STRANGER, 5, timeout_s=3.0)
    assert "DaemonUnavailableError" in told
    assert f"name user {STRANGER} in server.allow_users" in told


@needs_root
def test_other_users_need_to_be_named(make_daemon: MakeDaemon, open_dir: Path) -> None:
    daemon = make_daemon(server={"socket": str(open_dir / "k.sock")})
    for name in ("k.sock", "k.fd.sock"):
        assert stat.S_IMODE((open_dir / name).stat().st_mode) == 0o600
    assert "no permission for" in save_as(daemon, NAMED, timeout_s=3.0)


def test_who_is_let_in() -> None:
    allowed = Peers(0o600, [NAMED], [GROUP])
    assert allowed.admit(os.getuid(), [])
    assert allowed.admit(0, [])
    assert allowed.admit(NAMED, [])
    assert allowed.admit(STRANGER, [3, GROUP])
    assert not allowed.admit(STRANGER, [3])
    assert not Peers(0o600).admit(STRANGER, [])
    assert Peers(0o666).admit(STRANGER, [])


@needs_root
def test_the_descriptor_socket_asks_who_is_there(make_daemon: MakeDaemon, make_client: MakeClient, open_dir: Path) -> None:
    path = open_dir / "k.sock"
    daemon = make_daemon(server={"socket": str(path), "allow_users": [NAMED]})
    client = make_client(daemon, 4096)
    # As if the access control list had been lost, by a copy or by hand: everybody can connect.
    path.with_name("k.fd.sock").chmod(0o666)
    join = fd.DescriptorRequest(join=fd.Join(session=client.session_token, shard=-1, numa_node=-1)).SerializeToString()
    command = [sys.executable, "-c", JOIN_AS, str(STRANGER), str(path.with_name("k.fd.sock")), join.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    answer = fd.DescriptorResponse.FromString(bytes.fromhex(done.stdout))
    assert answer.error.reason == "PERMISSION"
    assert "server.allow_users" in answer.error.message


def test_a_peer_is_who_the_kernel_says() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pid, uid, gids = credentials_of(ours)
    assert (pid, uid) == (os.getpid(), os.getuid())
    assert set(gids) >= {os.getgid()}
    assert set(gids) <= {os.getgid(), *os.getgroups()}


def test_a_folder_of_the_daemons_own_follows_the_lists(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, found = tmp_path / "made", tmp_path / "found"
    for folder in (made, found):
        folder.mkdir(mode=0o700)
    Peers(0o600, [NAMED]).open_folder(made, made=True)
    before = os.getxattr(made, peers.ACL)
    Peers(0o600, [NAMED, MEMBER]).open_folder(made, made=False)
    assert len(os.getxattr(made, peers.ACL)) > len(before), "the daemon made it, at an earlier start"
    assert not caplog.records
    Peers(0o600, [NAMED]).open_folder(found, made=False)
    assert not os.listxattr(found), "a folder that was there is left alone"
    assert "let them through" in caplog.text
    caplog.clear()
    found.chmod(0o711)
    Peers(0o600, [NAMED]).open_folder(found, made=False)
    assert not caplog.records


def test_lists_beside_a_wide_mode_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set it to 0o600"):
        load_config(env={}, flags={"server.allow_users": [NAMED], "server.socket_mode": 0o666})
    config = load_config(env={"KVTIERD_SERVER_ALLOW_USERS": f"root:{NAMED}", "KVTIERD_SERVER_ALLOW_GROUPS": str(GROUP)})
    assert (config.server.allow_users, config.server.allow_groups) == ([0, NAMED], [GROUP])
    for value in ("nobody-has-this-name", -1, 1.5, True, "", 2**32, "9" * 40):
        with pytest.raises(ConfigError, match=r"allow_users\.0: .*(write a name)"):
            load_config(env={}, flags={"server.allow_users": [value]})


def test_a_file_system_without_lists_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ACL", "user.not.an.acl")  # which no socket can have
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        with pytest.raises(StartupError, match="to a folder on another file system"):
            Peers(0o600, [NAMED]).open_socket(path)
        Peers(0o600).open_socket(path)
