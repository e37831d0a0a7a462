"""Everything that can happen to a core, as operations that take small numbers; used by the machine and by fuzzing."""

from __future__ import annotations

from dataclasses import replace

from kvtierd.core.commands import Priority
from kvtierd.core.limits import NEVER, Limits, TenantClass
from kvtierd.core.realm import Realm
from kvtierd.core.rising import MAX_BYTES
from kvtierd.core.saves import WHOLE, Request
from kvtierd.core.tickets import ReadTicket, Session
from kvtierd.errors import Reason, RequestError
from kvtierd.model import Result, Tier
from tests.core.lifetimes import MortalShell
from tests.core.shell import KIB, config, key_of

KEYS = 40
SHAPES = [(4096,), (8192,), (4096, 4096), (4096, 12_288, 1)]
WRITE_FAULTS = [Result.NO_SPACE, Result.IO_ERROR, Result.CORRUPT]
READ_FAULTS = [Result.CORRUPT, Result.IO_ERROR, Result.NO_SPACE]
POLICIES: dict[str, dict[str, object]] = {"lru": {}, "bonus": {"turn_bonus_s": 6.0}, "arc": {"eviction": "arc"}}
ADMISSIONS: dict[str, dict[str, object]] = {
    "all": {},
    "second use": {"second_use": True, "second_use_window_s": 20.0},
    "budget": {"write_budget_bytes": 64 * KIB},
    "both": {"second_use": True, "write_budget_bytes": 256 * KIB},
}


LIMITS: list[Limits | None] = [
    None,
    Limits((0, 0, 0)),
    Limits((16 * KIB, 48 * KIB, 64 * KIB), ttl_s=(2.0, NEVER, 30.0)),
    Limits((None, None, 32 * KIB), write_budget_share=0.25),
    Limits(tenant_class=TenantClass.BASIC),
    Limits((None, 16 * KIB, None), tenant_class=TenantClass.BASIC),
    Limits((None, 96 * KIB, None), (8 * KIB, 24 * KIB, 32 * KIB), tenant_class=TenantClass.PREMIUM),
    Limits((None, None, None), (0, 40 * KIB, 0), tenant_class=TenantClass.PREMIUM, write_budget_share=0.0),
]
"""What tenants are given while things go on; reserves of two fit into the smallest tiers."""
TENANTS = ("a", "b", "s", "t")
"""The last two share what they save."""


def _pick(items: list, n: int):  # type: ignore[no-untyped-def, type-arg]
    return items[n % len(items)] if items else None


class Driver:
    """One run: a shell, its realms, and what is open."""

    def __init__(
        self,
        cpu: int,
        nvme: int,
        hbm: int,
        ttl: bool,
        quota: bool,
        late: bool,
        promote: int,
        share: float,
        extent: int = 64,
        policy: str = "lru",
        admission: str = "all",
        into_hbm: bool = False,
    ) -> None:
        """Sizes in KiB; ``policy`` and ``admission`` are keys of POLICIES and ADMISSIONS."""
        limits = {"s": Limits(shared=True), "t": Limits(shared=True)}
        if quota:
            limits["b"] = Limits((16 * KIB, 96 * KIB, 128 * KIB), ttl_s=(5.0, 8.0, 60.0))
        self.shell = MortalShell(
            config(
                cpu * KIB, nvme * KIB, hbm * KIB, extent * KIB,
                ttl_s=(3.0, 20.0, None) if ttl else (30.0, 600.0, None),
                max_promote_bytes=promote * KIB, max_demote_bytes=64 * KIB, max_ticket_share=share, max_tickets=12,
                **POLICIES[policy], **ADMISSIONS[admission],
            ),
            limits,
            release_late=late,
            into_hbm=into_hbm,
        )  # fmt: skip
        self.realms: list[Realm] = [self.shell.realm(*shape, tenant=t) for t in "ab" for shape in SHAPES]
        self.realms += [self.shell.realm(*shape, tenant=t) for t in "st" for shape in SHAPES[1:3]]
        self.sessions: list[Session] = []
        self.held: dict[tuple[str, Tier], int] = {}
        self.faulty = False
        # A slot of one page takes two on NVMe, and a quota bounds what can be written down too.
        self.all_fits_below = not quota and (nvme >= 4 * (cpu + hbm) or not (nvme or hbm))

    def limit(self, t: int, n: int) -> None:
        """Change the limits of a tenant."""
        name = TENANTS[t % len(TENANTS)]
        limits = LIMITS[n % len(LIMITS)]
        reserved = sum(any(tenant.limits.reserve_bytes) for tenant in self.shell.core.state.tenants.values() if tenant.name != name)
        if limits is not None and any(limits.reserve_bytes) and reserved:
            return  # one reserve at a time fits into the smallest tier
        if name in "st":
            limits = replace(limits or Limits(), shared=True)
        self.shell.core.set_limits(self.shell.now, name, limits)
        self.shell.run()
        self.all_fits_below = False

    def realm(self, n: int) -> Realm:
        """Realm number n."""
        return self.realms[n % len(self.realms)]

    def session(self, n: int) -> Session:
        """Session number n of those that are there; one is made when there is none."""
        if not self.sessions:
            self.sessions.append(self.shell.attach(self.realm(n)))
        return self.sessions[n % len(self.sessions)]

    def attach(self, n: int, *, blind: bool = False) -> None:
        """Begin a session, also one that cannot open GPU memory."""
        if len(self.sessions) < 5:
            self.sessions.append(self.shell.attach(self.realm(n)))
            if blind:
                self.shell.blind.add(self.sessions[-1])

    def detach(self, n: int) -> None:
        """End a session."""
        if self.sessions:
            self.shell.detach(self.sessions.pop(n % len(self.sessions)))

    def keys(self, first: int, count: int) -> list[bytes]:
        """Keys that follow each other."""
        return [key_of((first + i) % KEYS) for i in range(count)]

    def save(self, s: int, r: int, first: int, count: int) -> None:
        """Ask for slots."""
        self._limited(lambda: self.shell.save(self.session(s), self.realm(r), self.keys(first, count), self.portion(s, first)))

    def live(self, ttl_s: float | None) -> None:
        """Blocks that are saved from now on live so long."""
        self.shell.ttl_s = ttl_s

    def put(self, s: int, r: int, first: int, count: int) -> None:
        """Save and commit at once."""
        self._limited(lambda: self.shell.put(self.session(s), self.realm(r), self.keys(first, count), self.portion(s, first)))

    def portion(self, s: int, first: int) -> Request:
        """What every other session tells of the request that it saves."""
        return Request(self.keys(0, first), first // 2) if s % 2 else WHOLE

    def commit(self, t: int, some: int) -> None:
        """Commit all or some of a ticket."""
        ticket_id = _pick(list(self.shell.saves), t)
        if ticket_id is not None:
            self.shell.commit(ticket_id, self._some(list(self.shell.saves[ticket_id].open), some))

    def abort(self, t: int, some: int) -> None:
        """Abort all or some of a ticket."""
        ticket_id = _pick(list(self.shell.saves), t)
        if ticket_id is not None:
            self.shell.abort(ticket_id, self._some(list(self.shell.saves[ticket_id].open), some))

    @staticmethod
    def _some(indexes: list[int], some: int) -> list[int] | None:
        chosen = [i for i in indexes if some >> (i % 8) & 1]
        return chosen or None

    def load(self, s: int, r: int, first: int, count: int, each: bool, wait_s: float) -> None:
        """Begin a load."""
        self._limited(lambda: self.shell.load(self.session(s), self.realm(r), self.keys(first, count), wait_s, each=each))

    def collect(self, t: int) -> None:
        """Take what is readable."""
        load = _pick(list(self.shell.loads.values()), t)
        if load is not None:
            self.shell.collect(load.ticket)

    def release(self, t: int, some: int) -> None:
        """Release all or some of what was taken."""
        load = _pick(list(self.shell.loads.values()), t)
        if load is not None:
            still = [i for i in load.taken if load.ticket.entries[i] == 3]
            self.shell.release(load.ticket, (self._some(still, some) if some else None) if still else None)

    def abandon(self, t: int) -> None:
        """The caller of a load goes away; what it took stays until the session ends."""
        load = _pick(list(self.shell.loads.values()), t)
        if load is not None:
            self.shell.core.abandon(self.shell.now, load.ticket)
            self.shell.run()

    def prefetch(self, s: int, r: int, first: int, count: int, wait_s: float) -> None:
        """Begin a prefetch."""
        self._limited(lambda: self.shell.prefetch(self.session(s), self.realm(r), self.keys(first, count), wait_s))

    def cancel(self, s: int, t: int) -> None:
        """Cancel a prefetch."""
        session = self.session(s)
        ticket = _pick([x for x in session.tickets.values() if isinstance(x, ReadTicket) and x.prefetch], t)
        if ticket is not None:
            self.shell.core.cancel(self.shell.now, session, ticket.ticket_id)
            self.shell.run()

    def evict(self, r: int, first: int, count: int, tier: Tier | None) -> None:
        """Evict keys."""
        self.shell.evict(self.realm(r), self.keys(first, count), tier)

    def sink(self, r: int, first: int, count: int) -> None:
        """Evict keys from memory that are on NVMe too, as who needs the room would."""
        realm = self.realm(r)
        index = realm.index
        keys = [key for key in self.keys(first, count) if key in index and index[key].mask & Tier.NVME.bit]
        for tier in (Tier.HBM, Tier.CPU):
            self.shell.evict(realm, keys, tier)

    def pin(self, r: int, first: int, count: int, wait_s: float) -> None:
        """Pin keys."""
        self._limited(lambda: self.shell.pin(self.realm(r), self.keys(first, count), wait_s))

    def unpin(self, t: int) -> None:
        """Take a pin back."""
        ticket_id = _pick(list(self.shell.core.pins), t)
        if ticket_id is not None:
            self.shell.core.unpin(self.shell.now, ticket_id)
            self.shell.run()

    def put_hbm(self, r: int, key: int) -> None:
        """Put a block into HBM."""
        if self.shell.config.capacity_bytes[Tier.HBM]:
            self.shell.put_hbm(self.realm(r), key_of(key % KEYS))

    def finish(self, m: int, fault: int) -> None:
        """End a move."""
        move_id = _pick(list(self.shell.moves), m)
        if move_id is not None:
            up = self.shell.moves[move_id][0].priority is not Priority.DEMOTE
            faults = READ_FAULTS if up else WRITE_FAULTS
            self.faulty |= bool(fault)
            self.shell.finish(move_id, faults[fault - 1] if 1 <= fault <= len(faults) else Result.OK)

    def release_extent(self, n: int) -> None:
        """A retired extent is let go."""
        place = _pick(list(self.shell.unreleased), n)
        if place is not None:
            self.shell.release_extent(*place)
            self.shell.run()

    def direct(self, on: bool) -> None:
        """Switch direct moves between GPU memory and NVMe."""
        self.shell.set_direct(on)

    def leave_devices(self, r: int) -> None:
        """No engine that reads a realm's blocks in GPU memory is left there."""
        self.shell.core.leave_devices(self.shell.now, self.realm(r))
        self.shell.run()

    def drain(self, on: bool) -> None:
        """Switch draining."""
        self.shell.drain(on=on)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.shell.wait(seconds)

    @staticmethod
    def _limited(call) -> None:  # type: ignore[no-untyped-def]
        try:
            call()
        except RequestError as e:
            if e.reason is not Reason.LIMIT:
                raise

    def check(self) -> None:
        """Check everything that can be checked between two events."""
        shell = self.shell
        shell.check()
        limit = shell.config.ticket_limit_bytes(Tier.CPU)
        for session in self.sessions:
            assert session.ticket_bytes <= max(limit, max(r.tier_bytes[Tier.CPU] for r in self.realms))
        up = [m for m, _ in shell.moves.values() if m.priority is not Priority.DEMOTE]
        for rises, most in ((False, shell.config.max_promote_bytes), (True, MAX_BYTES)):
            sizes = [m.size_bytes for m in up if m.rises is rises]
            assert len(sizes) <= 1 or sum(sizes) <= most
        self._check_admission()
        self._check_limits()
        if not shell.core.state.counts.evictions:
            for realm_id, key in shell.version.keys() - shell.evicted - shell.expired():
                assert shell.core.lookup(shell.now, shell.core.state.realms[realm_id], [key])[0], (
                    "nothing is lost without an eviction"
                )

    def _check_limits(self) -> None:
        """What a tenant holds beyond its quota was there before the quota, and reserves were never taken by others."""
        for tenant in self.shell.core.state.tenants.values():
            for tier in Tier:
                place = (tenant.name, tier)
                quota = tenant.limits.quota(tier)
                used, before = tenant.used_bytes[tier], self.held.get(place, 0)
                assert quota is None or used <= max(quota, before), f"{tenant.name} grew beyond its quota of {tier.name}"
                self.held[place] = used

    def _check_admission(self) -> None:
        """What NVMe was refused is refused for a reason that is on, and nothing else is called so."""
        state = self.shell.core.state
        evicted = sum(n for (_, why), n in state.counts.evictions.items() if why == "not_admitted")
        assert evicted == state.counts.not_admitted.total()
        if not state.config.second_use:
            assert not state.counts.not_admitted["no_room"]
        if not state.config.write_budget_bytes:
            assert not state.counts.not_admitted["budget"]
        if not state.admission.enabled:
            assert not evicted

    def settle(self) -> None:
        """Everybody leaves and faults stop: everything must come to rest."""
        shell = self.shell
        core = shell.core
        while self.sessions:
            self.detach(0)
        shell.drain(on=True)
        for _ in range(200):
            shell.finish_all()
            shell.release_all()
            shell.wait(1.0)
            waits = shell.moves or core.pins or shell.unreleased or sum(core.snapshot().queue_depth.values())
            if not waits and not (core.undrained_bytes and self.all_fits_below):
                break
        shell.finish_all()
        shell.check()
        if self.all_fits_below:
            assert core.undrained_bytes == 0
        assert not shell.moves and not shell.writers and not shell.readers
        assert core.state.pinned_bytes == [0, 0, 0]
        assert sum(core.snapshot().queue_depth.values()) == 0
        assert not any(e.draining for p in core.state.pools for e in p.extents.values() if not e.used), "empty extents go"
        shell.drain(on=False)
        ticks = shell.wait(3600.0)
        shell.finish_all()
        assert ticks < 7200, f"{ticks} ticks in an idle hour"
        shell.check()
        for tenant in core.state.tenants.values():
            for tier in Tier:
                quota = tenant.limits.quota(tier)
                assert quota is None or tenant.used_bytes[tier] <= quota, "what is beyond a quota goes in the end"
