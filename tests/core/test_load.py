"""Load and prefetch: order, deadlines, bounds, pins."""

from __future__ import annotations

import pytest

from kvtierd.core.commands import Priority
from kvtierd.core.limits import Limits
from kvtierd.core.realm import Realm
from kvtierd.core.tickets import Entry, ReadTicket, Session
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Result, Tier
from tests.core.shell import KIB, Shell, config, key_of


def on_nvme(shell: Shell, session: Session, realm: Realm, keys: list[bytes]) -> None:
    """Put keys on NVMe only."""
    for key in keys:
        shell.put(session, realm, [key])
        shell.drain()
        shell.finish_all()
        shell.drain(on=False)
        shell.evict(realm, [key], Tier.CPU)
        assert shell.tiers(realm, key) == "n"


def keys(*numbers: int) -> list[bytes]:
    """Keys of numbers."""
    return [key_of(n) for n in numbers]


def test_prefix_stops_at_the_first_miss() -> None:
    """Goal: without ``each`` a load ends at the first key that is not held; with it every held key comes.

    Method: keys 1, 2 and 4 of four.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, keys(1, 2, 4))
    assert shell.get(session, realm, keys(1, 2, 3, 4)) == [0, 1]
    assert shell.get(session, realm, keys(1, 2, 3, 4), each=True) == [0, 1, 3]
    assert shell.get(session, realm, keys(3)) == []
    assert not session.tickets
    tenant = realm.tenant
    assert tenant.hits == [0, 5, 0] and tenant.misses == 4
    shell.check()


def test_keys_come_in_order_as_they_become_readable() -> None:
    """Goal: keys are handed out in order, each as soon as all before it are readable, whatever order the device answers in.

    Method: the first on CPU, the others on NVMe; moves end from last to first.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(2, 3, 4))
    shell.put(session, realm, keys(1))
    ticket = shell.load(session, realm, keys(1, 2, 3, 4))
    assert list(ticket.found_on) == [Tier.CPU.bit] + [Tier.NVME.bit] * 3
    assert shell.collect(ticket) == ([0], False)
    second, third, fourth = sorted(shell.moves)
    shell.finish(third)
    assert shell.collect(ticket) == ([], False)
    shell.finish(second)
    assert shell.collect(ticket) == ([1, 2], False)
    shell.release(ticket, [0, 1])
    shell.finish(fourth)
    assert ticket in shell.progress
    assert shell.collect(ticket) == ([3], True)
    shell.release(ticket)
    assert shell.core.state.pinned_bytes == [0, 0, 0]
    assert shell.tiers(realm, key_of(3)) == "cn", "a promotion keeps the copy on NVMe"
    shell.check()


def test_release_wants_what_was_handed_out() -> None:
    """Goal: only handed out indexes of an own, open load can be released; releasing one twice changes nothing.

    Method: release too early, twice, from another session, and a ticket that is over.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session, other = shell.attach(realm), shell.attach(realm)
    shell.put(session, realm, keys(1, 2))
    ticket = shell.load(session, realm, keys(1, 2))
    wrong = [(session, [0], Reason.BAD_REQUEST), (other, [0], Reason.UNKNOWN_TICKET), (session, [2], Reason.BAD_REQUEST)]
    for owner, indexes, reason in wrong:
        with pytest.raises(RequestError) as error:
            shell.core.release(0.0, owner, ticket.ticket_id, indexes)
        assert error.value.reason is reason
    shell.collect(ticket)
    shell.release(ticket, [1])
    shell.core.release(0.0, session, ticket.ticket_id, [1])
    assert shell.core.state.pinned_bytes[Tier.CPU] == 4096
    shell.check()
    shell.release(ticket)
    with pytest.raises(RequestError):
        shell.core.release(0.0, session, ticket.ticket_id)


def test_past_the_deadline_the_rest_is_a_miss() -> None:
    """Goal: at the deadline what was not handed out is a miss with that reason and unpinned; what was handed out stays pinned.

    Method: two keys handed out, one readable but not taken, one waiting.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(3, 4))
    shell.put(session, realm, keys(1, 2))
    ticket = shell.load(session, realm, keys(1, 2, 3, 4), wait_s=5.0)
    assert shell.collect(ticket) == ([0, 1], False)
    shell.finish(min(shell.moves))
    assert ticket.entries[2] == Entry.READY
    shell.wait(4.9)
    assert ticket.entries[2] == Entry.READY and not ticket.reason
    shell.wait(0.2)
    assert ticket.reason is Reason.DEADLINE
    assert list(ticket.entries) == [Entry.TAKEN, Entry.TAKEN, Entry.MISSING, Entry.MISSING]
    assert shell.collect(ticket) == ([], True)
    assert shell.core.progress(ticket)[2]
    assert shell.core.state.pinned_bytes[Tier.CPU] == 2 * 4096 + 4096, "two taken, one being promoted"
    shell.finish_all()
    assert shell.core.state.pinned_bytes == [0, 2 * 4096, 0]
    shell.release(ticket)
    assert shell.core.state.pinned_bytes == [0, 0, 0]
    assert shell.tiers(realm, key_of(4)) == "cn", "the promotion was not in vain"


def test_abandoned_load_keeps_what_was_taken() -> None:
    """Goal: when the caller goes away what it was given stays until it is released, the rest is unpinned.

    Method: abandon after the first of three.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(2))
    shell.put(session, realm, keys(1, 3))
    ticket = shell.load(session, realm, keys(1, 2, 3))
    shell.collect(ticket)
    shell.core.abandon(shell.now, ticket)
    shell.finish_all()
    assert shell.core.state.pinned_bytes == [0, 4096, 0]
    assert not ticket.closed
    shell.release(ticket)
    assert ticket.closed and shell.core.state.pinned_bytes == [0, 0, 0]
    shell.core.abandon(shell.now, ticket)
    shell.check()


@pytest.mark.parametrize("result, reason", [(Result.CORRUPT, Reason.CORRUPT), (Result.IO_ERROR, Reason.IO)])
def test_unreadable_block_is_a_miss_and_is_forgotten(result: Result, reason: Reason) -> None:
    """Goal: a block that cannot be read is a miss for all who wait, its copy is forgotten before its slots are used again.

    Method: fail the second of three blocks; two sessions wait. The shell checks that the removal comes before any reuse and
    that a crash would not recover it.
    """
    shell = Shell(config())
    realm = shell.realm(4096, 8192)
    one, two = shell.attach(realm), shell.attach(realm)
    on_nvme(shell, one, realm, keys(1, 2, 3))
    first, second = shell.load(one, realm, keys(1, 2, 3)), shell.load(two, realm, keys(2), each=True)
    assert len(shell.moves) == 3, "one move serves both"
    bad = next(i for i, (m, _) in shell.moves.items() if m.src.block.key == key_of(2))
    shell.finish(bad, result)
    shell.finish_all()
    assert shell.tiers(realm, key_of(2)) == ""
    assert all(key != key_of(2) for _, key, _ in shell.disk)
    assert shell.collect(first) == ([0], True) and shell.collect(second) == ([], True)
    assert first.reason is reason and second.reason is reason
    assert second.closed
    shell.release(first)
    assert shell.core.state.pinned_bytes == [0, 0, 0]
    on_nvme(shell, one, realm, keys(2, 4, 5))
    assert shell.get(one, realm, keys(2)) == [0]
    shell.check()


def test_promotions_in_flight_are_bounded() -> None:
    """Goal: no more than ``max_promote_bytes`` is on its way up, yet one block always may; loads go before prefetches.

    Method: a bound of two blocks; a prefetch queued first, then a load.
    """
    shell = Shell(config(max_promote_bytes=8192))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(*range(10)))
    shell.prefetch(session, realm, keys(0, 1, 2, 3, 4))
    shell.load(session, realm, keys(5, 6, 7))
    started = []
    while shell.moves:
        assert sum(m.size_bytes for m, _ in shell.moves.values()) <= 8192
        move_id = min(shell.moves)
        started.append(int.from_bytes(shell.moves[move_id][0].src.block.key, "big"))
        shell.finish(move_id)
    assert started == [0, 1, 5, 6, 7, 2, 3, 4]
    large = Shell(config(max_promote_bytes=1))
    realm = large.realm(4096)
    session = large.attach(realm)
    on_nvme(large, session, realm, keys(1, 2))
    large.load(session, realm, keys(1, 2))
    assert len(large.moves) == 1
    large.finish_all()
    assert large.tiers(realm, key_of(2)) == "cn"


def test_small_prefetches_do_not_overtake_a_large_load() -> None:
    """Goal: a load that waits for bytes in flight is next, also when a smaller prefetch would still fit.

    Method: three of four pages are on their way up; a load of two pages waits, a prefetch of one page must wait behind it.
    """
    shell = Shell(config(max_promote_bytes=16 * KIB))
    small, large = shell.realm(4096), shell.realm(8192)
    session = shell.attach(small)
    on_nvme(shell, session, small, keys(1, 2, 3, 4))
    on_nvme(shell, session, large, keys(9))
    shell.load(session, small, keys(1, 2, 3))
    shell.load(session, large, keys(9))
    shell.prefetch(session, small, keys(4))
    assert len(shell.moves) == 3
    shell.finish(min(shell.moves))
    assert shell.moves[max(shell.moves)][0].src.block.realm is large
    shell.check()


def test_session_that_is_full_does_not_block_others() -> None:
    """Goal: a session whose tickets hold their share waits for itself; loads of others go on.

    Method: one session takes half of the tier and wants more; another loads.
    """
    shell = Shell(config(cpu=64 * KIB, max_promote_bytes=1 << 20))
    realm = shell.realm(4096)
    one, two = shell.attach(realm), shell.attach(realm)
    on_nvme(shell, one, realm, keys(*range(14)))
    greedy = shell.load(one, realm, keys(*range(12)), wait_s=100)
    assert len(shell.moves) == 8, "also what is on its way counts"
    modest = shell.load(two, realm, keys(12, 13), wait_s=100)
    shell.finish_all()
    assert one.ticket_bytes == 32 * KIB and greedy.waiting == 4
    assert shell.collect(modest) == ([0, 1], True)
    shell.release(modest)
    assert len(shell.collect(greedy)[0]) == 8
    shell.release(greedy, [0, 1, 2, 3])
    shell.finish_all()
    assert shell.collect(greedy) == ([8, 9, 10, 11], True)
    shell.release(greedy)
    shell.check()


@pytest.mark.parametrize("held_in", ["c", "n"])
def test_who_keeps_all_waits_for_nothing_that_only_he_could_give_back(held_in: str) -> None:
    """Goal: a load whose reader releases nothing before the end gets what its session may hold, and the rest is a miss at once.

    Method: 12 blocks of which a session may hold 8, all in memory or all on NVMe; alone, beside another such load that waits too,
    and beside one that will be released.
    """
    shell = Shell(config(cpu=64 * KIB, max_promote_bytes=1 << 20))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    if held_in == "n":
        on_nvme(shell, session, realm, keys(*range(14)))
    else:
        shell.put(session, realm, keys(*range(8)))
        shell.put(session, realm, keys(*range(8, 14)))

    def got(ticket: ReadTicket) -> list[int]:
        shell.finish_all()
        return shell.collect(ticket)[0]

    alone = shell.load(session, realm, keys(*range(12)), wait_s=100, keeps=True)
    assert got(alone) == list(range(8)) and (alone.waiting, alone.reason) == (0, Reason.LIMIT)
    beside = shell.load(session, realm, keys(12, 13), wait_s=100, keeps=True)
    assert got(beside) == [] and beside.waiting == 2, "the other one ends"
    shell.release(alone)
    assert got(beside) == [0, 1]
    shell.release(beside)

    reader = shell.load(session, realm, keys(*range(6)), wait_s=100)
    first = shell.load(session, realm, keys(*range(6, 12)), wait_s=100, keeps=True)
    second = shell.load(session, realm, keys(12, 13), wait_s=100, keeps=True)
    assert (len(got(reader)), len(got(first)), len(got(second))) == (6, 2, 0)
    assert (first.waiting, second.waiting) == (4, 2), "the reader gives back"
    shell.release(reader)
    assert got(first) == [2, 3, 4, 5]
    assert got(second) == [0, 1]
    for ticket in (first, second):
        shell.release(ticket)
    shell.check()


def test_a_load_leaves_room_for_its_own_first_keys() -> None:
    """Goal: what a load holds of later keys never takes the session's share that its first keys need to come up.

    Method: half of memory may be held; the first two keys are on NVMe, as many as may be held lie in memory behind them.
    """
    shell = Shell(config(cpu=64 * KIB))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(1, 2))
    shell.put(session, realm, keys(*range(3, 11)))
    ticket = shell.load(session, realm, keys(*range(1, 11)), wait_s=50)
    assert session.held_bytes == 32 * KIB and len(shell.moves) == 2
    shell.finish_all()
    assert shell.collect(ticket) == ([0, 1, 2, 3, 4, 5, 6, 7], False)
    shell.release(ticket, [0, 1])
    assert shell.collect(ticket) == ([8, 9], True)
    shell.release(ticket)
    shell.check()


@pytest.mark.parametrize("each", [False, True])
def test_a_load_does_not_pin_the_last_of_memory_before_its_first_keys_are_up(each: bool) -> None:
    """Goal: a load whose first key has to come up never pins all memory with later ones, but leaves out what is too much.

    Method: memory full of blocks that are held nowhere else, and a load of all of them behind one that is on NVMe only.
    """
    shell = Shell(config(cpu=64 * KIB, free_target=0.0))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(0))
    for first in (1, 9):
        shell.put(session, realm, keys(*range(first, first + 8)))
    ticket = shell.load(session, realm, keys(*range(17)), wait_s=50, each=each)
    assert ticket.open == 16 and ticket.reason is Reason.BUSY
    got: list[int] = []
    while True:
        shell.finish_all()
        indexes, is_all = shell.collect(ticket)
        got += indexes
        if is_all:
            break
        assert indexes, "a load waits for itself"
        shell.release(ticket, indexes)
    assert got == list(range(16))
    shell.release(ticket)
    shell.check()


def test_realm_without_room_does_not_block_others() -> None:
    """Goal: a load for which nothing can be freed waits alone; loads of other realms and tenants go on.

    Method: a tenant whose quota is being filled wants to load; another tenant loads after it.
    """
    shell = Shell(config(cpu=256 * KIB), {"q": Limits((None, 8192, None))})
    tight, free = shell.realm(4096, tenant="q"), shell.realm(4096, tenant="f")
    mine, other = shell.attach(tight), shell.attach(free)
    on_nvme(shell, mine, tight, keys(1))
    on_nvme(shell, other, free, keys(1))
    shell.put(mine, tight, keys(7))
    shell.save(mine, tight, keys(8))
    stuck = shell.load(mine, tight, keys(1), wait_s=50)
    assert stuck.waiting == 1, "its dirty block has to be written down first"
    going = shell.load(other, free, keys(1), wait_s=50)
    assert {m.src.block.realm for m, _ in shell.moves.values() if m.priority is Priority.LOAD} == {free}
    shell.finish_all()
    assert shell.collect(going) == ([0], True) and shell.collect(stuck) == ([0], True)
    shell.check()


def test_room_that_a_miss_gives_back_is_used() -> None:
    """Goal: when a load ends early the loads that waited for its session's share start, without another event.

    Method: a full session; the first block of its load turns out to be unreadable.
    """
    shell = Shell(config(cpu=64 * KIB))
    realm = shell.realm(16 * KIB)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(1, 5))
    shell.put(session, realm, keys(2))
    full = shell.load(session, realm, keys(1, 2), wait_s=50)
    later = shell.load(session, realm, keys(5), wait_s=50)
    assert len(shell.moves) == 1
    shell.finish(min(shell.moves), Result.CORRUPT)
    shell.finish_all()
    assert shell.collect(full) == ([], True)
    shell.finish_all()
    assert shell.collect(later) == ([0], True)
    shell.check()


def test_prefetch_pins_until_its_deadline() -> None:
    """Goal: a prefetch brings blocks up and keeps them; its deadline or Cancel returns the pins.

    Method: two prefetches, one cancelled, one left to its deadline.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    on_nvme(shell, session, realm, keys(1, 2, 3))
    left = shell.prefetch(session, realm, keys(1, 2, 9), wait_s=5)
    gone = shell.prefetch(session, realm, keys(3), wait_s=5)
    assert shell.core.progress(left) == (2, 0, False)
    shell.finish_all()
    assert shell.core.progress(left) == (2, 2, True)
    assert shell.core.state.pinned_bytes == [0, 3 * 4096, 0]
    shell.core.cancel(shell.now, session, gone.ticket_id)
    assert shell.core.state.pinned_bytes == [0, 2 * 4096, 0]
    with pytest.raises(RequestError):
        shell.core.cancel(shell.now, session, gone.ticket_id)
    with pytest.raises(RequestError):
        shell.core.release(shell.now, session, left.ticket_id)
    shell.wait(5.1)
    assert left.closed and not session.tickets and shell.core.state.pinned_bytes == [0, 0, 0]
    assert shell.tiers(realm, key_of(1)) == "cn"
    shell.check()


def test_load_takes_over_its_prefetch_and_no_other() -> None:
    """Goal: a load ends the prefetch that was made for it, also when it leaves the last block out; prefetches of other
    requests that begin with the same blocks go on.

    Method: two prompts with the same head; load one of them.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, keys(0, 1, 11, 12, 21, 22))
    mine = shell.prefetch(session, realm, keys(0, 1, 11, 12))
    other = shell.prefetch(session, realm, keys(0, 1, 21, 22))
    ticket = shell.load(session, realm, keys(0, 1, 11))
    assert mine.closed and not other.closed
    shell.collect(ticket)
    shell.release(ticket)
    assert not other.closed
    ticket = shell.load(session, realm, keys(0, 1, 21, 22))
    assert other.closed
    shell.collect(ticket)
    shell.release(ticket)
    assert shell.core.state.pinned_bytes == [0, 0, 0]
    shell.check()


def test_evict_while_it_is_read() -> None:
    """Goal: an evicted block is found by nobody from then on, while its readers keep their bytes until they let go.

    Method: evict a key that was handed out, one that waits, and save it anew while the old bytes are still being read.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    one, two = shell.attach(realm), shell.attach(realm)
    on_nvme(shell, one, realm, keys(2))
    shell.put(one, realm, keys(1))
    ticket = shell.load(one, realm, keys(1, 2))
    shell.collect(ticket)
    assert shell.evict(realm, keys(1, 2)) == 3
    assert shell.core.lookup(shell.now, realm, keys(1, 2), each=True)[0] == 0
    shell.put(two, realm, keys(1))
    assert shell.get(two, realm, keys(1)) == [0]
    shell.finish_all()
    assert shell.collect(ticket) == ([], True), "the promotion ended after the eviction: a miss"
    shell.release(ticket)
    assert shell.core.state.copies == [0, 1, 0] and not shell.disk
    shell.check()


def test_pins_hold_and_expire() -> None:
    """Goal: pinned blocks stay whatever the need of room, until Unpin or the expiry; pins have a bound; an eviction wins.

    Method: pin one of four blocks in a tier without a lower one, save over it.
    """
    shell = Shell(config(cpu=64 * KIB, nvme=0))
    realm, foreign = shell.realm(16 * KIB), shell.realm(4096, tenant="x")
    session = shell.attach(realm)
    for i in range(4):
        shell.put(session, realm, keys(i))
    pin = shell.pin(realm, keys(0, 9), wait_s=100)
    assert len(pin.copies) == 1
    for i in range(10, 20):
        shell.put(session, realm, keys(i))
    assert shell.tiers(realm, key_of(0)) == "c"
    with pytest.raises(RequestError, match="unpin or pin fewer") as error:
        shell.pin(realm, keys(17, 18, 19))
    assert error.value.reason is Reason.LIMIT
    with pytest.raises(RequestError):
        shell.core.unpin(shell.now, pin.ticket_id, foreign.tenant.name)
    shell.core.unpin(shell.now, pin.ticket_id, realm.tenant.name)
    again = shell.pin(realm, keys(19), wait_s=2.0)
    shell.wait(2.1)
    with pytest.raises(RequestError):
        shell.core.unpin(shell.now, again.ticket_id)
    shell.pin(realm, keys(19))
    shell.evict(realm, keys(19))
    assert shell.tiers(realm, key_of(19)) == ""
    assert shell.core.state.pinned_bytes[Tier.CPU] == 16 * KIB, "its slots stay until the pin is gone"
    shell.wait(11)
    assert shell.core.state.pinned_bytes == [0, 0, 0]
    shell.check()


def test_load_of_a_failed_copy_down_is_answered() -> None:
    """Goal: a load that waits for a block on its way from HBM to CPU memory is answered when that fails.

    Method: the TTL of HBM starts the copy; a load joins it; the copy fails.
    """
    shell = Shell(config(hbm=64 * KIB))
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put_hbm(realm, key_of(1))
    shell.wait(30.1)
    assert len(shell.moves) == 1
    ticket = shell.load(session, realm, keys(1))
    assert len(shell.moves) == 1
    shell.finish_all(Result.IO_ERROR)
    assert shell.collect(ticket) == ([], True)
    assert shell.tiers(realm, key_of(1)) == "", "what cannot be read is forgotten"
    assert not shell.core.state.turns.suspended, "and CPU memory has nothing to do with it"
    shell.check()
