"""Goal: each spelling of a capacity means what its help says, and others are refused with what to write. Method: a table."""

from __future__ import annotations

import pytest

from kvtierd.model import Tier
from kvtierd.replay.capacity import CapacityError, parse_capacity

H, C, N = Tier.HBM, Tier.CPU, Tier.NVME


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("1%", {C: 1828}),
        ("20 %", {C: 36558}),
        ("0.5%", {C: 914}),
        ("1:5:40@1%", {H: 40, C: 199, N: 1589}),
        ("1:5:40@20%", {H: 795, C: 3974, N: 31789}),
        ("1:9@100%", {C: 18279, N: 164511}),
        ("640,3200,32768", {H: 640, C: 3200, N: 32768}),
        ("10,20", {C: 10, N: 20}),
        ("7", {C: 7}),
    ],
)
def test_spellings(text: str, blocks: dict[Tier, int]) -> None:
    assert parse_capacity(text, 182_790) == blocks


@pytest.mark.parametrize(
    "text",
    ["", "%", "x%", "1:2", "1:2@", "1:2@20", "1:2:3:4@20%", "1,2,3,4", "0", "1,0,5", "-3", "5%5%", "1:0@5%", "0:0@5%", "0%", "1e3%",
     "99999%", "0.0001%", "1:x@5%", "١٢"],
)  # fmt: skip
def test_others_are_refused(text: str) -> None:
    with pytest.raises(CapacityError, match=r"write|percentage"):
        parse_capacity(text, 1000)
