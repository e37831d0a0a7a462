"""The storage backend that SGLang's cache controller calls: pages of host memory to and from kvtierd.

SGLang calls from a thread that looks for pages and reads them, and one that writes. Nothing that goes wrong here raises in
them: a page that cannot be read is missing, one that cannot be written is not kept. Only a pool that is not served is refused, when
the backend is attached.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvtierd.client import Client
from kvtierd.connectors.sglang.identity import UnsupportedPoolError, namespace_of, page_key
from kvtierd.connectors.sglang.settings import Settings, read_settings

log = logging.getLogger(__name__)

KV_POOL: Final = "kv"
QUIET_S: Final = 60.0
"""Between two lines about the same kind of failure."""

Call = TypeVar("Call", bound=Callable[..., Any])
Pages = list[list[np.ndarray]]
"""Of each page its runs of bytes."""


def _guarded(empty: Callable[[Any], object]) -> Callable[[Call], Call]:
    """Answer as for nothing where a call fails; ``empty`` makes that answer of its first argument."""

    def decorate(call: Call) -> Call:
        @functools.wraps(call)
        def guarded(self: KvtierdHiCacheStorage, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self, *args, **kwargs)
            except Exception:
                self.failed(call.__name__)
                return empty(args[0] if args else ())

        return cast("Call", guarded)

    return decorate


class KvtierdHiCacheStorage(HiCacheStorage):
    """Keeps pages of one rank. SGLang makes it from ``--hicache-storage-backend dynamic``.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``; its ``extra_config`` has the settings.
        kwargs: of SGLang's factory; not used.

    Raises:
        ValueError: a setting is not known or has a value that cannot be used.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        del kwargs
        self.settings: Settings = read_settings(storage_config.extra_config or {})
        self._config = storage_config
        self._client: Client | None = None
        self._told_s: dict[str, float] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Attach to the daemon for the pages of this pool. Raises UnsupportedPoolError."""
        super().register_mem_pool_host(mem_pool_host)
        namespace = namespace_of(self._config, mem_pool_host, self.settings)
        if self._client is not None:
            self._client.close()
        self._client = Client(
            namespace,
            self.settings.address or None,
            self.settings.tenant,
            name=f"sglang tp {self._config.tp_rank} pp {self._config.pp_rank}",
            token_file=self.settings.token_file or None,
        )
        log.info(
            "kvtierd: pages of %d tokens and %.2f MiB, at %s",
            namespace.block_tokens,
            sum(namespace.shard_bytes) / (1 << 20),
            self._client.address,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse pools beside the KV pool: their pages are nothing without each other's. Raises UnsupportedPoolError."""
        if str(host_pool_name) != KV_POOL:
            raise UnsupportedPoolError(
                f"kvtierd keeps the KV pool only, and this model has a pool {str(host_pool_name)!r} too (hybrid models, drafts): "
                "serve it without --hicache-storage-backend"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # ---- what the cache controller calls

    @_guarded(lambda _keys: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages are there, from the first one on without a gap."""
        return self._attached().lookup(_packed(keys), timeout_s=self.settings.lookup_timeout_ms / 1000).held

    @_guarded(lambda keys: [False] * len(keys))
    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into host memory. Whether each was read; after the first that was not, none is."""
        return self._read(keys, self._pages(keys, host_indices))

    @_guarded(lambda keys: [False] * len(keys))
    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Keep pages of host memory. Whether all of them are kept, for each."""
        return [self._write(keys, self._pages(keys, host_indices))] * len(keys)

    @_guarded(lambda _key: False)
    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return bool(self.batch_exists([key]))

    @_guarded(lambda keys: [None] * len(keys))
    def batch_get(
        self, keys: Sequence[str], target_locations: Sequence[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Read pages into flat tensors of a page each. Those that were read; None for the others."""
        targets = (
            [torch.empty(sum(self._sizes()), dtype=torch.uint8) for _ in keys] if target_locations is None else target_locations
        )
        read = self._read(keys, [self._split(target) for target in targets])
        return [target if done else None for target, done in zip(targets, read, strict=True)]

    @_guarded(lambda _keys: False)
    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Keep pages that are flat tensors. Whether all of them are kept."""
        return values is not None and self._write(keys, [self._split(value) for value in values])

    @_guarded(lambda _key: None)
    def get(self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Read one page, as :meth:`batch_get`."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    @_guarded(lambda _key: False)
    def set(self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Keep one page, as :meth:`batch_set`."""
        return self.batch_set([key], None if value is None else [value])

    @_guarded(lambda _nothing: None)
    def clear(self) -> None:
        """Forget all pages of this model, layout and rank that the tenant has."""
        self._attached().evict(timeout_s=self.settings.save_timeout_ms / 1000)

    def close(self) -> None:
        """Detach. What was kept stays."""
        if self._client is not None:
            self._client.close()
            self._client = None

    # ---- within

    def failed(self, what: str) -> None:
        """Tell of an error, once a minute for each kind."""
        now = time.monotonic()
        if now - self._told_s.get(what, -QUIET_S) >= QUIET_S:
            self._told_s[what] = now
            log.exception("kvtierd: %s failed, SGLang goes on without these pages", what)

    def _attached(self) -> Client:
        if self._client is None:
            raise UnsupportedPoolError("no host pool was registered, or the backend was closed")
        return self._client

    def _sizes(self) -> tuple[int, ...]:
        return self._attached().namespace.shard_bytes

    def _read(self, keys: Sequence[str], pages: Pages) -> list[bool]:
        loaded = self._attached().load(_packed(keys), pages, timeout_s=self.settings.load_timeout_ms / 1000).loaded
        return [number < loaded for number in range(len(keys))]

    def _write(self, keys: Sequence[str], pages: Pages) -> bool:
        timeout_s = self.settings.save_timeout_ms / 1000
        done = self._attached().save(_packed(keys), pages, timeout_s=timeout_s, wait_s=timeout_s / 2)
        return done.saved + done.held == len(keys)

    def _pages(self, keys: Sequence[str], host_indices: torch.Tensor) -> Pages:
        """The runs of bytes of pages, in place in the host pool."""
        sizes = self._sizes()
        addresses, lengths = self.mem_pool_host.get_page_buffer_meta(host_indices)
        if len(addresses) != len(sizes) * len(keys) or tuple(lengths) != sizes * len(keys):
            raise ValueError(f"{len(keys)} pages are {len(addresses)} runs of bytes, but one is {len(sizes)}: {sizes}")
        runs = [_bytes_at(int(address), size) for address, size in zip(addresses, lengths, strict=True)]
        return [runs[first : first + len(sizes)] for first in range(0, len(runs), len(sizes))]

    def _split(self, page: torch.Tensor) -> list[np.ndarray]:
        """The runs of bytes of a page that is one flat tensor."""
        sizes = self._sizes()
        flat = page.view(-1).view(torch.uint8).numpy()
        if flat.nbytes != sum(sizes):
            raise ValueError(f"a page has {sum(sizes)} bytes; got {flat.nbytes}")
        ends = np.cumsum(sizes)
        return [flat[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _packed(keys: Sequence[str]) -> bytes:
    return b"".join(map(page_key, keys))


def _bytes_at(address: int, size: int) -> np.ndarray:
    """Memory of the host pool, which outlives the call."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
