#!/usr/bin/env python3
"""How much of the prompts is computed again, with the engine's own cache alone and with kvtierd's tiers below it.

    .venv/bin/python loadtest/recompute.py [rag-chat|agents|documents] [--conversations N] [--output FOLDER]

Drives the daemon's own core in virtual time (the simulation of `kvtierd replay`) over a trace of loadtest/workloads.py, and writes
recompute.json and recompute.md to loadtest/out, or with `--output loadtest/results` the published ones. The engine's cache is as
large as makes it recompute 38 % of the prompt tokens of RAG chat alone, which is what was published for vLLM's prefix cache on such
traffic; the tiers are multiples of that. The other workloads get caches of the same sizes, so RAG chat is run first. Takes about
ten minutes of one core each.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from workloads import BLOCK_TOKENS, parser_of, trace

from kvtierd.model import Tier
from kvtierd.replay.simulate import SimSettings, Simulation
from kvtierd.replay.trace import Request, ideal_hits

OUT = Path(__file__).parent / "out"
ENGINE_ALONE = 0.38
"""Published for vLLM's prefix cache: 38 % recomputed; 17 % with SGLang, 11 % with LMCache on CPU and NVMe, 6 % cluster-wide."""
CPU, NVME = 3, 12
"""Sizes of the tiers, in engine caches: a server with 8 GPUs that have 300 GB for KV, 900 GB of memory and 3.6 TB of NVMe."""
TRAFFIC: dict[str, dict[str, float]] = {
    "rag-chat": {"conversations": 4000, "tenants": 8, "system_prompts": 2, "contexts": 300, "output_tokens": 150},
    "agents": {"conversations": 1000, "tenants": 8, "system_prompts": 2, "rate": 0.4},
    "documents": {"conversations": 3000, "tenants": 8, "system_prompts": 2, "contexts": 300, "rate": 0.5},
}
ABOUT = {
    "rag-chat": "system prompts of {system_tokens:,} tokens, contexts of {context_tokens:,} ({contexts}, popular by Zipf's law "
    "with exponent {skew}), user turns of {user_tokens}, {turns} turns, answers of {output_tokens} on average; think times of "
    "{think_s:.0f} s",
    "agents": "system prompts with tools of {system_tokens:,} tokens, tasks of {user_tokens}, {turns} steps of {output_tokens}, "
    "whose tools answer {context_tokens:,} tokens after {think_s:.0f} s on average, some after many minutes (log-normal)",
    "documents": "instructions of {system_tokens} tokens, documents of {context_tokens:,} ({contexts}, popular by Zipf's law "
    "with exponent {skew}), {turns} questions of {user_tokens} about each, answers of {output_tokens} on average; think times of "
    "{think_s:.0f} s",
}
BLOCK_BYTES = 64 << 20


def share(tokens: int, hit_blocks: int) -> float:
    """Part of the prompt tokens that is computed. Blocks that a prompt fills in part are never found."""
    return 1 - hit_blocks * BLOCK_TOKENS / tokens


def run(requests: list[Request], tiers: dict[Tier, int], tokens: int) -> dict[str, Any]:
    """One simulation."""
    ttl: dict[str, Any] = {"hbm_ttl_s": None, "cpu_ttl_s": None} if len(tiers) == 1 else {}
    figures = Simulation(SimSettings(tiers, BLOCK_BYTES, **ttl), requests).run()
    return {
        "recomputed": round(share(tokens, figures["hit_blocks"]), 4),
        "by_tier": figures["hit_ratio_by_tier"],
        "read_gib": round(figures["nvme_read_bytes"] / 2**30),
        "written_gib": round(figures["nvme_written_bytes"] / 2**30),
    }


def engine_blocks(requests: list[Request], tokens: int) -> int:
    """The size of an LRU cache that alone leaves ``ENGINE_ALONE`` to compute, to 2 %."""
    low, high = 16, len({b for r in requests for b in r.blocks})
    while high - low > max(low // 50, 1):
        middle = (low + high) // 2
        found = run(requests, {Tier.CPU: middle}, tokens)["recomputed"]
        print(f"an engine cache of {middle} blocks: {found:.1%}", flush=True)
        low, high = (middle, high) if found > ENGINE_ALONE else (low, middle)
    return high


def page(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# What is computed again",
        "",
        f"Written by `python loadtest/recompute.py` on {found['date']}: the daemon's own core in virtual time, made-up traffic of",
        "`loadtest/workloads.py`.",
        "",
        f"- the engine's cache has {found['engine_blocks']:,} blocks of {BLOCK_TOKENS} tokens, CPU memory {CPU} times and NVMe "
        f"{NVME} times as many",
        "- published for RAG chat (72B FP8 model on 8 H200; its cache sizes are not): 38 % with vLLM's prefix cache alone, "
        "17 % with SGLang, 11 % with LMCache on CPU and NVMe, 6 % with a cache for the cluster. Only the 38 % is reproduced here, "
        "by the size of the engine's cache; the others are quoted, not measured",
        "- least possible: what a cache that forgets nothing leaves: what was never seen (new turns, answers that come back as a "
        "part of the next prompt, contexts asked for the first time), and the end of each prompt that does not fill a block",
    ]
    for kind, one in found["workloads"].items():
        lines += section(kind, one, found["engine_blocks"])
    return "\n".join(lines) + "\n"


def section(kind: str, one: dict[str, Any], engine: int) -> list[str]:
    """One workload."""
    options = one["options"]
    parts = [", ".join(f"{n * engine / one[of]:.0%}" for n in (1, CPU, NVME)) for of in ("distinct", "distinct_shared")]
    lines = [
        "",
        f"## {kind}",
        "",
        f"- {one['requests']:,} requests of {options['conversations']:,} conversations, {options['rate']:g} new ones a second; "
        f"{options['tenants']} tenants, {options['system_prompts']} system prompts; {ABOUT[kind].format(**options)}",
        f"- prompts of {one['tokens_per_request']:,} tokens on average, {one['distinct']:,} distinct blocks when tenants share "
        f"nothing, {one['distinct_shared']:,} when they share all",
        f"- engine, CPU memory and NVMe have room for {parts[0]} of the distinct blocks, and for {parts[1]} where tenants share",
        "",
        "| | recomputed | least possible | engine | CPU | NVMe | read from NVMe, GiB | written, GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in one["rows"]:
        tiers = [f"{row['by_tier'][t]:.1%}" if t in row["by_tier"] else "" for t in ("hbm", "cpu", "nvme")]
        if len(row["by_tier"]) == 1:
            tiers = [tiers[1], "", ""]
        lines.append(
            f"| {row['name']} | {row['recomputed']:.1%} | {row['ideal']:.1%} | {' | '.join(tiers)} | {row['read_gib'] or ''} | "
            f"{row['written_gib'] or ''} |"
        )
    return lines


def measure(kind: str, conversations: int | None, found: dict[str, Any], path: Path) -> None:
    """Run a workload with each set of tiers; ``found`` is written to ``path`` at the end, and its page beside it."""
    options = parser_of(kind, argparse.ArgumentParser()).parse_args([])
    for name, value in (TRAFFIC[kind] | ({"conversations": conversations} if conversations else {})).items():
        setattr(options, name, value)
    told = dict(vars(options))
    rows: list[dict[str, Any]] = list(trace(kind, options))
    tokens = sum(row["input_length"] for row in rows)
    private = [
        Request(row["timestamp"] / 1000, tuple(row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]), row["tenant"])
        for row in rows
    ]
    shared = [dataclasses.replace(request, tenant="") for request in private]
    if kind == "rag-chat":
        found["engine_blocks"] = engine_blocks(shared, tokens)
    size = found["engine_blocks"]
    tiers = {Tier.HBM: size, Tier.CPU: CPU * size, Tier.NVME: NVME * size}
    one: dict[str, Any] = {
        "options": told,
        "requests": len(private),
        "tokens_per_request": round(tokens / len(private)),
        "distinct": len({(r.tenant, b) for r in private for b in r.blocks}),
        "distinct_shared": len({b for r in shared for b in r.blocks}),
        "rows": [],
    }
    found["workloads"][kind] = one
    cases = [
        ("engine's cache alone", shared, {Tier.CPU: size}),
        ("and CPU memory", private, {t: tiers[t] for t in (Tier.HBM, Tier.CPU)}),
        ("and CPU memory and NVMe", private, tiers),
        ("and CPU memory, tenants share", shared, {t: tiers[t] for t in (Tier.HBM, Tier.CPU)}),
        ("and CPU memory and NVMe, tenants share", shared, tiers),
    ]
    for name, requests, sizes in cases:
        row = {"name": name, "ideal": round(share(tokens, ideal_hits(requests)[0]), 4), **run(requests, sizes, tokens)}
        print(f"{kind}: {name}: {row['recomputed']:.1%} (at least {row['ideal']:.1%})", flush=True)
        one["rows"].append(row)
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of prompt tokens that is recomputed, by tiers.")
    parser.add_argument("workload", nargs="?", choices=list(TRAFFIC), help="only this one; RAG chat says how large the caches are")
    parser.add_argument("--conversations", type=int)
    parser.add_argument("--output", type=Path, default=OUT, help="folder for the results (default loadtest/out)")
    chosen = parser.parse_args()
    try:
        chosen.output.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"results cannot be written to --output {chosen.output}: {e.strerror}")
    path = chosen.output / "recompute.json"
    found: dict[str, Any] = json.loads(path.read_text()) if chosen.workload and path.exists() else {"workloads": {}}
    if chosen.workload not in (None, "rag-chat") and "engine_blocks" not in found:
        parser.error(f"{path} does not say how large the engine's cache is: run rag-chat first")
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    for kind in [chosen.workload] if chosen.workload else TRAFFIC:
        measure(kind, chosen.conversations, found, path)


if __name__ == "__main__":
    main()
