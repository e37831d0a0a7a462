"""SGLang's hierarchical cache (HiCache) with kvtierd as its storage: see ``docs/sglang.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtierd.connectors.sglang.storage import KvtierdHiCacheStorage

__all__ = ["KvtierdHiCacheStorage"]


def __getattr__(name: str) -> object:
    """The backend, once it is asked for: it needs SGLang, and its settings do not."""
    if name != "KvtierdHiCacheStorage":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from kvtierd.connectors.sglang.storage import KvtierdHiCacheStorage

    return KvtierdHiCacheStorage
