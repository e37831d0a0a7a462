"""Keys of a request's chunks.

vLLM hashes the tokens of each block together with everything that makes its content differ (salt, LoRA, images), chained, so the
hash of a chunk's last block names the whole prefix. Where those hashes differ from process to process (an old vLLM without
PYTHONHASHSEED, or xxhash without a seed), this module builds a chain of its own over the same things, with a fixed seed, so
that a restarted engine still hits.
"""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np
from blake3 import blake3

from kvtierd.connectors.vllm.adapters import Adapters
from kvtierd.model import KEY_BYTES

DOMAIN: Final = b"kvtierd.vllm.v1\0"
MAX_CHAINS: Final = 4096


def resolve_hashing(vllm_config: Any) -> tuple[str, bool]:
    """Name of what the keys are made of (part of the namespace), and whether vLLM's own hashes can be used.

    Other algorithms than these two can be made to collide by whoever chooses the tokens, which must not matter beyond one process.
    """
    from vllm.v1.core import kv_cache_utils

    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm not in ("sha256", "sha256_cbor"):
        return "kvtierd:blake3", False
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"vllm:{algorithm}:seed={seed}", True
    if hasattr(kv_cache_utils, "get_none_hash_seed"):
        return f"vllm:{algorithm}:seed={kv_cache_utils.DEFAULT_NONE_HASH_SEED}", True
    return "kvtierd:blake3", False


class Keys:
    """Makes keys. Used on the engine's thread only.

    Args:
        chunk_tokens: tokens in one chunk.
        hash_tokens: tokens that each of the request's own hashes stands for.
        own_chain: build a chain of its own instead of using the request's hashes.
        groups: number of KV cache groups.
    """

    def __init__(self, chunk_tokens: int, hash_tokens: int, groups: int, *, own_chain: bool) -> None:
        if chunk_tokens % hash_tokens:
            raise ValueError(f"chunks of {chunk_tokens} tokens are no multiple of the engine's hashes over {hash_tokens} tokens")
        self._chunk_tokens = chunk_tokens
        self._step = chunk_tokens // hash_tokens
        self._own_chain = own_chain
        self._groups = groups
        self._chains: dict[str, list[bytes]] = {}
        self._adapters = Adapters()
        self._epoch = b""

    @property
    def hashes_per_chunk(self) -> int:
        """The request's own hashes in one chunk."""
        return self._step

    def new_epoch(self) -> None:
        """Nothing that was saved before is found any more: the weights or adapters have changed."""
        self._epoch = os.urandom(16)
        self._chains.clear()
        self._adapters.clear()

    def close(self) -> None:
        """End the thread that looks at adapters."""
        self._adapters.close()

    def forget(self, request_id: str) -> None:
        """The request has gone."""
        self._chains.pop(request_id, None)
        self._adapters.forget(request_id)

    def count(self, request: Any) -> int:
        """Chunks of the request's confirmed tokens that have a key; none while it is not known what its adapter is."""
        if self._adapters.identity(request) is None:
            return 0
        if self._own_chain:
            return int(request.num_tokens) // self._chunk_tokens
        return len(request.block_hashes) // self._step

    def keys(self, request: Any, group: int, first: int, stop: int) -> list[bytes]:
        """Keys of chunks ``first`` to ``stop`` (exclusive) of one group, 32 bytes each.

        Raises:
            TypeError: the request holds something whose identity cannot be put into a key.
        """
        if self._own_chain:
            hashes = self._chain(request, stop)[first:stop]
        else:
            hashes = request.block_hashes[(first + 1) * self._step - 1 : stop * self._step : self._step]
        adapter = self._adapters.confirmed(request)
        right_size = not hashes or len(hashes[0]) == KEY_BYTES  # one function makes them all
        if self._groups == 1 and not self._epoch and not adapter and right_size:
            return list(hashes)
        tail = DOMAIN + group.to_bytes(2, "little") + self._epoch + adapter
        return [blake3(bytes(h) + tail).digest() for h in hashes]

    def _chain(self, request: Any, stop: int) -> list[bytes]:
        resumable = getattr(request, "resumable", False)  # such a request may lose tokens that were hashed
        chain = [] if resumable else self._chains.get(request.request_id, [])
        if len(chain) < stop:
            start = len(chain) * self._chunk_tokens
            tokens = np.asarray(request.all_token_ids[start : stop * self._chunk_tokens], dtype="<u4")
            key = chain[-1] if chain else bytes(KEY_BYTES)
            plain = not _identity(request, start, stop * self._chunk_tokens)  # nothing but tokens in the whole run
            for number in range(len(chain), stop):
                offset = (number * self._chunk_tokens) - start
                begin = number * self._chunk_tokens
                identity = b"" if plain else _identity(request, begin, begin + self._chunk_tokens)
                body = tokens[offset : offset + self._chunk_tokens].tobytes()
                key = blake3(DOMAIN + key + len(identity).to_bytes(4, "little") + identity + body).digest()
                chain.append(key)
            if not resumable:
                if len(self._chains) >= MAX_CHAINS:
                    self._chains.pop(next(iter(self._chains)))
                self._chains[request.request_id] = chain
        return chain


def _identity(request: Any, start: int, end: int) -> bytes:
    """vLLM's own extra keys of a run of tokens, as bytes that are the same in every process."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
    salt = getattr(request, "cache_salt", None) if start == 0 else None
    if extra is None and not salt:
        return b""
    return _canonical(("salt", salt, "extra", extra))  # some versions do not say which of their keys is a salt


def _canonical(value: Any) -> bytes:
    if isinstance(value, tuple | list):
        inner = b"".join(_canonical(v) for v in value)
        return b"t%d:" % len(inner) + inner
    for kind, name in ((bool, b"o"), (int, b"i"), (float, b"f")):
        if isinstance(value, kind):
            data = repr(value).encode()
            return name + b"%d:" % len(data) + data
    if value is None:
        return b"n0:"
    if isinstance(value, str):
        data = value.encode()
        return b"s%d:" % len(data) + data
    if isinstance(value, bytes | bytearray | memoryview):
        return b"b%d:" % len(bytes(value)) + bytes(value)
    raise TypeError(f"{type(value).__name__} in the request's extra keys has no stable form")
