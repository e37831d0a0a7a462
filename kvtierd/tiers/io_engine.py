"""How bytes reach a file: the seam between the store and the kernel, where tests put their faults."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import numpy as np
from typing_extensions import Buffer

from kvtierd.config import NvmeConfig
from kvtierd.errors import StartupError
from kvtierd.model import PAGE_BYTES

log = logging.getLogger(__name__)

MAX_IOV: Final = 1024
"""Buffers of one vectored call: the kernel's own limit."""
KVIKIO_MIN_BYTES: Final = 1 << 20
"""Smaller buffers take the vectored path: a call for each would cost more than it moves."""


class IoEngine(Protocol):
    """Positioned reads and writes. Thread-safe. Every method raises OSError for what the device answers."""

    @property
    def name(self) -> str:
        """Short name for metrics and logs."""

    def open(self, path: str, *, direct: bool) -> int:
        """Open an existing file for reading and writing and return a handle. ``direct`` asks for O_DIRECT."""

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """Write buffers one after the other; may write less. Returns the bytes written."""

    def preadv(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """Fill buffers one after the other; may read less, and reads 0 past the end. Returns the bytes read."""

    def close(self, handle: int) -> None:
        """Close a handle that nothing uses any more."""


class ThreadEngine:
    """Plain vectored system calls in the calling thread; the interpreter lock is free meanwhile."""

    name = "threads"

    def open(self, path: str, *, direct: bool) -> int:
        """See :class:`IoEngine`; the handle is a descriptor."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """See :class:`IoEngine`."""
        return os.pwritev(handle, buffers, offset_bytes)

    def preadv(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """See :class:`IoEngine`."""
        return os.preadv(handle, buffers, offset_bytes)

    def close(self, handle: int) -> None:
        """See :class:`IoEngine`."""
        os.close(handle)


KVIKIO_OPENING: Final = threading.Lock()
"""Held while a file is opened by kvikio, which takes settings of the whole process for it then."""


def set_up_kvikio(threads: int) -> tuple[Any, Any]:
    """kvikio and its settings, for direct I/O in so many threads. Raises ImportError and what kvikio raises."""
    kvikio, defaults = importlib.import_module("kvikio"), importlib.import_module("kvikio.defaults")
    if not {"KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS"} & os.environ.keys():
        defaults.set({"num_threads": threads})
    for setting in ("auto_direct_io_read", "auto_direct_io_write"):
        try:
            defaults.set({setting: True})
        except (AttributeError, KeyError, ValueError, RuntimeError):
            log.info("this kvikio has no setting %s; its own default holds", setting)
    return kvikio, defaults


class KvikioEngine(ThreadEngine):
    """kvikio for large buffers of direct files: it splits one call over its own threads. Small buffers go the plain way.

    The handle is the plain descriptor; the CuFile of a direct file is kept beside it. What kvikio fails to move is moved the plain
    way: kvikio tells errors as text alone, among them the end of a file, and the kernel's own answer says what is the matter.
    """

    name = "kvikio"

    def __init__(self, threads: int) -> None:
        self._kvikio, _ = set_up_kvikio(threads)
        self._files: dict[int, Any] = {}
        self._failed = False

    def open(self, path: str, *, direct: bool) -> int:
        """See :class:`IoEngine`."""
        handle = super().open(path, direct=direct)
        if direct:
            try:
                with KVIKIO_OPENING:
                    self._files[handle] = self._kvikio.CuFile(path, "r+")
            except (OSError, RuntimeError) as e:
                os.close(handle)
                raise _as_os_error(e) from e
        return handle

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """See :class:`IoEngine`."""
        return self._move(handle, buffers, offset_bytes, write=True)

    def preadv(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        """See :class:`IoEngine`."""
        return self._move(handle, buffers, offset_bytes, write=False)

    def close(self, handle: int) -> None:
        """See :class:`IoEngine`."""
        file = self._files.pop(handle, None)
        if file is not None:
            file.close()
        super().close(handle)

    def _move(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int, *, write: bool) -> int:
        plain = super().pwritev if write else super().preadv
        file = self._files.get(handle)
        views = [memoryview(b) for b in buffers]
        if file is None or max(v.nbytes for v in views) < KVIKIO_MIN_BYTES:
            return plain(handle, views, offset_bytes)
        start = file.pwrite if write else file.pread
        parts = []
        at = offset_bytes
        for view in views:
            parts.append((view, at, _started(start, view, at) if view.nbytes >= KVIKIO_MIN_BYTES else None))
            at += view.nbytes
        # Whatever has been started uses our memory: wait for all of it before anything else can fail.
        moved = [None if future is None else self._result(future) for _, _, future in parts]
        total = 0
        for (view, at, _), done in zip(parts, moved, strict=True):
            count = plain(handle, [view], at) if done is None else done
            total += count
            if count < view.nbytes:
                break
        return total

    def _result(self, future: Any) -> int | None:
        """Bytes moved; None for a failure."""
        try:
            return int(future.get())
        except (OSError, RuntimeError) as e:
            if not self._failed:
                self._failed = True
                log.warning("kvikio could not move a buffer, which is moved by plain calls: %s", e)
            return None


def _started(start: Callable[..., Any], view: memoryview, offset_bytes: int) -> Any:
    """The future of a transfer; None when it cannot be started."""
    try:
        return start(np.frombuffer(view, np.uint8), view.nbytes, offset_bytes)
    except (OSError, RuntimeError):
        return None


def _as_os_error(error: Exception) -> OSError:
    """kvikio reports errors of opening as RuntimeError with text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    return OSError(5, f"kvikio: {error}")


def choose_engine(config: NvmeConfig) -> IoEngine:
    """The engine that the configuration asks for.

    ``auto`` is ``threads``: for host memory kvikio reads and writes files as these do, and reads no faster where both were measured
    (``loadtest/gpu/nvme.py``).

    Raises:
        StartupError: ``nvme.io = "kvikio"`` where kvikio or libcuda is missing; says what to install.
    """
    if config.io != "kvikio":
        return ThreadEngine()
    try:
        # kvikio needs libcuda even for host memory, and without it fails late and unclearly.
        ctypes.CDLL("libcuda.so.1")
        return KvikioEngine(config.depth)
    except (ImportError, OSError, AttributeError, RuntimeError) as e:
        raise StartupError(
            f'nvme.io is "kvikio", which cannot be used here ({e}): install kvtierd[cuda12] or kvtierd[cuda13] on a machine '
            'with an NVIDIA driver, or set nvme.io = "threads"'
        ) from e


def write_all(engine: IoEngine, handle: int, buffers: list[memoryview], offset_bytes: int) -> None:
    """Write all buffers, whatever the engine writes at a time.

    Raises:
        OSError: from the engine; EIO when it makes no progress.
    """
    stuck = 0
    while buffers:
        moved = engine.pwritev(handle, buffers[:MAX_IOV], offset_bytes)
        # Direct I/O goes on at a page only: what was written of the last page is written again.
        if moved < sum(b.nbytes for b in buffers[:MAX_IOV]) and all(b.nbytes % PAGE_BYTES == 0 for b in buffers):
            moved -= moved % PAGE_BYTES
        stuck = 0 if moved else stuck + 1
        if stuck > 1:
            raise OSError(5, "the device accepts no bytes")
        offset_bytes += moved
        buffers = _rest(buffers, moved)


def read_all(engine: IoEngine, handle: int, buffers: list[memoryview], offset_bytes: int) -> int:
    """Fill buffers until the end of the file. Returns the bytes read, whole pages. Raises OSError from the engine."""
    total = 0
    while buffers:
        moved = engine.preadv(handle, buffers[:MAX_IOV], offset_bytes + total)
        moved -= moved % PAGE_BYTES
        if not moved:
            break
        total += moved
        buffers = _rest(buffers, moved)
    return total


def _rest(buffers: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of buffers after their first ``moved`` bytes."""
    for i, buffer in enumerate(buffers):
        if moved < buffer.nbytes:
            return [buffer[moved:], *buffers[i + 1 :]] if moved else buffers[i:]
        moved -= buffer.nbytes
    return []
