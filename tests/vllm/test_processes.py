"""Goal: engines of several processes save and load like those of one: engine core and worker apart, tensor parallel ranks, the API
server; and they share with engines of one process where the KV cache is cut in the same way.

Method: blocks are handed down a chain of fresh processes, each with the tokens of an engine without kvtierd to compare with:
one process saves A; engine core and worker apart find A and save B; the API server finds B.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.daemon import DaemonProcess
from kvtierd.testing.vllm.server import ApiServer
from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import Report, llm_arguments, prompts, transfer_config
from tests.vllm.steps import FORGET, MAX_TOKENS, Baseline, blocks_of, engine, faulty, generate, settle, wait_until, wait_until_idle

A, B, C, D = (prompts(seed=seed) for seed in (101, 103, 107, 109))


@pytest.fixture(scope="module")
def daemon(module_daemons: Daemons) -> DaemonProcess:
    return module_daemons()


@pytest.fixture(scope="module")
def arguments(models: Path, daemon: DaemonProcess) -> dict[str, Any]:
    return llm_arguments(models / "llama", transfer_config(daemon.address))


@pytest.fixture(scope="module")
def plain(arguments: dict[str, Any], baseline: Baseline) -> dict[str, list[list[int]]]:
    """Output without kvtierd."""
    tokens = baseline(arguments, A + B + C + D, MAX_TOKENS)
    return {"A": tokens[:3], "B": tokens[3:6], "C": tokens[6:9], "D": tokens[9:]}


@pytest.fixture(scope="module")
def one_process(arguments: dict[str, Any], daemon: DaemonProcess, module_engines: Engines) -> Report:
    return module_engines.run([engine("one process", arguments, generate("A", A), settle(daemon, blocks=10))])


@pytest.fixture(scope="module")
def apart(one_process: Report, arguments: dict[str, Any], daemon: DaemonProcess, module_engines: Engines) -> Report:
    """Engine core and worker in processes of their own."""
    steps = [
        generate("A", A),
        generate("B", B),
        settle(daemon, blocks=20),
        generate("D", D, one_by_one=False),
        {"do": "sleep", "level": 1},
        generate("awake", D),
        settle(daemon, "settle awake", blocks=40),
        FORGET,
        generate("loaded", D),
    ]
    llm = arguments | {"distributed_executor_backend": "mp"}
    return module_engines.run([engine("apart", llm, *steps)], multiprocess=True)


@pytest.fixture(scope="module")
def server(apart: Report, arguments: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path_factory.mktemp("server"), arguments)
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


def test_engine_core_and_worker_apart(one_process: Report, apart: Report, plain: dict[str, list[list[int]]]) -> None:
    assert one_process.only.tokens("A") == plain["A"]
    two = apart.only
    assert two.tokens("A") == plain["A"]
    assert two.tokens("B") == plain["B"]
    assert two.cached("A") == [192] * 3
    assert two.external("A") > 0
    assert two.external("B") == two.external("A")
    assert two.metric("B", "vllm:kvtierd_loads{result=failed}") == 0
    assert two.results["settle"]["quiet"]


def test_sleep_right_after_requests(apart: Report, plain: dict[str, list[list[int]]]) -> None:
    """vLLM waits for the saves, forgets its blocks and has connectors forget: only what is saved after that is found."""
    two = apart.only
    assert two.tokens("D") == two.tokens("awake") == two.tokens("loaded") == plain["D"]
    assert two.external("awake") == two.external("B")
    assert two.cached("loaded") == [192] * 3
    assert two.results["settle awake"]["quiet"]
    assert two.metric("loaded", "vllm:kvtierd_hook_failures") == 0


def test_api_server(server: ApiServer, plain: dict[str, list[list[int]]]) -> None:
    for number, prompt in enumerate(B):
        assert server.complete(prompt["tokens"], MAX_TOKENS)["tokens"] == plain["B"][number]
    metrics = server.metrics()
    assert metrics["vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"] == 320
    assert metrics["vllm:kvtierd_loads_total{result=ok}"] == 3
    assert metrics["vllm:kvtierd_loads_total{result=failed}"] == 0
    assert metrics["vllm:kvtierd_hit_tokens_total{tier=cpu}"] == 320
    assert metrics["vllm:kvtierd_load_bytes_total"] > 0
    assert metrics["vllm:kvtierd_attached"] == 1


def test_api_server_saves_while_it_is_idle(server: ApiServer, daemon: DaemonProcess, plain: dict[str, list[list[int]]]) -> None:
    """No further request is needed for the blocks of the last one to reach the daemon."""
    before = daemon.status().blocks
    for number, prompt in enumerate(C):
        assert server.complete(prompt["tokens"], MAX_TOKENS)["tokens"] == plain["C"][number]
    wait_until(lambda: daemon.status().blocks == before + 10, "all blocks of the last requests are saved")
    wait_until_idle(daemon)


def test_api_server_outlives_its_daemon(server: ApiServer, daemon: DaemonProcess, plain: dict[str, list[list[int]]]) -> None:
    daemon.kill()
    for number, prompt in enumerate(A + C):
        assert server.complete(prompt["tokens"], MAX_TOKENS)["tokens"] == (plain["A"] + plain["C"])[number]
    daemon.start()
    wait_until(lambda: bool(daemon.status().sessions), "the server attaches again")
    assert server.process.poll() is None


def test_tensor_parallel_ranks(models: Path, daemons: Daemons, engines: Engines, plain: dict[str, list[list[int]]]) -> None:
    """Two ranks with one KV head each; every block has a shard of either. A load that fails on the ranks is recomputed."""
    daemon = daemons()
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    llm = llm_arguments(models / "llama", transfer_config(daemon.address), **ranks)
    save = engine("save", llm, generate("A", A), settle(daemon, blocks=10))
    saved = engines.run([save], multiprocess=True).only
    assert saved.tokens("A") == plain["A"]
    llm = llm_arguments(models / "llama", faulty(daemon, {"load": "first"}), **ranks)
    load = engine("load", llm, generate("failed", A[:1]), FORGET, generate("A", A))
    loaded = engines.run([load], multiprocess=True).only
    assert loaded.tokens("failed") == plain["A"][:1]
    assert loaded.metric("failed", "vllm:kvtierd_loads{result=failed}") == 1
    assert loaded.tokens("A") == plain["A"]
    again, *others = loaded.cached("A")
    assert again in (0, 192), "what a failed load was to bring is left alone for a minute, which a slow machine may take"
    assert others == [192, 192]
    assert loaded.metric("A", "vllm:kvtierd_loads{result=ok}") == 2 + (again > 0)
    assert {block.bytes for block in blocks_of(daemon)} == {32 * 1024}, "both ranks' halves of 32 tokens of 1 KiB"


def test_killed_api_server_leaves_nothing(server: ApiServer, daemon: DaemonProcess) -> None:
    """The last use of the server: no ticket, session or shared memory of it is left behind."""
    server.stop()
    wait_until(lambda: not daemon.status().sessions, "no session of a server that has ended")
    assert sum(tier.pinned_bytes for tier in daemon.status().tiers) == 0
