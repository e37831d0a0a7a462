"""What tests of whole engines share: the kinds of engines, engines that have saved something, and what must hold at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.connectors.small_engine import NEW, RequestStatus, SmallEngine, prompt

Engines = Callable[..., SmallEngine]
two_groups = pytest.mark.skipif(not NEW, reason="this vLLM is too old for several KV cache groups")
KINDS = [
    pytest.param({}, id="plain"),
    pytest.param({"asynchronous": True}, id="asynchronous"),
    pytest.param({"tp": 2}, id="two ranks"),
    pytest.param({"groups": 2}, id="window", marks=two_groups),
    pytest.param({"groups": 2, "asynchronous": True, "tp": 2}, id="all", marks=two_groups),
]
_SEEDS = iter(range(1000, 1_000_000))


def fresh(length: int = 300) -> list[int]:
    """A prompt that no test has used."""
    return prompt(length, seed=next(_SEEDS))


def save(engines: Engines, tokens: list[int], **more: Any) -> SmallEngine:
    """An engine that has computed and saved this prompt, and forgotten it itself."""
    engine = engines(**more)
    assert engine.generate("saved", tokens) == engine.expected(tokens, 2)
    engine.settle()
    engine.forget()
    return engine


def right(engine: SmallEngine, *names: str) -> None:
    """These requests have the right tokens, and nothing is held any more."""
    engine.settle()
    assert not engine.wrong
    for name in names:
        request = engine.requests[name]
        tokens = list(request.all_token_ids)[: engine.prompt_lengths[name]]
        assert list(request.output_token_ids) == engine.expected(tokens, request.max_tokens), name
    assert not engine.leaks()
    assert engine.counts["hook_failures"] == 0


class Stop:
    """Keeps the copies of an engine's workers from beginning."""

    def __init__(self, engine: SmallEngine) -> None:
        self._gate = threading.Event()
        for rank in engine.ranks:
            side = rank.connector._worker
            side._loader.submit(lambda: self._gate.wait(60) and None)
            side._saver.submit(lambda: self._gate.wait(60) and None)

    def go(self) -> None:
        """Let them."""
        self._gate.set()


def until_asked(engine: SmallEngine) -> None:
    """Have vLLM ask for the hit of a request that was just added, and go on before there is an answer."""
    engine.side._idle.spend(1.0)
    assert not engine.scheduler.schedule().kv_connector_metadata.loads


def until_loading(engine: SmallEngine, name: str) -> None:
    """Step until vLLM waits for a request's load."""
    engine.until(lambda: engine.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS)
