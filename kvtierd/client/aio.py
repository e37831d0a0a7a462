"""The client for asyncio: the same calls as coroutines, over a bounded pool of threads.

Copying never blocks the event loop. A cancelled call ends its waiting, but it is over only when its thread has let go of the
caller's buffers and of the daemon's slots: then both may be used again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, TypeVar

import grpc

from kvtierd import tracing
from kvtierd.client.buffers import Buffers, Keys
from kvtierd.client.client import DEFAULT_TIMEOUT_S, Client
from kvtierd.client.control import Pin, Prefetch
from kvtierd.client.copying import DEFAULT_COPY_THREADS
from kvtierd.client.deadline import Deadline
from kvtierd.client.loading import Fetch
from kvtierd.client.results import ClientStatus, LoadedBytes, LoadResult, LookupResult, SaveResult
from kvtierd.client.saving import Reservation
from kvtierd.errors import DaemonUnavailableError
from kvtierd.model import Namespace, Tier

ASYNC_THREADS: Final = 8
"""Calls of one AsyncClient that run at one time; further ones wait for their turn in the event loop."""

T = TypeVar("T")


class _Pool:
    """Runs blocking calls in threads; at most as many as there are threads."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvtierd-client")
        self._turn = asyncio.Semaphore(threads)

    async def run(self, call: Callable[[], T], cancel: Callable[[], None], undo: Callable[[T], None] | None = None) -> T:
        """Run ``call``. When the caller is cancelled: ``cancel()``, wait for the thread, then ``undo`` the result."""
        async with self._turn:
            future = asyncio.get_running_loop().run_in_executor(self._executor, tracing.carried(call))
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                cancel()
                await _settled(future)
                if undo is not None and not future.cancelled() and future.exception() is None:
                    undo(future.result())
                raise

    def close(self) -> None:
        """Wait for the threads."""
        self._executor.shutdown(wait=True)


async def _settled(future: asyncio.Future[Any]) -> None:
    """Wait for a future through further cancellations: the thread behind it still uses the caller's memory."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # looked at, so that asyncio does not report it


class AsyncReservation:
    """See `Reservation`. An asynchronous context manager.

    Args:
        reservation: what was granted.
        pool: where commits run.
    """

    def __init__(self, reservation: Reservation, pool: _Pool) -> None:
        self._reservation = reservation
        self._pool = pool
        self.outcomes = reservation.outcomes
        self.granted = reservation.granted
        self.reason = reservation.reason

    @property
    def session_token(self) -> bytes:
        """Token of the session that the slots belong to; empty without one."""
        return self._reservation.session_token

    def slots(self, index: int) -> list[int]:
        """See ``Reservation.slots``."""
        return self._reservation.slots(index)

    def views(self, index: int) -> list[memoryview]:
        """See ``Reservation.views``. The first use of an extent asks the daemon for it and maps it (about 0.1 ms)."""
        return self._reservation.views(index)

    async def commit(self, indexes: Iterable[int] | None = None, timeout_s: float = 1.0) -> int:
        """See ``Reservation.commit``."""
        deadline = Deadline(timeout_s)
        chosen = None if indexes is None else list(indexes)
        return await self._pool.run(lambda: self._reservation.commit_until(deadline, chosen), deadline.cancel)

    async def close(self) -> None:
        """Return what is not committed. Idempotent."""
        self._reservation.close()

    async def __aenter__(self) -> AsyncReservation:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class AsyncFetch:
    """See `Fetch`. An asynchronous context manager and iterator of ``(index, views)``.

    Args:
        fetch: the load under way.
        pool: where it waits.
    """

    def __init__(self, fetch: Fetch, pool: _Pool) -> None:
        self._fetch = fetch
        self._pool = pool

    @property
    def reason(self) -> Any:
        """Why the rest is missing, once ``done``; None when all was held."""
        return self._fetch.reason

    @property
    def done(self) -> bool:
        """True when nothing more will become readable."""
        return self._fetch.done

    @property
    def intact(self) -> bool:
        """See ``Fetch.intact``."""
        return self._fetch.intact

    @property
    def session_token(self) -> bytes:
        """Token of the session that the slots belong to; empty without one."""
        return self._fetch.session_token

    def slots(self, index: int) -> list[int]:
        """See ``Fetch.slots``."""
        return self._fetch.slots(index)

    def views(self, index: int) -> list[memoryview]:
        """See ``Fetch.views``."""
        return self._fetch.views(index)

    def release(self, indexes: Iterable[int]) -> None:
        """See ``Fetch.release``."""
        self._fetch.release(indexes)

    async def __aiter__(self) -> AsyncIterator[tuple[int, list[memoryview]]]:
        blocks = iter(self._fetch)
        while (block := await self._pool.run(lambda: next(blocks, None), self._fetch.cancel)) is not None:
            yield block

    async def close(self) -> None:
        """Unpin everything. Idempotent."""
        self._fetch.close()

    async def __aenter__(self) -> AsyncFetch:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class AsyncClient:
    """See `Client`, whose arguments these are. Use it in one event loop; ``async with`` closes it.

    With ``require`` the daemon is waited for when the ``async with`` is entered, not in the constructor.

    Args:
        namespace: what the blocks are.
        address: as in `Client`.
        tenant: as in `Client`.
        timeout_s: as in `Client`.
        name: as in `Client`.
        require: as in `Client`.
        threads: calls that run at one time.
        pins_memory: as in `Client`.
        shard: as in `Client`.
        bytes_only: as in `Client`.
        credentials: as in `Client`.
        token_file: as in `Client`.
        copy_threads, patient: as in `Client`.
    """

    def __init__(
        self,
        namespace: Namespace,
        address: str | os.PathLike[str] | None = None,
        tenant: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        name: str = "",
        require: bool = False,
        *,
        threads: int = ASYNC_THREADS,
        pins_memory: bool = False,
        shard: int = -1,
        bytes_only: bool | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token_file: str | os.PathLike[str] | None = None,
        copy_threads: int = DEFAULT_COPY_THREADS,
        patient: bool = True,
    ) -> None:
        self._client = Client(
            namespace,
            address,
            tenant,
            timeout_s,
            name,
            pins_memory=pins_memory,
            shard=shard,
            bytes_only=bytes_only,
            credentials=credentials,
            token_file=token_file,
            copy_threads=copy_threads,
            patient=patient,
        )
        self._client.require = require
        self._pool = _Pool(threads)

    @property
    def status(self) -> ClientStatus:
        """State at this moment."""
        return self._client.status

    @property
    def session_token(self) -> bytes:
        """See ``Client.session_token``."""
        return self._client.session_token

    @property
    def descriptor_socket(self) -> str:
        """See ``Client.descriptor_socket``."""
        return self._client.descriptor_socket

    async def wait_attached(self, timeout_s: float) -> bool:
        """See ``Client.wait_attached``."""
        return await asyncio.get_running_loop().run_in_executor(None, self._client.wait_attached, timeout_s)

    async def close(self) -> None:
        """Detach. Calls under way see the daemon as gone. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._shut)

    def _shut(self) -> None:
        self._client.close()
        self._pool.close()

    async def __aenter__(self) -> AsyncClient:
        if self._client.require and not await self.wait_attached(self._client.timeout_s):
            error = self._client.status.error
            await self.close()
            raise DaemonUnavailableError(error)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._client.timeout_s if timeout_s is None else timeout_s)

    async def lookup(self, keys: Keys, each: bool = False, timeout_s: float | None = None, *, tenant: str = "") -> LookupResult:
        """See ``Client.lookup``."""
        deadline = self._deadline(timeout_s)
        return await self._pool.run(lambda: self._client.lookup_until(deadline, keys, each, tenant), deadline.cancel)

    async def save(
        self, keys: Keys, buffers: Buffers, timeout_s: float | None = None, wait_s: float = 0.0, *, ttl_s: float | None = None
    ) -> SaveResult:
        """See ``Client.save``. Cancelled, it publishes what it has copied and returns the rest to the daemon."""
        deadline = self._deadline(timeout_s)
        return await self._pool.run(lambda: self._client.save_until(deadline, keys, buffers, wait_s, ttl_s), deadline.cancel)

    async def load(self, keys: Keys, buffers: Buffers, timeout_s: float | None = None, each: bool = False) -> LoadResult:
        """See ``Client.load``."""
        deadline = self._deadline(timeout_s)
        return await self._pool.run(lambda: self._client.load_until(deadline, keys, buffers, each), deadline.cancel)

    async def reserve(
        self,
        keys: Keys,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
        before: Keys = b"",
        matched: int | None = None,
    ) -> AsyncReservation:
        """See ``Client.reserve``."""
        deadline = self._deadline(timeout_s)
        reservation = await self._pool.run(
            lambda: self._client.reserve_until(deadline, keys, wait_s, tenant, ttl_s, before, matched),
            deadline.cancel,
            Reservation.close,
        )
        return AsyncReservation(reservation, self._pool)

    async def fetch(self, keys: Keys, timeout_s: float | None = None, each: bool = False, *, tenant: str = "") -> AsyncFetch:
        """See ``Client.fetch``."""
        deadline = self._deadline(timeout_s)
        fetch = await self._pool.run(lambda: self._client.fetch_until(deadline, keys, each, tenant), deadline.cancel, Fetch.close)
        return AsyncFetch(fetch, self._pool)

    async def save_bytes(
        self, keys: Keys, buffers: Buffers, timeout_s: float | None = None, *, ttl_s: float | None = None
    ) -> SaveResult:
        """See ``Client.save_bytes``."""
        deadline = self._deadline(timeout_s)
        return await self._pool.run(lambda: self._client.save_bytes_until(deadline, keys, buffers, ttl_s), deadline.cancel)

    async def load_bytes(self, keys: Keys, timeout_s: float | None = None, each: bool = False) -> LoadedBytes:
        """See ``Client.load_bytes``."""
        deadline = self._deadline(timeout_s)
        return await self._pool.run(lambda: self._client.load_bytes_until(deadline, keys, each), deadline.cancel)

    async def prefetch(
        self,
        keys: Keys,
        deadline_s: float,
        wait: bool = False,
        timeout_s: float | None = None,
        request_id: str = "",
        *,
        tenant: str = "",
    ) -> Prefetch:
        """See ``Client.prefetch``. The handle's ``cancel`` does not block."""
        deadline = Deadline(deadline_s) if wait else self._deadline(timeout_s)
        return await self._pool.run(
            lambda: self._client.prefetch_until(deadline, keys, deadline_s, wait, request_id, tenant),
            deadline.cancel,
            Prefetch.cancel,
        )

    async def evict(
        self,
        keys: Keys | None = None,
        tier: Tier | None = None,
        idle_s: float = 0.0,
        timeout_s: float | None = None,
        *,
        tenant: str = "",
    ) -> int:
        """See ``Client.evict``."""
        deadline = self._deadline(timeout_s)
        return await self._pool.run(lambda: self._client.evict_until(deadline, keys, tier, idle_s, tenant), deadline.cancel)

    async def pin(self, keys: Keys, expires_s: float, timeout_s: float | None = None, *, tenant: str = "") -> Pin:
        """See ``Client.pin``. A cancelled pin is not taken back; it expires."""
        deadline = self._deadline(timeout_s)
        return await self._pool.run(lambda: self._client.pin_until(deadline, keys, expires_s, tenant), deadline.cancel)

    async def unpin(self, pin: Pin, timeout_s: float = 1.0) -> bool:
        """See ``Pin.unpin``."""
        deadline = Deadline(timeout_s)
        return await self._pool.run(lambda: pin.unpin_until(deadline), deadline.cancel)
