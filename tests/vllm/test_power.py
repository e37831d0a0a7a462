"""Goal: equal tokens mean something: a wrong block changes them.

Method: an engine whose copies go wrong fills a daemon; to the daemon its blocks are as good as any. A fresh engine without
faults loads them, and its output must differ from that of an engine without kvtierd. Keys are rotated by their position in
most models, so that exchanging two blocks of one prompt changes nothing there; a model with biased attention notices that too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import llm_arguments, prompts, transfer_config
from tests.vllm.steps import FORGET, MAX_TOKENS, Baseline, engine, faulty, generate, settle


@pytest.mark.parametrize(("fault", "model", "right_prompts"), [("other", "llama", 1), ("swap", "bloom", 0)])
def test_one_wrong_block_changes_the_output(
    models: Path,
    daemons: Daemons,
    engines: Engines,
    baseline: Baseline,
    fault: str,
    model: str,
    right_prompts: int,
) -> None:
    daemon = daemons()
    asked = prompts(3, 200, 0, seed=71)
    wrong = llm_arguments(models / model, faulty(daemon, {"save": fault}))
    right = llm_arguments(models / model, transfer_config(daemon.address))
    report = engines.run(
        [
            engine("fill", wrong, generate("ask", asked), settle(daemon)),
            engine("load", right, generate("ask", asked)),
        ]
    )
    plain = baseline(right, asked, 16)
    assert report["fill"].tokens("ask") == plain
    assert report["load"].cached("ask") == [192] * 3
    loaded = report["load"].tokens("ask")
    assert loaded[:right_prompts] == plain[:right_prompts]
    for number in range(right_prompts, 3):
        assert loaded[number] != plain[number], f"a wrong block went unnoticed in prompt {number}"


def test_one_wrong_block_from_another_client_changes_one_output(
    models: Path, daemons: Daemons, engines: Engines, baseline: Baseline
) -> None:
    """Three prompts that share nothing: what is put in under a key of one of them must change that one and no other."""
    daemon = daemons()
    asked = prompts(3, 200, 0, seed=73)
    llm = llm_arguments(models / "llama", faulty(daemon, {}))
    steps = [
        generate("save", asked),
        settle(daemon, blocks=18),
        {"do": "spoil", "daemon": str(daemon.folder)},
        FORGET,
        generate("load", asked),
    ]
    done = engines.run([engine("engine", llm, *steps)]).only
    plain = baseline(llm, asked, MAX_TOKENS)
    assert done.tokens("save") == plain
    assert done.cached("load") == [192] * 3
    changed = [loaded != right for loaded, right in zip(done.tokens("load"), plain, strict=True)]
    assert sorted(changed) == [False, False, True]
