"""What a host pool's pages are: the namespace that tells them from those of other engines."""

from __future__ import annotations

import hashlib
import logging
from typing import Any, Final

import torch

from kvtierd.connectors.sglang.settings import Settings
from kvtierd.connectors.weights import name_weights
from kvtierd.model import Namespace

log = logging.getLogger(__name__)

LAYOUTS: Final = ("page_first", "page_first_direct", "page_head")
"""Layouts of host memory in which a page is one run of bytes for K and one for V (MLA: one for both)."""
DTYPES: Final = {
    torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32",
    torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2",
}  # fmt: skip


class UnsupportedPoolError(RuntimeError):
    """Pages of this pool cannot be kept; the text says why and what to do."""


def namespace_of(config: Any, pool: Any, settings: Settings) -> Namespace:
    """The namespace of the pages of one rank's host pool: one shard for each run of bytes of a page.

    Args:
        config: SGLang's ``HiCacheStorageConfig``.
        pool: its ``HostKVCache``.
        settings: the backend's.

    Raises:
        UnsupportedPoolError: its layout, its type of numbers, or the parallelism is not served.
    """
    layout = str(pool.layout)
    if layout not in LAYOUTS:
        raise UnsupportedPoolError(
            f"pages of host memory in layout {layout} are in many pieces: start SGLang with --hicache-mem-layout {LAYOUTS[0]} "
            f"(served: {', '.join(LAYOUTS)})"
        )
    if config.should_split_heads:
        raise UnsupportedPoolError("pages split by heads (tp_lcm_size) are not served: leave tp_lcm_size out of the extra config")
    shard_bytes = page_pieces(pool)
    parts = {"engine": f"sglang {_release()}", "layout": layout, "pieces": "x".join(map(str, shard_bytes))}
    parts |= _ranks(config) | {"start_layer": str(getattr(pool, "start_layer", 0)), "end_layer": str(getattr(pool, "end_layer", 0))}
    return Namespace(
        shard_bytes=shard_bytes,
        model=str(config.model_name or "unnamed")[-512:],
        revision=_revision(str(config.model_name or ""), settings),
        kv_dtype=_dtype(pool.dtype, settings),
        block_tokens=int(pool.page_size),
        num_layers=int(pool.layer_num),
        hash_algorithm="sglang",
        extra=parts,
    )


def page_pieces(pool: Any) -> tuple[int, ...]:
    """Bytes of each run of a page, in order."""
    _, sizes = pool.get_page_buffer_meta(torch.arange(int(pool.page_size)))
    return tuple(map(int, sizes))


def _ranks(config: Any) -> dict[str, str]:
    """Which part of the model's KV a rank has. Ranks of an MLA model have all of it, and only one of them writes."""
    found = {name: int(getattr(config, name)) for name in ("tp_rank", "tp_size") if not config.is_mla_model}
    found |= {name: int(getattr(config, name)) for name in ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")}
    return {name: str(value) for name, value in found.items()}


def _dtype(dtype: torch.dtype, settings: Settings) -> str:
    if dtype is torch.uint8:
        # SGLang stores both kinds of FP8 as bytes.
        if not settings.kv_dtype:
            raise UnsupportedPoolError(
                "the host pool holds bytes and does not say which FP8 they are: set kvtierd.kv_dtype in the extra config to "
                '"fp8_e4m3" or "fp8_e5m2", as in --kv-cache-dtype'
            )
        return settings.kv_dtype
    name = DTYPES.get(dtype)
    if name is None:
        raise UnsupportedPoolError(f"a KV cache of {dtype} is not served (served: {', '.join(sorted(DTYPES.values()))})")
    if settings.kv_dtype and settings.kv_dtype != name:
        raise UnsupportedPoolError(f"kvtierd.kv_dtype is {settings.kv_dtype}, but the KV cache holds {name}: leave it out")
    return name


def _revision(model: str, settings: Settings) -> str:
    if settings.revision:
        return settings.revision[:512]
    try:
        found = name_weights(model) if model else ""
    except OSError as e:
        log.warning("kvtierd: the weights of %s cannot be read: %s", model, e)
        found = ""
    if not found:
        log.warning(
            "kvtierd: nothing names the weights of %s: once they have changed, KV of the old ones would still be found. Set "
            "kvtierd.revision in hicache-storage-backend-extra-config to a text that changes with them.",
            model or "this model",
        )
    return found[:512]


def _release() -> str:
    try:
        import sglang
    except ImportError:
        return ""
    return str(getattr(sglang, "__version__", ""))


def page_key(name: str) -> bytes:
    """The key of a page: SGLang's own hash of its tokens and those before it, or what stands for another name."""
    try:
        raw = bytes.fromhex(name)
    except ValueError:
        raw = b""
    return raw if len(raw) == hashlib.sha256().digest_size else hashlib.sha256(name.encode()).digest()
