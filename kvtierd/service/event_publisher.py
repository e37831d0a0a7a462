"""Publishes KV events over ZeroMQ: a PUB socket, and a ROUTER socket that answers who has missed some, as vLLM's publisher has.

Sequence numbers begin at the time of the start, in microseconds, so that they rise over restarts too, and each start begins with
``AllBlocksCleared`` and all blocks that were found on NVMe; a stop ends with it. A subscriber that misses numbers asks for them
on the replay endpoint; where they are not kept any more it must forget what it knows.

Everything happens on the event loop and never waits. Each subscriber has a queue of ``QUEUE_MESSAGES``. When one is full, which is
counted, that subscriber loses messages until it has taken what is there, and sees by the numbers which ones.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtierd.config import EventsConfig
from kvtierd.core.state import CoreState
from kvtierd.core.stats import Change
from kvtierd.errors import StartupError
from kvtierd.runtime.wallclock import WallClock
from kvtierd.service.events import CLEARED, batches, held
from kvtierd.service.metrics import Metrics
from kvtierd.service.peers import Peers
from kvtierd.service.socketpath import SocketPath
from kvtierd.units import parse_endpoint

log = logging.getLogger(__name__)

QUEUE_MESSAGES: Final = 1000
"""Messages that wait for one subscriber."""
MAX_REPLAYS: Final = 16
"""Subscribers that are answered at one time; others wait in the socket's queue."""
MAX_REQUEST_BYTES: Final = 1024
"""Largest frame that is taken from a subscriber; one that sends more is cut off."""
MAX_REQUESTS: Final = 64
"""Requests for a replay that wait in the socket's queue, of one subscriber."""
POLL_S: Final = 0.05
"""How often requests for a replay are looked at, and one that is under way goes on."""
STUCK_S: Final = 30.0
"""A replay whose subscriber takes nothing for so long is dropped."""
LINGER_MS: Final = 1000
"""How long a stop waits for what subscribers have not taken yet."""
END: Final = (-1).to_bytes(8, "big", signed=True)
"""Sequence number that ends a replay."""
_KINDS: Final = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


@dataclass(slots=True)
class _Replay:
    """One subscriber that is being answered: its next message, and when it last took one."""

    next_seq: int
    moved_s: float


class EventPublisher:
    """Belongs to one event loop.

    Args:
        config: with an endpoint.
        socket_mode: permissions of sockets in the file system.
        metrics: count what is told.
        clock: tells the time that messages and their numbers carry.
    """

    def __init__(self, config: EventsConfig, socket_mode: int, metrics: Metrics, clock: WallClock) -> None:
        assert config.endpoint is not None
        self._config = config
        self._endpoint = config.endpoint
        self._mode = socket_mode
        self._metrics = metrics
        self._topic = config.topic.encode()
        self._clock = clock
        self._next_seq = int(self._wall_s() * 1e6)
        self._past: deque[bytes] = deque()
        """The last messages, of which the newest is number ``_next_seq - 1``."""
        self._past_bytes = 0
        self._replays: dict[bytes, _Replay] = {}
        self._places: list[SocketPath] = []
        self._zmq: Any
        self._context: Any = None
        self._is_open = False
        self._pub: Any
        self._router: Any = None
        self._encode: Any

    def open(self) -> None:
        """Bind the sockets. Raises StartupError when that cannot be, or when what it takes is not installed."""
        try:
            import msgspec
            import zmq
        except ImportError as e:
            raise StartupError(
                f'events.endpoint is set, but {e.name} is not installed; pip install "kvtierd[events]", or unset events.endpoint'
            ) from e
        self._zmq = zmq
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context(io_threads=1)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)  # a full queue is to be seen, see _send
        self._bind(self._pub, self._endpoint, "events.endpoint")
        if self._config.replay_endpoint is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
            self._router.setsockopt(zmq.RCVHWM, MAX_REQUESTS)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._bind(self._router, self._config.replay_endpoint, "events.replay_endpoint")
        self._is_open = True
        log.info("KV events on %s", self._endpoint)

    def _bind(self, made: Any, endpoint: str, key: str) -> None:
        place = parse_endpoint(endpoint)
        made.setsockopt(self._zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            if not isinstance(place, Path):
                if ":" in place[0]:
                    made.setsockopt(self._zmq.IPV6, 1)
                made.bind(endpoint)
                return
            owned = SocketPath(place, socket.SOCK_STREAM, key=key, name="socket of KV events", peers=Peers(self._mode))
            owned.claim()
            self._places.append(owned)
            made.bind(f"ipc://{owned.private()}")
            owned.publish()
        except self._zmq.ZMQError as e:
            raise StartupError(f"cannot listen on {endpoint}: {e.strerror}; set {key} to another place") from e

    async def announce(self, state: CoreState) -> None:
        """Begin: all that was known of this daemon is void, and this is what it holds. Changes are collected from now on."""
        self._send([dict(CLEARED)])
        state.changes = []
        async for found in held(state):
            changes, state.changes = state.changes, []
            self.publish(changes)
            self.publish(found)

    def publish(self, changes: list[Change]) -> None:
        """Tell of copies that came and went. Never waits, and never raises for what ZeroMQ cannot do."""
        for events in batches(changes):
            self._send(events)

    def _wall_s(self) -> float:
        return self._clock.on_wall(self._clock.now())

    def _send(self, events: list[dict[str, Any]]) -> None:
        zmq = self._zmq
        payload = self._encode([self._wall_s(), events, None])
        frames = (self._topic, self._next_seq.to_bytes(8, "big"), payload)
        self._next_seq += 1
        self._past.append(payload)
        self._past_bytes += len(payload)
        while self._past_bytes > self._config.buffer and self._past:
            self._past_bytes -= len(self._past.popleft())
        for event in events:
            self._metrics.kv_event(_KINDS[event["type"]], len(event.get("block_hashes", "1")))
        try:
            try:
                self._pub.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                # A queue has become full, and nobody has got the message: send it to those who have room. ZeroMQ passes this
                # subscriber over from now on, without a word, until it has taken something.
                self._metrics.kv_event_overflow()
                self._pub.setsockopt(zmq.XPUB_NODROP, 0)
                try:
                    self._pub.send_multipart(frames, zmq.NOBLOCK)
                finally:
                    self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        except zmq.ZMQError:
            log.exception("KV events could not be sent")

    # ---- replay

    async def serve_replays(self) -> None:
        """Answer those who have missed messages. Runs as a supervised task; it ends only by cancellation."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._router is not None:
                self._take_requests()
                for peer, replay in list(self._replays.items()):
                    self._go_on(peer, replay)

    def _take_requests(self) -> None:
        while len(self._replays) < MAX_REPLAYS:
            try:
                frames = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != 8:
                log.debug("a request for KV events that is none: %d frames", len(frames))
                continue
            self._replays[frames[0]] = _Replay(int.from_bytes(frames[2], "big"), time.monotonic())

    def _go_on(self, peer: bytes, replay: _Replay) -> None:
        """Send what the subscriber has room for."""
        now, zmq = time.monotonic(), self._zmq
        first = self._next_seq - len(self._past)
        replay.next_seq = max(replay.next_seq, first)
        try:
            for _ in range(QUEUE_MESSAGES):
                if replay.next_seq >= self._next_seq:
                    self._router.send_multipart((peer, b"", b"", END, b""), zmq.NOBLOCK)
                    del self._replays[peer]
                    return
                payload = self._past[replay.next_seq - first]
                number = replay.next_seq.to_bytes(8, "big")
                self._router.send_multipart((peer, b"", self._topic, number, payload), zmq.NOBLOCK)
                replay.next_seq += 1
                replay.moved_s = now
        except zmq.Again:
            if now - replay.moved_s > STUCK_S:
                del self._replays[peer]
        except zmq.ZMQError:  # it has gone
            del self._replays[peer]

    async def close(self) -> None:
        """Say that nothing is held any more, and close the sockets."""
        if self._is_open:
            self._send([dict(CLEARED)])
        if self._context is not None:
            await asyncio.to_thread(self._context.destroy, LINGER_MS)
        for place in self._places:
            place.release()
