"""Goal: what the daemon's policy goes by reaches it through the connector, which saves a request in portions and only what is new:
that a conversation goes on, that blocks are used again, and which of a prefix is its end.

Method: small engines at daemons whose memory is full after a few requests; a second engine tells by its hits what has been kept.
The last tests look at the calls themselves, with stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.engine_cases import Engines, fresh, right
from tests.connectors.parts import CHUNK as PART_CHUNK
from tests.connectors.parts import request, state
from tests.connectors.small_engine import CHUNK
from tests.connectors.test_saves import Set

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports

CAPACITY = 128
"""Chunks of the small engines in 1 MiB."""
LONG = 14
"""Chunks of a long request."""


@pytest.fixture
def small_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    made: list[DaemonProcess] = []

    def make(**policy: Any) -> DaemonProcess:
        cpu = {"capacity": "1MiB", "extent": "1MiB", "prefault": False}
        made.append(DaemonProcess(tmp_path / f"d{len(made)}", {"cpu": cpu, "nvme": {"capacity": "0"}, "policy": policy}))
        return made[-1].start()

    yield make
    for daemon in made:
        daemon.kill()


def others(engine: Any, count: int) -> None:
    """Save so many chunks of other requests."""
    for number in range(0, count, LONG):
        engine.generate(f"other{number}", fresh(min(LONG, count - number) * CHUNK), 1, params={"kvtierd.skip_load": True})
        engine.settle()


def hit(engines: Engines, daemon: DaemonProcess, tokens: list[int]) -> int:
    """Chunks of a prompt that another engine finds."""
    other = engines(daemon.address)
    other.generate("again", tokens, 1)
    right(other, "again")
    return int(other.counts["hit_tokens|cpu"]) // CHUNK


def test_a_prefix_saved_in_portions_loses_its_end_first(engines: Engines, small_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = small_daemon()
    engine, tokens = engines(daemon.address, blocks=256, budget=256), fresh(LONG * CHUNK)
    engine.generate("long", tokens, 1)
    engine.settle()
    assert engine.counts["saves|ok"] == LONG
    others(engine, CAPACITY - LONG + 4)
    assert hit(engines, daemon, tokens) == LONG - 4


@pytest.mark.parametrize("loads", [False, True], ids=["the engine holds the first turn", "it is loaded"])
def test_a_conversation_that_goes_on_gets_the_turn_bonus(
    loads: bool, engines: Engines, small_daemon: Callable[..., DaemonProcess]
) -> None:
    daemon = small_daemon(turn_bonus="1h")
    engine, first = engines(daemon.address, blocks=256), fresh(3 * CHUNK)
    engine.generate("first", first, 1)
    engine.settle()
    if loads:
        engine.forget()
    second = first + fresh(6 * CHUNK)
    engine.generate("second", second, 1)
    engine.settle()
    assert engine.counts["loads|ok"] == loads and engine.counts["saves|ok"] == 9
    once = fresh(LONG * CHUNK)
    engine.generate("once", once, 1)
    engine.settle()
    others(engine, CAPACITY)
    assert (hit(engines, daemon, second), hit(engines, daemon, once)) == (9, 0)


# ---- the calls themselves


@pytest.fixture
def made() -> Iterator[Callable[..., Set]]:
    sets: list[Set] = []

    def make(**more: Any) -> Set:
        sets.append(Set(**{"max_held_fraction": 0.9, "blocks": 200} | more))
        return sets[-1]

    yield make
    for one in sets:
        one.copied(one.saves.jobs())
        one.parts.calls.run()
        one.saves.jobs()
        one.nothing_is_left()


def told(one: Set) -> list[tuple[int, int, int]]:
    """Of each call: keys, keys before them, and what was matched."""
    return [(len(keys), before, matched) for keys, (before, matched) in zip(one.client.asked, one.client.portions, strict=True)]


def test_only_the_portion_that_ends_the_prompt_names_those_before(made: Callable[..., Set]) -> None:
    one = made()
    one.one.matched_tokens = PART_CHUNK + 5
    for computed in (2 * PART_CHUNK, 3 * PART_CHUNK, 160):
        one.collect(computed)
        one.parts.calls.run()
    assert told(one) == [(2, 0, 1), (1, 0, 1), (2, 3, 1)]


def test_generated_blocks_name_those_before(made: Callable[..., Set]) -> None:
    one = made(save_decode=True)
    one.one.matched_tokens = 0
    one.collect(160)
    one.one.request.append_output_token_ids(list(range(PART_CHUNK + 1)))
    one.table[0] += one.parts.table(2)
    one.collect(160 + PART_CHUNK)
    one.parts.calls.run()
    assert told(one) == [(5, 0, 0), (1, 5, 0)]


def test_a_limit_on_what_is_saved_ends_it_too(made: Callable[..., Set]) -> None:
    one = made()
    limited = state(request(), max_save_tokens=3 * PART_CHUNK)
    for computed in (2 * PART_CHUNK, 160):
        one.collect(computed, limited)
        one.parts.calls.run()
    assert told(one) == [(2, 0, 0), (1, 2, 0)]


def test_of_several_groups_those_without_a_window_name_what_was_before(made: Callable[..., Set]) -> None:
    one = made(windows=(0, 2 * PART_CHUNK))
    for computed in (2 * PART_CHUNK, 160):
        one.collect(computed)
        one.parts.calls.run()
    assert [before for _, before, _ in told(one)] == [0, 0, 2, 0]


def test_after_a_reset_the_old_names_are_not_told(made: Callable[..., Set]) -> None:
    one = made()
    one.collect(2 * PART_CHUNK)
    one.parts.ctx.keys.new_epoch()
    one.saves.forget()
    one.one.names.clear()
    one.one.next_chunk = one.one.useless = 0
    one.collect(160)
    one.parts.calls.run()
    assert told(one)[-1] == (5, 0, 0)
