"""KvtierdConnector of an engine on a GPU, for tests without one: its KV cache is in CPU memory, and slots may be in GPU memory.

The process loads ``kvtierd.testing.cuda`` in the place of the CUDA driver, whose GPU memory it can reach like its own. Named to
vLLM by ``kv_connector_module_path``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from kvtierd.connectors.vllm.connector import KvtierdConnector
from kvtierd.connectors.vllm.copying import Chunk, CpuBlockCopier
from kvtierd.cuda import Device, DeviceView


class DeviceConnector(KvtierdConnector):
    """Copies from and to GPU memory."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._put_back: Callable[[], None] = lambda: None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Let the worker's copies go there."""
        self._put_back = _arm()
        super().register_kv_caches(kv_caches)

    def shutdown(self) -> None:
        """For the next engine of this process."""
        super().shutdown()
        self._put_back()


def _on_host(chunks: Iterable[Chunk]) -> list[Chunk]:
    found: list[Chunk] = []
    for view, block_ids in chunks:
        if isinstance(view, DeviceView):
            view = memoryview((ctypes.c_ubyte * view.nbytes).from_address(view.address)).cast("B")
        found.append((view, block_ids))
    return found


def _arm() -> Callable[[], None]:
    save, load = CpuBlockCopier.save, CpuBlockCopier.load

    def save_there(self: CpuBlockCopier, group: int, chunks: Any, fence: object | None) -> None:
        save(self, group, _on_host(chunks), fence)

    def load_there(self: CpuBlockCopier, group: int, chunks: Any, *more: Any) -> int:
        return load(self, group, _on_host(chunks), *more)

    CpuBlockCopier.device = Device(0)
    CpuBlockCopier.save, CpuBlockCopier.load = save_there, load_there  # type: ignore[method-assign]

    def put_back() -> None:
        CpuBlockCopier.device = None
        CpuBlockCopier.save, CpuBlockCopier.load = save, load  # type: ignore[method-assign]

    return put_back
