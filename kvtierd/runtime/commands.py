"""Runs the core's commands in order, reports their results as further events, and wakes the core when its time has come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from kvtierd.core.commands import Command, Forget, Progress, Renew, SpaceFreed, StartMoves
from kvtierd.core.slots import NewExtent, RetireExtent
from kvtierd.core.stats import Change, Forgotten
from kvtierd.core.tier_core import TierCore
from kvtierd.model import Result, Tier
from kvtierd.runtime import decisions
from kvtierd.runtime.background import Background
from kvtierd.runtime.sessions import Sessions
from kvtierd.runtime.waiting import Waiters
from kvtierd.runtime.wallclock import WallClock
from kvtierd.tiers.base import BlockIo, BlockStore
from kvtierd.tiers.cpu import CpuPool
from kvtierd.tiers.hbm import HbmPool
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.transfer.executor import Executor, MoveReport

log = logging.getLogger(__name__)

RETRY_S: Final = 0.25
"""Pause before memory that could not be given back is tried again."""


class Revoker(Protocol):
    """Takes extents away from client processes."""

    def revoke(self, extent_ids: list[int]) -> None:
        """Tell every process that maps them; :meth:`CommandRunner.extent_released` follows once each."""


class CommandRunner:
    """Carries out what a core decides. Belongs to one event loop.

    Args:
        core: gives the commands and takes their results.
        clock: the core's, and the wall's.
        cpu: where CPU extents are made.
        nvme: where NVMe copies are; None for no such tier.
        depth: moves in flight.
        sessions: know the NUMA nodes of processes.
        waiters: are woken.
        background: keeps extents on their way out.
        hbm: where HBM extents are made; None for no such tier.
    """

    def __init__(
        self, core: TierCore, clock: WallClock, cpu: CpuPool, nvme: NvmeStore | None, depth: int, sessions: Sessions,
        waiters: Waiters, background: Background, hbm: HbmPool | None = None,
    ) -> None:  # fmt: skip
        self._core = core
        self._clock = clock
        self._cpu = cpu
        self._nvme = nvme
        self._hbm = hbm
        self._sessions = sessions
        self._waiters = waiters
        self._background = background
        stores: dict[Tier, BlockStore] = {}
        if hbm is not None:
            stores[Tier.HBM] = hbm
        if nvme is not None:
            stores[Tier.NVME] = nvme
        self.executor = Executor(cpu, stores, depth, self._moved, clock.on_wall, hbm)
        self.revoker: Revoker | None = None
        self.on_moves: Callable[[MoveReport], None] = lambda _report: None
        self.on_changes: Callable[[list[Change]], None] = lambda _changes: None
        """Told of copies that came and went, where ``core.state.changes`` collects them."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = float("inf")
        self._unmade: set[Tier] = set()
        """Tiers whose last extent could not be made, which is told once."""
        self._applying = False
        self._closing = False
        self._tell_forgotten(telling=decisions.wanted())

    async def close(self, direct_timeout_s: float) -> bool:
        """Take no more moves, and wait for those in flight, direct ones so long at most, and for what goes on in the background.

        Returns whether all moves have ended.
        """
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        ended = await self.executor.close(direct_timeout_s)
        await self._background.wait()
        return ended

    def apply(self) -> None:
        """Run the core's commands and set the timer. Called after every event. One that fails takes no other along."""
        if self._applying:
            return  # an outer call is running commands; it goes on until there are none
        self._applying = True
        telling = decisions.wanted()
        try:
            while commands := self._core.take_commands():
                for command in commands:
                    if telling:
                        self._tell(command)
                    try:
                        self._run(command)
                    except Exception as e:
                        self._failed(command, e)
        finally:
            self._applying = False
        self._tell_forgotten(telling=telling)
        self._set_timer()
        changes = self._core.state.changes
        if changes:
            self._core.state.changes = []
            self.on_changes(changes)

    def _tell(self, command: Command) -> None:
        if isinstance(command, StartMoves):
            decisions.tell_moves(command)
        elif isinstance(command, NewExtent | RetireExtent):
            decisions.tell_extent(self._core.state, command)

    def _tell_forgotten(self, *, telling: bool) -> None:
        """Tell of what was forgotten since the last time, and have the core note what will be while somebody reads it."""
        state = self._core.state
        if telling and state.forgotten is not None:
            decisions.tell_forgotten(state.forgotten)
        state.forgotten = Forgotten() if telling else None

    def _failed(self, command: Command, error: Exception) -> None:
        """Count a command that could not be run, and tell the core what it cannot know."""
        kind = type(command).__name__
        self._core.state.counts.failed_commands[kind] += 1
        if isinstance(command, NewExtent):
            log.log(
                logging.DEBUG if command.tier in self._unmade else logging.ERROR,
                "no %s extent of %d bytes can be made: %s; saves and loads that need one are refused until one can",
                command.tier.name, command.slot_bytes * command.slot_count, str(error) or type(error).__name__,
                exc_info=None if isinstance(error, OSError) else error,
            )  # fmt: skip
            self._unmade.add(command.tier)
            self._core.extent_failed(self._clock.now(), command.tier, command.extent_id)
            return
        log.error("%s could not be done", kind, exc_info=error)
        if isinstance(command, StartMoves):
            for move in command.moves:
                if move.move_id in self._core.state.moves:
                    self._core.move_done(self._clock.now(), move.move_id, Result.NO_SPACE)

    def _run(self, command: Command) -> None:
        if isinstance(command, StartMoves):
            moves = tuple(m for m in command.moves if m.move_id in self._core.state.moves)  # not those whose target failed
            if moves:
                self.executor.submit(replace(command, moves=moves))
        elif isinstance(command, Progress):
            self._waiters.has_news(command.ticket)
        elif isinstance(command, SpaceFreed):
            self._waiters.room_freed()
        elif isinstance(command, Forget):
            assert self._nvme is not None
            self._nvme.forget([BlockIo(command.realm_id, command.key, command.generation, command.slots, ())])
        elif isinstance(command, Renew):
            assert self._nvme is not None
            expires_s = self._clock.on_wall(command.expires_s)
            self._nvme.renew([BlockIo(command.realm_id, command.key, command.generation, command.slots, (), expires_s)])
        elif isinstance(command, NewExtent):
            if command.tier is Tier.CPU:
                node = self._sessions.node_of(command.realm_id, command.shard)
                self._cpu.create(command.extent_id, command.slot_bytes, command.slot_count, node)
            elif command.tier is Tier.HBM:
                assert self._hbm is not None
                self._hbm.create(command.extent_id, command.place, command.slot_bytes, command.slot_count)
            else:
                assert self._nvme is not None
                self._nvme.add_extent(command.extent_id, command.slot_bytes, command.slot_count)
            self._unmade.discard(command.tier)
        elif isinstance(command, RetireExtent):
            self._retire(command)

    def _retire(self, command: RetireExtent) -> None:
        if command.tier is Tier.NVME:
            assert self._nvme is not None
            if self._nvme.has_extent(command.extent_id):
                self._nvme.drop_extent(command.extent_id)
            self._core.extent_released(self._clock.now(), Tier.NVME, command.extent_id)
        elif command.tier is Tier.HBM and self._hbm is not None and self._hbm.has_extent(command.extent_id):
            self._revoke(command.extent_id)  # freed once nobody has it open
        elif command.tier is Tier.CPU and self._cpu.has_extent(command.extent_id):
            self._background.start(self._retire_cpu(command.extent_id))
        else:
            self._core.extent_released(self._clock.now(), command.tier, command.extent_id)  # it could not be made

    async def _retire_cpu(self, extent_id: int) -> None:
        """Give an extent's memory back; it counts until no client can map it any more."""
        if await self._given_back(extent_id, self._cpu.has_extent, self._cpu.retire):
            self._revoke(extent_id)

    def _revoke(self, extent_id: int) -> None:
        if self.revoker is None:
            self.extent_released(extent_id)
        else:
            self.revoker.revoke([extent_id])

    async def _free_device(self, hbm: HbmPool, extent_id: int) -> None:
        """Free GPU memory that no process has open any more; until then it counts."""
        if await self._given_back(extent_id, hbm.has_extent, hbm.free):
            self._core.extent_released(self._clock.now(), Tier.HBM, extent_id)
            self.apply()

    async def _given_back(self, extent_id: int, is_there: Callable[[int], bool], give_back: Callable[[int], None]) -> bool:
        """Give an extent's memory back in a thread, over again until it works. False when the daemon ends before."""
        while is_there(extent_id):
            try:
                await asyncio.to_thread(give_back, extent_id)  # waits for the kernel, or for what goes on on the GPU
            except Exception:  # not even a thread can be had: its bytes count meanwhile
                self._core.state.counts.failed_commands[RetireExtent.__name__] += 1
                log.exception("extent %d cannot be given back yet", extent_id)
                if self._closing:
                    return False
                await asyncio.sleep(RETRY_S)
        return True

    def extent_released(self, extent_id: int) -> None:
        """No process holds a retired extent any more."""
        if self._hbm is not None and self._hbm.has_extent(extent_id):
            self._background.start(self._free_device(self._hbm, extent_id))
            return
        self._cpu.released(extent_id)
        self._core.extent_released(self._clock.now(), Tier.CPU, extent_id)
        self.apply()

    def _moved(self, report: MoveReport) -> None:
        if decisions.wanted():
            decisions.tell_moved(report)
        self._core.moves_done(self._clock.now(), [(move.move_id, result) for move, result in report.results])
        self.apply()
        self.on_moves(report)

    def _set_timer(self) -> None:
        due_s = self._core.next_deadline()
        if due_s is None or (self._timer is not None and self._timer_at_s <= due_s and self._timer_at_s > self._clock.now()):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at_s = due_s
        self._timer = asyncio.get_running_loop().call_later(max(due_s - self._clock.now(), 0.0), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._core.tick(self._clock.now())
        self.apply()
