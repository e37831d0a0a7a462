"""Whether the blocks of a request have the content that vLLM takes them to have.

A connector beside this one, inside ``MultiConnector``, may load blocks within the very step that uses them, and report only with
the step's output that it has failed. vLLM computes them anew then. Until that is certain they must not be saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvtierd.connectors.vllm.requests import RequestState

ENDED_BY_THEMSELVES: Final = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


class Doubts:
    """Counts an engine's steps.

    Args:
        most_steps: steps after which the output of a step has been taken up for certain, however many are under way at once.
    """

    def __init__(self, most_steps: int) -> None:
        self._most_steps = most_steps
        self._step = 0
        self._until = 0

    def step(self, begun: Sequence[tuple[RequestState, int]]) -> None:
        """A step begins.

        Args:
            begun: requests that it runs for the first time since they have been given blocks, and the tokens that vLLM takes these
                to hold. More than is known of here were loaded by another connector within this step. Until it is certain that this
                has worked, other requests that begin with tokens of the engine's own cache may share such blocks.
        """
        self._step += 1
        if any(start > state.local_tokens for state, start in begun):
            self._until = self._step + self._most_steps
        if self._step < self._until:
            for state, start in begun:
                if start:
                    state.doubtful_until = self._until

    def trusts(self, state: RequestState) -> bool:
        """Whether what a request has in its blocks is right."""
        return self._step >= state.doubtful_until

    def trusts_ended(self, state: RequestState) -> bool:
        """The same of one that has ended; with a token of its own it relied on nothing that can still fail."""
        status: Any = getattr(state.request, "status", None)
        return self.trusts(state) or getattr(status, "name", "") in ENDED_BY_THEMSELVES
