"""Goal: an engine with kvtierd gives the tokens that it gives without, and a second, fresh engine process finds what the first one
computed.

Method: each case of ``cases.py`` runs greedily in three programs: without a connector, with kvtierd and an empty daemon, and
again in a new process with the daemon that the former filled. The plain engine asks everything twice: the second time it
finds all prompts in its own cache, so that it computes exactly what a hit in kvtierd leaves to compute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.daemon import DaemonProcess
from tests.vllm.cases import CASES, Case
from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import BLOCK_TOKENS, NUM_BLOCKS, Report, prompts

DECODED = Case(settings={"save_decode": True}, prompts=prompts(2, 120, 0, seed=31), max_tokens=100)
ALL = CASES | {"decoded": DECODED}


def continued(tokens: list[list[int]]) -> list[dict[str, Any]]:
    """The prompts of the case ``decoded`` with most of what was generated for them."""
    return [{"tokens": prompt["tokens"] + more[:80]} for prompt, more in zip(DECODED.prompts, tokens, strict=True)]


@pytest.fixture(scope="module")
def plain(models: Path, module_engines: Engines) -> Report:
    """Without kvtierd."""
    engines = []
    for name, case in ALL.items():
        steps = [case.generate("first"), case.generate("again")]
        engines.append({"name": name, "llm": case.arguments(models), "steps": steps})
    return module_engines.run(engines, fresh=True)


@pytest.fixture(scope="module")
def daemon(module_daemons: Daemons) -> DaemonProcess:
    """The daemon of all cases."""
    return module_daemons(cpu={"capacity": "512MiB", "extent": "4MiB"})


def with_kvtierd(models: Path, daemon: DaemonProcess, steps: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Engines of all cases."""
    return [
        {"name": name, "llm": case.arguments(models, daemon.address, daemon.folder), "steps": steps[name]}
        for name, case in ALL.items()
    ]


@pytest.fixture(scope="module")
def cold(models: Path, daemon: DaemonProcess, module_engines: Engines) -> Report:
    """With kvtierd, nothing held before."""
    settle = {"do": "settle", "name": "settle", "daemon": str(daemon.folder)}
    steps = {name: [case.generate("first"), settle] for name, case in ALL.items()}
    return module_engines.run(with_kvtierd(models, daemon, steps), fresh=True)


@pytest.fixture(scope="module")
def warm(models: Path, daemon: DaemonProcess, module_engines: Engines, plain: Report, cold: Report) -> Report:
    """A fresh process with kvtierd, after the one that computed and saved."""
    steps = {name: [case.generate("again")] for name, case in CASES.items()}
    steps["decoded"] = [DECODED.generate("again", continued(plain["decoded"].tokens("first")))]
    return module_engines.run(with_kvtierd(models, daemon, steps), fresh=True)


@pytest.mark.parametrize("name", ALL)
def test_computing_and_saving_changes_no_token(plain: Report, cold: Report, name: str) -> None:
    assert cold[name].tokens("first") == plain[name].tokens("first")
    assert cold[name].finish("first") == plain[name].finish("first")
    if name == "llama":  # others evict blocks of their own that come back from kvtierd
        assert cold[name].external("first") == 0
    assert cold[name].metric("settle", "vllm:kvtierd_saves{result=ok}") > 0
    assert cold[name].results["settle"]["quiet"], "saves were still under way long after the last request"
    blocks = int(ALL[name].llm.get("num_gpu_blocks_override", NUM_BLOCKS))
    assert cold[name].metric("settle", "free_blocks") == blocks - 1, "all but the null block are free again"


@pytest.mark.parametrize("name", CASES)
def test_fresh_process_finds_what_was_saved(plain: Report, warm: Report, name: str) -> None:
    case, engine = CASES[name], warm[name]
    assert engine.tokens("again") == plain[name].tokens("again")
    assert engine.finish("again") == plain[name].finish("again")
    assert engine.external("again") >= BLOCK_TOKENS
    assert engine.metric("again", "vllm:kvtierd_loads{result=ok}") > 0
    assert engine.metric("again", "vllm:kvtierd_loads{result=failed}") == 0
    assert engine.metric("again", "vllm:kvtierd_load_bytes") > 0
    if case.held is not None:
        assert engine.cached("again") == [case.held] * len(case.prompts)


def test_plain_engine_would_notice_another_prompt(plain: Report) -> None:
    """Output depends on the prompt, else equal tokens would mean nothing."""
    for name, case in CASES.items():
        outputs = plain[name].tokens("first")
        assert len({tuple(tokens) for tokens in outputs}) == len(case.prompts), name
        assert all(len(set(tokens)) > 3 for tokens in outputs), name


def test_preemption_took_place(cold: Report) -> None:
    assert cold["preempted"].metric("first", "vllm:num_preemptions") > 0


@pytest.mark.skipif("gemma3" not in CASES, reason="this vLLM cannot recover a failed load of several KV cache groups")
def test_two_kv_cache_groups_were_made(cold: Report) -> None:
    """The model with a sliding window must not be served as if all its attention were full."""
    assert cold["gemma3"].groups == 2


def test_blocks_of_generated_tokens_are_found(plain: Report, warm: Report) -> None:
    """Prompts of 120 tokens and 80 of the 100 generated ones: 192 of 200 tokens are in whole blocks that were computed."""
    assert warm["decoded"].cached("again") == [192, 192]
    expected = [tokens[80:] for tokens in plain["decoded"].tokens("first")]
    assert [tokens[:20] for tokens in warm["decoded"].tokens("again")] == expected
