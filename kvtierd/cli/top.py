"""``kvtierd top``: what a daemon does right now, again and again."""

from __future__ import annotations

import math
import time
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.text import Text

from kvtierd.cli.connection import AdminConnection
from kvtierd.cli.options import Settings, admin_options, every_option, json_option
from kvtierd.cli.output import clean, console, format_bytes, format_count, format_seconds, make_table
from kvtierd.cli.rates import Scrape, Window, parse
from kvtierd.cli.watching import watch
from kvtierd.model import Tier
from kvtierd.v1 import admin_pb2

__all__ = ["top"]

MAX_TENANTS: Final = 20
"""Rows of tenants, the busiest first; JSON has all."""
TIERS: Final = tuple(tier.name.lower() for tier in Tier)
BAR: Final = 20
TIMES: Final[tuple[tuple[str, str, dict[str, str]], ...]] = (
    ("lookup", "kvtierd_rpc_seconds", {"method": "Lookup"}),
    ("save, grant to commit", "kvtierd_save_seconds", {"path": "shm"}),
    ("load, to its last block", "kvtierd_load_seconds", {"path": "shm"}),
    ("move, in the queue", "kvtierd_queue_wait_seconds", {}),
    ("event loop, late by", "kvtierd_event_loop_lag_seconds", {}),
)
"""What is shown of latencies: a name, a histogram, and which of its samples."""


@click.command()
@admin_options
@json_option("Write one JSON object a line.")
@every_option("Time between two looks; rates are over it.")
@click.option("--count", type=click.IntRange(min=1), help="End after so many looks; without it Ctrl-C ends.")
@click.pass_context
def top(ctx: click.Context, as_json: bool, every_s: float, count: int | None) -> None:
    """Watch tiers, tenants, moves and latencies of a daemon.

    Rates and latencies are those between two looks. In a pipe one look is printed after the other.
    """
    with ctx.ensure_object(Settings).connect() as daemon:
        # The first look fails like any other command, so that a wrong address does not end in an endless wait.
        last = _scrape(daemon)

        def look() -> Window:
            nonlocal last
            window = Window(last, _scrape(daemon))
            last = window.after
            return window

        watch(
            console(), look, lambda window: render(summary(window), daemon.address), summary,
            first=Text("looking …", style="dim"), every_s=every_s, as_json=as_json, count=count, screen=True,
        )  # fmt: skip


def _scrape(daemon: AdminConnection) -> Scrape:
    answer: admin_pb2.GetMetricsResponse = daemon.call(daemon.stub.GetMetrics, admin_pb2.GetMetricsRequest())
    return parse(answer.text, time.monotonic())


def summary(window: Window) -> dict[str, Any]:
    """What is shown, as JSON values: bytes, seconds, and per second where a name says so; a latency is null where nothing was."""
    now = window.after
    return {
        "seconds": round(window.seconds, 3),
        "ready": bool(now.value("kvtierd_ready")),
        "draining": bool(now.value("kvtierd_draining")),
        "sessions": int(now.value("kvtierd_sessions")),
        "blocks": int(now.value("kvtierd_blocks")),
        "tiers": [_tier(window, tier) for tier in TIERS if now.value("kvtierd_tier_capacity_bytes", tier=tier)],
        "tenants": [_tenant(window, have["tenant"]) for have, _ in now.rows("kvtierd_tenant_blocks")],
        "moves": [
            {
                **have,
                "bytes_per_s": window.rate("kvtierd_moved_bytes_total", **have),
                "blocks_per_s": window.rate("kvtierd_moved_blocks_total", **have),
                "failures": int(window.count("kvtierd_move_failures_total", **have)),
            }
            for have, total in now.rows("kvtierd_moved_blocks_total")
            if total
        ],
        "latencies": {
            name: {
                "count": int(window.count(f"{histogram}_count", **labels)),
                "p50_s": window.quantile(histogram, 0.5, **labels),
                "p99_s": window.quantile(histogram, 0.99, **labels),
            }
            for name, histogram, labels in TIMES
        },
        "rejections": {
            have["reason"]: int(n)
            for have, _ in now.rows("kvtierd_rejections_total")
            if (n := window.count("kvtierd_rejections_total", **have))
        },
        "checksum_failures": int(now.value("kvtierd_checksum_failures_total")),
    }


def _tier(window: Window, tier: str) -> dict[str, Any]:
    now = window.after
    return {
        "tier": tier,
        "capacity_bytes": int(now.value("kvtierd_tier_capacity_bytes", tier=tier)),
        "used_bytes": int(now.value("kvtierd_tier_used_bytes", tier=tier)),
        "dirty_bytes": int(now.value("kvtierd_tier_dirty_bytes", tier=tier)),
        "pinned_bytes": int(now.value("kvtierd_tier_pinned_bytes", tier=tier)),
        "copies": int(now.value("kvtierd_tier_copies", tier=tier)),
        "suspended": bool(now.value("kvtierd_tier_suspended", tier=tier)),
        "hits_per_s": window.rate("kvtierd_hits_total", tier=tier),
        "evictions_per_s": window.rate("kvtierd_evictions_total", tier=tier),
    }


def _quota(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None


def _tenant(window: Window, tenant: str) -> dict[str, Any]:
    now = window.after
    hits, misses = window.count("kvtierd_hits_total", tenant=tenant), window.count("kvtierd_misses_total", tenant=tenant)
    return {
        "tenant": tenant,
        "blocks": int(now.value("kvtierd_tenant_blocks", tenant=tenant)),
        "used_bytes": {tier: int(now.value("kvtierd_tenant_used_bytes", tenant=tenant, tier=tier)) for tier in TIERS},
        "quota_bytes": {tier: _quota(now.value("kvtierd_tenant_quota_bytes", tenant=tenant, tier=tier)) for tier in TIERS},
        "hit_ratio": hits / (hits + misses) if hits + misses else None,
        "saved_bytes_per_s": window.rate("kvtierd_saved_bytes_total", tenant=tenant),
        "loaded_bytes_per_s": window.rate("kvtierd_loaded_bytes_total", tenant=tenant),
    }


# ---- for people


def render(facts: dict[str, Any], address: str) -> RenderableType:
    """All of it as tables."""
    states = [name for name in ("draining",) if facts[name]] + ([] if facts["ready"] else ["not ready"])
    head = f"kvtierd at {address}: {format_count(facts['blocks'])} blocks, {format_count(facts['sessions'])} sessions"
    parts: list[RenderableType] = [Text(clean(head), style="bold")]
    if states:
        parts.append(Text(", ".join(states), style="yellow"))
    if facts["checksum_failures"]:
        parts.append(Text(f"{format_count(facts['checksum_failures'])} copies failed verification since the start", style="red"))
    parts += [Text(""), _tiers(facts), Text(""), _tenants(facts)]
    if facts["moves"]:
        parts += [Text(""), _moves(facts)]
    parts += [Text(""), _latencies(facts)]
    if facts["rejections"]:
        told = ", ".join(f"{name} {format_count(n)}" for name, n in sorted(facts["rejections"].items()))
        parts += [Text(""), Text(f"refused: {told}", style="yellow")]
    return Group(*parts)


def _tiers(facts: dict[str, Any]) -> RenderableType:
    rows = [
        (
            t["tier"],
            Text(_bar(t["used_bytes"], t["capacity_bytes"]), style="red" if t["suspended"] else "cyan"),
            f"{format_bytes(t['used_bytes'])} of {format_bytes(t['capacity_bytes'])}",
            format_count(t["copies"]),
            format_bytes(t["dirty_bytes"]),
            format_bytes(t["pinned_bytes"]),
            _per_second(t["hits_per_s"]),
            _per_second(t["evictions_per_s"]),
        )
        for t in facts["tiers"]
    ]
    return make_table("", ("tier", "", ">used", ">copies", ">dirty", ">pinned", ">hits/s", ">evicted/s"), rows)


def _bar(part: float, whole: float) -> str:
    full = min(BAR, round(BAR * part / whole)) if whole else 0
    return "█" * full + "░" * (BAR - full)


def _tenants(facts: dict[str, Any]) -> RenderableType:
    busy = sorted(facts["tenants"], key=lambda t: (-t["loaded_bytes_per_s"] - t["saved_bytes_per_s"], -t["blocks"], t["tenant"]))
    known = [t for t in busy if t["blocks"] or t["loaded_bytes_per_s"] or t["saved_bytes_per_s"]] or busy[:1]
    rows: list[tuple[str, ...]] = [
        (
            t["tenant"],
            format_count(t["blocks"]),
            *(format_bytes(t["used_bytes"][tier]) for tier in TIERS),
            "–" if t["hit_ratio"] is None else f"{100 * t['hit_ratio']:.0f} %",
            f"{format_bytes(t['loaded_bytes_per_s'])}/s",
            f"{format_bytes(t['saved_bytes_per_s'])}/s",
        )
        for t in known[:MAX_TENANTS]
    ]
    if len(known) > MAX_TENANTS:
        rows.append((f"… {len(known) - MAX_TENANTS:,} more", *[""] * 7))
    return make_table("", ("tenant", ">blocks", *(f">{tier}" for tier in TIERS), ">hits", ">loaded", ">saved"), rows)


def _moves(facts: dict[str, Any]) -> RenderableType:
    rows = [
        (
            f"{m['src']} → {m['dst']}",
            _per_second(m["blocks_per_s"]),
            f"{format_bytes(m['bytes_per_s'])}/s",
            format_count(m["failures"]),
        )
        for m in facts["moves"]
    ]
    return make_table("", ("move", ">blocks/s", ">bytes", ">failed"), rows)


def _latencies(facts: dict[str, Any]) -> RenderableType:
    rows = [
        (name, format_count(t["count"]), *("–" if t[p] is None else _duration(t[p]) for p in ("p50_s", "p99_s")))
        for name, t in facts["latencies"].items()
    ]
    return make_table("", ("time", ">count", ">p50", ">p99"), rows)


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else format_seconds(seconds)


def _per_second(rate: float) -> str:
    return f"{rate:.1f}" if 0 < rate < 10 else format_count(rate)
