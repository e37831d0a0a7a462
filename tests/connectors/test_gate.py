"""Goal: hits are computed only where that is measured to be faster, and whatever was measured once, the gate opens again.

Method: speeds are given, with the sizes of a model of 8 billion parameters on a large GPU.
"""

from __future__ import annotations

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm.gate import ENOUGH, MEASUREMENTS, PROBE_EVERY, Gate
from kvtierd.connectors.vllm.identity import EnginePlan, GroupPlan
from kvtierd.connectors.vllm.load_jobs import load_bytes
from kvtierd.model import Namespace
from tests.connectors.parts import plan

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
SESSION = {b"s"}
KV = 128 << 10
"""Bytes of a token."""
PREFILL = 20_000
"""Tokens a second."""


def gate(copy_s_per_gib: float = 0.04, overhead_s: float = 0.01, count: int = ENOUGH) -> Gate:
    made = Gate()
    for _ in range(20):
        made.step(8192, 8192 / PREFILL)
    for _ in range(count + 1):
        made.load(SESSION, 1 << 30, copy_s_per_gib, copy_s_per_gib + overhead_s)
    return made


def worth(made: Gate, tokens: int) -> bool:
    return made.worth(tokens, tokens * KV)


def test_everything_is_worth_it_until_both_speeds_are_known() -> None:
    made = Gate()
    for _ in range(ENOUGH + 1):
        made.load(SESSION, 1 << 30, 100.0, 200.0)
    assert worth(made, 10)
    made = gate(copy_s_per_gib=100.0, count=ENOUGH - 1)
    assert worth(made, 10)
    made.load(SESSION, 1 << 30, 100.0, 100.0)
    assert not worth(made, 10)


def test_long_hits_are_loaded_and_those_of_a_few_tokens_computed() -> None:
    made = gate()
    assert [worth(made, tokens) for tokens in (100, 1000, 65_536)] == [False, True, True]
    slow = gate(copy_s_per_gib=10.0)
    assert not worth(slow, 65_536)


def test_the_first_load_of_a_session_does_not_count() -> None:
    """It joins, and maps and pins fresh memory; that says nothing about the next."""
    made = Gate()
    for _ in range(20):
        made.step(8192, 8192 / PREFILL)
    for n in range(100):
        made.load({b"%d" % n}, 2 << 20, 10.0, 10.0)
    assert worth(made, 65_536)
    assert len(made._sessions) <= 64
    for _ in range(ENOUGH):
        made.load({b"99", b"98"}, 2 << 20, 0.0002, 0.001)
    assert worth(made, 65_536)
    made.load({b"99", b"another"}, 2 << 20, 10.0, 10.0)
    assert worth(made, 65_536)


def test_one_slow_load_does_not_shut_it() -> None:
    made = gate()
    made.load(SESSION, 2 << 20, 5.0, 7.0)
    assert worth(made, 1000)


@pytest.mark.parametrize(("copy_s", "overhead_s"), [(20.0, 0.01), (0.04, 1.9), (20.0, 30.0)])
def test_it_opens_again_when_loads_are_fast_again(copy_s: float, overhead_s: float) -> None:
    """Speeds are measured by loads only, so some have to be let through."""
    made = gate(copy_s, overhead_s, MEASUREMENTS)
    assert not worth(made, 20_000)
    loads = asked = 0
    while loads < 100 and asked < 10 * MEASUREMENTS * PROBE_EVERY:
        asked += 1
        if worth(made, 20_000):
            loads += 1
            nbytes = 20_000 * KV
            made.load(SESSION, nbytes, 0.04 * nbytes / (1 << 30), 0.04 * nbytes / (1 << 30) + 0.01)
    assert loads == 100
    assert asked <= MEASUREMENTS * PROBE_EVERY + 100


def test_it_stays_shut_where_loading_is_slow() -> None:
    made = gate(copy_s_per_gib=20.0)
    assert sum(worth(made, 20_000) for _ in range(10 * PROBE_EVERY)) == 10


def test_reading_counts_for_what_is_on_nvme() -> None:
    made = gate()
    tokens = 20_000
    assert made.worth_reading(tokens, tokens * KV, tokens * KV), "not known yet"
    for _ in range(ENOUGH):
        made.read(1 << 30, 2.0)
    assert not made.worth_reading(tokens, tokens * KV, tokens * KV)
    assert worth(made, tokens)
    for _ in range(MEASUREMENTS):
        made.read(1 << 30, 0.1)
    assert made.worth_reading(tokens, tokens * KV, tokens * KV)
    assert not gate(copy_s_per_gib=20.0).worth(tokens, tokens * KV)


def test_the_first_hit_on_nvme_says_how_long_the_next_will_take() -> None:
    """Of an engine that has computed one step and loaded nothing: a second hit is not read in vain."""
    made = Gate()
    tokens = 20_000
    made.step(8192, 8192 / PREFILL)
    assert made.worth_reading(tokens, tokens * KV, tokens * KV)
    made.read(1 << 30, 2.0)
    assert not made.worth_reading(tokens, tokens * KV, tokens * KV)
    made.read(1 << 30, 0.1)
    assert made.worth_reading(tokens, tokens * KV, tokens * KV), "of the first few the best counts"


def test_small_and_impossible_measurements_are_left_out() -> None:
    made = gate()
    for _ in range(MEASUREMENTS):
        made.step(10, 1000.0)
        made.step(8192, 0.0)
        made.load(SESSION, 1000, 50.0, 50.01)
        made.load(SESSION, 1 << 30, 0.0, 0.01)
        made.read(1000, 50.0)
        made.read(1 << 30, 0.0)
    assert worth(made, 65_536)
    assert made.recompute_s(PREFILL) == pytest.approx(1.0)
    assert made.read_bytes_per_s.value == 0


# ---- how much a load is


def test_bytes_are_those_of_blocks_that_are_loaded() -> None:
    whole = plan(ranks=2)  # 8192 bytes for 32 tokens, in 2 blocks
    assert load_bytes(whole, 0, 320) == (10 * 8192, 10 * 8192)
    assert load_bytes(whole, 48, 320) == (17 * 4096, 17 * 4096)
    hybrid = plan(windows=(0, 40))
    blocks = 1600 // 16 + (1600 - (1600 - 39) // 16 * 16) // 16
    assert load_bytes(hybrid, 0, 1600) == (blocks * 2048, blocks * 2048)


def test_ranks_that_hold_the_same_each_copy_all_of_it() -> None:
    group = GroupPlan(0, "mla", 16, 0, 2, 0)
    made = EnginePlan((group,), 32, (Namespace(shard_bytes=(4096,)),), (True,), 4)
    assert load_bytes(made, 0, 64) == (8192, 4 * 8192)
