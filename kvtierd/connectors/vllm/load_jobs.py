"""What a load copies: the slots and blocks of a promised hit, and how much that is."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvtierd.connectors.vllm.context import Context
from kvtierd.connectors.vllm.identity import EnginePlan, GroupPlan
from kvtierd.connectors.vllm.lookups import Lookup
from kvtierd.connectors.vllm.metadata import Part
from kvtierd.model import Tier


def part(ctx: Context, group: GroupPlan, lookup: Lookup, block_ids: list[int], start: int, last: int) -> Part:
    """Slots and blocks of one group for tokens from ``start`` up to chunk ``last``.

    Raises:
        LookupError: a block that has to be filled was not fetched.
    """
    ready = lookup.ready(group.index)
    size, shards = group.blocks_per_chunk, ctx.plan.shards(group)
    first_block = start // group.block_tokens
    ids = np.array(array("q", block_ids[: last * size]))
    if len(ids) < last * size:
        raise LookupError(f"group {group.index} has {len(ids)} blocks, and {last * size} are to be filled")
    takes_part = ids != ctx.null_block
    takes_part[:first_block] = False
    if takes_part[: ready.first * size].any() or (ready.wanted and not ready.token):
        raise LookupError(f"group {group.index} needs blocks that were not fetched")
    ids[~takes_part] = -1
    count = last - ready.first
    slots = np.frombuffer(ready.slots[: count * shards], np.int64)
    return Part(group.index, ready.token, slots, ids[ready.first * size :])


def tokens_by_tier(plan: EnginePlan, lookup: Lookup, tokens: int, last: int) -> dict[str, int]:
    """Tokens of a load by the tier that they were on; of several groups, those that attend to everything decide."""
    group = next((g for g in plan.groups if not g.window), plan.groups[0])
    ready = lookup.ready(group.index)
    found = ready.tokens_by_tier(plan.chunk_tokens, max(0, last - ready.first))
    main = max(found, key=lambda name: found[name], default=Tier.CPU.name.lower())
    found[main] = found.get(main, 0) + tokens - sum(found.values())  # a first chunk that the engine holds part of, or a window
    return {name: n for name, n in found.items() if n > 0}


def unfilled(ctx: Context, block_ids: Sequence[Sequence[int]], external_tokens: int) -> list[int]:
    """The last blocks of a request, which were to be filled. Those before are the engine's own hit, and may be others' too."""
    return [
        block
        for group, ids in zip(ctx.plan.groups, block_ids, strict=False)
        for block in ids[-external_tokens // group.block_tokens :]
        if block != ctx.null_block
    ]


def load_bytes(plan: EnginePlan, local_tokens: int, hit_tokens: int) -> tuple[int, int]:
    """Bytes that a load beyond ``local_tokens`` takes: as they are stored, and as all ranks copy them."""
    stored = copied = 0
    for group in plan.groups:
        first = max(local_tokens, group.first_needed(hit_tokens)) // group.block_tokens
        blocks = max(0, hit_tokens // group.block_tokens - first)
        nbytes = blocks * (plan.block_bytes(group.pool) // group.blocks_per_chunk)
        stored, copied = stored + nbytes, copied + nbytes * plan.ranks // plan.shards(group)
    return stored, copied
