"""Goal: an extent that cannot be made costs what was to be in it and nothing else, and everything works again afterwards.

Method: a shell that refuses to make extents while it is told to, around the real core; all invariants are checked throughout.
"""

from __future__ import annotations

import pytest

from kvtierd.core.commands import Priority
from kvtierd.core.realm import Realm
from kvtierd.core.saves import BUSY
from kvtierd.core.slots import UNMADE_PAUSE_S, NewExtent
from kvtierd.core.tickets import GRANTED, SaveGrant, Session
from kvtierd.model import Result, Tier
from tests.core.shell import KIB, Shell, config, key_of

SLOT = 32 * KIB
"""Two slots an extent."""


class ShortShell(Shell):
    """Makes extents only while there is something to make them of."""

    def __init__(self, **changes: int) -> None:
        super().__init__(config(**changes))
        self.left = 1_000_000
        self.refused = 0

    def _new_extent(self, new: NewExtent) -> None:
        super()._new_extent(new)
        if self.left <= 0:
            self.refused += 1
            self.core.extent_failed(self.now, new.tier, new.extent_id)
        self.left -= 1

    def _start(self, command) -> None:  # type: ignore[no-untyped-def]
        moves = [m for m in command.moves if m.move_id in self.core.state.moves]
        if moves:
            super()._start(type(command)(command.src_tier, command.dst_tier, command.priority, tuple(moves)))

    def ask(self, session: Session, realm: Realm, count: int, first: int = 0) -> SaveGrant:
        """Save as the runtime does it: the grant is looked at again when the commands have run."""
        keys = [key_of(first + n) for n in range(count)]
        grant = self.core.save(self.now, session, realm, keys)
        self.run()
        self.core.check()
        return self.core.settle(session, grant)


def test_keys_without_memory_are_busy_and_the_others_are_granted() -> None:
    shell = ShortShell()
    realm = shell.realm(SLOT)
    session = shell.attach(realm)
    shell.left = 1
    grant = shell.ask(session, realm, 5)
    assert grant.outcomes == [GRANTED, GRANTED, BUSY, BUSY, BUSY]
    assert len(grant.slots) == 2
    assert len(shell.core.commit(shell.now, session, grant.ticket_id, [0, 1])) == 2, "indexes count what was granted"
    assert not session.tickets
    assert session.held_bytes == 0
    shell.run()
    shell.core.check()
    assert shell.core.snapshot().tiers[0].reserved_bytes == 2 * SLOT, "room that could not be used came back"
    assert shell.core.state.counts.failed_commands == {}, "the shell counts these"


def test_nothing_granted_is_no_ticket_and_works_again_after_a_pause() -> None:
    shell = ShortShell()
    realm = shell.realm(SLOT, SLOT)
    session = shell.attach(realm)
    shell.left = 0
    grant = shell.ask(session, realm, 3)
    assert (grant.ticket_id, grant.outcomes, grant.slots) == (0, [BUSY] * 3, [])
    assert not session.tickets
    shell.left = 1_000_000
    made = shell.refused
    assert shell.ask(session, realm, 3).outcomes == [BUSY] * 3, "not asked for again at once"
    assert shell.refused == made
    shell.now += UNMADE_PAUSE_S
    assert shell.ask(session, realm, 3).outcomes == [GRANTED] * 3
    assert shell.core.snapshot().tiers[0].pinned_bytes == 6 * SLOT


def test_of_a_block_with_two_shards_none_is_kept_when_one_cannot_be() -> None:
    shell = ShortShell()
    realm = shell.realm(SLOT, SLOT)
    session = shell.attach(realm)
    shell.left = 1  # the first shard's extent can be made, the second's not
    grant = shell.ask(session, realm, 2)
    assert grant.outcomes == [BUSY, BUSY]
    tier = shell.core.snapshot().tiers[0]
    assert (tier.used_bytes, tier.pinned_bytes) == (0, 0)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_promotion_without_memory_is_a_miss_and_its_block_stays(prefetch: bool) -> None:
    shell = ShortShell()
    realm = shell.realm(SLOT)
    session = shell.attach(realm)
    keys = [key_of(n) for n in range(4)]
    shell.put(session, realm, keys)
    shell.core.drain(shell.now, on=True)
    shell.run()
    shell.finish_all()
    shell.core.drain(shell.now, on=False)
    for extent in list(shell.core.state.pools[Tier.CPU].extents.values()):
        for owner in [o for o in extent.owners if o is not None]:
            shell.core.state.evict(shell.now, owner, "test")
        shell.core.state.pools[Tier.CPU].retire(extent)
    shell.run()
    shell.left = 0
    if prefetch:
        ticket = shell.core.prefetch(shell.now, session, realm, keys, shell.now + 5)
    else:
        ticket = shell.core.load(shell.now, session, realm, keys, shell.now + 5, each=True)
    shell.run()
    assert shell.refused
    assert not shell.moves
    shell.core.check()
    shell.now += 6
    shell.core.tick(shell.now)
    shell.run()
    assert shell.core.collect(shell.now, ticket)[2]
    assert not session.tickets
    assert shell.core.lookup(shell.now, realm, keys)[0] == 4, "what is on NVMe is still there"
    shell.left = 1_000_000
    again = shell.core.load(shell.now, session, realm, keys, shell.now + 5, each=True)
    shell.run()
    assert [m.priority for m, _ in shell.moves.values()] == [Priority.LOAD] * 4
    shell.finish_all()
    assert shell.core.collect(shell.now, again)[0] == [0, 1, 2, 3]


def test_a_demotion_without_an_extent_leaves_the_block_in_memory() -> None:
    shell = ShortShell()
    realm = shell.realm(SLOT)
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(1)])
    shell.left = 0
    shell.core.drain(shell.now, on=True)
    shell.run()
    shell.core.check()
    assert shell.refused == 1
    assert not shell.moves
    assert shell.core.lookup(shell.now, realm, [key_of(1)]) == (1, bytes([Tier.CPU.bit]))
    shell.left = 1_000_000
    for _ in range(40):
        shell.now += 1
        shell.core.tick(shell.now)
        shell.run()
    shell.finish_all(Result.OK)
    assert shell.core.undrained_bytes == 0


def test_an_extent_that_was_retired_before_it_failed_is_no_surprise() -> None:
    shell = ShortShell()
    realm = shell.realm(SLOT)
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(1)])
    (extent_id,) = shell.core.state.pools[Tier.CPU].extents
    shell.core.evict_keys(shell.now, realm, [key_of(1)])
    shell.core.state.pools[Tier.CPU].retire(shell.core.state.pools[Tier.CPU].extents[extent_id])
    shell.core.extent_failed(shell.now, Tier.CPU, extent_id)
    shell.run()
    shell.core.check()
