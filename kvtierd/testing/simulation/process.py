"""One life of the daemon's process: start, traffic, and an end of one kind or another."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final

from kvtierd.config import Config
from kvtierd.core.block import CopyState
from kvtierd.core.commands import Move
from kvtierd.core.limits import Limits, TenantClass
from kvtierd.core.realm import Realm
from kvtierd.core.saves import HELD, WHOLE, Request
from kvtierd.core.stats import StoryEvent
from kvtierd.core.tickets import SaveGrant
from kvtierd.errors import RequestError
from kvtierd.model import PAGE_BYTES, Namespace, Result, Tier, slot_extent
from kvtierd.runtime.runtime import Runtime
from kvtierd.runtime.sessions import Attached
from kvtierd.runtime.wallclock import WallClock
from kvtierd.testing.simulation.checks import Checker, check_rest
from kvtierd.testing.simulation.clients import Client, key_of
from kvtierd.testing.simulation.contents import Contents, Place, place_of
from kvtierd.testing.simulation.files import Files
from kvtierd.testing.simulation.loop import SimLoop, discard
from kvtierd.testing.simulation.scenario import KIB
from kvtierd.testing.simulation.syscalls import SimOs
from kvtierd.testing.simulation.threads import ProcessDies, World
from kvtierd.transfer.executor import MoveReport

NEWCOMER_BYTES: Final = 7 * PAGE_BYTES
"""Of a block whose slot is like nobody else's."""
BATCH: Final = 4
"""Blocks of a save that fills memory."""
IDLE_S: Final = 600.0
MAX_IDLE_TICKS: Final = 1200
"""In ``IDLE_S`` in which nothing happens."""


class Process:
    """See the module. One at a time in a world.

    Args:
        world: time and randomness.
        files: what the former process has left.
        system: system calls.
        contents: what clients have saved.
        config: of this life.
        memory_faults: probability that an extent cannot be made.
        slow_s: longest pause of a client between two steps of a copy.
    """

    def __init__(
        self,
        world: World,
        files: Files,
        system: SimOs,
        contents: Contents,
        config: Config,
        memory_faults: float = 0.0,
        slow_s: float = 0.02,
    ) -> None:
        self.world = world
        self.files = files
        self.system = system
        self.contents = contents
        self.memory_faults = memory_faults
        self.slow_s = slow_s
        self.loop = SimLoop(world)
        self.runtime = Runtime(config, lambda: world.now)
        self.runtime.wall = WallClock(lambda: world.now, world.wall)
        self.checker = Checker(self.runtime, files)
        self.ticks = 0
        self._checked: StoryEvent | None = None
        """The last change of a copy when everything was checked last."""
        self.expected: list[Place] = []
        """Blocks that the start must find, but for those that have expired."""
        self.evictions_left = 0
        """Confirmed evictions after which it is killed; 0 for never."""
        self.recovered = False
        """True once it has taken over what it found."""
        self._clients = 0
        self._watch()

    def run(self, work: Coroutine[Any, Any, None], die_in_steps: int = -1) -> bool:
        """Run until the work is done or the process dies. Returns whether the work was done. Raises what was found wrong."""
        if die_in_steps >= 0:
            self.world.die_at_step = self.world.steps + die_in_steps
        try:
            self.loop.run_until_complete(work)
        except ProcessDies:
            self.world.note("process: killed")
            return False
        finally:
            self.world.clear_away()
            discard(self.loop)
            self.runtime.cpu.close()
            self.system.process_gone()
            self.world.revive()
        if self.world.failure is not None:
            raise self.world.failure
        return True

    # ---- looking at it

    def _watch(self) -> None:
        """Before the start: memory that fails, and saves that find blocks held."""
        runtime = self.runtime
        create, grant = runtime.cpu.create, runtime._grant

        def failing_create(*args: Any) -> None:
            if self.memory_faults and self.world.random.random() < self.memory_faults:
                raise OSError(errno.EMFILE, "simulated: no descriptor is left")
            create(*args)

        def noted_grant(
            attached: Attached, realm: Realm, keys: list[bytes], ttl_s: float | None, request: Request = WHOLE
        ) -> SaveGrant:
            # A save that waits for room asks again and again, and what it finds held lives longer each time.
            answer = grant(attached, realm, keys, ttl_s, request)
            for key, outcome in zip(keys, answer.outcomes, strict=True):
                if outcome == HELD:
                    self.contents.held(place_of(realm, key), ttl_s)
            return answer

        runtime.cpu.create = failing_create  # type: ignore[method-assign, assignment]
        runtime._grant = noted_grant  # type: ignore[method-assign]

    def _watch_runner(self) -> None:
        """After the start: every event is followed by the checks, but for ticks that changed nothing."""
        runner, state = self.runtime.runner, self.runtime.core.state
        apply, tick = runner.apply, runner._tick
        in_tick = False

        def checked_apply() -> None:
            inner = runner._applying
            apply()
            last = state.story[-1] if state.story else None
            if inner or (in_tick and last is not None and last is self._checked):
                return
            self._checked = last
            try:
                self.checker.check()
            except AssertionError as e:
                self.world.fail(e)
                raise

        def counted_tick() -> None:
            nonlocal in_tick
            self.ticks += 1
            in_tick = True
            tick()
            in_tick = False

        copy, draw = runner.executor._copy, self.world.random

        def slow_copy(move: Move) -> None:
            self.world.pause(draw.random() * self.slow_s)
            copy(move)
            self.world.pause(draw.random() * self.slow_s)  # of a large block, others see a part of it first

        runner.executor._copy = slow_copy  # type: ignore[method-assign]
        runner.apply = checked_apply  # type: ignore[method-assign]
        runner._tick = counted_tick  # type: ignore[method-assign]
        runner.on_moves = self._moved
        runner.revoker = self

    def _moved(self, report: MoveReport) -> None:
        self.world.note(
            f"moved {report.src_tier.name} to {report.dst_tier.name}: "
            + ", ".join(f"{m.src.block.realm.realm_id}/{m.src.block.key[-1]} {r.value}" for m, r in report.results)
        )
        corrupt = any(result is Result.CORRUPT for _, result in report.results)
        assert self.system.lied or not corrupt, "what the disk did right is read back right"

    def evicted(self) -> None:
        """An eviction was confirmed."""
        self.evictions_left -= 1
        if self.evictions_left == 0:
            self.world.die_at_step = self.world.steps + self.world.random.choice([1, 1, 5, 20])

    def revoke(self, extent_ids: list[int]) -> None:
        """Clients give an extent back when they come to it; some take long (see ``commands.Revoker``)."""
        for extent_id in extent_ids:
            delay_s = self.world.random.choice([0.0, 0.01, 0.3, 3.0])
            self.loop.call_later(delay_s, self.runtime.runner.extent_released, extent_id)

    # ---- lives

    async def serve(self, clients: int, operations: int, tenants: list[str], namespaces: list[Namespace]) -> None:
        """Start, let clients at it, and go on until the last of them has left."""
        draw = self.world.random
        await self.start()
        flusher = asyncio.get_running_loop().create_task(self.runtime.flush_forever())
        running = [asyncio.get_running_loop().create_task(self._administer(tenants))]
        for _ in range(clients):
            self._clients += 1
            client = Client(self, self._clients, draw.choice(tenants), draw.choice(namespaces))
            running.append(asyncio.get_running_loop().create_task(client.live(draw.randint(1, operations))))
            if draw.random() < 0.5:
                await asyncio.sleep(draw.expovariate(5.0))
        await asyncio.gather(*running)
        assert not flusher.done(), "the flusher ends with the daemon only"
        flusher.cancel()
        await asyncio.gather(flusher, return_exceptions=True)

    async def _new_tenant(self) -> None:
        """Somebody comes when memory is full of others' blocks, and gets room for more than memory has."""
        attached, _ = await self._newcomer("newcomer", self.runtime.config.cpu.capacity // NEWCOMER_BYTES + 2)
        attached.stream_open = False
        self.runtime.end_if_over(attached)

    async def _newcomer(self, name: str, blocks: int) -> tuple[Attached, list[bytes]]:
        """Somebody who has nothing saves so many blocks, one after the other."""
        namespace = Namespace(shard_bytes=(NEWCOMER_BYTES,), model=name)
        attached = await self.runtime.attach(namespace, name, name, 1)
        client = Client(self, 0, name, namespace)
        keys = [key_of(number) for number in range(blocks)]
        for key in keys:
            await client.must_save(attached, key)
        return attached, keys

    async def scattered_reserve(self) -> None:
        """After a start: a tenant fills memory, keeps one block in each extent as its reserve, which may not be written down, and
        reads on. Others get room, and it keeps them.
        """
        runtime = self.runtime
        namespace = Namespace(shard_bytes=(PAGE_BYTES, PAGE_BYTES), model="reserve")
        attached = await runtime.attach(namespace, "reserve", "reserve", 1)
        client = Client(self, 0, "reserve", namespace)
        slots: dict[bytes, int] = {}
        for first in range(0, runtime.config.cpu.capacity // namespace.block_bytes, BATCH):
            slots |= await client.put(attached, [key_of(first + i) for i in range(BATCH)])
        kept = list({slot_extent(slot): key for key, slot in slots.items()}.values())
        reserve_bytes = (0, len(kept) * namespace.block_bytes, 0)
        limits = Limits((None, None, 0), reserve_bytes, tenant_class=TenantClass.PREMIUM)
        runtime.core.set_limits(runtime.now(), "reserve", limits)
        await client.evict_for_good(attached, [key for key in slots if key not in kept])
        reading = asyncio.get_running_loop().create_task(client.read_on(attached, kept))
        latecomer, saved = await self._newcomer("latecomer", 3)
        if not reading.done():
            reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        held, _ = runtime.lookup(attached.core.realm, b"".join(kept), each=True)
        assert held == len(kept), f"{len(kept) - held} blocks of a reserve have gone for others"
        await client.evict_for_good(attached, kept)
        await client.evict_for_good(latecomer, saved)
        for session in (attached, latecomer):
            session.stream_open = False
            runtime.end_if_over(session)

    async def look(self) -> None:
        """Every block that is found after a restart has bytes that were saved under its key, or is a miss."""
        runtime = self.runtime
        for realm in list(runtime.core.state.realms.values()):
            runtime.core.set_limits(runtime.now(), realm.tenant.name, None)  # a quota may leave no room to read a block
            attached = await runtime.attach(realm.namespace, realm.tenant.name, "reader", 1)
            reader = Client(self, 0, realm.tenant.name, realm.namespace)
            for key in list(realm.index):
                found = await reader.read(attached, [key], 60.0, patient=True)
                assert found or self.system.lied, f"block {key[-1]} was found after a restart and cannot be read"
            attached.stream_open = False
            runtime.end_if_over(attached)

    async def start(self) -> None:
        """Open and recover."""
        failed = self.system.failed
        try:
            await self.runtime.start()
        finally:
            if self.system.failed > failed and len(self.runtime.config.nvme.folders) > 1:
                self.expected = []  # a folder that fails at the start is left out, and emptied when it is back
        self._watch_runner()
        self.recovered = True
        if self.system.lied_in_log:
            self.contents.restarted(forgot=True)  # it may have lied just now
        core = self.runtime.core
        self.world.note(f"process: started with {core.state.copies[Tier.NVME]} blocks on NVMe")
        self.checker.check()
        for realm in core.state.realms.values():
            for key, block in realm.index.items():
                until_s = self.contents.until_s(place_of(realm, key))
                assert until_s is not None, (
                    f"block {key[-1]} is found after the start, and was never saved, or its eviction was confirmed"
                )
                # A log that was lied in may have another namespace under a number; reading the block would tell.
                ends = self.system.lied_in_log or self.runtime.wall.on_wall(block.expires_s) <= until_s + 0.01
                assert ends, f"block {key[-1]} lives longer than was asked"
        if self.system.lied:
            return
        found = {place_of(realm, key) for realm in core.state.realms.values() for key in realm.index}
        for place in self.expected:
            kept = place in found or self.contents.sure_s(place) <= self.world.wall()
            assert kept, f"block {place[2][-1]} of tenant {place[0]} was on NVMe when the process ended, and is not found any more"

    def on_nvme(self) -> list[Place]:
        """What a process that begins now must find, but for what expires meanwhile."""
        return [
            place_of(realm, key)
            for realm in self.runtime.core.state.realms.values()
            for key, block in realm.index.items()
            if block.nvme is not None and block.nvme.state is CopyState.READY
        ]

    async def _administer(self, tenants: list[str]) -> None:
        """What operators do under load."""
        draw = self.world.random
        for _ in range(draw.choice([0, 1, 4])):
            await asyncio.sleep(draw.expovariate(2.0))
            if draw.random() < 0.2:
                self.world.note("drain")
                began_s, timeout_s = self.world.now, draw.choice([0.1, 2.0])
                await self.runtime.drain(timeout_s, resume=True)
                assert self.world.now <= began_s + timeout_s + 1.5, "a drain ends in time"
                continue
            if draw.random() < 0.4:
                await self._limit(draw.choice(tenants))
                continue
            self.world.note("checkpoint")
            try:
                await self.runtime.checkpoint()
            except OSError as e:
                self.world.note(f"no checkpoint: {e}")

    async def _limit(self, tenant: str) -> None:
        """Change what a tenant may use, while it does."""
        draw = self.world.random
        changes: dict[str, Any] = {
            "class": draw.choice(["standard", "basic", "premium"]),
            "cpu_quota": draw.choice([None, 0, 32 * KIB, 64 * KIB]),
            "nvme_quota": draw.choice([None, 0, 64 * KIB, 256 * KIB]),
            "cpu_reserve": 0,
            "cpu_ttl": draw.choice([None, 0.5, "never"]),
            "write_budget_share": draw.choice([0.0, 0.5, 1.0]),
        }
        if changes["class"] == "premium" and changes["cpu_quota"] is None:
            changes["cpu_reserve"] = 32 * KIB
        self.world.note(f"limits of {tenant}: {changes}")
        try:
            await self.runtime.set_tenant(tenant, changes)
        except RequestError as e:
            self.world.note(f"not changed: {e}")

    async def stop(self) -> None:
        """Drain and end in good order."""
        runtime = self.runtime
        runtime.stopping = True
        left = await runtime.drain(5.0, resume=False)
        self.world.note(f"process: stops, {left} bytes are only in memory")
        await runtime.stop()

    async def rest(self) -> None:
        """Nothing goes wrong any more and nobody is there: everything comes to rest."""
        runtime = self.runtime
        flusher = asyncio.get_running_loop().create_task(runtime.flush_forever())
        await asyncio.sleep(60.0)
        flusher.cancel()
        await asyncio.gather(flusher, return_exceptions=True)
        check_rest(runtime)
        await self._new_tenant()
        before = self.ticks
        await asyncio.sleep(IDLE_S)
        assert self.ticks - before < MAX_IDLE_TICKS, f"{self.ticks - before} ticks while nothing happens"
        check_rest(runtime)
