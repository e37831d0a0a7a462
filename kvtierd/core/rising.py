"""The second stage of a prefetch: what is in CPU memory goes on to GPU memory while its request waits for the engine.

Nobody waits for this: a load that comes earlier is given what is in CPU memory. It ends with its prefetch, which a load ends, and
begins a moment after it, as an engine with nothing else to do loads at once, and would share the way to its GPU with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from kvtierd.core.block import Copy, CopyState
from kvtierd.core.commands import Move, Priority, StartMoves
from kvtierd.core.device_slots import DeviceSlots
from kvtierd.core.space import Space
from kvtierd.core.state import CoreState
from kvtierd.core.tickets import Entry, ReadTicket
from kvtierd.model import Tier

AFTER_S: Final = 0.05
"""Age of a prefetch from which its request counts as one that waits."""
MAX_BYTES: Final = 64 << 20
"""On their way up at one time: about a millisecond of a GPU's link, by which a load may be slowed down."""


class Riser:
    """Decides which blocks of prefetches go to GPU memory.

    Args:
        state: is changed.
        space: makes room.
        begin: enters a move from a source to a target.
    """

    def __init__(self, state: CoreState, space: Space, begin: Callable[[float, Copy, Copy], Move]) -> None:
        self._state = state
        self._space = space
        self._begin = begin
        self._bytes = 0
        self._queue: dict[ReadTicket, deque[int]] = {}
        """Keys of prefetches that are in CPU memory; bounded by the limits on tickets and keys."""
        self._looked_s = 0.0

    def want(self, ticket: ReadTicket, index: int) -> None:
        """A key of a ticket is readable: where it is a prefetch for a GPU, and the key in CPU memory, it may go on."""
        copy = ticket.copies[index]
        if ticket.prefetch and ticket.devices and copy is not None and copy.tier is Tier.CPU:
            self._queue.setdefault(ticket, deque()).append(index)

    def next_s(self) -> float | None:
        """When to look again, if nothing else happens before."""
        due = (ticket.began_s + AFTER_S for ticket in self._queue)
        return min((at for at in due if at > self._looked_s), default=None)

    def start(self, now: float) -> None:
        """Start whatever may start."""
        self._looked_s = now
        moves: list[Move] = []
        for ticket in list(self._queue):
            indexes = self._queue[ticket]
            if now >= ticket.began_s + AFTER_S:
                self._advance(now, ticket, indexes, moves)
            if not indexes or ticket.closed or self._state.draining:
                del self._queue[ticket]
        if moves:
            self._state.commands.append(StartMoves(Tier.CPU, Tier.HBM, Priority.PREFETCH, tuple(moves)))

    def _advance(self, now: float, ticket: ReadTicket, indexes: deque[int], moves: list[Move]) -> None:
        """As many keys of a ticket as may start now; none of them is left where there is no room."""
        state = self._state
        size = ticket.realm.namespace.block_bytes
        while indexes and not ticket.closed and not state.draining:
            if self._bytes and self._bytes + size > MAX_BYTES:
                return
            source = ticket.copies[indexes[0]]
            if ticket.entries[indexes.popleft()] != Entry.READY or source is None or source.state is not CopyState.READY:
                continue
            block = source.block
            if block.hbm is not None:
                continue
            state.came_back(block.realm, block.key, Tier.HBM)
            slots = DeviceSlots(state, self._space, block.realm, ticket.devices).take(now, ticket.risen_bytes)
            if not slots:
                indexes.clear()
                return
            target = state.new_copy(now, block, Tier.HBM, slots, "prefetch")
            moves.append(self._begin(now, source, target))
            ticket.risen_bytes += block.realm.tier_bytes[Tier.HBM]
            self._bytes += moves[-1].size_bytes

    def ended(self, move: Move) -> None:
        """A move to GPU memory has ended, well or not."""
        self._bytes -= move.size_bytes
