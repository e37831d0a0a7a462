"""A trace through the daemon's own core in virtual time: the same classes, with a shell that moves nothing.

Each request does at its arrival what an engine does: it looks its prefix up, loads what is held, and saves the rest. Moves between
tiers take no time, or, for those from and to NVMe, as long as a given bandwidth makes them; each direction has its own, and moves
wait for each other in the order in which the core starts them.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from kvtierd.core import saves
from kvtierd.core.commands import Progress, StartMoves
from kvtierd.core.realm import Realm
from kvtierd.core.saves import BUSY, LIMIT
from kvtierd.core.settings import CoreConfig
from kvtierd.core.slots import RetireExtent
from kvtierd.core.tickets import GRANTED, ReadTicket, Session
from kvtierd.core.tier_core import TierCore
from kvtierd.model import DEFAULT_TENANT, KEY_BYTES, PAGE_BYTES, Namespace, Result, Tier
from kvtierd.replay.result import MAX_SAMPLES, Tally, figures
from kvtierd.replay.trace import Request

EXTENTS: Final = 64
"""Extents that a tier has, about: as large in proportion as those of a daemon."""
LOAD_DEADLINE_S: Final = 60.0
SAVE_TRIES: Final = 3
"""Tries of a save that may find no room one after the other; each of them has the core make some."""
STEP_S: Final = 1e-6
"""Between a client's calls. Traces have many requests at one time; in a daemon no two calls come at the same, and age is exact."""
IN_FLIGHT_BYTES: Final = 256 << 20
"""As ``nvme.max_bytes_in_flight``."""


@dataclass(frozen=True)
class SimSettings:
    """What to simulate. Defaults are the daemon's; a single tier has no TTL."""

    capacity_blocks: dict[Tier, int]
    block_bytes: int
    time_scale: float = 1.0
    """Factor on the time between requests: 20 means traffic that is 20 times slower."""
    hbm_ttl_s: float | None = 30.0
    cpu_ttl_s: float | None = 600.0
    nvme_ttl_s: float | None = None
    free_target: float = 0.0
    """Moves that take no time need no room kept ready for them; a daemon has 0.15."""
    eviction: str = "lru"
    turn_bonus_s: float = 0.0
    second_use: bool = False
    second_use_window_s: float = 1800.0
    write_budget_bytes: int = 0
    nvme_bytes_per_s: float = 0.0
    """Bandwidth of NVMe each way; 0 for moves that take no time."""

    def core_config(self) -> CoreConfig:
        """The core's configuration, worked out as the daemon does it."""
        slot_bytes = Namespace(shard_bytes=(self.block_bytes,)).slot_bytes[0]
        size = {Tier.HBM: slot_bytes, Tier.CPU: slot_bytes, Tier.NVME: slot_bytes + PAGE_BYTES}
        capacity = [self.capacity_blocks.get(tier, 0) * size[tier] for tier in Tier]
        extent = [max(size[tier], capacity[tier] // EXTENTS) for tier in Tier]
        return CoreConfig(
            capacity_bytes=(capacity[0], capacity[1], capacity[2]),
            extent_bytes=(extent[0], extent[1], extent[2]),
            ttl_s=(self.hbm_ttl_s, self.cpu_ttl_s, self.nvme_ttl_s),
            free_target=self.free_target,
            max_promote_bytes=min(IN_FLIGHT_BYTES, capacity[Tier.CPU] // 8),
            max_demote_bytes=min(IN_FLIGHT_BYTES, max(capacity[Tier.NVME] // 32, capacity[Tier.CPU] // 32)),
            eviction=self.eviction,
            turn_bonus_s=self.turn_bonus_s,
            second_use=self.second_use,
            second_use_window_s=self.second_use_window_s,
            write_budget_bytes=self.write_budget_bytes,
        )


@dataclass(slots=True)
class _Load:
    """A request that reads its prefix."""

    realm: Realm
    session: Session
    keys: list[bytes]
    held: int
    loaded: int = 0


@dataclass(slots=True)
class _Device:
    """One direction of NVMe."""

    free_at_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class _Outcome:
    """What happened to blocks besides hits."""

    loaded: Counter[Tier] = field(default_factory=Counter)
    lost: int = 0
    """Held at arrival, but gone or late when they were to be read."""
    saved: int = 0
    """Each once a request, however long it stayed."""
    unsaved: int = 0
    """Not saved for lack of room at that moment."""


class Simulation:
    """One run over a trace; :meth:`run` once."""

    def __init__(self, settings: SimSettings, requests: list[Request]) -> None:
        self._settings = settings
        self._requests = requests
        self.core = TierCore(settings.core_config())
        self._now = 0.0
        self._namespace = Namespace(shard_bytes=(settings.block_bytes,), model="replay")
        self._sessions: dict[str, Session] = {}
        self._gpus = (0,) if settings.capacity_blocks.get(Tier.HBM, 0) else ()
        self._loads: dict[ReadTicket, _Load] = {}
        self._news: dict[ReadTicket, None] = {}
        self._done: list[tuple[float, int]] = []
        self._devices = {True: _Device(), False: _Device()}
        """By whether it is the one that reads."""
        self._keys: dict[int, bytes] = {}
        self.tally = Tally()
        self._outcome = _Outcome()

    def run(self) -> dict[str, Any]:
        """Replay everything. Returns the figures as JSON values."""
        began_s = time.perf_counter()
        every = -(-len(self._requests) // MAX_SAMPLES)
        for number, request in enumerate(self._requests):
            self._advance(request.at_s * self._settings.time_scale)
            self._arrive(request)
            if number % every == every - 1 or number == len(self._requests) - 1:
                self.tally.sample(self._now, {t: self.core.state.copies[t] for t in self.core.state.tiers})
        while self._loads:
            self._step_to(self._next_s() or self._now)
        return self._figures(time.perf_counter() - began_s)

    # ---- time

    def _next_s(self) -> float | None:
        due = [at for at in (self.core.next_deadline(), self._done[0][0] if self._done else None) if at is not None]
        return min(due) if due else None

    def _advance(self, until_s: float) -> None:
        while (at_s := self._next_s()) is not None and at_s <= until_s:
            self._step_to(at_s)
        self._now = max(self._now, until_s)

    def _step_to(self, at_s: float) -> None:
        """Let what is due at a time happen."""
        self._now = max(self._now, at_s)
        if self._done and self._done[0][0] <= self._now:
            self.core.move_done(self._now, heapq.heappop(self._done)[1], Result.OK)
        else:
            self.core.tick(self._now)
        self._settle()

    def _settle(self) -> None:
        """Run the core's commands, and let loads go on that have news, until there is nothing left to do."""
        while True:
            self._run_commands()
            if not self._news:
                return
            ticket = next(iter(self._news))
            del self._news[ticket]
            if ticket in self._loads:
                self._read(ticket)

    def _run_commands(self) -> None:
        """Do what the core wants done."""
        core = self.core
        while commands := core.take_commands():
            for command in commands:
                if isinstance(command, StartMoves):
                    self._start(command)
                elif isinstance(command, RetireExtent):
                    core.extent_released(self._now, command.tier, command.extent_id)
                elif isinstance(command, Progress):
                    self._news[command.ticket] = None

    def _start(self, command: StartMoves) -> None:
        per_s = self._settings.nvme_bytes_per_s
        if not per_s or Tier.NVME not in (command.src_tier, command.dst_tier):
            self.core.moves_done(self._now, [(move.move_id, Result.OK) for move in command.moves])
            return
        device = self._devices[command.src_tier is Tier.NVME]
        for move in command.moves:
            seconds = move.size_bytes / per_s
            device.free_at_s = max(device.free_at_s, self._now) + seconds
            device.busy_s += seconds
            heapq.heappush(self._done, (device.free_at_s, move.move_id))

    # ---- requests

    def _session(self, tenant: str) -> Session:
        session = self._sessions.get(tenant)
        if session is None:
            realm = self.core.open_realm(tenant or DEFAULT_TENANT, self._namespace)[0]
            session = self._sessions[tenant] = self.core.attach(len(self._sessions) + 1, realm)
        return session

    def _key(self, block: int) -> bytes:
        key = self._keys.get(block)
        if key is None:
            key = self._keys[block] = block.to_bytes(KEY_BYTES, "big")
        return key

    def _arrive(self, request: Request) -> None:
        self._now += STEP_S
        session = self._session(request.tenant)
        realm = session.realm
        keys = [self._key(block) for block in request.blocks]
        held, masks = self.core.lookup(self._now, realm, keys)
        self.tally.arrived(request, masks)
        load = _Load(realm, session, keys, held)
        if not held:
            self._save(load)
            return
        until_s = self._now + LOAD_DEADLINE_S
        ticket = self.core.load(self._now, session, realm, keys[:held], until_s, each=False, devices=self._gpus)
        self._loads[ticket] = load
        self._news[ticket] = None
        self._settle()

    def _read(self, ticket: ReadTicket) -> None:
        """Take what has become readable and let it go at once; save the rest of the request when that was all."""
        load, core = self._loads[ticket], self.core
        indexes, _, is_all = core.collect(self._now, ticket)
        for index in indexes:
            self._outcome.loaded[Tier(ticket.found_on[index].bit_length() - 1)] += 1
        load.loaded += len(indexes)
        if indexes and not ticket.closed:
            core.release(self._now, load.session, ticket.ticket_id, indexes)
        if is_all:
            del self._loads[ticket]
            self._outcome.lost += load.held - load.loaded
            self._save(load)
        elif indexes:
            self._news[ticket] = None  # what was let go may have made room for more

    def _save(self, load: _Load) -> None:
        """Save what was not loaded. As a client does, try again what found no room, and nothing else of the request."""
        core = self.core
        before, todo = load.keys[: load.loaded], load.keys[load.loaded :]
        patience = SAVE_TRIES
        while todo and patience:
            self._now += STEP_S
            request = saves.Request(before=before, devices=self._gpus)
            grant = core.save(self._now, load.session, load.realm, todo, request=request)
            self._run_commands()  # loads go on after the save
            outcomes = core.settle(load.session, grant).outcomes
            if grant.ticket_id:
                core.commit(self._now, load.session, grant.ticket_id)
                self._run_commands()  # loads go on after the save
            self._outcome.saved += outcomes.count(GRANTED)
            refused = {key for key, outcome in zip(todo, outcomes, strict=True) if outcome in (BUSY, LIMIT)}
            patience = SAVE_TRIES if len(refused) < len(todo) else patience - 1
            todo = [key for key in load.keys if key in refused]
            before = [key for key in load.keys if key not in refused]
        self._outcome.unsaved += len(todo)
        self._settle()

    # ---- figures

    def _figures(self, seconds: float) -> dict[str, Any]:
        settings, state = self._settings, self.core.state
        counts, tiers = state.counts, list(state.tiers)

        def edge(src: Tier, dst: Tier) -> str:
            return f"{src.name.lower()}-{dst.name.lower()}"

        evictions: dict[str, dict[str, int]] = {t.name.lower(): {} for t in tiers}
        for (tier, why), n in sorted(counts.evictions.items()):
            evictions[tier.name.lower()][why] = n
        demotions = Counter[str]()
        for (_, why), n in counts.demotions.items():
            demotions[why] += n
        moved = {edge(src, dst): n for (src, dst), n in sorted(counts.move_bytes.items())}
        written = sum(n for (_, dst), n in counts.move_bytes.items() if dst is Tier.NVME)
        read = sum(n for (src, _), n in counts.move_bytes.items() if src is Tier.NVME)
        parameters = {
            "mode": "simulate",
            "block_bytes": settings.block_bytes,
            "time_scale": settings.time_scale,
            "ttl_s": {"hbm": settings.hbm_ttl_s, "cpu": settings.cpu_ttl_s, "nvme": settings.nvme_ttl_s},
            "free_target": settings.free_target,
            "eviction": settings.eviction,
            "turn_bonus_s": settings.turn_bonus_s,
            "admission": "second-use" if settings.second_use else "all",
            "second_use_window_s": settings.second_use_window_s,
            "write_budget_bytes": settings.write_budget_bytes,
            "nvme_bytes_per_s": settings.nvme_bytes_per_s,
            "capacity_blocks": {t.name.lower(): n for t, n in settings.capacity_blocks.items()},
        }
        return figures(self._requests, self.tally, tiers, parameters) | {
            "saved_blocks": self._outcome.saved,
            "unsaved_blocks": self._outcome.unsaved,
            "lost_blocks": self._outcome.lost,
            "moved_bytes": moved,
            "nvme_written_bytes": written,
            "nvme_read_bytes": read,
            "nvme_written_blocks": written // settings.block_bytes,
            "nvme_read_blocks": read // settings.block_bytes,
            "nvme_budget_left_bytes": state.admission.left_bytes(self._now),
            "nvme_busy_s": {"read": round(self._devices[True].busy_s, 3), "write": round(self._devices[False].busy_s, 3)},
            "demotions": {why: demotions[why] for why in ("ttl", "watermark", "pressure", "extent")},
            "evictions": evictions,
            "not_admitted": dict(sorted(counts.not_admitted.items())),
            "seconds": round(seconds, 3),
        }
