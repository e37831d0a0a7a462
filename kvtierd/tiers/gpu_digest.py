"""xxh3_128 of ranges of GPU memory, made on the GPU: the digests that header pages have, without a copy to the host.

XXH3 takes what is longer than 240 bytes in blocks of 1,024 bytes: 16 stripes of 64 bytes, eight 64-bit lanes each. What a stripe
adds to a lane depends on the data alone, so the sums of all blocks are made side by side; only a few operations a block and lane
follow one after the other. The kernels are plain C, so that tests run them on a CPU.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import xxhash

from kvtierd.tiers.base import DeviceRange

SHORT_BYTES: Final = 240
"""Up to here XXH3 is another algorithm; so few bytes are fetched."""
BLOCK_BYTES: Final = 1024
LANES: Final = 8
_THREADS: Final = 256
_MASK: Final = (1 << 64) - 1
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME_1: Final = 0x9E3779B185EBCA87
_PRIME_2: Final = 0xC2B2AE3D27D4EB4F
_WORDS: Final = ", ".join(f"0x{int.from_bytes(_SECRET[i : i + 8], 'little'):016x}ull" for i in range(0, len(_SECRET), 8))
_LAST_WORDS: Final = ", ".join(f"0x{int.from_bytes(_SECRET[121 + i : 129 + i], 'little'):016x}ull" for i in range(0, 64, 8))

SOURCE: Final = (
    'typedef unsigned long long u64;\n#ifdef __cplusplus\nextern "C" {\n#endif\n'
    f"__constant__ u64 secret[24] = {{{_WORDS}}};\n__constant__ u64 last_secret[8] = {{{_LAST_WORDS}}};\n"
    + r"""
/* One range: its address and bytes, and where the sums of its blocks begin, in blocks. */
struct range { u64 address, size, first; };

__device__ static u64 word(u64 address, int lane) { return ((const u64 *)address)[lane]; }

__device__ static u64 odd_word(u64 address, int lane) {
    const unsigned char *at = (const unsigned char *)address + 8 * lane;
    u64 value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | at[i];
    return value;
}

/* What a stripe adds to a lane: its neighbour's word, and the product of the halves of its own with the secret. */
__device__ static u64 added(u64 own, u64 neighbour, u64 key) {
    own ^= key;
    return neighbour + (own & 0xffffffffull) * (own >> 32);
}

/* A thread: one lane of one whole block (x) of one range (y). */
__global__ void sum_blocks(const struct range *ranges, u64 *sums) {
    struct range r = ranges[blockIdx.y];
    u64 number = (u64)blockIdx.x * blockDim.x + threadIdx.x, block = number / 8, sum = 0;
    int lane = number % 8;
    if (block >= (r.size - 1) / 1024) return;
    for (int stripe = 0; stripe < 16; stripe++) {
        u64 at = r.address + block * 1024 + stripe * 64;
        sum += added(word(at, lane), word(at, lane ^ 1), secret[stripe + lane]);
    }
    sums[(r.first + block) * 8 + lane] = sum;
}

/* A thread: one lane of one range, block after block. */
__global__ void chain_blocks(const struct range *ranges, u64 count, const u64 *sums, u64 *accumulators) {
    const u64 start[8] = {0xC2B2AE3Dull, 0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
                          0x85EBCA77C2B2AE63ull, 0x85EBCA77ull, 0x27D4EB2F165667C5ull, 0x9E3779B1ull};
    u64 number = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    int lane = number % 8;
    if (number / 8 >= count) return;
    struct range r = ranges[number / 8];
    u64 blocks = (r.size - 1) / 1024, acc = start[lane];
    const u64 *own = sums + r.first * 8 + lane;
#pragma unroll 8
    for (u64 block = 0; block < blocks; block++) {
        acc += own[block * 8];
        acc = ((acc ^ acc >> 47) ^ secret[16 + lane]) * 0x9E3779B1ull;
    }
    u64 at = r.address + blocks * 1024, stripes = (r.size - 1 - blocks * 1024) / 64;
    for (u64 stripe = 0; stripe < stripes; stripe++, at += 64) {
        acc += added(word(at, lane), word(at, lane ^ 1), secret[stripe + lane]);
    }
    at = r.address + r.size - 64;
    accumulators[number] = acc + added(odd_word(at, lane), odd_word(at, lane ^ 1), last_secret[lane]);
}
#ifdef __cplusplus
}
#endif
"""
)


def finished(accumulators: Sequence[int], size_bytes: int) -> bytes:
    """The digest of a range of so many bytes from its eight lanes, as ``xxhash.xxh3_128_digest`` gives it."""
    low = _merged(accumulators, 11, size_bytes * _PRIME_1)
    high = _merged(accumulators, 117, ~(size_bytes * _PRIME_2))
    return high.to_bytes(8, "big") + low.to_bytes(8, "big")


def _merged(accumulators: Sequence[int], at: int, start: int) -> int:
    total = start
    for i in range(0, LANES, 2):
        first, second = (int.from_bytes(_SECRET[at + 8 * n : at + 8 * n + 8], "little") for n in (i, i + 1))
        product = (accumulators[i] ^ first) * (accumulators[i + 1] ^ second)
        total += (product & _MASK) ^ (product >> 64)
    total &= _MASK
    total = ((total ^ (total >> 37)) * 0x165667919E3779F9) & _MASK
    return total ^ (total >> 32)


def planned(ranges: Sequence[DeviceRange]) -> tuple[np.ndarray[Any, np.dtype[np.uint64]], int]:
    """What the kernels are told of ranges, and how many blocks these have."""
    blocks = np.array([(r.nbytes - 1) // BLOCK_BYTES for r in ranges], np.uint64)
    table = np.zeros((len(ranges), 3), np.uint64)
    table[:, 0] = [r.address for r in ranges]
    table[:, 1] = [r.nbytes for r in ranges]
    table[1:, 2] = np.cumsum(blocks)[:-1]
    return table, int(blocks.sum())


class GpuDigests:
    """Digests on GPUs, by cupy. Thread-safe. Raises ImportError where there is no cupy."""

    def __init__(self) -> None:
        os.environ.setdefault("CUPY_CACHE_IN_MEMORY", "1")  # the daemon need not have a home that can be written
        self._cupy: Any = importlib.import_module("cupy")
        self._lock = threading.Lock()
        self._kernels: dict[int, tuple[Any, Any]] = {}

    def __call__(self, ranges: Sequence[DeviceRange]) -> list[bytes]:
        """xxh3_128 of ranges of one GPU. Raises what cupy raises, CudaError."""
        found = [xxhash.xxh3_128_digest(r.device.read(r.address, r.nbytes)) if r.nbytes <= SHORT_BYTES else b"" for r in ranges]
        long = [r for r in ranges if r.nbytes > SHORT_BYTES]
        if long:
            made = iter(self._long(long))
            found = [digest or next(made) for digest in found]
        return found

    def _long(self, ranges: Sequence[DeviceRange]) -> list[bytes]:
        cupy, device = self._cupy, ranges[0].device
        table, blocks = planned(ranges)
        most = int((table[:, 1].max() - 1) // BLOCK_BYTES)
        with device.current(), cupy.cuda.Device(device.ordinal):
            sum_blocks, chain_blocks = self._compiled(device.ordinal)
            told = cupy.asarray(table)
            sums = cupy.empty(max(blocks, 1) * LANES, np.uint64)
            lanes = cupy.empty(len(ranges) * LANES, np.uint64)
            if blocks:
                sum_blocks((-(-most * LANES // _THREADS), len(ranges)), (_THREADS,), (told, sums))
            chain_blocks((-(-len(ranges) * LANES // _THREADS),), (_THREADS,), (told, np.uint64(len(ranges)), sums, lanes))
            got = cupy.asnumpy(lanes).reshape(-1, LANES)  # waits for the kernels
        return [finished([int(n) for n in row], r.nbytes) for row, r in zip(got, ranges, strict=True)]

    def _compiled(self, ordinal: int) -> tuple[Any, Any]:
        with self._lock:
            if ordinal not in self._kernels:
                module = self._cupy.RawModule(code=SOURCE, backend="nvrtc")
                self._kernels[ordinal] = module.get_function("sum_blocks"), module.get_function("chain_blocks")
            return self._kernels[ordinal]
