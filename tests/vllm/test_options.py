"""Goal: what vLLM does besides plain generation goes with kvtierd: speculative decoding, KV events, resets and sleep; and so does
the gate, left on as users have it.

Method: one process fills, a fresh one asks again; output is compared with that of a plain engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.daemon import DaemonProcess
from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import NUM_BLOCKS, Report, llm_arguments, prompts, transfer_config, vllm_version
from tests.vllm.steps import FORGET, engine, faulty, generate, settle

PLAIN, REPEATING, LONG = prompts(seed=401), prompts(2, 120, 0, seed=403), prompts(3, 600, 0, seed=407)
GENERATED = 100
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def continued(tokens: list[list[int]]) -> list[dict[str, Any]]:
    """The repeating prompts with most of what was generated for them."""
    return [{"tokens": prompt["tokens"] + more[:80]} for prompt, more in zip(REPEATING, tokens, strict=True)]


@pytest.fixture(scope="module")
def daemon(module_daemons: Daemons) -> DaemonProcess:
    return module_daemons()


@pytest.fixture(scope="module")
def arguments(models: Path, daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of each engine."""
    llama, folder = models / "llama", tmp_path_factory.mktemp("events")
    sockets = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    return {
        "plain": llm_arguments(llama),
        "plain repeating": llm_arguments(models / "repeating"),
        "speculative": llm_arguments(
            models / "repeating", transfer_config(daemon.address, save_decode=True), speculative_config=SPECULATIVE
        ),
        "gate": llm_arguments(llama, transfer_config(daemon.address, tenant="gate", gate=True)),
        "events": llm_arguments(
            llama,
            transfer_config(daemon.address, tenant="events"),
            kv_events_config={"enable_kv_cache_events": True, "publisher": "zmq"} | sockets,
        ),
        "reset": llm_arguments(llama, faulty(daemon, {"save_delay_s": 0.5}, tenant="reset")),
    }


@pytest.fixture(scope="module")
def first(arguments: dict[str, dict[str, Any]], daemon: DaemonProcess, module_engines: Engines) -> Report:
    """Fills, and reads the KV events that an engine has published."""
    read = {"do": "events", "name": "events", "endpoint": arguments["events"]["kv_events_config"]["replay_endpoint"]}
    wanted = {
        "plain": [generate("short", PLAIN), generate("long", LONG)],
        "plain repeating": [generate("ask", REPEATING, max_tokens=GENERATED)],
        "gate": [generate("ask", LONG), settle(daemon, blocks=54)],
        "reset": [
            generate("ask", PLAIN),
            {"do": "try_reset", "name": "reset"},
            generate("after", PLAIN, one_by_one=False),
            {"do": "sleep", "level": 0 if vllm_version() < (0, 32) else 1},
            generate("awake", PLAIN),
            settle(daemon, blocks=64),
            FORGET,
            generate("loaded", PLAIN),
            settle(daemon, "settle at last"),
        ],
        "events": [generate("ask", PLAIN), settle(daemon, blocks=74), {"do": "nudge", "seconds": 0.5}, read],
        # The last one: vLLM makes no other engine in a process after one that guesses.
        "speculative": [generate("ask", REPEATING, max_tokens=GENERATED), settle(daemon, blocks=86)],
    }
    return module_engines.run([engine(name, arguments[name], *steps) for name, steps in wanted.items()])


@pytest.fixture(scope="module")
def second(arguments: dict[str, dict[str, Any]], first: Report, module_engines: Engines) -> Report:
    """Asks again."""
    wanted = {"gate": LONG, "speculative": continued(first["plain repeating"].tokens("ask"))}
    return module_engines.run([engine(name, arguments[name], generate("ask", asked)) for name, asked in wanted.items()])


@pytest.mark.skipif(vllm_version() < (0, 32), reason="no speculative decoding in the CPU build of this vLLM")
def test_speculative_decoding(first: Report, second: Report) -> None:
    """Generated blocks are saved, of confirmed tokens only: a fresh engine goes on from them as one that had computed them."""
    filled, again, plain = first["speculative"], second["speculative"], first["plain repeating"].tokens("ask")
    assert filled.tokens("ask") == plain
    drafts = filled.metric("ask", "vllm:spec_decode_num_draft_tokens")
    accepted = filled.metric("ask", "vllm:spec_decode_num_accepted_tokens")
    assert 0 < accepted < drafts, "nothing was accepted, or nothing was refused"
    assert again.cached("ask") == [192, 192]
    assert again.tokens("ask") == [tokens[80:96] for tokens in plain]
    assert again.metric("ask", "vllm:kvtierd_loads{result=ok}") == 2


def test_gate_as_it_is_by_default(first: Report, second: Report) -> None:
    """A tiny model computes faster than anything loads, once that is measured; the first hit after a restart is loaded."""
    again = second["gate"]
    assert again.tokens("ask") == first["gate"].tokens("ask") == first["plain"].tokens("long")
    loaded, slower = (again.metric("ask", f"vllm:kvtierd_loads{{result={result}}}") for result in ("ok", "slower"))
    assert loaded >= 1
    assert loaded + slower == len(LONG)
    assert again.external("ask") == 576 * loaded


def test_events_of_saved_blocks_are_published(first: Report) -> None:
    """Every whole block that the engine tells of its own cache is told of kvtierd's too, once, by the same hash."""
    assert first["events"].tokens("ask") == first["plain"].tokens("short")
    told = [event for event in first["events"].results["events"] if event["kind"] == "BlockStored"]
    ours, own = ([block for event in told if event["medium"] == medium for block in event["blocks"]] for medium in ("CPU", "GPU"))
    assert len(ours) == len(set(ours)) == 10
    assert set(ours) == set(own)


def test_reset_and_sleep_right_after_a_request(first: Report) -> None:
    """Saves still hold blocks then, and nobody takes a step for them: a reset, and the sleep that begins with one, have them end.

    An older vLLM keeps the request's blocks itself meanwhile, and refuses; nothing is lost, wrong or held for ever there either.
    """
    done = first["reset"]
    assert done.results["reset"] or vllm_version() < (0, 32)
    for step in ("ask", "after", "awake", "loaded"):
        assert done.tokens(step) == first["plain"].tokens("short"), step
    assert done.cached("loaded") == [192] * 3
    assert done.metric("settle at last", "free_blocks") == NUM_BLOCKS - 1
    assert done.metric("settle at last", "vllm:kvtierd_hook_failures") == 0
