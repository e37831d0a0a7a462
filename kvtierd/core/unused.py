"""Realms that nobody uses: found and forgotten when there are as many as there may be.

A daemon that lives long sees many namespaces: each new model version is one. One that holds nothing and has no session costs a
place only, so places are given back when they run out, not before.
"""

from __future__ import annotations

from collections.abc import Collection

from kvtierd.core.realm import Realm
from kvtierd.core.state import CoreState


def forget_unused_realms(state: CoreState, kept: Collection[int]) -> int:
    """Forget realms without blocks, and their tenants where these have nothing left.

    Ids are never used again, so what is left of a realm elsewhere (an empty extent, a place in a list) can hurt nobody.

    Args:
        state: is changed.
        kept: ids of realms that have sessions or that the shell is about to use.

    Returns:
        How many were forgotten.
    """
    # A block that was evicted while it moves or is pinned is in no index any more.
    busy = {move.dst.block.realm.realm_id for move in state.moves.values()}
    unused = [r for i, r in state.realms.items() if not r.held and i not in kept and i not in busy]
    for realm in unused:
        _forget(state, realm)
    return len(unused)


def _forget(state: CoreState, realm: Realm) -> None:
    tenant = realm.tenant
    del state.realms[realm.realm_id]
    del state.realm_ids[(tenant.name, realm.fingerprint, realm.shared)]
    if realm.shared:
        state.commons[realm.fingerprint].remove(realm)
        if not state.commons[realm.fingerprint]:
            del state.commons[realm.fingerprint]
    tenant.realms.remove(realm)
    state.turns.drop(realm)
    if not tenant.realms and not any(tenant.used_bytes) and not any(tenant.leaving_bytes):
        del state.tenants[tenant.name]
        state.shares.gone(tenant)
