"""How many tokens one block of kvtierd holds, worked out from sizes alone, so that a plan can be made without an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MIN_SHARD_BYTES: Final = 4 << 20
"""Smaller ones cost more per token in every step of the way than a prefix that is cut a few tokens earlier."""
MAX_AUTO_CHUNK_TOKENS: Final = 256


@dataclass(frozen=True)
class GroupSize:
    """One KV cache group on one rank.

    Attributes:
        block_tokens: tokens in one of the engine's blocks.
        block_bytes: bytes of one of the engine's blocks, all layers of the group.
        window: as in ``GroupPlan``.
    """

    block_tokens: int
    block_bytes: int
    window: int = 0


@dataclass(frozen=True)
class ChunkChoice:
    """Tokens in a block of kvtierd.

    Attributes:
        tokens: what is chosen where nobody asks for another.
        unit: every choice is a multiple of this.
        widest: most tokens that a chunk may have and still be saved when it is computed in several steps.
        narrowest: the smallest window, 0 without one.
    """

    tokens: int
    unit: int
    widest: int
    narrowest: int


def choose_chunk(groups: Sequence[GroupSize]) -> ChunkChoice:
    """The choice for an engine with these groups, of all ranks; there is at least one."""
    unit = math.lcm(*(g.block_tokens for g in groups))
    # Blocks leave a window while the rest of a wider chunk is still to be computed, and what has left cannot be saved.
    narrowest = min((g.window for g in groups if g.window), default=0)
    widest = max(unit, (narrowest or MAX_AUTO_CHUNK_TOKENS) // unit * unit)
    wanted = math.ceil(MIN_SHARD_BYTES / min(g.block_bytes / g.block_tokens for g in groups))
    tokens = max(unit, min(-(-wanted // unit) * unit, MAX_AUTO_CHUNK_TOKENS // unit * unit, widest))
    return ChunkChoice(tokens, unit, widest, narrowest)
