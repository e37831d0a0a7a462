"""The scheduler's side: what vLLM's scheduler asks at each step, answered without waiting for the daemon while there is work.

One request's way: ``arrived`` (prefetch from NVMe while it queues) → ``matched`` (a lookup; "ask again" until the hit is in CPU
memory and pinned) → ``allocated`` (the load becomes a job) → ``build`` hands jobs to the workers → ``output`` (every rank has
reported; pins are given back, saves are committed) → ``finished``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from kvtierd.connectors.lmcache import request_settings
from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.doubt import Doubts
from kvtierd.connectors.vllm.events import Change
from kvtierd.connectors.vllm.gate import Steps
from kvtierd.connectors.vllm.idle import Idle
from kvtierd.connectors.vllm.loads import Loads
from kvtierd.connectors.vllm.logs import warn_rarely
from kvtierd.connectors.vllm.metadata import KvtierdMetadata, KvtierdWorkerMetadata, Rank, RankLayout
from kvtierd.connectors.vllm.pools import Pools
from kvtierd.connectors.vllm.requests import RequestState, tenant_of
from kvtierd.connectors.vllm.resets import before_resets, finish, worker_of
from kvtierd.connectors.vllm.saves import Saves
from kvtierd.connectors.vllm.settings import Settings
from kvtierd.connectors.vllm.start import Start
from kvtierd.connectors.vllm.traces import follow, parent_of

CALL_THREADS: Final = 4
MAX_ARRIVALS: Final = 4096
"""Requests that wait to be prefetched for; of more, the newest."""

log = logging.getLogger("vllm.kvtierd")


class SchedulerSide:
    """State of all requests. Methods run on the engine's thread, do not block (but for ``idle``) and may raise: the caller guards.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of the engine.
        settings: of the connector.
        recovers_groups: this vLLM tells which blocks have left a window, and takes failed loads by request.
        keeps_stepping: this vLLM goes on stepping for saves that are under way.
        failed: counts and logs the exception that is being handled, and what it was in.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        *,
        recovers_groups: bool,
        keeps_stepping: bool,
        failed: Callable[[str], None],
    ) -> None:
        follow(vllm_config)
        self._settings = settings
        self._engine_id = str(getattr(vllm_config.kv_transfer_config, "engine_id", ""))
        self._keeps_stepping = keeps_stepping
        self._failed = failed
        self.counts: Counter[str] = Counter()
        self._lookups = Background(settings.max_loads, "kvtierd-lookup")  # one that waits for NVMe keeps no other back
        self._calls = Background(CALL_THREADS, "kvtierd-call")
        self._start = Start(
            vllm_config,
            kv_cache_config,
            settings,
            recovers_groups=recovers_groups,
            counts=self.counts,
            calls=self._calls,
            lookups=self._lookups,
        )
        self._saves: Saves | None = None
        self._loads = Loads()
        self._requests: dict[str, RequestState] = {}
        self._arrivals: deque[str] = deque(maxlen=MAX_ARRIVALS)
        self._kept: dict[str, None] = {}
        self._steps = Steps()
        self._idle = Idle(vllm_config)
        self._doubts = Doubts(int(vllm_config.parallel_config.pipeline_parallel_size) + 2)
        self._building = KvtierdMetadata()

    # ---- start and end

    @property
    def _ctx(self) -> Context | None:
        return self._start.ctx

    @property
    def _pools(self) -> Pools | None:
        return self._start.pools

    @property
    def _disabled(self) -> str:
        return self._start.disabled

    def learn(self, layouts: Mapping[Rank, RankLayout]) -> None:
        """Ranks tell how their KV cache lies in memory. Once all have, the daemon is attached to."""
        self._start.learn(layouts)
        self._begin()

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's pool of blocks, in which saves hold theirs."""
        before_resets(block_pool, self._finish_saves)
        self._start.bind_block_pool(block_pool)
        self._begin()

    def _begin(self) -> None:
        if self._ctx is not None and self._saves is None:
            self._saves = Saves(self._ctx)

    def reset(self) -> None:
        """Nothing saved so far may be hit any more. Blocks that saves hold go back at once where no worker reads them."""
        ctx, saves = self._ctx, self._saves
        if ctx is None or saves is None:
            return
        ctx.keys.new_epoch()
        saves.forget()
        saves.drop_unsent()
        for state in self._requests.values():
            self._loads.forget(state)
            state.missed = None
            state.next_chunk = state.useless = 0
            state.names.clear()
            state.stale = state.stale or state.request.num_computed_tokens > 0

    def _finish_saves(self) -> None:
        """vLLM is about to reset its prefix cache, for which nobody may hold a block."""
        try:
            worker = worker_of(self._engine_id)
            if self._saves is not None and self._saves.alone and worker is not None and len(self._start.layouts) == 1:
                finish(self._saves, worker)
        except Exception:
            self._failed("the end of saves before a reset")

    def close(self) -> None:
        """End everything."""
        for state in self._requests.values():
            self._loads.forget(state)
        self._lookups.close(1.0)
        self._calls.close(2.0)
        if self._pools is not None:
            self._pools.close()
        # Only now, when the daemon is not told any more: a worker may still be copying. What is taken goes with the last process.
        self._loads.close()
        if self._saves is not None:
            self._saves.close()
        if self._ctx is not None:
            self._ctx.keys.close()

    # ---- a request's way

    def arrived(self, request: Any) -> None:
        """A new request was added."""
        state = self._state(request)
        if self._ctx is None or self._disabled or not self._settings.loads:
            return
        self._loads.arrived(self._ctx, state)
        if self._settings.prefetch:
            self._arrivals.append(request.request_id)

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            try:
                params = request.kv_transfer_params if self._settings.request_params else None
                settings, bypass = request_settings(params), False
            except ValueError as e:
                warn_rarely("kvtierd: request %s is served without a cache: %s", request.request_id, e)
                settings, bypass = request_settings(None), True
            tenant = tenant_of(settings, getattr(request, "cache_salt", None), self._settings.salt_tenants)
            state = self._requests[request.request_id] = RequestState(
                request, settings, tenant, bypass, traceparent=parent_of(request)
            )
        return state

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be loaded, and whether asynchronously; None for "ask again"."""
        state = self._state(request)
        state.local_tokens = local_tokens
        if self._ctx is None or self._disabled or not self._settings.loads:
            return 0, False
        begun_s = time.monotonic()
        answer = self._loads.matched(self._ctx, state, local_tokens, self._idle.spare_s(len(self._requests)))
        self._idle.spend(time.monotonic() - begun_s)
        return answer

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """vLLM has found blocks for a request, and loads ``external_tokens`` of them from here."""
        state = self._state(request)
        state.block_ids = tuple(list(ids) for ids in blocks.get_block_ids())
        # What has been loaded in the background counts as computed by now, but nothing does that is only promised.
        state.local_tokens = max(state.local_tokens + external_tokens, int(request.num_computed_tokens))
        state.computed = state.useless = 0
        if self._ctx is not None:
            self._loads.allocated(self._ctx, state, external_tokens)

    def fail(self, request: Any, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """Have a promised load reported as failed, after something unexpected."""
        state = self._state(request)
        if state.load is None and self._ctx is not None:
            state.block_ids = tuple(list(ids) for ids in block_ids)
            self._loads.fail(self._ctx, state, external_tokens)

    def sources(self, request: Any) -> dict[str, int]:
        """Tokens of the request's load, which was just allocated, by tier."""
        state = self._requests.get(request.request_id)
        return dict(state.load.tokens_by_tier) if state is not None and state.load is not None else {}

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> bool:
        """A request has ended. Whether its blocks have to be kept until the workers report it as sent."""
        request_id = request.request_id
        state = self._requests.get(request_id)
        if state is None:
            return False
        if state.load is not None:
            self._loads.drop(state)
            return False  # vLLM keeps its blocks until the load is reported; the state goes then
        saves = self._saves
        try:
            if saves is not None and self._saving and self._doubts.trusts_ended(state):
                # vLLM counts as computed what others have only promised to load. What it never scheduled has no content.
                saves.collect_last(state, block_ids, min(state.computed, int(request.num_computed_tokens)))
        finally:
            self._forget(state)
        if not self._keeps_stepping and saves is not None and saves.pending_for(request_id):
            self._kept[request_id] = None
            return True
        return False

    def _forget(self, state: RequestState) -> None:
        self._requests.pop(state.request.request_id, None)
        self._loads.forget(state)
        if self._ctx is not None:
            self._ctx.keys.forget(state.request.request_id)

    # ---- each step

    def build(self, output: Any) -> KvtierdMetadata:
        """What the workers have to do in this step. After a failure in here ``emergency`` gives what there is."""
        now = time.monotonic()
        meta = self._building = KvtierdMetadata()
        ctx, saves = self._ctx, self._saves
        if ctx is not None and saves is not None:
            meta.sessions = ctx.pools.new_sessions()
            if meta.sessions:
                saves.forget()  # another daemon may hold other blocks
            # Before this step's own chunks are collected: what this step computes is copied in a later one.
            meta.saves = saves.jobs()
            meta.sent = [r for r in self._kept if not saves.pending_for(r)]
            for request_id in meta.sent:
                del self._kept[request_id]
        if getattr(output, "kv_connector_block_state", None) is None:
            self._follow_blocks(output)
        if ctx is not None and saves is not None:
            if self._saving:
                self._collect_saves(saves, output)
            self._start_prefetches(ctx)
            if self._loads.asking:
                for state in self._requests.values():
                    self._loads.drop_stale(state, now)
        tokens = int(output.total_num_scheduled_tokens)
        meta.step = self._steps.begin(tokens, now)
        meta.computes, meta.idle = tokens > 0, self._idle.stepped(tokens, len(self._requests))
        meta.loads = self._loads.take()
        return meta

    def emergency(self) -> KvtierdMetadata:
        """After a failure in ``build``: what it had found so far, and the promised loads."""
        meta, self._building = self._building, KvtierdMetadata()  # nothing is told twice
        meta.loads += self._loads.take()
        return meta

    def _careful(self, state: RequestState, run: Callable[[], None]) -> None:
        """Do something for one request. Should it fail, that request goes on without a cache, and the others as ever."""
        try:
            run()
        except Exception:
            state.bypass = True
            self._failed("work for a request")

    @property
    def _saving(self) -> bool:
        return self._settings.saves and not self._disabled

    def _follow_blocks(self, output: Any) -> None:
        """Keep each running request's block table up to date, where vLLM tells only what is new in each step."""
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            if state is not None:  # what ``allocated`` was told may be empty: inside another connector it is
                state.block_ids = tuple(list(ids) for ids in new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = self._requests.get(request_id)
            if state is None or more is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.block_ids = tuple(list(ids) for ids in more)
            elif state.block_ids:
                for known, ids in zip(state.block_ids, more, strict=True):
                    known.extend(ids)
            else:
                state.bypass = True  # its first blocks are not known, so none could be put in its place

    def _collect_saves(self, saves: Saves, output: Any) -> None:
        tables = getattr(output, "kv_connector_block_state", None)
        chunk, decode = saves.chunk_tokens, self._settings.save_decode
        begun, found = [], []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None:
                continue
            start = state.request.num_computed_tokens
            if not state.computed:
                begun.append((state, start))
                if state.matched_tokens is None:
                    state.matched_tokens = start
            state.computed = start + scheduled
            whole = state.computed if decode else min(state.computed, state.request.num_prompt_tokens)
            if whole // chunk > state.next_chunk:
                found.append(state)
        if output.num_scheduled_tokens:
            self._doubts.step(begun)
        for state in found:
            if self._doubts.trusts(state):
                self._careful(state, partial(self._collect_of, saves, state, tables))

    @staticmethod
    def _collect_of(saves: Saves, state: RequestState, tables: Any) -> None:
        table = tables.get_block_ids(state.request.request_id) if tables is not None else None
        saves.collect(state, state.block_ids if table is None else table, state.computed)

    def _start_prefetches(self, ctx: Context) -> None:
        while self._arrivals and self._loads.may_prefetch:  # the others wait until those before them have been asked about
            state = self._requests.get(self._arrivals.popleft())
            if state is not None:
                self._careful(state, partial(self._loads.prefetch, ctx, state))

    def output(self, meta: KvtierdWorkerMetadata | None, ended_loads: set[str]) -> None:
        """What the workers report after a step."""
        if ended_loads:
            self._idle.loaded()
        try:
            self._reports(meta or KvtierdWorkerMetadata())
        finally:
            for request_id in ended_loads:
                state = self._requests.get(request_id)
                if state is not None:
                    self._careful(state, partial(self._load_ended, state))

    def _reports(self, meta: KvtierdWorkerMetadata) -> None:
        if meta.layouts and self._pools is None:
            self.learn(meta.layouts)
        tokens, seconds = self._steps.end(meta.step, time.monotonic())
        ctx, saves = self._ctx, self._saves
        if ctx is None or saves is None:
            return
        for job_id, report in meta.loads.items():
            try:
                self._loads.report(ctx, job_id, report)
            except Exception:  # the other reports count all the same; a load without one has failed
                self._failed("the report of a load")
        for save_id, report in meta.saves.items():
            try:
                saves.report(save_id, report)
            except Exception:
                saves.abandon(save_id)
                self._failed("the report of a save")
        ctx.gate.step(tokens, seconds)

    def _load_ended(self, state: RequestState) -> None:
        load = state.load
        try:
            if self._ctx is not None:
                self._loads.ended(self._ctx, state)
                if load is not None and self._saves is not None and not state.no_load and not state.stale:
                    self._saves.loaded(state, *load.chunks)
        except Exception:
            self._loads.lose(state)
            raise
        finally:
            if state.request.is_finished():
                self._forget(state)

    def take_events(self) -> list[Change]:
        """What to publish of the engine's blocks since the last call."""
        return [] if self._ctx is None or self._ctx.events is None else self._ctx.events.take()

    @property
    def pending(self) -> bool:
        """Whether steps are needed although no request runs."""
        return (self._saves is not None and self._saves.pending) or self._loads.pending

    @property
    def frees_soon(self) -> bool:
        """Whether blocks get free as soon as copies that are under way have ended."""
        return self._saves is not None and self._saves.frees_soon

    def gauges(self) -> dict[str, int]:
        """State of this moment, for metrics."""
        return {
            "attached": int(self._pools is not None and self._pools.attached),
            "loading": self._loads.running,
            "looking_up": self._loads.asking,
            "waiting": self._loads.waiting,
            "breaker": self._pools.breaker if self._pools is not None else 0,
            "holding_blocks": self._saves.held if self._saves is not None else 0,
        }
