"""How large the tiers of a simulation are: ``5%``, ``1:5:40@20%`` or ``640,3200,32768``."""

from __future__ import annotations

import re
from typing import Final

from kvtierd.model import Tier

MAX_BLOCKS: Final = 1 << 40
SPELLINGS: Final = '"5%" of the distinct blocks, "1:5:40@20%" for tiers in that proportion, or blocks a tier: "640,3200,32768"'
_TIERS: Final = {1: (Tier.CPU,), 2: (Tier.CPU, Tier.NVME), 3: (Tier.HBM, Tier.CPU, Tier.NVME)}
_NUMBER: Final = r"[0-9]+(?:\.[0-9]+)?"


class CapacityError(ValueError):
    """A capacity that cannot be. The text says what to write."""


def parse_capacity(text: str, distinct: int) -> dict[Tier, int]:
    """Blocks of each tier. One number is CPU memory, two are CPU memory and NVMe, three are HBM, CPU memory and NVMe.

    Shares are rounded to whole blocks; of a proportion, the last tier gets what is left of the sum.

    Args:
        text: the spelling, see ``SPELLINGS``.
        distinct: distinct blocks of the trace, of which a percentage is a part.

    Raises:
        CapacityError: the text is none of these, or a tier would hold no block.
    """
    text = text.replace(" ", "")
    if "@" in text or text.endswith("%"):
        weights_text, _, percent_text = text.rpartition("@")
        weights = [_number(part, text) for part in weights_text.split(":")] if weights_text else [1.0]
        if not percent_text.endswith("%"):
            raise CapacityError(f"{text!r} is not a capacity; write {SPELLINGS}")
        percent = _number(percent_text[:-1], text)
        if not 0 < percent <= 10_000:
            raise CapacityError(f"{text!r}: the percentage lies above 0 up to 10,000")
        blocks = _shared(round(distinct * percent / 100), weights)
    else:
        blocks = [int(part) if part.isascii() and part.isdigit() else -1 for part in text.split(",")]
    tiers = _TIERS.get(len(blocks))
    if tiers is None or any(not 1 <= n <= MAX_BLOCKS for n in blocks):
        raise CapacityError(f"{text!r} is no capacity of one to three tiers of at least one block each; write {SPELLINGS}")
    return dict(zip(tiers, blocks, strict=True))


def _number(text: str, whole: str) -> float:
    if not re.fullmatch(_NUMBER, text):
        raise CapacityError(f"{whole!r} is not a capacity; write {SPELLINGS}")
    return float(text)


def _shared(total: int, weights: list[float]) -> list[int]:
    parts = [round(total * weight / sum(weights)) if sum(weights) else 0 for weight in weights[:-1]]
    return [*parts, total - sum(parts)]
