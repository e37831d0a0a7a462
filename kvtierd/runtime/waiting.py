"""Those who wait: for news of a load or prefetch, or for room."""

from __future__ import annotations

import asyncio

from kvtierd.core.tickets import ReadTicket


class Waiters:
    """Events of one event loop. No more than there are open tickets, and one for room."""

    def __init__(self) -> None:
        self._progress: dict[ReadTicket, asyncio.Event] = {}
        self.room = asyncio.Event()
        """Set once, when room was freed next; whoever is refused takes it before asking, so that nothing is missed."""

    def watch(self, ticket: ReadTicket) -> None:
        """Somebody will ask for news of a ticket."""
        self._progress[ticket] = asyncio.Event()

    def unwatch(self, ticket: ReadTicket) -> None:
        """Nobody will ask any more."""
        self._progress.pop(ticket, None)

    async def wait(self, ticket: ReadTicket) -> None:
        """Wait until a ticket has news. Returns at once when nothing more can come."""
        event = self._progress.get(ticket)
        if event is None or ticket.closed:
            return
        await event.wait()
        event.clear()

    def has_news(self, ticket: ReadTicket) -> None:
        """Wake whoever waits for a ticket."""
        event = self._progress.get(ticket)
        if event is not None:
            event.set()

    def room_freed(self) -> None:
        """Wake all who wait for room."""
        self.room.set()
        self.room = asyncio.Event()
