"""Goal: a lookup names exactly the chunks that are pinned, never more after it has been promised, and always gives its pins back.

Method: a stand-in for the daemon's client tells slots in any portions; the thread is the test's own, so every order of the engine's
thread and the lookup's can be played. The longest hit is compared with a search over all lengths.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.connectors.vllm import lookups
from kvtierd.connectors.vllm.lookups import Lookup, Ready, longest_hit
from kvtierd.errors import DaemonUnavailableError
from kvtierd.model import Tier
from tests.connectors.parts import BLOCK, CHUNK, FakeClient, FakeFetch, plan

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


def keys(group: int, first: int, count: int) -> list[bytes]:
    return [bytes([group, n]) + bytes(30) for n in range(first, first + count)]


def lookup(client: FakeClient, windows: tuple[int, ...] = (0,), first: int = 0, count: int = 5, timeout_s: float = 60.0) -> Lookup:
    wanted = {group: keys(group, first, count) for group in range(len(windows))}
    return Lookup(plan(windows), [client], wanted, first, "", timeout_s)  # type: ignore[list-item]


# ---- what is ready


@given(st.permutations(range(8)), st.integers(1, 8), st.booleans())
def test_slots_in_any_order_become_one_run(order: list[int], size: int, with_tiers: bool) -> None:
    ready = Ready(3, 8, 2)
    for begin in range(0, 8, size):
        some = sorted(order[begin : begin + size])
        ready.add(some, [10 * i + s for i in some for s in range(2)], bytes(2 for _ in some) if with_tiers else b"", b"t")
        known = set(order[: begin + size])
        run = next(n for n in range(9) if n not in known)
        assert ready.count == run
        assert list(ready.slots) == [10 * i + s for i in range(run) for s in range(2)]
    assert len(ready.tiers) == 8


def test_slots_of_another_session_are_left_out() -> None:
    """Two calls of one lookup may meet two sessions; their slots mean nothing to each other's connection."""
    ready = Ready(0, 4, 1)
    ready.add([0, 1], [1, 2], b"\2\2", b"old")
    ready.add([2, 3], [3, 4], b"\2\2", b"new")
    assert (ready.count, ready.token) == (2, b"old")


def test_tokens_by_tier_count_what_is_loaded_only() -> None:
    ready = Ready(0, 4, 1)
    ready.add([0, 1, 2, 3], [1, 2, 3, 4], bytes([Tier.CPU.bit, Tier.NVME.bit, Tier.HBM.bit | Tier.NVME.bit, Tier.CPU.bit]), b"t")
    assert ready.tokens_by_tier(10, 4) == {"cpu": 20, "nvme": 10, "hbm": 10}
    assert ready.tokens_by_tier(10, 1) == {"cpu": 10}
    assert ready.tokens_by_tier(10, 0) == {}


# ---- the longest hit


def needed(made: Any, hit: int, first: int) -> set[tuple[int, int]]:
    tokens = hit * CHUNK
    return {(g.index, chunk) for g in made.groups for chunk in range(max(first, g.first_needed(tokens) // CHUNK), hit)}


@given(st.data())
def test_no_longer_hit_exists(data: st.DataObject) -> None:
    windows = data.draw(st.sampled_from([(0,), (BLOCK,), (64,), (0, 64), (100, 40), (0, 0), (0, 30, 90)]))
    made, first, count = plan(windows), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 8))
    every = [(g, first + n) for g in range(len(windows)) for n in range(count)]
    held = set(data.draw(st.lists(st.sampled_from(every), unique=True))) if every else set()
    right = max([hit for hit in range(first + 1, first + count + 1) if needed(made, hit, first) <= held], default=first)
    assert longest_hit(made, held, first, count) == right


# ---- one lookup


def test_everything_is_held() -> None:
    client = FakeClient()
    client.everything = True
    one = lookup(client, first=2)
    one.run()
    assert (one.done, one.settle(), one.ready(0).count) == (True, 7, 5)
    one.close()
    one.close()
    assert [fetch.closed for fetch in client.fetches] == [1]


def test_the_first_chunks_only() -> None:
    client = FakeClient()
    client.held = set(keys(0, 0, 2) + keys(0, 3, 2))
    one = lookup(client)
    one.run()
    assert one.settle() == 2


def test_only_what_the_window_needs_is_fetched() -> None:
    client = FakeClient()
    client.held = set(keys(0, 0, 8)) | set(keys(1, 5, 3))
    one = lookup(client, (0, 64), count=8)
    one.run()
    assert one.settle() == 8
    assert client.asked[-1] == keys(0, 0, 8) + keys(1, 6, 2)  # 64 tokens before token 256


def test_part_of_a_window_is_no_hit() -> None:
    """A chunk that went between the look and the fetch."""
    client = FakeClient()
    client.held = set(keys(0, 0, 8)) | set(keys(1, 5, 3))
    client.next_fetch = FakeFetch(b"t", [list(range(9))])
    one = lookup(client, (0, 64), count=8)
    one.run()
    assert one.settle() == 0


def test_a_promise_does_not_grow() -> None:
    """vLLM allocates blocks for what it was told. Slots that come between promise and allocation must not shift the load."""
    client = FakeClient()
    fetch = client.next_fetch = FakeFetch(b"t", [[0, 1]], done=False)
    one = lookup(client, timeout_s=0.05)
    thread = threading.Thread(target=one.run)
    thread.start()
    while one._ready.get(0) is None or one.ready(0).count < 2:
        time.sleep(0.001)
    while time.monotonic() < one.deadline_s:
        time.sleep(0.001)
    assert one.settle() == 2
    one.ready(0).add([2, 3, 4], [5, 6, 7], bytes([2, 2, 2]), b"t")
    assert one.settle() == 2
    thread.join(30)
    one.close()
    assert fetch.closed == 1


def test_nobody_is_told_that_a_hung_daemon_was_cancelled() -> None:
    """Past the deadline the lookup's own thread finds that there was no answer, which opens the client's circuit breaker; a call
    that was cancelled says nothing about the daemon, and each request would wait in full for a daemon that hangs."""
    client = FakeClient()
    fetch = client.next_fetch = FakeFetch(b"t", [], done=False)
    one = lookup(client, timeout_s=0.0)
    one._fetches.append(fetch)  # type: ignore[arg-type]
    one.close()
    assert fetch.cancelled == 0
    early = lookup(client, timeout_s=60.0)
    early._fetches.append(fetch)  # type: ignore[arg-type]
    early.close()
    assert fetch.cancelled == 1


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_pins_are_given_back_whenever_it_is_closed(moment: str) -> None:
    client = FakeClient()
    fetch = client.next_fetch = FakeFetch(b"t", [[0]], done=moment != "during")
    one = lookup(client)
    thread = threading.Thread(target=one.run)
    if moment == "before":
        one.close()
    thread.start()
    if moment == "during":
        while one._ready.get(0) is None or not one.ready(0).count:
            time.sleep(0.001)
        one.close()
    thread.join(30)
    if moment == "after":
        one.close()
    assert fetch.closed == len(client.fetches)
    assert len(client.fetches) == (moment != "before")


def test_a_failure_is_a_miss() -> None:
    class Broken(FakeClient):
        def fetch(self, packed: bytes, **_: Any) -> Any:
            raise DaemonUnavailableError("gone")

    one = lookup(Broken())
    one.run()
    assert (one.done, one.settle()) == (True, 0)
    one.close()


def test_an_unexpected_failure_still_ends_the_lookup() -> None:
    class Broken(FakeClient):
        def fetch(self, packed: bytes, **_: Any) -> Any:
            raise RuntimeError("a bug")

    one = lookup(Broken())
    with pytest.raises(RuntimeError):
        one.run()
    assert one.done


def test_slots_of_a_dead_session_are_known() -> None:
    client = FakeClient()
    client.everything = True
    one = lookup(client)
    one.run()
    assert one.intact
    client.fetches[0].intact = False
    assert not one.intact


def test_many_keys_take_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_KEYS_PER_CALL", 3)
    client = FakeClient()
    client.everything = True
    one = lookup(client, (0, 0), count=8)
    one.run()
    fetched = client.asked[1:]
    assert [len(call) for call in fetched] == [3, 3, 3, 3, 3, 1]
    assert one.settle() == 8
    for group in range(2):
        flat = [key for call in fetched for key in call]
        assert [key for key in flat if key[0] == group] == keys(group, 0, 8)
        assert one.ready(group).count == 8


def test_a_session_that_changes_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MAX_KEYS_PER_CALL", 3)

    class Changing(FakeClient):
        def fetch(self, packed: bytes, **more: Any) -> FakeFetch:
            self.session_token = b"t%d" % len(self.fetches)
            return super().fetch(packed, **more)

    client = Changing()
    client.everything = True
    one = lookup(client, count=8)
    one.run()
    assert (one.settle(), one.ready(0).token) == (3, b"t0")


@given(st.integers(0, 1 << 30))
def test_runs_cut_and_shared_out_meet_again(seed: int) -> None:
    rng = random.Random(seed)
    wanted = [(group, Ready(rng.randrange(3), rng.randrange(9), 2)) for group in range(rng.randint(1, 3))]
    for call in lookups._runs(wanted):
        size = sum(length for *_, length in call)
        told = sorted(rng.sample(range(size), rng.randint(1, size)))
        slots = [s for i in told for s in (2 * i, 2 * i + 1)]
        lookups._share_out([(ready, begin, length) for _, ready, begin, length in call], told, slots, bytes([2] * len(told)), b"t")
        rest = sorted(set(range(size)) - set(told))
        if rest:
            slots = [s for i in rest for s in (2 * i, 2 * i + 1)]
            lookups._share_out(
                [(ready, begin, length) for _, ready, begin, length in call], rest, slots, bytes([2] * len(rest)), b"t"
            )
    for _, ready in wanted:
        assert ready.count == ready.wanted
        assert list(ready.slots[1::2]) == [slot + 1 for slot in ready.slots[::2]]
