"""``kvtierd status``: one look at a daemon, or a running one."""

from __future__ import annotations

from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.text import Text

from kvtierd.cli.connection import AdminConnection
from kvtierd.cli.options import Settings, admin_options, every_option, json_option
from kvtierd.cli.output import (
    clean,
    console,
    counted,
    format_bytes,
    format_count,
    format_seconds,
    make_table,
    not_in_force,
    print_json,
    tier_name,
)
from kvtierd.cli.watching import watch
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier
from kvtierd.v1 import admin_pb2

__all__ = ["render_status", "status", "status_json"]

_STANDARD: Final = admin_pb2.TENANT_CLASS_STANDARD
MAX_ROWS: Final = 50
"""Tenants and sessions in a table; the rest is counted. JSON has all."""


@click.command()
@admin_options
@json_option("Write JSON; with --watch one object a line.")
@click.option("--tenant", metavar="NAME", help="Only this tenant and its sessions.")
@click.option(
    "--watch", "again", is_flag=True, help="Show it again and again until Ctrl-C; in a pipe one snapshot after the other."
)
@every_option("Time between two looks of --watch.")
@click.pass_context
def status(ctx: click.Context, as_json: bool, tenant: str | None, again: bool, every_s: float) -> None:
    """Show tiers, tenants, sessions and counters of a daemon."""
    with ctx.ensure_object(Settings).connect() as daemon:
        # The first look fails like any other command, so that a wrong address does not end in an endless wait.
        answer = _ask(daemon, tenant)
        if tenant is not None and not (answer.tenants or answer.sessions or answer.tenant_problems):
            raise RequestError(
                Reason.NOT_FOUND, f"the daemon knows no tenant {clean(tenant)!r}; 'kvtierd status' lists those it knows"
            )
        if as_json:
            print_json(status_json(answer), one_line=again)
        elif not again:
            console().print(render_status(answer, daemon.address))
        elif not console().is_terminal:
            console().print(render_status(answer, daemon.address), Text(""))
        if again:
            watch(
                console(), lambda: _ask(daemon, tenant), lambda seen: render_status(seen, daemon.address), status_json,
                first=render_status(answer, daemon.address), every_s=every_s, as_json=as_json,
            )  # fmt: skip


def _ask(daemon: AdminConnection, tenant: str | None) -> admin_pb2.GetStatusResponse:
    """The status; of one tenant its own part only, without the totals of all."""
    answer: admin_pb2.GetStatusResponse = daemon.call(daemon.stub.GetStatus, admin_pb2.GetStatusRequest())
    if tenant is not None:
        tenants = [t for t in answer.tenants if t.tenant == tenant]
        sessions = [s for s in answer.sessions if s.tenant == tenant]
        for name, kept in (("tenants", tenants), ("sessions", sessions), ("counters", [])):
            answer.ClearField(name)
            if kept:
                getattr(answer, name).extend(kept)
        for name in answer.tenant_problems.keys() - {tenant}:
            del answer.tenant_problems[name]
    return answer


def status_json(answer: admin_pb2.GetStatusResponse) -> dict[str, Any]:
    """The status as JSON values; tiers by lower-case name, sizes in bytes, times in seconds."""
    names = [tier.name.lower() for tier in Tier]
    return {
        "version": answer.version,
        "boot_epoch": answer.boot_epoch,
        "uptime_s": answer.uptime_s,
        "draining": answer.draining,
        "blocks": answer.blocks,
        "tiers": [
            {
                "tier": tier_name(t.tier),
                "capacity_bytes": t.capacity_bytes,
                "reserved_bytes": t.reserved_bytes,
                "used_bytes": t.used_bytes,
                "copies": t.copies,
                "dirty_bytes": t.dirty_bytes,
                "pinned_bytes": t.pinned_bytes,
                "path": t.path,
                "suspended": t.suspended,
                "configured_bytes": t.configured_bytes,
                "encrypted": t.encrypted,
                "folders": [{"path": f.path, "problem": f.problem} for f in t.folders],
            }
            for t in answer.tiers
        ],
        "tenants": [
            {
                "tenant": t.tenant,
                "blocks": t.blocks,
                "used_bytes": dict(zip(names, t.used_bytes, strict=False)),
                "quota_bytes": dict(zip(names, t.quota_bytes, strict=False)),
                "hits": t.hits,
                "misses": t.misses,
                "tenant_class": admin_pb2.TenantClass.Name(t.tenant_class or _STANDARD).removeprefix("TENANT_CLASS_").lower(),
                "limits": {tier_name(limit.tier): _limit_json(limit) for limit in t.limits},
            }
            for t in answer.tenants
        ],
        "sessions": [
            {
                "id": s.id,
                "client_name": s.client_name,
                "tenant": s.tenant,
                "model": s.model,
                "namespace": s.fingerprint,
                "processes": s.processes,
                "tickets": s.tickets,
                "ticket_bytes": s.ticket_bytes,
                "age_s": s.age_s,
                "pid": s.pid,
                "devices": s.devices,
                "no_device": s.no_device,
            }
            for s in answer.sessions
        ],
        "counters": dict(sorted(answer.counters.items())),
        "tenant_problems": dict(sorted(answer.tenant_problems.items())),
    }


def _limit_json(limit: admin_pb2.TenantTier) -> dict[str, Any]:
    return {
        "quota_bytes": limit.quota_bytes if limit.HasField("quota_bytes") else None,
        "reserve_bytes": limit.reserve_bytes,
        "used_bytes": limit.used_bytes,
        "evictions": dict(sorted(limit.evictions.items())),
    }


def render_status(answer: admin_pb2.GetStatusResponse, address: str) -> RenderableType:
    """The status for people."""
    head = f"kvtierd {answer.version} at {address}, up {format_seconds(answer.uptime_s)}, {counted(answer.blocks, 'block')}"
    parts: list[RenderableType] = [Text(clean(head), style="bold")]
    if answer.draining:
        parts.append(Text("draining: saves are refused", style="yellow"))
    parts += [Text(""), _tier_table(answer)]
    parts += [Text(_journals(t), style="dim") for t in answer.tiers if t.configured_bytes > t.capacity_bytes]
    parts += [Text(f"{tier_name(t.tier)} takes nothing: {clean(t.suspended)}", style="red") for t in answer.tiers if t.suspended]
    problems = [f for t in answer.tiers for f in t.folders if f.problem]
    parts += [Text(clean(f"folder {f.path} is {f.problem}"), style="red") for f in problems]
    if answer.tenants:
        parts += [Text(""), _tenant_table(answer)]
    parts += [Text(not_in_force(name, why), style="yellow") for name, why in sorted(answer.tenant_problems.items())[:MAX_ROWS]]
    parts += [Text(""), _session_table(answer) if answer.sessions else Text("no sessions", style="dim")]
    without = [s for s in answer.sessions if s.no_device]
    parts += [Text(f"session {s.id} is given no GPU memory: {clean(s.no_device)}", style="yellow") for s in without]
    counters = [(name, format_count(value)) for name, value in sorted(answer.counters.items()) if value]
    if counters:
        parts += [Text(""), make_table("counters", ("name", ">since start"), counters)]
    return Group(*parts)


def _journals(tier: admin_pb2.TierStatus) -> str:
    aside = tier.configured_bytes - tier.capacity_bytes
    name = tier_name(tier.tier)
    return f"{name}: of the {format_bytes(tier.configured_bytes)} configured, {format_bytes(aside)} are for journals and snapshots"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "–"


def _tier_table(answer: admin_pb2.GetStatusResponse) -> RenderableType:
    rows = [
        (
            tier_name(t.tier),
            format_bytes(t.used_bytes),
            format_bytes(t.capacity_bytes),
            _percent(t.used_bytes, t.capacity_bytes),
            format_count(t.copies),
            format_bytes(t.dirty_bytes),
            format_bytes(t.pinned_bytes),
            f"{t.path}, encrypted" if t.encrypted else t.path,
        )
        for t in answer.tiers
    ]
    return make_table("", ("tier", ">used", ">capacity", ">share", ">copies", ">dirty", ">pinned", "path"), rows)


def _tenant_table(answer: admin_pb2.GetStatusResponse) -> RenderableType:
    def row(t: admin_pb2.TenantStatus) -> tuple[str, ...]:
        used = [format_bytes(n) for n in t.used_bytes]
        found = t.hits + t.misses
        return (
            t.tenant,
            format_count(t.blocks),
            *(used + ["–"] * 3)[:3],
            format_count(t.hits),
            format_count(t.misses),
            _percent(t.hits, found),
        )

    rows = [row(t) for t in answer.tenants[:MAX_ROWS]]
    more = len(answer.tenants) - len(rows)
    if more > 0:
        rows.append((f"… {more:,} more", *[""] * 7))
    return make_table("tenants", ("tenant", ">blocks", ">hbm", ">cpu", ">nvme", ">hits", ">misses", ">hit rate"), rows)


def _session_table(answer: admin_pb2.GetStatusResponse) -> RenderableType:
    rows: list[tuple[str, ...]] = [
        (
            s.id,
            s.client_name,
            s.tenant,
            s.model,
            str(s.pid),
            str(s.processes),
            str(s.tickets),
            format_bytes(s.ticket_bytes),
            format_seconds(s.age_s),
        )
        for s in answer.sessions[:MAX_ROWS]
    ]
    more = len(answer.sessions) - len(rows)
    if more > 0:
        rows.append((f"… {more:,} more", *[""] * 8))
    columns = ("session", "client", "tenant", "model", ">pid", ">processes", ">tickets", ">held", ">age")
    return make_table("sessions", columns, rows)
