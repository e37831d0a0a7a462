"""The worker's side: one rank's copies between its paged KV cache and the daemon's slots.

Copies run in two background threads, one for loads and one for saves, so a step of the engine never waits for them. A load
counts as good only if the connection that keeps its slots in place outlived the copy; a thread reports a job when it will not
touch the job's blocks any more, so nothing can land late. Waiting for the daemon ends at the job's deadline, and after a failure
the next jobs do not wait for it at all for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

from kvtierd import tracing
from kvtierd.client import ExtentMap
from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.vllm.copying import BlockCopier, Chunk, OnQueued, make_copier, self_test
from kvtierd.connectors.vllm.host import device_node, host_identity
from kvtierd.connectors.vllm.joining import JOIN_TIMEOUT_S, Joined, LostMemoryError
from kvtierd.connectors.vllm.layout import UnsupportedLayoutError, WorkerLayout, is_selective, worker_layout
from kvtierd.connectors.vllm.load_ends import LoadEnds
from kvtierd.connectors.vllm.metadata import (
    KvtierdMetadata,
    KvtierdWorkerMetadata,
    LoadJob,
    Part,
    Rank,
    RankLayout,
    Report,
    SaveJob,
    SessionInfo,
)
from kvtierd.connectors.vllm.traces import follow
from kvtierd.errors import DaemonUnavailableError, KvtierdError, RequestError

FENCE_POLL_S: Final = 0.001
MAP_AHEAD_TIMEOUT_S: Final = 10.0
"""Longest wait for one extent that nobody waits for."""
SUCCESSOR_S: Final = 0.2
"""A daemon that has ended has no successor, which might write to its memory, for longer than this."""
STRETCH_BYTES: Final = 64 << 20
"""Slots side by side are copied as one, up to so much: what is done for each of them takes longer than a GPU's copy of it."""
MAX_ENDED: Final = 1024
"""Saves whose end is remembered."""

log = logging.getLogger("vllm.kvtierd")


class WorkerSide:
    """One rank. Methods run on the engine's thread and do not block; they may raise, the caller guards.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of this rank.
        rank: pipeline and tensor parallel rank.
        tp_size: tensor parallel ranks.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, rank: Rank, tp_size: int) -> None:
        follow(vllm_config)
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self.rank = rank
        self._tp_size = tp_size
        self._layout: WorkerLayout | None = None
        self._copier: BlockCopier | None = None
        self.rank_layout: RankLayout | None = None
        self._node = -1
        self._layout_told = False
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Joined] = {}
        self._loader = Background(1, "kvtierd-load")
        self._saver = Background(1, "kvtierd-save")
        self._mapper = Background(1, "kvtierd-map")
        self._closed = False
        self._load_ends = LoadEnds()
        # Under the lock, for the next report:
        self._save_reports: dict[int, Report] = {}
        self._ended_saves: deque[tuple[int, Report]] = deque(maxlen=MAX_ENDED)
        # The engine's thread's own:
        self._saves: list[SaveJob] = []
        self._step = 0

    @property
    def selective(self) -> bool:
        """See ``is_selective``."""
        layout = self._layout
        return layout is not None and is_selective([g.window for g in layout.groups])

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Look at the KV cache, and try a block of each group."""
        try:
            self._layout = worker_layout(self._kv_cache_config, kv_caches, vllm_config=self._config)
            self._copier = make_copier(self._layout)
            self_test(self._layout, self._copier, kv_caches)
            self.rank_layout = RankLayout(self._layout.groups, host=host_identity())
            self._node = device_node(self._layout.device)
        except UnsupportedLayoutError as e:
            self._layout = None
            self.rank_layout = RankLayout((), str(e), host_identity())

    def refuse(self, why: str) -> None:
        """The KV cache cannot be served."""
        self._layout = None
        self.rank_layout = RankLayout((), why, host_identity())

    # ---- each step

    def start_loads(self, meta: KvtierdMetadata) -> None:
        """Join new sessions, and begin to copy into blocks that waiting requests own.

        Whatever happens in here, each job is either begun or reported as failed.
        """
        self._load_ends.begin(len(meta.loads))
        self._step = meta.step
        self._saves += meta.saves
        try:
            if self._layout is not None:
                self._renew(meta.sessions)
            fence = self._copier.fence() if self._copier is not None and meta.loads else None
        except Exception:
            for job in meta.loads:
                self._load_ends.ended(job, Report(ok=False, cause="internal", reason="an internal failure"))
            raise
        for job in meta.loads:
            if not job.parts:
                self._load_ends.ended(job, Report(ok=False, cause="promise", reason="what had been promised could not be loaded"))
            elif self._layout is None or not _begun(self._loader, partial(self._load, job, fence, _deadline(job))):
                self._load_ends.ended(job, Report(ok=False, cause="rank", reason="this rank has no KV cache, or too much to do"))

    def start_saves(self) -> None:
        """Begin to copy what this step, or an earlier one, has computed. Idempotent within a step.

        Whatever happens in here, each job is either begun or reported as failed.
        """
        jobs, self._saves = self._saves, []
        if not jobs:
            return
        try:
            fence = self._copier.fence() if self._copier is not None else None
        except Exception:
            for job in jobs:
                self._save_ended(job, Report(ok=False))
            raise
        for job in jobs:
            if self._layout is None or not _begun(self._saver, partial(self._save, job, fence)):
                self._save_ended(job, Report(ok=False))

    def begin_saves(self, jobs: Sequence[SaveJob]) -> None:
        """Begin saves between two steps."""
        self._saves += jobs
        self.start_saves()

    def ended_saves(self) -> list[tuple[int, Report]]:
        """Reports of the last saves that have ended, also of those that are told with a step's output."""
        with self._lock:
            return list(self._ended_saves)

    def take_loads(self, *, wait_s: float = 0.0, computes: bool = False) -> tuple[set[str], set[str], set[int]]:
        """See :meth:`LoadEnds.take`. With ``wait_s``, loads may end before what their device has still to do."""
        # Of several groups vLLM could not be told afterwards which blocks are bad.
        follow = self._copier.follow if wait_s and self._copier is not None and not self.selective else None
        return self._load_ends.take(wait_s=wait_s, computes=computes, follow=follow)

    def worker_meta(self) -> KvtierdWorkerMetadata | None:
        """What the scheduler should know since the last step; None when there is nothing."""
        with self._lock:
            saves, self._save_reports = self._save_reports, {}
        loads = self._load_ends.told()
        layouts = {}
        if not self._layout_told and self.rank_layout is not None:
            self._layout_told = True
            layouts = {self.rank: self.rank_layout}
        step, self._step = self._step, 0
        if not saves and not loads and not layouts and not step:
            return None
        return KvtierdWorkerMetadata(saves, loads, layouts, step)

    def wait_for_copies(self, timeout_s: float) -> bool:
        """Wait until all copies that were begun have ended. Whether they have."""
        until_s = time.monotonic() + timeout_s
        threads = [(background, threading.Event()) for background in (self._loader, self._saver)]
        begun = [background.submit(ended.set) for background, ended in threads]  # runs after what was submitted before
        return all(begun) and all(ended.wait(max(0.0, until_s - time.monotonic())) for _, ended in threads)

    def close(self) -> None:
        """End. Waits for copies that are under way."""
        self._closed = True
        ended = [self._loader.close(), self._saver.close(), self._mapper.close()]
        with self._lock:
            sessions, self._sessions = self._sessions, {}
        for joined in sessions.values():
            joined.retire()
        if self._copier is not None and all(ended):  # else a copy still uses it
            self._copier.close()

    def _renew(self, sessions: Sequence[SessionInfo]) -> None:
        """Make these the sessions of their pools. Older ones go when the loads that were begun before have ended."""
        for session in sessions:
            with self._lock:
                if session.token in self._sessions:
                    continue
                old = [token for token, joined in self._sessions.items() if joined.session.pool == session.pool]
                self._sessions[session.token] = Joined(session)
            self._loader.submit(partial(self._join, session.token, old))

    # ---- in the background

    def _shard(self, session: SessionInfo) -> int:
        pp, tp = self.rank
        return pp if session.replicated else pp * self._tp_size + tp

    def _join(self, token: bytes, old: Sequence[bytes]) -> None:
        """Let go of older sessions of a pool, and connect to the new one ahead of its first copy."""
        with self._lock:
            gone = [self._sessions.pop(t) for t in old if t in self._sessions]
            joined = self._sessions.get(token)
        for session in gone:
            session.retire()
        if joined is None or self._closed:
            return
        try:
            extents = joined.enter(self._connect, time.monotonic() + JOIN_TIMEOUT_S)
        except KvtierdError as e:
            log.warning("kvtierd: rank %s could not join the session: %s", self.rank, e)
            return
        if not (self._pins_memory and extents.existing and self._mapper.submit(partial(self._map_ahead, joined, extents))):
            joined.leave()

    def _map_ahead(self, joined: Joined, extents: ExtentMap) -> None:
        """Map what the daemon holds from before, so that first loads need not wait until it is pinned. Half of the time at most:
        the engine's kernels are launched more slowly meanwhile."""
        try:
            for extent in extents.existing:
                if self._closed or joined.retired or extents.closed:
                    return
                begun_s = time.monotonic()
                try:
                    extents.map([extent], MAP_AHEAD_TIMEOUT_S)
                except RequestError:
                    continue  # it is gone by now, or a load will say why
                time.sleep(time.monotonic() - begun_s)
        except KvtierdError as e:
            log.debug("kvtierd: memory is not mapped ahead: %s", e)
        finally:
            joined.leave()

    @property
    def _pins_memory(self) -> bool:
        return self._layout is not None and self._layout.device.type != "cpu"

    def _connect(self, session: SessionInfo, timeout_s: float, on_lost: Callable[[], None]) -> ExtentMap:
        copier = self._copier
        assert copier is not None
        return ExtentMap(
            session.descriptor_socket,
            session.token,
            shard=self._shard(session),
            pins_memory=self._pins_memory,
            timeout_s=timeout_s,
            numa_node=self._node,
            on_mapped=copier.on_mapped,
            on_revoked=copier.on_revoked,
            on_lost=on_lost,
            # Ranks that read one shard are on several GPUs, and cannot all be sure to reach the memory of one.
            device=None if session.replicated and self._tp_size > 1 else copier.device,
        )

    def _session(self, part: Part) -> Joined:
        with self._lock:
            joined = self._sessions.get(part.token)
        if joined is None:
            raise DaemonUnavailableError("the session has ended")
        return joined

    def _copy(
        self,
        part: Part,
        until_s: float,
        run: Callable[[BlockCopier, Iterable[Chunk], OnQueued], int | None],
        on_queued: Callable[[object], None] | None = None,
    ) -> tuple[int, float]:
        """Run a copy of one part's slots and blocks on this rank.

        Args:
            part: what to copy.
            until_s: longest wait for the daemon, on the monotonic clock.
            run: copies these chunks. Returns how many are whole; None for all.
            on_queued: told once only a device has something left to do, with a mark of that.

        Returns:
            The bytes of the blocks, and the seconds that the copy alone took.

        Raises:
            KvtierdError: the daemon went away or cannot be reached, so the copy counts for nothing.
            TimeoutError: not all chunks are whole.
        """
        layout, copier = self._layout, self._copier
        assert layout is not None
        assert copier is not None
        joined = self._session(part)
        extents = joined.enter(self._connect, until_s)
        queued_s = float("-inf")

        def queued(mark: object, whole: int) -> None:
            nonlocal queued_s
            if on_queued is not None and whole == len(stretches) and not extents.closed:
                queued_s = time.monotonic()
                on_queued(mark)

        try:
            pp_size = int(self._config.parallel_config.pipeline_parallel_size)
            shards = pp_size if joined.session.replicated else pp_size * self._tp_size
            mine = part.slots[self._shard(joined.session) :: shards]
            joined.map(extents, mine.tolist(), until_s)
            ids = part.block_ids.tolist()
            size, block_bytes = len(ids) // len(mine), layout.groups[part.group].block_bytes
            stretches = extents.stretches(mine, size * block_bytes, STRETCH_BYTES)
            begun_s = time.monotonic()
            # One after the other, while those before are copied. Closed, it holds none, so that a revoked extent can be unmapped.
            with closing(
                (extents.view(int(mine[a]), (b - a) * size * block_bytes, b - a), ids[a * size : b * size]) for a, b in stretches
            ) as chunks:
                whole = run(copier, chunks, queued)
            seconds = time.monotonic() - begun_s
            if extents.closed and time.monotonic() - queued_s > SUCCESSOR_S:
                raise DaemonUnavailableError("the daemon went away during the copy")
        finally:
            joined.leave()
        if whole is not None and whole < len(stretches):
            raise TimeoutError("the deadline passed")
        return int((part.block_ids >= 0).sum()) * block_bytes, seconds

    def _load(self, job: LoadJob, fence: object | None, until_s: float) -> None:
        report = Report()
        span = tracing.begin("kvtierd.worker.load", job.traceparent) if job.traceparent else tracing.NO_SPAN

        def late() -> bool:
            return time.monotonic() > until_s or self._closed

        def run() -> None:
            _pass(fence, late)
            parts = [part for part in job.parts if len(part.slots)]
            for part in parts:
                on_queued = partial(self._load_ends.queued, job) if part is parts[-1] else None
                load = partial(_load_chunks, part.group, fence, late)
                nbytes, seconds = self._copy(part, until_s, load, on_queued)
                report.nbytes += nbytes
                report.seconds += seconds

        self._try(report, "load", run, late)
        span.set(rank=str(self.rank), bytes=report.nbytes, copy_s=report.seconds)
        span.end("" if report.ok else f"{report.cause}: {report.reason}")
        self._load_ends.ended(job, report)

    def _save(self, job: SaveJob, fence: object | None) -> None:
        report, part = Report(), job.part

        def run() -> None:
            if self._session(part).session.replicated and self.rank[1] != 0:
                return  # rank 0 of each stage writes for all
            _pass(fence, lambda: False)
            save = partial(_save_chunks, part.group, fence)
            report.nbytes, report.seconds = self._copy(part, float("inf"), save)

        self._try(report, "save", run, lambda: False)
        self._save_ended(job, report)

    def _try(self, report: Report, what: str, run: Callable[[], None], late: Callable[[], bool]) -> None:
        """Run a job, unless its time is over, and note in its report how it ended."""
        try:
            if late():
                raise TimeoutError("the deadline passed before it could begin")
            run()
        except Exception as e:  # not kept: it holds the views of slots that the copy had
            report.ok, report.reason = False, str(e) or type(e).__name__
            report.cause = "deadline" if late() else _cause(e)
            report.lost = e.slots if isinstance(e, LostMemoryError) else frozenset()
            if report.cause == "internal":
                log.exception("kvtierd: a %s failed on rank %s", what, self.rank)

    def _save_ended(self, job: SaveJob, report: Report) -> None:
        with self._lock:
            self._save_reports[job.job_id] = report
            self._ended_saves.append((job.job_id, report))


def _begun(background: Background, task: Callable[[], None]) -> bool:
    """Whether a task will run; whatever happens, so that the others are not forgotten for it."""
    try:
        return background.submit(task)
    except Exception:
        log.exception("kvtierd: a copy could not be begun")
        return False


def _cause(error: Exception) -> str:
    for kind, cause in ((TimeoutError, "deadline"), (RequestError, "refused"), (KvtierdError, "daemon")):
        if isinstance(error, kind):
            return cause
    return "internal"


def _pass(fence: Any, late: Callable[[], bool]) -> None:
    """Wait for a fence of the copier's. It would do so itself, but then it would seem to take as long as the engine's own work.

    Raises:
        TimeoutError: it is too late.
    """
    while fence is not None and not fence.query():
        if late():
            raise TimeoutError("the deadline passed before the engine's own work had ended")
        time.sleep(FENCE_POLL_S)


def _deadline(job: LoadJob) -> float:
    return time.monotonic() + job.timeout_s


def _load_chunks(
    group: int, fence: object | None, cancelled: Callable[[], bool], copier: BlockCopier, chunks: Iterable[Chunk], queued: OnQueued
) -> int:
    return copier.load(group, chunks, fence, cancelled, queued)


def _save_chunks(group: int, fence: object | None, copier: BlockCopier, chunks: Iterable[Chunk], _queued: OnQueued) -> None:
    copier.save(group, chunks, fence)
