"""The worker's side: one rank's copies between its paged KV cache and the daemon's slots.

Copies run in two background threads, one for loads and one for saves, so a step of the engine never waits for them. A load
counts as good only if the connection that keeps its slots in place outlived the copy; a thread reports a job when it will not
touch the job's blocks any more, so nothing can land late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from kvtierd.client import ExtentMap
from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.vllm.copying import BlockCopier, make_copier, self_test
from kvtierd.connectors.vllm.layout import UnsupportedLayoutError, WorkerLayout, is_selective, worker_layout
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
from kvtierd.errors import DaemonUnavailableError, KvtierdError

T = TypeVar("T")
JOIN_TIMEOUT_S: Final = 2.0

log = logging.getLogger("vllm.kvtierd")


class _Joined:
    """One session that this process has joined. Its connection stays open until the last copy has left: the daemon takes the
    session's slots back when it closes."""

    def __init__(self, session: SessionInfo) -> None:
        self.session = session
        self._lock = threading.Lock()
        self._extents: ExtentMap | None = None
        self._users = 0
        self._retired = False

    def enter(self, join: Callable[[SessionInfo], ExtentMap]) -> ExtentMap:
        """Begin a copy; pair with ``leave``. Joins when it is the first, or when the last connection was lost.

        Raises:
            KvtierdError: the session has ended, or the daemon cannot be reached.
        """
        with self._lock:
            if self._retired:
                raise DaemonUnavailableError("the session has ended")
            if self._extents is None or (self._extents.closed and not self._users):
                if self._extents is not None:
                    self._extents.close()
                    self._extents = None
                self._extents = join(self.session)
            self._users += 1
            return self._extents

    def leave(self) -> None:
        """End a copy."""
        with self._lock:
            self._users -= 1
            self._close_if_done()

    def retire(self) -> None:
        """No copy begins any more."""
        with self._lock:
            self._retired = True
            self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not self._users and self._extents is not None:
            self._extents.close()
            self._extents = None


class WorkerSide:
    """One rank. Methods run on the engine's thread and do not block; they may raise, the caller guards.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of this rank.
        rank: pipeline and tensor parallel rank.
        tp_size: tensor parallel ranks.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, rank: Rank, tp_size: int) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self.rank = rank
        self._tp_size = tp_size
        self._layout: WorkerLayout | None = None
        self._copier: BlockCopier | None = None
        self.rank_layout: RankLayout | None = None
        self._layout_told = False
        self._lock = threading.Lock()
        self._sessions: dict[bytes, _Joined] = {}
        self._loader = Background(1, "kvtierd-load")
        self._saver = Background(1, "kvtierd-save")
        self._closed = False
        # Under the lock, for the next report:
        self._load_reports: dict[int, tuple[LoadJob, Report]] = {}
        self._save_reports: dict[int, Report] = {}
        self._told_loads: dict[int, Report] = {}
        self._bad_blocks: set[int] = set()
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
            self.rank_layout = RankLayout(self._layout.groups)
        except UnsupportedLayoutError as e:
            self._layout = None
            self.rank_layout = RankLayout((), str(e))

    def refuse(self, why: str) -> None:
        """The KV cache cannot be served."""
        self._layout = None
        self.rank_layout = RankLayout((), why)

    # ---- each step

    def start_loads(self, meta: KvtierdMetadata) -> None:
        """Join new sessions, and begin to copy into blocks that waiting requests own.

        Whatever happens in here, each job is either begun or reported as failed.
        """
        self._step = meta.step
        self._saves += meta.saves
        try:
            if self._layout is not None:
                self._renew(meta.sessions)
            fence = self._copier.fence() if self._copier is not None and meta.loads else None
        except Exception:
            for job in meta.loads:
                self._load_ended(job, _failure("an internal failure"))
            raise
        for job in meta.loads:
            if self._layout is None or not job.parts or not _begun(self._loader, partial(self._load, job, fence, _deadline(job))):
                self._load_ended(job, _failure("this rank has no KV cache to load into, or too much to do"))

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
                self._save_ended(job, _save_failure(job))
            raise
        for job in jobs:
            if self._layout is None or not _begun(self._saver, partial(self._save, job, fence)):
                self._save_ended(job, _save_failure(job))

    def take_loads(self) -> tuple[set[str], set[str], set[int]]:
        """Requests whose loads have ended, those of them that failed, and the blocks that hold nothing. Each once."""
        with self._lock:
            ended, self._load_reports = self._load_reports, {}
        failed = {job.request_id for job, report in ended.values() if report.failed}
        for job_id, (job, report) in ended.items():
            self._told_loads[job_id] = report
            if report.failed:
                self._bad_blocks.update(job.blocks)
        bad, self._bad_blocks = self._bad_blocks, set()
        return {job.request_id for job, _ in ended.values()}, failed, bad

    def worker_meta(self) -> KvtierdWorkerMetadata | None:
        """What the scheduler should know since the last step; None when there is nothing."""
        with self._lock:
            saves, self._save_reports = self._save_reports, {}
        loads, self._told_loads = self._told_loads, {}
        layouts = {}
        if not self._layout_told and self.rank_layout is not None:
            self._layout_told = True
            layouts = {self.rank: self.rank_layout}
        step, self._step = self._step, 0
        if not saves and not loads and not layouts and not step:
            return None
        return KvtierdWorkerMetadata(saves, loads, layouts, step)

    def close(self) -> None:
        """End. Waits for copies that are under way."""
        self._closed = True
        ended = [self._loader.close(), self._saver.close()]
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
                self._sessions[session.token] = _Joined(session)
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
            joined.enter(self._connect)
        except KvtierdError as e:
            log.warning("kvtierd: rank %s could not join the session: %s", self.rank, e)
        else:
            joined.leave()

    def _connect(self, session: SessionInfo) -> ExtentMap:
        copier = self._copier
        assert copier is not None
        return ExtentMap(
            session.descriptor_socket,
            session.token,
            shard=self._shard(session),
            pins_memory=self._layout is not None and self._layout.device.type != "cpu",
            timeout_s=JOIN_TIMEOUT_S,
            on_mapped=copier.on_mapped,
            on_revoked=copier.on_revoked,
        )

    def _session(self, part: Part) -> _Joined:
        with self._lock:
            joined = self._sessions.get(part.token)
        if joined is None:
            raise DaemonUnavailableError("the session has ended")
        return joined

    def _copy(self, part: Part, run: Callable[[BlockCopier, list[tuple[memoryview, list[int]]]], T]) -> tuple[T, int]:
        """Run a copy of one part's slots and blocks on this rank. Returns its result and the bytes of the slots.

        Raises:
            KvtierdError: the daemon went away, so the copy counts for nothing.
        """
        layout, copier = self._layout, self._copier
        assert layout is not None
        assert copier is not None
        joined = self._session(part)
        extents = joined.enter(self._connect)
        try:
            pp_size = int(self._config.parallel_config.pipeline_parallel_size)
            shards = pp_size if joined.session.replicated else pp_size * self._tp_size
            mine = part.slots[self._shard(joined.session) :: shards].tolist()
            ids = part.block_ids.tolist()
            size = len(ids) // len(mine)
            nbytes = size * layout.groups[part.group].block_bytes
            chunks = [(extents.view(slot, nbytes), ids[n * size : (n + 1) * size]) for n, slot in enumerate(mine)]
            result = run(copier, chunks)
            chunks.clear()  # lets go of slot memory, so that a revoked extent can be unmapped
            if extents.closed:
                raise DaemonUnavailableError("the daemon went away during the copy")
        finally:
            joined.leave()
        return result, nbytes * len(mine)

    def _load(self, job: LoadJob, fence: object | None, until_s: float) -> None:
        started_s = time.monotonic()
        nbytes, reason = 0, ""
        try:
            for part in job.parts:
                if not len(part.slots):
                    continue
                load = partial(_load_chunks, part.group, fence, lambda: time.monotonic() > until_s or self._closed)
                whole, size = self._copy(part, load)
                nbytes += size
                if not whole:
                    reason = "the deadline passed"
                    break
        except KvtierdError as e:
            reason = str(e)
        except Exception as e:
            log.exception("kvtierd: a load failed on rank %s", self.rank)
            reason = f"{type(e).__name__}: {e}"
        failed = frozenset([0]) if reason else frozenset[int]()
        self._load_ended(job, Report(1, failed, nbytes, time.monotonic() - started_s, reason))

    def _load_ended(self, job: LoadJob, report: Report) -> None:
        with self._lock:
            self._load_reports[job.job_id] = (job, report)

    def _save(self, job: SaveJob, fence: object | None) -> None:
        started_s = time.monotonic()
        part = job.part
        failed = _save_failure(job).failed
        nbytes, reason = 0, ""
        try:
            if self._session(part).session.replicated and self.rank[1] != 0:
                failed = frozenset()  # rank 0 of each stage writes for all
            else:
                _, nbytes = self._copy(part, lambda copier, chunks: copier.save(part.group, chunks, fence))
                failed = frozenset()
        except KvtierdError as e:
            reason = str(e)
        except Exception as e:
            log.exception("kvtierd: a save failed on rank %s", self.rank)
            reason = f"{type(e).__name__}: {e}"
        self._save_ended(job, Report(1, failed, nbytes, time.monotonic() - started_s, reason))

    def _save_ended(self, job: SaveJob, report: Report) -> None:
        with self._lock:
            self._save_reports[job.job_id] = report


def _begun(background: Background, task: Callable[[], None]) -> bool:
    """Whether a task will run; whatever happens, so that the others are not forgotten for it."""
    try:
        return background.submit(task)
    except Exception:
        log.exception("kvtierd: a copy could not be begun")
        return False


def _failure(reason: str) -> Report:
    return Report(failed=frozenset([0]), reason=reason)


def _save_failure(job: SaveJob) -> Report:
    """Of every chunk; there are no more of them than blocks."""
    return Report(failed=frozenset(range(len(job.part.block_ids))))


def _deadline(job: LoadJob) -> float:
    return time.monotonic() + job.timeout_s


def _load_chunks(
    group: int, fence: object | None, cancelled: Callable[[], bool], copier: BlockCopier, chunks: list[tuple[memoryview, list[int]]]
) -> bool:
    """Whether all of them were loaded."""
    return copier.load(group, chunks, fence, cancelled) == len(chunks)
