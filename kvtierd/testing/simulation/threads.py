"""Time and threads: one thing happens at a time, and the seed decides what comes next.

Simulated threads are real ones that hand a baton to each other, because the code that runs in them is plain blocking code. A thread
gives the baton up where it would wait: for its disk, or for a lock that another holds.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

MAX_STEPS: Final = 1_000_000
"""Turns of threads in one run; more means that it does not end."""


class Crashed(BaseException):
    """Ends what still runs in a process that has been killed. No ``except Exception`` of the daemon stops it."""


class ProcessDies(KeyboardInterrupt):
    """Raised in the event loop at the moment at which the process is to be killed; asyncio lets only this kind pass."""


class StuckError(AssertionError):
    """Nothing can happen any more, and somebody waits."""


class World:
    """One run's time, randomness and threads.

    Args:
        seed: of everything random.
        lines: events remembered for the story of a failure.
    """

    def __init__(self, seed: int, lines: int = 60) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 1000.0
        """The monotonic clock."""
        self.steps = 0
        self.die_at_step = -1
        """The process is killed before this turn of a thread; -1 for not."""
        self.alive = True
        """False while what is left of a killed process is cleared away."""
        self.notes: deque[str] = deque(maxlen=lines)
        self.digest = 0
        """Of all notes: equal for equal runs."""
        self.failure: BaseException | None = None
        """The first fault that was found where it could not be raised."""
        self._order = itertools.count()
        self._due: list[tuple[float, int, SimThread]] = []
        self._threads: dict[SimThread, None] = {}
        self._current: SimThread | None = None

    def wall(self) -> float:
        """Seconds since 1970."""
        return self.now + 1.7e9

    def note(self, text: str) -> None:
        """Remember an event for the story. What a killed process still says on its way out is none."""
        if not self.alive:
            return
        line = f"{self.now:12.6f}  {text}"
        self.notes.append(line)
        self.digest = hash_text(line, self.digest)

    def fail(self, error: BaseException) -> None:
        """Remember the first fault; the event loop raises it at its next turn."""
        if self.failure is None and self.alive:
            self.failure = error
            self.note(f"FAULT {type(error).__name__}: {error}")

    # ---- threads

    def spawn(self, work: Callable[[], object]) -> SimThread:
        """Start a thread; it gets its first turn a moment later."""
        thread = SimThread(self, work)
        self._threads[thread] = None
        self._wake_in(thread, self.random.random() * 1e-4)
        return thread

    def _wake_in(self, thread: SimThread, delay_s: float) -> None:
        heapq.heappush(self._due, (self.now + delay_s, next(self._order), thread))

    @property
    def in_thread(self) -> bool:
        """True in a simulated thread, false in the event loop."""
        return self._current is not None

    @property
    def running(self) -> int:
        """Threads that have not ended."""
        return len(self._threads)

    def next_s(self) -> float | None:
        """When the next thread gets a turn."""
        return self._due[0][0] if self._due else None

    def step(self) -> None:
        """Let the thread that is due first run until it waits."""
        self.steps += 1
        assert self.steps < MAX_STEPS, "threads go on for ever"
        if self.steps == self.die_at_step:
            raise ProcessDies
        at_s, _, thread = heapq.heappop(self._due)
        self.now = max(self.now, at_s)
        self._turn(thread)

    def _turn(self, thread: SimThread) -> None:
        assert self._current is None
        self._current = thread
        thread.go()
        self._current = None
        if thread.ended:
            del self._threads[thread]
            for other in thread.joiners:
                self._wake_in(other, 0.0)
            if thread.error is not None:
                self.fail(thread.error)

    def pause(self, delay_s: float) -> None:
        """In a thread: let others go on for a while. In the event loop: nothing, it does not wait for disks."""
        if not self.alive:
            raise Crashed
        thread = self._current
        if thread is not None:
            self._wake_in(thread, delay_s)
            thread.wait()

    def block(self, wait_list: deque[SimThread] | list[SimThread]) -> None:
        """Wait until somebody takes the caller off a list and calls :meth:`wake`. The event loop lets threads run meanwhile."""
        if not self.alive:
            raise Crashed
        thread = self._current
        if thread is not None:
            wait_list.append(thread)
            thread.wait()
        elif self._due:
            self.step()
        else:
            raise StuckError("the event loop waits for a thread, and no thread can go on")

    def wake(self, thread: SimThread) -> None:
        """Give a thread that blocked a turn."""
        self._wake_in(thread, 0.0)

    def join(self, thread: SimThread) -> None:
        """Wait until a thread has ended."""
        while not thread.ended:
            self.block(thread.joiners)

    def clear_away(self) -> None:
        """End all threads of a killed process where they are; what they were about to do does not happen.

        Until :meth:`revive` whatever is left of the process can do nothing.
        """
        self.alive = False
        while self._threads:
            thread = next(iter(self._threads))
            self._due = [entry for entry in self._due if entry[2] is not thread]
            thread.error = None
            self._turn(thread)
            assert thread.ended, "a thread of a killed process goes on"
        self._due.clear()

    def revive(self) -> None:
        """A new process begins."""
        self.alive = True
        self.die_at_step = -1


class SimThread:
    """A real thread that runs only while it has the baton."""

    __slots__ = ("_go", "_idle", "_started", "_work", "_world", "ended", "error", "joiners")

    def __init__(self, world: World, work: Callable[[], object]) -> None:
        self._world = world
        self._work = work
        self._go = threading.Lock()
        self._go.acquire()
        self._idle = threading.Lock()
        self._idle.acquire()
        self.ended = False
        self.error: BaseException | None = None
        self.joiners: list[SimThread] = []
        self._started = False

    def go(self) -> None:
        """Hand the baton over and wait until it comes back."""
        if self._started:
            self._go.release()
        else:
            self._started = True
            _pool.run(self._main)
        self._idle.acquire()

    def wait(self) -> None:
        """Give the baton back; returns when it comes again. Raises Crashed when the process was killed."""
        self._idle.release()
        self._go.acquire()
        if not self._world.alive:
            raise Crashed

    def _main(self) -> None:
        try:
            if self._world.alive:
                self._work()
        except Crashed:
            pass
        except BaseException as e:  # whatever it is, the event loop is told
            self.error = e
        self.ended = True
        self._idle.release()


class _Pool:
    """Real threads, used again and again: starting one costs more than a turn."""

    def __init__(self) -> None:
        self._free: list[_Real] = []

    def run(self, main: Callable[[], None]) -> None:
        real = self._free.pop() if self._free else _Real(self._free)
        real.main = main
        real.start.release()


class _Real:
    def __init__(self, free: list[_Real]) -> None:
        self.start = threading.Lock()
        self.start.acquire()
        self.main: Callable[[], None] | None = None
        self._free = free
        threading.Thread(target=self._loop, daemon=True, name="simulated").start()

    def _loop(self) -> None:
        while True:
            self.start.acquire()
            main, self.main = self.main, None
            assert main is not None
            main()
            del main
            self._free.append(self)


_pool = _Pool()


class SimLock:
    """A lock whose holder may lose its turn. As ``threading.Lock``, as far as the daemon uses it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False
        self._waiting: deque[SimThread] = deque()

    def __enter__(self) -> None:
        while self._held:
            self._world.block(self._waiting)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
        if self._waiting:
            self._world.wake(self._waiting.popleft())


class SimThreading:
    """What the daemon uses of the module ``threading``, simulated."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.local = threading.local

    def Lock(self) -> SimLock:  # noqa: N802 - the module's name for it
        """As ``threading.Lock``."""
        return SimLock(self._world)

    @staticmethod
    def Barrier(_parties: int) -> _Barrier:  # noqa: N802 - the module's name for it
        """As ``threading.Barrier``; nobody has to wait, as no thread can fail to start."""
        return _Barrier()


class _Barrier:
    def wait(self) -> int:
        """Go on."""
        return 0

    def abort(self) -> None:
        """Nobody waits."""


class SimPool:
    """As ``ThreadPoolExecutor``, as far as the daemon uses it; its limit of threads is the caller's own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._threads: list[SimThread] = []

    def submit(self, work: Callable[..., Any], *args: object) -> None:
        """Start work."""
        self._threads = [t for t in self._threads if not t.ended]
        self._threads.append(self._world.spawn(lambda: work(*args)))

    def shutdown(self, wait: bool = True) -> None:
        """Wait for what was started."""
        for thread in self._threads if wait else ():
            self._world.join(thread)


def hash_text(text: str, start: int = 0) -> int:
    """A number for a text, the same in every process."""
    return zlib.crc32(text.encode(), start)
