"""The result as Markdown, and as one HTML file with all in it: tables, and charts as inline SVG; no scripts, no other files."""

from __future__ import annotations

import html
import io
import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.engines.figures import CALLS
from loadtest.engines.show import again

TIER_COLOURS = {"hbm": "#7b3294", "cpu": "#2b83ba", "nvme": "#fdae61"}
WIDTH_IN = 10.0
MEANT = (
    "Latencies count from the moment when a call was meant to begin: lookups and loads from the time that the trace gives the "
    "request, saves from the end of the load (of a mix, from the request's time). Waiting for a thread of the engine is in it"
)
Rows = list[list[str]]
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; }
td:first-child, th:first-child { text-align: left; }
.bad { background: #fdd; padding: .6rem 1rem; } .good { background: #dfd; padding: .6rem 1rem; }
code { background: #f3f3f3; padding: .1rem .3rem; word-break: break-all; }
svg { width: 100%; height: auto; }
"""


def _chart(draw: Callable[[Axes], None], found: dict[str, Any], title: str, unit: str, height_in: float = 2.8) -> str:
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvtierd", "font.size": 9}):
        figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        for fault in found["faults"]:
            begin, end = fault["began_s"], max(fault["ended_s"], fault["began_s"] + 0.15)
            axes.axvspan(begin, end, color="#d7191c", alpha=0.18, linewidth=0)
            axes.annotate(
                fault["kind"], (begin, 1), xycoords=("data", "axes fraction"), fontsize=7, rotation=90, va="top", ha="right"
            )
        axes.set(title=title, xlabel="seconds", ylabel=unit, xlim=(0, max(found["parameters"]["seconds"], len(found["by_second"]))))
        axes.grid(visible=True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)


def _latency(call: str, found: dict[str, Any]) -> str:
    def draw(axes: Axes) -> None:
        for name, style in (("p50", "-"), ("p90", "--"), ("p99", "-"), ("max", ":")):
            points = [(s["second"] + 0.5, s["ms"][call][name]) for s in found["by_second"] if s["ms"].get(call, {}).get("count")]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1.2)
        axes.set_yscale("log")

    return _chart(draw, found, f"{call}, from the moment when it was meant to begin", "ms")


def _hits(found: dict[str, Any]) -> str:
    seconds = [s for s in found["by_second"] if s["asked_blocks"]]
    at = [s["second"] + 0.5 for s in seconds]
    tiers = sorted({tier for s in seconds for tier in s["hit_blocks"]})

    def draw(axes: Axes) -> None:
        rows = [[s["hit_blocks"].get(tier, 0) / s["asked_blocks"] for s in seconds] for tier in tiers]
        if rows:
            axes.stackplot(at, rows, labels=tiers, colors=[TIER_COLOURS.get(t, "#888") for t in tiers], alpha=0.8)
        axes.set_ylim(0, 1)

    return _chart(draw, found, "Hit ratio by the tier that a block was loaded from", "of blocks asked for")


def _tenants(found: dict[str, Any], width_s: int = 5) -> str:
    def draw(axes: Axes) -> None:
        for tenant in found["tenants"]:
            points = []
            for start in range(0, len(found["by_second"]), width_s):
                some = [s["tenants"].get(tenant, {"asked": 0, "hit": 0}) for s in found["by_second"][start : start + width_s]]
                asked = sum(s["asked"] for s in some)
                if asked:
                    points.append((start + width_s / 2, sum(s["hit"] for s in some) / asked))
            if points:
                axes.plot(*zip(*points, strict=True), label=tenant, linewidth=1.2)
        axes.set_ylim(0, 1)

    return _chart(draw, found, f"Hit ratio by tenant, in steps of {width_s} s", "of blocks asked for")


def _tiers(found: dict[str, Any]) -> str:
    def draw(axes: Axes) -> None:
        for tier, colour in TIER_COLOURS.items():
            points = [(s["at_s"], s["used_bytes"][tier] / 2**20, s["capacity_bytes"][tier] / 2**20)
                      for s in found["samples"] if tier in s["used_bytes"]]  # fmt: skip
            if points:
                at, used, capacity = zip(*points, strict=True)
                axes.plot(at, used, label=f"{tier}, in use", color=colour)
                axes.plot(at, capacity, ":", label=f"{tier}, capacity", color=colour)
        axes.set_ylim(bottom=0)

    return _chart(draw, found, "Tier occupancy", "MiB")


def _memory(found: dict[str, Any]) -> str:
    def draw(axes: Axes) -> None:
        points = [(s["at_s"], s["rss_bytes"] / 2**20) for s in found["samples"] if s["rss_bytes"]]
        if points:
            axes.plot(*zip(*points, strict=True), color="#444", label="daemon")
        axes.set_ylim(bottom=0)

    return _chart(draw, found, "Anonymous memory of the daemon (blocks are in the CPU tier)", "MiB", 2.2)


def _busy(found: dict[str, Any]) -> str:
    def draw(axes: Axes) -> None:
        for number, looks in enumerate(found["busy"]):
            points = [(b[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in itertools.pairwise(looks) if b[0] - a[0] > 0.1]
            if points:
                axes.plot(*zip(*points, strict=True), label=f"process {number}", linewidth=1)
        axes.set_ylim(bottom=0)

    return _chart(draw, found, "How busy the load generator was", "cores", 2.2)


def _troubles(found: dict[str, Any]) -> str:
    def draw(axes: Axes) -> None:
        for name in list(found["troubles"])[:8]:
            axes.plot(
                [s["second"] + 0.5 for s in found["by_second"]],
                [s["troubles"].get(name, 0) for s in found["by_second"]],
                label=name,
            )
        axes.set_yscale("symlog")

    return _chart(draw, found, "What was not served", "a second")


def _table(head: list[str], rows: Rows) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _verdict(found: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether all is well, and what there is to say of it."""
    problems = list(found["generator"]["problems"])
    if found["wrong_bytes"]:
        problems.insert(0, f"{found['wrong_bytes']} wrong bytes")
    if problems:
        return False, problems
    late = found["generator"]["late_ms"].get("p99", 0)
    checked = f"0 wrong bytes of {found['checked_bytes'] / 2**20:,.0f} MiB checked"
    return True, [f"{checked}. The load generator kept its schedule: late by {late} ms (p99)"]


def _rows(found: dict[str, Any]) -> list[tuple[list[str], Rows]]:
    """Heads and rows of the tables."""
    quantile_names = ("p50", "p90", "p99", "p99_9", "max")
    latency = [
        [name, f"{row['count']:,}", *(f"{row['ms'][q]:,.1f}" for q in quantile_names), f"{row['call_alone_ms']['p99']:,.1f}"]
        for name, row in found["latency"].items()
    ]
    tiers = list(found["hits"]["by_tier"])
    hits = [
        [name, f"{row['asked_blocks']:,}", f"{row['hit_ratio']:.1%}", *(f"{row['by_tier'].get(t, 0):.1%}" for t in tiers)]
        for name, row in [("all", found["hits"]), *found["tenants"].items()]
    ]
    hits.append(["a cache that forgets nothing", "", f"{found['parameters']['ideal_hit_ratio']:.1%}", *([""] * len(tiers))])
    faults = [[f["what"], f"{f['began_s']:.1f}", f"{f['ended_s']:.1f}", again(f)] for f in found["faults"]]
    busy = [[name, f"{s['median']:.0%}", f"{s['max']:.0%}"] for name, s in found["generator"]["busy_cores"].items()]
    return [
        (["latency, ms", "count", "p50", "p90", "p99", "p99.9", "max", "p99 of the call alone"], latency),
        (["tenant", "blocks asked for", "hits", *tiers], hits),
        (["fault", "began, s", "ended, s", "first hit after its end, s"], faults),
        (["not served", "times"], [[name, f"{count:,}"] for name, count in found["troubles"].items()]),
        (["load generator", "of a core, median", "most"], busy),
    ]


def _where(found: dict[str, Any]) -> str:
    of = found["machine"]
    return (
        f"{of['cpu']}, {of['cores']} cores, {of['system']}, Python {of['python']}, kvtierd {of['kvtierd']}, {of['date']}, "
        f"load average {of['load_average']} at the end"
    )


def _parameters(found: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found["parameters"].items())


def markdown(found: dict[str, Any]) -> str:
    """The tables as Markdown."""
    lines = ["# The daemon under many engines", "", f"`{found['command']}`", "", f"- {_where(found)}", f"- {_parameters(found)}"]
    lines += [f"- {line}" for line in _verdict(found)[1]] + [f"- {MEANT}", ""]
    for head, rows in _rows(found):
        if rows:
            lines += ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
            lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
    return "\n".join(lines)


def page(found: dict[str, Any]) -> str:
    """The report."""
    well, said = _verdict(found)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>kvtierd under load</title>",
        f"<style>{STYLE}</style></head><body><h1>kvtierd under load</h1>",
        f"<p><code>{html.escape(found['command'])}</code></p>",
        f"<p>{html.escape(_where(found))}</p><p>{html.escape(_parameters(found))}</p>",
        *(f'<p class="{"good" if well else "bad"}">{html.escape(line)}</p>' for line in said),
        *(_table(head, rows) for head, rows in _rows(found) if rows),
        *(_latency(call, found) for call in CALLS if call in found["latency"]),
        *(draw(found) for draw in (_hits, _tenants, _tiers, _memory, _troubles, _busy)),
        f"<p>{MEANT}. Shaded: faults.</p>",
        f"<details><summary>Load generator</summary><pre>{html.escape(json.dumps(found['generator'], indent=1))}</pre></details>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"
