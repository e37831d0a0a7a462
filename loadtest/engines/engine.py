"""One client process: several engines, each with a session, ranks that map their own shard, and threads for its requests.

A dispatcher hands each request to its engine when it is due, whether former ones have ended or not. Times count from that moment,
so a slow daemon delays nothing but what it serves. The dispatcher's own delay is told with each request, and the process's CPU
time twice a second: whoever reads the latencies can see whether they were this process's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from kvtierd.client import Client, ExtentMap, block_keys
from kvtierd.client.results import UNAVAILABLE
from kvtierd.errors import DaemonUnavailableError, KvtierdError, Reason
from kvtierd.lifetime import die_with_parent
from loadtest.engines.contents import Words, fill, wrong_bytes
from loadtest.engines.plan import Item, Job, Step

ATTACH_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 2.0
"""As the vLLM connector has it for lookups and saves."""
LOAD_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 2.0
SAVE_WAIT_S = 1.0
TELL_EVERY_S = 0.5
REASONS = {Reason.UNSPECIFIED: UNAVAILABLE}


class Call(NamedTuple):
    """One call: when it was meant to begin, did begin, and ended, in seconds of the run."""

    name: str
    meant_s: float
    began_s: float
    ended_s: float


class Record(NamedTuple):
    """How one request went."""

    number: int
    tenant: str
    due_s: float
    dispatched_s: float
    began_s: float
    """When a thread of its engine was free for it."""
    ended_s: float
    asked: int
    calls: tuple[Call, ...]
    hits: dict[str, int]
    """Blocks by the tier that they were loaded from."""
    lost: int
    """Blocks that the lookup promised and the load did not bring."""
    saved: int
    wrong_bytes: int
    troubles: dict[str, int]
    """Calls and blocks that were refused or not served, by what was answered."""


class Busy(NamedTuple):
    """What the process itself used until a moment."""

    at_s: float
    cpu_s: float


class Ranks:
    """One rank's memory a shard: each maps the extents of its own shard, as a worker process does."""

    def __init__(self, client: Client, shards: int) -> None:
        self._client = client
        self._shards = shards
        self._lock = threading.Lock()
        self._token = b""
        self._maps: list[ExtentMap] = []

    def of(self, token: bytes) -> list[ExtentMap]:
        """The ranks' mappings for a session; they join it when it is new. Raises KvtierdError."""
        with self._lock:
            if token != self._token:
                if token != self._client.session_token:
                    raise DaemonUnavailableError("the session has ended")
                self._leave()
                socket = self._client.descriptor_socket
                for shard in range(self._shards):
                    self._maps.append(ExtentMap(socket, token, shard=shard, timeout_s=JOIN_TIMEOUT_S))
                self._token = token
            return list(self._maps)

    def _leave(self) -> None:
        for extents in self._maps:
            extents.close()
        self._maps, self._token = [], b""

    def close(self) -> None:
        """Leave the session."""
        with self._lock:
            self._leave()


class Engine:
    """One engine: looks up, loads what is held, computes the rest and saves it; or one of these, where the run has a mix."""

    def __init__(self, job: Job, name: str) -> None:
        self._job = job
        self.began_s = 0.0
        self.client = Client(job.namespace, job.address, timeout_s=CALL_TIMEOUT_S, name=name)
        self._ranks = Ranks(self.client, job.shards)
        self._pool = ThreadPoolExecutor(job.threads, name)
        self._local = threading.local()
        self.records: deque[Record] = deque()

    def _now(self) -> float:
        return time.monotonic() - self.began_s

    def submit(self, item: Item) -> None:
        """Take a request on. Never blocks."""
        self._pool.submit(self._run, item, self._now())

    def close(self) -> None:
        """Wait for the requests, then detach."""
        self._pool.shutdown()
        self._ranks.close()
        self.client.close()

    def _run(self, item: Item, dispatched_s: float) -> None:
        began_s = self._now()
        request = _Request(self, self._job, item)
        try:
            request.run()
        except KvtierdError as e:
            request.troubles[f"error: {e}"[:120]] += 1
        self.records.append(
            Record(
                item.number, item.tenant, item.due_s, dispatched_s, began_s, self._now(), request.asked, tuple(request.calls),
                dict(request.hits), request.lost, request.saved, request.wrong, dict(request.troubles),
            )
        )  # fmt: skip

    @property
    def ranks(self) -> Ranks:
        """Its ranks."""
        return self._ranks

    def scratch(self) -> Words:
        """Memory of this thread to load a shard into, as an engine's own KV cache."""
        found: Words | None = getattr(self._local, "scratch", None)
        if found is None:
            found = self._local.scratch = np.zeros(self._job.shard_bytes // 8, np.uint64)
        return found

    @contextlib.contextmanager
    def timed(self, calls: list[Call], name: str, meant_s: float | None = None) -> Iterator[None]:
        """Note a call; it was meant to begin now where nothing else is said."""
        began_s = self._now()
        try:
            yield
        finally:
            calls.append(Call(name, began_s if meant_s is None else meant_s, began_s, self._now()))


class _Request:
    """One request on its way."""

    def __init__(self, engine: Engine, job: Job, item: Item) -> None:
        self._engine, self._job, self._item = engine, job, item
        self._keys = block_keys(item.blocks, 1, identity=b"load test")
        self.calls: list[Call] = []
        self.hits: Counter[str] = Counter()
        self.troubles: Counter[str] = Counter()
        self.asked = self.lost = self.saved = self.wrong = 0

    def run(self) -> None:
        """All of it. Raises KvtierdError for what no cache's user is to see."""
        steps = self._item.steps
        reached = self._look() if Step.LOAD in steps else True
        have = self.hits.total()
        if Step.SAVE in steps and reached and have < len(self._keys):
            with self._engine.timed(self.calls, "save", self._due_s()):
                self._save(have)
        if Step.EVICT in steps:
            with self._engine.timed(self.calls, "evict", self._due_s()):
                self._engine.client.evict(self._keys, tenant=self._item.tenant)

    def _due_s(self) -> float | None:
        """When the call to come was meant to begin: the first one with the request, another one when those before it have ended."""
        return None if self.calls else self._item.due_s

    def _look(self) -> bool:
        """Look up, and load what is held. Returns whether the daemon answered."""
        item, engine = self._item, self._engine
        self.asked = len(self._keys)
        with engine.timed(self.calls, "lookup", item.due_s):
            found = engine.client.lookup(self._keys, tenant=item.tenant)
        self._note("lookup", found.reason)
        # Of all blocks: what is missing counts in the daemon's hit rate. The time is one of loads that bring something.
        with engine.timed(self.calls, "load", item.due_s) if found.held else contextlib.nullcontext():
            self._load()
        self.lost = max(0, found.held - self.hits.total())
        return found.reason is not Reason.UNSPECIFIED

    def _note(self, call: str, reason: Reason | None) -> None:
        if reason not in (None, Reason.NOT_FOUND):
            self.troubles[f"{call}: {REASONS.get(reason, reason.name)}"] += 1

    def _load(self) -> None:
        """Copy and check what becomes readable, shard by shard; what was copied counts only if the session has lasted."""
        item, scratch = self._item, self._engine.scratch()
        hits: Counter[str] = Counter()
        wrong = 0
        with self._engine.client.fetch(self._keys, LOAD_TIMEOUT_S, tenant=item.tenant) as fetch:
            try:
                ranks = self._engine.ranks.of(fetch.session_token) if fetch.session_token else []
                while (index := fetch.next_index()) is not None:
                    key = self._keys[index]
                    for shard, (extents, slot) in enumerate(zip(ranks, fetch.slots(index), strict=True)):
                        scratch[:] = np.frombuffer(extents.view(slot, self._job.shard_bytes), np.uint64)
                        wrong += wrong_bytes(scratch, item.tenant, key, shard)
                    hits[fetch.tiers[index].name.lower()] += 1
            except KvtierdError as e:
                self.troubles[f"load: {type(e).__name__}"] += 1
            intact = fetch.intact
            self._note("load", fetch.reason)
        if intact:
            self.hits, self.wrong = hits, wrong
        elif hits:
            self.troubles["load: the daemon went away"] += 1

    def _save(self, have: int) -> None:
        """Fill the slots of what was not found, and publish it."""
        item, keys = self._item, self._keys[have:]
        before = self._keys[:have]
        with self._engine.client.reserve(keys, wait_s=SAVE_WAIT_S, tenant=item.tenant, before=before, matched=have) as granted:
            self._note("save", granted.reason)
            if granted.reason is None:
                self.troubles.update({f"save: {name} (blocks)": count for name, count in granted.rejected.items()})
            if not granted.granted:
                return
            try:
                ranks = self._engine.ranks.of(granted.session_token)
                for index in granted.granted:
                    for shard, (extents, slot) in enumerate(zip(ranks, granted.slots(index), strict=True)):
                        fill(extents.view(slot, self._job.shard_bytes), item.tenant, keys[index], shard)
            except KvtierdError as e:
                self.troubles[f"save: {type(e).__name__}"] += 1
                return
            self.saved = granted.commit(timeout_s=CALL_TIMEOUT_S)
            if self.saved < len(granted.granted):
                self.troubles["save: not published (blocks)"] += len(granted.granted) - self.saved


def work(job: Job, pipe: Connection) -> None:
    """Entry point of the process. Says "ready", takes the moment that the run begins at, sends records until all is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    die_with_parent()
    logging.getLogger("kvtierd.client").setLevel(logging.ERROR)  # that the daemon goes away is what is tried
    engines = [Engine(job, f"engine {job.number}.{n}") for n in range(job.engines)]
    for engine in engines:
        engine.client.wait_attached(ATTACH_TIMEOUT_S)
    pipe.send("ready")
    began_s = pipe.recv()
    for engine in engines:
        engine.began_s = began_s
    _dispatch(job, pipe, engines, began_s)
    for engine in engines:
        engine.close()
    _tell(pipe, engines, began_s)
    pipe.send("ended")
    pipe.close()


def _dispatch(job: Job, pipe: Connection, engines: list[Engine], began_s: float) -> None:
    """Hand each request on when it is due. What was due before this process came is nobody's."""
    ready_s = time.monotonic() - began_s
    turns = itertools.cycle(engines)
    told_s = ready_s
    for item in job.items:
        engine = next(turns)
        if item.due_s < ready_s:
            continue
        while (wait_s := item.due_s - (now_s := time.monotonic() - began_s)) > 0:
            if now_s >= told_s + TELL_EVERY_S:
                told_s = now_s
                _tell(pipe, engines, began_s)
                continue
            time.sleep(min(wait_s, TELL_EVERY_S / 4))
        engine.submit(item)


def _tell(pipe: Connection, engines: list[Engine], began_s: float) -> None:
    records = []
    for engine in engines:
        while engine.records:
            records.append(engine.records.popleft())
    pipe.send((records, Busy(time.monotonic() - began_s, time.process_time())))
