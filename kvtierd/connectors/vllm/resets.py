"""Resets of vLLM's prefix cache, which sleep begins with.

vLLM refuses a reset while anybody holds a block, which saves do, and asks no connector before it looks. An engine that runs its own
steps takes some more until the saves have ended. One in its user's process takes none: ``LLM.sleep()`` right after a request would
raise, and go on doing so. So what is asked for the reset, the block pool, is made to let saves end first, where their worker is in
the same process. Elsewhere a reset is refused as long as saves are under way.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvtierd.connectors.vllm.saves import Saves
    from kvtierd.connectors.vllm.worker import WorkerSide

FINISH_S: Final = 5.0
"""Longest that a reset waits for the saves before it."""
POLL_S: Final = 0.001

_workers: weakref.WeakValueDictionary[str, WorkerSide] = weakref.WeakValueDictionary()


def is_here(engine_id: str, worker: WorkerSide) -> None:
    """A worker of an engine is in this process."""
    _workers[engine_id] = worker


def worker_of(engine_id: str) -> WorkerSide | None:
    """The worker of an engine, if it is in this process. Of several that are, the last: ask only where there is one."""
    return _workers.get(engine_id)


def before_resets(block_pool: Any, prepare: Callable[[], None]) -> None:
    """Have ``prepare`` called before each reset of the pool's prefix cache. It must not raise."""
    reset = getattr(block_pool, "reset_prefix_cache", None)
    if reset is None:
        return

    def reset_prefix_cache() -> Any:
        prepare()
        return reset()

    block_pool.reset_prefix_cache = reset_prefix_cache


def finish(saves: Saves, worker: WorkerSide) -> None:
    """Bring saves to their end without a step of the engine; those that the daemon does not answer in time are given up."""
    until_s = time.monotonic() + FINISH_S
    while saves.held:
        jobs = saves.jobs()
        if jobs:
            worker.begin_saves(jobs)
        elif not saves.unanswered:
            break
        elif time.monotonic() > until_s:
            saves.drop_unsent()
            break
        time.sleep(POLL_S)
    if saves.held and worker.wait_for_copies(max(0.0, until_s - time.monotonic())):
        for save_id, report in worker.ended_saves():
            saves.report(save_id, report)
