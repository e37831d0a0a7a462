"""Loads, on the scheduler's side: from a request's first question to the report of the last rank.

``matched`` asks the daemon in the background and has vLLM ask again until the hit is in CPU memory and pinned. ``allocated``
makes the promised load a job for the workers. ``ended`` gives the pins back. After loads that failed, what may fail again is not
promised for a while: nothing when they failed in a row, and what the same key leads to when a single one did.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from kvtierd import tracing
from kvtierd.client import Prefetch
from kvtierd.connectors.vllm import probes
from kvtierd.connectors.vllm.backoff import Backoff, FailedKeys
from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.load_jobs import load_bytes, part, tokens_by_tier, unfilled
from kvtierd.connectors.vllm.lookups import Lookup
from kvtierd.connectors.vllm.metadata import LoadJob, Report
from kvtierd.connectors.vllm.requests import Load, RequestState

MAX_PREFETCHES: Final = 16
PROMISE_S: Final = 2.0
"""A promised hit that vLLM has found no blocks for in this time is let go, and one that it has not asked for again."""
MISS_S: Final = 1.0
"""A miss is not asked about again for this long."""
MIN_WAIT_S: Final = 0.05
"""Every lookup may take this long: what is in CPU memory is there by then."""
FAILURES: Final = 3
"""Loads that fail in a row before nothing is promised for a while."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
FAILED_KEY_S: Final = 60.0
"""What a load has failed for is not loaded by any request for this long."""
_NO_BLOCKS: Final = np.empty(0, np.int64)

log = logging.getLogger("vllm.kvtierd")


class Loads:
    """All loads of one engine. Methods run on the engine's thread."""

    def __init__(self) -> None:
        self._new: list[LoadJob] = []
        self._open: dict[int, tuple[Load, Report | None]] = {}
        self._tails: dict[int, tuple[Load, Report]] = {}
        """Of which some ranks' devices still read slots, though the engine goes on."""
        self._next_job = 1
        self._prefetching: set[str] = set()
        self._waiting: set[str] = set()
        self._pauses = Backoff(FAILURES, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._failed_keys = FailedKeys(FAILED_KEY_S)
        self._sessions: list[bytes] = []
        self.asking = 0
        """Lookups that are under way or hold slots for a load that vLLM has not begun."""

    @property
    def running(self) -> int:
        """Loads promised and not yet reported by every rank."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn to ask the daemon."""
        return len(self._waiting)

    @property
    def pending(self) -> bool:
        """Whether workers have something to be given or to tell."""
        return bool(self._new or self._tails)

    def take(self) -> list[LoadJob]:
        """Jobs for the workers."""
        jobs, self._new = self._new, []
        return jobs

    # ---- before a request is scheduled

    def arrived(self, ctx: Context, state: RequestState) -> None:
        """Ask at once whether anything is held of a new request, so that the answer is there when vLLM asks."""
        if _may_load(state) and ctx.pools.reachable and _chunks(ctx, state):
            state.probe = probes.ask(ctx, state.request, state.tenant, 0)

    @property
    def may_prefetch(self) -> bool:
        """Whether there is a place for another prefetch."""
        return len(self._prefetching) < MAX_PREFETCHES

    def prefetch(self, ctx: Context, state: RequestState) -> None:
        """Begin to read a waiting request's blocks from NVMe, unless it has already asked for them, or there is no place. Of
        several groups, those that attend to everything: what the others need depends on how much is held."""
        plan, request = ctx.plan, state.request
        if state.asked or not _may_load(state) or not self.may_prefetch or not ctx.pools.attached:
            return
        if state.probe is not None and state.probe.look(time.monotonic()) is False:
            return
        wanted: dict[int, list[bytes]] = {}
        for group in plan.groups:
            if not group.window:
                wanted.setdefault(group.pool, []).extend(ctx.keys.keys(request, group.index, 0, _chunks(ctx, state)))
        packed = {pool: b"".join(keys) for pool, keys in wanted.items() if keys}
        if packed and ctx.calls.submit(partial(_prefetch, ctx, state, packed)):
            self._prefetching.add(request.request_id)

    def matched(self, ctx: Context, state: RequestState, local_tokens: int, spare_s: float = 0.0) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be loaded, and whether asynchronously; None for "ask again".

        Waits for ``spare_s`` at most before it says that.
        """
        if not _may_load(state) or state.load is not None:
            return 0, False
        now = time.monotonic()
        if now - state.asked_s > PROMISE_S:
            state.wait_until_s = 0.0
        state.asked, state.asked_s = True, now
        tokens = self._matched(ctx, state, local_tokens, now)
        while tokens is None and _has_news(state, now + spare_s - time.monotonic()):
            tokens = self._matched(ctx, state, local_tokens, time.monotonic())
        if tokens is not None:
            state.wait_until_s = 0.0
            self._waiting.discard(state.request.request_id)
        return tokens, bool(tokens)

    def _matched(self, ctx: Context, state: RequestState, local_tokens: int, now: float) -> int | None:
        first = local_tokens // ctx.plan.chunk_tokens
        lookup = state.lookup
        if lookup is not None and lookup.first_chunk > first:
            self.drop(state)
            lookup = None
        if lookup is None:
            if state.missed is not None and state.missed[0] <= first and now - state.missed[1] < MISS_S:
                return 0
            if _chunks(ctx, state) * ctx.plan.chunk_tokens - local_tokens < _least_tokens(ctx):
                return 0  # the engine holds all but a rest itself: not worth the steps that a question takes
            return self._ask(ctx, state, first, now)
        if not lookup.done and not lookup.settled and now < lookup.deadline_s:
            return None
        return self._promise(ctx, state, lookup, local_tokens, now)

    def _ask(self, ctx: Context, state: RequestState, first: int, now: float) -> int | None:
        """Begin a lookup, or wait for the turn to do so. 0 when the request is to be computed."""
        plan, request = ctx.plan, state.request
        count = _chunks(ctx, state)
        if count <= first or not ctx.pools.reachable:
            return 0
        self._forgive(ctx)
        if self._pauses.pausing(now):
            return _without(ctx, state, "loads|paused", first, now)
        held = self._may_be_held(ctx, state, first, now)
        if not held:
            if held is None:
                return None
            probes.count_missed(ctx, request, state.tenant, first, count - first)
            state.forget_probe()
            return _without(ctx, state, "loads|miss", first, now)
        state.wait_until_s = state.wait_until_s or now + _patience_s(ctx, int(request.num_tokens))
        if now >= state.wait_until_s:
            return _without(ctx, state, "loads|busy", first, now)
        if self.running + self.asking >= ctx.settings.max_loads:
            self._waiting.add(request.request_id)
            return None
        keys = {g.index: ctx.keys.keys(request, g.index, first, count) for g in plan.groups}
        if not first:
            state.names = dict(keys)
        count = int(min(count, self._failed_keys.limit(keys, now)))
        if count <= first:
            return _without(ctx, state, "loads|paused", first, now)
        timeout_s = state.wait_until_s - now
        stored, copied = load_bytes(plan, first * plan.chunk_tokens, count * plan.chunk_tokens)
        if ctx.settings.gate and not ctx.gate.worth_reading((count - first) * plan.chunk_tokens, stored, copied):
            timeout_s = min(timeout_s, MIN_WAIT_S)
        keys = {group: some[: count - first] for group, some in keys.items()}
        lookup = Lookup(plan, ctx.pools.clients, keys, first, state.tenant, timeout_s)
        lookup.traceparent = state.traceparent
        self._prefetching.discard(request.request_id)
        prefetches, state.prefetches = state.prefetches, []
        lookup.on_pinned = partial(_cancel, prefetches)
        if not ctx.lookups.submit(lookup.run):
            _cancel(prefetches)
            return 0
        state.lookup = lookup
        state.forget_probe()
        self._waiting.discard(request.request_id)
        self.asking += 1
        return None

    @staticmethod
    def _may_be_held(ctx: Context, state: RequestState, first: int, now: float) -> bool | None:
        """What a probe says of the chunks from ``first`` on; None for "ask again".

        A block is forgotten before those that lead to it, so where one is missing, nothing is held beyond it either.
        """
        probe = state.probe
        if probe is not None and probe.first < first and probe.look(now):
            probe = None
        if probe is None or probe.first > first:
            state.forget_probe()
            probe = state.probe = probes.ask(ctx, state.request, state.tenant, first)
        return True if probe is None else probe.look(now)

    def _forgive(self, ctx: Context) -> None:
        """With another session, another daemon or another way to it, loads may go well again."""
        sessions = [client.session_token for client in ctx.pools.clients]
        if sessions != self._sessions:
            self._sessions = sessions
            self._pauses.succeeded()
            self._failed_keys.clear()

    def _promise(self, ctx: Context, state: RequestState, lookup: Lookup, local_tokens: int, now: float) -> int:
        plan = ctx.plan
        fresh = not lookup.settled
        late = lookup.late or not lookup.done
        hit = lookup.settle()
        tokens = hit * plan.chunk_tokens - local_tokens
        if fresh:
            ctx.gate.read(*lookup.read)
            missing = lookup.first_chunk + lookup.count - hit
            if plan.selective and missing and lookup.intact and not late:  # others have asked for all of it in one load
                probes.count_missed(ctx, state.request, state.tenant, hit, missing)
        outcome = ""
        if tokens <= 0 or not lookup.intact:
            outcome = "loads|timeout" if late and fresh else "loads|miss"
        elif tokens < _least_tokens(ctx):
            outcome = "loads|small"
        elif ctx.settings.gate and not state.promised_s:
            _, nbytes = load_bytes(plan, local_tokens, hit * plan.chunk_tokens)
            outcome = "" if ctx.gate.worth(tokens, nbytes) else "loads|slower"
        if outcome:
            self.drop(state)
            return _without(ctx, state, outcome, lookup.first_chunk, now)
        state.promised_s = state.promised_s or now
        return tokens

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
        state.no_load = True
        self.drop(state)
        job_id, self._next_job = self._next_job, self._next_job + 1
        state.load = Load(job_id, state.request.request_id, None, (0, 0), {}, time.monotonic())
        lost = unfilled(ctx, state.block_ids, external_tokens)
        self._new.append(LoadJob(job_id, state.request.request_id, [], np.asarray(lost, np.int64), 0.0))

    def _job(self, ctx: Context, state: RequestState, lookup: Lookup, external_tokens: int) -> LoadJob:
        plan = ctx.plan
        last = lookup.settle()
        start = last * plan.chunk_tokens - external_tokens
        parts = [part(ctx, group, lookup, state.block_ids[group.index], start, last) for group in plan.groups]
        tiers = tokens_by_tier(plan, lookup, external_tokens, last)
        job_id, self._next_job = self._next_job, self._next_job + 1
        state.traceparent = state.traceparent or lookup.traceparent
        span = tracing.begin("kvtierd.scheduler.load", state.traceparent, tokens=external_tokens)
        load = Load(job_id, state.request.request_id, lookup, (lookup.first_chunk, last), tiers, time.monotonic(), span)
        state.load, state.lookup, state.promised_s = load, None, 0.0
        self.asking -= 1
        self._open[job_id] = (load, None)
        timeout_s = ctx.settings.load_timeout_ms / 1000
        return LoadJob(job_id, state.request.request_id, parts, _NO_BLOCKS, timeout_s, span.traceparent)

    # ---- what the workers say

    def report(self, ctx: Context, job_id: int, report: Report) -> None:
        """Some ranks have ended a job, or what they told early has ended."""
        if job_id in self._open:
            load, known = self._open[job_id]
            self._open[job_id] = (load, report if known is None else known.merge(report))
        elif job_id in self._tails:
            load, before = self._tails.pop(job_id)
            self._tail(ctx, load, before.merge(report))

    def ended(self, ctx: Context, state: RequestState) -> None:
        """The blocks of a request hold what was loaded, or will when the engine uses them, unless it failed."""
        if state.load is None:
            return
        load, state.load = state.load, None
        _, report = self._open.pop(load.job_id, (load, None))
        try:
            if report is not None and report.ok:
                if (
                    state.next_chunk >= load.chunks[0]
                ):  # else chunks before these, which the engine held itself, are still to be saved
                    state.next_chunk = max(state.next_chunk, load.chunks[1])
                self._pauses.succeeded()
            else:
                state.no_load = True  # the same blocks must not be tried again for this request
        finally:
            self._tail(ctx, load, report)

    def _tail(self, ctx: Context, load: Load, report: Report | None) -> None:
        """Once every rank has ended it, nobody reads the slots of a load any more."""
        if report is not None and report.early:
            self._tails[load.job_id] = load, report
            return
        load.span.end("" if report is not None and report.ok else "failed")
        try:
            if report is not None and report.ok:
                self._went_well(ctx, load, report)
            else:
                self._went_wrong(ctx, load, report)
        finally:
            if load.lookup is not None:
                load.lookup.close()

    def _went_well(self, ctx: Context, load: Load, report: Report) -> None:
        ctx.counts["loads|ok"] += 1
        ctx.counts["load_bytes"] += report.nbytes
        ctx.counts["load_us"] += int(report.seconds * 1e6)
        for tier, tokens in load.tokens_by_tier.items():
            ctx.counts[f"hit_tokens|{tier}"] += tokens
        assert load.lookup is not None
        ctx.gate.load(load.lookup.sessions, report.nbytes, report.seconds, time.monotonic() - load.started_s)

    def _went_wrong(self, ctx: Context, load: Load, report: Report | None) -> None:
        cause = report.cause if report is not None else "promise" if load.lookup is None else "internal"
        ctx.counts["loads|failed"] += 1
        ctx.counts[f"load_failures|{cause}"] += 1
        log.warning("kvtierd: the load of request %s failed: %s", load.request_id, report.reason if report else cause)
        lookup, now = load.lookup, time.monotonic()
        if lookup is None or not lookup.intact:
            return  # the session has ended, and with it the reason
        self._pauses.failed(load.started_s, now)
        lost = lookup.chunks_of(report.lost) if report is not None else []
        for group, chunk in lost:
            self._failed_keys.add(lookup.key(group, chunk), chunk, now)
        if not lost:  # which of its chunks was to blame is not known: none are loaded again for this prompt
            group = next((g for g in ctx.plan.groups if not g.window), ctx.plan.groups[0]).index
            self._failed_keys.add(lookup.key(group, load.chunks[1] - 1), load.chunks[0], now)

    def lose(self, state: RequestState) -> None:
        """After something unexpected at the end of a load, which is over all the same."""
        load, state.load = state.load, None
        if load is not None:
            self._open.pop(load.job_id, None)
            load.span.end("lost")
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
        state.forget_probe()
        state.asked = True
        self._waiting.discard(state.request.request_id)
        self._end_prefetch(state)

    def close(self) -> None:
        """Let go of everything. The sessions have ended."""
        for load, _ in [*self._open.values(), *self._tails.values()]:
            load.span.end("the engine has ended")
            if load.lookup is not None:
                load.lookup.close()
        self._open.clear()
        self._tails.clear()

    def _end_prefetch(self, state: RequestState) -> None:
        self._prefetching.discard(state.request.request_id)
        prefetches, state.prefetches = state.prefetches, []
        _cancel(prefetches)


def _may_load(state: RequestState) -> bool:
    """Whether anything may be loaded for a request. One that needs every prompt token to go through the model may not."""
    skips = state.bypass or state.no_load or state.settings.skip_load or getattr(state.request, "skip_reading_prefix_cache", False)
    return not skips


def _has_news(state: RequestState, seconds: float) -> bool:
    """Whether there is an answer of the daemon's to a request's question, which is waited for."""
    question = state.lookup or state.probe
    return question is not None and seconds > 0 and question.wait(seconds)


def _chunks(ctx: Context, state: RequestState) -> int:
    """Chunks that may be loaded for a request."""
    count, limit = ctx.keys.count(state.request), state.settings.max_load_tokens
    return count if limit is None else min(count, limit // ctx.plan.chunk_tokens)


def _least_tokens(ctx: Context) -> int:
    """The smallest hit that is loaded."""
    return ctx.settings.min_hit_tokens or ctx.plan.chunk_tokens


def _patience_s(ctx: Context, tokens: int) -> float:
    """How long a request may wait for a hit: never longer than computing everything would take, as far as that is known."""
    limit_s = ctx.settings.lookup_timeout_ms / 1000
    recompute_s = ctx.gate.recompute_s(tokens) if ctx.settings.gate else 0.0
    return min(limit_s, max(MIN_WAIT_S, recompute_s)) if recompute_s else limit_s


def _without(ctx: Context, state: RequestState, outcome: str, first: int, now: float) -> int:
    """Nothing is loaded for a request, and it is not asked about again for a moment."""
    ctx.counts[outcome] += 1
    state.missed = (first, now)
    return 0


def _cancel(prefetches: Sequence[Prefetch]) -> None:
    for prefetch in prefetches:
        prefetch.cancel()


def _prefetch(ctx: Context, state: RequestState, packed: dict[int, bytes]) -> None:
    """In the background. ``packed`` has keys by pool."""
    seconds = ctx.settings.lookup_timeout_ms / 1000
    name = str(state.request.request_id)[:64]
    for pool, keys in packed.items():
        if state.asked:
            return
        with tracing.span("kvtierd.scheduler.prefetch", state.traceparent):
            prefetch = ctx.pools.clients[pool].prefetch(keys, seconds, request_id=name, tenant=state.tenant)
        state.prefetches.append(prefetch)
        if state.asked:  # meanwhile, and whoever asked may not have seen this one
            prefetch.cancel()
