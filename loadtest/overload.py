"""Offers a daemon more calls than it can take, from many sessions, and shows what becomes of them.

``python loadtest/overload.py --sessions 200 --rate 10000 --seconds 20``

Calls are sent when they are due, whether former ones were answered or not. A call ends accepted, refused (RESOURCE_EXHAUSTED), or
is held back by flow control and never sent. Meanwhile an ordinary client makes one call after the other, as an engine does. Times
are given beside those of the same daemon unloaded: ratios say more than milliseconds of a shared machine.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from raw_stream import RawStream

from kvtierd.client import Client
from kvtierd.lifetime import end_in_order, scratch_folder, tied
from kvtierd.model import Namespace
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import kvtier_pb2 as pb

TICK_S = 0.002
SPACE = Namespace(shard_bytes=(4096,), model="overload")


def keys(count: int) -> bytes:
    return b"".join(n.to_bytes(4, "big") * 8 for n in range(count))


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {"p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
    at = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: round(1000 * ordered[min(int(q * len(ordered)), len(ordered) - 1)], 3) for name, q in at.items()}


class Session:
    """One session that sends what is due: lookups, or loads whose blocks it gives back at once."""

    def __init__(self, path: str, kind: str, count: int) -> None:
        self.kind = kind
        self.count = count
        self.packed = keys(count)
        hello = pb.Hello(
            protocol_version=1, namespace=pb.Namespace(shard_bytes=SPACE.shard_bytes, model=SPACE.model), client_name="load"
        )
        self.stream = RawStream(path, hello)
        self.sent_s: dict[int, float] = {}
        self.next_id = 1
        self.attached = False
        self.counts: Counter[str] = Counter()
        self.accepted_s: list[float] = []
        self.refused_s: list[float] = []
        self.hints_ms: list[int] = []
        self.owed: list[pb.AttachRequest] = []

    def offer(self) -> None:
        request = pb.AttachRequest()
        request.call.id = self.next_id
        getattr(request.call, self.kind).keys = self.packed
        if self.kind == "load":
            request.call.load.deadline_ms = 1000
        self.counts["offered"] += 1
        if not self.stream.send(request.SerializeToString()):
            self.counts["held back by flow control"] += 1
            return
        self.sent_s[self.next_id] = time.monotonic()
        self.next_id += 1

    def take(self) -> None:
        while self.owed and self.stream.send(self.owed[-1].SerializeToString()):
            self.owed.pop()
        for message in self.stream.receive():
            if message.HasField("welcome"):
                self.attached = True
            if not message.HasField("reply") or message.reply.id not in self.sent_s:
                continue
            took_s = time.monotonic() - self.sent_s.pop(message.reply.id)
            if message.reply.HasField("error"):
                error = message.reply.error
                self.counts["refused" if error.reason == pb.ERROR_REASON_OVERLOADED else f"failed: {error.message}"] += 1
                self.refused_s.append(took_s)
                self.hints_ms.append(getattr(error, "retry_after_ms", 0))
            else:
                self.check(message.reply)
                self.counts["accepted"] += 1
                self.accepted_s.append(took_s)

    def check(self, reply: pb.Reply) -> None:
        if self.kind == "lookup":
            assert reply.lookup.held == self.count
            return
        if len(reply.load.indexes) < self.count:
            self.counts["of these, with less than was held"] += 1
        if not reply.load.ticket:
            return
        release = pb.AttachRequest()
        release.call.release.ticket = reply.load.ticket
        if not self.stream.send(release.SerializeToString()):
            self.owed.append(release)


def generate(path: str, kind: str, count: int, of_keys: int, rate: float, seconds: float) -> None:
    """One process of load; prints what came of it as JSON."""
    sessions = [Session(path, kind, of_keys) for _ in range(count)]
    selector = selectors.DefaultSelector()
    for session in sessions:
        selector.register(session.stream, selectors.EVENT_READ, session)

    def turn(wait_s: float) -> None:
        for key, _ in selector.select(wait_s):
            key.data.take()
        for session in sessions:
            if session.stream.clogged:
                session.stream.flush()

    until_s = time.monotonic() + 60
    while not all(s.attached for s in sessions):
        assert time.monotonic() < until_s, "every session is attached"
        turn(0.1)
    began_s = time.monotonic()
    offered = 0
    while (now := time.monotonic()) < began_s + seconds:
        due = int((now - began_s) * rate)
        while offered < due:
            sessions[offered % count].offer()
            offered += 1
        turn(TICK_S)
    took_s = time.monotonic() - began_s
    until_s = time.monotonic() + 60
    while any(s.sent_s for s in sessions) and time.monotonic() < until_s:
        turn(0.1)
    counts: Counter[str] = Counter()
    for session in sessions:
        counts += session.counts
        counts["without an answer"] += len(session.sent_s)
        counts["connections lost"] += session.stream.closed
    print(json.dumps({
        "counts": counts, "seconds": took_s, "accepted_s": [x for s in sessions for x in s.accepted_s],
        "refused_s": [x for s in sessions for x in s.refused_s], "hints_ms": [x for s in sessions for x in s.hints_ms],
    }))  # fmt: skip


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_by_one(client: Client, kind: str, count: int, seconds: float) -> list[float]:
    """Latencies of calls made one after the other; those that are refused are left out."""
    found = []
    until_s = time.monotonic() + seconds
    packed = keys(count)
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        if kind == "lookup":
            served = client.lookup(packed, timeout_s=30).held == count
        else:
            with client.fetch(packed, timeout_s=30) as fetch:
                served = next(iter(fetch), None) is not None
        if served:
            found.append(time.monotonic() - began_s)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10_000, help="calls a second, all sessions together (default 10,000)")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--call", choices=["lookup", "load"], default="load")
    parser.add_argument("--keys", type=int, default=256, help="of one call (default 256)")
    parser.add_argument("--processes", type=int, default=2, help="that make the load")
    parser.add_argument("--output", type=Path, help="where the figures go as JSON")
    parser.add_argument("--generate", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.generate:
        generate(args.generate, args.call, args.sessions, args.keys, args.rate, args.seconds)
        return 0
    end_in_order()
    with scratch_folder(Path(tempfile.gettempdir()), "kvtierd-overload-") as folder:
        daemon = DaemonProcess(folder, {"nvme": {"capacity": 0}, "log": {"slow": 0}}, tie=True).start()
        client = Client(SPACE, daemon.address, require=True, timeout_s=30)
        try:
            figures = measure(args, daemon, client)
        finally:
            client.close()
            daemon.kill()
    text = json.dumps(figures, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 0


def measure(args: argparse.Namespace, daemon: DaemonProcess, client: Client) -> dict[str, object]:
    assert client.save(keys(args.keys), [bytes(4096)] * args.keys).saved == args.keys
    one_by_one(client, args.call, args.keys, 1)
    alone = quantiles(one_by_one(client, args.call, args.keys, 3))
    command = [
        sys.executable, __file__, "--generate", daemon.config["server"]["socket"], "--call", args.call, "--keys", str(args.keys),
        "--sessions", str(args.sessions // args.processes), "--rate", str(args.rate / args.processes),
        "--seconds", str(args.seconds),
    ]  # fmt: skip
    makers = [subprocess.Popen(tied(command), stdout=subprocess.PIPE) for _ in range(args.processes)]
    time.sleep(args.seconds / 4)
    rss = [rss_bytes(daemon.pid)]
    beside = []
    for _ in range(4):
        beside += one_by_one(client, args.call, args.keys, args.seconds / 8)
        rss.append(rss_bytes(daemon.pid))
    outputs = [json.loads(maker.communicate()[0]) for maker in makers]
    counts: Counter[str] = Counter()
    for output in outputs:
        counts.update(output["counts"])
    accepted = quantiles([x for o in outputs for x in o["accepted_s"]])
    refused = quantiles([x for o in outputs for x in o["refused_s"]])
    engine = quantiles(beside)
    hints = [x for o in outputs for x in o["hints_ms"]]
    return {
        "calls a second": {k: round(v / args.seconds) for k, v in counts.items()},
        "calls": counts,
        "unloaded": alone,
        "accepted": accepted,
        "refused": refused,
        "an ordinary client meanwhile": engine,
        "ratio to unloaded": {
            f"{who} {at[:3]}": round(figures[at] / alone[at], 1)
            for who, figures in (("accepted", accepted), ("refused", refused), ("ordinary client", engine))
            for at in ("p50_ms", "p99_ms")
        },
        "hint, ms": {"median": statistics.median(hints), "max": max(hints)} if hints else {},
        "daemon's memory, MiB": [round(x / 2**20, 1) for x in rss],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
