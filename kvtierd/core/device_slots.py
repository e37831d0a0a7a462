"""Who gets slots in GPU memory: saves first of all, prefetches (``core/rising.py``), and what comes up from NVMe directly.

A realm's blocks are on the GPUs of the engine that was first; an engine on others has to do without.
"""

from __future__ import annotations

from kvtierd.core.limits import TenantClass
from kvtierd.core.realm import Realm
from kvtierd.core.space import Space
from kvtierd.core.state import CoreState
from kvtierd.errors import Reason
from kvtierd.model import Tier


class DeviceSlots:
    """Slots in GPU memory for blocks of one realm, up to the first refusal. Nobody waits for room here.

    Args:
        state: is changed.
        space: makes room.
        realm: of the blocks.
        devices: the GPU of each shard whose memory the caller can open; () for none.
    """

    def __init__(self, state: CoreState, space: Space, realm: Realm, devices: tuple[int, ...]) -> None:
        self._state = state
        self._space = space
        self._realm = realm
        self.wanted = bool(devices) and state.config.capacity_bytes[Tier.HBM] > 0
        self.refused = ""
        """Why no more are to be had; "" for nothing of that kind."""
        if not self.wanted:
            return
        if realm.tenant.limits.tenant_class is TenantClass.BASIC:
            self.refused = "class"
        elif realm.devices != devices:
            if any(state.pools[Tier.HBM].extents_of(realm.realm_id, len(realm.slot_bytes))):
                self.refused = "other_gpu"
            else:
                realm.devices = devices

    def take(self, now: float, held_bytes: int) -> tuple[int, ...]:
        """Slots of one block; () when there are none for it.

        Args:
            now: the time.
            held_bytes: what the caller holds already; all of it together may be half of the tier.
        """
        if not self.wanted:
            return ()
        limit = self._state.config.ticket_limit_bytes(Tier.HBM)
        if not self._state.turns.takes_writes(Tier.HBM, now):
            self.refused = self.refused or "suspended"
        if not self.refused and held_bytes and held_bytes + self._realm.tier_bytes[Tier.HBM] > limit:
            self.refused = "limit"
        if not self.refused:
            taken = self._space.allocate(now, Tier.HBM, self._realm)
            if not isinstance(taken, Reason):
                return taken
            self.refused = taken.name.lower()
        return ()
