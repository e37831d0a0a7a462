"""How bytes go between GPU memory and files without CPU memory: the seam between the NVMe tier and kvikio, for tests too.

kvikio (cuFile) moves them, cupy compiles the kernels of :mod:`kvtierd.tiers.gpu_digest`. Both are in the extras ``cuda12`` and
``cuda13`` alone, and are imported by :func:`open_device_io`.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from kvtierd.errors import StartupError
from kvtierd.tiers.base import DeviceRange
from kvtierd.tiers.gpu_digest import GpuDigests
from kvtierd.tiers.io_engine import KVIKIO_OPENING, set_up_kvikio

log = logging.getLogger(__name__)

KVIKIO_SETTINGS: Final = ("compat_mode", "num_threads", "task_size", "gds_threshold", "bounce_buffer_size")
"""What ``kvtierd doctor`` shows; each can be set by a variable of kvikio's (``KVIKIO_TASK_SIZE``)."""

Part = tuple[DeviceRange, int]
"""Memory, in whole pages, and where it is in the file."""


class DeviceIo(Protocol):
    """Transfers between GPU memory and files. Thread-safe. May raise anything.

    Once a call has ended, well or not, none of its memory is in use.
    """

    @property
    def name(self) -> str:
        """For metrics: "gds" for GPUDirect Storage, "kvikio" for what goes through pinned memory of kvikio's."""

    def write(self, path: str, parts: Sequence[Part]) -> list[int]:
        """Write to an existing file. Returns the bytes that were written of each part."""

    def read(self, path: str, parts: Sequence[Part]) -> list[int]:
        """Read from a file. Returns the bytes that were read of each part."""

    def digests(self, ranges: Sequence[DeviceRange]) -> list[bytes]:
        """xxh3_128 of memory of one GPU."""

    def close(self, path: str) -> None:
        """Close a file, once nothing uses it any more; none is open is no error."""


@dataclass(frozen=True, slots=True)
class _Array:
    """Memory in the form that kvikio takes."""

    memory: DeviceRange

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"data": (self.memory.address, False), "shape": (self.memory.nbytes,), "typestr": "|u1", "version": 3}


@dataclass(slots=True)
class _File:
    """A file that kvikio has open, and how many transfers use it."""

    handle: Any
    users: int = 0
    closing: bool = False


class KvikioIo:
    """See :class:`DeviceIo`.

    Args:
        threads: of kvikio, where ``KVIKIO_NTHREADS`` does not say how many.
        gds: insist on GPUDirect Storage, so that nothing goes another way unseen.
    """

    def __init__(self, threads: int, *, gds: bool) -> None:
        self.name = "gds" if gds else "kvikio"
        self.digests = GpuDigests()
        self._kvikio, self._defaults = set_up_kvikio(threads)
        self._strict = {"compat_mode": self._kvikio.CompatMode.OFF} if gds else {}
        self._opening = threading.Lock()
        """Held while a file is opened, which may hang: never with the other lock, which whoever closes a file needs."""
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}

    def write(self, path: str, parts: Sequence[Part]) -> list[int]:
        """See :class:`DeviceIo`."""
        with self._using(path) as file:
            return _moved(file.pwrite, parts)

    def read(self, path: str, parts: Sequence[Part]) -> list[int]:
        """See :class:`DeviceIo`."""
        with self._using(path) as file:
            return _moved(file.pread, parts)

    def close(self, path: str) -> None:
        """See :class:`DeviceIo`."""
        with self._lock:
            file = self._files.pop(path, None)
            if file is None:
                return
            file.closing = True
            unused = not file.users
        if unused:
            file.handle.close()

    @contextmanager
    def _using(self, path: str) -> Iterator[Any]:
        """The file, which stays open meanwhile: the number of one that is closed may be another file's at once."""
        with self._opening:
            with self._lock:
                file = self._files.get(path)
                if file is not None:
                    file.users += 1
            if file is None:
                with KVIKIO_OPENING, self._defaults.set(self._strict):  # holds for the whole process meanwhile
                    file = _File(self._kvikio.CuFile(path, "r+"), users=1)
                with self._lock:
                    self._files[path] = file
        try:
            yield file.handle
        finally:
            with self._lock:
                file.users -= 1
                unused = file.closing and not file.users
            if unused:
                file.handle.close()


def _moved(start: Any, parts: Sequence[Part]) -> list[int]:
    futures, problem, moved = [], None, []
    for memory, offset_bytes in parts:
        try:
            with memory.device.current():
                futures.append(start(_Array(memory), memory.nbytes, offset_bytes))
        except Exception as e:
            problem = e
            break
    for future in futures:  # all of them: what has been started uses the memory
        try:
            moved.append(int(future.get()))
        except Exception as e:
            problem = e
    if problem is not None:
        raise problem
    return moved


def kvikio_settings() -> dict[str, object]:
    """Settings of kvikio that are in force. Raises ImportError and what kvikio raises."""
    defaults = importlib.import_module("kvikio.defaults")
    return {name: defaults.get(name) for name in KVIKIO_SETTINGS}


def gds_problem() -> str:
    """Why cuFile would not use GPUDirect Storage here, or not surely, and what to do; empty when it does. Raises ImportError."""
    kvikio, driver = importlib.import_module("kvikio.defaults"), importlib.import_module("kvikio.cufile_driver")
    if kvikio.is_compat_mode_preferred():
        return (
            "kvikio is in its compatibility mode: that needs libcufile.so, a readable /run/udev (in containers "
            "--volume /run/udev:/run/udev:ro), and no KVIKIO_COMPAT_MODE"
        )
    if not driver.get("is_gds_available"):
        return "cuFile cannot open its driver: load nvidia-fs (modprobe nvidia-fs), and see cufile.log"
    if driver.get("allow_compat_mode"):
        return (
            "cuFile may go through CPU memory without saying so: set properties.allow_compat_mode to false in its cufile.json "
            "(CUFILE_ENV_PATH_JSON, else /etc/cufile.json)"
        )
    return ""


def open_device_io(mode: Literal["auto", "on"], threads: int) -> DeviceIo:
    """What the configuration asks for. Slow: loads large libraries.

    Args:
        mode: ``nvme.gds``.
        threads: of kvikio.

    Raises:
        StartupError: there is none that may be used; says what to do.
    """
    try:
        ctypes.CDLL("libcuda.so.1")  # without it kvikio fails late and unclearly
        problem = gds_problem()
        if problem and mode == "auto":
            raise StartupError(f'{problem}; or set nvme.gds = "off"')
        return KvikioIo(threads, gds=not problem)
    except (ImportError, OSError, AttributeError, KeyError, RuntimeError) as e:
        raise StartupError(
            f'kvikio and cupy cannot be used ({e}): install kvtierd[cuda12] or kvtierd[cuda13], or set nvme.gds = "off"'
        ) from e
