"""Goal: the chat through vLLM asks what the trace of the same traffic asks, in small, and knows what caches can do for it.

Method: prompts and figures alone; tests/vllm serves some of them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import pytest

chat = pytest.importorskip("loadtest.vllm.chat")


def test_prompts_go_on_from_each_other_and_share_what_they_should() -> None:
    prompts = chat.rag_chat(12, 2, 1, 3)
    assert prompts == chat.rag_chat(12, 2, 1, 3)
    assert [p.at_s for p in prompts] == sorted(p.at_s for p in prompts)
    turns = [p.tokens for p in prompts if p.segments[2][0] == "user 0 0"]
    assert len(turns) > 1
    assert all(after[: len(before)] == before for before, after in itertools.pairwise(turns))
    first = [p.tokens for p in prompts]
    assert all(tokens[:187] == first[0][:187] for tokens in first), "one system prompt for all tenants"
    assert len({tuple(tokens[:1188]) for tokens in first}) == 3, "contexts"
    assert all(len(p.tokens) == p.length for p in prompts)


def recomputed(prompts: list[Any], blocks: int) -> float:
    """Share of the tokens that a plain LRU cache of prefixes leaves to compute."""
    held: OrderedDict[int, None] = OrderedDict()
    computed = 0
    for prompt in prompts:
        tokens = tuple(prompt.tokens)
        keys = [hash(tokens[:end]) for end in range(chat.BLOCK_TOKENS, len(tokens) + 1, chat.BLOCK_TOKENS)]
        hits = next((n for n, key in enumerate(keys) if key not in held), len(keys))
        computed += len(tokens) - hits * chat.BLOCK_TOKENS
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > blocks:
            held.popitem(last=False)
    return computed / sum(p.length for p in prompts)


def test_caches_that_the_traffic_needs() -> None:
    prompts = chat.rag_chat(14, 2, 1, 14)
    needed = chat.needs(prompts, 0.26)
    assert needed.engine < needed.distinct_shared < needed.distinct
    assert recomputed(prompts, needed.engine) == pytest.approx(0.26, abs=0.03)
    assert recomputed(prompts, 1 << 30) == pytest.approx(needed.least_shared)
    assert needed.least_shared < needed.least
