"""Goal: engines whose layers, heads or requests are spread over several processes save and load like those of one.

Method: each is compared with an engine of one process without kvtierd. What one rank or engine has saved is found by fresh ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.vllm.server import ApiServer
from tests.vllm.cases import CASES
from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import llm_arguments, prompts, transfer_config, vllm_version
from tests.vllm.steps import FORGET, MAX_TOKENS, Baseline, attach, blocks_of, engine, faulty, generate, settle, wait_until

A, B = prompts(seed=301), prompts(seed=303)
BLOCK_BYTES = 32 * 1024
"""32 tokens of the llama: 1 KiB each over both layers and heads."""
LATENT_BLOCK_BYTES = 32 * 2 * (512 + 64) * 2
"""32 tokens of the deepseek: two layers with a latent vector and a rotated key in 16 bits."""

pytestmark = pytest.mark.skipif(vllm_version() < (0, 32), reason="the CPU build of this vLLM runs one process only")


def ranks(**sizes: int) -> dict[str, Any]:
    return {f"{kind}_parallel_size": size for kind, size in sizes.items()} | {
        "distributed_executor_backend": "mp",
        "worker_cls": "tests.vllm.stages.StageWorker",
    }


def test_pipeline_stages(models: Path, daemons: Daemons, engines: Engines, baseline: Baseline) -> None:
    """Two stages with one layer each, several requests under way at a time; a fresh engine's first load fails on a stage."""
    daemon = daemons()
    right = llm_arguments(models / "llama", transfer_config(daemon.address), **ranks(pipeline=2))
    wrong = llm_arguments(models / "llama", faulty(daemon, {"load": "first"}), **ranks(pipeline=2))
    report = engines.run(
        [
            engine("save", right, attach(daemon), generate("A", A, one_by_one=False), settle(daemon, blocks=10)),
            engine(
                "load",
                wrong,
                attach(daemon),
                generate("failed", A[:1]),
                FORGET,
                generate("A", A),
                generate("at once", A, one_by_one=False),
            ),
        ],
        multiprocess=True,
    )
    plain = baseline(right, A, MAX_TOKENS)
    assert report["save"].tokens("A") == plain
    assert report["save"].external("A") == 0
    loaded = report["load"]
    assert loaded.tokens("failed") == plain[:1]
    assert loaded.metric("failed", "vllm:kvtierd_loads{result=failed}") == 1
    assert loaded.tokens("A") == loaded.tokens("at once") == plain
    again, *others = loaded.cached("A")
    assert again in (0, 192), "what a failed load was to bring is left alone for a minute, which a slow machine may take"
    assert others == [192, 192]
    assert loaded.metric("at once", "vllm:kvtierd_loads{result=ok}") == 2 + (again > 0)
    assert {block.bytes for block in blocks_of(daemon)} == {BLOCK_BYTES}, "both stages' layers"


@pytest.mark.skipif("latent" not in CASES, reason="without tiles (AMX) vLLM's latent attention takes no prefix from a cache")
def test_latent_attention_of_two_ranks_is_stored_once(models: Path, daemons: Daemons, engines: Engines) -> None:
    """Both ranks have the same latent vectors: a block has the bytes of one, and either rank loads them.

    16-bit arithmetic depends on how a prompt is cut, so a load is compared with a hit in the engine's own cache.
    """
    daemon = daemons()
    transfer = transfer_config(daemon.address)
    llm = llm_arguments(models / "deepseek", transfer, **ranks(tensor=2) | {"dtype": "bfloat16"})
    steps = [generate("computed", A), settle(daemon, blocks=10), generate("own", A), FORGET, generate("loaded", A)]
    done = engines.run([engine("engine", llm, *steps)], multiprocess=True).only
    assert done.external("own") == 0
    assert done.cached("own") == done.cached("loaded") == [192] * 3
    assert done.metric("loaded", "vllm:kvtierd_loads{result=ok}") == 3
    assert done.tokens("loaded") == done.tokens("own")
    assert {block.bytes for block in blocks_of(daemon)} == {LATENT_BLOCK_BYTES}
    assert len(blocks_of(daemon)) == 10


@pytest.fixture
def replicas(models: Path, daemons: Daemons, tmp_path: Path) -> Iterator[ApiServer]:
    """An API server with two engines behind it, on the daemon of the test."""
    llm = llm_arguments(models / "llama", transfer_config(daemons().address), data_parallel_size=2)
    server = ApiServer(tmp_path / "server", llm)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def test_data_parallel_engines_share(replicas: ApiServer, models: Path, daemons: Daemons, baseline: Baseline) -> None:
    """What one engine of a server has computed, the other one finds."""
    daemon = daemons.made[0]
    plain = baseline(llm_arguments(models / "llama"), A + B, MAX_TOKENS)
    wait_until(lambda: len(daemon.status().sessions) == 2, "both engines have a session")
    for first, wanted, tokens in ((0, A, plain[:3]), (1, B, plain[3:])):
        before = daemon.status().blocks
        assert [replicas.complete(prompt["tokens"], MAX_TOKENS, first)["tokens"] for prompt in wanted] == tokens
        wait_until(lambda held=before + 10: daemon.status().blocks == held, "all blocks are saved")  # type: ignore[misc]
        assert [replicas.complete(prompt["tokens"], MAX_TOKENS, 1 - first)["tokens"] for prompt in wanted] == tokens
    metrics = replicas.metrics()
    assert metrics["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] == 2 * 320
    assert metrics["vllm:kvtierd_loads_total{result=ok}"] == 6
    assert metrics["vllm:kvtierd_loads_total{result=failed}"] == 0
    assert metrics["vllm:kvtierd_attached"] == 2
