"""Writes README.md from bench.json and peers.json, so that text and figures cannot drift apart."""

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HEAD = """# Results

Written by `render.py` from `bench.json` and `peers.json`; `bash loadtest/results/update.sh` measures again (about five minutes).
Medians; the quartiles of each are in the files. Limits and figures were taken in turn, so that other work hit both alike.
"""

PEER_METHOD = """
LMCache: its server over ZeroMQ with shared memory, engine-driven transfers, one OpenMP thread, two workers and 4 GiB of L1, driven
by its own benchmark client. On both sides a request has two chunks, a pass 20 requests, and the passes from the third on count; the
client copies between a paged KV cache (16 tokens a page) and shared memory. Lookups include the hashing of the tokens. The ratio
says how many times faster kvtierd is.

"""

REST = """
## What else was measured

Each page has its command, machine, date and versions.

| page | what | where |
| --- | --- | --- |
| [recompute.md](recompute.md) | what of RAG chat is computed again, by tiers and their sizes | the core in virtual time |
| [rag_chat.md](rag_chat.md) | the same, time to first token and throughput, through a real vLLM | CPUs, a small model |
| [policy.md](policy.md) | eviction and admission on a public trace | the core in virtual time |
| [engines.md](engines.md) | latency, hits and recovery under many engines and faults | the real daemon |
| [faults.md](faults.md) | kills, a failing disk, overload, and hours of work | the real daemon |
| [simulation.md](simulation.md) | a whole daemon under faults and crashes | simulated time |
| [gpu.md](gpu.md) | time to first token, copies, registration, the cost of an engine step | one H200, vLLM |

## What was not compared

- Peers over NVMe: LMCache's disk tiers and Mooncake have not been run next to kvtierd's. NVMe is compared with the raw disk only.
- vLLM's own OffloadingConnector: on the GPU page only, and for CPU memory only.
- LMCache inside vLLM: what is measured here is its server, driven by its own benchmark client; no time to first token.
- Recomputation: of the published shares only that of vLLM's own cache is reproduced. Those of SGLang, LMCache and a cluster-wide
  cache are quoted in recompute.md.
- One machine: two cores and a virtual disk here. Several NVMe drives, several GPUs or NUMA nodes, GPUDirect Storage, and caches
  across nodes have no figures.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def machine(env: dict[str, Any]) -> str:
    before, after = env["load_average_before"][0], env["load_average_after"][0]
    parts = [
        f"{env['cpu']}, {env['cores']} cores",
        f"{env['last_level_cache_mib']} MiB of last-level cache, {env['memory_gib']} GiB of memory",
        f"Linux {env['kernel']}, {env['filesystem']}",
        f"Python {env['python']}, kvtierd {env['kvtierd']}, source {env['source']}",
        f"{env['date']}, load average {before} before, {after} after",
    ]
    if "lmcache" in env:
        parts.append(f"LMCache {env['lmcache']}")
    if env["source_changed"]:
        parts.append("**the code changed during the run: the figures belong to no single version**")
    return "".join(f"- {part}\n" for part in parts)


def bench(found: dict[str, Any]) -> str:
    rows = []
    for call in ("save", "load", "save_2_chunks", "load_2_chunks"):
        for mib, figure in found[f"{call}_gb_per_s"].items():
            ratio = found["ratios"][call][mib]
            what = f"2 blocks of {mib} MiB" if "2_chunks" in call else f"64 MiB in blocks of {mib} MiB"
            target = "" if "2_chunks" in call else "0.8"
            rows.append([f"{call[:4]}, {what}", number(figure / ratio), number(figure), f"{ratio:.2f}", target])
    for mib, figures in found["nvme_by_mib"].items():
        for call in ("write", "read"):
            raw, figure = figures[f"raw_{call}_gb_per_s"], figures[f"{call}_gb_per_s"]
            rows.append([f"NVMe {call}, blocks of {mib} MiB", number(raw), number(figure), f"{figure / raw:.2f}", "0.9"])
    costs = []
    for keys in found["lookup_ms"]:
        for percent in ("p50", "p99"):
            small, large = found["lookup_small_index_ms"][keys][percent], found["lookup_ms"][keys][percent]
            costs.append([f"lookup of {int(keys):,} keys, {percent}, ms", number(small), number(large)])
        costs.append([f"lookup of {int(keys):,} scattered keys, p50, ms", "", number(found["lookup_scattered_ms"][keys]["p50"])])
    for call, large in found["block_cost_us"].items():
        costs.append([f"{call}, per block in calls of 512, us", number(found["block_cost_small_index_us"][call]), number(large)])
    costs.append(["start, or restart after SIGKILL, s", number(found["start_s"]), number(found["recovery_s"])])
    costs.append(["memory of the daemon per block, bytes", "", number(found["index_bytes_per_block"])])
    text = f"\n## kvtierd alone\n\n`{found['environment']['command']}`\n\n{machine(found['environment'])}\n"
    text += "The machine's own speed is a copy by one thread for save and load, and raw O_DIRECT for NVMe. kvtierd's client\n"
    text += f"copies with {found['copy_threads']} threads here, its default.\n\n"
    text += table(["measured", "machine GB/s", "kvtierd GB/s", "ratio", "target"], rows)
    text += f"\nA call costs {number(found['round_trip_ms'])} ms (lookup of one key).\n\n"
    return text + table(["index", "1,000 blocks or none", f"{found['index_blocks']:,} blocks"], costs)


def peers(found: dict[str, Any]) -> str:
    names = {
        "save": ("save, from paged KV", "1.5"),
        "load": ("load, into paged KV", "1.5"),
        "save_flat": ("save, contiguous (LMCache: paged)", ""),
        "load_flat": ("load, contiguous (LMCache: paged)", ""),
        "lookup_hit": ("lookup, all held", ""),
        "lookup_miss": ("lookup, nothing held", ""),
    }
    rows = []
    for call, (name, target) in names.items():
        lookup = call.startswith("lookup")
        for key, ratio in found["ratios"][call].items():
            suffix, what = ("ms", f"{int(key):,} tokens") if lookup else ("gb_per_s", f"2 x {key} MiB")
            theirs, ours = found[f"lmcache_{call.removesuffix('_flat')}_{suffix}"][key], found[f"kvtierd_{call}_{suffix}"][key]
            rows.append([f"{name}, {what}, {'ms' if lookup else 'GB/s'}", number(theirs), number(ours), f"{ratio:.2f}", target])
    text = "\n## Next to LMCache\n\n`make bench-peers`\n\n" + machine(found["environment"])
    text += PEER_METHOD
    return text + table(["measured", "LMCache", "kvtierd", "ratio", "target"], rows)


def main() -> None:
    text = HEAD
    sources = {json.loads(path.read_text())["environment"]["source"] for path in (HERE / "bench.json", HERE / "peers.json")}
    if len(sources) > 1:
        text += "\n**The two files were measured with different code.**\n"
    for name, part in (("bench.json", bench), ("peers.json", peers)):
        path = HERE / name
        if path.exists():
            text += part(json.loads(path.read_text()))
    (HERE / "README.md").write_text(text + REST)


if __name__ == "__main__":
    main()
