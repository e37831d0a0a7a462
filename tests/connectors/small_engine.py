"""An engine without a model: vLLM's own scheduler, requests and block pool, the connector's two sides, and KV caches in CPU memory.

In place of a model stands a function of the tokens: the KV of a token names the whole prefix up to it, its layer and its rank, and
the next token follows from the prefix. Before each step all KV that attention would read is compared with what it has to be, so
wrong or missing KV is found in the step that would use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from vllm.config import CacheConfig, KVEventsConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvtierd.connectors.vllm.connector import KvtierdConnector
from tests.connectors import kv_forms as forms

NEW: Final = "failed_recving" in KVConnectorOutput.__dataclass_fields__
"""This vLLM takes failed loads by request."""
BLOCK: Final = 32
CHUNK: Final = 64
WINDOW: Final = 64
LAYERS: Final = 2
TOKEN_BYTES: Final = 64
PATIENCE_S: Final = 60.0
MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


def prompt(length: int, seed: int = 0, shared: int = 0) -> list[int]:
    """Tokens, of which the first ``shared`` are the same for every seed."""
    common = np.random.default_rng(12345).integers(3, 500, shared).tolist()
    return common + np.random.default_rng(seed).integers(3, 500, length - shared).tolist()


class Rank:
    """One worker: its connector and its KV cache. Groups share the memory of their blocks, as in vLLM."""

    def __init__(self, engine: SmallEngine, rank: int) -> None:
        self.number = rank
        specs = [forms.FullAttentionSpec(BLOCK, 2, 8, torch.bfloat16)]
        if engine.groups == 2:
            specs.append(forms.SlidingWindowSpec(BLOCK, 2, 8, torch.bfloat16, sliding_window=WINDOW))
        names = [[f"model.layers.{layer}.attn{group}" for layer in range(LAYERS)] for group in range(engine.groups)]
        spaces = [torch.zeros(engine.blocks * BLOCK * TOKEN_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
        shape = (engine.blocks, 2, BLOCK, 16)
        tensors = {
            name: forms.permuted(spaces[layer], torch.bfloat16, shape, (0, 1, 2, 3))
            for group in names
            for layer, name in enumerate(group)
        }
        self.memory = [space.numpy().reshape(engine.blocks, 2, BLOCK, TOKEN_BYTES // 2) for space in spaces]
        parallel = {"tensor_parallel_size": engine.tp, "pipeline_parallel_size": 1, "rank": rank}
        config = SimpleNamespace(
            kv_transfer_config=engine.config.kv_transfer_config,
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1, **parallel),
            cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        kv_config = forms.config(engine.blocks, *zip(names, specs, strict=True))
        self.connector = engine.connector_class(config, KVConnectorRole.WORKER, kv_config)
        self.connector.register_kv_caches(tensors)

    def write(self, group: int, block: int, slot: int, mark: bytes) -> None:
        """Put one token's KV into a block."""
        for layer, memory in enumerate(self.memory):
            memory[block, :, slot, :] = self._content(mark, group, layer)

    def holds(self, group: int, block: int, slot: int, mark: bytes) -> bool:
        """Whether one token's KV is what it has to be."""
        return all(
            np.array_equal(memory[block, :, slot, :], self._content(mark, group, layer)) for layer, memory in enumerate(self.memory)
        )

    def _content(self, mark: bytes, group: int, layer: int) -> Any:
        seed = mark + bytes([group, layer, self.number])
        return np.frombuffer(hashlib.blake2b(seed, digest_size=TOKEN_BYTES).digest(), np.uint8).reshape(2, TOKEN_BYTES // 2)

    def step(self, output: Any, forward: Callable[[Rank], None]) -> KVConnectorOutput:
        """What a worker does in one step, in the order of the installed vLLM."""
        connector = self.connector
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        if not NEW:
            connector.start_load_kv(None)
        forward(self)
        if NEW:
            connector.start_load_kv(None)
        if NEW or output.total_num_scheduled_tokens:
            connector.wait_for_save()
        told = KVConnectorOutput()
        if NEW:
            results = connector.get_transfer_results(output.finished_req_ids)
            told.finished_sending, told.finished_recving = results.finished_sending, results.finished_recving
            told.failed_recving = results.failed_recving
        else:
            told.finished_sending, told.finished_recving = connector.get_finished(output.finished_req_ids)
        told.invalid_block_ids = connector.get_block_ids_with_load_errors()
        told.kv_connector_stats = connector.get_kv_connector_stats()
        told.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return told


class SmallEngine:
    """One engine.

    Args:
        folder: for the model's configuration.
        address: of the daemon.
        blocks: of the KV cache.
        groups: 1, or 2 for one more with a sliding window.
        tp: tensor parallel ranks.
        asynchronous: schedule a step before the output of the one before it has come.
        policy: what vLLM does about failed loads.
        events: vLLM publishes what becomes of blocks.
        budget: most tokens in one step.
        settings: of the connector, without prefix.
    """

    connector_class: Any = KvtierdConnector

    def __init__(
        self,
        folder: Path,
        address: str,
        *,
        blocks: int = 64,
        groups: int = 1,
        tp: int = 1,
        asynchronous: bool = False,
        policy: str = "recompute",
        events: bool = False,
        budget: int = 256,
        **settings: Any,
    ) -> None:
        (folder / "model").mkdir(parents=True, exist_ok=True)
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        extra = {"kvtierd.address": address, "kvtierd.chunk_tokens": CHUNK, "kvtierd.gate": False, "kvtierd.max_held_fraction": 0.9}
        extra |= {f"kvtierd.{name}": value for name, value in settings.items()}
        self.blocks, self.groups, self.tp, self._depth = blocks, groups, tp, 2 if asynchronous else 1
        self.config = _vllm_config(folder / "model", self.transfer(extra, policy), budget, blocks)
        if events:
            self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.config.parallel_config.tensor_parallel_size = tp
        full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
        window = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=WINDOW)
        members = [KVCacheGroupSpec(["a"], full), KVCacheGroupSpec(["b"], window)][:groups]
        kv_config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=members)
        made = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = made(
            vllm_config=self.config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.connector: Any = self.own_connector(self.scheduler.connector)
        self.side = self.connector._scheduler
        self._calls: set[object] = set()
        self.side._calls.submit = self._count_calls(self.side._calls.submit)
        self.ranks = [Rank(self, rank) for rank in range(tp)]
        layouts = {(0, rank.number): rank.connector.get_handshake_metadata() for rank in self.ranks}
        self.connector.set_xfer_handshake_metadata_pp_aware(layouts)
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK, hash_fn)
        self._aggregator = KVOutputAggregator(tp)
        self._pending: deque[tuple[Any, Any]] = deque()
        self._marks: dict[str, list[bytes]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._starts: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.prompt_lengths: dict[str, int] = {}
        self.wrong: list[str] = []
        self.computed: dict[str, int] = {}
        """Tokens that went through the model, by request."""
        self.steps = 0
        self.counts: Counter[str] = Counter()
        """What the connector has told vLLM's metrics since the start."""
        self._take_stats = self.connector.get_kv_connector_stats
        self.connector.get_kv_connector_stats = self._count

    @staticmethod
    def transfer(extra: dict[str, Any], policy: str) -> KVTransferConfig:
        """What connects the engine to kvtierd."""
        return KVTransferConfig(
            kv_connector="KvtierdConnector",
            kv_connector_module_path="kvtierd.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=extra,
        )

    @staticmethod
    def own_connector(connector: Any) -> Any:
        """kvtierd's part of the scheduler's connector."""
        return connector

    # ---- requests

    def add(
        self, name: str, tokens: Sequence[int], max_tokens: int = 2, params: dict[str, Any] | None = None, **more: Any
    ) -> Request:
        """Add a request."""
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
        )
        sampling.skip_reading_prefix_cache = more.pop("skip_reading", False)
        request = Request(name, list(tokens), sampling, None, block_hasher=self._hasher, **more)
        self.requests[name] = request
        self._tokens[name], self._marks[name] = list(tokens), []
        self.prompt_lengths[name] = len(tokens)
        self.computed[name] = 0
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def generate(self, name: str, tokens: Sequence[int], max_tokens: int = 2, **more: Any) -> list[int]:
        """Run one request to its end. Returns what it generated."""
        self.add(name, tokens, max_tokens, **more)
        self.run(name)
        return list(self.requests[name].output_token_ids)

    def expected(self, tokens: Sequence[int], count: int) -> list[int]:
        """What a request must generate."""
        mark, made = b"", []
        for token in tokens:
            mark = _next_mark(mark, token)
        for _ in range(count):
            made.append(_next_token(mark))
            mark = _next_mark(mark, made[-1])
        return made

    # ---- steps

    def run(self, *names: str) -> None:
        """Step until these requests (all when none is named) have ended."""
        wanted = names or tuple(self.requests)
        self.until(lambda: all(self.requests[name].is_finished() for name in wanted))

    def settle(self) -> None:
        """Step until nothing is left to do, as vLLM does."""
        self.until(lambda: not self.scheduler.has_requests() and not self._pending)
        self.until(lambda: not self._calls and not self.side.pending)
        self.step()

    def until(self, reached: Callable[[], bool]) -> None:
        """Step until a condition holds."""
        until_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < until_s, "the engine makes no progress"
            self.step()
            time.sleep(0.0005)

    def step(self) -> None:
        """One round of the engine's loop."""
        self.steps += 1
        output = self.scheduler.schedule()
        tables = {name: self.scheduler.kv_cache_manager.get_block_ids(name) for name in output.num_scheduled_tokens}
        self._pending.append((output, self._execute(output, tables)))
        if len(self._pending) >= self._depth or not output.total_num_scheduled_tokens:
            while self._pending and (len(self._pending) >= self._depth or not output.total_num_scheduled_tokens):
                self.scheduler.update_from_output(*self._pending.popleft())

    def _execute(self, output: Any, tables: dict[str, Any]) -> ModelRunnerOutput:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in cached.resumed_req_ids:  # what was sampled meanwhile may have been dropped
            self._tokens[name] = list(self.requests[name].all_token_ids)
            del self._marks[name][len(self._tokens[name]) :]
        for name, start in starts.items():
            if start < self._starts.get(name, 0):  # vLLM has taken back what a load had failed for
                self._tokens[name] = list(self.requests[name].all_token_ids)
                del self._marks[name][len(self._tokens[name]) :]
            self._starts[name] = start
        for name, count in output.num_scheduled_tokens.items():
            self._mark(name, starts[name] + count)

        def forward(rank: Rank) -> None:
            for name, count in output.num_scheduled_tokens.items():
                self._check(rank, name, tables[name], starts[name])
                self._compute(rank, name, tables[name], starts[name], starts[name] + count)

        told = [rank.step(output, forward) for rank in self.ranks]
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name, count in output.num_scheduled_tokens.items():
            self.computed[name] += count
            whole = starts[name] + count == len(self._tokens[name])
            sampled.append([_next_token(self._marks[name][-1])] if whole else [])
            self._tokens[name] += sampled[-1]
        outputs = [ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled, kv_connector_output=one) for one in told]
        return outputs[0] if self.tp == 1 else self._aggregator.aggregate(outputs)

    def _mark(self, name: str, stop: int) -> None:
        marks, tokens = self._marks[name], self._tokens[name]
        while len(marks) < stop:
            marks.append(_next_mark(marks[-1] if marks else self._salt(name), tokens[len(marks)]))

    def _salt(self, name: str) -> bytes:
        return b""

    def _check(self, rank: Rank, name: str, table: Sequence[Sequence[int]], stop: int) -> None:
        for group, ids in enumerate(table):
            first = max(0, stop - WINDOW + 1) if group else 0
            for token in range(first, stop):
                if not rank.holds(group, ids[token // BLOCK], token % BLOCK, self._marks[name][token]):
                    self.wrong.append(f"{name}: token {token} of group {group} on rank {rank.number}")
                    return

    def _compute(self, rank: Rank, name: str, table: Sequence[Sequence[int]], start: int, stop: int) -> None:
        null = self.scheduler.kv_cache_manager.block_pool.null_block.block_id
        for group, ids in enumerate(table):
            for token in range(start, stop):
                if ids[token // BLOCK] != null:
                    rank.write(group, ids[token // BLOCK], token % BLOCK, self._marks[name][token])

    # ---- state

    @property
    def pool(self) -> Any:
        """vLLM's blocks."""
        return self.scheduler.kv_cache_manager.block_pool

    def forget(self) -> None:
        """Forget the engine's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def _count(self) -> Any:
        stats = self._take_stats()
        for name, value in stats.data.items() if stats is not None else ():
            self.counts[name] += value
        return stats

    def _count_calls(self, submit: Callable[[Callable[[], None]], bool]) -> Callable[[Callable[[], None]], bool]:
        """Know which calls to the daemon wait or are under way."""

        def counting(task: Callable[[], None]) -> bool:
            mine = object()

            def run() -> None:
                try:
                    task()
                finally:
                    self._calls.discard(mine)

            self._calls.add(mine)
            if submit(run):
                return True
            self._calls.discard(mine)
            return False

        return counting

    def leaks(self) -> list[str]:
        """What is still held although nothing runs."""
        side, found = self.side, []
        used = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()
        held = {
            "blocks": used,
            "requests of vLLM": len(self.scheduler.requests),
            "requests": len(side._requests),
            "loads": side._loads.running,
            "lookups": side._loads.asking,
            "prefetches": len(side._loads._prefetching),
            "saves": side._saves.held if side._saves else 0,
            "chains": len(side._ctx.keys._chains) if side._ctx else 0,
            "tails of loads": len(side._loads._tails),
            "reports": sum(r.connector._worker._load_ends.untold for r in self.ranks),
        }
        found += [f"{count} {name}" for name, count in held.items() if count]
        return found

    def close(self) -> None:
        """End."""
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()


def _vllm_config(model: Path, transfer: KVTransferConfig, budget: int, blocks: int) -> Any:
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", seed=1),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=budget,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        kv_transfer_config=transfer,
    )
    config.cache_config.num_gpu_blocks = blocks
    return config


def _next_mark(mark: bytes, token: int) -> bytes:
    return hashlib.blake2b(mark + token.to_bytes(4, "little"), digest_size=16).digest()


def _next_token(mark: bytes) -> int:
    return 3 + int.from_bytes(mark[:4], "little") % 497


@contextlib.contextmanager
def closing(engine: SmallEngine) -> Iterator[SmallEngine]:
    """Close an engine at the end, whatever happens."""
    try:
        yield engine
    finally:
        engine.close()
