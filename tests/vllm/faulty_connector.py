"""KvtierdConnector with faults in the copies between KV cache and slots, for tests.

It also keeps the namespaces of its engines, for tests that talk to the daemon as another client of the same one.

Named to vLLM by ``kv_connector_module_path``; the key ``kvtierd_test.faults`` of ``kv_connector_extra_config`` says what goes
wrong once the KV cache has been registered (the connector's self-test at that moment must still see right copies)::

    {"load": "raise"}      every load raises
    {"load": "first"}      the first load raises, later ones are right
    {"save": "other"}      the first chunk of each save is given the bytes of the very first one: a real block, under another's key
    {"save": "swap"}       the last two chunks of each save are exchanged
    {"load_delay_s": 0.2}  each load waits before it copies; "save_delay_s" likewise
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvtierd.client import Client
from kvtierd.connectors.vllm import pools, worker
from kvtierd.connectors.vllm.connector import KvtierdConnector
from kvtierd.connectors.vllm.copying import CpuBlockCopier
from kvtierd.model import Namespace

FAULTS = "kvtierd_test.faults"

namespaces: list[Namespace] = []
"""Of every client that a connector of this process has made."""


class RememberedClient(Client):
    """A client whose namespace tests can find."""

    def __init__(self, namespace: Namespace, *args: Any, **kwargs: Any) -> None:
        namespaces.append(namespace)
        super().__init__(namespace, *args, **kwargs)


class FaultyConnector(KvtierdConnector):
    """Right in everything but the copies."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        pools.Client = RememberedClient  # type: ignore[misc]
        self._faults: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config.get(FAULTS, {})
        self._put_back: Callable[[], None] = lambda: None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Put the faults in, after the self-test."""
        super().register_kv_caches(kv_caches)
        self._put_back = _arm(dict(self._faults))

    def shutdown(self) -> None:
        """Put the right copies back, for the next engine of this process."""
        super().shutdown()
        self._put_back()


def _arm(faults: dict[str, Any]) -> Callable[[], None]:
    """Replace the copies of this process, which are of one slot at a time then. Returns what undoes it."""
    save, load, stretch_bytes = CpuBlockCopier.save, CpuBlockCopier.load, worker.STRETCH_BYTES
    kept: dict[int, bytes] = {}

    def faulty_save(self: CpuBlockCopier, group: int, chunks: Any, fence: object | None) -> None:
        time.sleep(faults.get("save_delay_s", 0))
        chunks = list(chunks)
        save(self, group, chunks, fence)
        first = chunks[0][0]
        if faults.get("save") == "other":
            first[:] = kept.setdefault(group, bytes(first))
        if faults.get("save") == "swap" and len(chunks) > 1:
            (last, _), (other, _) = chunks[-1], chunks[-2]
            last[:], other[:] = bytes(other), bytes(last)

    def faulty_load(self: CpuBlockCopier, group: int, chunks: Any, *more: Any) -> int:
        time.sleep(faults.get("load_delay_s", 0))
        if faults.get("load") in ("raise", "first"):
            if faults["load"] == "first":
                del faults["load"]
            raise OSError("a copy that a test lets fail")
        return load(self, group, chunks, *more)

    CpuBlockCopier.save, CpuBlockCopier.load = faulty_save, faulty_load  # type: ignore[method-assign]
    worker.STRETCH_BYTES = 1  # type: ignore[misc]

    def put_back() -> None:
        CpuBlockCopier.save, CpuBlockCopier.load = save, load  # type: ignore[method-assign]
        worker.STRETCH_BYTES = stretch_bytes  # type: ignore[misc]

    return put_back
