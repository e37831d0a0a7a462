"""Measures an LMCache server and a kvtierd daemon side by side: the same sizes, in turn, in one run.

Each side has a server and a client process of its own on this machine (loopback and unix sockets). A pass stores 20 requests of
two chunks and reads them back; passes alternate between the sides, and only those from the third on count, when all memory has
been touched. LMCache runs with what suited it best on a CPU: ZeroMQ, shared memory, engine-driven transfers, one OpenMP thread,
two workers. Medians over all counted requests.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtierd.bench.daemon import BenchDaemon, work_folder
from kvtierd.bench.measure import close_environment, digits, environment, median, spread
from kvtierd.lifetime import end_in_order

HERE = Path(__file__).parent
MIB = 1 << 20
CHUNKS = 2
WARM_PASSES = 2
KV_BLOCKS = 704
"""Pages of 16 tokens in the client's KV cache: 20 requests of two chunks do not overlap."""
LMCACHE_L1_GIB = 4
KVTIERD_POOL_BYTES = 3 << 30
TOKENS = (4096, 32_768, 131_072)
TARGET = 1.5
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def lmcache_server(venv: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """An LMCache server. Yields its RPC and HTTP addresses."""
    port, http_port, name = free_port(), free_port(), f"kvtierd-peers-{os.getpid()}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    command = [str(venv / "bin/lmcache"), "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--l1-size-gb", str(LMCACHE_L1_GIB)]
    command += ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--max-workers", "2", "--transport", "zmq"]
    command += ["--supported-transfer-mode", "auto", "--shm-name", name]
    log = folder / "lmcache.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        http_url = f"http://127.0.0.1:{http_port}"
        until_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(http_url + "/healthcheck", timeout=2):
                break
            if process.poll() is not None or time.monotonic() > until_s:
                raise SystemExit(f"the LMCache server did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        yield f"tcp://127.0.0.1:{port}", http_url
    finally:
        stop(process)
        for left in Path("/dev/shm").glob(f"*{name}*"):
            left.unlink(missing_ok=True)


class Worker:
    """A client process that answers one JSON line to each command."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as err:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def ask(self, **command: object) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{command} failed:\n{self.log.read_text(errors='replace')[-3000:]}")
        return json.loads(answer)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        stop(self.process)


def measure_copies(sides: dict[str, Worker], mib: int, passes: int) -> dict[str, dict[str, list[float]]]:
    """GB/s of each counted request, by side and call."""
    rates: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for number in range(1, WARM_PASSES + passes + 1):
        for side in sorted(sides, reverse=bool(number % 2)):
            for call, took in sides[side].ask(do="pass", mib=mib, number=number).items():
                if number > WARM_PASSES:
                    rates[side].setdefault(call, []).extend(CHUNKS * mib * MIB / 1e9 / s for s in took)
    return rates


def measure_lookups(sides: dict[str, Worker], tokens: int, rounds: int, *, hit: bool) -> dict[str, list[float]]:
    """Milliseconds of each lookup, by side."""
    took: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side in sorted(sides, reverse=bool(number % 2)):
            answer = sides[side].ask(do="lookup", tokens=tokens, hit=hit)
            if number:
                took[side] += [s * 1e3 for s in answer]
    return took


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tables = {"cpu": {"capacity": KVTIERD_POOL_BYTES, "ttl": "never"}, "nvme": {"capacity": 64 * MIB, "reserve": 0}}
    found: dict[str, Any] = {"environment": environment(folder), "ratios": {}, "quartiles": {}}
    found["environment"] |= {"lmcache": "0.5.6", "command": "loadtest/peers/run.sh"}
    with (
        lmcache_server(args.lmcache_venv, folder) as (rpc_url, http_url),
        BenchDaemon(folder / "kvtierd", tables) as daemon,
    ):
        daemon.start()
        daemon.wait_prefaulted(KVTIERD_POOL_BYTES)
        common = ["--kv-blocks", str(KV_BLOCKS)]
        lmcache = [
            str(args.lmcache_venv / "bin/python"),
            str(HERE / "lmcache_worker.py"),
            "--rpc-url",
            rpc_url,
            "--http-url",
            http_url,
        ]
        kvtierd = [sys.executable, str(HERE / "kvtierd_worker.py"), "--address", daemon.address]
        with (
            Worker(lmcache + common, folder / "lmcache-worker.log") as theirs,
            Worker(kvtierd + common, folder / "kvtierd-worker.log") as ours,
        ):
            sides = {"lmcache": theirs, "kvtierd": ours}
            for mib in args.chunk_mib:
                report_copies(found, mib, measure_copies(sides, mib, args.passes))
            for tokens in TOKENS:
                for hit in (True, False):
                    report_lookup(found, tokens, measure_lookups(sides, tokens, args.passes, hit=hit), hit=hit)
    close_environment(found["environment"])
    return found


def report_copies(found: dict[str, Any], mib: int, rates: dict[str, dict[str, list[float]]]) -> None:
    for side, calls in rates.items():
        for call, values in calls.items():
            found.setdefault(f"{side}_{call}_gb_per_s", {})[str(mib)] = digits(median(values))
            found["quartiles"].setdefault(f"{side}_{call}_gb_per_s", {})[str(mib)] = spread(values)
    for call, values in rates["kvtierd"].items():
        peer = median(rates["lmcache"][call.removesuffix("_flat")])
        found["ratios"].setdefault(call, {})[str(mib)] = digits(median(values) / peer)


def report_lookup(found: dict[str, Any], tokens: int, took: dict[str, list[float]], *, hit: bool) -> None:
    name = "lookup_hit" if hit else "lookup_miss"
    for side, values in took.items():
        found.setdefault(f"{side}_{name}_ms", {})[str(tokens)] = digits(statistics.median(values))
        found["quartiles"].setdefault(f"{side}_{name}_ms", {})[str(tokens)] = spread(values)
    found["ratios"].setdefault(name, {})[str(tokens)] = digits(
        statistics.median(took["lmcache"]) / statistics.median(took["kvtierd"])
    )


def show(found: dict[str, Any]) -> None:
    if found["environment"]["source_changed"]:
        print("The code of kvtierd changed during this run: the figures belong to no single version.")
    table = Table(title="kvtierd and LMCache 0.5.6, medians; ratio: how many times faster kvtierd is")
    for name in ("measured", "LMCache", "kvtierd", "unit", "ratio", "target"):
        table.add_column(name, justify="left" if name == "measured" else "right")
    names = {
        "save": "save, from paged KV",
        "load": "load, into paged KV",
        "save_flat": "save, contiguous blocks (LMCache: paged)",
        "load_flat": "load, contiguous blocks (LMCache: paged)",
        "lookup_hit": "lookup, all held",
        "lookup_miss": "lookup, nothing held",
    }
    for call, ratios in found["ratios"].items():
        unit = "ms" if call.startswith("lookup") else "GB/s"
        suffix = "ms" if unit == "ms" else "gb_per_s"
        for key, ratio in ratios.items():
            what = f"{names[call]}, {int(key):,} tokens" if unit == "ms" else f"{names[call]}, 2 x {key} MiB"
            theirs = found[f"lmcache_{call.removesuffix('_flat')}_{suffix}"][key]
            ours = found[f"kvtierd_{call}_{suffix}"][key]
            target = f"≥ {TARGET}" if call in ("save", "load") else ""
            colour = "" if not target else "green" if ratio >= TARGET else "red"
            table.add_row(
                what, f"{theirs:.3g}", f"{ours:.3g}", unit, f"[{colour}]{ratio:.2f}[/]" if colour else f"{ratio:.2f}", target
            )
    Console(width=max(Console().width, 110)).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lmcache-venv", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="folder on a disk for temporary files")
    parser.add_argument("--passes", type=int, default=5, help="counted passes")
    parser.add_argument("--chunk-mib", type=lambda text: [int(x) for x in text.split(",")], default=[2, 8, 32])
    args = parser.parse_args()
    end_in_order()
    if shutil.disk_usage("/dev/shm").free < (LMCACHE_L1_GIB + 1) << 30:
        raise SystemExit(f"/dev/shm has less than {LMCACHE_L1_GIB + 1} GiB free, which LMCache's server needs")
    with work_folder(args.folder) as folder:
        found = run(args, folder)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=2) + "\n")
    show(found)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
