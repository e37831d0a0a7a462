"""The client: what an engine or a program uses to save and load KV blocks.

A missing, restarting or hanging daemon is no error for a cache: lookups hold 0, saves save 0, loads load 0, each within its
deadline, and the client comes back by itself. Pass ``require=True`` where that should raise instead.
"""

from __future__ import annotations

import os
from collections import Counter
from types import TracebackType
from typing import Final

import grpc

from kvtierd.client import bytes_rpc, control, loading, saving
from kvtierd.client.address import default_address, socket_path
from kvtierd.client.buffers import Buffers, Keys, block_views, count_keys, pack_keys
from kvtierd.client.connection import Connection
from kvtierd.client.control import Pin, Prefetch
from kvtierd.client.copying import DEFAULT_COPY_THREADS, Copier
from kvtierd.client.deadline import Deadline
from kvtierd.client.link import Link
from kvtierd.client.loading import Fetch, reason_of
from kvtierd.client.results import PASSING, UNAVAILABLE, LoadedBytes, LoadResult, LookupResult, SaveResult, told
from kvtierd.client.saving import Portion, Reservation, rejection, wire_ttl_ms
from kvtierd.client.session import Session, SessionSettings
from kvtierd.client.tokens import default_token_file
from kvtierd.errors import DaemonUnavailableError
from kvtierd.model import Namespace, Tier
from kvtierd.tracing import traced

DEFAULT_TIMEOUT_S: Final = 1.0


class Client(Connection):
    """A connection to one daemon for one namespace. Thread-safe. Attaches in the background from the start.

    Keys are packed bytes (32 each), a numpy array of bytes, or a sequence of 32-byte keys. Buffers are one C-contiguous
    object of CPU memory a key (buffer protocol, numpy array of any dtype, torch tensor), or one such object a shard.

    Args:
        namespace: what the blocks are.
        address: ``unix:PATH``, an absolute path, or ``host:port``; None means ``$KVTIERD_ADDRESS`` or the default socket.
        tenant: who is billed; empty means "default".
        timeout_s: deadline of calls that name none.
        name: for the daemon's logs and status.
        require: raise instead of answering "nothing" when there is no daemon; the constructor then waits for it.
        pins_memory: this process (or its workers) registers mapped memory with a device.
        shard: shard whose memory this process maps; -1 for all.
        bytes_only: send bytes in messages instead of sharing memory; None means only for ``host:port``.
        credentials: TLS for ``host:port``.
        token_file: file that holds the bearer token of a daemon that asks for one, read at each attach; None means
            ``$KVTIERD_TOKEN_FILE``, and "" none.
        copy_threads: threads that copy for one large save or load, the caller's own included; 1 keeps other cores free of it.
        patient: calls that an overloaded daemon refuses wait as long as it says and are made again, within their deadline (but
            ``Fetch.poll``, which only looks). False answers OVERLOADED at once, for callers that have better things to do.

    Raises:
        RequestError: the namespace contradicts itself.
        ValueError: the address is malformed, or ``copy_threads`` out of range.
        DaemonUnavailableError: with ``require``, no daemon within ``timeout_s``.
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
        pins_memory: bool = False,
        shard: int = -1,
        bytes_only: bool | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token_file: str | os.PathLike[str] | None = None,
        copy_threads: int = DEFAULT_COPY_THREADS,
        patient: bool = True,
    ) -> None:
        namespace.validate()
        if isinstance(address, os.PathLike):
            address = f"unix:{os.fspath(address)}"
        where = address or default_address()
        remote = socket_path(where) is None
        self.namespace = namespace
        self.address = where
        self._bytes_only = remote if bytes_only is None else bytes_only
        self._copier = Copier(copy_threads)
        tokens = default_token_file() if token_file is None else os.fspath(token_file)
        settings = SessionSettings(
            where, namespace, tenant, name, pins_memory, shard, self._bytes_only, credentials, tokens, patient
        )
        super().__init__(Link(settings), timeout_s, require)
        self._link.start()
        if require and not self._link.wait_attached(timeout_s):
            error = self._link.status.error
            self.close()
            raise DaemonUnavailableError(error)

    def close(self) -> None:
        """Detach. Calls under way see the daemon as gone. Idempotent."""
        self._link.close()
        self._copier.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- blocks --------------------------------------------------------------------------------------------------------

    def lookup(self, keys: Keys, each: bool = False, timeout_s: float | None = None, *, tenant: str = "") -> LookupResult:
        """What is held. Changes nothing and renews nothing.

        Args:
            keys: root first.
            each: look at every key instead of stopping at the first miss.
            timeout_s: deadline.
            tenant: to act for, where this session may; empty means the client's own.

        Raises:
            ValueError: malformed keys.
        """
        return self.lookup_until(self._deadline(timeout_s), keys, each, tenant)

    @traced("kvtierd.lookup", told)
    def lookup_until(self, deadline: Deadline, keys: Keys, each: bool = False, tenant: str = "") -> LookupResult:
        """As ``lookup``, with a deadline that another thread can bring forward."""
        packed = pack_keys(keys)
        if not packed:
            return LookupResult()
        return self._call(
            deadline,
            lambda s: control.lookup(s, packed, deadline, each=each, tenant=tenant),
            lambda e: LookupResult(reason=reason_of(e)),
        )

    def save(
        self, keys: Keys, buffers: Buffers, timeout_s: float | None = None, wait_s: float = 0.0, *, ttl_s: float | None = None
    ) -> SaveResult:
        """Copy blocks into the cache.

        Args:
            keys: root first.
            buffers: one entry a key, see the class.
            timeout_s: deadline of the whole call.
            wait_s: how long blocks that are BUSY, IN_PROGRESS or over the LIMIT are tried again, within the deadline.
            ttl_s: life of the blocks: after that many seconds they are a miss; None for no end. Of several saves of one block,
                also where it is held already, the latest end holds.

        Raises:
            ValueError: malformed keys, a buffer of another size than the namespace's, or a life that cannot be; nothing was saved.
            RequestError: the daemon refuses such calls (a mistake of the caller).
        """
        return self.save_until(self._deadline(timeout_s), keys, buffers, wait_s, ttl_s)

    @traced("kvtierd.save", told)
    def save_until(
        self, deadline: Deadline, keys: Keys, buffers: Buffers, wait_s: float = 0.0, ttl_s: float | None = None
    ) -> SaveResult:
        """As ``save``, with a deadline that another thread can bring forward."""
        packed, ttl_ms = pack_keys(keys), wire_ttl_ms(ttl_s)
        blocks = block_views(buffers, count_keys(packed), self.namespace.shard_bytes)
        if not blocks:
            return SaveResult()

        def run(session: Session) -> SaveResult:
            if self._bytes_only:
                result, error = bytes_rpc.save_bytes(session, packed, blocks, deadline, ttl_ms)
            else:
                result, error = saving.Saving(session, self._copier, packed, blocks, deadline, wait_s, ttl_ms).run()
            if error is not None and error.reason not in PASSING:
                raise error
            if self.require and result.rejected[UNAVAILABLE]:
                raise DaemonUnavailableError("the daemon went away during the save")
            return result

        return self._call(deadline, run, lambda e: SaveResult(rejected=Counter({rejection(e): len(blocks)})))

    def load(self, keys: Keys, buffers: Buffers, timeout_s: float | None = None, each: bool = False) -> LoadResult:
        """Copy blocks out of the cache into buffers, each as soon as it is readable.

        Args:
            keys: root first.
            buffers: one writable entry a key, see the class.
            timeout_s: deadline of the whole call; past it the rest is a miss.
            each: load every key that is held instead of stopping at the first miss.

        Returns:
            What was loaded. Buffers of other blocks have unspecified content.

        Raises:
            ValueError: malformed keys, or a buffer that is read-only or of another size than the namespace's.
            RequestError: the daemon refuses such calls (a mistake of the caller).
        """
        return self.load_until(self._deadline(timeout_s), keys, buffers, each)

    @traced("kvtierd.load", told)
    def load_until(self, deadline: Deadline, keys: Keys, buffers: Buffers, each: bool = False) -> LoadResult:
        """As ``load``, with a deadline that another thread can bring forward."""
        packed = pack_keys(keys)
        blocks = block_views(buffers, count_keys(packed), self.namespace.shard_bytes, writable=True)
        if not blocks:
            return LoadResult()

        def run(session: Session) -> LoadResult:
            if self._bytes_only:
                return bytes_rpc.load_into(session, packed, blocks, deadline, each=each)
            return loading.Loading(session, self._copier, packed, blocks, deadline, each=each).run()

        return self._call(deadline, run, lambda e: LoadResult(reason=reason_of(e)))

    def reserve(
        self,
        keys: Keys,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
        *,
        tenant: str = "",
        ttl_s: float | None = None,
        before: Keys = b"",
        matched: int | None = None,
        device: bool = False,
    ) -> Reservation:
        """Ask for slots to fill in place: ``with client.reserve(keys) as r: … r.views(i) …; r.commit()``.

        Args:
            keys: root first, at most the daemon's limit for one call.
            timeout_s: deadline of the answer.
            wait_s: how long the daemon may wait for space, within the deadline.
            tenant: to act for, where this session may; empty means the client's own.
            ttl_s: life of the blocks from their commit on, as in ``save``.
            before: the request's blocks before these, root first, where it saves in portions: with the last one, so that in the
                daemon its leaves go before its roots. They need not be held, and count against the limit for one call too.
            matched: blocks, from the root on, that the request found when it came; None when that is not known.
            device: take slots in GPU memory too, where processes of the session have opened that. Only they can use these.

        Raises:
            ValueError: malformed keys, or a life or number that cannot be.
            RequestError: too many keys for one call, or the daemon refuses such calls.
        """
        return self.reserve_until(self._deadline(timeout_s), keys, wait_s, tenant, ttl_s, before, matched, device=device)

    @traced("kvtierd.reserve", told)
    def reserve_until(
        self,
        deadline: Deadline,
        keys: Keys,
        wait_s: float = 0.0,
        tenant: str = "",
        ttl_s: float | None = None,
        before: Keys = b"",
        matched: int | None = None,
        *,
        device: bool = False,
    ) -> Reservation:
        """As ``reserve``, with a deadline that another thread can bring forward."""
        packed, ttl_ms = pack_keys(keys), wire_ttl_ms(ttl_s)
        portion = Portion(pack_keys(before), matched, device)
        count = count_keys(packed)
        if not count:
            return Reservation(None, 0, None)
        return self._hold(
            deadline,
            lambda session: saving.reserve(session, packed, deadline, wait_s, tenant, ttl_ms, portion),
            lambda e: Reservation(None, count, None, outcome=rejection(e), reason=reason_of(e)),
        )

    def fetch(
        self,
        keys: Keys,
        timeout_s: float | None = None,
        each: bool = False,
        *,
        tenant: str = "",
        device: bool = False,
        keeps: bool = False,
    ) -> Fetch:
        """Blocks to read in place: ``with client.fetch(keys) as f: for index, views in f: …``.

        Check ``f.intact`` after the last use of the views: what was read before it turned False cannot be trusted.

        Args:
            keys: root first, at most the daemon's limit for one call.
            timeout_s: past it what is not readable is a miss.
            each: every key that is held instead of stopping at the first miss.
            tenant: to act for, where this session may; empty means the client's own.
            device: take slots in GPU memory too, where processes of the session have opened that. Only they can use these.
            keeps: you release nothing before all is there: what goes beyond the memory that a session may hold is then a miss
                with reason LIMIT, and not waited for, unless something else of this client is about to give some back.

        Raises:
            ValueError: malformed keys.
            RequestError: too many keys for one call.
        """
        return self.fetch_until(self._deadline(timeout_s), keys, each, tenant, device=device, keeps=keeps)

    @traced("kvtierd.fetch", told)
    def fetch_until(
        self, deadline: Deadline, keys: Keys, each: bool = False, tenant: str = "", *, device: bool = False, keeps: bool = False
    ) -> Fetch:
        """As ``fetch``, with a deadline that another thread can bring forward."""
        packed = pack_keys(keys)
        if not packed:
            return Fetch(None, None, deadline)
        return self._hold(
            deadline,
            lambda session: loading.fetch(session, packed, deadline, each=each, tenant=tenant, device=device, keeps=keeps),
            lambda e: Fetch(None, None, deadline, reason_of(e)),
        )

    def save_bytes(self, keys: Keys, buffers: Buffers, timeout_s: float | None = None, *, ttl_s: float | None = None) -> SaveResult:
        """As ``save``, with the bytes in the messages, on any session."""
        return self.save_bytes_until(self._deadline(timeout_s), keys, buffers, ttl_s)

    @traced("kvtierd.save_bytes", told)
    def save_bytes_until(self, deadline: Deadline, keys: Keys, buffers: Buffers, ttl_s: float | None = None) -> SaveResult:
        """As ``save_bytes``, with a deadline of the caller's."""
        packed, ttl_ms = pack_keys(keys), wire_ttl_ms(ttl_s)
        blocks = block_views(buffers, count_keys(packed), self.namespace.shard_bytes)
        if not blocks:
            return SaveResult()

        def run(session: Session) -> SaveResult:
            result, error = bytes_rpc.save_bytes(session, packed, blocks, deadline, ttl_ms)
            if error is not None and error.reason not in PASSING:
                raise error
            return result

        return self._call(deadline, run, lambda e: SaveResult(rejected=Counter({rejection(e): len(blocks)})))

    def load_bytes(self, keys: Keys, timeout_s: float | None = None, each: bool = False) -> LoadedBytes:
        """As ``load``, with the bytes in the messages and in the result, on any session."""
        return self.load_bytes_until(self._deadline(timeout_s), keys, each)

    @traced("kvtierd.load_bytes", told)
    def load_bytes_until(self, deadline: Deadline, keys: Keys, each: bool = False) -> LoadedBytes:
        """As ``load_bytes``, with a deadline of the caller's."""
        packed = pack_keys(keys)
        if not packed:
            return LoadedBytes()
        return self._call(
            deadline,
            lambda session: bytes_rpc.load_bytes(session, packed, deadline, each=each),
            lambda e: LoadedBytes(reason=reason_of(e)),
        )

    # -- control -------------------------------------------------------------------------------------------------------

    def prefetch(
        self,
        keys: Keys,
        deadline_s: float,
        wait: bool = False,
        timeout_s: float | None = None,
        request_id: str = "",
        *,
        tenant: str = "",
    ) -> Prefetch:
        """Start promoting blocks to CPU memory and keep them there until the deadline, a load of them, or ``cancel``.

        Args:
            keys: in order of need.
            deadline_s: how long promoted blocks stay pinned.
            wait: return when all is ready, at the latest after ``deadline_s``; else at once.
            timeout_s: deadline of the answer, when not waiting.
            request_id: the caller's, for the daemon's logs and stories.
            tenant: to act for, where this session may; empty means the client's own.

        Raises:
            ValueError: malformed keys.
        """
        seconds = deadline_s if wait else self.timeout_s if timeout_s is None else timeout_s
        return self.prefetch_until(Deadline(seconds), keys, deadline_s, wait, request_id, tenant)

    @traced("kvtierd.prefetch", told)
    def prefetch_until(
        self, deadline: Deadline, keys: Keys, deadline_s: float, wait: bool, request_id: str, tenant: str = ""
    ) -> Prefetch:
        """As ``prefetch``, with a deadline that another thread can bring forward."""
        packed = pack_keys(keys)
        if not packed:
            return Prefetch(self._link)
        return self._call(
            deadline,
            lambda s: control.prefetch(
                self._link, s, packed, deadline, deadline_s, wait=wait, request_id=request_id, tenant=tenant
            ),
            lambda e: Prefetch(self._link, reason=reason_of(e)),
        )

    def evict(
        self,
        keys: Keys | None = None,
        tier: Tier | None = None,
        idle_s: float = 0.0,
        timeout_s: float | None = None,
        *,
        tenant: str = "",
    ) -> int:
        """Forget copies. Blocks in use are forgotten when their last user lets go.

        Args:
            keys: only these; None means the whole namespace (an empty selection evicts nothing).
            tier: only copies on this tier; None means all.
            idle_s: only blocks idle at least this long.
            timeout_s: deadline.
            tenant: to act for, where this session may; empty means the client's own.

        Returns:
            Copies forgotten; 0 without a daemon.
        """
        return self.evict_until(self._deadline(timeout_s), keys, tier, idle_s, tenant)

    def evict_until(
        self, deadline: Deadline, keys: Keys | None = None, tier: Tier | None = None, idle_s: float = 0.0, tenant: str = ""
    ) -> int:
        """As ``evict``, with a deadline that another thread can bring forward."""
        packed = None if keys is None else pack_keys(keys)
        if packed == b"":
            return 0
        return self._call(deadline, lambda s: control.evict(s, packed, tier, idle_s, deadline, tenant), lambda _: 0)

    def pin(self, keys: Keys, expires_s: float, timeout_s: float | None = None, *, tenant: str = "") -> Pin:
        """Keep the best copies of blocks in place until ``unpin`` or the expiry. A pin outlives the session.

        Args:
            keys: blocks to pin; those that are not held are left out.
            expires_s: seconds until the pin ends by itself.
            timeout_s: deadline.
            tenant: to act for, where this session may; empty means the client's own.
        """
        return self.pin_until(self._deadline(timeout_s), keys, expires_s, tenant)

    def pin_until(self, deadline: Deadline, keys: Keys, expires_s: float, tenant: str = "") -> Pin:
        """As ``pin``, with a deadline that another thread can bring forward."""
        packed = pack_keys(keys)
        if not packed:
            return Pin(self._link)
        return self._call(
            deadline,
            lambda s: control.pin(self._link, s, packed, expires_s, deadline, tenant),
            lambda e: Pin(self._link, reason=reason_of(e)),
        )
