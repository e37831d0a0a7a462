"""``KvtierdConnector``: vLLM's hooks, each guarded.

No exception leaves a hook and no hook waits for the daemon: whatever goes wrong inside is logged, counted and becomes "no
cache". What was promised to vLLM is reported in any case, for vLLM itself waits without a deadline.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from kvtierd import __version__
from kvtierd.connectors.vllm.events import to_vllm
from kvtierd.connectors.vllm.idle import STEP_S
from kvtierd.connectors.vllm.logs import share_handlers
from kvtierd.connectors.vllm.metadata import KvtierdHandshake, KvtierdMetadata, KvtierdWorkerMetadata
from kvtierd.connectors.vllm.resets import is_here
from kvtierd.connectors.vllm.scheduler import SchedulerSide
from kvtierd.connectors.vllm.settings import read_settings
from kvtierd.connectors.vllm.stats import KvtierdPromMetrics, KvtierdStats, take_stats
from kvtierd.connectors.vllm.versions import check_policy, check_version, keeps_stepping, recovers_groups
from kvtierd.connectors.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
MAX_TRACES: Final = 5
"""Failures of one hook that are logged with their trace; later ones are counted."""
SLEEP_S: Final = 60.0
"""How long an engine that goes to sleep waits for copies that are under way."""

log = logging.getLogger("vllm.kvtierd")


class KvtierdConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV cache in kvtierd: HBM, CPU memory and NVMe, beyond the life of the engine.

    Args:
        vllm_config: of the engine.
        role: scheduler or worker; vLLM makes one of each.
        kv_cache_config: of the engine (scheduler) or of this rank (worker).

    Raises:
        ValueError: ``kv_connector_extra_config`` cannot be used, or the version of vLLM is not supported. Only at the start.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share_handlers()
        self._failures: Counter[str] = Counter()
        self._untold_failures = 0
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            check_version()
            transfer = vllm_config.kv_transfer_config
            settings, warnings = read_settings(transfer.kv_connector_extra_config or {}, kv_role=transfer.kv_role)
            for warning in warnings:
                log.warning("kvtierd: %s", warning)
            self._scheduler = SchedulerSide(
                vllm_config,
                kv_cache_config,
                settings,
                recovers_groups=recovers_groups(),
                keeps_stepping=keeps_stepping(),
                failed=self._failed,
            )
            log.info("kvtierd %s: connector for %s", __version__, settings.address or "the default socket")
        else:
            parallel = vllm_config.parallel_config
            rank = _rank(parallel)
            if rank == (0, 0):
                check_policy(vllm_config)
            self._worker = WorkerSide(vllm_config, kv_cache_config, rank, int(parallel.tensor_parallel_size))
            is_here(str(vllm_config.kv_transfer_config.engine_id), self._worker)
        self._bad_blocks: set[int] = set()

    def _guard(self, hook: str, otherwise: T, run: Callable[[], T]) -> T:
        try:
            return run()
        except Exception:
            self._failed(hook)
            return otherwise

    def _failed(self, what: str) -> None:
        self._failures[what] += 1
        if self._failures[what] <= MAX_TRACES:
            log.exception("kvtierd: %s failed unexpectedly; the engine goes on without the cache", what)
        self._untold_failures += 1

    # ---- scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is only a later miss."""
        return False

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Layouts of the ranks, from a vLLM that tells tensor parallel ranks only."""
        self.set_xfer_handshake_metadata_pp_aware({(0, tp): meta for tp, meta in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Layouts of the ranks."""
        side = self._scheduler
        if side is not None:
            found = {m.rank: m.layout for m in metadata.values() if isinstance(m, KvtierdHandshake)}
            self._guard("set_xfer_handshake_metadata", None, lambda: side.learn(found))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """vLLM's pool of blocks."""
        super().bind_gpu_block_pool(gpu_block_pool)
        side = self._scheduler
        if side is not None:
            self._guard("bind_gpu_block_pool", None, lambda: side.bind_block_pool(gpu_block_pool))

    def on_new_request(self, request: Any) -> None:
        """A request arrived."""
        side = self._scheduler
        if side is not None:
            self._guard("on_new_request", None, lambda: side.arrived(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the engine's own hit that can be loaded; None for "ask again at the next step"."""
        side = self._scheduler
        assert side is not None
        nothing: tuple[int | None, bool] = (0, False)
        return self._guard("get_num_new_matched_tokens", nothing, lambda: side.matched(request, num_computed_tokens))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks were found for a request."""
        side = self._scheduler
        assert side is not None

        def run() -> bool:
            side.allocated(request, blocks, num_external_tokens)
            return True

        if not self._guard("update_state_after_alloc", False, run) and num_external_tokens:
            self._guard("fail", None, lambda: side.fail(request, blocks.get_block_ids(), num_external_tokens))

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Where the loaded tokens were held."""
        side = self._scheduler
        assert side is not None

        def run() -> dict[Any, int]:
            from vllm.v1.metrics.cache_hit_source import CacheHitSource

            names = {"hbm": CacheHitSource.DEVICE, "cpu": CacheHitSource.HOST, "nvme": CacheHitSource.DISK}
            found: dict[Any, int] = {}
            for tier, tokens in side.sources(request).items():
                found[names[tier]] = found.get(names[tier], 0) + tokens
            if sum(found.values()) != num_external_tokens:
                return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
            return found

        return self._guard("get_external_cache_hit_sources", {}, run)

    def build_connector_meta(self, scheduler_output: Any) -> KvtierdMetadata:
        """Work for the workers in this step."""
        side = self._scheduler
        assert side is not None
        meta = self._guard("build_connector_meta", None, lambda: side.build(scheduler_output))
        return side.emergency() if meta is None else meta

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        side = self._scheduler
        assert side is not None
        meta = connector_output.kv_connector_worker_meta
        ours = meta if isinstance(meta, KvtierdWorkerMetadata) else None
        ended = set(connector_output.finished_recving or ())
        self._guard("update_connector_output", None, lambda: side.output(ours, ended))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended (single KV cache group)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended."""
        side = self._scheduler
        assert side is not None
        return self._guard("request_finished", False, lambda: side.finished(request, block_ids)), None

    def has_pending_push_work(self) -> bool:
        """Steps are needed to finish saves although no request runs."""
        side = self._scheduler
        return side is not None and self._guard("has_pending_push_work", False, lambda: side.pending)

    def has_pending_block_frees(self) -> bool:
        """Blocks get free within moments without that a request is preempted for them."""
        side = self._scheduler
        return side is not None and self._guard("has_pending_block_frees", False, lambda: side.frees_soon)

    def reset_cache(self) -> bool | None:
        """Weights or adapters may have changed: nothing saved before is hit any more."""
        side = self._scheduler
        if side is None:
            return None

        def run() -> bool:
            side.reset()
            return True

        return self._guard("reset_cache", False, run)

    def take_events(self) -> Iterable[Any]:
        """Blocks that kvtierd holds, and those that are not to be counted on any more, since the last call."""
        side = self._scheduler
        return () if side is None else self._guard("take_events", [], lambda: [to_vllm(change) for change in side.take_events()])

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The paged KV cache of this rank."""
        side = self._worker
        assert side is not None

        def run() -> bool:
            side.register(kv_caches)
            return True

        if not self._guard("register_kv_caches", False, run):
            side.refuse("the KV cache could not be examined; see the log of this rank")
        if side.rank_layout is not None and side.rank_layout.error:
            log.error("kvtierd: rank %s: this KV cache cannot be kept: %s", side.rank, side.rank_layout.error)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """The KV cache's memory may be taken away and given back at the same place."""
        return True

    def unregister_kv_caches(self) -> None:
        """The KV cache's memory is about to be taken away. Waits until no copy touches it."""
        side = self._worker
        if side is not None and not self._guard("unregister_kv_caches", False, lambda: side.wait_for_copies(SLEEP_S)):
            log.error("kvtierd: rank %s: copies have not ended, and the KV cache is taken away", side.rank)

    release_kv_caches = unregister_kv_caches
    """The name that later versions of vLLM have for it."""

    def restore_kv_caches(self) -> None:
        """The memory is back at its place. What it held is gone, and vLLM knows that: there is nothing to do."""

    def get_handshake_metadata(self) -> Any:
        """Layout of this rank, for the scheduler."""
        side = self._worker
        if side is None or side.rank_layout is None or not self._alone():
            return None
        return KvtierdHandshake(side.rank, side.rank_layout)

    def _alone(self) -> bool:
        """Whether vLLM talks to this connector itself. Inside another, whose other parts would be given our message and may refuse
        it, the layout is told with the first step instead."""
        return not has_kv_transfer_group() or get_kv_transfer_group() is self

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        meta, side = self._meta(), self._worker
        if meta is None or side is None:
            return

        self._guard("start_load_kv", None, lambda: side.start_loads(meta))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs only when all of its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do by layer: saves begin after the step."""

    def wait_for_save(self) -> None:
        """Begin this step's saves. Waits for none: their blocks are held until they are copied."""
        side = self._worker
        if side is not None:
            self._guard("wait_for_save", None, side.start_saves)

    def clear_connector_metadata(self) -> None:
        """End of a step; saves of a step without a forward pass begin here."""
        self.wait_for_save()
        super().clear_connector_metadata()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may go, and requests whose loads have ended; each once."""
        sent, ended, _ = self._finished()
        return sent, ended

    def _finished(self) -> tuple[set[str], set[str], set[str]]:
        side = self._worker
        assert side is not None
        meta = self._meta()
        # Beside other connectors, whose copies do not wait for ours, a load has ended when nothing is under way any more.
        wait_s = STEP_S if meta is not None and meta.idle and self._alone() else 0.0
        computes = meta is not None and meta.computes
        nothing = set[str](), set[str](), set[int]()
        ended, failed, bad = self._guard("get_finished", nothing, lambda: side.take_loads(wait_s=wait_s, computes=computes))
        self._bad_blocks = bad
        return set(meta.sent) if meta is not None else set(), ended, failed

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As ``get_finished``, with the loads that failed."""
        sent, ended, failed = self._finished()
        side = self._worker
        if side is not None and side.selective:
            # By request: by block, vLLM could not say which group is meant, or would go on without the window before it.
            self._bad_blocks = set()
            return base.KVConnectorTransferResults(finished_sending=sent, finished_recving=ended, failed_recving=failed)
        return base.KVConnectorTransferResults(finished_sending=sent, finished_recving=ended)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a failed load left without content, in the same step in which it is reported."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> KvtierdWorkerMetadata | None:
        """Reports for the scheduler's side."""
        side = self._worker
        return None if side is None else self._guard("build_connector_worker_meta", None, side.worker_meta)

    def _meta(self) -> KvtierdMetadata | None:
        meta = self._connector_metadata
        return meta if isinstance(meta, KvtierdMetadata) else None

    # ---- both

    def shutdown(self) -> None:
        """The engine ends."""
        for side in (self._worker, self._scheduler):
            if side is not None:
                self._guard("shutdown", None, side.close)

    def get_kv_connector_stats(self) -> KvtierdStats | None:
        """Counts since the last step."""
        side = self._scheduler
        if side is None:
            # Also when there is nothing: an older vLLM asks the scheduler's side only in steps in which a worker has something.
            failures, self._untold_failures = self._untold_failures, 0
            return KvtierdStats(data={"hook_failures": failures} if failures else {})
        return self._guard("get_kv_connector_stats", None, lambda: self._scheduler_stats(side))

    def _scheduler_stats(self, side: SchedulerSide) -> KvtierdStats:
        side.counts["hook_failures"] += self._untold_failures
        self._untold_failures = 0
        return take_stats(side.counts, side.gauges())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtierdStats:
        """Stats from their plain form."""
        return KvtierdStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvtierdPromMetrics:
        """Prometheus series in the engine's API process."""
        return KvtierdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _rank(parallel: Any) -> tuple[int, int]:
    from vllm.distributed import parallel_state

    try:
        return parallel_state.get_pp_group().rank_in_group, parallel_state.get_tensor_model_parallel_rank()
    except AssertionError:  # no groups, as in tests without a worker
        rank, tp = int(getattr(parallel, "rank", 0)), int(parallel.tensor_parallel_size)
        return rank // tp, rank % tp
