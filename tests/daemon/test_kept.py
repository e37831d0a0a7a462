"""Goal: blocks in CPU memory survive a daemon's orderly end where that is configured, and nothing wrong is served afterwards.

Method: a real daemon with a folder on tmpfs, or with a stand-in for systemd's file descriptor store, is stopped, killed and started
again; memory that a client still uses is looked for among what is kept. Content is derived from the key, so every loaded byte is
checked. What is damaged meanwhile: ``tests/cpu/test_kept.py``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import Client
from kvtierd.errors import StartupError
from kvtierd.model import Tier
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as pb
from tests.daemon.conftest import MIB
from tests.daemon.fd_store import FdStore

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
SIZE = 256 << 10
IN_CPU = bytes([Tier.CPU.bit])
NO_NVME: dict[str, Any] = {"capacity": "0"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on tmpfs."""
    made = Path(tempfile.mkdtemp(prefix="kvtierd-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FdStore]:
    made = FdStore(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["folder", "systemd"])
def keeping(request: pytest.FixtureRequest, make_daemon: MakeDaemon, folder: Path, store: FdStore) -> Callable[..., DaemonProcess]:
    """Starts daemons that keep CPU memory in either way."""

    def make(**config: dict[str, Any]) -> DaemonProcess:
        keep = str(folder) if request.param == "folder" else "systemd"
        cpu = {"capacity": "16MiB", "extent": "1MiB", "keep": keep} | config.pop("cpu", {})
        daemon = make_daemon(start=False, cpu=cpu, **config)
        if request.param == "systemd":
            store.own(daemon)
        return daemon.start()

    return make


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def content(key: bytes) -> bytes:
    return key * (SIZE // 32)


def save(client: Client, keys: list[bytes], **options: Any) -> None:
    assert client.save(keys, [content(key) for key in keys], wait_s=10.0, **options).saved == len(keys)


def held(client: Client, keys: list[bytes]) -> bytes:
    """Masks of the tiers that hold each key; every byte that can be loaded is checked."""
    tiers = client.lookup(keys, each=True).tiers
    buffers = [bytearray(SIZE) for _ in keys]
    loaded = client.load(keys, buffers, each=True)
    assert set(loaded.indexes) == {i for i, mask in enumerate(tiers) if mask}
    for index in loaded.indexes:
        assert buffers[index] == content(keys[index])
    return tiers


def restart(daemon: DaemonProcess) -> None:
    assert daemon.stop() == 0
    daemon.start()


def test_blocks_in_memory_survive_restarts(keeping: MakeDaemon, make_client: MakeClient) -> None:
    daemon = keeping(nvme=NO_NVME)
    client = make_client(daemon, SIZE)
    other = make_client(daemon, SIZE, tenant="second")
    keys, gone, short, theirs = new_keys(20), new_keys(2), new_keys(1), new_keys(5)
    save(client, keys[:10])
    save(client, gone)
    save(client, keys[10:])
    save(client, short, ttl_s=3600.0)
    save(other, theirs)
    assert client.evict(gone) == 2
    for _ in range(2):
        restart(daemon)
        client, other = make_client(daemon, SIZE), make_client(daemon, SIZE, tenant="second")
        assert held(client, keys + gone + short) == IN_CPU * 20 + bytes(2) + IN_CPU
        assert held(other, theirs) == IN_CPU * 5
        assert not any(held(other, keys)), "each tenant its own"
    more = new_keys(30)
    save(client, more)
    assert all(held(client, more)), "there is room as before"


def test_nvme_has_everything_too(keeping: MakeDaemon, make_client: MakeClient) -> None:
    daemon = keeping()
    client = make_client(daemon, SIZE, SIZE)
    keys = new_keys(12)
    assert client.save(keys, [[content(k), content(k[::-1])] for k in keys]).saved == 12
    restart(daemon)
    client = make_client(daemon, SIZE, SIZE)
    assert client.lookup(keys).tiers == bytes([Tier.CPU.bit | Tier.NVME.bit]) * 12
    out = [[bytearray(SIZE), bytearray(SIZE)] for _ in keys]
    assert client.load(keys, out).loaded == 12
    assert [[bytes(a), bytes(b)] for a, b in out] == [[content(k), content(k[::-1])] for k in keys]
    assert client.evict(keys) == 24
    restart(daemon)
    assert not any(make_client(daemon, SIZE, SIZE).lookup(keys, each=True).tiers)


def test_a_crash_keeps_nothing(keeping: MakeDaemon, make_client: MakeClient, folder: Path, store: FdStore) -> None:
    daemon = keeping(nvme=NO_NVME)
    keys = new_keys(4)
    save(make_client(daemon, SIZE), keys)
    restart(daemon)
    daemon.kill()
    assert not store.kept
    daemon.start()
    assert not any(held(make_client(daemon, SIZE), keys))
    assert [p.name for p in folder.iterdir()] in ([], ["LOCK"]), "nothing is left that takes memory for ever"


def test_memory_that_a_client_uses_is_not_kept(keeping: MakeDaemon, make_client: MakeClient) -> None:
    """A client that is cut off in a load or save may go on reading or writing for a while: nobody may get that memory."""
    daemon = keeping(nvme=NO_NVME)
    clients = {name: make_client(daemon, SIZE, tenant=name) for name in ("reads", "writes", "rests", "pins")}
    keys = new_keys(2)
    for client in clients.values():
        save(client, keys)
    with daemon.admin() as admin:
        pin = pb.PinBlocksRequest(tenant="pins", keys=b"".join(keys), expires_s=600.0)
        assert admin.PinBlocks(pin).pinned == 2
    with clients["reads"].fetch(keys[:1]) as reading, clients["writes"].reserve(new_keys(1)) as writing:
        assert len(list(reading)) == 1 and writing.granted
        restart(daemon)
    found = {name: held(make_client(daemon, SIZE, tenant=name), keys) for name in clients}
    assert found == {"reads": bytes(2), "writes": bytes(2), "rests": IN_CPU * 2, "pins": IN_CPU * 2}


def test_a_smaller_pool_takes_what_fits(keeping: MakeDaemon, make_client: MakeClient) -> None:
    daemon = keeping(nvme=NO_NVME)
    keys = new_keys(40)
    save(make_client(daemon, SIZE), keys)
    daemon.stop()
    daemon.config["cpu"]["capacity"] = "4MiB"
    daemon.start()
    client = make_client(daemon, SIZE)
    assert 12 <= sum(held(client, keys)) // Tier.CPU.bit <= 16
    assert "without room" in daemon.log()
    more = new_keys(16)
    save(client, more)
    assert all(held(client, more))


def test_a_changed_scope_takes_nothing(keeping: MakeDaemon, make_client: MakeClient) -> None:
    daemon = keeping(nvme=NO_NVME, tenants={"t": {"scope": "private"}})
    keys = new_keys(2)
    save(make_client(daemon, SIZE, tenant="t"), keys)
    daemon.stop()
    daemon.config["tenants"] = {"t": {"scope": "shared"}}
    daemon.start()
    assert not any(held(make_client(daemon, SIZE, tenant="t"), keys)), "what was saved in private stays private"


def test_extents_that_are_given_up_are_not_kept(keeping: MakeDaemon, make_client: MakeClient, folder: Path) -> None:
    """Goal: memory that was taken over and goes to others leaves nothing. Method: another tenant takes it all, then a restart."""
    daemon = keeping(nvme=NO_NVME)
    keys, others = new_keys(40), new_keys(100)
    save(make_client(daemon, SIZE), keys)
    restart(daemon)
    client = make_client(daemon, SIZE, tenant="second")
    for start in range(0, 100, 10):
        save(client, others[start : start + 10])
    before = held(client, others)
    client.close()
    restart(daemon)
    assert held(make_client(daemon, SIZE, tenant="second"), others) == before
    assert sum(p.stat().st_blocks * 512 for p in folder.iterdir()) <= 17 * MIB


def test_what_cannot_be_is_said_at_the_start(make_daemon: MakeDaemon, folder: Path, tmp_path: Path) -> None:
    def start(name: str, keep: str, capacity: str = "16MiB") -> DaemonProcess:
        return make_daemon(name, cpu={"capacity": capacity, "keep": keep}, nvme=NO_NVME)

    start("first", str(folder))
    for name, keep, said in (
        ("second", str(folder), "in use by another daemon"),
        ("third", str(tmp_path / "disk"), "name one on tmpfs"),
        ("fourth", "systemd", "FileDescriptorStoreMax"),
        ("fifth", "relative", "keep"),
        ("sixth", "/proc/nowhere", "cannot be used"),
    ):
        with pytest.raises(StartupError, match=said):
            start(name, keep)


def test_a_folder_that_is_too_small_is_refused(make_daemon: MakeDaemon, folder: Path) -> None:
    stat = os.statvfs(folder)
    if not stat.f_blocks:
        pytest.skip("this tmpfs has no limit")
    room = stat.f_bavail * stat.f_frsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if room + MIB > memory:
        pytest.skip("this tmpfs is as large as the memory, which the daemon refuses first")
    with pytest.raises(StartupError, match="has room for"):
        make_daemon(cpu={"capacity": room + MIB, "keep": str(folder), "prefault": False}, nvme=NO_NVME)
