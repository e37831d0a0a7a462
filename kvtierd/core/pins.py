"""Pins: copies that an operator or a client keeps in place until a time, beyond the end of its session."""

from __future__ import annotations

from kvtierd.core.alarms import Alarms
from kvtierd.core.block import ready_copy
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.state import CoreState
from kvtierd.core.tickets import PinTicket
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier


class Pins:
    """Open pins over a :class:`CoreState`."""

    def __init__(self, state: CoreState, alarms: Alarms) -> None:
        self._state = state
        self._alarms = alarms
        self.open: dict[int, PinTicket] = {}
        """By ticket id."""

    def pin(
        self, now: float, realms: list[Realm], keys: list[bytes], expires_s: float, *, tenant: Tenant | None = None
    ) -> PinTicket:
        """Keep the fastest copy of each held key in place until ``expires_s`` (a time, not a duration).

        The realms are one tenant's when a client asks, and the pin counts against what that tenant may pin. An operator may name
        several; those pins count only among all.

        Raises:
            RequestError: LIMIT when pins would hold more than their part of a tier.
        """
        state = self._state
        found = dict.fromkeys(realm.index.get(key) for realm in realms for key in keys)  # shared realms find one block twice
        copies = [ready_copy(block) for block in found if block is not None and block.mask and block.expires_s > now]
        size = [0, 0, 0]
        for copy in copies:
            size[copy.tier] += copy.block.realm.tier_bytes[copy.tier]
        for tier in state.tiers:
            if size[tier]:
                self._check_room(tier, size[tier], tenant)
        ticket = PinTicket(
            next(state.ids), {r.tenant.name for r in realms}, copies, expires_s, size, tenant.name if tenant else None
        )
        for copy in copies:
            state.pin(copy)
        if copies:
            self.open[ticket.ticket_id] = ticket
            self._alarms.set(expires_s, ticket.ticket_id)
        return ticket

    def _check_room(self, tier: Tier, size_bytes: int, tenant: Tenant | None) -> None:
        """Raise RequestError LIMIT when so much more would be too much of a tier, for its tenant or for all."""
        state = self._state
        part = state.config.max_ticket_share
        own = held = size_bytes
        for ticket in self.open.values():
            held += ticket.size_bytes[tier]
            if tenant is not None and ticket.tenant == tenant.name:
                own += ticket.size_bytes[tier]
        if tenant is not None:
            entitled = state.shares.share_bytes(tenant, tier)
            quota = tenant.limits.quota(tier)
            name, what = ("share", "policy.fair_share") if quota is None or quota >= entitled else ("quota", "its quota")
            limit = int(part * (entitled if name == "share" else quota or 0))
            if own > limit:
                raise RequestError(
                    Reason.LIMIT,
                    f"pins of tenant {tenant.name!r} would hold {own} bytes of {tier.name}; at most {limit}, {part:.0%} of its "
                    f"{name}: unpin or pin fewer keys, or have an operator pin them or raise {what}",
                )
        limit = int(part * state.config.capacity_bytes[tier])
        if held > limit:  # how much is left would tell a tenant what the others have pinned
            raise RequestError(
                Reason.LIMIT, f"all pins together may hold at most {limit} bytes of {tier.name}: unpin or pin fewer keys"
            )

    def unpin(self, now: float, ticket_id: int, tenant: str | None) -> None:
        """Take a pin back. Raises RequestError UNKNOWN_TICKET when it expired, or is another tenant's."""
        ticket = self.open.get(ticket_id)
        if ticket is None or (tenant is not None and ticket.tenants != {tenant}):
            raise RequestError(Reason.UNKNOWN_TICKET, f"pin {ticket_id} is not there: it expired or was taken back")
        self.drop(now, ticket)

    def drop(self, now: float, ticket: PinTicket) -> None:
        """End a pin, if it has not ended yet."""
        if self.open.pop(ticket.ticket_id, None) is not None:
            for copy in ticket.copies:
                self._state.unpin(now, copy)
