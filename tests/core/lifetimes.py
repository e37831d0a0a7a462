"""A shell that keeps book of how long each block may live, by itself, and checks that nobody finds one after that."""

from __future__ import annotations

from kvtierd.core.block import Block
from kvtierd.core.realm import Realm
from kvtierd.core.saves import HELD, WHOLE, Request
from kvtierd.core.tickets import Entry, ReadTicket, SaveGrant, Session
from kvtierd.model import NO_END
from tests.core.shell import Shell

Place = tuple[int, bytes]


class MortalShell(Shell):
    """See the module. ``ttl_s`` is the life of blocks that are saved."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.ends: dict[Place, float] = {}
        self.lives: dict[int, float] = {}
        """Seconds by open save."""

    def expired(self) -> set[Place]:
        """Blocks that must not be found any more."""
        return {place for place, end_s in self.ends.items() if end_s <= self.now}

    def save(self, session: Session, realm: Realm, keys: list[bytes], request: Request = WHOLE) -> SaveGrant:
        life_s = NO_END if self.ttl_s is None else self.ttl_s
        grant = super().save(session, realm, keys, request)
        self.lives[grant.ticket_id] = life_s
        for key, outcome in zip(keys, grant.outcomes, strict=True):
            if outcome == HELD and key in realm.index:  # it may have gone right after
                place = self._place(realm, key)
                self.ends[place] = max(self.ends[place], self.now + life_s)
        return grant

    def commit(self, ticket_id: int, indexes: list[int] | None = None) -> list[Block]:
        published = super().commit(ticket_id, indexes)
        for block in published:
            self.ends[(block.realm.realm_id, block.key)] = self.now + self.lives[ticket_id]
        return published

    def put_hbm(self, realm: Realm, key: bytes) -> bool:
        done = super().put_hbm(realm, key)
        if done:
            self.ends[(realm.realm_id, key)] = NO_END
        return done

    def load(self, session: Session, realm: Realm, keys: list[bytes], wait_s: float = 10.0, *, each: bool = False) -> ReadTicket:
        ticket = super().load(session, realm, keys, wait_s, each=each)
        self._check_found(ticket, keys)
        return ticket

    def prefetch(self, session: Session, realm: Realm, keys: list[bytes], wait_s: float = 10.0) -> ReadTicket:
        ticket = super().prefetch(session, realm, keys, wait_s)
        self._check_found(ticket, keys)
        return ticket

    @staticmethod
    def _place(realm: Realm, key: bytes) -> Place:
        """A held block; in a shared realm it may be another's."""
        return realm.index[key].realm.realm_id, key

    def _check_found(self, ticket: ReadTicket, keys: list[bytes]) -> None:
        held = zip(keys, ticket.found_on, ticket.entries, strict=False)
        found = [key for key, mask, entry in held if mask and entry != Entry.MISSING]
        assert not {self._place(ticket.realm, key) for key in found} & self.expired()
        assert Entry.MISSING not in ticket.entries or ticket.each or ticket.prefetch or ticket.reason

    def check(self) -> None:
        super().check()
        expired = self.expired()
        for realm in self.core.state.realms.values():
            for key, block in realm.index.items():
                place = (block.realm.realm_id, key)
                if block.mask:
                    assert block.expires_s == self.ends[place]
                assert place not in expired or self.core.lookup(self.now, realm, [key])[0] == 0
