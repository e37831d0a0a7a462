"""One line at debug for each decision: what was granted, refused, moved, forgotten, and why.

Ask :func:`wanted` first: whoever does not want these lines pays for that question only. Fields of a line are values of their own
for JSON (``service/logs.py``). Keys are named by their beginning; tokens of sessions never.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvtierd.core.commands import Move, Priority, StartMoves
from kvtierd.core.saves import OUTCOME_NAMES
from kvtierd.core.slots import NewExtent, RetireExtent
from kvtierd.core.state import CoreState
from kvtierd.core.stats import Forgotten
from kvtierd.core.tickets import ReadTicket, SaveGrant
from kvtierd.model import Tier
from kvtierd.runtime.sessions import Attached
from kvtierd.transfer.executor import MoveReport

KEY_CHARS: Final = 12
"""Hexadecimal digits that name a key."""
MAX_NAMED: Final = 4
"""Tenants that one line names."""

log = logging.getLogger("kvtierd.decisions")


def wanted() -> bool:
    """Whether anybody reads these lines."""
    return log.isEnabledFor(logging.DEBUG)


def tell(decision: str, **fields: Any) -> None:
    """Write a line: the decision and its fields, those that are zero or empty left out."""
    told = {name: value for name, value in fields.items() if value or value is False}
    text = " ".join(f"{name}={_shown(value)}" for name, value in told.items())
    log.debug("%s %s", decision, text, extra={"fields": {"decision": decision, **told}})


def _shown(value: Any) -> str:
    """A value as one word; text from outside may hold anything."""
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def short(keys: Sequence[bytes]) -> str:
    """The beginning of the first key."""
    return keys[0].hex()[:KEY_CHARS] if keys else ""


def tell_save(attached: Attached, tenant: str, keys: Sequence[bytes], grant: SaveGrant) -> None:
    """Tell of a save what became of its keys."""
    outcomes = {OUTCOME_NAMES[outcome]: n for outcome, n in Counter(grant.outcomes).items()}
    tell("save", session=attached.session_id, tenant=tenant, ticket=grant.ticket_id, keys=len(keys), first=short(keys), **outcomes)


def tell_read(attached: Attached, ticket: ReadTicket, keys: Sequence[bytes]) -> None:
    """Tell of a load or prefetch what was found, by the fastest tier."""
    found = Counter(next((t.name.lower() for t in Tier if mask & t.bit), "missing") for mask in ticket.found_on)
    found["missing"] += len(keys) - len(ticket.found_on)
    tell(
        "prefetch" if ticket.prefetch else "load",
        session=attached.session_id, tenant=ticket.realm.tenant.name, ticket=ticket.ticket_id,
        keys=len(keys), first=short(keys), **found,
    )  # fmt: skip


def tell_moves(command: StartMoves) -> None:
    """Tell of moves that start."""
    moves = command.moves
    tell(
        "pack" if command.src_tier is command.dst_tier else "demote" if command.priority is Priority.DEMOTE else "promote",
        src=command.src_tier.name.lower(), dst=command.dst_tier.name.lower(), tenant=_tenants(moves),
        blocks=len(moves), bytes=sum(m.size_bytes for m in moves),
        why=",".join(sorted({m.why for m in moves})), first=short([moves[0].src.block.key]),
    )  # fmt: skip


def tell_moved(report: MoveReport) -> None:
    """Tell of moves that have ended, with the failures among them."""
    results = Counter(result.value for _, result in report.results)
    tell(
        "moved",
        src=report.src_tier.name.lower(), dst=report.dst_tier.name.lower(), tenant=_tenants(move for move, _ in report.results),
        queued_s=round(report.waited_s, 6), took_s=round(report.took_s, 6), **results,
    )  # fmt: skip


def _tenants(moves: Iterable[Move]) -> str:
    """Whose blocks move, by name; of many tenants the first and how many more there are."""
    names = sorted({move.src.block.realm.tenant.name for move in moves})
    more = len(names) - MAX_NAMED
    return ",".join(names[:MAX_NAMED]) + (f",+{more}" if more > 0 else "")


def tell_extent(state: CoreState, command: NewExtent | RetireExtent) -> None:
    """Tell of an extent that is made or goes, and whose it is; those on NVMe are everybody's. Before the command is run."""
    if isinstance(command, NewExtent):
        what, realm_id, size_bytes = "extent made", command.realm_id, command.slot_bytes * command.slot_count
    else:
        extent = state.pools[command.tier].retiring[command.extent_id]
        what, realm_id, size_bytes = "extent retired", extent.group.realm_id, extent.size_bytes
    realm = state.realms.get(realm_id)  # one that holds nothing may have been forgotten before its extent goes
    tell(
        what,
        tier=command.tier.name.lower(), extent=command.extent_id, realm=max(realm_id, 0),
        tenant="" if realm is None else realm.tenant.name, bytes=size_bytes,
    )  # fmt: skip


def tell_forgotten(forgotten: Forgotten) -> None:
    """Tell of copies that were forgotten, and of blocks that were not admitted: one line a tenant, tier and reason."""
    for (tenant, tier, why), n in forgotten.evicted.items():
        tell("evict", tenant=tenant, tier=tier.name.lower(), reason=why, copies=n)
    for (tenant, why), n in forgotten.not_admitted.items():
        tell("not admitted", tenant=tenant, tier="nvme", reason=why, blocks=n)
