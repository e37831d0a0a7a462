"""Stand-ins for what surrounds one part of the connector: a daemon's client that does as it is told, threads that run when they are
told to, and plans of engines. Requests and block pools are vLLM's own.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtierd.client import BreakerState
from kvtierd.connectors.params import RequestSettings
from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.events import Events
from kvtierd.connectors.vllm.gate import Gate
from kvtierd.connectors.vllm.hashes import Keys
from kvtierd.connectors.vllm.identity import EnginePlan, GroupPlan
from kvtierd.connectors.vllm.requests import RequestState
from kvtierd.connectors.vllm.settings import Settings
from kvtierd.errors import Reason
from kvtierd.model import KEY_BYTES, Namespace, Tier

BLOCK: Final = 16
CHUNK: Final = 32


@cache
def _hash_function(algorithm: str) -> Callable[[Any], bytes]:
    """As an engine makes it ready, once."""
    made = get_hash_fn_by_name(algorithm)
    init_none_hash(made)
    return made  # type: ignore[no-any-return]


def request(name: str = "r", tokens: int | Sequence[int] = 160, *, algorithm: str = "sha256", **more: Any) -> Request:
    """A request of vLLM's, of so many tokens or of these."""
    ids = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    hash_fn = _hash_function(algorithm)
    sampling = SamplingParams(max_tokens=100)
    sampling.skip_reading_prefix_cache = more.pop("skip_reading", False)
    return Request(name, ids, sampling, None, block_hasher=get_request_block_hasher(BLOCK, hash_fn), **more)


def state(of: Request | None = None, **settings: Any) -> RequestState:
    """The connector's state of a request."""
    return RequestState(of or request(), RequestSettings(**settings), "")


def plan(windows: Sequence[int] = (0,), ranks: int = 1, chunk: int = CHUNK) -> EnginePlan:
    """A plan of one group for each window; all groups share one pool."""
    groups = tuple(GroupPlan(n, "swa" if window else "full", BLOCK, window, chunk // BLOCK, 0) for n, window in enumerate(windows))
    return EnginePlan(groups, chunk, (Namespace(shard_bytes=(4096,) * ranks),), (False,), ranks)


class Later:
    """In place of ``Background``: tasks wait until they are told to run."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []
        self.full = False

    def submit(self, task: Callable[[], None]) -> bool:
        if not self.full:
            self.tasks.append(task)
        return not self.full

    def run(self) -> None:
        """Run what waits, and what that asks for."""
        while self.tasks:
            self.tasks.pop(0)()


class FakeFetch:
    """Some blocks' slots, told in portions."""

    def __init__(self, token: bytes, portions: list[list[int]], done: bool = True) -> None:
        self.session_token = token
        self.portions = portions
        self.ends = done
        self.intact = True
        self.reason: Reason | None = None
        self.closed = self.cancelled = 0
        self.told = threading.Event()
        self.tier = Tier.CPU

    @property
    def done(self) -> bool:
        return not self.portions and self.ends

    def poll_slots(self, timeout_s: float) -> tuple[list[int], list[int], bytes]:
        if not self.portions:
            self.told.wait(timeout_s)
            return [], [], b""
        indexes = self.portions.pop(0)
        return indexes, [100 + i for i in indexes], bytes([self.tier.bit] * len(indexes))

    def cancel(self) -> None:
        self.cancelled += 1
        self.told.set()

    def close(self) -> None:
        self.closed += 1


class FakeReservation:
    """Slots to fill."""

    def __init__(self, outcomes: Sequence[str], token: bytes = b"t") -> None:
        self.outcomes = list(outcomes)
        self.granted = [n for n, outcome in enumerate(outcomes) if outcome == "GRANTED"]
        self.session_token = token
        self.closed = 0
        self.committed: list[int] = []
        self.commits = True

    def slots(self, index: int) -> list[int]:
        return [1000 + index]

    def commit(self, indexes: list[int], timeout_s: float) -> int:
        self.committed += indexes
        return len(indexes) if self.commits else 0

    def close(self) -> None:
        self.closed += 1


class FakeClient:
    """A daemon's client. ``held`` says what it has, ``outcome`` what becomes of a save."""

    def __init__(self) -> None:
        self.session_token, self.descriptor_socket = b"t", "/s"
        self.status = SimpleNamespace(attached=True, breaker=BreakerState.CLOSED)
        self.held: set[bytes] = set()
        self.everything = False
        self.outcome: Callable[[bytes], str] = lambda key: "HELD" if key in self.held else "GRANTED"
        self.fetches: list[FakeFetch] = []
        self.reservations: list[FakeReservation] = []
        self.asked: list[list[bytes]] = []
        self.prefetches: list[Any] = []
        self.pins: list[tuple[int, float]] = []
        self.pinnable = 10**9
        self.lives: list[float | None] = []
        self.portions: list[tuple[int, int | None]] = []
        """Of each save: keys before it, and what its request has matched."""
        self.next_fetch: FakeFetch | None = None

    def _found(self, packed: bytes) -> list[bool]:
        keys = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
        self.asked.append(keys)
        return [self.everything or key in self.held for key in keys]

    def lookup(self, packed: bytes, **_: Any) -> Any:
        return SimpleNamespace(tiers=bytes(2 if found else 0 for found in self._found(packed)))

    def fetch(self, packed: bytes, *, each: bool, **_: Any) -> FakeFetch:
        found = self._found(packed)
        indexes = [n for n, there in enumerate(found) if there]
        if not each:
            indexes = indexes[: found.index(False) if False in found else len(found)]
        fetch, self.next_fetch = self.next_fetch or FakeFetch(self.session_token, [indexes] if indexes else []), None
        self.fetches.append(fetch)
        return fetch

    def reserve(
        self, packed: bytes, ttl_s: float | None = None, before: bytes = b"", matched: int | None = None, **_: Any
    ) -> FakeReservation:
        self.lives.append(ttl_s)
        self.portions.append((len(before) // KEY_BYTES, matched))
        keys = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
        self.asked.append(keys)
        self.reservations.append(FakeReservation([self.outcome(key) for key in keys], self.session_token))
        return self.reservations[-1]

    def prefetch(self, packed: bytes, seconds: float, **_: Any) -> Any:
        made = SimpleNamespace(cancelled=0, keys=len(packed) // KEY_BYTES)
        made.cancel = lambda: setattr(made, "cancelled", made.cancelled + 1)
        self.prefetches.append(made)
        return made

    def pin(self, packed: bytes, seconds: float, **_: Any) -> Any:
        count = len(packed) // KEY_BYTES
        self.pins.append((count, seconds))
        return SimpleNamespace(pinned=min(count, self.pinnable))


class FakeProber:
    """Answers when it is told to. ``held`` says what there is."""

    def __init__(self, held: set[bytes]) -> None:
        self.held = held
        self.answers = True
        self.closed = self.full = False
        self.news = threading.Event()
        self.asked: list[tuple[bytes, int, str]] = []
        self.forgotten: list[int] = []

    def ask(self, key: bytes, count: int, tenant: str = "") -> int | None:
        if self.full:
            return None
        self.asked.append((key, count, tenant))
        return len(self.asked)

    def answer(self, number: int) -> bool | None:
        return self.asked[number - 1][0] in self.held if self.answers else None

    def wait(self, timeout_s: float) -> bool:
        return self.news.wait(timeout_s)

    def forget(self, number: int) -> None:
        self.forgotten.append(number)


class Parts:
    """A context with stand-ins.

    Args:
        windows: one KV cache group each.
        blocks: of the engine.
        settings: of the connector.
    """

    def __init__(
        self, windows: Sequence[int] = (0,), blocks: int = 64, ranks: int = 1, events: bool = False, **settings: Any
    ) -> None:
        self.client = FakeClient()
        self.calls, self.lookups = Later(), Later()
        self.pool = BlockPool(blocks, True, BLOCK)
        self.counts: Counter[str] = Counter()
        made = plan(windows, ranks)
        self.prober: FakeProber | None = None
        pools = SimpleNamespace(
            plan=made, clients=[self.client], attached=True, reachable=True, prober=lambda pool, calls: self.prober
        )
        self.pools = pools
        keys = Keys(CHUNK, BLOCK, len(windows), own_chain=False)
        defaults = {"gate": False, "max_held_fraction": 0.5}
        self.ctx = Context(
            Settings(**(defaults | settings)),
            pools,  # type: ignore[arg-type]
            keys,
            Gate(),
            self.counts,
            self.calls,  # type: ignore[arg-type]
            self.lookups,  # type: ignore[arg-type]
            self.pool,
            Events() if events else None,
        )

    @property
    def used(self) -> int:
        """Blocks of the engine that somebody holds."""
        return int(self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks())

    def table(self, blocks: int) -> list[int]:
        """Blocks for a request, as the engine allocates them."""
        return [block.block_id for block in self.pool.get_new_blocks(blocks)]

    def free(self, table: Sequence[int]) -> None:
        """As the engine does at the end of a request."""
        self.pool.free_blocks([self.pool.blocks[b] for b in reversed(table)])
