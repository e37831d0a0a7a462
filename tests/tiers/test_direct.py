"""Goal: blocks move between GPU memory and NVMe with the right bytes, whatever becomes of the direct way.

Method: the NVMe store over the stand-in for the CUDA driver, whose memory tests can look at, with transfers that do as they are
told. On a GPU, with kvikio.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tomli_w

from kvtierd import cuda
from kvtierd.config import load_config
from kvtierd.cuda import Device
from kvtierd.errors import ConfigError, StartupError
from kvtierd.model import PAGE_BYTES, round_up, slot_id
from kvtierd.testing.cuda import FakeGpus
from kvtierd.testing.cuda.direct import FileIo
from kvtierd.tiers import device_io, slot_io
from kvtierd.tiers.base import BlockIo, DeviceRange, RealmInfo, Result
from kvtierd.tiers.device_io import KvikioIo, open_device_io
from kvtierd.tiers.direct_path import DirectError, DirectPath
from kvtierd.tiers.nvme import NvmeStore

from .conformance import assert_held, block, key_of, payload, realm_of, slot_bytes_for
from .nvme_tools import config_for, crash, flip, open_store, segment_path

MIB = 1 << 20
SIZES = (PAGE_BYTES, 5000, 300_000, 2 * MIB, 9 * MIB + 123)
GPU_BYTES = 192 * MIB
REALM = realm_of(300_000, 5000)
SLOTS = 8


@pytest.fixture
def gpus(tmp_path: Path) -> FakeGpus:
    return FakeGpus(tmp_path / "gpu", size_bytes=GPU_BYTES)


@pytest.fixture
def device(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    for name, value in gpus.environment().items():
        if name != "LD_LIBRARY_PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "_LIBRARY", str(gpus.library))
    cuda._driver.cache_clear()
    yield Device(0)
    cuda._driver.cache_clear()


class Tier:
    """A store with a direct way, and GPU memory for blocks."""

    def __init__(self, folder: Path, device: Device, io: Any = None, key_file: Path | None = None) -> None:
        self.folder, self.device = folder, device
        self.io = FileIo() if io is None else io
        self.config = config_for(folder, segment=64 * MIB, encryption_key_file=key_file)
        self.store: NvmeStore
        self.direct: DirectPath
        self.memory = device.allocate(GPU_BYTES // 2)
        self.used = 0
        self.open()

    def open(self) -> None:
        self.store, _ = open_store(self.config)
        self.direct = DirectPath(self.io, 30.0)
        self.direct.admit(self.device)
        self.store.use_direct(self.direct)

    def extents(self, realm: RealmInfo) -> None:
        self.store.register_realm(realm)
        for extent, size in enumerate(realm.namespace.shard_bytes, 1):
            self.store.add_extent(extent, slot_bytes_for(size), SLOTS)

    def ranges(self, realm: RealmInfo) -> list[DeviceRange]:
        """Room for a block."""
        made = []
        for size in realm.namespace.shard_bytes:
            made.append(DeviceRange(self.device, self.memory + self.used, size))
            self.used += round_up(size, PAGE_BYTES)
        return made

    def block(self, realm: RealmInfo, name: object, number: int, *, filled: bool = True) -> BlockIo:
        """A block in GPU memory; each shard has an extent of its own, and the block the slot of that number in it."""
        ranges = self.ranges(realm)
        for shard, r in enumerate(ranges):
            self.device.write(r.address, payload((name, shard), r.nbytes) if filled else bytes(r.nbytes))
        slots = tuple(slot_id(extent, number) for extent in range(1, len(ranges) + 1))
        return BlockIo(realm.realm_id, key_of(name), number + 1, slots, (), ranges=ranges)

    def write(self, realm: RealmInfo, *names: int) -> list[Result]:
        return self.store.write([self.block(realm, n, n) for n in names])

    def assert_read(self, realm: RealmInfo, *names: int) -> None:
        """Read blocks to the GPU, and look at every byte."""
        blocks = [self.block(realm, n, n, filled=False) for n in names]
        assert self.store.read(blocks) == [Result.OK] * len(names)
        for name, b in zip(names, blocks, strict=True):
            for shard, r in enumerate(b.ranges):
                assert self.device.read(r.address, r.nbytes) == payload((name, shard), r.nbytes), (name, shard)

    def assert_on_disk(self, realm: RealmInfo, *names: int) -> None:
        """The plain way to host memory finds them, also after a crash."""
        for n in names:
            assert_held(self.store, realm, n, n + 1, *(slot_id(e, n) for e in range(1, len(realm.namespace.shard_bytes) + 1)))


@pytest.fixture
def tier(tmp_path: Path, device: Device) -> Iterator[Tier]:
    made = Tier(tmp_path / "nvme", device)
    yield made
    made.store.close()


def faulty(tier: Tier, fault: str) -> FileIo:
    assert isinstance(tier.io, FileIo)
    tier.io.fault = fault  # type: ignore[assignment]
    return tier.io


@pytest.mark.parametrize("size", SIZES)
def test_bytes_both_ways(tier: Tier, size: int) -> None:
    realm = realm_of(size)
    tier.extents(realm)
    assert tier.write(realm, 0, 1, 3) == [Result.OK] * 3
    tier.assert_on_disk(realm, 0, 1, 3)
    tier.assert_read(realm, 3, 0, 1)
    assert faulty(tier, "").moved == ["write", "read"]
    assert not tier.direct.closed_by


def test_blocks_of_host_and_gpu_memory_side_by_side(tier: Tier) -> None:
    tier.extents(REALM)
    blocks = [tier.block(REALM, 0, 0), block(REALM, 1, 2, slot_id(1, 1), slot_id(2, 1)), tier.block(REALM, 2, 2)]
    assert tier.store.write(blocks) == [Result.OK] * 3
    tier.assert_on_disk(REALM, 0, 1, 2)
    tier.assert_read(REALM, 0, 1, 2)


def test_what_was_written_is_found_after_a_crash(tier: Tier) -> None:
    tier.extents(REALM)
    assert tier.write(REALM, 0, 1) == [Result.OK] * 2
    crash(tier.store)
    tier.store, recovered = open_store(tier.config)
    assert len(list(recovered.blocks)) == 2
    tier.assert_on_disk(REALM, 0, 1)


def test_a_crash_between_payload_and_header_leaves_no_block(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot had another block before, which is recorded as gone before anything of the new one is written."""
    tier.extents(REALM)
    assert tier.write(REALM, 0) == [Result.OK]
    old = tier.block(REALM, 0, 0)
    tier.store.forget([old])

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(slot_io, "write_all", killed)  # of the header page; the journal has its own
    new = tier.block(REALM, "new", 0)
    new.generation = 7
    with pytest.raises(Killed):
        tier.store.write([new])
    monkeypatch.undo()
    crash(tier.store)
    tier.store, recovered = open_store(tier.config)
    assert list(recovered.blocks) == []
    assert tier.store.read([old]) == [Result.CORRUPT]


@pytest.mark.parametrize("fault", ["fail", "short"])
def test_a_write_that_fails_goes_by_cpu_memory(tier: Tier, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    tier.extents(REALM)
    io = faulty(tier, fault)
    assert tier.write(REALM, 0, 1) == [Result.OK] * 2
    assert tier.write(REALM, 2) == [Result.OK]
    assert len(io.moved) == 1, "once it has failed it is not used again"
    assert caplog.text.count("by CPU memory from now on") == 1 and 'nvme.gds = "off"' in caplog.text
    tier.assert_on_disk(REALM, 0, 1, 2)
    tier.assert_read(REALM, 0, 1, 2)


@pytest.mark.parametrize("fault", ["fail", "short", "corrupt"])
def test_a_read_that_fails_goes_by_cpu_memory(tier: Tier, fault: str) -> None:
    tier.extents(REALM)
    assert tier.write(REALM, 0, 1) == [Result.OK] * 2
    faulty(tier, fault)
    tier.assert_read(REALM, 0, 1)
    assert tier.direct.closed_by


def test_a_write_of_wrong_bytes_is_found_by_the_read(tier: Tier) -> None:
    """Nothing is wrong with the read: the block is damaged, on every way, and gone."""
    tier.extents(REALM)
    faulty(tier, "corrupt")
    assert tier.write(REALM, 0) == [Result.OK]
    faulty(tier, "")
    assert tier.store.read([tier.block(REALM, 0, 0, filled=False)]) == [Result.CORRUPT]


@pytest.mark.parametrize("place", [10, PAGE_BYTES + 100])
def test_a_damaged_block_does_not_close_the_way(tier: Tier, place: int) -> None:
    """In the header page or in the payload: only its own block is lost."""
    tier.extents(REALM)
    assert tier.write(REALM, 0, 1) == [Result.OK] * 2
    flip(segment_path(tier.folder, 1), slot_bytes_for(300_000) + place)
    blocks = [tier.block(REALM, n, n, filled=False) for n in (0, 1)]
    assert tier.store.read(blocks) == [Result.OK, Result.CORRUPT]
    assert not tier.direct.closed_by


def test_a_failing_disk_does_not_close_the_way(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.extents(REALM)

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    faulty(tier, "fail")
    monkeypatch.setattr(slot_io, "write_all", broken)
    assert tier.write(REALM, 0) == [Result.IO_ERROR]
    assert not tier.direct.closed_by
    faulty(tier, "")
    assert tier.write(REALM, 0) == [Result.IO_ERROR], "its header cannot be written"
    monkeypatch.undo()
    assert tier.write(REALM, 0) == [Result.OK]


def test_a_gpu_that_fails_is_told_from_the_disk(tier: Tier, gpus: FakeGpus) -> None:
    """Its memory cannot be read: the source is at fault. It takes nothing: the block on disk is well, and can be read later."""
    tier.extents(REALM)
    assert tier.write(REALM, 0) == [Result.OK]
    gpus.fail("cuMemcpyDtoHAsync_v2")
    assert tier.write(REALM, 1) == [Result.CORRUPT]
    gpus.heal("cuMemcpyDtoHAsync_v2")
    gpus.fail("cuMemcpyHtoDAsync_v2")
    assert tier.store.read([tier.block(REALM, 0, 0, filled=False)]) == [Result.NO_SPACE]
    gpus.heal("cuMemcpyHtoDAsync_v2")
    assert not tier.direct.closed_by
    tier.assert_read(REALM, 0)


def test_nothing_is_left_in_the_padding(tier: Tier) -> None:
    """Of what went through memory of the daemon's, which other tenants' blocks have used."""
    realm = realm_of(5000)
    tier.extents(realm)
    faulty(tier, "fail")
    assert tier.write(realm, 0) == [Result.OK]
    tier.store._mover._room("device", 8192)[:] = b"x" * len(tier.store._mover._room("device", 8192))
    assert tier.write(realm, 1) == [Result.OK]
    raw = Path(segment_path(tier.folder, 1)).read_bytes()
    slot = slot_bytes_for(5000)
    assert raw[slot + PAGE_BYTES + 5000 : 2 * slot] == bytes(2 * 4096 - 5000)


def test_encrypted_blocks_go_by_cpu_memory(tmp_path: Path, device: Device) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(bytes(range(32)).hex())
    key_file.chmod(0o600)
    tier = Tier(tmp_path / "nvme", device, key_file=key_file)
    tier.extents(REALM)
    assert tier.write(REALM, 0, 1) == [Result.OK] * 2
    tier.assert_read(REALM, 0, 1)
    tier.assert_on_disk(REALM, 0, 1)
    assert faulty(tier, "").moved == []
    assert payload((0, 0), 1000) not in Path(segment_path(tier.folder, 1)).read_bytes()
    tier.store.close()


def test_a_hang_closes_the_way_and_others_go_on(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(tier.direct, "_clock", lambda: now)
    tier.extents(REALM)
    io = faulty(tier, "hang")
    hung_block, results = tier.block(REALM, 0, 0), list[list[Result]]()
    thread = threading.Thread(target=lambda: results.append(tier.store.write([hung_block])))
    thread.start()
    assert io.hanging.wait(30)
    assert not tier.direct.hangs()
    now = 31.0
    assert tier.direct.hangs() and "gds_timeout" in tier.direct.closed_by
    assert tier.write(REALM, 1) == [Result.OK]
    tier.assert_read(REALM, 1)
    assert results == [], "the place of the first is not free before its transfer has ended"
    io.release()
    thread.join(30)
    assert results == [[Result.OK]]
    tier.assert_on_disk(REALM, 0, 1)
    assert not tier.direct.hangs()


def test_files_are_closed_with_their_segments(tier: Tier) -> None:
    tier.extents(REALM)
    assert tier.write(REALM, 0) == [Result.OK]
    io = faulty(tier, "")
    assert len(io.open) == 2
    tier.store.drop_extent(1)
    tier.store._table.delete_dropped()
    assert len(io.open) == 1


def test_a_file_in_use_is_closed_after_its_transfer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kvikio, closed = mock.MagicMock(), list[int]()
    monkeypatch.setattr(device_io, "set_up_kvikio", lambda _threads: (kvikio, mock.MagicMock()))
    monkeypatch.setattr(device_io, "GpuDigests", mock.MagicMock)
    io, path = KvikioIo(1, gds=False), str(tmp_path / "file")
    file = kvikio.CuFile.return_value
    file.pwrite.return_value.get.side_effect = lambda: (io.close(path), closed.append(file.close.call_count), PAGE_BYTES)[-1]
    assert io.write(path, [(DeviceRange(mock.MagicMock(), 0, PAGE_BYTES), 0)]) == [PAGE_BYTES]
    assert closed == [0], "its number may be another file's at once"
    assert file.close.call_count == 1


def test_an_opening_that_hangs_keeps_no_other_file_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kvikio, opening, go = mock.MagicMock(), threading.Event(), threading.Event()
    monkeypatch.setattr(device_io, "set_up_kvikio", lambda _threads: (kvikio, mock.MagicMock()))
    monkeypatch.setattr(device_io, "GpuDigests", mock.MagicMock)
    kvikio.CuFile.return_value.pwrite.return_value.get.return_value = PAGE_BYTES
    io, part = KvikioIo(1, gds=False), (DeviceRange(mock.MagicMock(), 0, PAGE_BYTES), 0)
    io.write(str(tmp_path / "one"), [part])
    one = kvikio.CuFile.return_value

    def hang(*_: object) -> mock.MagicMock:
        opening.set()
        assert go.wait(30)
        return one

    kvikio.CuFile.side_effect = hang
    thread = threading.Thread(target=io.write, args=(str(tmp_path / "two"), [part]))
    thread.start()
    try:
        assert opening.wait(30)
        io.close(str(tmp_path / "one"))
        assert one.close.call_count == 1
    finally:
        go.set()
        thread.join()


# ---- trying it out


def test_the_trial_finds_what_works(tier: Tier) -> None:
    (found,) = tier.store.probe_direct(tier.direct, tier.device)
    assert found.folder == str(tier.folder) and found.direct_bytes_per_s > 0 and found.by_cpu_bytes_per_s > 0
    assert not (tier.folder / "probe.tmp").exists()
    assert faulty(tier, "").open == set()


@pytest.mark.parametrize("fault", ["fail", "short", "corrupt"])
def test_the_trial_finds_what_does_not(tier: Tier, fault: str) -> None:
    faulty(tier, fault)
    with pytest.raises(DirectError, match=str(tier.folder)):
        tier.store.probe_direct(tier.direct, tier.device)
    assert not (tier.folder / "probe.tmp").exists()


# ---- on a GPU


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Tier]:
    pytest.importorskip("kvikio")
    pytest.importorskip("cupy")
    made = Tier(tmp_path / "nvme", Device(0), open_device_io("on", 4))
    yield made
    made.store.close()


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_kvikio_moves_bytes_both_ways(real: Tier, size: int) -> None:
    realm = realm_of(size)
    real.extents(realm)
    assert real.write(realm, 0, 1, 3) == [Result.OK] * 3
    real.assert_on_disk(realm, 0, 1, 3)
    real.assert_read(realm, 3, 0, 1)
    assert not real.direct.closed_by


@pytest.mark.gpu
def test_kvikio_passes_the_trial(real: Tier) -> None:
    (found,) = real.store.probe_direct(real.direct, real.device)
    logging.getLogger(__name__).info("%s", found)
    assert found.direct_bytes_per_s > 0


@pytest.mark.gpu
def test_kvikio_fails_and_nothing_is_lost(real: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of kvikio's own: there is no such file."""
    real.extents(REALM)
    assert real.write(REALM, 0) == [Result.OK]

    refused = real.io
    monkeypatch.setattr(refused, "read", lambda _path, parts: KvikioIo.read(refused, str(real.folder / "nowhere"), parts))
    real.assert_read(REALM, 0)
    assert real.direct.closed_by
    assert real.write(REALM, 1) == [Result.OK]
    real.assert_on_disk(REALM, 0, 1)


def test_without_kvikio_it_says_what_to_do() -> None:
    if importlib.util.find_spec("kvikio"):
        pytest.skip("kvikio is here")
    with pytest.raises(StartupError, match=r"install kvtierd\[cuda12\].* nvme.gds = \"off\""):
        open_device_io("on", 4)


@pytest.mark.parametrize("nvme, words", [
    ({"gds": "on"}, "needs both tiers"),
    ({"gds": "on", "encryption_key_command": "x"}, "cannot be with encryption"),
    ({"gds_timeout": "0.5s"}, "nvme.gds_timeout is below 1s; raise it"),
])  # fmt: skip
def test_what_cannot_be_is_no_configuration(tmp_path: Path, nvme: dict[str, str], words: str) -> None:
    hbm = {"capacity": "1GiB"} if "both" not in words else {}
    path = tmp_path / "c.toml"
    path.write_text(tomli_w.dumps({"hbm": hbm, "nvme": nvme}))
    with pytest.raises(ConfigError, match=words):
        load_config(path, env={})
