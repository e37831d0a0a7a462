"""One request's question to the daemon: what is held, read into memory and pinned, before anything is promised to vLLM.

A chunk counts as ready only when the daemon has given out its slots: then it is in memory, verified, and pinned until the lookup is
closed, so a promised load is nothing but a copy. Slots are gathered in the background, so that the engine's thread
only takes them.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvtierd import tracing
from kvtierd.client import Client, Fetch
from kvtierd.connectors.vllm.identity import EnginePlan, GroupPlan
from kvtierd.connectors.vllm.logs import warn_rarely
from kvtierd.errors import KvtierdError, Reason
from kvtierd.model import MAX_KEYS_PER_CALL, Tier

POLL_S: Final = 0.05

Chunk = tuple[int, int]
"""KV cache group, number of the chunk in the request."""


class Ready:
    """Chunks of one group that can be loaded: a run without gaps from ``first`` on, written by the background thread only.

    Attributes:
        first: number of the first chunk wanted.
        wanted: how many are wanted.
        count: how many, from the first on, are ready.
        slots: their slots, one a shard, flat.
        tiers: the tiers that each was on, as a mask: bit 0 HBM, bit 1 CPU, bit 2 NVMe.
        token: of the session that the slots belong to.
    """

    def __init__(self, first: int, wanted: int, shards: int) -> None:
        self.first = first
        self.wanted = wanted
        self.count = 0
        self.slots = array("q")
        self.tiers = bytearray()
        self.token = b""
        self._shards = shards
        self._early: dict[int, tuple[list[int], int]] = {}

    def add(self, positions: Sequence[int], slots: Sequence[int], tiers: bytes, token: bytes) -> None:
        """Chunks at these positions, ascending and counted from ``first``, are ready."""
        if self.token not in (b"", token) or not positions:
            return  # slots of another session cannot be used together with those that are here
        self.token = token
        in_order = positions[0] == self.count and positions[-1] - positions[0] == len(positions) - 1
        if in_order and len(tiers) == len(positions):
            self.slots.extend(slots)
            self.tiers += tiers
            self.count += len(positions)  # last: the engine's thread reads up to here
        else:
            for number, position in enumerate(positions):
                mine = list(slots[number * self._shards : (number + 1) * self._shards])
                self._early[position] = mine, tiers[number] if number < len(tiers) else Tier.CPU.bit
        while (found := self._early.pop(self.count, None)) is not None:
            self.slots.extend(found[0])
            self.tiers.append(found[1])
            self.count += 1

    def tokens_by_tier(self, chunk_tokens: int, count: int) -> dict[str, int]:
        """Tokens of the first ``count`` chunks, by the fastest tier that each was on."""
        found: dict[str, int] = {}
        tiers = self.tiers[:count]
        for mask in range(2 ** len(Tier)):
            chunks = tiers.count(mask)
            if chunks:
                tier = next((t for t in Tier if mask & t.bit), Tier.CPU)
                found[tier.name.lower()] = found.get(tier.name.lower(), 0) + chunks * chunk_tokens
        return found


class Lookup:
    """Made on the engine's thread, run once in the background, read from the engine's thread.

    Args:
        plan: of the engine.
        clients: one a pool.
        keys: for each group the keys of chunks from ``first_chunk`` on.
        first_chunk: the first chunk that the engine does not hold itself.
        tenant: to act for.
        timeout_s: after this long what is not ready is a miss.
    """

    def __init__(
        self,
        plan: EnginePlan,
        clients: Sequence[Client],
        keys: Mapping[int, Sequence[bytes]],
        first_chunk: int,
        tenant: str,
        timeout_s: float,
    ) -> None:
        self._plan = plan
        self._clients = clients
        self._keys = keys
        self._tenant = tenant
        self._lock = threading.Lock()
        self._fetches: list[Fetch] = []
        self._cancelled = False
        self._closed = False
        self._ready: dict[int, Ready] = {}
        self._hit: int | None = None
        self.first_chunk = first_chunk
        self.deadline_s = time.monotonic() + timeout_s
        self.late = False
        """It ended because its time was over; more may be held."""
        self.read: tuple[int, float] = (0, 0.0)
        """Bytes of all shards that were on NVMe only and have become ready, and the seconds that it took."""
        self._begun_s = 0.0
        self._ended = threading.Event()
        self.traceparent = ""
        """What its span belongs to, and once it runs that span itself."""
        self.on_pinned: Callable[[], None] | None = None
        """Called in the background once the daemon has been asked for the blocks."""

    @property
    def count(self) -> int:
        """Chunks asked about in each group."""
        return len(next(iter(self._keys.values())))

    # ---- in the background

    def run(self) -> None:
        """Ask, and wait for what is held, until all is there, the deadline or ``cancel``."""
        with tracing.span("kvtierd.scheduler.lookup", self.traceparent, chunks=self.count) as span:
            self.traceparent = span.traceparent
            self._run()
            span.set(ready=sum(ready.count for ready in self._ready.values()), late=self.late)

    def _run(self) -> None:
        try:
            if not self._closed:
                self._ready = self._choose()
                waiting = self._fetch()
                if self.on_pinned is not None:
                    self.on_pinned()
                self._wait(waiting)
        except (KvtierdError, ValueError) as e:
            warn_rarely("kvtierd: a lookup failed and counts as a miss: %s", e)
        finally:
            with self._lock:
                self.late = any(fetch.reason is Reason.DEADLINE for fetch in self._fetches)
                self._ended.set()
                close = self._closed
            if close:
                self._close_fetches()

    def _remaining_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    def _by_pool(self) -> dict[int, list[GroupPlan]]:
        pools: dict[int, list[GroupPlan]] = {}
        for group in self._plan.groups:
            pools.setdefault(group.pool, []).append(group)
        return pools

    def _choose(self) -> dict[int, Ready]:
        """What to fetch. With several groups or windows, look first, and want only what the longest hit needs."""
        plan, first = self._plan, self.first_chunk
        if not plan.selective:
            return {plan.groups[0].index: Ready(first, self.count, plan.shards(plan.groups[0]))}
        held: set[Chunk] = set()
        for pool, groups in self._by_pool().items():
            order = [(g.index, n) for g in groups for n in range(self.count)]
            packed = b"".join(self._keys[g][n] for g, n in order)
            answer = self._clients[pool].lookup(packed, each=True, timeout_s=self._remaining_s(), tenant=self._tenant)
            held.update((g, first + n) for (g, n), mask in zip(order, answer.tiers, strict=False) if mask)
        hit = longest_hit(plan, held, first, self.count)
        starts = {g.index: max(first, g.first_needed(hit * plan.chunk_tokens) // plan.chunk_tokens) for g in plan.groups}
        return {g.index: Ready(starts[g.index], max(0, hit - starts[g.index]), plan.shards(g)) for g in plan.groups}

    def _fetch(self) -> list[tuple[Fetch, int, list[tuple[Ready, int, int]]]]:
        """Ask for slots. Returns each call with the bytes of its blocks and its runs: what they belong to, their first position
        there, and their length."""
        calls = []
        self._begun_s = time.monotonic()
        for pool, groups in self._by_pool().items():
            for some in _runs([(g.index, self._ready[g.index]) for g in groups]):
                skip = [(g, ready.first - self.first_chunk + begin, size) for g, ready, begin, size in some]
                packed = b"".join([b"".join(self._keys[g][a : a + size]) for g, a, size in skip])
                fetch = self._clients[pool].fetch(
                    packed, timeout_s=self._remaining_s(), each=self._plan.selective, tenant=self._tenant, device=True, keeps=True
                )
                with self._lock:
                    self._fetches.append(fetch)
                calls.append((fetch, self._plan.block_bytes(pool), [(ready, begin, size) for _, ready, begin, size in some]))
        return calls

    def _wait(self, waiting: list[tuple[Fetch, int, list[tuple[Ready, int, int]]]]) -> None:
        while waiting and not self._cancelled:
            still = []
            for fetch, block_bytes, runs in waiting:
                indexes, slots, tiers = fetch.poll_slots(POLL_S)
                if indexes:
                    _share_out(runs, indexes, slots, tiers, fetch.session_token)
                    from_nvme = tiers.count(Tier.NVME.bit)  # and on no other tier
                    if from_nvme:
                        self.read = self.read[0] + from_nvme * block_bytes, time.monotonic() - self._begun_s
                if not fetch.done and self._remaining_s():
                    still.append((fetch, block_bytes, runs))
            waiting = still

    # ---- on the engine's thread

    @property
    def done(self) -> bool:
        """No more will become ready."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait so long until no more will become ready. Whether it has come to that."""
        return self._ended.wait(seconds)

    @property
    def settled(self) -> bool:
        """Whether the hit is fixed."""
        return self._hit is not None

    def settle(self) -> int:
        """Fix the hit at what is ready now, and wait for no more: from here on vLLM counts on it, and slots may still arrive.

        Returns:
            Chunks from the start of the request that are held after a load. The same number ever after.
        """
        if self._hit is None:
            self._hit = self._hit_chunks()
            self.cancel()
        return self._hit

    @property
    def intact(self) -> bool:
        """Whether the slots still belong to sessions that live."""
        with self._lock:
            return all(fetch.intact for fetch in self._fetches)

    def _hit_chunks(self) -> int:
        if not self._plan.selective:
            ready = self._ready.get(self._plan.groups[0].index)
            return self.first_chunk + (ready.count if ready is not None else 0)
        if self._ready and all(ready.count == ready.wanted for ready in self._ready.values()):
            return max(ready.first + ready.wanted for ready in self._ready.values())
        return self.first_chunk  # part of a window is of no use

    def ready(self, group: int) -> Ready:
        """What is ready of one group."""
        return self._ready[group]

    def key(self, group: int, chunk: int) -> bytes:
        """The key that a chunk of the request was asked for by."""
        return self._keys[group][chunk - self.first_chunk]

    def chunks_of(self, slots: frozenset[int]) -> list[Chunk]:
        """The chunks that are in these slots."""
        return [
            (group.index, ready.first + number // self._plan.shards(group))
            for group in self._plan.groups
            if (ready := self._ready.get(group.index)) is not None
            for number, slot in enumerate(ready.slots)
            if slot in slots
        ]

    @property
    def sessions(self) -> set[bytes]:
        """Tokens of the sessions that the slots belong to."""
        return {ready.token for ready in self._ready.values() if ready.token}

    def cancel(self) -> None:
        """Wait for no more; what is ready stays."""
        self._cancelled = True
        if self.done or not self._remaining_s():
            return  # past the deadline the thread ends by itself, and tells the client that the daemon did not answer
        with self._lock:
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel()

    def close(self) -> None:
        """Let go of everything; slots must not be read any more. Idempotent."""
        self.cancel()
        with self._lock:
            self._closed = True
            if not self.done:
                return  # the background thread does it, for it may be using a fetch
        self._close_fetches()

    def _close_fetches(self) -> None:
        with self._lock:
            fetches, self._fetches = self._fetches, []
        for fetch in fetches:
            fetch.close()


def longest_hit(plan: EnginePlan, ready: set[Chunk], first_chunk: int, count: int) -> int:
    """Chunks, from the start of the request, of the longest hit that ``ready`` allows; ``first_chunk`` when there is none."""
    contiguous = first_chunk
    whole = [g for g in plan.groups if not g.window]
    windowed = [g for g in plan.groups if g.window]
    stop = first_chunk + count
    if whole:
        while contiguous < stop and all((g.index, contiguous) in ready for g in whole):
            contiguous += 1
        stop = contiguous
    for hit in range(stop, first_chunk, -1):
        tokens = hit * plan.chunk_tokens
        if all(
            (g.index, chunk) in ready
            for g in windowed
            for chunk in range(max(first_chunk, g.first_needed(tokens) // plan.chunk_tokens), hit)
        ):
            return hit
    return first_chunk


def _runs(wanted: Sequence[tuple[int, Ready]]) -> list[list[tuple[int, Ready, int, int]]]:
    """Cut what is wanted into calls: lists of (group, where it goes, first position, length)."""
    calls: list[list[tuple[int, Ready, int, int]]] = []
    room = 0
    for group, ready in wanted:
        begin = 0
        while begin < ready.wanted:
            if not room:
                calls.append([])
                room = MAX_KEYS_PER_CALL
            size = min(room, ready.wanted - begin)
            calls[-1].append((group, ready, begin, size))
            begin, room = begin + size, room - size
    return calls


def _share_out(runs: Sequence[tuple[Ready, int, int]], indexes: list[int], slots: list[int], tiers: bytes, token: bytes) -> None:
    """Give what a call has told to the groups that its keys belong to."""
    shards = len(slots) // len(indexes)
    offset = low = 0
    for ready, begin, size in runs:
        high = bisect_left(indexes, offset + size, low)
        if high > low:
            positions = indexes[low:high]
            if begin != offset:
                positions = [index - offset + begin for index in positions]
            ready.add(positions, slots[low * shards : high * shards], tiers[low:high], token)
        offset, low = offset + size, high
