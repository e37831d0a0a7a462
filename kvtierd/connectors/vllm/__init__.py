"""The connector for vLLM: ``KvtierdConnector``, by module path ``kvtierd.connectors.vllm`` or, once vLLM has loaded its general
plugins, by name alone.

Nothing of vLLM or torch is imported before the connector itself is asked for, so that the parts can be used and tested without.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvtierdConnector", "register"]


def __getattr__(name: str) -> Any:
    if name == "KvtierdConnector":
        from kvtierd.connectors.vllm.connector import KvtierdConnector

        return KvtierdConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make ``kv_connector="KvtierdConnector"`` known to vLLM (entry point group ``vllm.general_plugins``). Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvtierdConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvtierdConnector", "kvtierd.connectors.vllm.connector", "KvtierdConnector")
