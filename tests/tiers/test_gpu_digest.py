"""Goal: digests made on a GPU are those of xxhash, whatever the length.

Method: the kernels' own source, compiled for the CPU by a stand-in for cupy, over one for the CUDA driver. And on a GPU.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from kvtierd import cuda
from kvtierd.cuda import Device
from kvtierd.testing.cuda import FakeGpus
from kvtierd.tiers.base import DeviceRange
from kvtierd.tiers.gpu_digest import SHORT_BYTES, GpuDigests

Digests = Callable[[Sequence[bytes]], list[bytes]]

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"
LENGTHS = [
    1, 16, 128, SHORT_BYTES, *range(SHORT_BYTES + 1, 1300, 7),
    *(1024 * n + d for n in (1, 2, 3, 16, 17) for d in (-65, -64, -63, -1, 0, 1, 63, 64, 65)),
    4096, 65_537, (1 << 20) - 1, 1 << 20, (2 << 20) + 12_345,
]  # fmt: skip


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
def digests(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Digests]:
    if request.param == "real":
        pytest.importorskip("cupy")
        yield made(GpuDigests())
        return
    gpus = FakeGpus(tmp_path / "gpu")
    for name, value in gpus.environment().items():
        if name != "LD_LIBRARY_PATH":
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "_LIBRARY", str(gpus.library))
    cuda._driver.cache_clear()
    monkeypatch.syspath_prepend(str(STAND_INS))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    yield made(GpuDigests())
    cuda._driver.cache_clear()
    sys.modules.pop("cupy", None)


def made(digests: GpuDigests) -> Digests:
    """Digests of bytes that are brought to a GPU for it."""
    device = Device(0)
    address = device.allocate(64 << 20)

    def of(data: Sequence[bytes]) -> list[bytes]:
        at, ranges = address, []
        for d in data:
            device.write(at, d)
            ranges.append(DeviceRange(device, at, len(d)))
            at += -(-len(d) // 4096) * 4096
        return digests(ranges)

    return of


def contents(lengths: Sequence[int]) -> list[bytes]:
    return [random.Random(n).randbytes(n) for n in lengths]


def test_each_length(digests: Digests) -> None:
    for data in contents(LENGTHS):
        assert digests([data]) == [xxhash.xxh3_128_digest(data)], len(data)


def test_many_ranges_at_once(digests: Digests) -> None:
    data = contents([4096, 241, 100, 1_000_000, 1024, 5000, 1025, 300_000])
    assert digests(data) == [xxhash.xxh3_128_digest(d) for d in data]
