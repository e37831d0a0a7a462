# ruff: noqa: E501 - the text of the code that is changed
"""Bugs put in on purpose, each a small change of one function's text, to see whether the simulation finds them.

A change whose text is not in the function any more fails, so that this list follows the code.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvtierd.testing.simulation.disk import HIDDEN, Fault
from kvtierd.testing.simulation.scenario import Scenario, draw_scenario

OFTEN = 0.02
"""Probability of a fault from which on a run of a few lives is likely to meet it."""


@dataclass(frozen=True)
class Mutation:
    """One bug.

    ``where`` is "module:function" or "module:Class.method", the module being the one that calls it. It must be found within
    ``most`` seeds from ``first`` on, of those whose scenario ``suits``: has what the bug is about. A rare one has a seed known to
    find it as its first, and more seeds for when the code has changed what that seed does.
    """

    name: str
    where: str
    old: str
    new: str
    suits: Callable[[Scenario], bool] = lambda _: True
    most: int = 1000
    first: int = 0

    def seeds(self) -> Iterator[int]:
        """Those that must find it."""
        suitable = (seed for seed in itertools.count(self.first) if self.suits(draw_scenario(seed)))
        return itertools.islice(suitable, self.most)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The bug is there meanwhile."""
        holder, name, function = self.made()
        former = inspect.getattr_static(holder, name)
        setattr(holder, name, function)
        try:
            yield
        finally:
            setattr(holder, name, former)

    def made(self) -> tuple[Any, str, Any]:
        """Where the changed function belongs, its name there, and the function. Raises AssertionError when the code is another."""
        module_name, path = self.where.split(":")
        holder = importlib.import_module(module_name)
        *outer, name = path.split(".")
        for part in outer:
            holder = getattr(holder, part)
        function = inspect.unwrap(getattr(holder, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{self.name}: the text to change is in {self.where} {source.count(self.old)} times"
        made: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(code, self.where, "exec"), function.__globals__, made)
        return holder, name, made[name]


def is_honest(scenario: Scenario) -> bool:
    """The disk tells of all that it does wrong: much is excused to the daemon otherwise."""
    return not any(fault in life.rates for life in scenario.lives for fault in HIDDEN)


def meets(scenario: Scenario, *faults: Fault) -> bool:
    """One of these faults is frequent."""
    return any(life.rates.get(fault, 0.0) >= OFTEN for life in scenario.lives for fault in faults)


def meets_refusals(scenario: Scenario) -> bool:
    """Reads and writes fail, as the disk tells."""
    return is_honest(scenario) and meets(scenario, Fault.EIO, Fault.ENOSPC)


def meets_short_writes(scenario: Scenario) -> bool:
    """The disk moves less than it was asked to, and tells."""
    return is_honest(scenario) and meets(scenario, Fault.SHORT)


def is_killed(scenario: Scenario) -> bool:
    """A process ends in the middle of what it does."""
    return any(life.die_in_steps >= 0 for life in scenario.lives)


def dies_after_evictions(scenario: Scenario) -> bool:
    """The process is killed soon after an eviction was confirmed, on a disk that has kept what it was given."""
    return is_honest(scenario) and any(life.die_after_evictions and not life.power_cut for life in scenario.lives)


SAVES = "kvtierd.core.saves:Saves."
MOVER = "kvtierd.core.movement:Mover."
DEMOTER = "kvtierd.core.demotion:Demoter."
STATE = "kvtierd.core.state:CoreState."
READS = "kvtierd.core.reads:Reads."
PACKER = "kvtierd.core.packing:Packer."
SPACE = "kvtierd.core.space:Space."
POOL = "kvtierd.core.slots:SlotPool."
RECOVERY = "kvtierd.tiers.recovery:"
JOURNAL = "kvtierd.tiers.journal:Journal."
STORE = "kvtierd.tiers.nvme:NvmeStore."
SEGMENTS = "kvtierd.tiers.segments:SegmentTable."
EXECUTOR = "kvtierd.transfer.executor:Executor."
RUNTIME = "kvtierd.runtime.runtime:Runtime."

CORE = [
    Mutation("an abort frees nothing", SAVES + "_give_up", "    self._state.unpin(now, copy)", "    pass"),
    Mutation("a session that ends keeps its saves", SAVES + "end", "range(len(ticket.open))", "range(0)"),
    Mutation(
        "a session that ends keeps its loads", "kvtierd.core.tier_core:TierCore.detach", "self._reads.close(now, ticket)", "pass"
    ),
    Mutation("a move does not pin its source", MOVER + "_begin", "state.pin(source)", "pass"),
    Mutation(
        "a block is readable while it is read from NVMe",
        MOVER + "_begin",
        "self._promoting[target] = move",
        "self._promoting[target] = move; state.set_state(now, target, CopyState.READY, why)",
    ),
    Mutation("a load hands out what it has not pinned", READS + "_read_ticket", "state.pin(copy)", "pass"),
    Mutation("an eviction tells the store nothing", STATE + "_leave_ready", "if tier is Tier.NVME:", "if False:"),
    Mutation(
        "a block that is evicted while it is written stays on disk",
        MOVER + "_succeeded",
        "elif target.tier is Tier.NVME:",
        "elif False:",
    ),
    Mutation("quotas are not looked at", SPACE + "allocate", "if quota is not None and", "if False and"),
    Mutation(
        "a slot is free while somebody reads it",
        STATE + "evict",
        "CopyState.DOOMED if copy.pins else CopyState.ABSENT",
        "CopyState.ABSENT",
    ),
    Mutation(
        "a retired extent frees its bytes at once",
        POOL + "retire",
        "self.retiring[extent.extent_id] = extent\n",
        "self.retiring[extent.extent_id] = extent; self._reserved_by_place[extent.group.place] -= extent.size_bytes\n",
    ),
    Mutation(
        "a load's deadline does nothing",
        "kvtierd.core.tier_core:TierCore.tick",
        "self._reads.miss_rest(now, read, Reason.DEADLINE)",
        "pass",
    ),
    Mutation("expired blocks are found", READS + "_read_ticket", " and block.expires_s > now", ""),
    Mutation(
        "a failed write counts as stored",
        MOVER + "done",
        "if result is Result.OK:",
        "if result is Result.OK or result is Result.IO_ERROR:",
        meets_refusals,
    ),
    Mutation(
        "a corrupt copy is handed out",
        MOVER + "done",
        "if result is Result.OK:",
        "if result is Result.OK or result is Result.CORRUPT:",
    ),
    Mutation("waiters of a failed move are forgotten", MOVER + "_failed", "self.miss(now, ticket, index, reason)", "pass"),
    Mutation("what a reserve keeps goes with its extent", DEMOTER + "_leave", "if packer.packs(copy):", "if False:"),
    Mutation("a copy moves from under its reader", PACKER + "settle", " and source.pins == 1", ""),
    Mutation("a place that was not needed is not given up", PACKER + "settle", "pool.free(new)", "pass"),
    Mutation("hungry realms are not fed", DEMOTER + "_feed", "del self._space.hungry[realm.realm_id]", "return"),
]

RECOVERING = [
    Mutation(
        "torn records are replayed",
        "kvtierd.tiers.log_file:read_log",
        "good = np.flatnonzero(intact)",
        "intact[:] = True; good = np.flatnonzero(intact)",
    ),
    Mutation(
        "removals are not replayed",
        RECOVERY + "_last_of_each_slot",
        "slots = records",
        'records, rank = records[records["shards"] > 0], rank[records["shards"] > 0]; slots = records',
    ),
    Mutation(
        "generations are ignored", RECOVERY + "_last_of_each_slot", '(records["generation"] << 1)', '(0 * records["generation"])'
    ),
    Mutation(
        "generations begin anew",
        "kvtierd.runtime.runtime:recover",
        "found.next_generation + secrets.randbelow(UNTOLD_GENERATIONS)",
        "1",
    ),
    Mutation(
        "generations that no record tells of are given out again",
        "kvtierd.runtime.runtime:recover",
        " + secrets.randbelow(UNTOLD_GENERATIONS)",
        "",
        lambda scenario: meets(scenario, Fault.LOST),
        first=20690,
    ),
    Mutation(
        "parts of blocks are whole blocks",
        RECOVERY + "_whole_blocks",
        'np.logical_and.reduceat(fits, starts) & (counts == ordered["shards"][starts])',
        "np.ones(len(starts), bool)",
        lambda scenario: any(len(n.shard_bytes) > 1 for n in scenario.namespaces) and is_killed(scenario),
    ),
    Mutation(
        "segments that do not fit are kept",
        "kvtierd.tiers.nvme_open:fit_capacity",
        "total <= capacity_bytes",
        "total",
        lambda scenario: any(b.config.nvme.capacity < a.config.nvme.capacity for a, b in pairwise(scenario.lives)),
    ),
    Mutation("snapshots drop all journals", JOURNAL + "commit_snapshot", "n < number - 1", "n <= number"),
    Mutation(
        "a snapshot leaves blocks out", "kvtierd.core.tier_core:TierCore.nvme_entries", "for key in keys:", "for key in keys[1:]:"
    ),
    Mutation(
        "expiries are lost",
        "kvtierd.runtime.runtime:recover",
        "kept = [row if row[4] == NO_END else (*row[:4], clock.on_core(row[4])) for row in chunk]",
        "kept = [(*row[:4], NO_END) for row in chunk]",
    ),
]

MOVING = [
    Mutation(
        "a job of many blocks loses its last",
        "kvtierd.transfer.executor:_split",
        "jobs.append(_job(command, batch))\n    return jobs",
        "jobs.append(_job(command, batch[:-1] or batch))\n    return jobs",
    ),
    Mutation("a move within memory copies nothing", EXECUTOR + "_copy", "np.copyto(target, source)", "pass"),
    Mutation("a thread takes one job only", EXECUTOR + "_work", "while (taken := ", "if (taken := "),
    Mutation(
        "demotions take places for ever",
        "kvtierd.transfer.lanes:Lane.take",
        "self._demotions -= ended.priority is Priority.DEMOTE",
        "pass",
    ),
    Mutation(
        "results are given to the wrong blocks",
        EXECUTOR + "_run",
        "zip(job.moves, results, strict=True)",
        "zip(job.moves, results[::-1], strict=True)",
    ),
    Mutation(
        "shards are read into each other's slots",
        EXECUTOR + "_block_io",
        "zip(inner.all_slots(), block.realm",
        "zip(inner.all_slots()[::-1] if reads else inner.all_slots(), block.realm",
    ),
    Mutation(
        "an eviction is confirmed before the disk has it",
        RUNTIME + "evict",
        "await asyncio.to_thread(self.nvme.flush)",
        "pass",
        dies_after_evictions,
    ),
]

STORING = [
    Mutation(
        "a flush does not wait for another's write",
        JOURNAL + "flush",
        'self.append(b"")',
        'if self._pending: self.append(b"")',
        dies_after_evictions,
        first=1270,
    ),
    Mutation(
        "the payload's checksum is not looked at",
        "kvtierd.tiers.record:page_has",
        " and bool(page[len(prefix) : _CHECKSUM_END] == checksum)",
        "",
        lambda scenario: not scenario.encrypted and meets(scenario, *HIDDEN),
    ),
    Mutation(
        "a header may be any block's",
        "kvtierd.tiers.record:page_names",
        "page[: len(prefix)] == prefix and ",
        "page[:8] == prefix[:8] and ",
        lambda scenario: not scenario.encrypted and meets(scenario, Fault.MISDIRECTED, Fault.LOST),
    ),
    Mutation(
        "an encrypted payload is not authenticated",
        "kvtierd.tiers.encryption:SlotCipher.decrypt",
        "return False",
        "return True",
        lambda scenario: scenario.encrypted and meets(scenario, *HIDDEN),
    ),
    Mutation(
        "a record is written before its bytes",
        STORE + "write",
        "results = self._mover.write(blocks)\n    self._record(blocks, results)",
        "results = [Result.OK] * len(blocks)\n    [self._table.using(slot_extent(s), create=True).__enter__() for b in blocks for s in b.slots]\n    self._record(blocks, results)\n    results = self._mover.write(blocks)",
    ),
    Mutation(
        "a block counts as stored without its record",
        STORE + "_record",
        "results[i] = Result.NO_SPACE if is_exhausted(e) else Result.IO_ERROR",
        "pass",
        meets_refusals,
    ),
    Mutation(
        "a short write is a whole one",
        "kvtierd.tiers.slot_io:write_all",
        "buffers = _rest(buffers, moved)",
        "buffers = []",
        meets_short_writes,
    ),
    Mutation(
        "a write goes on in the wrong place",
        "kvtierd.tiers.slot_io:write_all",
        "offset_bytes += moved",
        "pass",
        meets_short_writes,
    ),
    Mutation(
        "a journal's failed write leaves its size wrong",
        JOURNAL + "append",
        "self._sizes[self._sequence] = size + len(data)",
        "self._sizes[self._sequence] = size + len(records)",
    ),
    Mutation("a dropped segment is never deleted", SEGMENTS + "delete_dropped", "os.unlink(segment.path)", "pass"),
]

MUTATIONS = [*CORE, *RECOVERING, *MOVING, *STORING]
