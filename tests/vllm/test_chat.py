"""Goal: a real vLLM serves the chat of the demo and of the load test, which says rightly where the tokens of prompts came from.

Method: one conversation, with a restart of the engine before its second turn: what the first turn left can come from kvtierd alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

chat = pytest.importorskip("loadtest.vllm.chat")


def test_a_conversation_over_a_restart(tmp_path: Path) -> None:
    prompts = [p for p in chat.rag_chat(4, 2, 1, 2) if p.segments[2][0].startswith("user 0")][:3]
    assert len(prompts) == 3
    model = chat.make_model(sys.executable, tmp_path)
    served = chat.Served(sys.executable, model, tmp_path, 256, prompts, print)
    outcome = served.run(chat.Case("with kvtierd", 64 << 20, 64 << 20), (1,))
    first, second, _ = sorted(outcome.answers, key=lambda a: a.number)
    assert first.cached_tokens == 0
    assert second.cached_tokens == first.prompt_tokens // chat.BLOCK_TOKENS * chat.BLOCK_TOKENS
    tokens = outcome.tokens
    assert tokens["computed"] + tokens["engine"] + tokens["kvtierd"] == sum(p.length for p in prompts)
    assert tokens["cpu"] + tokens["nvme"] == tokens["kvtierd"] >= second.cached_tokens
    assert all(0 < a.ttft_s <= a.took_s for a in outcome.answers)
