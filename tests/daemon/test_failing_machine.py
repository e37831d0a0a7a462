"""Goal: a disk that dies under the daemon, a clock that jumps and a full /dev/shm cost cached blocks at the most: never an answer,
a wrong byte or the daemon.

Method: a real daemon over a preloaded library that puts faults between it and its files (kvtierd.testing.faults.disk), and in a
mount namespace of its own; what is served before, meanwhile and afterwards is compared with what the keys stand for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtierd.client import Client
from kvtierd.model import Tier
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.testing.faults.disk import FaultyDisk, compiler
from kvtierd.v1 import admin_pb2 as pb
from tests.daemon.conftest import MIB
from tests.daemon.test_any_number import reason_of
from tests.daemon.test_hostile import until
from tests.daemon.test_restart import SIZE, content, load_all
from tests.daemon.test_roundtrip import to_nvme_only
from tests.daemon.test_start import refuse

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
YEAR_S = 365 * 86_400


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDisk]:
    if compiler() is None:
        pytest.skip("faults below the daemon need a C compiler")
    found = FaultyDisk(tmp_path / "disk", tmp_path / "faults")
    yield found
    found.close()


@pytest.fixture
def make_faulty(disk: FaultyDisk, make_daemon: MakeDaemon) -> MakeDaemon:
    """Daemons whose NVMe folders, one or those that are named, lie on the disk."""

    def make(*names: str, **config: dict[str, Any]) -> DaemonProcess:
        folders = [str(disk.under / name) for name in names or ["a"]]
        nvme = {"folders": folders, "capacity": "64MiB", "segment": "4MiB"} | config.pop("nvme", {})
        daemon = make_daemon(start=False, nvme=nvme, **config)
        daemon.environment = disk.environment
        return daemon.start()

    return make


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def save(client: Client, keys: list[bytes]) -> None:
    assert client.save(keys, [content(key) for key in keys], wait_s=10).rejected == {}


def check_log(daemon: DaemonProcess) -> str:
    text = daemon.log()
    assert "Traceback" not in text, text[-4000:]
    assert "CRITICAL" not in text, text[-4000:]
    return text


# ---- disks


def test_a_journal_on_a_dead_disk(disk: FaultyDisk, make_faulty: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_faulty()
    client = make_client(daemon, SIZE)
    keys = new_keys(20)
    save(client, keys)
    to_nvme_only(daemon)
    save(client, others := new_keys(8))
    disk.kill("journal-")
    with daemon.admin() as stub, pytest.raises(grpc.RpcError) as refused:
        stub.EvictBlocks(pb.EvictBlocksRequest(keys=keys[0]), timeout=20)
    assert reason_of(refused.value) == "IO"
    with daemon.admin() as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Checkpoint(pb.CheckpointRequest(), timeout=20)
    assert reason_of(refused.value) == "IO"
    assert client.lookup(keys[:1]).held == 0, "evicted all the same"
    assert load_all(client, keys[1:]) == set(range(19)), "what is on NVMe can be read"
    save(client, new_keys(100))
    assert load_all(client, others) == set(range(8)), "what cannot be written down stays in memory"
    disk.heal()
    with daemon.admin() as stub:
        assert stub.Checkpoint(pb.CheckpointRequest(), timeout=20).copies >= 19
    to_nvme_only(daemon)
    daemon.kill()
    daemon.start()
    again = make_client(daemon, SIZE)
    assert load_all(again, keys) == set(range(1, 20)), "the eviction was recorded in the end"
    check_log(daemon)


def test_one_of_two_folders_is_lost(disk: FaultyDisk, make_faulty: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_faulty("a", "b", nvme={"segment": "16MiB"})
    client = make_client(daemon, SIZE)
    for _ in range(6):
        save(client, keys := new_keys(20))
        to_nvme_only(daemon)
    assert all(list((disk.under / name).glob("segment-*")) for name in "ab"), "both folders have blocks"
    disk.kill("/b")
    assert until(lambda: _stays(daemon, client), 60), daemon.log()[-3000:]
    assert load_all(client, keys) <= set(range(20))
    with daemon.admin() as stub:
        text = stub.GetMetrics(pb.GetMetricsRequest()).text
    assert any(f'folder="{disk.under}/b"' in line and float(line.split()[-1]) > 0 for line in text.splitlines() if line[0] != "#")
    assert f"nvme folder {disk.under}/b" in check_log(daemon)
    save(client, keys := new_keys(20))
    client.close()
    assert daemon.stop() == 0
    disk.heal()
    daemon.start()
    load_all(make_client(daemon, SIZE), keys)
    check_log(daemon)


def _stays(daemon: DaemonProcess, client: Client) -> bool:
    """New blocks reach NVMe."""
    save(client, keys := new_keys(4))
    with daemon.admin() as stub:
        stub.Drain(pb.DrainRequest(timeout_s=5, resume=True), timeout=20)
    return all(tiers & Tier.NVME.bit for tiers in client.lookup(keys, each=True).tiers)


@pytest.mark.parametrize("part", ["journal-", "snapshot-", "pool.json"])
def test_a_start_on_a_dead_disk_says_why(disk: FaultyDisk, make_faulty: MakeDaemon, make_client: MakeClient, part: str) -> None:
    daemon = make_faulty("a", "b")
    keys = new_keys(20)
    save(make_client(daemon, SIZE), keys)
    assert daemon.stop() == 0
    disk.kill(part)
    text = refuse(daemon)
    assert str(disk.under) in text
    assert "Input/output error" in text
    disk.heal()
    daemon.start()
    assert load_all(make_client(daemon, SIZE), keys) == set(range(20)), "nothing was changed meanwhile"


def test_a_start_without_one_of_two_folders(disk: FaultyDisk, make_faulty: MakeDaemon, make_client: MakeClient) -> None:
    vip = {"class": "premium", "nvme_reserve": "48MiB", "cpu_reserve": "1MiB"}
    daemon = make_faulty("a", "b", nvme={"segment": "16MiB"}, tenants={"vip": vip})
    client = make_client(daemon, SIZE)
    for _ in range(6):
        save(client, keys := new_keys(20))
        to_nvme_only(daemon)
    client.close()
    whole_bytes = daemon.status().tiers[-1].capacity_bytes
    assert daemon.stop() == 0
    disk.kill("/b")
    daemon.start()
    tier = daemon.status().tiers[-1]
    problems = {f.path: f.problem for f in tier.folders}
    assert problems[f"{disk.under}/a"] == "" and problems[f"{disk.under}/b"].startswith("lost: ")
    assert "Input/output error" in problems[f"{disk.under}/b"] and tier.capacity_bytes < whole_bytes
    assert _reserves(daemon) == (0, MIB, 0), "what does not fit without the folder waits for it"
    assert "nvme_reserve: the reserves on NVMe would be 48MiB" in daemon.status().tenant_problems["vip"]
    with daemon.admin() as stub:
        text = stub.GetMetrics(pb.GetMetricsRequest()).text
    assert f'kvtierd_nvme_folder_up{{folder="{disk.under}/b"}} 0.0' in text
    client = make_client(daemon, SIZE)
    save(client, fresh := new_keys(20))
    to_nvme_only(daemon)
    client.close()
    daemon.kill()
    disk.heal()
    daemon.start()
    assert not any(f.problem for f in daemon.status().tiers[-1].folders)
    assert _reserves(daemon) == (0, MIB, 48 * MIB) and not daemon.status().tenant_problems
    client = make_client(daemon, SIZE)
    load_all(client, keys)
    assert load_all(client, fresh) == set(range(20)), "what was saved meanwhile is there"
    assert "was away while others of its cache were in use" in check_log(daemon)


def _reserves(daemon: DaemonProcess) -> tuple[int, ...]:
    with daemon.admin() as stub:
        return tuple(t.reserve_bytes for t in stub.ListTenants(pb.ListTenantsRequest(tenant="vip")).tenants[0].tiers)


def test_a_dead_disk_holds_no_shutdown_up(disk: FaultyDisk, make_faulty: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_faulty(server={"drain_timeout": "2s"})
    client = make_client(daemon, SIZE)
    save(client, new_keys(20))
    disk.kill("/a")
    client.close()
    assert daemon.stop() == 0
    assert "lost" in check_log(daemon)


def test_sigterm_leaves_a_snapshot_of_everything(disk: FaultyDisk, make_faulty: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_faulty()
    client = make_client(daemon, SIZE)
    keys = new_keys(40)
    save(client, keys)
    assert daemon.stop() == 0
    folder = disk.under / "a"
    assert [p.stat().st_size for p in folder.glob("snapshot-*")] == [64 + 40 * 72]
    newest = max(folder.glob("journal-*"), key=lambda p: int(p.stem.split("-")[1]))
    assert newest.stat().st_size == 64, "nothing was left for the journal"
    # Only the snapshot names the blocks now.
    for path in folder.glob("journal-*"):
        path.unlink()
    daemon.start()
    assert load_all(make_client(daemon, SIZE), keys) == set(range(40))


# ---- time


def test_a_daemon_that_was_stopped_goes_on(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE)
    keys = new_keys(10)
    save(client, keys)
    sessions = {s.id for s in daemon.status().sessions}
    os.kill(daemon.pid, signal.SIGSTOP)
    client.load(keys, [bytearray(SIZE) for _ in keys], timeout_s=0.2)
    os.kill(daemon.pid, signal.SIGCONT)
    assert until(lambda: load_all(client, keys) == set(range(10)), 20)
    assert until(lambda: not any(t.pinned_bytes for t in daemon.status().tiers)), "what was granted too late is given back"
    assert sessions <= {s.id for s in daemon.status().sessions}, "the session outlives it"
    check_log(daemon)


@pytest.mark.parametrize("years", [-20, 20])
def test_a_clock_that_jumps(disk: FaultyDisk, make_faulty: MakeDaemon, make_client: MakeClient, years: int) -> None:
    daemon = make_faulty(nvme={"capacity": "64MiB", "write_budget": "1GiB"})
    client = make_client(daemon, SIZE)
    lasting, passing = new_keys(5), new_keys(5)
    save(client, lasting)
    assert client.save(passing, [content(k) for k in passing], ttl_s=3600.0).saved == 5
    disk.move_clock(years * YEAR_S)
    assert load_all(client, lasting + passing) == set(range(10)), "lives count on a clock that does not jump"
    save(client, new_keys(60))
    to_nvme_only(daemon)
    assert load_all(client, lasting + passing) == set(range(10))
    client.close()
    daemon.kill()
    daemon.start()
    assert load_all(make_client(daemon, SIZE), lasting) == set(range(5))
    disk.move_clock(-years * YEAR_S)
    assert daemon.stop() == 0
    daemon.start()
    assert load_all(make_client(daemon, SIZE), lasting) == set(range(5))
    check_log(daemon)


# ---- memory


def test_a_full_dev_shm_is_none_of_our_business(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    fill = "head -c 64k /dev/zero > /dev/shm/full && ! head -c 1 /dev/zero > /dev/shm/more"
    inside = f"mount -t tmpfs -o size=64k tmpfs /dev/shm && {fill}"
    unshare = [shutil.which("unshare") or "unshare", "--mount", "--propagation", "private", "sh", "-c"]
    if not shutil.which("unshare") or subprocess.run([*unshare, inside], capture_output=True, check=False).returncode:
        pytest.skip("needs leave to mount in a namespace of its own")
    daemon = make_daemon(start=False, cpu={"capacity": "32MiB"})
    daemon.command = [*unshare, f'{inside} 2>/dev/null; exec "$@"', "sh", sys.executable, "-m", "kvtierd"]
    daemon.start()
    client = make_client(daemon, MIB)
    keys = new_keys(16)
    assert client.save(keys, [bytes(MIB)] * 16).saved == 16
    assert client.load(keys, [bytearray(MIB) for _ in keys]).loaded == 16
    check_log(daemon)
