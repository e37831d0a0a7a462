"""Ends of one rank's loads, on their way from the thread that copies to the engine's.

A device still copies for a while when all of a load is queued on it. An engine with nothing else to do need not wait for that: the
load counts as ended, and what is computed next begins behind it on the device. Such a load ends a second time, when nothing is
under way any more: only then may its slots be given back, and only then is it known whether it went well. The step that computes
with its blocks tells of that. Should it have failed, vLLM is told which blocks are bad, as it is of loads within a step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from kvtierd.connectors.vllm.metadata import LoadJob, Report

TAIL_S: Final = 1.0
"""Longest wait in a step for what a device copies into blocks that the step computes with: it comes before that."""

log = logging.getLogger("vllm.kvtierd")


class LoadEnds:
    """See the module. ``take`` and ``told`` are for the engine's thread, the others for any."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        # Under its lock:
        self._open = 0
        self._reports: dict[int, tuple[LoadJob, Report]] = {}
        self._queued: dict[int, tuple[LoadJob, object]] = {}
        """Of which only a device has something left to do, with a mark of that."""
        # The engine's thread's own:
        self._told: dict[int, Report] = {}
        self._tails: set[int] = set()
        """Told as ended, and not at their end."""

    def begin(self, count: int) -> None:
        """So many loads will end."""
        with self._news:
            self._open += count

    def queued(self, job: LoadJob, mark: object) -> None:
        """Only a device has something left to do for a load."""
        with self._news:
            self._queued[job.job_id] = job, mark
            self._news.notify_all()

    def ended(self, job: LoadJob, report: Report) -> None:
        """Nothing of a load is under way any more."""
        with self._news:
            self._open -= 1
            self._queued.pop(job.job_id, None)
            self._reports[job.job_id] = job, report
            self._news.notify_all()

    def take(
        self, *, wait_s: float = 0.0, computes: bool = False, follow: Callable[[object], None] | None = None
    ) -> tuple[set[str], set[str], set[int]]:
        """Requests whose loads have ended, those of them that failed, and the blocks that hold nothing. Each once.

        Args:
            wait_s: wait so long for an end.
            computes: the engine has queued a step, which may use blocks of loads that were told as ended before their end.
            follow: lets what the engine queues next begin behind a mark; given where loads may be told before their end.
        """
        with self._news:
            if computes and self._tails:
                self._news.wait_for(lambda: self._tails <= self._reports.keys(), TAIL_S)
            elif wait_s:
                early = self._queued if follow is not None else {}
                self._news.wait_for(lambda: self._reports or early or self._open <= len(self._tails), wait_s)
            reports, self._reports = self._reports, {}
            queued: dict[int, tuple[LoadJob, object]] = {}
            if follow is not None:
                queued, self._queued = self._queued, {}
        ended: set[str] = set()
        failed: list[LoadJob] = []
        for job, mark in queued.values():
            if follow is not None and _follows(follow, mark):
                self._tails.add(job.job_id)
                ended.add(job.request_id)
                self._tell(job.job_id, Report(early=1))
        for job, report in reports.values():
            if job.job_id in self._tails:
                self._tails.discard(job.job_id)
                self._tell(job.job_id, report.tail())
            else:
                ended.add(job.request_id)
                self._tell(job.job_id, report)
            if not report.ok:
                failed.append(job)
        return ended, {job.request_id for job in failed}, {block for job in failed for block in job.blocks}

    @property
    def untold(self) -> int:
        """Loads under way, and those whose end the scheduler does not know."""
        with self._news:
            return self._open + len(self._reports) + len(self._told)

    def told(self) -> dict[int, Report]:
        """What the scheduler should know of the loads that were taken, by job. Each once."""
        told, self._told = self._told, {}
        return told

    def _tell(self, job_id: int, report: Report) -> None:
        known = self._told.get(job_id)
        self._told[job_id] = report if known is None else known.merge(report)


def _follows(follow: Callable[[object], None], mark: object) -> bool:
    try:
        follow(mark)
    except RuntimeError as e:
        log.warning("kvtierd: the end of a load is waited for: %s", e)
        return False
    return True
