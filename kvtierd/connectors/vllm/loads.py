"""Loads, on the scheduler's side: from a request's first question to the report of the last rank.

``matched`` asks the daemon in the background and has vLLM ask again until the hit is in CPU memory and pinned. ``allocated``
makes the promised load a job for the workers. ``ended`` gives the pins back.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.identity import EnginePlan, GroupPlan
from kvtierd.connectors.vllm.lookups import Lookup
from kvtierd.connectors.vllm.metadata import LoadJob, Part, Report
from kvtierd.connectors.vllm.requests import Load, RequestState
from kvtierd.model import Tier

MAX_PREFETCHES: Final = 16
PROMISE_S: Final = 2.0
"""A promised hit that vLLM has found no blocks for in this time is let go, and one that it has not asked for again."""
MISS_S: Final = 1.0
"""A miss is not asked about again for this long."""
MIN_WAIT_S: Final = 0.05
_NO_BLOCKS: Final = np.empty(0, np.int64)

log = logging.getLogger("vllm.kvtierd")


class Loads:
    """All loads of one engine. Methods run on the engine's thread."""

    def __init__(self) -> None:
        self._new: list[LoadJob] = []
        self._open: dict[int, tuple[Load, Report | None]] = {}
        self._next_job = 1
        self._prefetching: set[str] = set()
        self.asking = 0
        """Lookups that are under way or hold slots for a load that vLLM has not begun."""

    @property
    def running(self) -> int:
        """Loads promised and not yet reported by every rank."""
        return len(self._open)

    @property
    def new(self) -> bool:
        """Whether there are jobs that the workers were not given yet."""
        return bool(self._new)

    def take(self) -> list[LoadJob]:
        """Jobs for the workers."""
        jobs, self._new = self._new, []
        return jobs

    # ---- before a request is scheduled

    def prefetch(self, ctx: Context, state: RequestState) -> None:
        """Begin to read a waiting request's blocks from NVMe, unless it has already asked for them."""
        plan, request = ctx.plan, state.request
        if state.asked or not _may_load(state) or plan.selective or not ctx.pools.attached:
            return
        if len(self._prefetching) >= MAX_PREFETCHES:
            return
        keys = ctx.keys.keys(request, plan.groups[0].index, 0, _chunks(ctx, state))
        if keys and ctx.calls.submit(partial(_prefetch, ctx, state, b"".join(keys))):
            self._prefetching.add(request.request_id)

    def matched(self, ctx: Context, state: RequestState, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be loaded, and whether asynchronously; None for "ask again"."""
        if not _may_load(state) or state.load is not None:
            return 0, False
        now = time.monotonic()
        if now - state.asked_s > PROMISE_S:
            state.queued_s = 0.0
        state.asked, state.asked_s = True, now
        first = local_tokens // ctx.plan.chunk_tokens
        lookup = state.lookup
        if lookup is not None and lookup.first_chunk > first:
            self.drop(state)
            lookup = None
        if lookup is None:
            if state.missed is not None and state.missed[0] <= first and now - state.missed[1] < MISS_S:
                return 0, False
            return (None, False) if self._ask(ctx, state, first, now) else (0, False)
        if not lookup.done and not lookup.settled:
            if now < lookup.deadline_s:
                return None, False
            ctx.counts["loads|timeout"] += 1
        return self._promise(ctx, state, lookup, local_tokens, now)

    def _ask(self, ctx: Context, state: RequestState, first: int, now: float) -> bool:
        """Begin a lookup, or wait for the turn to do so. False when the request is to be computed."""
        plan, request = ctx.plan, state.request
        count = _chunks(ctx, state)
        if count <= first or not ctx.pools.reachable:
            return False
        timeout_s = _patience_s(ctx, int(request.num_tokens))
        if self.running + self.asking >= ctx.settings.max_loads:
            state.queued_s = state.queued_s or now
            if now - state.queued_s < timeout_s:
                return True
            ctx.counts["loads|busy"] += 1
            state.missed = (first, now)
            return False
        keys = {g.index: ctx.keys.keys(request, g.index, first, count) for g in plan.groups}
        lookup = Lookup(plan, ctx.pools.clients, keys, first, state.tenant, timeout_s)
        self._prefetching.discard(request.request_id)
        prefetch, state.prefetch = state.prefetch, None
        if prefetch is not None:
            lookup.on_pinned = prefetch.cancel
        if not ctx.lookups.submit(lookup.run):
            return False
        state.lookup, state.queued_s = lookup, 0.0
        self.asking += 1
        return True

    def _promise(self, ctx: Context, state: RequestState, lookup: Lookup, local_tokens: int, now: float) -> tuple[int | None, bool]:
        plan = ctx.plan
        hit = lookup.settle()
        tokens = hit * plan.chunk_tokens - local_tokens
        chunks = hit - lookup.first_chunk
        nbytes = chunks * sum(plan.block_bytes(g.pool) for g in plan.groups)
        outcome = ""
        if tokens <= 0 or not lookup.intact:
            outcome = "loads|miss"
        elif tokens < ctx.settings.min_hit_tokens:
            outcome = "loads|small"
        elif ctx.settings.gate and not ctx.gate.worth(tokens, nbytes):
            outcome = "loads|slower"
        if outcome:
            ctx.counts[outcome] += 1
            state.missed = (lookup.first_chunk, now)
            self.drop(state)
            return 0, False
        state.promised_s = state.promised_s or now
        return tokens, True

    # ---- once vLLM has found blocks

    def allocated(self, ctx: Context, state: RequestState, external_tokens: int) -> None:
        """Make the promised load a job, or let the lookup go when nothing is to be loaded."""
        if state.load is not None:
            return
        self._end_prefetch(state)
        lookup = state.lookup
        if not external_tokens:
            self.drop(state)
            return
        try:
            if lookup is None:
                raise KeyError("the lookup is gone")
            job = self._job(ctx, state, lookup, external_tokens)
        except Exception:  # promised, so it has to be reported, or the request would wait for ever
            log.exception("kvtierd: a promised load of request %s cannot be made", state.request.request_id)
            self.fail(ctx, state, external_tokens)
            return
        self._new.append(job)

    def fail(self, ctx: Context, state: RequestState, external_tokens: int) -> None:
        """Have a promised load reported as failed by all ranks."""
        state.bypass = True
        self.drop(state)
        job_id, self._next_job = self._next_job, self._next_job + 1
        state.load = Load(job_id, None, (0, 0), {}, time.monotonic())
        lost = _unfilled(ctx, state.block_ids, external_tokens)
        self._new.append(LoadJob(job_id, state.request.request_id, [], np.asarray(lost, np.int64), 0.0))

    def _job(self, ctx: Context, state: RequestState, lookup: Lookup, external_tokens: int) -> LoadJob:
        plan = ctx.plan
        last = lookup.settle()
        start = last * plan.chunk_tokens - external_tokens
        parts = [_part(ctx, group, lookup, state.block_ids[group.index], start, last) for group in plan.groups]
        tiers = _tokens_by_tier(plan, lookup, external_tokens, last)
        job_id, self._next_job = self._next_job, self._next_job + 1
        load = Load(job_id, lookup, (lookup.first_chunk, last), tiers, state.promised_s or time.monotonic())
        state.load, state.lookup, state.promised_s, state.sources = load, None, 0.0, tiers
        self.asking -= 1
        self._open[job_id] = (load, None)
        return LoadJob(job_id, state.request.request_id, parts, _NO_BLOCKS, ctx.settings.load_timeout_ms / 1000)

    # ---- what the workers say

    def report(self, job_id: int, report: Report) -> None:
        """Some ranks have ended a job."""
        if job_id in self._open:
            load, known = self._open[job_id]
            self._open[job_id] = (load, report if known is None else known.merge(report))

    def ended(self, ctx: Context, state: RequestState) -> None:
        """Every rank has ended the load of a request: nobody reads its slots any more."""
        if state.load is None:
            return
        load, state.load = state.load, None
        _, report = self._open.pop(load.job_id, (load, None))
        if load.lookup is not None:
            load.lookup.close()
        if report is None or not report.ok:
            ctx.counts["loads|failed"] += 1
            log.warning("kvtierd: the load of request %s failed: %s", state.request.request_id, report.reason if report else "")
            state.bypass = True  # the same blocks must not be tried again for this request
        else:
            ctx.counts["loads|ok"] += 1
            ctx.counts["load_bytes"] += report.nbytes
            ctx.counts["load_us"] += int(report.seconds * 1e6)
            for tier, tokens in load.tokens_by_tier.items():
                ctx.counts[f"hit_tokens|{tier}"] += tokens
            ctx.gate.load(report.nbytes, report.seconds, time.monotonic() - load.started_s)
            if state.next_chunk >= load.chunks[0]:  # else chunks before these, which the engine held itself, are still to be saved
                state.next_chunk = max(state.next_chunk, load.chunks[1])

    def lose(self, state: RequestState) -> None:
        """After something unexpected at the end of a load, which is over all the same."""
        load, state.load = state.load, None
        if load is not None:
            self._open.pop(load.job_id, None)
            if load.lookup is not None:
                load.lookup.close()

    # ---- letting go

    def drop(self, state: RequestState) -> None:
        """Let go of a lookup and what it pins."""
        lookup, state.lookup, state.promised_s = state.lookup, None, 0.0
        if lookup is not None:
            self.asking -= 1
            lookup.close()

    def drop_stale(self, state: RequestState, now: float) -> None:
        """Let go of a hit that vLLM has found no blocks for, or not asked for again, for a while: others wait for their turn."""
        if state.lookup is None:
            return
        no_blocks = state.promised_s > 0 and now - state.promised_s > PROMISE_S
        if no_blocks or (state.lookup.done and now - state.asked_s > PROMISE_S):
            self.drop(state)

    def forget(self, state: RequestState) -> None:
        """The request has gone."""
        self.drop(state)
        state.asked = True
        self._end_prefetch(state)

    def close(self) -> None:
        """Let go of everything. The sessions have ended."""
        for load, _ in self._open.values():
            if load.lookup is not None:
                load.lookup.close()
        self._open.clear()

    def _end_prefetch(self, state: RequestState) -> None:
        self._prefetching.discard(state.request.request_id)
        prefetch, state.prefetch = state.prefetch, None
        if prefetch is not None:
            prefetch.cancel()


def _may_load(state: RequestState) -> bool:
    """Whether anything may be loaded for a request. One that needs every prompt token to go through the model may not."""
    skips = state.bypass or state.settings.skip_load or getattr(state.request, "skip_reading_prefix_cache", False)
    return not skips


def _chunks(ctx: Context, state: RequestState) -> int:
    """Chunks that may be loaded for a request."""
    count, limit = ctx.keys.count(state.request), state.settings.max_load_tokens
    return count if limit is None else min(count, limit // ctx.plan.chunk_tokens)


def _patience_s(ctx: Context, tokens: int) -> float:
    """How long a request may wait for a hit: never longer than computing everything would take, as far as that is known."""
    limit_s = ctx.settings.lookup_timeout_ms / 1000
    recompute_s = ctx.gate.recompute_s(tokens) if ctx.settings.gate else 0.0
    return min(limit_s, max(MIN_WAIT_S, recompute_s)) if recompute_s else limit_s


def _unfilled(ctx: Context, block_ids: Sequence[Sequence[int]], external_tokens: int) -> list[int]:
    """The last blocks of a request, which were to be filled. Those before are the engine's own hit, and may be others' too."""
    return [
        block
        for group, ids in zip(ctx.plan.groups, block_ids, strict=False)
        for block in ids[-external_tokens // group.block_tokens :]
        if block != ctx.null_block
    ]


def _prefetch(ctx: Context, state: RequestState, packed: bytes) -> None:
    """In the background."""
    if state.asked:
        return
    seconds = ctx.settings.lookup_timeout_ms / 1000
    name = str(state.request.request_id)[:64]
    state.prefetch = prefetch = ctx.pools.clients[0].prefetch(packed, seconds, request_id=name, tenant=state.tenant)
    if state.asked:  # meanwhile
        prefetch.cancel()


def _part(ctx: Context, group: GroupPlan, lookup: Lookup, block_ids: list[int], start: int, last: int) -> Part:
    """Slots and blocks of one group for tokens from ``start`` up to chunk ``last``.

    Raises:
        LookupError: a block that has to be filled was not fetched.
    """
    ready = lookup.ready(group.index)
    size, shards = group.blocks_per_chunk, ctx.plan.shards(group)
    first_block = start // group.block_tokens
    ids = np.array(array("q", block_ids[: last * size]))
    if len(ids) < last * size:
        raise LookupError(f"group {group.index} has {len(ids)} blocks, and {last * size} are to be filled")
    takes_part = ids != ctx.null_block
    takes_part[:first_block] = False
    if takes_part[: ready.first * size].any() or (ready.wanted and not ready.token):
        raise LookupError(f"group {group.index} needs blocks that were not fetched")
    ids[~takes_part] = -1
    count = last - ready.first
    slots = np.frombuffer(ready.slots[: count * shards], np.int64)
    return Part(group.index, ready.token, slots, ids[ready.first * size :])


def _tokens_by_tier(plan: EnginePlan, lookup: Lookup, tokens: int, last: int) -> dict[str, int]:
    """Tokens of a load by the tier that they were on; of several groups, those that attend to everything decide."""
    group = next((g for g in plan.groups if not g.window), plan.groups[0])
    ready = lookup.ready(group.index)
    found = ready.tokens_by_tier(plan.chunk_tokens, max(0, last - ready.first))
    main = max(found, key=lambda name: found[name], default=Tier.CPU.name.lower())
    found[main] = found.get(main, 0) + tokens - sum(found.values())  # a first chunk that the engine holds part of, or a window
    return {name: n for name, n in found.items() if n > 0}
