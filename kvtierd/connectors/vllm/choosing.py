"""Which chunks of a request are to be saved, and what the daemon is to be told of those before them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.identity import GroupPlan
from kvtierd.connectors.vllm.pins import Pins
from kvtierd.connectors.vllm.remembered import Remembered
from kvtierd.connectors.vllm.requests import RequestState
from kvtierd.connectors.vllm.save_parts import Wanted
from kvtierd.model import MAX_KEYS_PER_CALL


class Choice:
    """Chooses for one engine, on the engine's thread.

    Args:
        ctx: of the engine.
        pins: what is pinned.
        recent: what was found held a moment ago.
    """

    def __init__(self, ctx: Context, pins: Pins, recent: Remembered) -> None:
        self._ctx = ctx
        self._plan = ctx.plan
        self._pins = pins
        self._recent = recent
        self._windowed = [g for g in ctx.plan.groups if g.window]

    def due(self, state: RequestState, computed: int) -> int:
        """Chunks of a request whose KV is certain to be right once ``computed`` of its tokens have gone through the model."""
        request, chunk = state.request, self._plan.chunk_tokens
        if state.bypass or state.stale or state.settings.skip_save:
            return 0
        due = min(int(request.num_prompt_tokens), computed) // chunk
        if self._ctx.settings.save_decode:
            # A chunk of generated tokens is right once a token after it has been accepted: drafts may have been rejected.
            due = max(due, min(computed, int(request.num_tokens) - 1) // chunk)
        limit = state.settings.max_save_tokens
        if limit is not None:
            due = min(due, limit // chunk)
        return min(due, self._ctx.keys.count(request))

    def useful(self, state: RequestState, table: Sequence[Sequence[int]], stop: int) -> int:
        """One past the last chunk, up to ``stop``, where a hit may end: all that windows need there is in the table.

        Chunks after that one are of use only to a hit that ends at a later chunk, so they wait until there is one.
        """
        for end in range(stop, state.next_chunk, -1) if self._windowed else ():
            needed = [(g, g.first_needed(end * self._plan.chunk_tokens) // self._plan.chunk_tokens) for g in self._windowed]
            if all(self._whole(g, table[g.index], c) for g, n in needed for c in range(max(state.next_chunk, n), end)):
                return end
        return state.next_chunk if self._windowed else stop

    def _whole(self, group: GroupPlan, ids: Sequence[int], chunk: int) -> bool:
        """Whether none of a chunk's blocks has left its window."""
        size = group.blocks_per_chunk
        blocks = ids[chunk * size : (chunk + 1) * size]
        return len(blocks) == size and self._ctx.null_block not in blocks

    def wanted(self, state: RequestState, group: GroupPlan, ids: Sequence[int], first: int, last: int) -> Wanted:
        """What is to be asked for of one group's chunks from ``first`` up to ``last``; ``ids`` are the group's blocks."""
        size, now = group.blocks_per_chunk, time.monotonic()
        whole = [c for c in range(first, last) if self._whole(group, ids, c)]
        every = self._ctx.keys.keys(state.request, group.index, first, last) if whole else []
        if len(names := state.names.setdefault(group.index, [])) == first:
            names += every
        chunks = [c for c in whole if not self._is_done(state, every[c - first], now)]
        blocks = [list(ids[c * size : (c + 1) * size]) for c in chunks]
        return Wanted(group, chunks, [every[c - first] for c in chunks], blocks, len(whole) - len(chunks))

    def _is_done(self, state: RequestState, key: bytes, now: float) -> bool:
        """Whether nothing needs to be asked for a chunk: it was held a moment ago, and is pinned if it should be."""
        settings = state.settings
        if settings.ttl_s or (settings.pin_s and not self._pins.holds(state.tenant, key, settings.pin_s)):
            return False
        return self._recent.until_s(state.tenant, key) > now

    def before(self, state: RequestState, wanted: Wanted) -> list[bytes]:
        """Keys of a request's chunks before these. Windows have none: their chunks are of use without those before."""
        group, first = wanted.group, wanted.chunks[0]
        names = state.names[group.index]
        if group.window or first + len(wanted.chunks) > MAX_KEYS_PER_CALL:
            return []
        if len(names) < first:
            names += self._ctx.keys.keys(state.request, group.index, len(names), first)
        return names[:first]
