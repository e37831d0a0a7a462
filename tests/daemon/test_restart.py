"""Goal: blocks on NVMe survive every end of the daemon, and nothing wrong is served afterwards.

Method: a real daemon is stopped or killed at chosen and at random moments, its files are damaged, and a new one on the same
folder must give each key's bytes or a miss. Content is derived from the key, so every loaded byte can be checked.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtierd.client import Client
from kvtierd.model import Tier
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as pb
from tests.daemon.conftest import MIB
from tests.daemon.test_roundtrip import to_nvme_only

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
SIZE = 256 * 1024


def content(key: bytes) -> np.ndarray:
    """What a key must hold."""
    return np.random.default_rng(int.from_bytes(key[:8], "little")).integers(0, 256, SIZE, dtype=np.uint8)


def load_all(client: Client, keys: list[bytes]) -> set[int]:
    """Load every key that is held, check its bytes, and return which were."""
    out = [np.zeros(SIZE, np.uint8) for _ in keys]
    result = client.load(keys, out, each=True)
    for index in result.indexes:
        assert np.array_equal(out[index], content(keys[index])), f"wrong bytes for key {index}"
    return set(result.indexes)


def test_sigterm_writes_everything_down(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE)
    keys = [os.urandom(32) for _ in range(40)]
    assert client.save(keys, [content(k) for k in keys]).saved == 40
    client.close()
    assert daemon.stop() == 0
    daemon.start()
    again = make_client(daemon, SIZE)
    assert again.lookup(keys).tiers == bytes([Tier.NVME.bit]) * 40
    assert load_all(again, keys) == set(range(40))


def test_sigkill_keeps_what_reached_nvme_and_evictions_hold(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE)
    keys = [os.urandom(32) for _ in range(40)]
    client.save(keys, [content(k) for k in keys])
    to_nvme_only(daemon)
    client.evict(keys[:10])
    used = {t.tier: t.used_bytes for t in daemon.status().tiers}
    client.close()
    daemon.kill()
    daemon.start()
    assert {t.tier: t.used_bytes for t in daemon.status().tiers} == used, "usage is right at once"
    assert load_all(make_client(daemon, SIZE), keys) == set(range(10, 40))


def test_killed_at_random_moments(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    rng = random.Random(7)
    daemon = make_daemon(cpu={"capacity": "8MiB"}, nvme={"capacity": "24MiB", "snapshot_journal": "8KiB"})
    keys = [bytes([i]) * 32 for i in range(200)]
    seen = 0
    for _ in range(6):
        client = make_client(daemon, SIZE)
        client.require = False
        stop = threading.Event()

        def traffic(client: Client = client, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                some = rng.sample(keys, 8)
                client.save(some, [content(k) for k in some], wait_s=0.2)
                load_all(client, rng.sample(keys, 8))

        thread = threading.Thread(target=traffic)
        thread.start()
        time.sleep(rng.uniform(0.2, 0.8))
        daemon.kill()
        stop.set()
        thread.join()
        client.close()
        daemon.start()
        client = make_client(daemon, SIZE)
        held = load_all(client, keys)
        seen += len(held)
        for tier in daemon.status().tiers:
            assert tier.used_bytes <= tier.reserved_bytes <= tier.capacity_bytes
        files = sum(p.stat().st_blocks * 512 for p in (daemon.folder / "nvme").rglob("*") if p.is_file())
        assert files <= 24 * MIB + (1 << 20), "segments stay below the capacity; the journal is small"
    assert seen > 0


@pytest.mark.parametrize("damage", ["flip", "truncate", "swap"])
def test_damaged_segments_give_misses(make_daemon: MakeDaemon, make_client: MakeClient, damage: str) -> None:
    daemon = make_daemon(nvme={"segment": "4MiB"})
    client = make_client(daemon, SIZE)
    keys = [os.urandom(32) for _ in range(40)]
    client.save(keys, [content(k) for k in keys])
    client.close()
    assert daemon.stop() == 0
    segments = sorted(p for p in (daemon.folder / "nvme").rglob("*") if p.is_file() and p.stat().st_size >= MIB)
    assert segments
    for path in segments:
        damage_file(path, damage)
    daemon.start()
    again = make_client(daemon, SIZE)
    held = load_all(again, keys)
    assert len(held) < 40, "the damage must be noticed"
    assert again.lookup(keys, each=True).held == len(held), "what failed is forgotten"
    # The slots of what failed are free again.
    assert again.save(keys, [content(k) for k in keys], wait_s=10).rejected == {}


def damage_file(path: Path, how: str) -> None:
    stride = 4096 + SIZE
    raw = bytearray(path.read_bytes())
    if how == "flip":
        for start in range(0, len(raw) - stride + 1, 2 * stride):
            raw[start + 4096 + 777] ^= 0x10
        path.write_bytes(raw)
    elif how == "truncate":
        os.truncate(path, len(raw) // 2)
    else:
        raw[:stride], raw[stride : 2 * stride] = raw[stride : 2 * stride], raw[:stride]
        path.write_bytes(raw)


def test_encrypted_blocks_come_back_with_their_key_alone(make_daemon: MakeDaemon, make_client: MakeClient, tmp_path: Path) -> None:
    secret, path = "5eed" * 16, tmp_path / "nvme.key"
    path.write_text(secret)
    path.chmod(0o600)
    daemon = make_daemon(nvme={"encryption_key_file": str(path)})
    client = make_client(daemon, SIZE)
    keys = [os.urandom(32) for _ in range(10)]
    assert client.save(keys, [content(k) for k in keys]).saved == 10
    client.close()
    assert daemon.stop() == 0
    (raw,) = (p.read_bytes() for p in (daemon.folder / "nvme").glob("segment-*"))
    assert not any(content(k)[:64].tobytes() in raw for k in keys)
    daemon.start()
    assert daemon.status().tiers[-1].encrypted
    client = make_client(daemon, SIZE)
    assert load_all(client, keys) == set(range(10))
    client.close()
    with daemon.admin() as stub:
        told = stub.GetConfig(pb.GetConfigRequest()).toml + stub.GetMetrics(pb.GetMetricsRequest()).text
    daemon.kill()
    path.write_text("0123456789abcdef" * 4)
    daemon.start()
    client = make_client(daemon, SIZE)
    assert load_all(client, keys) == set()
    assert client.save(keys, [content(k) for k in keys]).saved == 10
    assert "encrypted with another key than the one that nvme.encryption_key_* gives" in daemon.log()
    assert secret not in told + daemon.log() and bytes.fromhex(secret) not in raw


def test_stopped_daemon_costs_a_client_no_more_than_its_deadline(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE, timeout_s=20.0)
    client.require = False
    keys = [os.urandom(32) for _ in range(4)]
    client.save(keys, [content(k) for k in keys])
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert client.load(keys, [np.zeros(SIZE, np.uint8) for _ in keys], timeout_s=0.3).loaded == 0
        assert client.lookup(keys, timeout_s=0.3).held == 0
        assert time.monotonic() - began < 5.0
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    until = time.monotonic() + 20
    while load_all(client, keys) != set(range(4)):
        assert time.monotonic() < until, "the client comes back by itself"
        time.sleep(0.05)


def test_blocks_of_a_realm_that_was_lost_never_come_back_as_another_ones(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE)
    keys = [os.urandom(32) for _ in range(4)]
    assert client.save(keys, [content(k) for k in keys]).saved == 4
    to_nvme_only(daemon)
    client.close()
    daemon.kill()
    path = Path(daemon.config["nvme"]["folders"][0]) / "realms.log"
    path.write_bytes(path.read_bytes().replace(b'"tenant": "', b'"tenant": "x'))
    daemon.start()
    assert "passed over" in daemon.log()
    make_client(daemon, SIZE, model="other").close()  # the next realm
    daemon.kill()
    daemon.start()
    assert daemon.status().blocks == 0
