"""Places for realms: those that nobody uses give theirs up, so that new model versions never find the daemon full."""

from __future__ import annotations

import pytest

from kvtierd.core.limits import Limits
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Tier
from tests.core.shell import KIB, Shell, config
from tests.core.test_load import keys


def test_a_realm_past_the_last_place_takes_that_of_an_unused_one() -> None:
    """Goal: thousands of namespaces one after the other fit into three places, and nothing of the former is left.

    Method: each namespace saves, is written down, and loses all of its blocks; then its session ends.
    """
    shell = Shell(config(max_realms=3))
    for number in range(50):
        realm = shell.realm(4096, tenant=f"t{number}", model=f"v{number}")
        session = shell.attach(realm)
        shell.put(session, realm, keys(1, 2))
        shell.evict(realm, keys(1, 2))
        shell.detach(session)
        shell.core.check()
    state = shell.core.state
    assert len(state.realms) == len(state.realm_ids) == len(state.tenants) <= 3
    assert max(state.realms) == 50, "ids are never used twice"
    assert sum(len(heap._listed) for heap in (*state.turns.dirty, *state.turns.ttl, *state.turns.nvme.values())) <= 12


def test_no_place_is_a_limit_that_says_what_to_do() -> None:
    """Goal: what holds blocks or has a session keeps its place; the next realm is refused until one is free.

    Method: three places: one with a block, one with a session, one that the shell says it is about to use.
    """
    shell = Shell(config(max_realms=3))
    first, second, third = (shell.realm(4096, tenant=t) for t in "abc")
    session = shell.attach(first)
    shell.put(session, first, keys(1))
    shell.detach(session)
    session = shell.attach(second)
    with pytest.raises(RequestError, match="evict") as refusal:
        shell.core.open_realm("d", third.namespace, kept=[third.realm_id])
    assert refusal.value.reason is Reason.LIMIT
    assert shell.realm(4096, tenant="c") is third, "a known one is always found"
    fourth = shell.core.open_realm("d", third.namespace)[0]
    assert third.realm_id not in shell.core.state.realms
    assert shell.core.lookup(shell.now, first, keys(1))[0] == 1
    shell.core.open_realm("e", third.namespace, 77)  # recovered ones are never refused: they hold blocks
    assert fourth.realm_id in shell.core.state.realms
    shell.core.check()


def test_a_realm_whose_last_block_moves_keeps_its_place() -> None:
    """Goal: what is on its way for a realm ends in peace. Method: a block is evicted while it is written down."""
    shell = Shell(config(max_realms=1), {"t": Limits((None, 64 * KIB, None))})
    realm = shell.realm(4096)
    session = shell.attach(realm)
    shell.put(session, realm, keys(1))
    shell.drain()
    assert shell.moves
    shell.evict(realm, keys(1))
    shell.detach(session)
    assert not realm.index
    with pytest.raises(RequestError):
        shell.realm(4096, tenant="u")
    shell.finish_all()
    shell.drain(on=False)
    assert shell.realm(4096, tenant="u").tenant.name == "u"
    assert shell.realm(4096, tenant="u").tenant.limits.quota(Tier.CPU) is None
    shell.core.check()
