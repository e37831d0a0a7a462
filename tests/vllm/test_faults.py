"""Goal: whatever happens to the daemon, its disk or a copy, every request ends with the tokens of an engine without kvtierd, and
the cache comes back by itself.

Method: engines stop at barriers while the test starts, kills, hangs or damages the daemon. No check is on time: an engine that
waits for a hung daemon never reaches the barrier at which the test lets the daemon go on.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.cases import CASES
from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import NUM_BLOCKS, EngineReport, llm_arguments, prompts, transfer_config
from tests.vllm.steps import (
    FORGET,
    MAX_TOKENS,
    Baseline,
    attach,
    barrier,
    engine,
    faulty,
    generate,
    segments,
    settle,
    tell,
    to_nvme,
    wait_until,
)

A, B, C, D = (prompts(seed=seed) for seed in (41, 43, 47, 53))
Expect = Callable[[EngineReport, str, list[dict[str, Any]]], None]


@pytest.fixture
def expect(models: Path, baseline: Baseline) -> Expect:
    """Checks that a step gave the tokens of an engine without kvtierd, and that no request failed."""
    everything = A + B + C + D
    right = dict(zip(map(repr, everything), baseline(llm_arguments(models / "llama"), everything, MAX_TOKENS), strict=True))

    def check(report: EngineReport, step: str, wanted: list[dict[str, Any]]) -> None:
        assert report.tokens(step) == [right[repr(prompt)] for prompt in wanted], step
        assert report.finish(step) == ["length"] * len(wanted), step

    return check


def test_absent_killed_and_hung_daemon(models: Path, daemons: Daemons, engines: Engines, expect: Expect) -> None:
    """One engine lives through all of it: no daemon at its start, one that appears, is killed, comes back, hangs and goes on."""
    daemon = daemons(start=False)
    steps = [
        generate("absent", A),
        barrier("start"),
        attach(daemon),
        generate("save", B),
        settle(daemon),
        FORGET,
        generate("found", B),
        barrier("kill"),
        FORGET,
        generate("dead", B + C),
        barrier("restart"),
        attach(daemon),
        FORGET,
        generate("back", B),
        barrier("hang"),
        FORGET,
        generate("hung", B + D),
        generate("hung at once", A + B + C + D, one_by_one=False),
        barrier("go on"),
        attach(daemon),
        FORGET,
        generate("after", B),
    ]
    transfer = transfer_config(daemon.address, lookup_timeout_ms=500, save_timeout_ms=500)
    process = engines.start([engine("engine", llm_arguments(models / "llama", transfer), *steps)])
    process.wait_for("start")
    daemon.start()
    process.go()
    process.wait_for("kill")
    to_nvme(daemon)
    daemon.kill()
    process.go()
    process.wait_for("restart")
    daemon.start()
    process.go()
    process.wait_for("hang")
    os.kill(daemon.pid, signal.SIGSTOP)
    process.go()
    try:
        process.wait_for("go on")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    process.go()
    done = process.finish().only
    for step, wanted in (("absent", A), ("save", B), ("found", B), ("dead", B + C), ("back", B), ("hung", B + D), ("after", B)):
        expect(done, step, wanted)
    expect(done, "hung at once", A + B + C + D)
    assert done.external("absent") == done.external("save") == 0
    assert done.external("found") > 0
    assert done.external("dead") == done.external("found")
    assert done.external("back") > done.external("dead")
    assert done.metric("back", "vllm:kvtierd_hit_tokens{tier=nvme}") > 0
    assert done.external("hung") == done.external("back")
    assert done.external("after") > done.external("hung at once")
    assert done.metric("after", "vllm:kvtierd_hook_failures") == 0


def test_daemon_killed_while_copies_are_under_way(models: Path, daemons: Daemons, engines: Engines, expect: Expect) -> None:
    daemon = daemons()
    steps = [
        generate("save", B),
        settle(daemon),
        FORGET,
        tell("loading"),
        generate("loading", B, one_by_one=False),
        barrier("restart"),
        attach(daemon),
        tell("saving"),
        generate("saving", C, one_by_one=False),
        barrier("restart again"),
        attach(daemon),
        FORGET,
        generate("after", B + C),
        settle(daemon, "settle at last"),
    ]
    transfer = faulty(daemon, {"load_delay_s": 0.6, "save_delay_s": 0.3})
    process = engines.start([engine("engine", llm_arguments(models / "llama", transfer), *steps)])
    for told, reached in (("loading", "restart"), ("saving", "restart again")):
        process.wait_for(told)
        time.sleep(0.4)
        daemon.kill()
        process.wait_for(reached)
        daemon.start()
        process.go()
    done = process.finish().only
    for step, wanted in (("save", B), ("loading", B), ("saving", C), ("after", B + C)):
        expect(done, step, wanted)
    assert done.metric("settle at last", "free_blocks") == NUM_BLOCKS - 1
    assert done.results["settle at last"]["quiet"]
    assert done.metric("after", "vllm:kvtierd_hook_failures") == 0


def test_failed_and_slow_loads_are_recomputed(models: Path, daemons: Daemons, engines: Engines, expect: Expect) -> None:
    """Every load fails, the first one fails, or takes longer than allowed."""
    daemon = daemons()

    def asking(name: str, transfer: dict[str, Any], **more: Any) -> dict[str, Any]:
        return engine(name, llm_arguments(models / "llama", transfer), generate("ask", A, **more), settle(daemon))

    right = transfer_config(daemon.address)
    report = engines.run(
        [
            asking("fill", right),
            asking("all fail", faulty(daemon, {"load": "raise"})),
            asking("all fail at once", faulty(daemon, {"load": "raise"}), one_by_one=False),
            asking("first fails", faulty(daemon, {"load": "first"})),
            asking("too slow", faulty(daemon, {"load_delay_s": 0.5}, load_timeout_ms=100), one_by_one=False),
            asking("right", right),
        ]
    )
    for name in report.engines:
        expect(report[name], "ask", A)
        assert report[name].metric("settle", "free_blocks") == NUM_BLOCKS - 1, name
    for name in ("all fail", "all fail at once", "first fails", "too slow"):
        assert report[name].metric("ask", "vllm:kvtierd_loads{result=failed}") > 0, name
    assert report["all fail"].metric("ask", "vllm:kvtierd_loads{result=ok}") == 0
    assert report["first fails"].metric("ask", "vllm:kvtierd_loads{result=ok}") > 0
    assert report["right"].external("ask") > 0


@pytest.mark.skipif("gemma3" not in CASES, reason="this vLLM cannot recover a failed load of several KV cache groups")
def test_failed_load_of_two_kv_cache_groups_is_recomputed(
    models: Path, daemons: Daemons, engines: Engines, baseline: Baseline
) -> None:
    daemon = daemons()
    wanted = prompts(2, 300, 192, seed=59)
    right = llm_arguments(models / "gemma3", transfer_config(daemon.address))
    wrong = llm_arguments(models / "gemma3", faulty(daemon, {"load": "raise"}))
    report = engines.run(
        [
            engine("fill", right, generate("ask", wanted), settle(daemon)),
            engine("fail", wrong, generate("ask", wanted, one_by_one=False), settle(daemon)),
            engine("right", right, generate("ask", wanted), settle(daemon)),
        ]
    )
    plain = baseline(right, wanted, MAX_TOKENS)
    for name in report.engines:
        assert report[name].tokens("ask") == plain, name
        assert report[name].metric("settle", "free_blocks") == NUM_BLOCKS - 1, name
    assert report["fail"].metric("ask", "vllm:kvtierd_loads{result=failed}") > 0
    assert report["right"].cached("ask") == [288, 288]


def test_requests_aborted_while_they_load(models: Path, daemons: Daemons, engines: Engines, expect: Expect) -> None:
    daemon = daemons()
    steps = [
        generate("save", A),
        settle(daemon),
        FORGET,
        {"do": "abort", "name": "aborted", "prompts": A, "steps": 3},
        {"do": "abort", "name": "aborted again", "prompts": A, "steps": 40},
        {"do": "abort", "name": "aborted at once", "prompts": A, "steps": 0},
        generate("after", A),
        settle(daemon, "settle at last"),
    ]
    transfer = faulty(daemon, {"load_delay_s": 0.3, "save_delay_s": 0.1})
    done = engines.run([engine("engine", llm_arguments(models / "llama", transfer), *steps)]).only
    expect(done, "after", A)
    assert done.metric("settle at last", "free_blocks") == NUM_BLOCKS - 1
    assert done.results["settle at last"]["quiet"]
    assert done.metric("after", "vllm:kvtierd_hook_failures") == 0


def test_damaged_blocks_on_nvme_are_misses(models: Path, daemons: Daemons, engines: Engines, expect: Expect) -> None:
    """Bytes are flipped all over the segments while the daemon is down; the engine is running all the time."""
    daemon = daemons(nvme={"segment": "4MiB"})
    steps = [
        generate("save", A + B),
        settle(daemon, blocks=20),
        barrier("damage"),
        attach(daemon),
        FORGET,
        generate("after", A + B),
        settle(daemon, "settle again", blocks=20),
        FORGET,
        generate("saved anew", A + B),
    ]
    llm = llm_arguments(models / "llama", transfer_config(daemon.address))
    process = engines.start([engine("engine", llm, *steps)])
    process.wait_for("damage")
    assert daemon.stop() == 0
    flip_bytes(daemon.folder / "nvme")
    daemon.start()
    process.go()
    done = process.finish().only
    for step in ("save", "after", "saved anew"):
        expect(done, step, A + B)
    assert daemon.status().counters["kvtierd_checksum_failures_total"] > 0
    assert done.external("saved anew") > done.external("after")


def flip_bytes(folder: Path) -> None:
    """Flip a bit in every few pages of each segment."""
    generator = random.Random(61)
    paths = segments(folder)
    assert paths
    for path in paths:
        raw = bytearray(path.read_bytes())
        for start in range(0, len(raw), 16384):
            raw[start + generator.randrange(16384)] ^= 0x10
        path.write_bytes(raw)


def test_tiers_that_are_much_too_small(models: Path, daemons: Daemons, engines: Engines, expect: Expect) -> None:
    """Blocks of 32 KiB by the dozen and room for a few: saves are refused or evict others, nothing else happens."""
    daemon = daemons(cpu={"capacity": "2MiB", "extent": "1MiB"}, nvme={"capacity": "4MiB", "segment": "1MiB"})
    filler = prompts(12, 400, 0, seed=67)
    everything = A + B + C + D
    steps = [
        generate("first", everything, one_by_one=False),
        generate("filler", filler, one_by_one=False),
        FORGET,
        generate("second", everything, one_by_one=False),
        settle(daemon),
    ]
    llm = llm_arguments(models / "llama", transfer_config(daemon.address))
    done = engines.run([engine("engine", llm, *steps)]).only
    expect(done, "first", everything)
    expect(done, "second", everything)
    assert done.metric("settle", "free_blocks") == NUM_BLOCKS - 1
    for tier in daemon.status().tiers:
        assert tier.reserved_bytes <= tier.capacity_bytes


def test_engine_killed_while_it_saves(models: Path, daemons: Daemons, engines: Engines, expect: Expect) -> None:
    """What it had not committed is nobody's; the next engine is served as if the dead one had never been."""
    daemon = daemons()
    steps = [tell("saving"), generate("lost", A + B + C, one_by_one=False), {"do": "nudge", "seconds": 60}]
    llm = llm_arguments(models / "llama", faulty(daemon, {"save_delay_s": 0.5}))
    process = engines.start([engine("engine", llm, *steps)])
    process.wait_for("saving")
    wait_until(lambda: any(session.tickets for session in daemon.status().sessions), "a save under way")
    process.kill()
    wait_until(lambda: not daemon.status().sessions, "no session of a dead engine")
    assert sum(tier.pinned_bytes for tier in daemon.status().tiers) == 0
    steps = [generate("first", A + B + C), settle(daemon), FORGET, generate("second", A + B + C)]
    llm = llm_arguments(models / "llama", transfer_config(daemon.address))
    done = engines.run([engine("engine", llm, *steps)]).only
    expect(done, "first", A + B + C)
    expect(done, "second", A + B + C)
    assert done.cached("second") == [192] * 9
