"""The client library of kvtierd: save and load KV blocks through a daemon on this host.

>>> client = Client(Namespace(shard_bytes=(2 << 20,)))           # doctest: +SKIP
>>> client.save(keys, buffers).saved, client.load(keys, buffers).loaded   # doctest: +SKIP

`Client` is for threads, `AsyncClient` for asyncio, `ExtentMap` for worker processes that only map memory, and `block_keys`
for callers without an engine that hashes tokens.
"""

from kvtierd.client.address import default_address
from kvtierd.client.aio import AsyncClient, AsyncFetch, AsyncReservation
from kvtierd.client.breaker import BreakerState
from kvtierd.client.client import Client
from kvtierd.client.control import Pin, Prefetch
from kvtierd.client.extents import ExtentMap
from kvtierd.client.keys import block_keys
from kvtierd.client.loading import Fetch
from kvtierd.client.probing import Prober
from kvtierd.client.results import ClientStatus, LoadedBytes, LoadResult, LookupResult, SaveResult
from kvtierd.client.saving import Reservation
from kvtierd.errors import DaemonUnavailableError, KvtierdError, Reason, RequestError
from kvtierd.model import Namespace, Tier

__all__ = [
    "AsyncClient",
    "AsyncFetch",
    "AsyncReservation",
    "BreakerState",
    "Client",
    "ClientStatus",
    "DaemonUnavailableError",
    "ExtentMap",
    "Fetch",
    "KvtierdError",
    "LoadResult",
    "LoadedBytes",
    "LookupResult",
    "Namespace",
    "Pin",
    "Prefetch",
    "Prober",
    "Reason",
    "RequestError",
    "Reservation",
    "SaveResult",
    "Tier",
    "block_keys",
    "default_address",
]
