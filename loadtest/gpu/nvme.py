"""NVMe by kvikio beside NVMe by threads: the two engines of `nvme.io`, reads into GPU memory, and blocks of the HBM tier to NVMe
and back, directly and by CPU memory, in turn in one run.

    python3 loadtest/gpu/nvme.py [--folder DIR] [--gib 4] [--output FILE]

Blocks of 4 MiB in one file by O_DIRECT, host memory as the daemon's; as many calls at a time as `nvme.depth`. "to the GPU": kvikio
by itself (GPUDirect Storage where there is nvidia-fs, else through its own pinned buffers), and threads into registered memory with
a DMA behind each block. "tiers": the daemon's own store, checksums, header pages and journal included; "direct" as with
`nvme.gds = "on"`, "by CPU memory" through slots of the CPU tier, as without. GB/s, medians. Needs kvikio, cupy, torch and a GPU.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
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
from kvtierd.cuda import Device  # noqa: E402
from kvtierd.model import PAGE_BYTES, Namespace, Result, slot_id  # noqa: E402
from kvtierd.tiers.base import BlockIo, DeviceRange, RealmInfo  # noqa: E402
from kvtierd.tiers.device_io import open_device_io  # noqa: E402
from kvtierd.tiers.direct_path import DirectPath  # noqa: E402
from kvtierd.tiers.io_engine import KvikioEngine, ThreadEngine, read_all, write_all  # noqa: E402
from kvtierd.tiers.nvme import NvmeStore  # noqa: E402

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


class Tiers:
    """Blocks in GPU memory and a store, as the daemon has them."""

    def __init__(self, folder, size_bytes, depth):
        self.count, self.depth = size_bytes // BLOCK_BYTES, depth
        self.size_bytes = self.count * BLOCK_BYTES
        self.realm = RealmInfo(1, "load", Namespace((BLOCK_BYTES,)))
        slot_bytes = BLOCK_BYTES + PAGE_BYTES
        config = NvmeConfig(capacity=4 * size_bytes + (1 << 30), folders=[Path(folder)], reserve=0, allow_volatile=True)
        self.store = NvmeStore.open(config)
        self.store.recover()
        self.store.register_realm(self.realm)
        self.store.add_extent(1, slot_bytes, self.count)
        self.device = Device(torch.cuda.current_device())
        self.path = DirectPath(open_device_io("on", depth), 60.0)
        self.store.use_direct(self.path)
        self.trial = self.store.probe_direct(self.path, self.device)
        self.path.admit(self.device)
        self.source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device="cuda")
        self.target = torch.zeros_like(self.source)
        torch.cuda.synchronize()
        self.slots = memoryview(mmap.mmap(-1, size_bytes))
        np.frombuffer(self.slots, dtype=np.uint8)[:] = 1  # faulted in, as the CPU tier is
        self.generation = 0

    def block(self, number, memory=None):
        at = number * BLOCK_BYTES
        block = BlockIo(1, number.to_bytes(32, "big"), self.generation, (slot_id(1, number),), ())
        if memory is None:
            block.buffers = [self.slots[at : at + BLOCK_BYTES]]
        else:
            block.ranges = [DeviceRange(self.device, memory.data_ptr() + at, BLOCK_BYTES)]
        return block

    def spread(self, one):
        with ThreadPoolExecutor(self.depth) as threads:
            for results in threads.map(one, range(self.count)):
                assert results == [Result.OK], results

    def write_directly(self):
        self.generation += 1
        self.spread(lambda n: self.store.write([self.block(n, self.source)]))

    def read_directly(self):
        self.spread(lambda n: self.store.read([self.block(n, self.target)]))

    def write_by_cpu(self):
        self.generation += 1

        def one(n):
            block = self.block(n)
            self.device.copy_to_host([(self.source.data_ptr() + n * BLOCK_BYTES, block.buffers[0])])
            return self.store.write([block])

        self.spread(one)

    def read_by_cpu(self):
        def one(n):
            block = self.block(n)
            results = self.store.read([block])
            self.device.copy_from_host([(self.target.data_ptr() + n * BLOCK_BYTES, block.buffers[0])])
            return results

        self.spread(one)

    def measure(self, timed):
        """One round. Whether the bytes were right and nothing went another way."""
        same = True
        for way, write, read in (
            ("direct", self.write_directly, self.read_directly),
            ("by CPU memory", self.write_by_cpu, self.read_by_cpu),
        ):
            self.target.zero_()
            torch.cuda.synchronize()
            timed(f"tiers, GPU to NVMe, {way}", write, self.size_bytes)
            timed(f"tiers, NVMe to GPU, {way}", read, self.size_bytes)
            same &= torch.equal(self.source, self.target)
        return same and not self.path.closed_by


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
    pool = tempfile.mkdtemp(dir=args.folder)
    try:
        os.ftruncate(handle, args.gib << 30)
        disk = Disk(path, args.gib << 30, args.depth)
        times = {}

        def timed(name, call, size_bytes=disk.size_bytes):
            began = time.perf_counter()
            call()
            times.setdefault(name, []).append(size_bytes / 1e9 / (time.perf_counter() - began))

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
        tiers = Tiers(pool, args.gib << 30, args.depth)
        tiers.write_by_cpu()  # makes the file
        for _ in range(args.rounds):
            same &= tiers.measure(timed)
        tiers.store.close()
    finally:
        os.close(handle)
        os.unlink(path)
        shutil.rmtree(pool)
    report = {
        "device": torch.cuda.get_device_name(0),
        "kvikio": kvikio.__version__,
        "compat_mode": str(defaults.get("compat_mode")),
        "depth": args.depth,
        "direct_by": tiers.path.name,
        "trial_gb_per_s": [round(speed / 1e9, 2) for r in tiers.trial for speed in (r.direct_bytes_per_s, r.by_cpu_bytes_per_s)],
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
