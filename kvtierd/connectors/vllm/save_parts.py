"""What ``Saves`` keeps: chunks that are to be asked for, and saves that are under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtierd.client import Reservation
from kvtierd.connectors.vllm.identity import GroupPlan
from kvtierd.connectors.vllm.metadata import Report


@dataclass(slots=True)
class Save:
    """Chunks of one group that hold their blocks until they are saved, or are not to be."""

    save_id: int
    request_id: str
    tenant: str
    group: GroupPlan
    keys: list[bytes]
    blocks: list[list[Any]]
    """One list of the pool's block objects a chunk, each holding a reference of ours."""
    pin_s: float | None
    """Pin the blocks for this long once they are published, or found held."""
    ttl_s: float | None
    """Forget the blocks this long after they are published."""
    hashes: list[list[bytes]]
    """The engine's own hashes of each chunk's blocks, where events are published."""
    before: Sequence[bytes]
    """Keys of the request's chunks before these, where it is the last portion of a prompt."""
    matched: int
    """Chunks that the request did not have to compute."""
    epoch: int
    """See ``Saves.forget``."""
    traceparent: str = ""
    started_s: float = field(default_factory=time.monotonic)
    reservation: Reservation | None = None
    granted: list[int] = field(default_factory=list)
    sent_s: float = 0.0
    """When it was handed to the workers, which read its blocks from then on; 0 before."""
    dropped: bool = False
    """Its blocks were given back before that: it only waits for the daemon's answer."""
    report: Report | None = None


@dataclass(slots=True)
class Wanted:
    """What is to be asked for of one group's share in a run of chunks."""

    group: GroupPlan
    chunks: list[int]
    keys: list[bytes]
    block_ids: list[list[int]]
    known: int
    """Chunks left out because they are held."""

    @property
    def size(self) -> int:
        """Blocks to hold."""
        return sum(len(ids) for ids in self.block_ids)
