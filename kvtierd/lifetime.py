"""What a command starts and makes does not outlive it, however it ends.

SIGTERM ends it as Ctrl-C does, with everything put in order. Should it be killed, the kernel kills its children, and the next one
of its kind removes the folder that was left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

__all__ = ["LOCK", "TERMINATED", "die_with_parent", "end_in_order", "keep", "scratch_folder", "tied", "undisturbed"]

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status after SIGTERM, as shells have it."""
LOCK: Final = "in-use.lock"
_PR_SET_PDEATHSIG: Final = 1
_TIE: Final = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Asks the kernel for SIGKILL when the parent ends, then becomes the program itself. Not ``preexec_fn``: that may deadlock in a
process with threads."""


def end_in_order() -> None:
    """Let SIGTERM end this process as Ctrl-C does: the terminal is given back, children are ended, files removed."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(TERMINATED))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM, for cleaning up and for starting children, which inherit that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def tied(command: Sequence[str]) -> list[str]:
    """A command of which the kernel makes an end when the thread that starts it ends. Its first word is a path."""
    return [sys.executable, "-I", "-c", _TIE, str(os.getpid()), *command]


@contextlib.contextmanager
def scratch_folder(base: Path, prefix: str) -> Iterator[Path]:
    """A new folder in ``base``, removed at the end but for :func:`keep`. Removes what killed processes of its kind have left there.

    Args:
        base: made where it is not there.
        prefix: of its name; of nobody else's.

    Raises:
        OSError: it cannot be made.
    """
    base.mkdir(parents=True, exist_ok=True)
    _sweep(base, prefix)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
    unlocked = folder / "unlocked"
    with unlocked.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(folder / LOCK)  # locked before it has the name that others look for
        try:
            yield folder
        finally:
            with undisturbed():
                if (folder / LOCK).exists():
                    shutil.rmtree(folder, ignore_errors=True)


def keep(folder: Path) -> None:
    """Let a scratch folder stay, for people to look at."""
    (folder / LOCK).unlink(missing_ok=True)


def _sweep(base: Path, prefix: str) -> None:
    """Remove folders whose process is gone, as their lock is free. Others' are left alone: ``base`` may be /tmp."""
    for path in base.glob(f"{prefix}*/{LOCK}"):
        with contextlib.suppress(OSError):
            found = path.parent.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
