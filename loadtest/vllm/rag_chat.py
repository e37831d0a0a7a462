"""RAG chat through a real vLLM: what is computed again, time to first token and throughput, by the caches below the engine's own.

    .venv/bin/python -m loadtest.vllm.rag_chat --python .venv-vllm/bin/python

The same prompts for the engine's cache alone, with kvtierd's CPU memory, with NVMe below it, and with tenants that find each
other's system prompts. Writes rag_chat.json and, with --page, the page of results. Takes about ten minutes of two cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvtierd.errors import StartupError
from kvtierd.lifetime import end_in_order, scratch_folder
from loadtest.engines.figures import machine
from loadtest.vllm.chat import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    CONCURRENT,
    SCALE,
    Case,
    ChatError,
    Needs,
    Outcome,
    Served,
    kept_logs,
    make_model,
    needs,
    parser,
    rag_chat,
    say,
    ttft_ms,
    versions,
)  # fmt: skip
from loadtest.workloads import KINDS

ENGINE_ALONE = 0.38
"""Published for vLLM's prefix cache on such traffic."""
CPU_SHARE, NVME_SHARE = 0.31, 1.23
"""Of the distinct blocks where tenants share, as in results/recompute.md."""
NVME_SPARE_BYTES = 32 << 20
"""Header pages of slots, and room for journals."""
TENANTS, SYSTEM_PROMPTS, CONTEXTS = 4, 2, 16


def figures(outcome: Outcome, needed: Needs) -> dict[str, Any]:
    """One case as numbers."""
    shared = outcome.figures()
    return shared | {
        "least": round(needed.least_shared if outcome.case.shared or not outcome.case.cpu_bytes else needed.least, 4),
        "tokens": dict(outcome.tokens),
        "ttft_ms": ttft_ms(outcome.answers),
        "requests_per_s": round(len(outcome.answers) / outcome.seconds, 2),
        "prompt_tokens_per_s": round(shared["prompt_tokens"] / outcome.seconds),
        "load_average": outcome.load_average,
    }


HEAD = (
    "", "recomputed", "least possible", "engine", "CPU", "NVMe", "first token p50, ms", "p99, ms", "requests/s",
    "prompt tokens/s", "load average",
)  # fmt: skip


def setting(found: dict[str, Any]) -> list[str]:
    """Where, with what and on what this was measured."""
    of, needed = found["machine"], found["needs"]
    distinct, default = needed["distinct_shared"], KINDS["rag-chat"][1]
    return [
        f"- {of['cpu']}, {of['cores']} cores shared with other work (load averages below), {of['system']}, Python {of['python']}, "
        f"kvtierd {of['kvtierd']}, vLLM {of['vllm']} for CPUs, torch {of['torch']}, {of['date']}",
        f"- traffic: `loadtest/workloads.py rag-chat` with every length divided by {SCALE}: system prompts of "
        f"{default['system_tokens'] / SCALE:.0f} tokens, contexts of {default['context_tokens'] / SCALE:.0f} ({CONTEXTS}, popular "
        f"by Zipf's law), user turns of {default['user_tokens'] / SCALE:.0f}, answers of {150 / SCALE:.0f}, {default['turns']} "
        f"turns; {TENANTS} tenants, {SYSTEM_PROMPTS} system prompts; {found['requests']} requests of {found['mean_tokens']:,} "
        f"tokens on average, in the order that their think times give, {CONCURRENT} at a time, each as soon as there is room",
        f"- model: a llama of 8 layers, 768 wide, with random weights, bfloat16, one thread of arithmetic; {BLOCK_TOKENS} tokens "
        f"a block, {BLOCK_BYTES >> 10} KiB",
        f"- caches: {distinct} distinct blocks where tenants share ({needed['distinct']} where they do not). The engine's cache "
        f"has {needed['engine']} blocks, {needed['engine'] / distinct:.0%}: an LRU cache of that size recomputes "
        f"{ENGINE_ALONE:.0%} of this traffic. CPU memory has {CPU_SHARE:.0%} of the distinct blocks and NVMe {NVME_SHARE:.0%}, "
        "as in [recompute.md](recompute.md)",
    ]


def page(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# RAG chat through vLLM", "", f"`{found['command']}`", "", *setting(found), ""]
    lines += ["| " + " | ".join(HEAD) + " |", "| --- |" + " ---: |" * (len(HEAD) - 1)]
    for row in found["rows"]:
        tiers = [f"{row['tokens'].get(tier, 0) / max(row['prompt_tokens'], 1):.1%}" for tier in ("engine", "cpu", "nvme")]
        if not row["with_kvtierd"]:
            tiers[1:] = ["", ""]
        times = [f"{row['ttft_ms'][q]:,}" for q in ("p50", "p99")]
        rates = [f"{row['requests_per_s']:.2f}", f"{row['prompt_tokens_per_s']:,}", f"{row['load_average']:.1f}"]
        lines.append(
            "| " + " | ".join([row["case"], f"{row['recomputed']:.1%}", f"{row['least']:.1%}", *tiers, *times, *rates]) + " |"
        )
    lines += [
        "",
        "Least possible: what caches without limits would leave, for new turns, answers that come back in the next prompt,",
        f"contexts asked for the first time, and the end of each prompt that fills no block of {BLOCK_TOKENS} tokens. With so few",
        "requests, first times weigh more than in [recompute.md](recompute.md). CPU memory as large as the engine's own cache",
        "holds mostly what that one holds; a server has some three times as much.",
        "",
        "What these figures are not: a prompt of the traffic's true length costs a GPU seconds and has gigabytes to move; here it",
        "costs tenths of a second and moves megabytes, beside what a server costs by itself, on cores that others use too. The",
        "shares of tokens carry over to other machines; times do not ([gpu.md](gpu.md) has some of a GPU).",
    ]
    return "\n".join(lines) + "\n"


def cases(needed: Needs) -> list[Case]:
    """What is compared."""
    cpu = round(CPU_SHARE * needed.distinct_shared) * BLOCK_BYTES
    nvme = round(NVME_SHARE * needed.distinct_shared) * BLOCK_BYTES + NVME_SPARE_BYTES
    return [
        Case("engine's cache alone"),
        Case("and CPU memory", cpu),
        Case("and CPU memory and NVMe", cpu, nvme),
        Case("and CPU memory and NVMe, tenants share", cpu, nvme, shared=True),
    ]


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--page", type=Path, help="write the page of results here, and its figures beside it")
    options = args.parse_args()
    end_in_order()
    options.output.mkdir(parents=True, exist_ok=True)
    with scratch_folder(Path(tempfile.gettempdir()), "kvtierd-rag-chat-") as scratch:
        return run(options, scratch)


def run(options: argparse.Namespace, scratch: Path) -> int:
    """All cases, and the page. Returns the exit status."""
    some = f" --conversations {options.conversations}" if options.conversations else ""
    try:
        of = machine() | versions(options.python)
        prompts = rag_chat(options.conversations or 36, TENANTS, SYSTEM_PROMPTS, CONTEXTS)
        needed = needs(prompts, ENGINE_ALONE)
        model = make_model(options.python, options.output)
        served = Served(options.python, model, scratch, needed.engine, prompts, say)
        found: dict[str, Any] = {
            "command": f"python -m loadtest.vllm.rag_chat{some}",
            "machine": of,
            "requests": len(prompts),
            "mean_tokens": round(needed.tokens / len(prompts)),
            "needs": needed.__dict__,
            "rows": [],
        }
        for case in cases(needed):
            row = figures(served.run(case), needed) | {"with_kvtierd": case.cpu_bytes > 0}
            found["rows"].append(row)
            say(f"{case.name}: {row['recomputed']:.1%} computed, {row['ttft_ms']}, {row['tokens']}, {row['loads']}")
            (options.output / "rag_chat.json").write_text(json.dumps(found) + "\n")
    except (ChatError, StartupError) as e:
        print(f"this has failed: {e}\n{kept_logs(scratch)}".rstrip(), file=sys.stderr)
        return 1
    if options.page is not None:
        options.page.write_text(page(found))
        shutil.copy(options.output / "rag_chat.json", options.page.with_suffix(".json"))
    print(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
