"""Commands on blocks of a running daemon: evict, pin, pins, unpin, blocks, story, drain, checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TextIO

import click

from kvtierd.cli.connection import DEFAULT_TIMEOUT_S, AdminConnection
from kvtierd.cli.options import TIER, Settings, admin_options, duration, hex_start, json_option, key
from kvtierd.cli.output import WIDE, console, counted, format_bytes, format_seconds, make_table, print_json, tier_name
from kvtierd.model import MAX_KEYS_PER_CALL, Tier
from kvtierd.v1 import admin_pb2, kvtier_pb2

__all__ = ["blocks", "checkpoint", "drain", "evict", "pin", "pins", "story", "unpin"]

PAGE_SIZE: Final = 1000
CHECKPOINT_TIMEOUT_S: Final = 120.0
EVICT_TIMEOUT_S: Final = 60.0
_REFUSED: Final = "saves are refused from now on ('kvtierd drain --resume' takes them again)"

_pass = click.pass_context
_key_options = (
    click.option("--key", "keys", type=key, multiple=True, metavar="HEX", help="A key, 64 hex digits; may be repeated."),
    click.option("--keys-from", type=click.File("r"), metavar="FILE", help="File with one key a line; - for standard input."),
)


def _connect(ctx: click.Context) -> AdminConnection:
    return ctx.ensure_object(Settings).connect()


def _wire_tier(tier: str | None) -> Any:
    """The wire's number of a tier: 0 means any. (The generated types do not say that enum values are numbers.)"""
    return kvtier_pb2.Tier.Value("TIER_UNSPECIFIED" if tier is None else f"TIER_{tier.upper()}")


def _packed(keys: tuple[bytes, ...], keys_from: TextIO | None) -> bytes:
    found = list(keys)
    if keys_from is not None:
        for number, line in enumerate(keys_from, 1):
            text = line.strip()
            if text and not text.startswith("#"):
                try:
                    found.append(key(text))
                except click.BadParameter as e:
                    raise click.UsageError(f"{keys_from.name}, line {number}: {e.message}") from e
            if len(found) > MAX_KEYS_PER_CALL:
                break
    if len(found) > MAX_KEYS_PER_CALL:
        raise click.UsageError(f"more than {MAX_KEYS_PER_CALL:,} keys; split them over several calls")
    return b"".join(found)


@click.command()
@admin_options
@click.option("--tenant", default="", help="Only this tenant.")
@click.option("--namespace", "fingerprint", type=hex_start, metavar="HEX", help="Only this namespace; 8 or more hex digits.")
@_key_options[0]
@_key_options[1]
@click.option("--tier", type=TIER, help="Only copies on this tier: hbm, cpu or nvme.")
@click.option("--idle", "idle_s", type=duration, default="0s", metavar="DURATION", help="Only blocks idle at least this long.")
@click.option("--all", "everything", is_flag=True, help="All blocks of all tenants; needed when nothing else is named.")
@json_option()
@_pass
def evict(
    ctx: click.Context,
    tenant: str,
    fingerprint: bytes | None,
    keys: tuple[bytes, ...],
    keys_from: TextIO | None,
    tier: str | None,
    idle_s: float,
    everything: bool,
    as_json: bool,
) -> None:
    """Forget copies of blocks. Conditions narrow each other down.

    Nobody finds the copies from then on. The memory of those that are pinned or in use comes back when their last user lets go.
    """
    packed = _packed(keys, keys_from)
    if keys_from is not None and not packed:
        raise click.UsageError(f"{keys_from.name} names no keys; nothing was evicted")
    if not (tenant or fingerprint or packed or tier is not None or idle_s or everything):
        raise click.UsageError("name what to evict (--tenant, --namespace, --key, --tier, --idle), or say --all")
    request = admin_pb2.EvictBlocksRequest(
        tenant=tenant, fingerprint=fingerprint or b"", keys=packed, tier=_wire_tier(tier), idle_s=idle_s, all=everything
    )
    with _connect(ctx) as daemon:
        answer = daemon.call(daemon.stub.EvictBlocks, request, EVICT_TIMEOUT_S)
    if as_json:
        print_json(
            {
                "evicted_copies": answer.evicted,
                "evicted_pinned": answer.evicted_pinned,
                "evicted_in_use": answer.evicted_in_use,
            }
        )
        return
    click.echo(f"{counted(answer.evicted, 'copy', 'copies')} forgotten")
    if answer.evicted_pinned:
        click.echo(
            f"{_of_these(answer.evicted_pinned)} pinned: the memory stays taken until the pin ends; "
            f"'kvtierd pins' lists pins, 'kvtierd unpin TICKET' ends one"
        )
    if answer.evicted_in_use:
        click.echo(f"{_of_these(answer.evicted_in_use)} in use: the memory comes back when the load or save ends")


def _of_these(copies: int) -> str:
    return f"{copies:,} of these {'is' if copies == 1 else 'are'}"


@click.command()
@admin_options
@_key_options[0]
@_key_options[1]
@click.option("--tenant", default="", help="Only this tenant's blocks.")
@click.option("--for", "expires_s", type=duration, default="1h", show_default=True, metavar="DURATION", help="Longest time.")
@json_option()
@_pass
def pin(
    ctx: click.Context, keys: tuple[bytes, ...], keys_from: TextIO | None, tenant: str, expires_s: float, as_json: bool
) -> None:
    """Keep blocks where they are until the time is over or `unpin`.

    Writes the ticket for `unpin`; `pins` lists pins that hold.
    """
    packed = _packed(keys, keys_from)
    if not packed:
        raise click.UsageError("name the blocks with --key or --keys-from")
    if not expires_s > 0:
        raise click.UsageError("--for must be above 0")
    with _connect(ctx) as daemon:
        answer = daemon.call(daemon.stub.PinBlocks, admin_pb2.PinBlocksRequest(keys=packed, tenant=tenant, expires_s=expires_s))
    if as_json:
        print_json({"ticket": answer.ticket, "pinned_blocks": answer.pinned})
    else:
        click.echo(f"{counted(answer.pinned, 'block')} pinned for {format_seconds(expires_s)}; ticket {answer.ticket}")
    if not answer.pinned:
        ctx.exit(1)


def _pin_json(pin: Any) -> dict[str, Any]:
    return {
        "ticket": pin.ticket,
        "key": pin.key.hex(),
        "tenant": pin.tenant,
        "namespace": pin.fingerprint.hex(),
        "tier": tier_name(pin.tier),
        "size_bytes": pin.bytes,
        "expires_in_s": pin.expires_in_s,
        "evicted": pin.evicted,
    }


def _pin_row(pin: Any, wide: bool) -> tuple[str, ...]:
    until = datetime.now().astimezone() + timedelta(seconds=pin.expires_in_s)
    return (
        str(pin.ticket),
        _short(pin.key.hex(), wide),
        pin.tenant,
        tier_name(pin.tier) + (" (evicted)" if pin.evicted else ""),
        format_bytes(pin.bytes),
        format_seconds(pin.expires_in_s),
        f"{until:%b %d %H:%M}",
    )


@click.command()
@admin_options
@click.option("--tenant", default="", help="Only blocks of this tenant.")
@click.option(
    "--limit", type=click.IntRange(min=0), metavar="COUNT", default=100, show_default=True, help="Most pinned blocks; 0 for all."
)
@json_option("Write one JSON object a line.")
@_pass
def pins(ctx: click.Context, tenant: str, limit: int, as_json: bool) -> None:
    """List pinned blocks and how long their pins hold. Pins may come and go while a long list is read."""

    def ask(daemon: AdminConnection, size: int, token: str) -> tuple[list[Any], str]:
        request = admin_pb2.ListPinsRequest(tenant=tenant, page_size=size, page_token=token)
        answer = daemon.call(daemon.stub.ListPins, request)
        return list(answer.pins), answer.next_page_token

    columns = (">ticket", "key", "tenant", "tier", ">size", ">ends in", "until")
    _list(ctx, ask, limit, as_json, ("pinned block", "pinned blocks"), _pin_json, _pin_row, columns)


@click.command()
@admin_options
@click.argument("ticket", type=click.IntRange(0, 2**64 - 1))
@_pass
def unpin(ctx: click.Context, ticket: int) -> None:
    """Take the pin with this TICKET back."""
    with _connect(ctx) as daemon:
        daemon.call(daemon.stub.UnpinBlocks, admin_pb2.UnpinBlocksRequest(ticket=ticket))
    click.echo("unpinned")


def _block_json(block: Any) -> dict[str, Any]:
    return {
        "key": block.key.hex(),
        "tenant": block.tenant,
        "namespace": block.fingerprint.hex(),
        "size_bytes": block.bytes,
        "states": {tier.name.lower(): state for tier, state in zip(Tier, block.states, strict=False)},
        "pins": block.pins,
        "idle_s": block.idle_s,
        "expires_in_s": block.expires_in_s if block.HasField("expires_in_s") else None,
    }


def _short(digits: str, wide: bool, length: int = 16) -> str:
    """Hex digits, whole where there is room for them."""
    return digits if wide else digits[:length] + "…"


def _block_row(block: Any, wide: bool) -> tuple[str, ...]:
    where = " ".join(
        tier.name.lower() + ("" if state == "ready" else f"({state})")
        for tier, state in zip(Tier, block.states, strict=False)
        if state
    )
    return (
        _short(block.key.hex(), wide),
        block.tenant,
        block.fingerprint.hex()[: 16 if wide else 8],
        format_bytes(block.bytes),
        where,
        str(block.pins),
        format_seconds(block.idle_s),
        format_seconds(block.expires_in_s) if block.HasField("expires_in_s") else "never",
    )


_BLOCK_COLUMNS = ("key", "tenant", "namespace", ">size", "tiers", ">pins", ">idle", ">expires in")


_Ask = Callable[[AdminConnection, int, str], tuple[list[Any], str]]
"""A page of at most so many entries from a token on, and the next token."""


def _pages(daemon: AdminConnection, ask: _Ask, limit: int) -> Iterator[list[Any]]:
    """Pages until there are no more or the limit (0: none) is reached."""
    token, left = "", limit
    while True:
        size = min(PAGE_SIZE, left) if limit else PAGE_SIZE
        entries, next_token = ask(daemon, size, token)
        found = entries[:size]
        left -= len(found)
        yield found
        if not next_token or (limit and left <= 0) or next_token == token:
            return
        token = next_token


def _list(
    ctx: click.Context,
    ask: _Ask,
    limit: int,
    as_json: bool,
    names: tuple[str, str],
    to_json: Callable[[Any], dict[str, Any]],
    to_row: Callable[[Any, bool], tuple[str, ...]],
    columns: Sequence[str],
) -> None:
    """Read all pages and write them as a table or as JSON lines. ``names`` are one and many entries in words."""
    out, total = console(), 0
    wide = out.width >= WIDE
    with _connect(ctx) as daemon:
        for page in _pages(daemon, ask, limit):
            if as_json:
                for entry in page:
                    print_json(to_json(entry), one_line=True)
            elif page:
                out.print(make_table("", columns, (to_row(entry, wide) for entry in page)))
            total += len(page)
    if as_json:
        return
    if total == 0:
        click.echo(f"no {names[1]}", err=True)
    elif total == limit:
        click.echo(f"{counted(total, *names)}, as --limit says; --limit 0 lists all", err=True)
    if total and not wide:
        click.echo("keys are shortened to fit; --json and pipes have them whole", err=True)


@click.command()
@admin_options
@click.option("--tenant", default="", help="Only this tenant.")
@click.option("--tier", type=TIER, help="Only blocks with a copy on this tier: hbm, cpu or nvme.")
@click.option(
    "--limit", type=click.IntRange(min=0), metavar="COUNT", default=100, show_default=True, help="Most blocks; 0 for all."
)
@json_option("Write one JSON object a line.")
@_pass
def blocks(ctx: click.Context, tenant: str, tier: str | None, limit: int, as_json: bool) -> None:
    """List blocks. Blocks may come and go while a long list is read."""

    def ask(daemon: AdminConnection, size: int, token: str) -> tuple[list[Any], str]:
        request = admin_pb2.ListBlocksRequest(tenant=tenant, tier=_wire_tier(tier), page_size=size, page_token=token)
        answer = daemon.call(daemon.stub.ListBlocks, request)
        return list(answer.blocks), answer.next_page_token

    _list(ctx, ask, limit, as_json, ("block", "blocks"), _block_json, _block_row, _BLOCK_COLUMNS)


@click.command()
@admin_options
@click.argument("start", type=hex_start, metavar="KEY")
@json_option()
@_pass
def story(ctx: click.Context, start: bytes, as_json: bool) -> None:
    """Show what happened to the block with this KEY (hex, or its first 8 or more digits), oldest first.

    What the daemon remembers goes back to its start, or to the last 32,768 changes of all blocks.
    """
    with _connect(ctx) as daemon:
        answer = daemon.call(daemon.stub.GetStory, admin_pb2.GetStoryRequest(key=start))
    held = answer.HasField("block")
    if as_json:
        events = [
            {
                "at_s": e.at_s,
                "key": e.key.hex(),
                "tier": tier_name(e.tier),
                "from": getattr(e, "from"),
                "to": e.to,
                "why": e.why,
            }
            for e in answer.events
        ]
        print_json({"events": events, "block": _block_json(answer.block) if held else None})
        return
    out = console()
    if answer.events:
        rows = [(f"{e.at_s:.3f}", tier_name(e.tier), getattr(e, "from"), e.to, e.why, e.key.hex()[:16]) for e in answer.events]
        out.print(make_table("", (">seconds since start", "tier", "from", "to", "why", "key"), rows))
    if held:
        out.print(make_table("now", _BLOCK_COLUMNS, [_block_row(answer.block, out.width >= WIDE)]))
    else:
        click.echo("the block is not held now" if answer.events else "no such block is held or remembered")
    if not held and not answer.events:
        ctx.exit(1)


@click.command()
@admin_options
@click.option("--timeout", "timeout_s", type=duration, default="30s", show_default=True, metavar="DURATION", help="Longest wait.")
@click.option("--resume", is_flag=True, help="Take new saves again afterwards.")
@json_option()
@_pass
def drain(ctx: click.Context, timeout_s: float, resume: bool, as_json: bool) -> None:
    """Stop granting slots and write what is only in memory down to NVMe. Fails when bytes are left."""
    with _connect(ctx) as daemon:
        request = admin_pb2.DrainRequest(timeout_s=timeout_s, resume=resume)
        answer = daemon.call(daemon.stub.Drain, request, timeout_s + DEFAULT_TIMEOUT_S)
    if as_json:
        print_json({"dirty_bytes": answer.dirty_bytes})
    elif answer.dirty_bytes:
        click.echo(f"{format_bytes(answer.dirty_bytes)} are still only in memory", err=True)
    else:
        click.echo("drained: nothing is left that is only in memory" + ("" if resume else f"; {_REFUSED}"))
    if answer.dirty_bytes:
        ctx.exit(1)


@click.command()
@admin_options
@json_option()
@_pass
def checkpoint(ctx: click.Context, as_json: bool) -> None:
    """Write a snapshot of the NVMe index now, so that the next start has less to read."""
    with _connect(ctx) as daemon:
        answer = daemon.call(daemon.stub.Checkpoint, admin_pb2.CheckpointRequest(), CHECKPOINT_TIMEOUT_S)
    if as_json:
        print_json({"copies": answer.copies})
    else:
        click.echo(f"snapshot of {counted(answer.copies, 'copy', 'copies')} written")
