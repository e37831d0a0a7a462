"""Whether a load would find anything at all, before a lookup is made for it.

Most requests of a busy engine find nothing beyond what the engine holds itself. A lookup would have each of them wait until
several threads have had their turn beside the engine's own; a probe is one packet, sent when the request arrives, and its answer
is there when vLLM asks. A request is put off for it by moments only, and looked up when it does not come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvtierd.client import Prober
from kvtierd.connectors.vllm.context import Context

PROBE_S: Final = 0.02
"""Time for an answer, from when vLLM has asked for the first time."""


@dataclass(slots=True)
class Probe:
    """One question, asked on the engine's thread.

    Attributes:
        first: number of the chunk asked about.
        held: the answer; None while it is not known.
    """

    first: int
    _prober: Prober
    _number: int
    held: bool | None = None
    _until_s: float = 0.0

    def look(self, now: float) -> bool | None:
        """The answer; True, which means no more than "look it up", when there is none in time."""
        if self.held is None:
            self.held = self._prober.answer(self._number)
        if self.held is None:
            self._until_s = self._until_s or now + PROBE_S
            if self._prober.closed or now >= self._until_s:
                self.forget()
                self.held = True
        return self.held

    def wait(self, seconds: float) -> bool:
        """Wait for answers so long. Whether there may be one."""
        return self._prober.wait(seconds)

    def forget(self) -> None:
        """Nobody wants the answer any more."""
        if self.held is None:
            self._prober.forget(self._number)


def ask(ctx: Context, request: Any, tenant: str, first: int) -> Probe | None:
    """Ask about chunk ``first`` of a request. None where that is not possible, or would tell nothing."""
    group = next((g for g in ctx.plan.groups if not g.window), None)
    prober = None if group is None else ctx.pools.prober(group.pool, ctx.calls)
    if group is None or prober is None:
        return None
    key = ctx.keys.keys(request, group.index, first, first + 1)[0]
    number = prober.ask(key, 0, tenant)
    return None if number is None else Probe(first, prober, number)


def count_missed(ctx: Context, request: Any, tenant: str, first: int, count: int) -> None:
    """Have the daemon count ``count`` chunks from ``first`` on as missed, which no load asks for as they are known to be missing.

    Of several groups, those that need all chunks count. What is there after all is not counted.
    """
    groups = ctx.plan.groups
    for group in [g for g in groups if not g.window] or groups[:1]:
        prober = ctx.pools.prober(group.pool, ctx.calls)
        if prober is not None:
            number = prober.ask(ctx.keys.keys(request, group.index, first, first + 1)[0], count, tenant)
            if number is not None:
                prober.forget(number)
