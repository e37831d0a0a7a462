"""Stands in for cupy over the stand-in for the CUDA driver: kernels are compiled for the CPU, with loops for the GPU's threads."""

import contextlib
import ctypes
import subprocess
import tempfile
import types
from pathlib import Path

import numpy as np

from kvtierd.testing.faults.disk import compiler

HEAD = """
struct dim { unsigned x, y, z; };
static _Thread_local struct dim blockIdx, blockDim, threadIdx;
#define __global__
#define __device__
#define __constant__ static const
"""
LOOPS = """
#define EACH(call) \\
    blockDim.x = block; \\
    for (blockIdx.y = 0; blockIdx.y < down; blockIdx.y++) \\
        for (blockIdx.x = 0; blockIdx.x < across; blockIdx.x++) \\
            for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) call
void launch_sum_blocks(unsigned across, unsigned down, unsigned block, const struct range *ranges, u64 *sums) {
    EACH(sum_blocks(ranges, sums));
}
void launch_chain_blocks(unsigned across, unsigned down, unsigned block, const struct range *ranges, u64 count, const u64 *sums,
                         u64 *accumulators) {
    EACH(chain_blocks(ranges, count, sums, accumulators));
}
"""

cuda = types.SimpleNamespace(Device=contextlib.nullcontext)
asarray, empty, asnumpy = np.array, np.empty, np.array


class RawModule:
    def __init__(self, code, backend):
        assert backend == "nvrtc"
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "kernels.c", Path(folder) / "kernels.so"
            source.write_text(HEAD + code + LOOPS)
            subprocess.run([compiler(), "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
            self._library = ctypes.CDLL(str(library))

    def get_function(self, name):
        launch = self._library[f"launch_{name}"]

        def function(grid, block, arguments):
            across, down = (*grid, 1)[:2]
            plain = [a.ctypes.data if isinstance(a, np.ndarray) else int(a) for a in arguments]
            launch(*(ctypes.c_uint(n) for n in (across, down, block[0])), *map(ctypes.c_uint64, plain))

        return function
