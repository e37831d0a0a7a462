"""Goal: digests made by the kernels are those of xxhash, whatever the length.

Method: the kernels' own source, compiled for the CPU, with a loop in the place of the GPU's threads. On a GPU, through cupy.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import xxhash

from kvtierd.cuda import Device
from kvtierd.testing.faults.disk import compiler
from kvtierd.tiers.base import DeviceRange
from kvtierd.tiers.gpu_digest import LANES, SHORT_BYTES, SOURCE, GpuDigests, finished, planned

Digests = Callable[[Sequence[bytes]], list[bytes]]

ON_CPU = """
struct dim { unsigned x, y, z; };
static struct dim blockIdx, blockDim = {64, 1, 1}, threadIdx;
#define __global__
#define __device__
#define __constant__ static const
"""
DRIVE = """
void digest(const struct range *ranges, u64 count, u64 most_blocks, u64 *sums, u64 *accumulators) {
    for (blockIdx.y = 0; blockIdx.y < count; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x <= most_blocks * 8 / 64; blockIdx.x++)
            for (threadIdx.x = 0; threadIdx.x < 64; threadIdx.x++) sum_blocks(ranges, sums);
    for (blockIdx.x = 0; blockIdx.x <= count * 8 / 64; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 64; threadIdx.x++) chain_blocks(ranges, count, sums, accumulators);
}
"""
LENGTHS = [
    *range(SHORT_BYTES + 1, 1300), *(1024 * n + d for n in (2, 3, 16, 17) for d in (-65, -64, -63, -1, 0, 1, 63, 64, 65)),
    4096, 65_537, (1 << 20) - 1, 1 << 20, (2 << 20) + 12_345,
]  # fmt: skip


def contents(lengths: Sequence[int]) -> list[bytes]:
    return [random.Random(n).randbytes(n) for n in lengths]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    folder, found = tmp_path_factory.mktemp("kernels"), compiler()
    assert found, "install gcc"
    (folder / "kernels.c").write_text(ON_CPU + SOURCE + DRIVE)
    library = folder / "kernels.so"
    subprocess.run([found, "-shared", "-fPIC", "-O1", "-o", str(library), str(folder / "kernels.c")], check=True)
    digest = ctypes.CDLL(str(library)).digest
    digest.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]

    def digests(data: Sequence[bytes]) -> list[bytes]:
        held = [np.frombuffer(d + bytes(-len(d) % 8), np.uint64) for d in data]
        ranges = [DeviceRange(None, h.ctypes.data, len(d)) for h, d in zip(held, data, strict=True)]  # type: ignore[arg-type]
        table, blocks = planned(ranges)
        sums, lanes = np.zeros(max(blocks, 1) * LANES, np.uint64), np.zeros(len(data) * LANES, np.uint64)
        most = max((len(d) - 1) // 1024 for d in data)
        digest(table.ctypes.data, len(data), most, sums.ctypes.data, lanes.ctypes.data)
        return [finished([int(n) for n in row], len(d)) for row, d in zip(lanes.reshape(-1, LANES), data, strict=True)]

    return digests


def test_each_length(on_cpu: Digests) -> None:
    for data in contents(LENGTHS):
        assert on_cpu([data]) == [xxhash.xxh3_128_digest(data)], len(data)


def test_many_ranges_at_once(on_cpu: Digests) -> None:
    data = contents([4096, 241, 1_000_000, 1024, 5000, 1025, 300_000])
    assert on_cpu(data) == [xxhash.xxh3_128_digest(d) for d in data]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    pytest.importorskip("cupy")
    digests, device = GpuDigests(), Device(0)
    data = contents([1, 16, 128, SHORT_BYTES, *LENGTHS])
    address, at, ranges = device.allocate(sum(len(d) + 4096 for d in data)), 0, []
    for d in data:
        device.write(address + at, d)
        ranges.append(DeviceRange(device, address + at, len(d)))
        at += -(-len(d) // 4096) * 4096
    assert digests(ranges) == [xxhash.xxh3_128_digest(d) for d in data]
    device.free(address)
