"""One line at debug for each decision: what was granted, refused, moved, forgotten, and why.

Ask :func:`wanted` first: whoever does not want these lines pays for that question only. Fields of a line are values of their own
for JSON (``service/logs.py``). Keys are named by their beginning; tokens of sessions never.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from kvtierd.core.commands import Priority, StartMoves
from kvtierd.core.saves import OUTCOME_NAMES
from kvtierd.core.slots import NewExtent, RetireExtent
from kvtierd.core.stats import Counts
from kvtierd.core.tickets import ReadTicket, SaveGrant
from kvtierd.model import Tier
from kvtierd.runtime.sessions import Attached
from kvtierd.transfer.executor import MoveReport

KEY_CHARS: Final = 12
"""Hexadecimal digits that name a key."""

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
        src=command.src_tier.name.lower(), dst=command.dst_tier.name.lower(),
        blocks=len(moves), bytes=sum(m.size_bytes for m in moves),
        why=",".join(sorted({m.why for m in moves})), first=short([moves[0].src.block.key]),
    )  # fmt: skip


def tell_moved(report: MoveReport) -> None:
    """Tell of moves that have ended, with the failures among them."""
    results = Counter(result.value for _, result in report.results)
    tell(
        "moved",
        src=report.src_tier.name.lower(), dst=report.dst_tier.name.lower(),
        queued_s=round(report.waited_s, 6), took_s=round(report.took_s, 6), **results,
    )  # fmt: skip


def tell_extent(command: NewExtent | RetireExtent) -> None:
    """Tell of an extent that is made or goes."""
    if isinstance(command, NewExtent):
        size_bytes = command.slot_bytes * command.slot_count
        tell("extent made", tier=command.tier.name.lower(), extent=command.extent_id, realm=command.realm_id, bytes=size_bytes)
    else:
        tell("extent retired", tier=command.tier.name.lower(), extent=command.extent_id)


class Forgotten:
    """Tells of copies that were forgotten, and of blocks that were not admitted, since the last time."""

    def __init__(self) -> None:
        self._evictions: Counter[tuple[Tier, str]] = Counter()
        self._not_admitted: Counter[str] = Counter()
        self._known = False

    def tell(self, counts: Counts) -> None:
        """Tell of what has changed, one line a tier and reason. The first time only takes note."""
        if self._known:
            for (tier, why), n in (counts.evictions - self._evictions).items():
                tell("evict", tier=tier.name.lower(), reason=why, copies=n)
            for why, n in (counts.not_admitted - self._not_admitted).items():
                tell("not admitted", tier="nvme", reason=why, blocks=n)
        self._known = True
        self._evictions, self._not_admitted = counts.evictions.copy(), counts.not_admitted.copy()
