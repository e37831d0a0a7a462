"""How fast the vLLM connector moves KV blocks between a GPU and shared memory, beside plain DMA of the same bytes in the same run.

    python3 loadtest/gpu/copies.py [--gb 8] [--tokens 16,32,128] [--output FILE]

The KV cache has the form that vLLM's FlashAttention backend gives a model of Llama-3.1-8B's shape: 32 layers of (2, block, 16, 8,
128) in bfloat16, so one block of 16 tokens is 64 runs of 32 KiB. Slots lie one after the other in memfds that are registered with
CUDA, as those of a daemon are; the engine's blocks are taken in random order. "busy" has a second thread of the process work as an
engine does that waits for a load: some Python, and a pause of a millisecond. "both" saves one half of the blocks while it loads the
other; the limit then is plain DMA of both halves at once. "device" has the slots in GPU memory, as the HBM tier's are, and a plain
copy within the GPU as the limit. Needs torch and a CUDA device, not vLLM.
"""

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvtierd.connectors.vllm.copying import make_copier  # noqa: E402
from kvtierd.connectors.vllm.gpu_memory import border  # noqa: E402
from kvtierd.connectors.vllm.layout import worker_layout  # noqa: E402
from kvtierd.cuda import PIECE_BYTES, DeviceView  # noqa: E402
from kvtierd.memory import SharedMapping, create_memfd  # noqa: E402
from kvtierd.model import round_up  # noqa: E402
from tests.connectors.kv_forms import FullAttentionSpec, config, vllm_config  # noqa: E402

LAYERS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 32, 16, 8, 128
EXTENT_BYTES = 1 << 30
DEVICE = "cuda:0"


def kv_cache(blocks):
    spec = FullAttentionSpec(BLOCK_TOKENS, HEADS, HEAD_SIZE, torch.bfloat16)
    shape = (2, blocks, BLOCK_TOKENS, HEADS, HEAD_SIZE)
    tensors = {f"model.layers.{n}.self_attn.attn": torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for n in range(LAYERS)}
    for tensor in tensors.values():
        tensor.view(torch.int16).random_(-30_000, 30_000)
    return config(blocks, (list(tensors), spec)), tensors


class Memory:
    """Extents as a daemon makes them, faulted in and registered."""

    def __init__(self, size_bytes, copier):
        self.mappings = []
        began = time.perf_counter()
        for number in range(-(-size_bytes // EXTENT_BYTES)):
            fd = create_memfd(f"kvtierd-{number}", EXTENT_BYTES)
            self.mappings.append(SharedMapping(fd, EXTENT_BYTES))
            os.close(fd)
            self.mappings[-1].populate(0, EXTENT_BYTES)
        self.populate_s = time.perf_counter() - began
        began = time.perf_counter()
        for number, mapping in enumerate(self.mappings):
            copier.on_mapped(number, mapping)
        self.register_s = time.perf_counter() - began

    @property
    def nbytes(self):
        return EXTENT_BYTES * len(self.mappings)

    def slots(self, slot_bytes):
        return [m.view[a : a + slot_bytes] for m in self.mappings for a in range(0, EXTENT_BYTES - slot_bytes + 1, slot_bytes)]


def engine_thread(stop):
    while not stop.is_set():
        sum(range(10_000))
        time.sleep(0.001)


def seconds(run, repeat):
    times = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def plain_dma(memory, nbytes, to_device, wait=True):
    """Each extent in as few copies as its registration allows, through one gibibyte of device memory."""
    device = torch.empty(EXTENT_BYTES, dtype=torch.uint8, device=DEVICE)
    pieces = []
    for mapping in memory.mappings:
        host = torch.frombuffer(mapping.view, dtype=torch.uint8)
        start = 0
        while start < len(host):
            stop = min(border(mapping.address + start) - mapping.address, len(host))
            pieces.append(host[start:stop])
            start = stop

    def run():
        left = nbytes
        for piece in pieces:
            size = min(left, len(piece))
            target, source = (device[:size], piece[:size]) if to_device else (piece[:size], device[:size])
            target.copy_(source, non_blocking=True)
            left -= size
        if wait:
            torch.cuda.synchronize()

    return run


class DeviceMemory:
    """Slots of the HBM tier, but in this process."""

    def __init__(self, size_bytes, device):
        self._device, self._address = device, device.allocate(round_up(size_bytes, PIECE_BYTES))
        self.view = DeviceView(self, self._address, size_bytes)

    def slots(self, slot_bytes):
        return [self.view[a : a + slot_bytes] for a in range(0, self.view.nbytes - slot_bytes + 1, slot_bytes)]

    def free(self):
        self._device.free(self._address)


def chunks_of(memory, block_bytes, per_chunk, order):
    return [
        (slot, order[n * per_chunk : (n + 1) * per_chunk])
        for n, slot in enumerate(memory.slots(block_bytes * per_chunk))
        if (n + 1) * per_chunk <= len(order)
    ]


def at_once(*runs):
    """All runs, each on a thread of its own."""

    def run():
        threads = [threading.Thread(target=one) for one in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def measure_both(copier, memory, chunks, nbytes, repeat):
    half = len(chunks) // 2
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    whole = [plain_dma(memory, nbytes // 2, to_device, wait=False) for to_device in (False, True)]

    def limit():
        for stream, run in zip(streams, whole, strict=True):
            with torch.cuda.stream(stream):
                run()
        torch.cuda.synchronize()

    dma = nbytes / 1e9 / seconds(limit, repeat)
    ours = nbytes / 1e9 / seconds(
        at_once(
            lambda: copier.save(0, chunks[:half], copier.fence()),
            lambda: copier.load(0, chunks[half:], copier.fence(), lambda: False),
        ),
        repeat,
    )  # fmt: skip
    return {"dma_gb_per_s": round(dma, 1), "gb_per_s": round(ours, 1), "ratio": round(ours / dma, 3)}


def plain_copy(nbytes):
    there, here = (torch.empty(nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))

    def run():
        there.copy_(here)
        torch.cuda.synchronize()

    return run


def measure_device(copier, block_bytes, tokens, order, repeat):
    """Bytes are counted once, though each is read and written."""
    per_chunk = tokens // BLOCK_TOKENS
    nbytes = len(order) // per_chunk * per_chunk * block_bytes
    limit = nbytes / 2e9 / seconds(plain_copy(nbytes // 2), repeat)
    torch.cuda.empty_cache()
    memory = DeviceMemory(nbytes, copier.device)
    chunks = chunks_of(memory, block_bytes, per_chunk, order)
    found = {"plain_gb_per_s": round(limit, 1)}
    for name, run in {
        "save": lambda: copier.save(0, chunks, copier.fence()),
        "load": lambda: copier.load(0, chunks, copier.fence(), lambda: False),
    }.items():
        speed = nbytes / 1e9 / seconds(run, repeat)
        found[name] = {"gb_per_s": round(speed, 1), "ratio": round(speed / limit, 3)}
    memory.free()
    return found


def measure(copier, memory, block_bytes, tokens, order, repeat):
    per_chunk = tokens // BLOCK_TOKENS
    chunks = chunks_of(memory, block_bytes, per_chunk, order)
    nbytes = len(chunks) * per_chunk * block_bytes
    found = {"tokens": tokens, "gb": round(nbytes / 1e9, 2)}
    runs = {
        "save": lambda: copier.save(0, chunks, copier.fence()),
        "load": lambda: copier.load(0, chunks, copier.fence(), lambda: False),
    }
    for name, run in runs.items():
        limit = nbytes / 1e9 / seconds(plain_dma(memory, nbytes, name == "load"), repeat)
        idle = nbytes / 1e9 / seconds(run, repeat)
        stop = threading.Event()
        other = threading.Thread(target=engine_thread, args=(stop,))
        other.start()
        busy = nbytes / 1e9 / seconds(run, repeat)
        stop.set()
        other.join()
        found[name] = {
            "dma_gb_per_s": round(limit, 1),
            "gb_per_s": round(idle, 1),
            "busy_gb_per_s": round(busy, 1),
            "ratio": round(idle / limit, 3),
            "busy_ratio": round(busy / limit, 3),
        }
    found["both"] = measure_both(copier, memory, chunks, nbytes, repeat)
    found["device"] = measure_device(copier, block_bytes, tokens, order, repeat)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--tokens", default="16,32,128")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output")
    args = parser.parse_args()
    blocks = int(args.gb * 1e9) // (LAYERS * 2 * BLOCK_TOKENS * HEADS * HEAD_SIZE * 2)
    caches, tensors = kv_cache(blocks)
    layout = worker_layout(caches, tensors, vllm_config=vllm_config())
    copier = make_copier(layout)
    block_bytes = layout.groups[0].block_bytes
    memory = Memory(blocks * block_bytes, copier)
    order = list(range(blocks))
    random.Random(1).shuffle(order)
    shmem = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    report = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "shared_memory_huge_pages": shmem.read_text().partition("[")[2].partition("]")[0] if shmem.exists() else "",
        "populate_gb_per_s": round(memory.nbytes / 1e9 / memory.populate_s, 2),
        "register_gb_per_s": round(memory.nbytes / 1e9 / memory.register_s, 2),
        "copies": [measure(copier, memory, block_bytes, int(n), order, args.repeat) for n in args.tokens.split(",")],
    }
    before = [t.clone() for t in list(tensors.values())[:2]]
    chunk = [(slot, [order[n]]) for n, slot in enumerate(memory.slots(block_bytes)[:64])]
    copier.save(0, chunk, copier.fence())
    copier.load(0, chunk, copier.fence(), lambda: False)
    now = list(tensors.values())[: len(before)]
    report["same_bytes"] = all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(before, now, strict=True))
    text = json.dumps(report, indent=1)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0 if report["same_bytes"] else 1


if __name__ == "__main__":
    sys.exit(main())
