"""Saves in flight, on the scheduler's side.

From the step that computes a chunk until every rank has copied it, the chunk's blocks are held by a reference of their own in
vLLM's block pool. So neither the end of the request, nor preemption, nor a sliding window lets them be overwritten, and none of
these waits for a save. What saves cost is room: while they hold blocks, the engine has that many less. ::

    held -> asked the daemon for slots -> granted: copied by the workers -> committed
                                       -> held already, or refused: let go

A request may ask for its blocks to be pinned, or to be forgotten after a while. That is done for those that the daemon holds
already as well.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from kvtierd import tracing
from kvtierd.client import Reservation
from kvtierd.connectors.vllm.choosing import Choice
from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.logs import warn_rarely
from kvtierd.connectors.vllm.metadata import Part, Report, SaveJob
from kvtierd.connectors.vllm.pins import Pins
from kvtierd.connectors.vllm.remembered import Remembered
from kvtierd.connectors.vllm.requests import RequestState
from kvtierd.connectors.vllm.save_parts import Save, Wanted
from kvtierd.errors import KvtierdError
from kvtierd.model import MAX_KEYS_PER_CALL

MAX_BATCH_BYTES: Final = 256 << 20
BATCH_SHARE: Final = 4
"""One save holds at most one in this many of the blocks that may be held."""
MAX_WAIT_S: Final = 0.2
"""How long the daemon may look for space, within the save's own deadline."""
MAX_COPY_S: Final = 1.0
"""Blocks that workers have been copying for longer are not counted on to be free soon."""
RECENT_S: Final = 60.0
"""Keys that were found held or were committed so recently are not asked for again."""

log = logging.getLogger("vllm.kvtierd")


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
        room = self._max_held // BATCH_SHARE // sum(g.blocks_per_chunk for g in self._plan.groups)
        self._batch = max(1, min(MAX_BATCH_BYTES // largest_bytes, MAX_KEYS_PER_CALL, room))
        self._saves: dict[int, Save] = {}
        self._abandoned: list[Save] = []
        self._answered: deque[int] = deque()
        self._committed: deque[tuple[Save, list[int], int]] = deque()
        self._committing, self._commits_until_s = 0, 0.0
        self.pins = Pins(ctx)
        self._recent = Remembered()
        self.choice = Choice(ctx, self.pins, self._recent)
        self._epoch = 0
        self._slow = False
        self._next_id = 1
        self._held = 0
        self._by_request: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        """Whether blocks are still held, or it is not known yet what has been published."""
        return bool(self._saves) or (self._committing > 0 and time.monotonic() < self._commits_until_s)

    @property
    def alone(self) -> bool:
        """Whether some of the engine's blocks are in use, and saves hold every one of these."""
        pool = self._block_pool
        mine = {block.block_id for save in self._saves.values() for chunk in save.blocks for block in chunk}
        return bool(mine) and pool.num_gpu_blocks - pool.get_num_free_blocks() == len(mine) + 1  # and the null block

    @property
    def unanswered(self) -> bool:
        """Whether the daemon was asked for slots and has not answered."""
        return any(not save.sent_s and not save.dropped for save in self._saves.values())

    @property
    def held(self) -> int:
        """Blocks of the engine that are held."""
        return self._held

    @property
    def frees_soon(self) -> bool:
        """Whether workers are copying blocks that nobody else holds: these are free as soon as that is done."""
        since_s = time.monotonic() - MAX_COPY_S
        sent = [save for save in self._saves.values() if save.sent_s > since_s]
        return any(block.ref_cnt == 1 for save in sent for chunk in save.blocks for block in chunk)

    @property
    def chunk_tokens(self) -> int:
        """Tokens in one chunk."""
        return self._plan.chunk_tokens

    def pending_for(self, request_id: str) -> bool:
        """Whether blocks of this request are still held."""
        return self._by_request[request_id] > 0

    def collect(self, state: RequestState, table: Sequence[Sequence[int]], computed: int) -> None:
        """Hand over every chunk that is due and was not yet, as far as blocks may be held.

        Args:
            state: the request.
            table: its blocks, one list a KV cache group.
            computed: tokens that have gone through the model after this step.
        """
        due = self.choice.due(state, computed)
        if due <= state.useless:
            return
        stop = self.choice.useful(state, table, due)
        whole = due == stop == self.choice.due(state, max(computed, int(state.request.num_prompt_tokens)))
        while state.next_chunk < stop:
            first, last = state.next_chunk, min(stop, state.next_chunk + self._batch)
            wanted = [self.choice.wanted(state, group, table[group.index], first, last) for group in self._plan.groups]
            size = sum(some.size for some in wanted)
            if size and self._held and self._held + size > self._room:
                self._counts["save_delays"] += 1
                return
            for some in wanted:
                self._add(state, some, whole=whole and last == stop)
            state.next_chunk = last
        state.useless = due

    def collect_last(self, state: RequestState, table: Sequence[Sequence[int]], computed: int) -> None:
        """As ``collect``, for a request that ends: what may not be held now is not saved."""
        self.collect(state, table, computed)
        due = self.choice.due(state, computed)
        left = "window" if due <= state.useless else "busy"
        self._counts[f"saves|{left}"] += max(0, due - state.next_chunk) * len(self._plan.groups)

    @property
    def _room(self) -> int:
        """Blocks that may be held. Few while the daemon does not answer: they would be missing for nothing."""
        return self._max_held // BATCH_SHARE if self._slow else self._max_held

    def _add(self, state: RequestState, wanted: Wanted, *, whole: bool) -> None:
        """Hold the blocks of these chunks and ask for slots. With ``whole`` they are the last of a prompt, or come after it."""
        self._counts["saves|held"] += wanted.known
        if not wanted.chunks:
            return
        blocks = [[self._block_pool.blocks[b] for b in ids] for ids in wanted.block_ids]
        request_id = str(state.request.request_id)
        hashes = [self._engine_hashes(state, c) for c in wanted.chunks] if self._ctx.events is not None else []
        settings = state.settings
        save = Save(
            self._next_id,
            request_id,
            state.tenant,
            wanted.group,
            wanted.keys,
            blocks,
            settings.pin_s,
            settings.ttl_s,
            hashes,
            self.choice.before(state, wanted) if whole else (),
            (state.matched_tokens or 0) // self._plan.chunk_tokens,
            self._epoch,
            state.traceparent,
        )
        self._block_pool.touch([b for chunk in blocks for b in chunk])
        self._next_id += 1
        self._held += wanted.size
        self._saves[save.save_id] = save
        self._by_request[request_id] += 1
        if not self._ctx.calls.submit(partial(self._ask, save)):  # last: from here on another thread may hold slots for it
            self._counts["saves|busy"] += len(wanted.chunks)
            self._end(save)

    def jobs(self) -> list[SaveJob]:
        """Saves that the daemon has granted since the last step, for the workers. Lets go of what it has not."""
        self._count_committed()
        self.pins.count()
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

    def _job(self, save: Save) -> SaveJob | None:
        """Work for the workers; None when nothing was granted. Lets go of the blocks that were not."""
        reservation = save.reservation
        self._slow = reservation is None or all(outcome in ("DEADLINE", "UNAVAILABLE") for outcome in reservation.outcomes)
        if save.dropped:
            self._counts["saves|stale"] += len(save.keys)
            return None
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
        save.sent_s = time.monotonic()
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
        if copied and self._ctx.calls.submit(partial(self._commit, save, copied)):
            self._committing += 1
            self._commits_until_s = time.monotonic() + self._timeout_s
        else:
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

    def loaded(self, state: RequestState, first: int, last: int) -> None:
        """A request has loaded these chunks, so they are held."""
        self.pins.loaded(state, first, last)
        events = self._ctx.events
        if events is None:
            return
        for group in self._plan.groups:
            needed = group.first_needed(last * self._plan.chunk_tokens) // self._plan.chunk_tokens
            events.stored(group.index, [h for c in range(max(first, needed), last) for h in self._engine_hashes(state, c)])

    def forget(self) -> None:
        """Begin a new epoch: the daemon is another one, or keys have changed.

        Everything is asked for again, and what becomes of saves that are under way is neither remembered nor told.
        """
        self._epoch += 1
        self._recent.clear()
        self.pins.forget()
        if self._ctx.events is not None:
            self._ctx.events.clear()

    def drop_unsent(self) -> None:
        """Give back at once all blocks that no worker reads: those of saves that the daemon has not answered, or only just."""
        for save in self._saves.values():
            if not save.sent_s and not save.dropped:
                save.dropped = True
                self._free(save, range(len(save.blocks)))
                self._let_go(save.request_id)

    # ---- in the background

    def _ask(self, save: Save) -> None:
        with tracing.span("kvtierd.scheduler.save", save.traceparent, keys=len(save.keys)):
            self._reserve(save)

    def _reserve(self, save: Save) -> None:
        held: list[bytes] = []
        try:
            remaining_s = self._timeout_s - (time.monotonic() - save.started_s)
            if remaining_s > 0:
                save.reservation = reservation = self._ctx.pools.clients[save.group.pool].reserve(
                    b"".join(save.keys),
                    timeout_s=remaining_s,
                    wait_s=min(MAX_WAIT_S, remaining_s / 4),
                    tenant=save.tenant,
                    ttl_s=save.ttl_s,
                    before=b"".join(save.before),
                    matched=save.matched,
                    device=True,
                )
                held = [key for key, outcome in zip(save.keys, reservation.outcomes, strict=True) if outcome == "HELD"]
        except (KvtierdError, ValueError) as e:
            warn_rarely("kvtierd: a save was refused: %s", e)
        finally:
            self._answered.append(save.save_id)
        if save.pin_s:
            self.pins.pin(save.group.pool, save.tenant, held, save.pin_s)

    def _commit(self, save: Save, copied: list[int]) -> None:
        reservation = save.reservation
        assert reservation is not None
        committed = 0
        try:
            committed = reservation.commit(copied, timeout_s=self._timeout_s)
        finally:
            self._close(save)
            self._committed.append((save, copied, committed))
        if save.pin_s and committed:
            self.pins.pin(save.group.pool, save.tenant, [save.keys[index] for index in copied], save.pin_s)

    # ---- small parts

    def _engine_hashes(self, state: RequestState, chunk: int) -> list[bytes]:
        step = self._ctx.keys.hashes_per_chunk
        return [bytes(h) for h in state.request.block_hashes[chunk * step : (chunk + 1) * step]]

    def _count_committed(self) -> None:
        while self._committed:
            save, copied, committed = self._committed.popleft()
            self._committing -= 1
            self._counts["saves|ok"] += committed
            self._counts["saves|lost"] += len(copied) - committed
            if committed == len(copied):  # else it is not known which ones
                self._is_held(save, copied)

    def _count_outcomes(self, save: Save, reservation: Reservation) -> None:
        self._is_held(save, [index for index, outcome in enumerate(reservation.outcomes) if outcome == "HELD"])
        for outcome in reservation.outcomes:
            if outcome != "GRANTED":
                self._counts[f"saves|{outcome.lower()}"] += 1

    def _is_held(self, save: Save, indexes: Sequence[int]) -> None:
        """The daemon holds these chunks of a save."""
        if save.epoch != self._epoch:
            return
        until_s = time.monotonic() + min(RECENT_S, save.ttl_s or RECENT_S)
        for index in indexes:
            self._recent.add(save.tenant, save.keys[index], until_s)
        if self._ctx.events is not None:
            self._ctx.events.stored(save.group.index, [h for index in indexes for h in save.hashes[index]])

    def _release_except(self, save: Save) -> None:
        granted = set(save.granted)
        self._free(save, [n for n in range(len(save.blocks)) if n not in granted])

    def _free(self, save: Save, indexes: Sequence[int] | range) -> None:
        blocks = [block for n in indexes for block in save.blocks[n]]
        for n in indexes:
            save.blocks[n] = []
        self._held -= len(blocks)
        if blocks:
            self._block_pool.free_blocks(reversed(blocks))

    def _end(self, save: Save) -> None:
        self._free(save, range(len(save.blocks)))
        self._close(save)
        self._forget(save)

    def _close(self, save: Save) -> None:
        reservation, save.reservation = save.reservation, None
        if reservation is not None:
            reservation.close()

    def _forget(self, save: Save) -> None:
        if self._saves.pop(save.save_id, None) is not None and not save.dropped:
            self._let_go(save.request_id)

    def _let_go(self, request_id: str) -> None:
        self._by_request[request_id] -= 1
        if self._by_request[request_id] <= 0:
            del self._by_request[request_id]
