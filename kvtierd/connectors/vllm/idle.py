"""Waiting on the engine's thread while it has nothing else to do.

An engine that computes nothing steps over and over until a lookup or a copy has ended, with a pause after each step. A request that
is alone would wait for the next step after each of its stages, which takes longer than the stages themselves while little is
loaded. So it is waited for within the step. Engines that step together with others never wait: each would hold up all.
"""

from __future__ import annotations

from typing import Any, Final

STEP_S: Final = 0.005
"""Longest wait in one step on each side: a request that arrives meanwhile starts later by so much."""


class Idle:
    """Knows whether the engine computes anything, from its steps.

    Args:
        vllm_config: of the engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        together = (getattr(parallel, name, 1) for name in ("pipeline_parallel_size", "data_parallel_size"))
        self._alone = all(int(size) == 1 for size in together)
        self._empty = False
        self._left_s = STEP_S

    def stepped(self, tokens: int, requests: int) -> bool:
        """A step of this many tokens is handed out, where so many requests are known. Whether workers may wait in it."""
        waits = self._waits(requests) and not tokens
        self._empty, self._left_s = not tokens, STEP_S
        return waits

    def loaded(self) -> None:
        """Requests can be computed from the next step on."""
        self._empty = False

    def spare_s(self, requests: int) -> float:
        """How long the scheduler may still wait before the next step, for one of so many requests."""
        return self._left_s if self._waits(requests) else 0.0

    def spend(self, seconds: float) -> None:
        """So long was waited."""
        self._left_s = max(0.0, self._left_s - seconds)

    def _waits(self, requests: int) -> bool:
        return self._alone and (self._empty or requests <= 1)
