"""Blocks whose bytes travel in messages: putting the parts of one block together in its slots."""

from __future__ import annotations

from typing import Final

from kvtierd.core.block import Block
from kvtierd.core.realm import Realm
from kvtierd.core.saves import BUSY
from kvtierd.errors import Reason, RequestError
from kvtierd.runtime import Attached, Runtime

MAX_BLOCKS_PER_STREAM: Final = 65_536
SAVE_WAIT_S: Final = 5.0
"""How long one block of a stream waits for room."""


class BytesSaver:
    """Takes the parts of blocks in order and writes them into slots; a block is published when its last byte is there."""

    def __init__(self, runtime: Runtime, attached: Attached, realm: Realm, ttl_s: float | None) -> None:
        self._rt = runtime
        self._attached = attached
        self._realm = realm
        self._ttl_s = ttl_s
        self._sizes = realm.namespace.shard_bytes
        self._key: bytes | None = None
        self._slots: list[int] = []
        self._ticket = 0
        self._shard = 0
        self._filled = 0
        self._outcomes: list[int] = []
        self.published: list[Block] = []

    async def add(self, key: bytes, shard: int, data: bytes) -> None:
        """Take one part. Raises RequestError for parts out of order or too long."""
        if key != self._key:
            self._end_block()
            await self._begin_block(key)
        if shard != self._shard:
            if shard != self._shard + 1 or self._filled != self._sizes[self._shard]:
                raise RequestError(
                    Reason.BAD_REQUEST,
                    f"shard {shard} came after {self._filled} of {self._sizes[self._shard]} bytes of shard {self._shard}; "
                    f"send each shard whole and in order",
                )
            self._shard, self._filled = shard, 0
        if self._shard >= len(self._sizes) or self._filled + len(data) > self._sizes[self._shard]:
            raise RequestError(Reason.BAD_REQUEST, f"more bytes than the {list(self._sizes)} of the shards of a block")
        self._rt.check_alive(self._attached)
        if self._ticket:
            # Only an open ticket gives a right to its slots: they are somebody else's once it was aborted or committed.
            self._attached.core.ticket(self._ticket)
            view = self._rt.cpu.view(self._slots[self._shard])
            view[self._filled : self._filled + len(data)] = data
            view.release()
        self._filled += len(data)

    async def _begin_block(self, key: bytes) -> None:
        if len(self._outcomes) >= MAX_BLOCKS_PER_STREAM:
            raise RequestError(Reason.TOO_MANY_KEYS, f"more than {MAX_BLOCKS_PER_STREAM} blocks in one stream; open another")
        self._key, self._shard, self._filled = key, 0, 0
        grant = await self._rt.save(self._attached, self._realm, [key], SAVE_WAIT_S, self._ttl_s)
        self._ticket, self._slots = grant.ticket_id, grant.slots
        self._outcomes.append(grant.outcomes[0])

    def _end_block(self) -> None:
        if self._key is None:
            return
        if self._shard != len(self._sizes) - 1 or self._filled != self._sizes[-1]:
            raise RequestError(Reason.BAD_REQUEST, f"a block ended early: {self._filled} bytes of shard {self._shard}")
        self._key = None
        if self._ticket:
            published = self._rt.commit(self._attached, self._ticket, ())
            self._ticket = 0
            self.published += published
            if not published:
                self._outcomes[-1] = BUSY  # evicted while it was filled

    def finish(self) -> list[int]:
        """End the stream. Returns one outcome a block; granted means saved."""
        self._end_block()
        return self._outcomes

    def give_up(self) -> None:
        """Return the slots of a block that will not be finished."""
        if self._ticket in self._attached.core.tickets:  # they came back by themselves when the session ended
            self._rt.abort(self._attached, self._ticket, ())
            self._ticket = 0
