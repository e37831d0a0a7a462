"""Goal: the check of every loaded byte has power: nothing wrong gets past it.

Method: contents alone, then the replay with clients that are honest, that copy nothing, or that hand out another block.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvtierd.client import LoadResult, LookupResult, SaveResult, block_keys
from kvtierd.demo import content
from kvtierd.demo.worker import BATCH, Outcome, Replay
from kvtierd.model import Tier
from kvtierd.replay.trace import Request


class FakeClient:
    """A cache in this process that forgets nothing."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Any] = {}
        self.honest = True
        self.copies = True

    def lookup(self, keys: Sequence[bytes]) -> LookupResult:
        held = next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))
        return LookupResult(held)

    def load(self, keys: Sequence[bytes], buffers: Sequence[Any]) -> LoadResult:
        for i, buffer in enumerate(buffers):
            if self.copies:
                buffer[:] = self.blocks[keys[i] if self.honest else keys[i - 1]]
        return LoadResult(len(keys), frozenset(range(len(keys))), {Tier.CPU: len(keys)})

    def save(self, keys: Sequence[bytes], buffers: Sequence[Any], wait_s: float) -> SaveResult:
        for key, buffer in zip(keys, buffers, strict=True):
            self.blocks[key] = buffer.copy()
        return SaveResult(len(keys))


REQUEST = Request(0.0, tuple(range(10, 10 + BATCH + 2)))


def replay(client: FakeClient, *, corrupt: bool = False) -> Outcome:
    outcome = Outcome(0, 0.0)
    Replay(client, 1, corrupt=corrupt).run(REQUEST, outcome)  # type: ignore[arg-type]
    return outcome


def test_the_check_sees_every_kind_of_wrong_byte() -> None:
    a, b = content.keys_of([1, 2], 1)
    words = np.empty(content.BLOCK_BYTES // 8, np.uint64)
    content.fill(a, words)
    assert content.wrong_bytes(a, words) == 0
    assert content.wrong_bytes(b, words) > content.BLOCK_BYTES * 0.9, "another block differs almost everywhere"
    words[77] ^= np.uint64(1 << 60)
    assert content.wrong_bytes(a, words) == 1
    content.fill(a, words)
    torn = np.empty_like(words)
    content.fill(b, torn)
    words[-512:] = torn[-512:]
    assert content.wrong_bytes(a, words) > 3000
    content.fill(a, words)
    assert content.wrong_bytes(a, np.roll(words, 1)) > content.BLOCK_BYTES * 0.9
    content.spoil(words)
    assert content.wrong_bytes(a, words) > content.BLOCK_BYTES * 0.9


def test_contents_follow_from_the_key_alone() -> None:
    first, second = (np.empty(content.BLOCK_BYTES // 8, np.uint64) for _ in range(2))
    content.fill(bytes(range(32)), first)
    content._pattern.cache_clear()
    content.fill(bytes(range(32)), second)
    assert (first == second).all()
    assert len(np.unique(first)) > 0.999 * len(first), "no two words of a block are alike"


def test_keys_are_the_published_chain_with_the_demos_identity() -> None:
    keys = content.keys_of((5, 6, 7), 3)
    assert keys == block_keys([5, 6, 7], 1, identity=b"kvtierd-demo/3")
    assert keys[:2] == content.keys_of((5, 6), 3)
    assert keys[2] != content.keys_of((5, 9, 7), 3)[2], "a key stands for the whole prefix"
    assert not set(keys) & set(content.keys_of((5, 6, 7), 4))


def test_an_honest_cache_passes() -> None:
    client = FakeClient()
    first, second = replay(client), replay(client)
    assert (first.saved, sum(first.hits.values())) == (BATCH + 2, 0)
    assert (second.saved, second.hits, second.wrong_bytes) == (0, {Tier.CPU: BATCH + 2}, 0)


@pytest.mark.parametrize(("honest", "copies"), [(False, True), (True, False)])
def test_a_cache_that_hands_out_something_else_does_not(honest: bool, copies: bool) -> None:
    client = FakeClient()
    replay(client)
    client.honest, client.copies = honest, copies
    runner = Replay(client, 1)  # type: ignore[arg-type]
    for _ in range(2):  # a second time, when the buffers have held the right bytes before
        outcome = Outcome(0, 0.0)
        runner.run(REQUEST, outcome)
        assert outcome.wrong_bytes > 0.9 * len(REQUEST.blocks) * content.BLOCK_BYTES
        client.honest = client.copies = True
        runner.run(REQUEST, Outcome(0, 0.0))
        client.honest, client.copies = honest, copies


def test_one_flipped_bit_is_one_wrong_byte() -> None:
    client = FakeClient()
    replay(client)
    assert replay(client, corrupt=True).wrong_bytes == 1
