"""An event loop on the simulated clock. Its waits are turns of simulated threads; it has no descriptors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from kvtierd.testing.simulation.threads import Crashed, StuckError, World

MAX_TURNS: Final = 200_000
"""Turns of one loop; more means that it does not end."""


class SimLoop(asyncio.BaseEventLoop):
    """See the module.

    Args:
        world: its time and threads.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._turns = 0
        self._clock_resolution = 1e-9
        self._selector = self  # the base class asks it what has happened
        self.set_exception_handler(self._report)

    def time(self) -> float:
        """The simulated monotonic clock."""
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        """What the loop does while it has nothing to do: a thread's turn, or time passes."""
        world = self._world
        self._turns += 1
        assert self._turns < MAX_TURNS, "the event loop goes on for ever"
        if world.failure is not None:
            raise world.failure
        next_s = world.next_s()
        if timeout == 0:
            if next_s is not None and next_s <= world.now and world.random.random() < 0.5:
                world.step()
        elif next_s is not None and (timeout is None or next_s <= world.now + timeout):
            world.step()
        elif timeout is None:
            raise StuckError("nothing can happen any more, and somebody waits")
        else:
            world.now += timeout
        return []

    def _process_events(self, _events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def _report(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._world.fail(error if error is not None else AssertionError(context["message"]))

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run blocking work in a simulated thread."""
        future: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Crashed:
                raise
            except BaseException as e:
                self.call_soon(_set, future, None, e)
            else:
                self.call_soon(_set, future, result, None)

        self._world.spawn(work)
        return future


def _set(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def discard(loop: SimLoop) -> None:
    """Take a loop's tasks apart, whose process was killed: none of them goes on."""
    closed: set[asyncio.Task[Any]] = set()
    asyncio._set_running_loop(loop)  # tasks may begin others on their way out, which are closed unbegun
    try:
        while tasks := asyncio.all_tasks(loop) - closed:
            for task in tasks:
                closed.add(task)
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _close(task.get_coro())
    finally:
        asyncio._set_running_loop(None)
    loop._ready.clear()  # type: ignore[attr-defined]
    loop._scheduled.clear()  # type: ignore[attr-defined]
    loop.close()


def _close(coroutine: Any) -> None:
    for _ in range(20):  # it may wait once more on its way out
        try:
            coroutine.close()
            return
        except BaseException:
            continue
