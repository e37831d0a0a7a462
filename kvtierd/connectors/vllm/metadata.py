"""What travels between the connector's two sides inside vLLM's own messages, once a step. Plain data, picklable.

Scheduler to workers: sessions to join, blocks to load, blocks to save. Workers to scheduler: how each job ended on each rank,
and, once, how the KV cache lies in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvtierd.connectors.vllm.layout import GroupLayout

Rank = tuple[int, int]
"""Pipeline rank, tensor parallel rank."""
CAUSES: Final = ("daemon", "refused", "deadline", "rank", "promise", "internal")
"""Why a job failed: the daemon went away or could not be reached; it, or the system, would not give memory; its time was over; the
rank could not take it; there was nothing to load from although it had been promised; something unexpected."""


@dataclass(slots=True)
class SessionInfo:
    """A session that workers join.

    Attributes:
        pool: number of the pool; one for each distinct size of a block.
        token: the session's.
        descriptor_socket: where to join.
        replicated: one shard holds the bytes of all tensor parallel ranks (MLA).
    """

    pool: int
    token: bytes
    descriptor_socket: str
    replicated: bool


@dataclass(slots=True)
class Part:
    """Chunks of one KV cache group in one pool.

    Attributes:
        group: the KV cache group.
        token: of the session that the slots belong to.
        slots: one slot a shard for each chunk, flat.
        block_ids: the engine's blocks of each chunk, flat; -1 where a block of the chunk takes no part.
    """

    group: int
    token: bytes
    slots: NDArray[np.int64]
    block_ids: NDArray[np.int64]


@dataclass(slots=True)
class LoadJob:
    """Blocks to copy from slots into the KV cache for one waiting request."""

    job_id: int
    request_id: str
    parts: list[Part]
    lost_blocks: NDArray[np.int64]
    """Where ``parts`` is empty: have the load reported as failed, with these blocks."""
    timeout_s: float
    traceparent: str = ""
    """The span of the load, where it is traced."""

    @property
    def blocks(self) -> list[int]:
        """All blocks that the load fills, or that are lost with it."""
        found = [part.block_ids[part.block_ids >= 0] for part in self.parts]
        return [int(b) for b in np.concatenate([*found, self.lost_blocks])]


@dataclass(slots=True)
class SaveJob:
    """Chunks to copy from the KV cache into slots, after the step's forward pass."""

    job_id: int
    part: Part


@dataclass(slots=True)
class KvtierdMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, each step."""

    sessions: list[SessionInfo] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    """Finished requests whose blocks were kept for saves and may go now."""
    step: int = 0
    """Number of this step, to be returned with its reports; 0 when it is not measured."""
    computes: bool = False
    """Tokens are computed in this step."""
    idle: bool = False
    """No tokens are, nor in a step before, so workers may wait a moment for the end of a load."""


@dataclass(slots=True)
class Report:
    """How a job ended, over the ranks that reported so far.

    Attributes:
        ranks: how many.
        ok: every one of them has copied everything; else nothing of the job counts.
        nbytes: bytes of the blocks that were copied.
        seconds: what copying took, without the waiting before it.
        cause: why a job failed, one of ``CAUSES``.
        reason: the same for people to read.
        lost: slots whose memory could not be had.
        early: ranks whose engine may go on although their device still copies. Each reports a second time, at the end of that.
    """

    ranks: int = 1
    ok: bool = True
    nbytes: int = 0
    seconds: float = 0.0
    cause: str = ""
    reason: str = ""
    lost: frozenset[int] = frozenset()
    early: int = 0

    def merge(self, other: Report) -> Report:
        """Both together. Bytes add up; the slowest rank decides the time."""
        return Report(
            self.ranks + other.ranks,
            self.ok and other.ok,
            self.nbytes + other.nbytes,
            max(self.seconds, other.seconds),
            self.cause or other.cause,
            self.reason or other.reason,
            self.lost | other.lost,
            self.early + other.early,
        )

    def tail(self) -> Report:
        """As the second report of a rank that was early."""
        return replace(self, ranks=0, early=-1)


@dataclass(slots=True)
class KvtierdWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    saves: dict[int, Report] = field(default_factory=dict)
    loads: dict[int, Report] = field(default_factory=dict)
    layouts: dict[Rank, RankLayout] = field(default_factory=dict)
    step: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvtierdWorkerMetadata:
        """Join what two ranks say."""
        assert isinstance(other, KvtierdWorkerMetadata)
        return KvtierdWorkerMetadata(
            _merged(self.saves, other.saves),
            _merged(self.loads, other.loads),
            self.layouts | other.layouts,
            max(self.step, other.step),
        )


def _merged(a: dict[int, Report], b: dict[int, Report]) -> dict[int, Report]:
    merged = dict(a)
    for job_id, report in b.items():
        known = merged.get(job_id)
        merged[job_id] = report if known is None else known.merge(report)
    return merged


@dataclass(slots=True)
class RankLayout:
    """How one rank's KV cache lies in memory, and on which host (see ``host_identity``; empty when it is not known).
    ``error`` says why it cannot be used; then ``groups`` is empty."""

    groups: tuple[GroupLayout, ...]
    error: str = ""
    host: str = ""


@dataclass
class KvtierdHandshake(KVConnectorHandshakeMetadata):
    """The same, as vLLM's handshake carries it to the scheduler before the first step."""

    rank: Rank
    layout: RankLayout
