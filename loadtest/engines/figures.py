"""What came of a run, as plain numbers, and whether the figures can be trusted."""

from __future__ import annotations

import datetime
import itertools
import math
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import kvtierd
from kvtierd.bench.measure import cpu_model
from loadtest.engines.engine import Record
from loadtest.engines.plan import FaultKind, Item, Mix, Settings, Step
from loadtest.engines.run import Progress
from loadtest.engines.watch import Sample, Watched

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
CALLS = ("lookup", "load", "save", "evict")
BUSY_LIMIT = 0.85
"""Of one core: a process whose threads share one interpreter lock and that uses more adds to what it measures."""
AFTER_CLIENT_S = 5.0
"""A client process that has been replaced imports Python's modules for so long, next to the others."""


def quantile(ordered: Sequence[float], q: float) -> float:
    """By nearest rank, of at least one value; they are in order."""
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]


def quantiles_ms(seconds: Iterable[float]) -> dict[str, float]:
    """Quantiles by nearest rank, in milliseconds; empty for no values."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {name: round(1000 * quantile(ordered, q), 3) for name, q in QUANTILES.items()}


def latencies(records: list[Record]) -> dict[str, dict[str, Any]]:
    """By call, and of whole requests: from the moment when it was meant to begin, and of the call alone."""
    meant: dict[str, list[float]] = defaultdict(list)
    alone: dict[str, list[float]] = defaultdict(list)
    for record in records:
        meant["request"].append(record.ended_s - record.due_s)
        alone["request"].append(record.ended_s - record.began_s)
        for call in record.calls:
            meant[call.name].append(call.ended_s - call.meant_s)
            alone[call.name].append(call.ended_s - call.began_s)
    return {
        name: {"count": len(meant[name]), "ms": quantiles_ms(meant[name]), "call_alone_ms": quantiles_ms(alone[name])}
        for name in (*CALLS, "request")
        if meant[name]
    }


def hits(records: Iterable[Record]) -> dict[str, Any]:
    """Blocks asked for, and found by tier."""
    asked, found = 0, Counter[str]()
    for record in records:
        asked += record.asked
        found.update(record.hits)
    ratios = {tier: round(count / asked, 4) for tier, count in sorted(found.items())} if asked else {}
    return {
        "asked_blocks": asked,
        "hit_blocks": found.total(),
        "hit_ratio": round(found.total() / max(asked, 1), 4),
        "by_tier": ratios,
    }


def by_second(records: list[Record], seconds: float) -> list[dict[str, Any]]:
    """The run in slices of a second by when requests were due; calls by when they were meant to begin."""
    count = max(math.ceil(max([seconds, *(r.due_s for r in records)])), 1)
    slices: list[dict[str, Any]] = [
        {"calls": defaultdict(list), "asked": 0, "hits": Counter(), "troubles": Counter(), "tenants": defaultdict(lambda: [0, 0])}
        for _ in range(count)
    ]
    for record in records:
        here = slices[min(int(record.due_s), count - 1)]
        here["asked"] += record.asked
        here["hits"].update(record.hits)
        here["troubles"].update(record.troubles)
        tenant = here["tenants"][record.tenant]
        tenant[0] += record.asked
        tenant[1] += sum(record.hits.values())
        for call in record.calls:
            slices[min(int(call.meant_s), count - 1)]["calls"][call.name].append(call.ended_s - call.meant_s)
    return [
        {
            "second": second,
            "ms": {name: {"count": len(values)} | quantiles_ms(values) for name, values in here["calls"].items()},
            "asked_blocks": here["asked"],
            "hit_blocks": dict(here["hits"]),
            "troubles": dict(here["troubles"]),
            "tenants": {name: {"asked": asked, "hit": hit} for name, (asked, hit) in sorted(here["tenants"].items())},
        }
        for second, here in enumerate(slices)
    ]


def generator(progress: Progress, late_limit_s: float, settings: Settings) -> dict[str, Any]:
    """How the client side did: how late it was with what was due, and how busy; ``problems`` says why it cannot be trusted."""
    killed = [e.began_s for e in progress.events if e.fault.kind is FaultKind.CLIENT]
    steady = [r for r in progress.records if not any(at <= r.due_s < at + AFTER_CLIENT_S for at in killed)]
    late = quantiles_ms(r.dispatched_s - r.due_s for r in steady)
    waits = quantiles_ms(r.began_s - r.dispatched_s for r in progress.records)
    shares = {}
    for number, (_, looks) in enumerate(sorted(progress.busy.items())):
        steps = [(b.cpu_s - a.cpu_s) / (b.at_s - a.at_s) for a, b in itertools.pairwise(looks) if b.at_s - a.at_s > 0.1]
        if steps:
            shares[f"process {number}"] = {
                "median": round(sorted(steps)[len(steps) // 2], 3),
                "max": round(max(steps), 3),
            }
    problems = []
    if late and late["p99"] > 1000 * late_limit_s:
        problems.append(
            f"requests were handed on late by the load generator itself: p99 {late['p99']:.0f} ms, and the limit is "
            f"{1000 * late_limit_s:.0f} ms. Lower --speedup, raise --processes, or free the machine"
        )
    for name, share in shares.items():
        if share["median"] > BUSY_LIMIT:
            problems.append(
                f"{name} of the load generator used {share['median']:.0%} of a core: raise --processes or lower --speedup"
            )
    offered = len(progress.records)
    if not killed and offered < progress.total:
        problems.append(f"{progress.total - offered} of {progress.total} requests were never made")
    return {
        "late_ms": late,
        "waited_for_a_thread_ms": waits,
        "busy_cores": shares,
        "threads_an_engine": settings.threads,
        "requests": {"planned": progress.total, "made": offered, "lost with a killed client": progress.total - offered},
        "problems": problems,
    }


def recoveries(progress: Progress, samples: list[Sample]) -> list[dict[str, Any]]:
    """For each fault, when it began and ended, and when the first request after its end was served from the cache again."""
    found = []
    for event in progress.events:
        end_s = event.ended_s if event.ended_s is not None else event.began_s
        served = [c.ended_s for r in progress.records if r.due_s >= end_s and r.hits for c in r.calls if c.name == "load"]
        up = [s.at_s for s in samples if s.at_s >= end_s and s.used_bytes]
        found.append(
            {
                "kind": event.fault.kind.word,
                "what": event.fault.kind.value,
                "began_s": round(event.began_s, 3),
                "ended_s": round(end_s, 3),
                "status_again_after_s": round(min(up) - end_s, 3) if up else None,
                "hits_again_after_s": round(min(served) - end_s, 3) if served else None,
            }
        )
    return found


def machine() -> dict[str, Any]:
    """Where this ran."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kvtierd": kvtierd.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def ideal(items: list[Item]) -> float:
    """Share of blocks that a cache that forgets nothing would find; evictions that were asked for are left out of account."""
    seen: dict[str, set[int]] = defaultdict(set)
    found = asked = 0
    for item in items:
        known = seen[item.tenant]
        if Step.LOAD in item.steps:
            found += next((at for at, block in enumerate(item.blocks) if block not in known), len(item.blocks))
            asked += len(item.blocks)
        if Step.SAVE in item.steps:
            known.update(item.blocks)
    return round(found / max(asked, 1), 4)


def mix_text(mix: Mix) -> str:
    """As the command line has it."""
    return ",".join(f"{step.value}={weight:g}" for step, weight in mix)


def result(command: str, settings: Settings, items: list[Item], progress: Progress, watched: Watched) -> dict[str, Any]:
    """All of it as JSON values."""
    records = sorted(progress.records, key=lambda r: r.due_s)
    tenants = sorted({r.tenant for r in records})
    troubles: Counter[str] = Counter()
    for record in records:
        troubles.update(record.troubles)
    block_bytes = settings.shards * settings.shard_bytes
    return {
        "command": command,
        "machine": machine(),
        "parameters": {
            "source": settings.source,
            "seconds": settings.seconds,
            "speedup": settings.speedup,
            "processes": settings.processes,
            "engines": settings.engines,
            "shards": settings.shards,
            "block_bytes": block_bytes,
            "cpu": settings.cpu,
            "nvme": settings.nvme,
            **({"mix": mix_text(settings.mix)} if settings.mix else {"evict": settings.evict}),
            "seed": settings.seed,
            "requests": len(items),
            "distinct_blocks": len({(i.tenant, b) for i in items for b in i.blocks}),
            "ideal_hit_ratio": ideal(items),
        },
        "wrong_bytes": sum(r.wrong_bytes for r in records),
        "checked_bytes": sum(sum(r.hits.values()) for r in records) * block_bytes,
        "saved_blocks": sum(r.saved for r in records),
        "lost_blocks": sum(r.lost for r in records),
        "latency": latencies(records),
        "hits": hits(records),
        "tenants": {t: hits(r for r in records if r.tenant == t) for t in tenants},
        "troubles": dict(troubles.most_common()),
        "faults": recoveries(progress, watched.samples),
        "generator": generator(progress, settings.late_limit_s, settings),
        "counters": watched.counters,
        "disk_faults": watched.disk_hits,
        "by_second": by_second(records, settings.seconds),
        "samples": [
            {
                "at_s": round(s.at_s, 2),
                "used_bytes": s.used_bytes,
                "capacity_bytes": s.capacity_bytes,
                "rss_bytes": s.rss_bytes,
                "suspended": s.suspended or {},
            }
            for s in watched.samples
        ],
        "busy": [[[round(b.at_s, 2), round(b.cpu_s, 3)] for b in looks] for _, looks in sorted(progress.busy.items())],
        "notes": progress.notes,
    }
