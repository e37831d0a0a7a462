"""Looking at a whole core: its figures, and every invariant restated. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

from kvtierd.core.block import check_block
from kvtierd.core.state import CoreState
from kvtierd.core.stats import StatsSnapshot, TenantStats, TierStats
from kvtierd.core.tickets import Entry, SaveTicket, Session
from kvtierd.model import Tier


def take_snapshot(
    state: CoreState, sessions: Mapping[int, Session], pins: int, queue_depth: dict[str, int], now: float
) -> StatsSnapshot:
    """All figures."""
    tiers = []
    for tier in state.tiers:
        pool = state.pools[tier]
        until, why = state.turns.suspended.get(tier, (0.0, ""))
        tiers.append(
            TierStats(
                tier,
                pool.capacity_bytes,
                pool.reserved_bytes,
                pool.used_bytes,
                state.copies[tier],
                state.dirty_bytes[tier] if state.turns.lower(tier) is not None else 0,
                state.pinned_bytes[tier],
                why if until else "",
            )
        )
    tenants = [
        TenantStats(t.name, t.blocks, _triple(t.used_bytes), t.limits, _triple(t.hits), t.misses, t.evictions)
        for t in state.tenants.values()
    ]
    tickets = sum(len(s.tickets) for s in sessions.values()) + pins
    blocks = sum(t.blocks for t in state.tenants.values())
    budget = state.admission
    return StatsSnapshot(tiers, tenants, blocks, len(sessions), tickets, queue_depth, budget.budget_bytes, budget.left_bytes(now))


def check_all(state: CoreState, sessions: Mapping[int, Session]) -> None:
    """Assert every invariant (visits everything)."""
    state.check_usage()
    state.expiries.check(b for realm in state.realms.values() for b in realm.index.values() if b.realm is realm)
    for realm in state.realms.values():
        realm.presence.check()
        for order in realm.orders:
            order.check()
        assert realm.held == len(realm.own_keys())
        assert not realm.shared or realm in state.commons[realm.fingerprint]
        for key, block in realm.index.items():
            assert block.key == key and block.realm.index is realm.index
            assert block.realm is realm or (realm.shared and block.realm.shared), "only shared realms find others' blocks"
            check_block(block)
    for move in state.moves.values():
        for waiter, _ in move.waiters:
            is_read = move.dst.tier is Tier.HBM and move.dst.block.realm.is_open_to(waiter.devices)
            assert is_read or move.dst.tier is Tier.CPU, "nobody waits for what cannot be read"
    for session in sessions.values():
        held = 0
        for ticket in session.tickets.values():
            if isinstance(ticket, SaveTicket):
                assert ticket.left == sum(c is not None for c in ticket.open) > 0
                held += ticket.left * ticket.realm.tier_bytes[Tier.CPU]
            else:
                assert not ticket.closed
                assert ticket.waiting == ticket.entries.count(Entry.WAITING)
                in_memory = ticket.entries.count(Entry.READY) + ticket.entries.count(Entry.TAKEN)
                assert ticket.open == ticket.waiting + in_memory
                held += in_memory * ticket.realm.tier_bytes[Tier.CPU]
        assert held == session.ticket_bytes
        moving = [t for m in state.moves.values() for t, _ in m.waiters if t.session is session]
        assert session.moving_bytes == sum(t.realm.tier_bytes[Tier.CPU] for t in moving)


def _triple(values: list[int]) -> tuple[int, int, int]:
    return values[0], values[1], values[2]
