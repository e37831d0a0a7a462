"""How fast shared memory is made ready for DMA: faulted in and registered with CUDA, by one thread and by several.

    python3 loadtest/gpu/register.py [--gb 8] [--huge-pages] [--output FILE]

The memory is that of a daemon: memfds of 256 MiB whose pages exist, in huge pages or small ones, mapped anew each time, as by an
engine that has just started. Also: how long a kernel launch of another thread takes meanwhile, since the driver holds a lock while
it registers.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from kvtierd.memory import HUGE_PAGE_BYTES, SharedMapping, create_memfd  # noqa: E402

EXTENT_BYTES = 256 << 20


def launches(stop, times):
    x = torch.zeros(1024, device="cuda")
    while not stop.is_set():
        began = time.perf_counter()
        x.add_(1)
        times.append(time.perf_counter() - began)
        time.sleep(0.0002)


def over(pool, function, pieces):
    began = time.perf_counter()
    for future in [pool.submit(function, *piece) for piece in pieces]:
        future.result()
    return time.perf_counter() - began


def measure(fds, threads, piece_bytes, fault_in):
    runtime = torch.cuda.cudart()
    mappings = [SharedMapping(fd, EXTENT_BYTES) for fd in fds]
    pieces = [(m, start) for m in mappings for start in range(0, EXTENT_BYTES, piece_bytes)]
    found, times, stop = {"threads": threads, "piece_mib": piece_bytes >> 20, "fault_in": fault_in}, [], threading.Event()

    def register(mapping, start):
        torch.cuda.set_device(0)
        error = runtime.cudaHostRegister(mapping.address + start, piece_bytes, 1)
        if int(error):
            sys.exit(f"cudaHostRegister: {error}")

    def unregister(mapping, start):
        runtime.cudaHostUnregister(mapping.address + start)

    thread = threading.Thread(target=launches, args=(stop, times))
    thread.start()
    total = len(fds) * EXTENT_BYTES / 1e9
    with ThreadPoolExecutor(threads) as pool:
        while len(times) < 100:
            time.sleep(0.01)
        idle, times[:] = statistics.median(times), []
        seconds = 0.0
        if fault_in:
            seconds = over(pool, lambda m, start: m.populate(start, piece_bytes), pieces)
            found["fault_in_gb_s"] = round(total / seconds, 2)
        registering = over(pool, register, pieces)
        found["register_gb_s"] = round(total / registering, 2)
        found["both_gb_s"] = round(total / (seconds + registering), 2)
        stop.set()
        thread.join()
        found["launch_us"] = {
            "idle": round(idle * 1e6),
            "max": round(max(times) * 1e6),
            "mean": round(statistics.mean(times) * 1e6),
        }
        found["unregister_gb_s"] = round(total / over(pool, unregister, pieces), 2)
    for mapping in mappings:
        mapping.release()
    return found


def make(fd, huge_pages):
    mapping = SharedMapping(fd, EXTENT_BYTES)
    for start in range(0, EXTENT_BYTES if huge_pages else 0, HUGE_PAGE_BYTES):
        mapping.gather(start)
    mapping.populate(0, EXTENT_BYTES)
    mapping.release()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=int, default=8)
    parser.add_argument("--huge-pages", action="store_true", help="as the daemon does with cpu.huge_pages")
    parser.add_argument("--output", help="write the JSON to this file too")
    args = parser.parse_args()
    fds = [create_memfd(f"kvtierd-{n}", EXTENT_BYTES) for n in range(args.gb * 4)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda fd: make(fd, args.huge_pages), fds))
    rows = []
    for threads in (1, 2, 4, 8):
        for piece_mib, fault_in in ((64, False), (64, True), (256, True)):
            rows.append(measure(fds, threads, piece_mib << 20, fault_in))
            print(json.dumps(rows[-1]), flush=True)
    if args.output:
        Path(args.output).write_text(json.dumps(rows, indent=1) + "\n")
    for fd in fds:
        os.close(fd)
    return 0


if __name__ == "__main__":
    sys.exit(main())
