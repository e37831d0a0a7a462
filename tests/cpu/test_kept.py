"""Goal: what was kept of CPU memory is used only where it is what it was, whatever happened to it meanwhile.

Method: a core and a pool leave blocks in a folder on tmpfs; files and index are damaged; another core and pool take over. Content
is derived from the key.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from kvtierd.config import CpuConfig
from kvtierd.core.realm import Realm
from kvtierd.core.settings import CoreConfig
from kvtierd.core.slots import NewExtent
from kvtierd.core.tier_core import TierCore
from kvtierd.errors import Reason, RequestError, StartupError
from kvtierd.memory import create_memfd, punch, seal
from kvtierd.model import NO_END, Namespace, Tier
from kvtierd.runtime.kept import keep, take_over
from kvtierd.runtime.wallclock import WallClock
from kvtierd.tiers.cpu import CpuPool
from kvtierd.tiers.keeper import INDEX, FolderKeeper, SystemdKeeper
from tests.cpu.tools import MIB

SIZES = (128 << 10, 64 << 10)
CAPACITY = 8 * MIB
NUMBERS = range(8)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kvtierd-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int, shard: int) -> bytes:
    return bytes([number + 1, shard + 1]) * (SIZES[shard] // 2)


class Daemon:
    """A core and its memory, without the rest."""

    def __init__(self, folder: Path, capacity: int = CAPACITY, now: float = 100.0, wall: float = 1e9) -> None:
        self.keeper = FolderKeeper(folder, capacity)
        self.core = TierCore(CoreConfig((0, capacity, 0), (0, MIB // 2, 0)))
        self.cpu = CpuPool(CpuConfig(capacity=capacity, extent=MIB // 2, prefault=False), self.keeper.make)
        self.now = now
        self.clock = WallClock(lambda: self.now, lambda: wall)

    async def open_realm(self, tenant: str, namespace: Namespace) -> Realm:
        return self.core.open_realm(tenant, namespace)[0]

    def save(self, numbers: range, tenant: str = "t", ttl_s: float | None = None) -> None:
        realm = self.core.open_realm(tenant, Namespace(SIZES))[0]
        session = self.core.attach(len(self.core.sessions) + 1, realm)
        grant = self.core.save(self.now, session, realm, [key_of(n) for n in numbers], ttl_s)
        for command in self.core.take_commands():
            if isinstance(command, NewExtent):
                self.cpu.create(command.extent_id, command.slot_bytes, command.slot_count)
        blocks = self.core.commit(self.now, session, grant.ticket_id, range(len(numbers)))
        assert len(blocks) == len(numbers)
        for block in blocks:
            number = int.from_bytes(block.key, "big")
            assert block.cpu is not None
            for shard, slot in enumerate(block.cpu.all_slots()):
                self.cpu.view(slot)[: SIZES[shard]] = content(number, shard)
        self.core.detach(self.now, session)

    def leave(self) -> int:
        kept = keep(self.core, self.cpu, self.keeper, self.clock, set())
        self.end()
        return kept

    def end(self) -> None:
        self.cpu.close()
        self.keeper.close()

    def take(self) -> int:
        return asyncio.run(take_over(self.core, self.cpu, self.keeper, self.clock, self.open_realm))

    def held(self, tenant: str = "t") -> list[int]:
        """Numbers that are readable, whose bytes are checked, as is the core."""
        self.core.check()
        realm = self.core.open_realm(tenant, Namespace(SIZES))[0]
        found = []
        for number in NUMBERS:
            block = realm.index.get(key_of(number))
            if block is None or block.cpu is None:
                continue
            for shard, slot in enumerate(block.cpu.all_slots()):
                assert self.cpu.view(slot)[: SIZES[shard]] == content(number, shard)
            found.append(number)
        return found


@pytest.fixture
def left(folder: Path) -> Path:
    """A folder in which eight blocks of two shards were left, the last first: two extents of the first shard, one of the other."""
    daemon = Daemon(folder)
    daemon.save(NUMBERS)
    assert daemon.leave() == 8
    assert len(extents(folder)) == 3
    return folder


def extents(folder: Path) -> list[Path]:
    return sorted(folder.glob("kvtierd-extent-*"), key=lambda p: int(p.name.rpartition("-")[2]))


def taken(folder: Path, *, saves: bool = True, **options: Any) -> list[int]:
    """What the next daemon takes over; it goes on to work with what room is left, and leaves no memory behind that it lacks."""
    daemon = Daemon(folder, **options)
    daemon.take()
    found = daemon.held()
    files = sum(p.stat().st_blocks * 512 for p in folder.iterdir() if p.name != INDEX)
    assert files <= daemon.core.state.pools[Tier.CPU].reserved_bytes
    pool = daemon.core.state.pools[Tier.CPU]
    if saves and pool.capacity_bytes - pool.reserved_bytes >= 2 * MIB:
        daemon.save(range(100, 108), tenant="new")
    daemon.core.check()
    daemon.end()
    return found


def test_everything_is_taken_over_again_and_again(folder: Path) -> None:
    daemon = Daemon(folder)
    daemon.save(NUMBERS)
    for _ in range(3):
        assert daemon.leave() == 8
        daemon = Daemon(folder)
        assert daemon.take() == 8
        assert daemon.held() == list(NUMBERS)
    daemon.end()


def test_blocks_keep_their_order_and_their_end(folder: Path) -> None:
    daemon = Daemon(folder)
    for number, life_s in ((2, None), (0, 50.0), (1, 500.0)):
        daemon.now += 1.0
        daemon.save(range(number, number + 1), ttl_s=life_s)
    daemon.leave()
    daemon = Daemon(folder, now=7.0, wall=1e9 + 100.0)
    assert daemon.take() == 2
    assert daemon.held() == [1, 2]
    realm = daemon.core.open_realm("t", Namespace(SIZES))[0]
    oldest = realm.orders[Tier.CPU].oldest()
    assert oldest is not None and oldest.block.key == key_of(2)
    assert realm.index[key_of(1)].expires_s == pytest.approx(7.0 + 500.0 - 100.0)
    assert realm.index[key_of(2)].expires_s == NO_END
    daemon.end()


def test_what_is_pinned_or_in_use_is_not_left(folder: Path) -> None:
    daemon = Daemon(folder)
    daemon.save(range(4), tenant="t")
    daemon.save(range(4), tenant="u")
    realm = daemon.core.open_realm("t", Namespace(SIZES))[0]
    session = daemon.core.attach(77, realm)
    daemon.core.load(daemon.now, session, realm, [key_of(0)], daemon.now + 9.0, each=False)
    assert daemon.leave() == 4
    daemon = Daemon(folder)
    daemon.take()
    assert daemon.held("t") == [] and daemon.held("u") == [0, 1, 2, 3]
    daemon.end()


def test_a_changed_byte_costs_its_block(left: Path) -> None:
    with extents(left)[0].open("r+b") as f:
        f.seek(2 * SIZES[0] + 77)
        byte = f.read(1)
        f.seek(2 * SIZES[0] + 77)
        f.write(bytes([byte[0] ^ 1]))
    assert taken(left) == [0, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("damage", ["missing", "short", "long", "a link", "a folder"])
def test_a_damaged_extent_costs_its_blocks(left: Path, damage: str) -> None:
    path = extents(left)[0]
    if damage in ("short", "long"):
        os.truncate(path, 4096 if damage == "short" else 2 * MIB)
    else:
        path.unlink()
        if damage == "a link":
            path.symlink_to("/dev/zero")
        elif damage == "a folder":
            path.mkdir()
    assert taken(left) == [4, 5, 6, 7]


def test_less_room_takes_what_fits(left: Path) -> None:
    assert taken(left, capacity=MIB) == [4, 5, 6, 7]


def changed(raw: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """An index with other contents and a right checksum."""
    body = json.loads(raw.partition(b"\n")[2])
    change(body)
    text = json.dumps(body).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:200] + bytes([raw[200] ^ 4]) + raw[201:],
        lambda raw: raw[:-10],
        lambda raw: b"",
        lambda raw: xxhash.xxh3_128_hexdigest(b"x").encode() + b"\nx",
        lambda raw: changed(raw, lambda body: body.update(format_version=9)),
        lambda raw: changed(raw, lambda body: body.pop("realms")),
        lambda raw: changed(raw, lambda body: body["realms"][0].update(extents=[["x"]])),
        lambda raw: changed(raw, lambda body: body["realms"][0]["realm"].update(fingerprint="00")),
    ],
)
def test_a_damaged_index_takes_nothing(left: Path, damage: Callable[[bytes], bytes]) -> None:
    (left / INDEX).write_bytes(damage((left / INDEX).read_bytes()))
    assert taken(left) == []


def test_no_index_takes_nothing(left: Path) -> None:
    (left / INDEX).unlink()
    assert taken(left) == []


@pytest.mark.parametrize("what", ["a folder", "a pipe", "a link to nowhere", "one that stays"])
def test_an_index_that_cannot_be_taken_takes_nothing(
    left: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = left / INDEX
    if what == "one that stays":
        unlink = os.unlink

        def refuse(name: str) -> None:
            if Path(name) == path:
                raise OSError(errno.EPERM, "Operation not permitted")
            unlink(name)

        monkeypatch.setattr("kvtierd.tiers.keeper.os.unlink", refuse)
    else:
        path.unlink()
        make = {"a folder": os.mkdir, "a pipe": os.mkfifo, "a link to nowhere": lambda path: os.symlink("/no/such", path)}
        make[what](path)
    assert taken(left) == []
    assert what == "a link to nowhere" or (f"{path} cannot be used" in caplog.text and "move that file away" in caplog.text)


def test_a_folder_of_somebody_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 1234, -1)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 1234)
    with pytest.raises(StartupError, match=r"belongs to user .* who can change what is kept there: chown it"):
        FolderKeeper(folder, CAPACITY)


def test_what_systemd_goes_on_keeping_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/no/such/socket")
    keeper = SystemdKeeper()
    fds = [create_memfd(INDEX, 5), create_memfd("kvtierd-extent", MIB)]
    os.pwrite(fds[0], b"index", 0)
    seal(fds[1])
    monkeypatch.setattr(keeper, "_passed", lambda: [(fds[1], "kvtierd-extent-1"), (fds[0], INDEX)])
    index, memory = keeper.take()
    assert (index, memory) == (b"", {1: fds[1]})
    assert "systemd cannot be told" in caplog.text and "NOTIFY_SOCKET" in caplog.text
    for fd in fds:
        os.close(fd)


def pages_of(cpu: CpuPool, extent_id: int) -> int:
    return os.fstat(cpu.fd(extent_id)).st_blocks * 512


def test_a_file_system_that_others_fill_kills_nobody(
    left: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever touches a page of a file for which there is no room gets a SIGBUS: so all pages are there before anybody can."""
    for path in extents(left):
        with path.open("r+b") as f:
            punch(f.fileno(), MIB // 4)
    daemon = Daemon(left)
    daemon.take()
    daemon.save(range(100, 108), tenant="new")
    held = daemon.core.state.pools[Tier.CPU].extents
    assert len(held) > len(extents(left))
    assert all(pages_of(daemon.cpu, extent_id) == daemon.cpu.size_bytes(extent_id) for extent_id in held)
    daemon.leave()

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvtierd.tiers.cpu.allocate", full)
    assert taken(left, saves=False) == []
    assert "memory that was kept cannot be used" in caplog.text
    daemon = Daemon(left)
    with pytest.raises(OSError, match="No space left"):
        daemon.cpu.create(1, MIB // 4, 2)
    assert daemon.cpu.reserved_bytes == 0
    monkeypatch.undo()
    daemon.cpu.create(1, MIB // 4, 2)
    daemon.end()


def slots(copy: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["realms"][0]["copies"][copy].__setitem__(1, value)


def extent(which: int, place: int, value: int) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["realms"][0]["extents"][which].__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda body: slots(1, body["realms"][0]["copies"][0][1])(body), [0, 1, 2, 3, 4, 5, 7]),
        (slots(0, [1 << 40, 1 << 41]), [0, 1, 2, 3, 4, 5, 6]),
        (slots(0, [-1, -2]), [0, 1, 2, 3, 4, 5, 6]),
        (slots(0, []), [0, 1, 2, 3, 4, 5, 6]),
        (lambda body: slots(0, body["realms"][0]["copies"][0][1][::-1])(body), [0, 1, 2, 3, 4, 5, 6]),
        (extent(0, 1, 7), [0, 1, 2, 3]),
        (extent(0, 1, -1), [0, 1, 2, 3]),
        (extent(0, 2, 4096), [0, 1, 2, 3]),
        (extent(0, 3, -4), [0, 1, 2, 3]),
        (lambda body: body["realms"][0]["extents"].append(body["realms"][0]["extents"][0]), list(NUMBERS)),
        (lambda body: body["realms"].append(body["realms"][0]), list(NUMBERS)),
    ],
)
def test_an_index_that_cannot_be_true_never_gives_wrong_bytes(
    left: Path, change: Callable[[dict[str, Any]], object], kept: list[int]
) -> None:
    (left / INDEX).write_bytes(changed((left / INDEX).read_bytes(), change))
    assert taken(left) == kept


def test_a_tenant_without_a_place_loses_only_its_own(left: Path, caplog: pytest.LogCaptureFixture) -> None:
    daemon = Daemon(left)

    async def refuse(tenant: str, namespace: Namespace) -> Realm:
        raise RequestError(Reason.LIMIT, "too many")

    assert asyncio.run(take_over(daemon.core, daemon.cpu, daemon.keeper, daemon.clock, refuse)) == 0
    assert "too many" in caplog.text
    daemon.end()


def test_a_keeper_that_fails_loses_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Daemon(folder)
    daemon.save(NUMBERS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtierd.tiers.keeper.os.rename", full)
    assert daemon.leave() == 0
    assert "No space left" in caplog.text
    monkeypatch.undo()
    assert taken(folder) == []
