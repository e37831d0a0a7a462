"""Which sessions can be given memory of GPUs: those whose processes have shown that they can open it.

A process names its GPU when it joins. The daemon then exports a few random bytes of that GPU, and the process tells what it has
read: that works only on the same GPU and where CUDA IPC is allowed. A session can be given GPU memory once a process of each shard
has shown this; until then, and after one has gone, its blocks go to CPU memory.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtierd.core.tier_core import TierCore
from kvtierd.cuda import CudaError
from kvtierd.runtime.background import Background
from kvtierd.runtime.sessions import Attached, Sessions
from kvtierd.tiers.hbm import HbmPool

log = logging.getLogger(__name__)

MAX_REASON_CHARS: Final = 200


@dataclass(slots=True)
class Claim:
    """One process that has named its GPU."""

    shard: int
    """Shard that it copies; -1 for all."""
    place: int
    secret: bytes = b""
    """What it has to find, from the offer on until it has answered."""
    proved: bool = False


class Devices:
    """Claims of all sessions. Belongs to one event loop.

    Args:
        hbm: the tier's memory.
        sessions: all of them.
        core: decides what is where.
        background: keeps offers on their way.
        now: the core's clock.
        changed: runs the core's commands.
    """

    def __init__(
        self,
        hbm: HbmPool,
        sessions: Sessions,
        core: TierCore,
        background: Background,
        now: Callable[[], float],
        changed: Callable[[], None],
    ) -> None:
        self._hbm = hbm
        self._sessions = sessions
        self._core = core
        self._background = background
        self._now = now
        self._changed = changed
        self._claims: dict[int, dict[int, Claim]] = {}
        """By session and connection."""
        self.on_opened: Callable[[int], None] = lambda _place: None
        """Told of a GPU that is in use."""
        self.send_probe: Callable[[int, bytes, int], None] = lambda _conn_id, _handle, _size: None
        """Passes what is exported, and how many bytes of it are to be read, to the process of a connection."""

    def joined(self, attached: Attached, conn_id: int, shard: int, uuid: str) -> None:
        """A process has joined and named its GPU: have it show that it can open the memory there."""
        place = self._hbm.place_of(uuid)
        if place is None:
            self._refused(attached, f"{uuid[:MAX_REASON_CHARS]} has no pool (hbm.devices)")
            self._claims.setdefault(attached.session_id, {})[conn_id] = Claim(shard, -1)
            return
        self._claims.setdefault(attached.session_id, {})[conn_id] = Claim(shard, place)
        self._background.start(self._offer(attached, conn_id, place))

    async def _offer(self, attached: Attached, conn_id: int, place: int) -> None:
        try:
            secret, handle = await asyncio.to_thread(self._hbm.probe, place)
        except CudaError as e:
            self._refused(attached, f"the daemon cannot use the GPU: {e}")
            return
        self.on_opened(place)
        claim = self._claims.get(attached.session_id, {}).get(conn_id)
        if claim is not None:
            claim.secret = secret
            self.send_probe(conn_id, handle, len(secret))

    def proved(self, attached: Attached, conn_id: int, content: bytes, error: str) -> None:
        """A process tells what it has read, or why it could not."""
        claim = self._claims.get(attached.session_id, {}).get(conn_id)
        if claim is None or not claim.secret:
            return  # nobody has asked
        claim.proved = hmac.compare_digest(content, claim.secret)
        claim.secret = b""
        if not claim.proved:
            self._refused(attached, error[:MAX_REASON_CHARS] or "the process has read other bytes than the daemon has written")
        self._review(attached)

    def gone(self, attached: Attached, conn_id: int) -> None:
        """A process of a session has gone."""
        if self._claims.get(attached.session_id, {}).pop(conn_id, None) is not None:
            self._review(attached)
        if not self._claims.get(attached.session_id):
            self._claims.pop(attached.session_id, None)

    def _refused(self, attached: Attached, why: str) -> None:
        why = " ".join(why.split())  # a client may have written it
        attached.no_device = why
        log.warning("session %d is given no GPU memory, its blocks go to CPU memory: %s", attached.session_id, why)

    def _review(self, attached: Attached) -> None:
        before, attached.devices = attached.devices, self._places(attached)
        if attached.devices:
            attached.no_device = ""
        if attached.devices == before:
            return
        if attached.devices:
            log.info("session %d is given memory of GPUs %s", attached.session_id, self.names(attached))
        if before:
            self._leave(attached, before)

    def _places(self, attached: Attached) -> tuple[int, ...]:
        """The GPU of each shard; () unless all processes that copy a shard are on one and the same, and have shown that."""
        claims = self._claims.get(attached.session_id, {}).values()
        places = []
        for shard in range(len(attached.namespace.shard_bytes)):
            theirs = {(claim.place, claim.proved) for claim in claims if claim.shard in (-1, shard)}
            place, proved = theirs.pop() if len(theirs) == 1 else (-1, False)
            if not proved:
                return ()
            places.append(place)
        return tuple(places)

    def _leave(self, attached: Attached, devices: tuple[int, ...]) -> None:
        """Move blocks down that no session can read there any more, so that the memory comes back."""
        for realm_id in attached.realm_ids:
            realm = self._core.state.realms.get(realm_id)
            others = (a for a in self._sessions if a is not attached and realm_id in a.realm_ids)
            if realm is not None and realm.devices == devices and not any(a.devices == devices for a in others):
                self._core.leave_devices(self._now(), realm)
        self._changed()

    def names(self, attached: Attached) -> str:
        """UUIDs of the GPUs whose memory a session is given; empty for none."""
        return ", ".join(dict.fromkeys(self._hbm.devices[place].uuid for place in attached.devices))
