"""What the engine's KV event stream is told: which of its blocks kvtierd holds.

A block is told as stored once, when it was published or found held, and as removed when no key of this engine leads to it any more
(a reset) or when it is not known whether the daemon still holds it (a new session). What the daemon forgets by itself is not told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

MEDIUM: Final = "CPU"
"""Where events say that blocks are: beyond the engine's own memory. vLLM knows no name for all tiers together."""
MAX_TOLD: Final = 1 << 18
"""Blocks that are remembered as told. Older ones are told as removed, so that nobody counts on what is not followed."""


class Change(NamedTuple):
    """One event to publish.

    Attributes:
        stored: the blocks are held; else they are not to be counted on any more.
        group: the KV cache group.
        hashes: the engine's own hashes of the blocks.
    """

    stored: bool
    group: int
    hashes: list[bytes]


class Events:
    """Changes that wait to be published, and what was told. Used on the engine's thread only."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._waiting: list[Change] = []

    def stored(self, group: int, hashes: Iterable[bytes]) -> None:
        """These blocks of a KV cache group are held."""
        new = [h for h in dict.fromkeys(hashes) if (group, h) not in self._told]
        if not new:
            return
        self._told.update(dict.fromkeys((group, h) for h in new))
        self._waiting.append(Change(True, group, new))
        if len(self._told) > MAX_TOLD:
            self._remove([self._told.popitem(last=False)[0] for _ in range(len(self._told) - MAX_TOLD)])

    def clear(self) -> None:
        """None of the blocks told so far is to be counted on."""
        self._remove(list(self._told))
        self._told.clear()

    def take(self) -> list[Change]:
        """Changes since the last call, in order."""
        changes, self._waiting = self._waiting, []
        return changes

    def _remove(self, blocks: list[tuple[int, bytes]]) -> None:
        by_group: dict[int, list[bytes]] = {}
        for group, block_hash in blocks:
            by_group.setdefault(group, []).append(block_hash)
        self._waiting += [Change(False, group, hashes) for group, hashes in by_group.items()]


def to_vllm(change: Change) -> Any:
    """A change as vLLM publishes it."""
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    hashes = [maybe_convert_block_hash(h) for h in change.hashes]
    if not change.stored:
        return BlockRemoved(block_hashes=hashes, medium=MEDIUM, group_idx=change.group)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=MEDIUM,
        lora_name=None,
        group_idx=change.group,
    )
