"""How the scheduler's side comes to serve: it needs the layouts of all ranks, vLLM's block pool, and clients of the daemon."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.events import Events
from kvtierd.connectors.vllm.gate import Gate
from kvtierd.connectors.vllm.hashes import Keys
from kvtierd.connectors.vllm.layout import UnsupportedLayoutError
from kvtierd.connectors.vllm.metadata import Rank, RankLayout
from kvtierd.connectors.vllm.pools import Pools
from kvtierd.connectors.vllm.settings import Settings
from kvtierd.errors import KvtierdError

log = logging.getLogger("vllm.kvtierd")


class Start:
    """What is known so far. Methods run on the engine's thread and do not wait for the daemon.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of the engine.
        settings: of the connector.
        recovers_groups: this vLLM tells which blocks have left a window, and takes failed loads by request.
        counts: of the connector.
        calls: for calls to the daemon.
        lookups: for lookups, which may wait for NVMe.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        *,
        recovers_groups: bool,
        counts: Counter[str],
        calls: Background,
        lookups: Background,
    ) -> None:
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._recovers_groups = recovers_groups
        self._counts, self._calls, self._lookups = counts, calls, lookups
        self._block_pool: Any = None
        self.layouts: dict[Rank, RankLayout] = {}
        self.pools: Pools | None = None
        self.ctx: Context | None = None
        """What everything else needs, once it is there."""
        self.disabled = ""
        """Why this engine is served without a cache; empty when it is not."""

    def learn(self, layouts: Mapping[Rank, RankLayout]) -> None:
        """Ranks tell how their KV cache lies in memory. Once all have, the daemon is attached to."""
        self.layouts |= layouts
        parallel = self._config.parallel_config
        if self.pools or self.disabled or len(self.layouts) < parallel.tensor_parallel_size * parallel.pipeline_parallel_size:
            return
        try:
            pools = Pools(self._config, self.layouts, self._settings, str(self._config.kv_transfer_config.engine_id))
        except (UnsupportedLayoutError, ValueError, KvtierdError) as e:
            self.disable(str(e))
            return
        if pools.plan.selective and not self._recovers_groups:
            pools.close()
            self.disable("this vLLM is too old for models with several KV cache groups or sliding windows: use a newer one")
            return
        self.pools = pools
        self._begin()
        plan = pools.plan
        log.info(
            "kvtierd: blocks of %d tokens and %.2f MiB in %d KV cache groups; %s hashes",
            plan.chunk_tokens,
            sum(plan.block_bytes(g.pool) for g in plan.groups) / 2**20,
            len(plan.groups),
            "the engine's" if pools.hashes_usable else "its own chain of",
        )

    def bind_block_pool(self, block_pool: Any) -> None:
        """vLLM's pool of blocks, in which saves hold theirs."""
        self._block_pool = block_pool
        self._begin()

    def _begin(self) -> None:
        pools = self.pools
        if pools is None or self._block_pool is None or self.ctx is not None:
            return
        plan = pools.plan
        keys = Keys(plan.chunk_tokens, self._hash_tokens(), len(plan.groups), own_chain=not pools.hashes_usable)
        listening = getattr(getattr(self._config, "kv_events_config", None), "enable_kv_cache_events", False)
        self.ctx = Context(
            self._settings,
            pools,
            keys,
            Gate(),
            self._counts,
            self._calls,
            self._lookups,
            self._block_pool,
            Events() if listening else None,
        )

    def _hash_tokens(self) -> int:
        given = getattr(self._kv_cache_config, "hash_block_size", None)
        if given:
            return int(given)
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        return int(resolve_kv_cache_block_sizes(self._kv_cache_config, self._config)[1])

    def disable(self, why: str) -> None:
        """Serve without a cache from now on."""
        if not self.disabled:
            self.disabled = why
            log.error("kvtierd: no KV cache is kept for this engine: %s", why)
