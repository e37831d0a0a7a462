#!/usr/bin/env python3
"""How much of the prompts of RAG chat is computed again, with the engine's own cache alone and with kvtierd's tiers below it.

    .venv/bin/python loadtest/recompute.py [--conversations 4000]

Drives the daemon's own core in virtual time (the simulation of `kvtierd replay`) over a trace of loadtest/workloads.py, and writes
results/recompute.json and recompute.md. The engine's cache is as large as makes it recompute 38 % of the prompt tokens alone, which
is what was published for vLLM's prefix cache on such traffic; the tiers are multiples of that. Takes about ten minutes of one core.
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

RESULTS = Path(__file__).parent / "results"
ENGINE_ALONE = 0.38
"""Published for vLLM's prefix cache: 38 % recomputed; 17 % with SGLang, 11 % with LMCache on CPU and NVMe, 6 % cluster-wide."""
CPU, NVME = 3, 12
"""Sizes of the tiers, in engine caches: a server with 8 GPUs that have 300 GB for KV, 900 GB of memory and 3.6 TB of NVMe."""
TRAFFIC = {"tenants": 8, "system_prompts": 2, "contexts": 300, "output_tokens": 150}
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

    def parts(of: str) -> str:
        return ", ".join(f"{n * found['engine_blocks'] / found[of]:.0%}" for n in (1, CPU, NVME))

    lines = [
        "# What is computed again",
        "",
        f"Written by `python loadtest/recompute.py` on {found['date']}: the daemon's own core in virtual time, made-up RAG chat.",
        "",
        f"- traffic: {found['requests']:,} requests of {found['conversations']:,} conversations; system prompts of 1,500 tokens, "
        f"contexts of 8,000 ({TRAFFIC['contexts']}, popular by Zipf's law with exponent 0.9), user turns of 200, 6 turns, "
        f"answers of {TRAFFIC['output_tokens']} on average; {TRAFFIC['tenants']} tenants, {TRAFFIC['system_prompts']} system "
        "prompts; 2 new conversations a second, think times of 45 s",
        f"- prompts of {found['tokens_per_request']:,} tokens on average, {found['distinct']:,} distinct blocks of 512 tokens when "
        f"tenants share nothing, {found['distinct_shared']:,} when they share all",
        f"- the engine's cache has {found['engine_blocks']:,} blocks, CPU memory {CPU} times and NVMe {NVME} times as many: "
        f"{parts('distinct')} of the distinct blocks, and {parts('distinct_shared')} where tenants share. NVMe holds nearly all, "
        "and what is left to recompute with it is what no cache avoids",
        "- published for such traffic (72B FP8 model on 8 H200; its cache sizes are not): 38 % with vLLM's prefix cache alone, "
        "17 % with SGLang, 11 % with LMCache on CPU and NVMe, 6 % with a cache for the cluster. Only the 38 % is reproduced here, "
        "by the size of the engine's cache; the others are quoted, not measured",
        "",
        "| | recomputed | least possible | engine | CPU | NVMe | read from NVMe, GiB | written, GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found["rows"]:
        tiers = [f"{row['by_tier'][t]:.1%}" if t in row["by_tier"] else "" for t in ("hbm", "cpu", "nvme")]
        if len(row["by_tier"]) == 1:
            tiers = [tiers[1], "", ""]
        lines.append(
            f"| {row['name']} | {row['recomputed']:.1%} | {row['ideal']:.1%} | {' | '.join(tiers)} | {row['read_gib'] or ''} | "
            f"{row['written_gib'] or ''} |"
        )
    lines += [
        "",
        "Where the rest goes: what was never seen (new turns, answers that come back as a part of the next prompt, contexts asked",
        "for the first time), and the end of each prompt that does not fill a block of 512 tokens: the column \"least possible\".",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of prompt tokens that is recomputed, by tiers.")
    parser.add_argument("--conversations", type=int, default=4000)
    chosen = parser.parse_args()
    options = parser_of("rag-chat", argparse.ArgumentParser()).parse_args([])
    for name, value in {**TRAFFIC, "conversations": chosen.conversations}.items():
        setattr(options, name, value)
    rows = list(trace("rag-chat", options))
    tokens = sum(int(row["input_length"]) for row in rows)  # type: ignore[call-overload]
    private = [
        Request(row["timestamp"] / 1000, tuple(row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]), row["tenant"])  # type: ignore[index,operator]
        for row in rows
    ]
    shared = [dataclasses.replace(request, tenant="") for request in private]
    size = engine_blocks(shared, tokens)
    tiers = {Tier.HBM: size, Tier.CPU: CPU * size, Tier.NVME: NVME * size}
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "requests": len(private),
        "conversations": chosen.conversations,
        "tokens_per_request": round(tokens / len(private)),
        "distinct": len({(r.tenant, b) for r in private for b in r.blocks}),
        "distinct_shared": len({b for r in shared for b in r.blocks}),
        "engine_blocks": size,
        "rows": [],
    }
    cases = [
        ("engine's cache alone", shared, {Tier.CPU: size}),
        ("and CPU memory", private, {t: tiers[t] for t in (Tier.HBM, Tier.CPU)}),
        ("and CPU memory and NVMe", private, tiers),
        ("and CPU memory, tenants share", shared, {t: tiers[t] for t in (Tier.HBM, Tier.CPU)}),
        ("and CPU memory and NVMe, tenants share", shared, tiers),
    ]
    for name, requests, sizes in cases:
        row = {"name": name, "ideal": round(share(tokens, ideal_hits(requests)[0]), 4), **run(requests, sizes, tokens)}
        print(f"{name}: {row['recomputed']:.1%} (at least {row['ideal']:.1%})", flush=True)
        found["rows"].append(row)
        (RESULTS / "recompute.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "recompute.md").write_text(page(found))


if __name__ == "__main__":
    main()
