"""The transition table, the LRU list, and what the core tells about itself."""

from __future__ import annotations

import inspect
import itertools
import re

import pytest

from kvtierd.core import adoption, block, commands, expiry, movement, pins, realm, slots, space, state, tickets, tier_core
from kvtierd.core.block import TRANSITIONS, Block, Copy, CopyState, LruList
from kvtierd.core.state import CoreState
from kvtierd.model import Tier
from tests.core.shell import KIB, Shell, config, key_of


@pytest.mark.parametrize("start, finish", list(itertools.product(CopyState, CopyState)))
def test_only_listed_changes_are_possible(start: CopyState, finish: CopyState) -> None:
    """Goal: a copy can only change as the table says.

    Method: a copy is brought into each state and asked to go to each other; what is not listed raises and changes nothing.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    core = shell.core
    slots = core._space.allocate(0.0, Tier.CPU, realm)
    assert isinstance(slots, tuple)
    copy = Copy(Block(key_of(1), realm, 0.0), Tier.CPU, slots[0])
    for step in {CopyState.ABSENT: [], CopyState.DOOMED: [1, 3]}.get(start, range(1, start + 1)):
        core.state.set_state(0.0, copy, CopyState(step), "test")
        if step == CopyState.FILLING and start is not CopyState.FILLING:
            core.state.pin(copy)
    assert copy.state is start
    if (start, finish) in TRANSITIONS:
        if finish is CopyState.ABSENT:
            while copy.pins:
                copy.pins -= 1  # slots may only go without pins
        core.state.set_state(0.0, copy, finish, "test")
        assert copy.state is finish
    else:
        with pytest.raises(AssertionError, match=f"{start.name} to {finish.name}"):
            core.state.set_state(0.0, copy, finish, "test")
        assert copy.state is start


def test_states_change_in_the_mutator_only() -> None:
    """Goal: nothing else in the core sets a copy's state, but for the bulk form of ABSENT to READY after a restart.

    Method: find the assignments in the sources.
    """
    text = "".join(
        inspect.getsource(m)
        for m in (adoption, block, commands, expiry, movement, pins, realm, slots, space, state, tickets, tier_core)
    )
    assert len(re.findall(r"\bcopy\.state = |\b(?:source|target|owner|victim|upper)\.state = ", text)) == 2
    assert "copy.state = finish" in inspect.getsource(CoreState.set_state)
    assert "copy.state = CopyState.READY" in inspect.getsource(adoption.adopt_blocks)


def test_lru_list_keeps_its_order() -> None:
    """Goal: appending at both ends and removing anywhere keeps links and length right.

    Method: the same operations on a plain list.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    copies = [Copy(Block(key_of(i), realm, 0.0), Tier.CPU, i) for i in range(6)]
    lru, plain = LruList(), []
    for i, copy in enumerate(copies):
        if i % 3 == 2:
            lru.append_oldest(copy)
            plain.insert(0, copy)
        else:
            lru.append(copy)
            plain.append(copy)
    for gone in (copies[3], plain[0], plain[-1]):
        lru.remove(gone)
        plain.remove(gone)
    forward, node = [], lru.oldest
    while node is not None:
        forward.append(node)
        node = node.newer
    backward, node = [], lru.newest
    while node is not None:
        backward.append(node)
        node = node.older
    assert forward == plain and backward == plain[::-1] and lru.length == 3
    with pytest.raises(AssertionError):
        lru.remove(gone)


def test_story_tells_what_happened_to_a_block() -> None:
    """Goal: the changes of one block can be read, oldest first, with their reasons.

    Method: save, write down, evict; compare the story.
    """
    shell = Shell(config())
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(1), key_of(2)])
    shell.drain()
    shell.finish_all()
    shell.evict(realm, [key_of(1)])
    told = [(e.tier, e.start, e.finish, e.why) for e in shell.core.story(key_of(1))]
    absent, filling, ready = CopyState.ABSENT, CopyState.FILLING, CopyState.READY
    assert told == [
        (Tier.CPU, absent, filling, "save"),
        (Tier.CPU, filling, ready, "commit"),
        (Tier.NVME, absent, filling, "drain"),
        (Tier.NVME, filling, ready, "drain"),
        (Tier.CPU, ready, absent, "request"),
        (Tier.NVME, ready, absent, "request"),
    ]
    assert len(shell.core.story(b"")) > len(told)
    assert shell.core.story(b"\xff") == []


def test_snapshot_shows_occupancy() -> None:
    """Goal: figures equal what was done; reading them changes nothing.

    Method: two blocks, one written down, one being loaded; compare every figure twice.
    """
    shell = Shell(config(cpu=256 * KIB))
    realm = shell.realm(4096, tenant="t")
    session = shell.attach(realm)
    shell.put(session, realm, [key_of(1), key_of(2)])
    shell.drain()
    shell.finish(min(shell.moves))
    shell.finish_all()
    shell.drain(on=False)
    shell.evict(realm, [key_of(1)], Tier.CPU)
    ticket = shell.load(session, realm, [key_of(1), key_of(3)])
    before = shell.core.snapshot()
    assert before == shell.core.snapshot()
    cpu, nvme = before.tiers
    assert (cpu.tier, cpu.copies, cpu.used_bytes, cpu.dirty_bytes) == (Tier.CPU, 2, 8192, 0)
    assert (nvme.tier, nvme.copies, nvme.used_bytes, nvme.pinned_bytes) == (Tier.NVME, 2, 16_384, 8192)
    assert cpu.reserved_bytes == 64 * KIB and cpu.capacity_bytes == 256 * KIB
    (tenant,) = before.tenants
    assert (tenant.tenant, tenant.blocks, tenant.used_bytes) == ("t", 2, (0, 8192, 16_384))
    assert (tenant.hits, tenant.misses) == ((0, 0, 1), 1)
    assert (before.blocks, before.sessions, before.tickets) == (2, 1, 1)
    shell.finish_all()
    shell.collect(ticket)
    shell.release(ticket)
    assert shell.core.snapshot().tickets == 0
    shell.check()


def test_lookup_changes_nothing() -> None:
    """Goal: looking a key up renews nothing and tells the prefix, or each key.

    Method: a block that is looked up often goes before one that is not.
    """
    shell = Shell(config(cpu=64 * KIB, nvme=0))
    realm = shell.realm(32 * KIB)
    session = shell.attach(realm)
    for i in (1, 2):
        shell.put(session, realm, [key_of(i)])
        shell.now += 1
    keys = [key_of(1), key_of(9), key_of(2)]
    for _ in range(3):
        assert shell.core.lookup(shell.now, realm, keys) == (1, bytes([Tier.CPU.bit]))
        assert shell.core.lookup(shell.now, realm, keys, each=True) == (2, bytes([Tier.CPU.bit, 0, Tier.CPU.bit]))
    shell.put(session, realm, [key_of(3)])
    assert shell.tiers(realm, key_of(1)) == "" and shell.tiers(realm, key_of(2)) == "c"


def test_realms_are_isolated() -> None:
    """Goal: a key saved by one tenant, or for another layout, is found by nobody else.

    Method: the same key in four realms; each has its own bytes, which the shell compares on load.
    """
    shell = Shell(config())
    realms = [shell.realm(4096, tenant=t, model=m) for t in "ab" for m in "xy"]
    sessions = [shell.attach(r) for r in realms]
    shell.put(sessions[0], realms[0], [key_of(1)])
    assert [shell.tiers(r, key_of(1)) for r in realms] == ["c", "", "", ""]
    for session, own in zip(sessions, realms, strict=True):
        shell.put(session, own, [key_of(1)])
    for session, own in zip(sessions, realms, strict=True):
        assert shell.get(session, own, [key_of(1)]) == [0]
    shell.evict(realms[1], [key_of(1)])
    assert [shell.tiers(r, key_of(1)) for r in realms] == ["c", "", "c", "c"]
