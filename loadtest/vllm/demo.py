"""A chat over retrieved documents with a real vLLM, without and with kvtierd, and a restart of the engine half-way.

``make demo-vllm``. A model of 54 million parameters with random weights is made here; nothing is downloaded but packages. Shows
where the tokens of the prompts came from and how long users waited for the first token of an answer, and draws that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from kvtierd.errors import StartupError
from kvtierd.lifetime import end_in_order, keep, scratch_folder
from loadtest.engines.figures import machine
from loadtest.vllm.chat import (
    BLOCK_BYTES,
    CONCURRENT,
    SCALE,
    Case,
    ChatError,
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

COLOURS = {"without kvtierd": "#d7191c", "with kvtierd": "#2b83ba"}
PARTS = {"computed": "#cccccc", "engine": "#fdae61", "hbm": "#7b3294", "cpu": "#2b83ba", "nvme": "#1a9641"}


def figures(outcome: Outcome) -> dict[str, Any]:
    """One case as numbers: all of it, and what came after the restart."""
    restart = outcome.restarts[0]
    return outcome.figures() | {
        "tokens": {name: outcome.tokens[name] for name in PARTS},
        "ttft_ms": {
            "before the restart": ttft_ms(a for a in outcome.answers if a.number < restart),
            "first 10 after it": ttft_ms(a for a in outcome.answers if restart <= a.number < restart + 10),
            "all after it": ttft_ms(a for a in outcome.answers if a.number >= restart),
        },
    }


def table(found: list[dict[str, Any]]) -> Table:
    """For people."""
    made = Table(title="Chat over documents, with a restart of vLLM half-way")
    made.add_column("")
    for row in found:
        made.add_column(row["case"], justify="right")
    made.add_row("prompt tokens computed", *(f"{row['recomputed']:.1%}" for row in found))
    for name, text in (
        ("engine", "found in vLLM's own cache"),
        ("cpu", "from kvtierd, CPU memory"),
        ("nvme", "from kvtierd, NVMe"),
    ):
        made.add_row(text, *(f"{row['tokens'][name] / max(row['prompt_tokens'], 1):.1%}" for row in found))
    for part in found[0]["ttft_ms"]:
        for q in ("p50", "p99"):
            made.add_row(f"first token, {part}, {q}, ms", *(f"{row['ttft_ms'][part][q]:,}" for row in found))
    made.add_row("seconds for all requests", *(f"{row['seconds']:.0f}" for row in found))
    return made


def draw(path: Path, found: list[dict[str, Any]], restart: int) -> None:
    """The picture."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    for row in found:
        answers = sorted(row["answers"])
        left.plot([a[0] + 1 for a in answers], [a[2] * 1000 for a in answers], ".-", linewidth=0.7, label=row["case"],
                  color=COLOURS[row["case"]])  # fmt: skip
    left.axvline(restart + 0.5, color="#444", linestyle="--")
    left.annotate("engine restarted", (restart + 0.5, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right")
    left.set(title="Time to first token", xlabel="request", ylabel="ms", ylim=(0, None))
    left.legend()
    for place, row in enumerate(found):
        base = 0.0
        for name, colour in PARTS.items():
            share = row["tokens"][name] / max(row["prompt_tokens"], 1)
            if share:
                right.bar(place, share, bottom=base, color=colour, label=name)
            base += share
    handles = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    right.set(title="Prompt tokens", xticks=range(len(found)), xticklabels=[row["case"] for row in found], ylim=(0, 1))
    right.legend(handles.values(), handles.keys(), loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    args = parser(__doc__)
    args.add_argument("--keep", action="store_true", help="keep logs and the NVMe pool")
    options = args.parse_args()
    end_in_order()
    options.output.mkdir(parents=True, exist_ok=True)
    with scratch_folder(Path(tempfile.gettempdir()), "kvtierd-demo-vllm-") as scratch:
        if options.keep:
            keep(scratch)
        return run(options, scratch, Console())


def run(options: argparse.Namespace, scratch: Path, console: Console) -> int:
    """Both cases, and what came of them. Returns the exit status."""
    try:
        of = machine() | versions(options.python)
        prompts = rag_chat(options.conversations or 14, 2, 1, 24)
        asked = needs(prompts, 0.38)
        mean = round(asked.tokens / len(prompts))
        say(f"{len(prompts)} requests of {mean:,} tokens (lengths of RAG chat / {SCALE}), {CONCURRENT} at a time")
        model = make_model(options.python, options.output)
        served = Served(options.python, model, scratch, asked.engine, prompts, say)
        restart = len(prompts) // 2
        # Less memory than the traffic needs, so that one sees NVMe at work too.
        cpu = max(asked.distinct // 2, 64) * BLOCK_BYTES
        cases = [Case("without kvtierd"), Case("with kvtierd", cpu, 1 << 30)]
        found = [figures(served.run(case, (restart,))) for case in cases]
    except (ChatError, StartupError) as e:
        console.print(f"the demo has failed: {e}", style="bold red", highlight=False, markup=False)
        if told := kept_logs(scratch):
            console.print(told, highlight=False)
        return 1
    (options.output / "demo.json").write_text(json.dumps({"machine": of, "engine_blocks": asked.engine, "cases": found}) + "\n")
    draw(options.output / "demo.png", found, restart)
    console.print(table(found))
    console.print(
        f"vLLM {of['vllm']} on {of['cores']} cores; picture and figures: {options.output}/demo.png, demo.json", highlight=False
    )
    if options.keep:
        console.print(f"logs are in {scratch}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
