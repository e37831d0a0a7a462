"""Saves in flight, on the scheduler's side.

From the step that computes a chunk until every rank has copied it, the chunk's blocks are held by a reference of their own in
vLLM's block pool. So neither the end of the request, nor preemption, nor a sliding window lets them be overwritten, and no
request is ever delayed for a save. ::

    held -> asked the daemon for slots -> granted: copied by the workers -> committed
                                       -> held already, or refused: let go
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from kvtierd.client import Reservation
from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.identity import GroupPlan
from kvtierd.connectors.vllm.metadata import Part, Report, SaveJob
from kvtierd.connectors.vllm.requests import RequestState
from kvtierd.errors import KvtierdError
from kvtierd.model import MAX_KEYS_PER_CALL

MAX_BATCH_BYTES: Final = 256 << 20
BATCH_SHARE: Final = 4
"""One save holds at most one in this many of the blocks that may be held."""
MAX_WAIT_S: Final = 0.2
"""How long the daemon may look for space, within the save's own deadline."""
MAX_RECENT: Final = 65_536
RECENT_S: Final = 60.0
"""Keys that were found held or were committed so recently are not asked for again."""

log = logging.getLogger("vllm.kvtierd")


@dataclass(slots=True)
class _Save:
    save_id: int
    request_id: str
    tenant: str
    group: GroupPlan
    keys: list[bytes]
    blocks: list[list[Any]]
    """One list of the pool's block objects a chunk, each holding a reference of ours."""
    pin_s: float | None
    """Pin the blocks for this long once they are published."""
    ttl_s: float | None
    """Forget the blocks this long after they are published."""
    hashes: list[list[bytes]]
    """The engine's own hashes of each chunk's blocks, where events are published."""
    started_s: float = field(default_factory=time.monotonic)
    reservation: Reservation | None = None
    granted: list[int] = field(default_factory=list)
    report: Report | None = None


class Saves:
    """All saves of one engine. Methods run on the engine's thread; calls to the daemon in the background.

    Args:
        ctx: of the engine.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._plan = ctx.plan
        self._counts = ctx.counts
        self._block_pool = ctx.block_pool
        self._max_held = max(1, int(ctx.block_pool.num_gpu_blocks * ctx.settings.max_held_fraction))
        self._timeout_s = ctx.settings.save_timeout_ms / 1000
        largest_bytes = max(self._plan.block_bytes(g.pool) for g in self._plan.groups)
        most_blocks = max(g.blocks_per_chunk for g in self._plan.groups)
        room = self._max_held // BATCH_SHARE // most_blocks
        self._batch = max(1, min(MAX_BATCH_BYTES // largest_bytes, MAX_KEYS_PER_CALL, room))
        self._saves: dict[int, _Save] = {}
        self._abandoned: list[_Save] = []
        self._answered: deque[int] = deque()
        self._committed: deque[tuple[_Save, list[int], int]] = deque()
        self._recent: OrderedDict[bytes, float] = OrderedDict()
        self._next_id = 1
        self._held = 0
        self._by_request: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        """Whether blocks are still held."""
        return bool(self._saves)

    @property
    def held(self) -> int:
        """Blocks of the engine that are held."""
        return self._held

    def pending_for(self, request_id: str) -> bool:
        """Whether blocks of this request are still held."""
        return self._by_request[request_id] > 0

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

    def collect(self, state: RequestState, table: Sequence[Sequence[int]], computed: int) -> None:
        """Hand over every chunk that is due and was not yet, as far as blocks may be held.

        Args:
            state: the request.
            table: its blocks, one list a KV cache group.
            computed: tokens that have gone through the model after this step.
        """
        stop = self.due(state, computed)
        while state.next_chunk < stop:
            first, last = state.next_chunk, min(stop, state.next_chunk + self._batch)
            for group in self._plan.groups:
                if not self._collect_group(state, group, table[group.index], first, last):
                    return
            state.next_chunk = last

    def collect_last(self, state: RequestState, table: Sequence[Sequence[int]], computed: int) -> None:
        """As ``collect``, for a request that ends: what may not be held now is not saved."""
        self.collect(state, table, computed)
        self._counts["saves|busy"] += max(0, self.due(state, computed) - state.next_chunk) * len(self._plan.groups)

    def _collect_group(self, state: RequestState, group: GroupPlan, ids: Sequence[int], first: int, last: int) -> bool:
        size, null = group.blocks_per_chunk, self._ctx.null_block
        tables = {c: list(ids[c * size : (c + 1) * size]) for c in range(first, last)}
        whole = [c for c, blocks in tables.items() if len(blocks) == size and null not in blocks]  # others left their window
        if not whole:
            return True
        every = self._ctx.keys.keys(state.request, group.index, first, last)
        return self._add(state, group, whole, [every[c - first] for c in whole], [tables[c] for c in whole])

    def _add(
        self, state: RequestState, group: GroupPlan, chunks: list[int], keys: list[bytes], block_ids: Sequence[Sequence[int]]
    ) -> bool:
        """Hold the blocks of these chunks and ask for slots. False when too many blocks are held already: try again later."""
        now = time.monotonic()
        chosen = [n for n, key in enumerate(keys) if not self._is_recent(state.tenant, key, now)]
        self._counts["saves|held"] += len(keys) - len(chosen)
        if not chosen:
            return True
        size = sum(len(block_ids[n]) for n in chosen)
        if self._held and self._held + size > self._max_held:
            self._counts["save_delays"] += 1
            return False
        blocks = [[self._block_pool.blocks[b] for b in block_ids[n]] for n in chosen]
        request_id = str(state.request.request_id)
        hashes = [self._engine_hashes(state, chunks[n]) for n in chosen] if self._ctx.events is not None else []
        chosen_keys = [keys[n] for n in chosen]
        save = _Save(
            self._next_id, request_id, state.tenant, group, chosen_keys, blocks, state.settings.pin_s, state.settings.ttl_s, hashes
        )
        self._block_pool.touch([b for chunk in blocks for b in chunk])
        self._next_id += 1
        self._held += size
        self._saves[save.save_id] = save
        self._by_request[request_id] += 1
        if not self._ctx.calls.submit(partial(self._ask, save)):  # last: from here on another thread may hold slots for it
            self._counts["saves|busy"] += len(chosen)
            self._end(save)
        return True

    def jobs(self) -> list[SaveJob]:
        """Saves that the daemon has granted since the last step, for the workers. Lets go of what it has not."""
        self._count_committed()
        jobs = []
        while self._answered:
            save = self._saves.get(self._answered.popleft())
            if save is None:
                continue
            try:
                job = self._job(save)
            except Exception:  # the blocks of the others must not be held for ever for it
                log.exception("kvtierd: a save cannot be made")
                job = None
            if job is None:
                self._end(save)
            else:
                jobs.append(job)
        return jobs

    def _job(self, save: _Save) -> SaveJob | None:
        """Work for the workers; None when nothing was granted. Lets go of the blocks that were not."""
        reservation = save.reservation
        if reservation is None:
            self._counts["saves|unavailable"] += len(save.keys)
            return None
        self._count_outcomes(save, reservation)
        save.granted = list(reservation.granted)
        self._release_except(save)
        if not save.granted:
            return None
        slots = np.asarray([slot for index in save.granted for slot in reservation.slots(index)], np.int64)
        ids = np.asarray([block.block_id for index in save.granted for block in save.blocks[index]], np.int64)
        return SaveJob(save.save_id, Part(save.group.index, reservation.session_token, slots, ids))

    def report(self, save_id: int, report: Report) -> None:
        """Ranks have copied, or failed to."""
        save = self._saves.get(save_id)
        if save is None:
            return
        save.report = report if save.report is None else save.report.merge(report)
        if save.report.ranks < self._plan.ranks:
            return
        copied = save.granted if save.report.ok else []
        self._counts["saves|failed"] += len(save.granted) - len(copied)
        self._counts["save_bytes"] += len(copied) * self._plan.block_bytes(save.group.pool)
        self._counts["save_us"] += int(save.report.seconds * 1e6)
        self._free(save, range(len(save.blocks)))
        if copied and not self._ctx.calls.submit(partial(self._commit, save, copied)):
            copied = []
        if not copied:
            self._close(save)
        self._forget(save)

    def abandon(self, save_id: int) -> None:
        """After something unexpected: give the blocks back. The slots stay taken, for a worker may be writing into them."""
        save = self._saves.get(save_id)
        if save is not None:
            self._free(save, range(len(save.blocks)))
            self._forget(save)
            self._abandoned.append(save)

    def close(self) -> None:
        """Let go of everything. The sessions have ended."""
        for save in [*self._saves.values(), *self._abandoned]:
            self._end(save)

    # ---- in the background

    def _ask(self, save: _Save) -> None:
        try:
            remaining_s = self._timeout_s - (time.monotonic() - save.started_s)
            if remaining_s > 0:
                save.reservation = self._ctx.pools.clients[save.group.pool].reserve(
                    b"".join(save.keys),
                    timeout_s=remaining_s,
                    wait_s=min(MAX_WAIT_S, remaining_s / 4),
                    tenant=save.tenant,
                    ttl_s=save.ttl_s,
                )
        except (KvtierdError, ValueError) as e:
            log.warning("kvtierd: a save was refused: %s", e)
        finally:
            self._answered.append(save.save_id)

    def _commit(self, save: _Save, copied: list[int]) -> None:
        reservation = save.reservation
        assert reservation is not None
        committed = 0
        try:
            committed = reservation.commit(copied, timeout_s=self._timeout_s)
        finally:
            self._close(save)
            self._committed.append((save, copied, committed))

    def _pin(self, save: _Save, packed: bytes) -> None:
        assert save.pin_s is not None
        self._ctx.pools.clients[save.group.pool].pin(packed, save.pin_s, tenant=save.tenant)

    # ---- small parts

    def _engine_hashes(self, state: RequestState, chunk: int) -> list[bytes]:
        step = self._ctx.keys.hashes_per_chunk
        return [bytes(h) for h in state.request.block_hashes[chunk * step : (chunk + 1) * step]]

    def _count_committed(self) -> None:
        now = time.monotonic()
        while self._committed:
            save, copied, committed = self._committed.popleft()
            self._counts["saves|ok"] += committed
            self._counts["saves|lost"] += len(copied) - committed
            if committed < len(copied):
                continue  # which ones is not known
            keys = [save.keys[index] for index in copied]
            for key in keys:
                self._remember(save.tenant, key, now)
            if self._ctx.events is not None:
                self._ctx.events.append((save.group.index, [h for index in copied for h in save.hashes[index]]))
            if save.pin_s:
                self._ctx.calls.submit(partial(self._pin, save, b"".join(keys)))

    def _count_outcomes(self, save: _Save, reservation: Reservation) -> None:
        now = time.monotonic()
        for key, outcome in zip(save.keys, reservation.outcomes, strict=True):
            if outcome == "HELD":
                self._remember(save.tenant, key, now)
            if outcome != "GRANTED":
                self._counts[f"saves|{outcome.lower()}"] += 1

    def _is_recent(self, tenant: str, key: bytes, now: float) -> bool:
        seen = self._recent.get(tenant.encode() + key)
        return seen is not None and now - seen < RECENT_S

    def _remember(self, tenant: str, key: bytes, now: float) -> None:
        self._recent[tenant.encode() + key] = now
        self._recent.move_to_end(tenant.encode() + key)
        while len(self._recent) > MAX_RECENT:
            self._recent.popitem(last=False)

    def forget_recent(self) -> None:
        """Ask again for everything: the daemon is another one, or keys have changed."""
        self._recent.clear()

    def _release_except(self, save: _Save) -> None:
        granted = set(save.granted)
        self._free(save, [n for n in range(len(save.blocks)) if n not in granted])

    def _free(self, save: _Save, indexes: Sequence[int] | range) -> None:
        blocks = [block for n in indexes for block in save.blocks[n]]
        for n in indexes:
            save.blocks[n] = []
        self._held -= len(blocks)
        if blocks:
            self._block_pool.free_blocks(reversed(blocks))

    def _end(self, save: _Save) -> None:
        self._free(save, range(len(save.blocks)))
        self._close(save)
        self._forget(save)

    def _close(self, save: _Save) -> None:
        reservation, save.reservation = save.reservation, None
        if reservation is not None:
            reservation.close()

    def _forget(self, save: _Save) -> None:
        self._saves.pop(save.save_id, None)
        self._by_request[save.request_id] -= 1
        if self._by_request[save.request_id] <= 0:
            del self._by_request[save.request_id]
