"""Goal: beside another connector in vLLM's MultiConnector, nothing is saved that the other one has promised and not brought.

Method: the other one promises a whole prompt and never loads it; its request is aborted. The same prompt, asked again, must give
what an engine without connectors gives, in this engine and in a fresh one.
"""

from __future__ import annotations

from pathlib import Path

from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import NUM_BLOCKS, llm_arguments, prompts, transfer_config
from tests.vllm.steps import FORGET, MAX_TOKENS, Baseline, blocks_of, engine, generate, settle

A = prompts(2, 200, 0, seed=601)


def test_request_aborted_while_another_connector_loads(
    models: Path, daemons: Daemons, engines: Engines, baseline: Baseline
) -> None:
    daemon = daemons()
    slow = {"kv_connector": "SlowConnector", "kv_connector_module_path": "tests.vllm.slow_connector", "kv_role": "kv_both"}
    ours = transfer_config(daemon.address, module=None)
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    both["kv_connector_extra_config"] = {"connectors": [slow, ours]}  # type: ignore[assignment]
    asked = [prompt | {"kv_transfer_params": {"slow": True}} for prompt in A]
    steps = [
        {"do": "nudge", "seconds": 1},
        {"do": "abort", "name": "aborted", "prompts": asked, "steps": 40, "pause_s": 0.05},
        {"do": "nudge", "seconds": 2},
        {"do": "held", "name": "held", "daemon": str(daemon.folder)},
        FORGET,
        generate("again", A),
        settle(daemon, blocks=12),
        FORGET,
        generate("loaded", A),
        settle(daemon, "settle at last"),
    ]
    llm = llm_arguments(models / "llama", both)
    alone = llm_arguments(models / "llama", transfer_config(daemon.address))
    report = engines.run([engine("both", llm, *steps), engine("fresh", alone, generate("loaded", A))])
    plain = baseline(llm, A, MAX_TOKENS)
    done = report["both"]
    assert done.results["held"] == 0, "blocks were saved that nobody had filled"
    assert done.tokens("again") == done.tokens("loaded") == plain
    assert done.cached("loaded") == [192, 192]
    assert done.metric("settle at last", "free_blocks") == NUM_BLOCKS - 1
    assert report["fresh"].tokens("loaded") == plain
    assert report["fresh"].cached("loaded") == [192, 192]
    assert len(blocks_of(daemon)) == 12
