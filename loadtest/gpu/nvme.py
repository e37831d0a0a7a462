"""NVMe by kvikio beside NVMe by threads: the two engines of `nvme.io`, and reads into GPU memory, in turn in one run.

    python3 loadtest/gpu/nvme.py [--folder DIR] [--gib 4] [--output FILE]

Blocks of 4 MiB in one file by O_DIRECT, host memory as the daemon's; as many calls at a time as `nvme.depth`. "to the GPU": kvikio
by itself (GPUDirect Storage where there is nvidia-fs, else through its own pinned buffers), and threads into registered memory with
a DMA behind each block. GB/s, medians. Needs kvikio, cupy, torch and a GPU.
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvtierd.config import NvmeConfig  # noqa: E402
from kvtierd.tiers.io_engine import KvikioEngine, ThreadEngine, read_all, write_all  # noqa: E402

BLOCK_BYTES = 4 << 20


class Disk:
    def __init__(self, path, size_bytes, depth):
        self.path, self.places = path, range(0, size_bytes, BLOCK_BYTES)
        self.size_bytes, self.depth = size_bytes, depth
        self.host = memoryview(mmap.mmap(-1, size_bytes))
        np.frombuffer(self.host, dtype=np.uint8)[:] = np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)
        registered = torch.frombuffer(self.host, dtype=torch.uint8)
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), size_bytes, 0))
        self.registered = registered
        self.device = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")

    def spread(self, one):
        with ThreadPoolExecutor(self.depth) as threads:
            list(threads.map(one, self.places))

    def write(self, engine):
        handle = engine.open(self.path, direct=True)
        self.spread(lambda at: write_all(engine, handle, [self.host[at : at + BLOCK_BYTES]], at))
        engine.close(handle)

    def read(self, engine):
        handle = engine.open(self.path, direct=True)
        self.spread(lambda at: read_all(engine, handle, [self.host[at : at + BLOCK_BYTES]], at))
        engine.close(handle)

    def read_to_gpu_by_threads(self, engine):
        handle = engine.open(self.path, direct=True)
        stream = torch.cuda.Stream()

        def one(at):
            read_all(engine, handle, [self.host[at : at + BLOCK_BYTES]], at)
            with torch.cuda.stream(stream):
                self.device[at : at + BLOCK_BYTES].copy_(self.registered[at : at + BLOCK_BYTES], non_blocking=True)

        self.spread(one)
        stream.synchronize()
        engine.close(handle)

    def read_to_gpu_by_kvikio(self):
        import cupy
        import kvikio

        target = cupy.asarray(self.device)
        with kvikio.CuFile(self.path, "r") as file:
            waiting = [file.pread(target[at : at + BLOCK_BYTES], BLOCK_BYTES, at) for at in self.places]
            for future in waiting:
                assert future.get() == BLOCK_BYTES

    def same_on_gpu(self):
        return torch.equal(self.device.cpu(), torch.frombuffer(self.host, dtype=torch.uint8))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--gib", type=int, default=4)
    parser.add_argument("--depth", type=int, default=NvmeConfig.model_fields["depth"].default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output")
    args = parser.parse_args()
    ctypes.CDLL("libcuda.so.1")
    engines = {"threads": ThreadEngine(), "kvikio": KvikioEngine(args.depth)}
    import kvikio
    import kvikio.defaults as defaults

    handle, path = tempfile.mkstemp(dir=args.folder)
    try:
        os.ftruncate(handle, args.gib << 30)
        disk = Disk(path, args.gib << 30, args.depth)
        times = {}

        def timed(name, call):
            began = time.perf_counter()
            call()
            times.setdefault(name, []).append(disk.size_bytes / 1e9 / (time.perf_counter() - began))

        disk.write(engines["threads"])
        same = True
        for _ in range(args.rounds):
            for name, engine in engines.items():
                timed(f"write, {name}", lambda engine=engine: disk.write(engine))
            for name, engine in engines.items():
                timed(f"read, {name}", lambda engine=engine: disk.read(engine))
            timed("read to the GPU, threads", lambda: disk.read_to_gpu_by_threads(engines["threads"]))
            same &= disk.same_on_gpu()
            disk.device.zero_()
            timed("read to the GPU, kvikio", disk.read_to_gpu_by_kvikio)
            same &= disk.same_on_gpu()
    finally:
        os.close(handle)
        os.unlink(path)
    report = {
        "device": torch.cuda.get_device_name(0),
        "kvikio": kvikio.__version__,
        "compat_mode": str(defaults.get("compat_mode")),
        "depth": args.depth,
        "gb_per_s": {name: round(statistics.median(speeds), 2) for name, speeds in times.items()},
        "each": {name: [round(speed, 2) for speed in speeds] for name, speeds in times.items()},
        "same_bytes": same,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
