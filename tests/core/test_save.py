"""Save, commit, abort: outcomes, whole blocks, and who may do what."""

from __future__ import annotations

import pytest

from kvtierd.core.limits import Limits
from kvtierd.core.saves import BUSY, DRAINING, HELD, IN_PROGRESS, LIMIT, QUOTA, TOO_LARGE
from kvtierd.core.tickets import GRANTED
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Result, Tier
from tests.core.shell import KIB, Shell, config, key_of


def test_outcomes_held_and_in_progress() -> None:
    """Goal: a key is granted once; others are told that it is held or being saved, also within one call.

    Method: the same keys from two sessions before and after the commit.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    one, two = shell.attach(realm), shell.attach(realm)
    grant = shell.save(one, realm, [key_of(1), key_of(1), key_of(2)])
    assert grant.outcomes == [GRANTED, IN_PROGRESS, GRANTED]
    other = shell.save(two, realm, [key_of(1), key_of(3)])
    assert other.outcomes == [IN_PROGRESS, GRANTED]
    shell.commit(grant.ticket_id)
    assert shell.save(two, realm, [key_of(1), key_of(2), key_of(3)]).outcomes == [HELD, HELD, IN_PROGRESS]
    shell.abort(other.ticket_id)
    assert shell.save(two, realm, [key_of(3)]).outcomes == [GRANTED]
    shell.check()


def test_too_large() -> None:
    """Goal: a block that can never fit is refused as such.

    Method: a block of twice the tier.
    """
    shell = Shell(config(cpu=64 * KIB))
    realm = shell.realm(64 * KIB, 64 * KIB)
    assert shell.save(shell.attach(realm), realm, [key_of(1)]).outcomes == [TOO_LARGE]


def test_busy_then_free() -> None:
    """Goal: a tier full of slots that are being filled answers BUSY, and grants again when one comes back.

    Method: fill a tier with open tickets of two sessions, then abort one key.
    """
    shell = Shell(config(cpu=64 * KIB, nvme=0, max_ticket_share=1.0))
    realm = shell.realm(16 * KIB)
    one, two = shell.attach(realm), shell.attach(realm)
    grant = shell.save(one, realm, [key_of(i) for i in range(4)])
    assert grant.outcomes == [GRANTED] * 4
    assert shell.save(two, realm, [key_of(8), key_of(9)]).outcomes == [BUSY, BUSY]
    shell.abort(grant.ticket_id, [2])
    assert shell.save(two, realm, [key_of(8), key_of(9)]).outcomes == [GRANTED, BUSY]
    shell.check()


def test_busy_while_dirty_is_written_down() -> None:
    """Goal: what exists only in memory is not dropped while it can be written down: the caller is told to come back.

    Method: fill the tier, save one more: BUSY starts writing; after that there is room and nothing was lost.
    """
    shell = Shell(config(cpu=64 * KIB, free_target=0.0, max_ticket_share=1.0))
    realm = shell.realm(16 * KIB)
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(i) for i in range(4)])
    assert not shell.moves
    assert shell.save(session, realm, [key_of(8)]).outcomes == [BUSY]
    assert shell.moves
    shell.finish_all()
    assert shell.put(session, realm, [key_of(8)]).outcomes == [GRANTED]
    assert [shell.tiers(realm, key_of(i)) for i in (0, 1, 2)] == ["cn", "cn", "cn"]
    assert shell.tiers(realm, key_of(3)) == "n", "the leaf goes first"


def test_quota_takes_own_blocks_first() -> None:
    """Goal: over its quota a tenant pushes out its own oldest blocks, over all of its realms, and nobody else's.

    Method: two realms of a tenant with a quota of three blocks, and a neighbour; no lower tier.
    """
    shell = Shell(config(nvme=0), {"q": Limits((None, 12 * KIB, None))})
    first, second = shell.realm(4096, tenant="q", model="1"), shell.realm(4096, tenant="q", model="2")
    neighbour = shell.realm(4096, tenant="n")
    mine, other = shell.attach(first), shell.attach(neighbour)
    shell.put(other, neighbour, [key_of(1)])
    for i, realm in enumerate((first, second, first, second, first)):
        shell.now = i + 1.0
        assert shell.put(mine, realm, [key_of(i)]).outcomes == [GRANTED]
        assert shell.core.state.tenants["q"].used_bytes[Tier.CPU] <= 12 * KIB
    assert shell.tiers(first, key_of(0)) == "" and shell.tiers(second, key_of(1)) == ""
    assert shell.tiers(first, key_of(2)) == "c" and shell.tiers(neighbour, key_of(1)) == "c"
    shell.save(mine, first, [key_of(10), key_of(11), key_of(12)])
    assert shell.save(mine, first, [key_of(13)]).outcomes == [QUOTA], "all of its quota is being filled"
    shell.check()


def test_block_above_the_quota() -> None:
    """Goal: a block larger than the tenant's quota is refused for the quota and evicts nothing.

    Method: a quota of one page.
    """
    shell = Shell(config(), {"q": Limits((None, 4096, None))})
    small, large = shell.realm(4096, tenant="q"), shell.realm(8192, tenant="q")
    session = shell.attach(small)
    shell.put(session, small, [key_of(1)])
    assert shell.save(session, large, [key_of(2)]).outcomes == [QUOTA]
    assert shell.tiers(small, key_of(1)) == "c"


def test_draining_grants_nothing() -> None:
    """Goal: while draining no slots are granted, held keys are still told, and loads go on.

    Method: drain between two saves.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(1)])
    shell.drain()
    shell.finish_all()
    assert shell.core.undrained_bytes == 0
    assert shell.save(session, realm, [key_of(1), key_of(2)]).outcomes == [HELD, DRAINING]
    assert shell.get(session, realm, [key_of(1)]) == [0]
    shell.drain(on=False)
    assert shell.save(session, realm, [key_of(2)]).outcomes == [GRANTED]


def test_session_share_and_tickets_are_limited() -> None:
    """Goal: a session gets its share of memory and its number of tickets, no more; others are not affected.

    Method: half of eight slots each; two tickets at most.
    """
    shell = Shell(config(cpu=32 * KIB, max_tickets=2))
    realm = shell.realm(4096)
    one, two = shell.attach(realm), shell.attach(realm)
    grant = shell.save(one, realm, [key_of(i) for i in range(6)])
    assert grant.outcomes == [GRANTED] * 4 + [LIMIT] * 2
    assert shell.save(two, realm, [key_of(10)]).outcomes == [GRANTED]
    shell.commit(grant.ticket_id, [0, 1])
    assert shell.save(one, realm, [key_of(7)]).outcomes == [GRANTED]
    with pytest.raises(RequestError, match="tickets are open") as error:
        shell.save(one, realm, [key_of(8)])
    assert error.value.reason is Reason.LIMIT
    shell.check()


@pytest.mark.parametrize("call", ["commit", "abort"])
def test_foreign_and_closed_tickets(call: str) -> None:
    """Goal: only the session that owns a ticket may end it, once, and only with its indexes; nothing changes otherwise.

    Method: another session, a closed ticket, a closed index, an index out of range, and a load's ticket.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    one, two = shell.attach(realm), shell.attach(realm)
    act = getattr(shell.core, call)

    def refused(session, ticket_id, indexes=()) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(RequestError) as error:
            act(0.0, session, ticket_id, indexes)
        assert error.value.reason is Reason.UNKNOWN_TICKET
        shell.check()

    grant = shell.save(one, realm, [key_of(1), key_of(2), key_of(3)])
    refused(two, grant.ticket_id)
    shell.commit(grant.ticket_id, [1])
    refused(one, grant.ticket_id, [1])
    refused(one, grant.ticket_id, [0, 3])
    assert shell.tiers(realm, key_of(1)) == "" and shell.tiers(realm, key_of(2)) == "c"
    shell.commit(grant.ticket_id)
    refused(one, grant.ticket_id)
    refused(one, 0)
    refused(one, shell.load(one, realm, [key_of(1)]).ticket_id)


def test_session_end_returns_slots() -> None:
    """Goal: what a session had not committed is gone with it, and its slots come back at once.

    Method: detach with an open save, a load, and a prefetch.
    """
    shell = Shell(config(nvme=0))
    realm = shell.realm(4096)
    one, two = shell.attach(realm), shell.attach(realm)
    shell.put(one, realm, [key_of(1)])
    shell.save(one, realm, [key_of(2), key_of(3)])
    shell.load(one, realm, [key_of(1)])
    shell.prefetch(one, realm, [key_of(1)])
    shell.detach(one)
    state = shell.core.state
    assert state.pinned_bytes == [0, 0, 0] and state.copies[Tier.CPU] == 1
    assert shell.save(two, realm, [key_of(2)]).outcomes == [GRANTED]
    assert shell.tiers(realm, key_of(1)) == "c"
    shell.check()


def test_whole_blocks_over_shards() -> None:
    """Goal: a block of several shards is visible when it is committed as a whole, has one slot a shard, and is gone as one.

    Method: three shards of different sizes, each in extents of its own; evict, and recover the room.
    """
    shell = Shell(config(nvme=0))
    realm = shell.realm(4096, 12_288, 1)
    session = shell.attach(realm)
    grant = shell.save(session, realm, [key_of(1), key_of(2)])
    assert len(grant.slots) == 6 and len({s >> 32 for s in grant.slots}) == 3
    assert {(e.shard, e.slot_bytes) for e in shell.extents.values()} == {(0, 4096), (1, 12_288), (2, 4096)}
    assert shell.core.lookup(shell.now, realm, [key_of(1)])[0] == 0
    shell.commit(grant.ticket_id, [0])
    assert shell.core.lookup(shell.now, realm, [key_of(1), key_of(2)])[0] == 1
    assert shell.get(session, realm, [key_of(1)]) == [0]
    shell.evict(realm, [key_of(1)])
    assert shell.core.lookup(shell.now, realm, [key_of(1)])[0] == 0
    assert shell.core.state.pools[Tier.CPU].used_bytes == 4096 + 12_288 + 4096, "only the open one is left"
    shell.check()


def test_evicted_while_it_is_written() -> None:
    """Goal: a block that is evicted before its commit is not published, and its slots come back with the commit.

    Method: evict between save and commit; save the key again meanwhile.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    one, two = shell.attach(realm), shell.attach(realm)
    grant = shell.save(one, realm, [key_of(1)])
    assert shell.evict(realm, [key_of(1)]) == 1
    again = shell.save(two, realm, [key_of(1)])
    assert again.outcomes == [GRANTED] and again.slots != grant.slots
    assert shell.commit(grant.ticket_id) == []
    assert shell.core.lookup(shell.now, realm, [key_of(1)])[0] == 0
    assert [b.key for b in shell.commit(again.ticket_id)] == [key_of(1)]
    assert shell.core.state.copies[Tier.CPU] == 1
    shell.check()


def test_held_keys_of_a_save_do_not_make_room_for_its_new_ones() -> None:
    """Goal: a save counts its held keys as used before it makes room, so that the root never goes for its own leaf.

    Method: the root is the oldest block of a full tier; a save names it and two new keys.
    """
    shell = Shell(config(cpu=64 * KIB, nvme=0, max_ticket_share=1.0))
    realm = shell.realm(16 * KIB)
    session = shell.attach(realm)
    for i in range(4):
        shell.now = float(i)
        shell.put(session, realm, [key_of(i)])
    grant = shell.save(session, realm, [key_of(0), key_of(10), key_of(11)])
    assert grant.outcomes == [HELD, GRANTED, GRANTED]
    assert [shell.tiers(realm, key_of(i)) for i in range(4)] == ["c", "", "", "c"]


def test_held_is_never_said_of_what_had_to_go() -> None:
    """Goal: a key is not reported as held when room for the same call had to be made with it.

    Method: one call with more new keys than the rest of the tier has room for.
    """
    shell = Shell(config(cpu=64 * KIB, nvme=0, max_ticket_share=1.0))
    realm = shell.realm(16 * KIB)
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(0)])
    grant = shell.save(session, realm, [key_of(0)] + [key_of(i) for i in range(10, 14)])
    assert grant.outcomes == [BUSY] + [GRANTED] * 4
    assert grant.held == [] and shell.tiers(realm, key_of(0)) == ""


def test_counts_of_saves() -> None:
    """Goal: outcomes are counted by tenant.

    Method: a granted, a held and an open key.
    """
    shell = Shell(config())
    realm = shell.realm(4096, tenant="t")
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(1)])
    shell.save(session, realm, [key_of(1), key_of(2), key_of(2)])
    assert shell.core.state.counts.saves == {("t", "granted"): 2, ("t", "held"): 1, ("t", "in_progress"): 1}


@pytest.mark.parametrize("result", [Result.NO_SPACE, Result.IO_ERROR])
def test_dirty_is_dropped_when_it_cannot_be_written_down(result: Result) -> None:
    """Goal: a device that refuses writes does not stop saves: then the oldest goes, as without a lower tier.

    Method: fail a write, then save into a full tier.
    """
    shell = Shell(config(cpu=64 * KIB, free_target=0.0, max_ticket_share=1.0))
    realm = shell.realm(16 * KIB)
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(i) for i in range(4)])
    assert shell.save(session, realm, [key_of(8)]).outcomes == [BUSY]
    shell.finish_all(result)
    assert [shell.tiers(realm, key_of(i)) for i in range(4)] == ["c"] * 4, "a failed demotion takes nothing away"
    assert shell.put(session, realm, [key_of(8)]).outcomes == [GRANTED]
    shell.check()
