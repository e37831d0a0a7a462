"""A subscriber of KV events as routers have one: plain ZeroMQ, and structs with the fields of vLLM 0.32's."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
WAIT_MS = 20_000


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(EventBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Subscriber:
    """Receives messages, and keeps what it was told of.

    Args:
        endpoint: to connect to.
        replay_endpoint: to ask for what was missed; "" for none.
        topic: what to subscribe to.
        rcvhwm: messages that wait here.
    """

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: bytes = b"", rcvhwm: int = 1000) -> None:
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, rcvhwm)
        self.sub.connect(endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic)
        self.replay = self._context.socket(zmq.DEALER)
        if replay_endpoint:
            self.replay.connect(replay_endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.numbers: list[int] = []
        self.held: dict[str, set[bytes | int]] = {}
        """Hashes by medium."""

    def close(self) -> None:
        self._context.destroy(linger=0)

    def take(self, wait_ms: int = WAIT_MS) -> list[Any]:
        """The events of the next message; none where none comes in time."""
        if not self.sub.poll(wait_ms):
            return []
        _, number, payload = self.sub.recv_multipart()
        return self._apply(number, payload)

    def ask(self, first: int) -> list[Any]:
        """The events of all messages from a number on that are kept."""
        self.request(first)
        return self.answer()

    def request(self, first: int) -> None:
        """Ask for all messages from a number on; :meth:`answer` takes them."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))

    def answer(self) -> list[Any]:
        events = []
        while True:
            assert self.replay.poll(WAIT_MS), "a replay ends"
            empty, _topic, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == END:
                return events
            events += self._apply(number, payload)

    def _apply(self, number: bytes, payload: bytes) -> list[Any]:
        self.numbers.append(int.from_bytes(number, "big"))
        batch = self._decoder.decode(payload)
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.held.setdefault(str(event.medium), set()).update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.held.setdefault(str(event.medium), set()).difference_update(event.block_hashes)
            else:
                self.held.clear()
        return batch.events
