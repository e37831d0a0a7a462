"""The runtime: owns the core, feeds it every event with the time, and runs its commands.

Everything here happens in one event loop, so the core needs no locks; slow work (files, recovery, fsync) goes to threads and
comes back as an event. A method decides first and does I/O afterwards: no decision is held across an ``await``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kvtierd.config import Config
from kvtierd.core.block import Block, CopyState
from kvtierd.core.realm import Realm, Tenant
from kvtierd.core.saves import BUSY, WHOLE, Request
from kvtierd.core.tickets import PinTicket, ReadTicket, SaveGrant
from kvtierd.core.tier_core import TierCore
from kvtierd.errors import Reason, RequestError
from kvtierd.model import DEFAULT_TENANT, Namespace, Tier
from kvtierd.runtime import decisions
from kvtierd.runtime.background import Background
from kvtierd.runtime.commands import CommandRunner
from kvtierd.runtime.devices import Devices
from kvtierd.runtime.direct import Direct
from kvtierd.runtime.kept import extents_in_use, keep, take_over
from kvtierd.runtime.restart import BudgetKeeper, recover, snapshot_chunks
from kvtierd.runtime.reuse import ReuseSampler
from kvtierd.runtime.sessions import Attached, Sessions
from kvtierd.runtime.settings import core_config
from kvtierd.runtime.tenants import TenantBook, check_name
from kvtierd.runtime.tokens import Grant, Tokens
from kvtierd.runtime.waiting import Waiters
from kvtierd.runtime.wallclock import WallClock
from kvtierd.tiers.base import RealmInfo
from kvtierd.tiers.cpu import CpuPool
from kvtierd.tiers.hbm import HbmPool
from kvtierd.tiers.keeper import Keeper
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.tenants_file import SavedTenants

log = logging.getLogger(__name__)

MAX_PAUSE_S: Final = 10.0
FLUSH_INTERVAL_S: Final = 0.2
"""How often removals reach the journal when nothing else is written."""
EVICT_CHUNK: Final = 4096
RETRY_S: Final = 0.25
"""How often a save that waits for room asks anew."""
EVICT_POLL_S: Final = 0.005
TAKEN_AWAY: Final = "the token {!r} was taken away, or speaks for fewer tenants; attach again with one that is good"


class Runtime:
    """One daemon's state and work."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic, keeper: Keeper | None = None) -> None:
        self.config = config
        self.now = clock
        self.wall = WallClock(clock)
        self.started_s = clock()
        self.boot_epoch = secrets.randbits(63) | 1  # no clock can make two boots look alike
        self.sessions = Sessions(config.server.max_sessions)
        self.keeper = keeper
        self._cut_off: set[int] = set()
        """Extents that sessions had in use when the end came."""
        self.cpu = CpuPool(config.cpu, self.keeper.make if self.keeper else None)
        self.nvme: NvmeStore | None = None
        self.hbm: HbmPool | None = None
        self.devices: Devices | None = None
        self.direct: Direct | None = None
        self._moves_hang = False
        self._budget: BudgetKeeper | None = None
        self.on_checkpoint: Callable[[bool], None] = lambda _ok: None
        self.tenants = TenantBook({}, (0, 0, 0))
        self.core = TierCore(core_config(config, 0))
        self.runner: CommandRunner
        self.reuse = ReuseSampler()
        self.tokens = Tokens(config.server.token_file) if config.server.token_file else None
        self.on_barred: Callable[[int, RequestError], None] = lambda _session_id, _error: None
        """Turns a session's processes away."""
        self._realm_lock = asyncio.Lock()
        self._tenant_lock = asyncio.Lock()
        self._waiters = Waiters()
        self._background = Background()
        self.stopping = False
        """True once the daemon takes no new sessions; a drain alone only refuses saves."""
        self.recovered_before = 0
        """Generations of NVMe copies below this one were found at the start."""

    # ---- start and stop

    async def start(self) -> None:
        """Find the GPUs, open the NVMe tier, recover its blocks and begin to serve. Raises StartupError."""
        if self.config.hbm.capacity:
            self.hbm = await asyncio.to_thread(HbmPool.find, self.config.hbm)
        if self.config.nvme.capacity:
            self.nvme = await asyncio.to_thread(NvmeStore.open, self.config.nvme, clock=self.now)
        gpus = len(self.hbm.devices) if self.hbm else 0
        sizes = core_config(self.config, self.nvme.capacity_bytes if self.nvme else 0, gpus)
        self.tenants = TenantBook(self.config.tenants, sizes.capacity_bytes)
        kept = await asyncio.to_thread(self.nvme.load_tenants) if self.nvme else None
        if kept is not None:
            self.tenants.adopt(kept.sequence, kept.tenants)
        self.tenants.tell_problems()
        self.core = TierCore(sizes, self.tenants.limits)
        if self.nvme is not None:
            self.recovered_before = await recover(self.core, self.nvme, self.wall)
            saved = await asyncio.to_thread(self.nvme.load_budget)
            self._budget = BudgetKeeper(self.core.state.admission, self.nvme, self.wall, saved)
        depth = self.config.nvme.depth * max(len(self.config.nvme.folders), 1)
        self.runner = CommandRunner(
            self.core, self.wall, self.cpu, self.nvme, depth, self.sessions, self._waiters, self._background, self.hbm
        )
        if self.hbm is not None:
            self.devices = Devices(self.hbm, self.sessions, self.core, self._background, self.now, self.apply)
            await self._open_direct(self.hbm, self.devices)
        if self.keeper is not None:
            await take_over(self.core, self.cpu, self.keeper, self.wall, self.realm)
        self.cpu.start()
        self.apply()

    async def _open_direct(self, hbm: HbmPool, devices: Devices) -> None:
        if self.nvme is None:
            return
        self.direct = direct = Direct(self.config.nvme, hbm, self.nvme, self.core, self.runner.executor, self.now, self.apply)

        def opened(place: int) -> None:
            self._background.start(direct.opened(place))

        devices.on_opened = opened
        await direct.insist()

    async def stop(self) -> None:
        """Stop moving, write a snapshot, close everything."""
        self._moves_hang = not await self.runner.close(self.config.nvme.gds_timeout)
        if self.nvme is not None:
            try:
                await self.checkpoint()
            except OSError as e:
                log.error("no snapshot at the end: %s; the next start reads the journals instead", e)
            if self._budget is not None:
                await self._budget.keep(now=True)
            if not self._moves_hang:  # else its files are in use to the last
                await asyncio.to_thread(self.nvme.close)
        if self.keeper is not None:
            await asyncio.to_thread(keep, self.core, self.cpu, self.keeper, self.wall, self._cut_off)
            self.keeper.close()
        self.cpu.close()

    async def flush_forever(self) -> None:
        """Keep the journal's removals fresh and write a snapshot when the journal has grown. Runs as a supervised task."""
        pause_s = FLUSH_INTERVAL_S
        while self.nvme is not None:
            await asyncio.sleep(pause_s)
            problem = None
            try:
                await asyncio.to_thread(self.nvme.flush)
            except OSError as e:
                problem = e
            try:
                if self._budget is not None:
                    await self._budget.keep()
                if self.nvme.needs_snapshot():  # of folders that are well, where there are others
                    await self.checkpoint()
            except OSError as e:
                problem = e
            if problem is None:
                pause_s = FLUSH_INTERVAL_S
            else:
                # The former snapshot and the journals stay; blocks in memory are served meanwhile.
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                log.error("the NVMe journal cannot be written: %s; trying again in %.1f s", problem, pause_s)

    async def checkpoint(self) -> int:
        """Write a snapshot of the NVMe index. Returns the copies in it."""
        if self.nvme is None:
            return 0
        ok = False
        try:
            count = await self.nvme.checkpoint(snapshot_chunks(self.core, self.wall))
            ok = True
        finally:
            self.on_checkpoint(ok)
        return count

    @property
    def hangs(self) -> bool:
        """Whether there are threads that may never end."""
        return self._moves_hang or (self.direct is not None and self.direct.is_busy)

    def io_paths(self) -> dict[Tier, list[str]]:
        """What moves the bytes of each tier now."""
        nvme = [self.nvme.path] if self.nvme else []
        direct = [self.direct.name] if self.direct and self.direct.name else []
        return {Tier.HBM: [self.hbm.path] if self.hbm else [], Tier.CPU: [self.cpu.path], Tier.NVME: nvme + direct}

    def apply(self) -> None:
        """Run the core's commands. Called after every event."""
        self.runner.apply()

    # ---- tenants

    async def set_tenant(self, name: str, changes: Mapping[str, Any], reset: Iterable[str] = ()) -> None:
        """Change limits of a tenant: first where they are kept, then in force.

        Raises:
            RequestError: BAD_REQUEST for what cannot be, LIMIT for too many tenants, IO when it cannot be kept.
        """
        async with self._tenant_lock:
            await self._keep_tenant(name, self.tenants.changed(name, changes, reset) or None)

    async def forget_override(self, name: str) -> None:
        """Take away what was set for a tenant: the configuration's limits hold again, or none. Raises RequestError IO."""
        async with self._tenant_lock:
            if self.tenants.source(name) == "api":
                await self._keep_tenant(name, None)

    async def _keep_tenant(self, name: str, override: dict[str, Any] | None) -> None:
        book = self.tenants
        if self.nvme is not None:
            await asyncio.to_thread(self.nvme.save_tenants, SavedTenants(book.sequence + 1, book.after(name, override)))
        for changed, limits in book.commit(name, override).items():
            log.info("limits of tenant %r are now %s", changed, book.text(changed))
            self.core.set_limits(self.now(), changed, limits)
        self.apply()

    # ---- sessions and realms

    async def realm(self, tenant: str, namespace: Namespace) -> Realm:
        """The realm of a tenant and namespace; a new one is recorded on disk before it is used.

        Raises:
            RequestError: BAD_REQUEST for a tenant name that cannot be; LIMIT for too many realms.
        """
        check_name(tenant)
        known = self.core.known_realm(tenant, namespace.fingerprint())
        if known is not None:
            return known
        kept = (realm_id for attached in self.sessions for realm_id in attached.realm_ids)  # looked at only when places are rare
        before = set(self.core.state.realms) if decisions.wanted() else set()
        realm, _ = self.core.open_realm(tenant, namespace, kept=kept)
        if decisions.wanted():
            fingerprint, gone = realm.fingerprint.hex()[: decisions.KEY_CHARS], len(before - self.core.state.realms.keys())
            decisions.tell("realm opened", realm=realm.realm_id, tenant=tenant, model=namespace.model, namespace=fingerprint)
            if gone:
                decisions.tell("realms forgotten", realms=gone)
        if self.nvme is None:
            return realm
        realm.writable = False
        # A task of its own: whoever asked for the realm may go away, the realm stays.
        await asyncio.shield(self._background.start(self._register(self.nvme, realm)))
        # Meanwhile it may have given its place up to another, as it holds nothing yet.
        return await self.realm(tenant, namespace)

    async def _register(self, store: NvmeStore, realm: Realm) -> None:
        """Record a realm on disk, so that its blocks may be written down."""
        async with self._realm_lock:
            try:
                info = RealmInfo(realm.realm_id, realm.tenant.name, realm.namespace, realm.shared)
                counting = self.core.state.realms
                in_use = frozenset(counting) if store.holds_forgotten(len(counting)) else None
                await asyncio.to_thread(store.register_realm, info, in_use)
                realm.writable = True
            except (OSError, RequestError) as e:
                log.error("cannot record a namespace on NVMe: %s; its blocks stay in memory", e)

    async def attach(self, namespace: Namespace, tenant: str, client_name: str, pid: int, grant: Grant | None = None) -> Attached:
        """Begin a session. Raises RequestError when the namespace or tenant cannot be, or there are too many sessions."""
        namespace.validate()
        if grant is not None:
            grant.check_tenant(tenant or DEFAULT_TENANT)
        if self.stopping:
            raise RequestError(Reason.DRAINING, "the daemon is shutting down")
        self.sessions.check_room()
        realm = await self.realm(tenant or DEFAULT_TENANT, namespace)
        self.sessions.check_room()  # others may have come meanwhile
        if grant is not None and self.tokens is not None and self.tokens.current(grant, [realm.tenant.name]) is None:
            raise RequestError(Reason.PERMISSION, TAKEN_AWAY.format(grant.name))
        session = self.core.attach(self.sessions.next_id(), realm)
        attached = self.sessions.add(session, realm, client_name[:64], pid, self.now())
        attached.grant = grant
        log.info("session %d attached: %s, tenant %s, pid %d", attached.session_id, attached.client_name, attached.tenant, pid)
        return attached

    def end_if_over(self, attached: Attached) -> None:
        """End a session when every process of its engine has gone."""
        if not attached.is_over or self.sessions.by_id(attached.session_id) is not attached:
            return
        self.sessions.remove(attached)
        if self.stopping and self.keeper is not None:
            self._cut_off |= extents_in_use(attached.core)
        self.core.detach(self.now(), attached.core)
        self.apply()
        log.info("session %d ended", attached.session_id)

    def review_sessions(self) -> None:
        """End the sessions whose tokens were taken away, or do not speak any more for a tenant that they acted for."""
        realms = self.core.state.realms
        for attached in self.sessions:
            if attached.grant is None or attached.barred or self.tokens is None:
                continue
            theirs = [realms[i].tenant.name for i in attached.realm_ids if i in realms]
            now = self.tokens.current(attached.grant, [attached.tenant, *theirs])
            if now is not None:
                attached.grant = now
                continue
            why = TAKEN_AWAY.format(attached.grant.name)
            log.info("session %d may not go on: %s", attached.session_id, why)
            self.sessions.bar(attached, why)
            self.on_barred(attached.session_id, RequestError(Reason.PERMISSION, why))

    def check_alive(self, attached: Attached) -> None:
        """Raise RequestError UNKNOWN_SESSION when a session has ended; to be asked after every wait, before it is used again."""
        if attached.barred:
            raise RequestError(Reason.PERMISSION, attached.barred)
        if self.sessions.by_id(attached.session_id) is not attached:
            raise RequestError(Reason.UNKNOWN_SESSION, "the session has ended meanwhile; attach again")

    # ---- data

    def lookup(self, realm: Realm, packed: bytes, *, each: bool) -> tuple[int, bytes]:
        """What is held now; see ``TierCore.lookup_packed``. Changes nothing."""
        return self.core.lookup_packed(self.now(), realm, packed, each=each)

    def probe(self, attached: Attached, tenant: str, key: bytes, count: int) -> bool:
        """Whether a load of ``count`` blocks that begins with ``key`` would find that one; see ``TierCore.expect``."""
        name = tenant or attached.tenant
        if attached.barred or not attached.speaks_for(name):
            return False
        realm = self.core.known_realm(name, attached.core.realm.fingerprint)
        if realm is None:
            return self.core.state.is_shared(name)  # a load will tell what others have saved; what is private was never saved
        return self.core.expect(self.now(), realm, key, count)

    async def save(
        self,
        attached: Attached,
        realm: Realm,
        keys: list[bytes],
        wait_s: float,
        ttl_s: float | None = None,
        request: Request = WHOLE,
    ) -> SaveGrant:
        """Grant slots; keys refused for lack of room are tried again until ``wait_s`` has passed."""
        grant = await self._save(attached, realm, keys, wait_s, ttl_s, request)
        self.reuse.saved(self.now(), realm, keys, grant.outcomes, request)
        if decisions.wanted():
            decisions.tell_save(attached, realm.tenant.name, keys, grant)
        return grant

    async def _save(
        self, attached: Attached, realm: Realm, keys: list[bytes], wait_s: float, ttl_s: float | None, request: Request
    ) -> SaveGrant:
        self.check_alive(attached)
        space = self._waiters.room
        grant = self._grant(attached, realm, keys, ttl_s, request)
        if BUSY not in grant.outcomes or grant.ticket_id or (wait_s <= 0 and not space.is_set()):
            return grant
        # Nothing was granted: wait for room and ask again as a whole, so that one call has one ticket.
        until_s = self.now() + wait_s
        while True:
            if not space.is_set():
                left_s = until_s - self.now()
                try:
                    # Extents change hands without a slot coming free, so the question is also asked anew from time to time.
                    async with asyncio.timeout(max(min(left_s, RETRY_S), 0.001)):
                        await space.wait()
                except TimeoutError:
                    if left_s <= RETRY_S:
                        return grant
            self.check_alive(attached)
            space = self._waiters.room
            grant = self._grant(attached, realm, keys, ttl_s, request)
            if grant.ticket_id or BUSY not in grant.outcomes or self.now() >= until_s:
                return grant

    def _grant(self, attached: Attached, realm: Realm, keys: list[bytes], ttl_s: float | None, request: Request) -> SaveGrant:
        grant = self.core.save(self.now(), attached.core, realm, keys, ttl_s, request)
        self.apply()
        return self.core.settle(attached.core, grant)

    def commit(self, attached: Attached, ticket_id: int, indexes: Iterable[int]) -> list[Block]:
        """Publish filled blocks."""
        published = self.core.commit(self.now(), attached.core, ticket_id, indexes)
        self.apply()
        if decisions.wanted():
            tenant = published[0].realm.tenant.name if published else ""
            decisions.tell("commit", session=attached.session_id, tenant=tenant, ticket=ticket_id, blocks=len(published))
        return published

    def abort(self, attached: Attached, ticket_id: int, indexes: Iterable[int]) -> None:
        """Return granted slots."""
        self.core.abort(self.now(), attached.core, ticket_id, indexes)
        self.apply()

    def load(
        self,
        attached: Attached,
        realm: Realm,
        keys: list[bytes],
        deadline_s: float,
        *,
        each: bool,
        devices: tuple[int, ...] = (),
        keeps: bool = False,
    ) -> ReadTicket:
        """Begin a load; ``deadline_s`` is a duration."""
        self.check_alive(attached)
        until_s = self.now() + deadline_s
        ticket = self.core.load(self.now(), attached.core, realm, keys, until_s, each=each, devices=devices, keeps=keeps)
        self.reuse.loaded(self.now(), realm, keys, ticket.found_on)
        return self._watched(attached, ticket, keys)

    def prefetch(self, attached: Attached, realm: Realm, keys: list[bytes], deadline_s: float) -> ReadTicket:
        """Begin a prefetch; ``deadline_s`` is a duration."""
        self.check_alive(attached)
        ticket = self.core.prefetch(self.now(), attached.core, realm, keys, self.now() + deadline_s, attached.devices)
        return self._watched(attached, ticket, keys)

    def _watched(self, attached: Attached, ticket: ReadTicket, keys: list[bytes]) -> ReadTicket:
        if decisions.wanted():
            decisions.tell_read(attached, ticket, keys)
        if ticket.waiting:
            self._waiters.watch(ticket)
        self.apply()
        return ticket

    def collect(self, ticket: ReadTicket) -> tuple[list[int], list[int], bool]:
        """What became readable since the last call; see ``TierCore.collect``."""
        answer = self.core.collect(self.now(), ticket)
        if answer[2]:
            self._waiters.unwatch(ticket)
        self.apply()
        return answer

    async def wait_progress(self, ticket: ReadTicket) -> None:
        """Wait until a ticket has news. Returns at once when nothing more can come."""
        await self._waiters.wait(ticket)

    def unwatch(self, ticket: ReadTicket) -> None:
        """The caller asks no more."""
        self._waiters.unwatch(ticket)

    def abandon(self, ticket: ReadTicket) -> None:
        """The caller of a load has gone away: what it was not given is unpinned; what it was given stays until Release."""
        self._waiters.unwatch(ticket)
        self.core.abandon(self.now(), ticket)
        self.apply()

    def release(self, attached: Attached, ticket_id: int, indexes: Iterable[int]) -> None:
        """Unpin loaded blocks."""
        self.core.release(self.now(), attached.core, ticket_id, indexes)
        self.apply()

    def release_if_open(self, attached: Attached, ticket_id: int, indexes: Iterable[int]) -> None:
        """Unpin loaded blocks of a load that may have ended meanwhile."""
        if ticket_id in attached.core.tickets:
            self.release(attached, ticket_id, indexes)

    def cancel(self, attached: Attached, ticket_id: int) -> None:
        """Drop a prefetch."""
        self.core.cancel(self.now(), attached.core, ticket_id)
        self.apply()

    async def evict(self, realms: list[Realm], keys: list[bytes] | None, tier: Tier | None, idle_s: float) -> int:
        """Forget copies; on return the removals are in the journal, so they hold after a crash too.

        Raises:
            RequestError: IO when the journal cannot be written: the copies are gone, but may come back after a crash.
        """
        evicted = 0
        for realm in realms:
            chosen = keys if keys is not None else self.core.keys_to_evict(self.now(), realm, tier, idle_s)
            for start in range(0, len(chosen), EVICT_CHUNK):
                evicted += self.core.evict_keys(self.now(), realm, chosen[start : start + EVICT_CHUNK], tier, idle_s)
                self.apply()
                await asyncio.sleep(0)
        # A block that was being written down leaves a record when the write ends; only then can its removal be recorded.
        doomed = {m.move_id for m in self.core.state.moves.values() if m.dst.state is CopyState.DOOMED}
        while doomed & self.core.state.moves.keys():  # noqa: ASYNC110 - they end within an I/O, and need no event of their own
            await asyncio.sleep(EVICT_POLL_S)
        if self.nvme is not None:
            try:
                await asyncio.to_thread(self.nvme.flush)
            except OSError as e:
                text = f"{evicted} copies are gone, but that cannot be recorded ({e.strerror or e}): a crash may bring them back"
                raise RequestError(Reason.IO, f"{text}; evict again when the NVMe folder can be written") from e
        return evicted

    def pin(self, realms: list[Realm], keys: list[bytes], expires_s: float, *, tenant: Tenant | None = None) -> PinTicket:
        """Keep copies in place for ``expires_s`` seconds, on behalf of a tenant or (None) an operator."""
        ticket = self.core.pin(self.now(), realms, keys, self.now() + expires_s, tenant=tenant)
        self.apply()
        if decisions.wanted():
            decisions.tell(
                "pin", tenant="" if tenant is None else tenant.name, ticket=ticket.ticket_id,
                copies=len(ticket.copies), expires_s=expires_s, first=decisions.short(keys),
            )  # fmt: skip
        return ticket

    def unpin(self, ticket_id: int, tenant: str | None) -> None:
        """Take a pin back."""
        self.core.unpin(self.now(), ticket_id, tenant)
        self.apply()

    async def drain(self, timeout_s: float, *, resume: bool) -> int:
        """Write down what exists only in memory, and let moves within it end. Returns the bytes that are left."""
        self.core.drain(self.now(), on=True)
        self.apply()
        until_s = self.now() + timeout_s
        try:
            while (self.core.undrained_bytes or self.core.is_packing) and self.now() < until_s:
                space = self._waiters.room
                try:
                    async with asyncio.timeout(max(min(until_s - self.now(), 1.0), 0.001)):
                        await space.wait()
                except TimeoutError:
                    continue
            return self.core.undrained_bytes
        finally:
            # Also when the caller goes away. A shutdown that began meanwhile goes on draining.
            if resume and not self.stopping:
                self.core.drain(self.now(), on=False)
                self.apply()
