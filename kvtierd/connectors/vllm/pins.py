"""What requests ask for beyond being saved: blocks pinned for a time, and blocks that live for a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial

from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.logs import warn_rarely
from kvtierd.connectors.vllm.remembered import Remembered
from kvtierd.connectors.vllm.requests import RequestState
from kvtierd.errors import KvtierdError
from kvtierd.model import MAX_KEYS_PER_CALL


class Pins:
    """Pins that an engine's requests have asked for. Methods run on the engine's thread, but ``pin``.

    Args:
        ctx: of the engine.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._until = Remembered()
        self._made: deque[tuple[str, list[bytes], float, int]] = deque()

    def holds(self, tenant: str, key: bytes, pin_s: float) -> bool:
        """Whether a key is pinned for at least half of ``pin_s``: one pin a request would use up what may be pinned at all."""
        return self._until.until_s(tenant, key) >= time.monotonic() + pin_s / 2

    def loaded(self, state: RequestState, first: int, last: int) -> None:
        """Do for chunks that a request has loaded what it asks for those that it saves: pin them, and have them live as long."""
        settings, plan = state.settings, self._ctx.plan
        if not settings.pin_s and not settings.ttl_s:
            return
        for group in plan.groups:
            start = max(first, group.first_needed(last * plan.chunk_tokens) // plan.chunk_tokens)
            keys = self._ctx.keys.keys(state.request, group.index, start, last)
            for begin in range(0, len(keys), MAX_KEYS_PER_CALL):
                some = keys[begin : begin + MAX_KEYS_PER_CALL]
                task = partial(self._keep, group.pool, state.tenant, some, settings.pin_s, settings.ttl_s)
                if not self._ctx.calls.submit(task):
                    self._ctx.counts["pin_failures"] += len(some) if settings.pin_s else 0

    def count(self) -> None:
        """Take up what has become of pins."""
        while self._made:
            tenant, keys, until_s, pinned = self._made.popleft()
            self._ctx.counts["pin_failures"] += len(keys) - pinned
            if pinned == len(keys):  # else it is not known which ones
                for key in keys:
                    self._until.add(tenant, key, until_s)

    def forget(self) -> None:
        """The daemon is another one, or keys have changed."""
        self._until.clear()

    # ---- in the background

    def pin(self, pool: int, tenant: str, keys: Sequence[bytes], pin_s: float) -> None:
        """Pin what is held of these blocks for ``pin_s``, where that is not so already."""
        wanted = [key for key in keys if not self.holds(tenant, key, pin_s)]
        if not wanted:
            return
        until_s, pinned = time.monotonic() + pin_s, 0
        try:
            pinned = self._ctx.pools.clients[pool].pin(b"".join(wanted), pin_s, tenant=tenant).pinned
        except (KvtierdError, ValueError) as e:
            warn_rarely("kvtierd: a pin was refused: %s", e)
        finally:
            self._made.append((tenant, wanted, until_s, pinned))

    def _keep(self, pool: int, tenant: str, keys: Sequence[bytes], pin_s: float | None, ttl_s: float | None) -> None:
        if ttl_s:
            try:  # to ask for a block that is held puts its end off; nothing is saved here, so slots go back
                self._ctx.pools.clients[pool].reserve(b"".join(keys), tenant=tenant, ttl_s=ttl_s).close()
            except (KvtierdError, ValueError) as e:
                warn_rarely("kvtierd: the life of blocks cannot be prolonged: %s", e)
        if pin_s:
            self.pin(pool, tenant, keys, pin_s)
