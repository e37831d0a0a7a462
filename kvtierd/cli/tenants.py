"""``kvtierd tenants``: list tenants with their limits, change limits, take them away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from kvtierd.cli.connection import DEFAULT_TIMEOUT_S, AdminConnection
from kvtierd.cli.options import Settings, admin_options, json_option
from kvtierd.cli.output import (
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
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier
from kvtierd.service.tenant_messages import amount_message, ttl_message
from kvtierd.units import Share, amount_text, parse_amount, parse_share, parse_ttl
from kvtierd.v1 import admin_pb2 as pb

__all__ = ["tenants"]

PAGE_SIZE: Final = 1000
EVICT_TIMEOUT_S: Final = 60.0
TIERS: Final = tuple(tier.name.lower() for tier in Tier)
_pass = click.pass_context


@click.group()
def tenants() -> None:
    """List tenants, change their limits while the daemon runs, or take these away.

    What is set here wins over the configuration file, key by key, holds at once and survives a restart.
    """


def _option(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An option's type from a reader that raises ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as e:
            raise click.BadParameter(str(e)) from e

    return read


def _amount(text: str) -> pb.Amount:
    return amount_message(parse_amount(text))


def _own_ttl(text: str) -> pb.OwnTtl:
    if text == "tier":
        return ttl_message(None)
    seconds = parse_ttl(text)
    return ttl_message("never" if seconds is None else seconds)


def _limit_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of each tier: quota, reserve, TTL, and one that takes the quota away."""
    for tier in reversed(TIERS):
        upper = tier.upper()
        for option in (
            click.option(
                f"--ttl-{tier}", f"--{tier}-ttl", f"{tier}_ttl", type=_option(_own_ttl), metavar="DURATION",
                help=f'Own TTL on {upper}, such as 5m; "never", or "tier" for the tier\'s.',
            ),
            click.option(
                f"--{tier}-reserve", type=_option(_amount), metavar="AMOUNT",
                help=f"What of {upper} others never take; for class premium.",
            ),
            click.option(f"--no-{tier}-quota", is_flag=True, help=f"No quota on {upper}."),
            click.option(
                f"--{tier}-quota", type=_option(_amount), metavar="AMOUNT",
                help=f"Most that it may hold on {upper}, such as 4GiB or 20%; 0 for nothing.",
            ),
        ):  # fmt: skip
            command = option(command)
    return command


@tenants.command("set")
@admin_options
@click.argument("name")
@click.option(
    "--class", "tenant_class", type=click.Choice(["premium", "standard", "basic"]), help="Who gives way to whom on a full tier."
)
@click.option(
    "--scope", type=click.Choice(["private", "shared"]), help="Whether other tenants whose scope is shared find what it saves."
)
@_limit_options
@click.option(
    "--write-budget-share", type=_option(parse_share), metavar="SHARE", help="Most of the daily write budget, such as 10%."
)
@click.option("--reset", multiple=True, metavar="KEY", help="Back to the configuration's: cpu_quota, say; may be repeated.")
@json_option()
@_pass
def set_(ctx: click.Context, /, name: str, reset: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Change limits of the tenant NAME; what is not named stays as it is."""
    request = pb.SetTenantRequest(tenant=name, reset=reset)
    limits = request.limits
    if options["tenant_class"]:
        limits.tenant_class = _value(pb.TenantClass, f"TENANT_CLASS_{options['tenant_class']}")
    if options["scope"]:
        limits.scope = _value(pb.TenantScope, f"TENANT_SCOPE_{options['scope']}")
    if options["write_budget_share"] is not None:
        limits.write_budget_share = options["write_budget_share"]
    for tier in TIERS:
        quota, is_none = options[f"{tier}_quota"], options[f"no_{tier}_quota"]
        if quota is not None and is_none:
            raise click.UsageError(f"--{tier}-quota and --no-{tier}-quota exclude each other")
        parts = {
            "quota": amount_message(None) if is_none else quota,
            "reserve": options[f"{tier}_reserve"],
            "ttl": options[f"{tier}_ttl"],
        }
        for part, value in parts.items():
            if value is not None:
                getattr(getattr(limits, tier), part).CopyFrom(value)
    if not limits.ByteSize() and not reset:
        raise click.UsageError("nothing is to be changed; name a limit, such as --cpu-quota 20%, or --reset KEY")
    with _connect(ctx) as daemon:
        answer = daemon.call(daemon.stub.SetTenant, request)
    if as_json:
        print_json(_tenant_json(answer.tenant) | {"kept": answer.kept})
        return
    _show([answer.tenant])
    if not answer.kept:
        click.echo("a restart of the daemon forgets this: it has no NVMe tier to keep it in", err=True)


@tenants.command("list")
@admin_options
@click.option("--tenant", default="", help="Only this tenant.")
@json_option("Write one JSON object a line.")
@_pass
def list_(ctx: click.Context, tenant: str, as_json: bool) -> None:
    """List tenants by name with their limits and what they use."""
    found: list[Any] = []
    with _connect(ctx) as daemon:
        token = ""
        while True:
            request = pb.ListTenantsRequest(tenant=tenant, page_size=PAGE_SIZE, page_token=token)
            answer = daemon.call(daemon.stub.ListTenants, request)
            if as_json:
                for info in answer.tenants:
                    print_json(_tenant_json(info), one_line=True)
            found += answer.tenants
            token = answer.next_page_token
            if not token:
                break
    if as_json:
        return
    if not found:
        click.echo("no tenants", err=True)
        return
    _show(found)


@tenants.command("rm")
@admin_options
@click.argument("name")
@click.option("--evict", is_flag=True, help="Forget all of its blocks too.")
@click.option("--force", is_flag=True, help="Though it has blocks or sessions: they go on without limits.")
@json_option()
@_pass
def rm(ctx: click.Context, name: str, evict: bool, force: bool, as_json: bool) -> None:
    """Take away what `set` has set for the tenant NAME: the configuration's limits hold again, or none."""
    with _connect(ctx) as daemon:
        request = pb.RemoveTenantRequest(tenant=name, evict=evict, force=force)
        try:
            answer = daemon.call(daemon.stub.RemoveTenant, request, EVICT_TIMEOUT_S if evict else DEFAULT_TIMEOUT_S)
        except RequestError as e:
            if e.reason is not Reason.BAD_REQUEST:
                raise
            raise RequestError(e.reason, e.message.replace("say evict", "say --evict").replace("or force", "or --force")) from e
    if as_json:
        print_json({"evicted_copies": answer.evicted, "configured": answer.configured})
        return
    now = "the configuration's limits hold again" if answer.configured else "it has no limits of its own now"
    gone = f"; {counted(answer.evicted, 'copy', 'copies')} forgotten" if evict else ""
    click.echo(f"{now}{gone}")


def _value(enum: Any, name: str) -> Any:
    """The wire's number of an enum's value. (The generated types do not say that enum values are numbers.)"""
    return enum.Value(name.upper())


def _connect(ctx: click.Context) -> AdminConnection:
    return ctx.ensure_object(Settings).connect()


def _amount_json(amount: Any) -> int | str | None:
    kind = amount.WhichOneof("amount")
    return None if kind == "unlimited" else amount_text(Share(amount.share)) if kind == "share" else amount.bytes


def _ttl_json(ttl: Any) -> float | str | None:
    kind = ttl.WhichOneof("ttl")
    return ttl.seconds if kind == "seconds" else "never" if kind == "never" else None


def _class_name(number: int) -> str:
    return pb.TenantClass.Name(number).removeprefix("TENANT_CLASS_").lower()


def _tenant_json(info: Any) -> dict[str, Any]:
    """A tenant as JSON: limits as in the configuration, and sizes in bytes by tier."""
    limits = info.limits
    settings: dict[str, Any] = {
        "class": _class_name(limits.tenant_class),
        "scope": pb.TenantScope.Name(limits.scope).removeprefix("TENANT_SCOPE_").lower(),
        "write_budget_share": limits.write_budget_share,
    }
    for tier in TIERS:
        of_tier = getattr(limits, tier)
        settings[f"{tier}_quota"] = _amount_json(of_tier.quota)
        settings[f"{tier}_reserve"] = _amount_json(of_tier.reserve)
        settings[f"{tier}_ttl"] = _ttl_json(of_tier.ttl)
    by_tier = {tier_name(t.tier): t for t in info.tiers}
    return {
        "tenant": info.tenant,
        "source": info.source,
        "limits": settings,
        "quota_bytes": {name: t.quota_bytes if t.HasField("quota_bytes") else None for name, t in by_tier.items()},
        "reserve_bytes": {name: t.reserve_bytes for name, t in by_tier.items()},
        "used_bytes": {name: t.used_bytes for name, t in by_tier.items()},
        "evictions": {name: dict(sorted(t.evictions.items())) for name, t in by_tier.items()},
        "blocks": info.blocks,
        "hits": info.hits,
        "misses": info.misses,
        "sessions": info.sessions,
        "problem": info.problem,
    }


def _show(found: list[Any]) -> None:
    columns = ("tenant", "class", "scope", "cpu", "nvme", "ttl", ">writes", ">blocks", ">hit rate", ">sessions", "limits from")
    console().print(make_table("", columns, (_row(info) for info in found)))
    for info in found:
        if info.problem:
            click.echo(not_in_force(info.tenant, info.problem), err=True)


def _row(info: Any) -> tuple[str, ...]:
    facts = _tenant_json(info)
    asked = info.hits + info.misses
    ttl = [f"{t} {v if isinstance(v, str) else format_seconds(v)}" for t in TIERS if (v := facts["limits"][f"{t}_ttl"]) is not None]
    return (
        info.tenant,
        facts["limits"]["class"],
        facts["limits"]["scope"],
        _use(facts, "cpu"),
        _use(facts, "nvme"),
        ", ".join(ttl) or "–",
        f"{100 * info.limits.write_budget_share:.6g} %",
        format_count(info.blocks),
        f"{100 * info.hits / asked:.0f} %" if asked else "–",
        format_count(info.sessions),
        info.source or "–",
    )


def _use(facts: dict[str, Any], tier: str) -> str:
    """What it uses of a tier, of which quota, and what is reserved for it."""
    text = format_bytes(facts["used_bytes"][tier])
    if facts["quota_bytes"][tier] is not None:
        text += f" of {format_bytes(facts['quota_bytes'][tier])}"
    if facts["reserve_bytes"][tier]:
        text += f", {format_bytes(facts['reserve_bytes'][tier])} reserved"
    return text
