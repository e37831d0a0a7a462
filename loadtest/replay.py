#!/usr/bin/env python3
"""Replays a trace in the simulation of `kvtierd replay` with every option of the policy; writes policy.json and policy.md.

    .venv/bin/python loadtest/replay.py TRACE [--only WORDS] [--missing] [--output FOLDER]

The published results are of Mooncake's conversation trace (see traces/README.md), of which all cases take about ten minutes of one
core. `--only` measures the cases whose name has these words and `--missing` those that the file lacks; the others of the file are
kept where they are of the same trace. Results go to loadtest/out, and with `--output loadtest/results` to the published ones.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from kvtierd.model import Tier
from kvtierd.replay.capacity import CapacityError, parse_capacity
from kvtierd.replay.simulate import SimSettings, Simulation
from kvtierd.replay.trace import Request, TraceError, read_trace

OUT = Path(__file__).parent / "out"
GIB = 2**30
MOONCAKE = ("mooncake_conversation.jsonl", "conversation_trace.jsonl")
"""Names that the public trace goes by."""
POLICIES: dict[str, dict[str, Any]] = {"LRU": {}, "turn bonus 60 s": {"turn_bonus_s": 60.0}, "ARC": {"eviction": "arc"}}
SECOND = {"second_use": True}


def cases() -> list[tuple[str, str, str, dict[str, Any]]]:
    """(capacity, what it is, option, settings) in the order of the page."""
    real, small = "640,3200,32768", "640,3200,8192"
    made: list[tuple[str, str, str, dict[str, Any]]] = []
    for percent in (1, 5, 20):
        made += [(f"{percent}%", f"one tier of {percent} % of the distinct blocks", name, o) for name, o in POLICIES.items()]
    for percent in (1, 5, 20):
        made += [(f"1:5:40@{percent}%", f"three tiers, 1:5:40, {percent} % in all", name, o) for name, o in POLICIES.items()]
    what, slow = "40 GiB, 200 GiB, 2 TiB", " at a 20th of the speed"
    made += [(real, what, name, o) for name, o in POLICIES.items()]
    made += [(real, what + slow, name, o | {"time_scale": 20.0}) for name, o in POLICIES.items()]
    what = "40 GiB, 200 GiB, 512 GiB"
    made += [
        (small, what, "LRU", {}),
        (small, what, "second use", SECOND),
        (small, what, "second use, turn bonus 60 s", SECOND | POLICIES["turn bonus 60 s"]),
        (small, what, "second use, ARC", SECOND | POLICIES["ARC"]),
        (small, what, "write budget 2 TiB a day", {"write_budget_bytes": 2 << 40}),
        (small, what + slow, "second use", SECOND | {"time_scale": 20.0}),
    ]
    return made


def measure(capacity: str, options: dict[str, Any], requests: list[Request], distinct: int) -> dict[str, Any]:
    """One case. A single tier has no TTL."""
    blocks = parse_capacity(capacity, distinct)
    ttl: dict[str, Any] = {"hbm_ttl_s": None, "cpu_ttl_s": None} if list(blocks) == [Tier.CPU] else {}
    figures = Simulation(SimSettings(blocks, 64 << 20, **(ttl | options)), requests).run()
    figures.pop("samples")
    figures.pop("tenants")
    return figures


def page(found: dict[str, Any]) -> str:
    """The table as Markdown."""
    public = ", the conversation trace of the Mooncake artefact (FAST'25; see ../traces/README.md)"
    lines = [
        "# Policy, on a public trace",
        "",
        f"Written by `python loadtest/replay.py TRACE` on {found['date']}. The figures are those of the simulation of",
        "`kvtierd replay`, which drives the daemon's own core in virtual time, with moves that take no time. Raw: `policy.json`.",
        "",
        f"- trace: `{found['trace']}`{public if found['trace'] in MOONCAKE else ''}: "
        f"{found['requests']:,} requests, {found['blocks']:,} blocks, {found['distinct']:,} distinct",
        f"- a cache that forgets nothing would hit {found['ideal']:.4f}",
        "- a hit is a block of the prefix that is present when its request arrives; ratios are of all blocks of all requests",
        "- blocks of 64 MiB; TTLs 30 s (HBM), 10 min (CPU), none (NVMe); a single tier has none",
        "",
        "| tiers | option | hits | HBM | CPU | NVMe | written to NVMe, GiB | read from NVMe, GiB | TTL demotions | not admitted |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["cases"]:
        f = row["figures"]
        tiers = [f"{f['hit_ratio_by_tier'][t]:.4f}" if t in f["hit_ratio_by_tier"] else "" for t in ("hbm", "cpu", "nvme")]
        flat = "nvme" not in f["hit_ratio_by_tier"]
        moved = (
            ["", "", ""]
            if flat
            else [f"{f['nvme_written_bytes'] / GIB:,.0f}", f"{f['nvme_read_bytes'] / GIB:,.0f}", f"{f['demotions']['ttl']:,}"]
        )
        refused = "" if flat else f"{sum(f['not_admitted'].values()):,}"
        lines.append(
            f"| {row['tiers']} | {row['option']} | {f['prefix_hit_ratio']:.4f} | {' | '.join((*tiers, *moved, refused))} |"
        )
    return "\n".join(lines) + "\n"


def write(path: Path, trace: str, distinct: int, rows: list[dict[str, Any]]) -> None:
    """Both files, after each case, so that a run that is cut short leaves what it has."""
    first = rows[0]["figures"]
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "trace": trace,
        "requests": first["requests"],
        "blocks": first["blocks"],
        "distinct": distinct,
        "ideal": first["ideal_prefix_hit_ratio"],
        "cases": rows,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure every option of the policy on a trace.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--only", default="", help="only cases with these words in capacity, tiers or option")
    parser.add_argument("--missing", action="store_true", help="only cases that the file does not have")
    parser.add_argument("--output", type=Path, default=OUT, help="folder for the results (default loadtest/out)")
    chosen = parser.parse_args()
    try:
        requests = read_trace(chosen.trace, partial=True)
        chosen.output.mkdir(parents=True, exist_ok=True)
    except (TraceError, OSError) as e:
        parser.error(str(e))
    distinct = len({b for r in requests for b in r.blocks})
    path = chosen.output / "policy.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = {_name(row): row for row in before["cases"]} if before.get("trace") == chosen.trace.name else {}
    every = [({"capacity": capacity, "tiers": what, "option": option}, settings) for capacity, what, option, settings in cases()]
    for row, settings in every:
        name = _name(row)
        if chosen.only not in name or (chosen.missing and name in rows):
            continue
        try:
            figures = measure(row["capacity"], settings, requests, distinct)
        except CapacityError:
            parser.error(f"{row['capacity']} of the {distinct} distinct blocks of {chosen.trace} is none: take a longer trace")
        written = figures["nvme_written_bytes"] / GIB
        print(f"{name}: {figures['prefix_hit_ratio']:.4f}, {written:,.0f} GiB, {figures['seconds']:.0f} s", flush=True)
        rows[name] = row | {"figures": figures}
        write(path, chosen.trace.name, distinct, [rows[n] for n in map(_name, (r for r, _ in every)) if n in rows])


def _name(row: dict[str, Any]) -> str:
    return f"{row['capacity']} {row['tiers']}: {row['option']}"


if __name__ == "__main__":
    main()
