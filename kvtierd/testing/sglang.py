"""A rank of SGLang without a GPU: its own pools, cache controller and storage threads, on CPU memory. Needs SGLang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty
from typing import Any, Final

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

BACKEND: Final = {
    "backend_name": "kvtierd",
    "module_path": "kvtierd.connectors.sglang",
    "class_name": "KvtierdHiCacheStorage",
    "interface_v1": 1,
}
"""What SGLang's extra configuration says of kvtierd's backend."""
PATIENCE_S: Final = 60.0


@dataclass(frozen=True)
class Shape:
    """Of a model's KV, and of the pools."""

    page: int = 16
    layers: int = 3
    heads: int = 2
    head: int = 32
    device_tokens: int = 4096
    host_tokens: int = 8192


SMALL: Final = Shape()
Pools = Callable[[str, torch.dtype, Shape], tuple[Any, Any]]
"""Makes the pools of the device and of the host, for a layout of the latter."""


def mha(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, shape: Shape = SMALL) -> tuple[Any, Any]:
    """Pools of a model with K and V."""
    device = MHATokenToKVPool(
        size=shape.device_tokens, page_size=shape.page, dtype=dtype, head_num=shape.heads, head_dim=shape.head,
        layer_num=shape.layers, device="cpu", enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip
    host = MHATokenToKVPoolHost(device._mha_buffer_info(), end_layer=shape.layers - 1, **_of_host(layout, shape))
    return device, host


def mla(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, shape: Shape = SMALL) -> tuple[Any, Any]:
    """Pools of a model with latent attention."""
    device = MLATokenToKVPool(
        size=shape.device_tokens, page_size=shape.page, dtype=dtype, kv_lora_rank=2 * shape.head, qk_rope_head_dim=shape.head // 2,
        layer_num=shape.layers, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    host = MLATokenToKVPoolHost(
        device._mla_buffer_info(), end_layer=shape.layers - 1, target_layer_num=shape.layers, **_of_host(layout, shape)
    )
    return device, host


def _of_host(layout: str, shape: Shape) -> dict[str, Any]:
    return {
        "host_to_device_ratio": shape.host_tokens / shape.device_tokens,
        "host_size": 0,
        "page_size": shape.page,
        "layout": layout,
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": shape.device_tokens,
        "start_layer": 0,
    }


def one_rank() -> AbstractContextManager[Any]:
    """Tell SGLang meanwhile that there is one process."""
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
    made: AbstractContextManager[Any] = get_parallel().override(**ranks)
    return made


class _Allocator:
    """As much of SGLang's allocator as its controller asks for without a GPU: the pool behind it."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def get_kvcache(self) -> Any:
        """The pool."""
        return self._pool


class Rank:
    """Host memory, and the controller with its threads. Within :func:`one_rank`.

    Args:
        storage: name of SGLang's storage backend.
        extra: its extra configuration.
        pools: makes them.
        layout: of host memory.
        dtype: of the KV cache.
        shape: of the model.
    """

    def __init__(
        self,
        storage: str,
        extra: dict[str, Any],
        *,
        pools: Pools = mha,
        layout: str = "page_first",
        dtype: torch.dtype = torch.bfloat16,
        shape: Shape = SMALL,
    ) -> None:
        device, self.host = pools(layout, dtype, shape)
        self._page = shape.page
        self.controller = HiCacheController(
            _Allocator(device), self.host, shape.page, None, threading.Event(), storage_backend=storage, model_name="tiny",
            storage_backend_extra_config=dict(extra),
        )  # fmt: skip
        self.backend = self.controller.storage_backend

    def hashes(self, tokens: Sequence[int]) -> list[str]:
        """SGLang's names of the pages of a prompt."""
        found: list[str] = get_storage_hash_str(list(tokens), None, page_size=self._page)
        return found

    def fill(self, tokens: int, seed: int) -> torch.Tensor:
        """Host memory of so many tokens, with bytes of its own. Returns where it is."""
        indices: torch.Tensor = self.host.alloc(tokens)
        generator = torch.Generator().manual_seed(seed)
        for first in range(0, tokens, self._page):
            page = self.host.get_data_page(indices[first])
            self.host.set_from_flat_data_page(indices[first], torch.randn(page.shape, generator=generator).to(page.dtype))
        return indices

    def pages(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the pages there."""
        return [self.host.get_data_page(indices[first]).clone() for first in range(0, len(indices), self._page)]

    def back_up(self, indices: torch.Tensor, tokens: Sequence[int]) -> int:
        """Have the backup thread write pages. Returns the tokens that are kept."""
        self.controller.write_storage(indices, list(tokens), hash_value=self.hashes(tokens))
        return int(self._wait(self.controller.ack_backup_queue).completed_tokens)

    def prefetch(self, tokens: Sequence[int]) -> tuple[int, torch.Tensor]:
        """Have the threads look and read, as the scheduler does. Returns the tokens that were read, and where they are."""
        operation = self.controller.prefetch("request", list(tokens))
        assert self._wait(self.controller.prefetch_hit_queue) is operation
        held = operation.storage_hit_count
        operation.host_indices = self.host.alloc(held) if held else torch.empty(0)
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = self._wait(self.controller.ack_prefetch_queue)
            completed = max(completed, ack.completed_tokens or 0)
            if ack.completed_req:
                return completed, operation.host_indices[:completed]

    @staticmethod
    def _wait(queue: Any) -> Any:
        try:
            return queue.get(timeout=PATIENCE_S)
        except Empty:
            raise AssertionError("SGLang's threads did not answer") from None

    def close(self) -> None:
        """Detach the storage, which ends the threads."""
        self.controller.detach_storage_backend()


__all__ = ["BACKEND", "SMALL", "Rank", "Shape", "mha", "mla", "one_rank"]
