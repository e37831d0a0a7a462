"""What must hold after every event, looked at from outside the core, and what must hold when everything has come to rest."""

from __future__ import annotations

from collections import Counter

from kvtierd.core.block import Copy, CopyState
from kvtierd.core.tickets import Entry, SaveTicket
from kvtierd.core.tier_core import TierCore
from kvtierd.model import Tier
from kvtierd.runtime.runtime import Runtime
from kvtierd.testing.simulation.files import Files

SIDE_FILES_BYTES = 16 << 10
"""More than the lock, the realms and the budget take in all folders: the only files that are not counted by the daemon."""


COUNTED = (".kv", ".kvj", ".kvs", ".tmp")
"""Ends of the names of files that count against the capacity."""
PINNED = (Entry.WAITING, Entry.READY, Entry.TAKEN)
"""Entries of a load whose copies are pinned."""


class Checker:
    """Looks at one process after every event.

    Args:
        runtime: its state.
        files: its disk.
    """

    def __init__(self, runtime: Runtime, files: Files) -> None:
        self._runtime = runtime
        self._files = files
        self._allowed: dict[tuple[str, Tier], int] = {}
        """Bytes by tenant and tier, where a lowered quota finds more than it allows: never more than before."""

    def check(self) -> None:
        """Everything that can be seen between two events."""
        core = self._runtime.core
        core.check()
        _check_users(core)
        self._check_limits(core)

    def _check_limits(self, core: TierCore) -> None:
        runtime = self._runtime
        cpu = runtime.cpu
        assert cpu.reserved_bytes + cpu.blank_bytes <= runtime.config.cpu.capacity, "memory keeps to its capacity"
        if runtime.nvme is not None:
            # What was set aside, damaged or of another format, is not the cache's any more, nor is a folder that is lost.
            lost = tuple(f"{f}/" for f in runtime.nvme.lost)
            sizes = {
                path: len(inode.data)
                for path, inode in self._files.names.items()
                if path.endswith(COUNTED) and not (lost and path.startswith(lost))
            }
            segments = sum([size for path, size in sizes.items() if "segment-" in path])
            assert segments <= runtime.nvme.capacity_bytes, (
                f"{segments} bytes of segments, {runtime.nvme.capacity_bytes} may be: {sizes}"
            )
            limit = runtime.config.nvme.capacity + SIDE_FILES_BYTES
            assert sum(sizes.values()) <= limit, f"files take {sum(sizes.values())} bytes, {limit} are allowed: {sizes}"
        for tenant in core.state.tenants.values():
            for tier in core.state.tiers:
                quota = tenant.limits.quota(tier)
                used = tenant.used_bytes[tier]
                place = (tenant.name, tier)
                if quota is None:
                    self._allowed.pop(place, None)
                    continue
                allowed = max(quota, self._allowed.get(place, used))
                assert used <= allowed, f"tenant {tenant.name} has {used} bytes on {tier.name}, its quota is {quota}"
                self._allowed[place] = max(quota, used)


def _check_users(core: TierCore) -> None:
    """Each copy has as many pins as users that can be found, and each slot's owner is found from somewhere."""
    users: Counter[Copy] = Counter()
    for move in core.state.moves.values():
        users[move.src] += 1
        users[move.dst] += 1
    for session in core.sessions.values():
        for ticket in session.tickets.values():
            if isinstance(ticket, SaveTicket):
                users.update(c for c in ticket.open if c is not None)
            else:
                users.update(c for c, e in zip(ticket.copies, ticket.entries, strict=True) if c is not None and e in PINNED)
    waiting = sum(t.waiting for t in core._reads.open.values())
    coming = sum(t.entries[i] == Entry.WAITING for m in core.state.moves.values() for t, i in m.waiters)
    queued = sum(t.entries[i] == Entry.WAITING for q in core._mover._queues.values() for t, left in q.items() for i in left)
    assert waiting == coming + queued, f"{waiting} keys wait, {coming} are on their way and {queued} in a queue"
    for pin in core.pins.values():
        users.update(pin.copies)
    for tier in core.state.tiers:
        for copy, slots in core.state.pools[tier].owned().items():
            for slot in slots:
                assert slot in copy.all_slots(), f"{tier.name} slot {slot:#x} is owned by a copy that is elsewhere"
            expected = users.get(copy, 0)
            assert copy.pins == expected, f"a {copy.state.name} {tier.name} copy has {copy.pins} pins and {expected} users"
            if copy.state is CopyState.ABSENT:
                assert any(m.dst is copy and m.is_within for m in core.state.moves.values()), "a slot is owned by nobody"
            elif copy.state is not CopyState.DOOMED:
                block = copy.block
                assert block.realm.index.get(block.key) is block, "a live copy's block can be found"


def check_rest(runtime: Runtime) -> None:
    """Everybody has left and nothing has gone wrong for a while: nothing may wait or be held."""
    core = runtime.core
    state = core.state
    assert not state.moves, f"{len(state.moves)} moves never end"
    executor = runtime.runner.executor
    assert not executor.running and not executor.queued, "jobs never end"
    assert not core.sessions and not core.pins, "tickets are left"
    assert state.pinned_bytes == [0, 0, 0], f"pinned bytes are left: {state.pinned_bytes}"
    assert not any(core.snapshot().queue_depth.values()), f"something waits: {core.snapshot().queue_depth}"
    assert not any(t.leaving_bytes != [0, 0, 0] for t in state.tenants.values()), "bytes leave and never arrive"
    for pool in state.pools:
        assert not pool.retiring, f"extents of {pool.tier.name} are never given back: {list(pool.retiring)}"
        stuck = [e.extent_id for e in pool.extents.values() if e.draining and not e.used]
        assert not stuck, f"empty extents of {pool.tier.name} never go: {stuck}"
