"""What the parts of the scheduler's side share once the engine's layout is known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.vllm.events import Events
from kvtierd.connectors.vllm.gate import Gate
from kvtierd.connectors.vllm.hashes import Keys
from kvtierd.connectors.vllm.identity import EnginePlan
from kvtierd.connectors.vllm.pools import Pools
from kvtierd.connectors.vllm.settings import Settings


@dataclass(frozen=True)
class Context:
    """One engine's.

    Attributes:
        settings: of the connector.
        pools: clients of the daemon.
        keys: makes the requests' keys; on the engine's thread only.
        gate: measured speeds.
        counts: for the metrics; changed on the engine's thread only.
        calls: threads for short calls to the daemon.
        lookups: threads for lookups, which may wait for NVMe.
        block_pool: vLLM's blocks.
        events: for vLLM's event stream; None when nobody listens.
    """

    settings: Settings
    pools: Pools
    keys: Keys
    gate: Gate
    counts: Counter[str]
    calls: Background
    lookups: Background
    block_pool: Any
    events: Events | None = None

    @property
    def plan(self) -> EnginePlan:
        """How the engine's KV cache is cut into blocks."""
        return self.pools.plan

    @property
    def null_block(self) -> int:
        """Id of the block that stands for "none" in block tables; -1 when there is none."""
        null = getattr(self.block_pool, "null_block", None)
        return -1 if null is None else int(null.block_id)
