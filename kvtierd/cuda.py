"""GPU memory through the CUDA driver alone: allocated and exported in one process, opened and read in another.

Any version of the driver will do, and no package is needed; nothing is loaded before somebody asks for a GPU. An exported
allocation is named by 64 bytes (``cudaIpcMemHandle_t``), which a process on the same host opens if it may see the same GPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import queue
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from typing_extensions import Buffer

PIECE_BYTES: Final = 2 << 20
"""The driver gives memory out in pieces of this size. What is smaller shares one, and whoever opens it sees all of the piece."""
HANDLE_BYTES: Final = 64
STAGE_BYTES: Final = 4 << 20
"""Pinned memory of one stage."""
LANES: Final = 2
"""Copies from or to host memory that go on at one time on one GPU."""

log = logging.getLogger(__name__)

_LIBRARY: Final = "libcuda.so.1"
_LAZY_ENABLE_PEER_ACCESS: Final = 1
_STREAM_NON_BLOCKING: Final = 1
_EVENT_BLOCKING_SYNC_NO_TIMING: Final = 1 | 2
_HOST_ALLOC_PORTABLE: Final = 1
_OUT_OF_MEMORY: Final = 2


class CudaError(OSError):
    """The driver refused; the text says what and why."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_ADDRESS, _SIZE, _POINTER, _OUT = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p
_CALLS: Final[dict[str, tuple[object, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_OUT, ctypes.c_int),
    "cuDeviceTotalMem_v2": (_OUT, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, ctypes.c_int),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (_OUT,),
    "cuMemAlloc_v2": (_OUT, _SIZE),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemsetD8_v2": (_ADDRESS, ctypes.c_ubyte, _SIZE),
    "cuMemcpyHtoD_v2": (_ADDRESS, _POINTER, _SIZE),
    "cuMemcpyDtoH_v2": (_POINTER, _ADDRESS, _SIZE),
    "cuMemcpyDtoHAsync_v2": (_POINTER, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, _POINTER, _SIZE, _POINTER),
    "cuMemHostAlloc": (_OUT, _SIZE, ctypes.c_uint),
    "cuStreamCreate": (_OUT, ctypes.c_uint),
    "cuStreamSynchronize": (_POINTER,),
    "cuEventCreate": (_OUT, ctypes.c_uint),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuEventSynchronize": (_POINTER,),
    "cuIpcGetMemHandle": (_OUT, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_OUT, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
}


@functools.cache
def _driver() -> ctypes.CDLL:
    """The driver, ready. Raises CudaError."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
        for name, arguments in _CALLS.items():
            getattr(driver, name).argtypes = arguments
    except (OSError, AttributeError) as e:
        raise CudaError(f"the CUDA driver cannot be loaded: {e}") from e
    if status := driver.cuInit(0):
        raise CudaError(f"the CUDA driver does not work: {_told(driver, status)}")
    return driver


def _told(driver: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    known = driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name)) == 0 and name.value
    return name.value.decode() if known and name.value else f"error {status}"


def _call(name: str, *arguments: object) -> None:
    """Call the driver, with the interpreter free meanwhile. Raises CudaError."""
    driver = _driver()
    if status := getattr(driver, name)(*arguments):
        error = CudaError(f"{name}: {_told(driver, status)}")
        if status == _OUT_OF_MEMORY:
            error = CudaError("the GPU has no memory left; lower what the engine takes, or hbm.capacity")
        raise error


def _made(kind: type[ctypes.c_int | ctypes.c_size_t | ctypes.c_uint64 | ctypes.c_void_p], name: str, *arguments: object) -> int:
    """What a call of the driver makes, an address or a handle. Raises CudaError."""
    made = kind()
    _call(name, ctypes.byref(made), *arguments)
    return int(made.value or 0)


class Device:
    """One GPU that this process may see. Thread-safe. Nothing is made on it before the first call of :meth:`open`.

    Args:
        ordinal: number among those that this process may see.

    Attributes:
        uuid: of the GPU, the same for every process that may see it.
        total_bytes: its memory.

    Raises:
        CudaError: there is none.
    """

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self._device = _made(ctypes.c_int, "cuDeviceGet", ordinal)
        raw = ctypes.create_string_buffer(16)
        _call("cuDeviceGetUuid_v2", raw, self._device)
        self.uuid = f"GPU-{uuid.UUID(bytes=raw.raw)}"
        self.total_bytes = _made(ctypes.c_size_t, "cuDeviceTotalMem_v2", self._device)
        self._context = 0
        self._lanes: queue.LifoQueue[_Lane | None] = queue.LifoQueue()
        for _ in range(LANES):
            self._lanes.put(None)

    def open(self) -> None:
        """Make this process's context, which takes a moment and some hundred MiB of the GPU. Raises CudaError."""
        if not self._context:
            self._context = _made(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", self._device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Have calls of this thread go to the GPU meanwhile."""
        self.open()
        _call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _made(ctypes.c_void_p, "cuCtxPopCurrent_v2")

    # ---- memory of this process

    def allocate(self, size_bytes: int) -> int:
        """Address of new memory that is all zeros. Raises CudaError."""
        with self.current():
            address = _made(ctypes.c_uint64, "cuMemAlloc_v2", size_bytes)
            try:
                _call("cuMemsetD8_v2", address, 0, size_bytes)
                _call("cuStreamSynchronize", None)  # it may be done later, and another process may write by then
            except CudaError:
                _call("cuMemFree_v2", address)
                raise
        return address

    def free(self, address: int) -> None:
        """Give memory back; no process may use it any more. Raises CudaError."""
        with self.current():
            _call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """The name by which other processes open an allocation: 64 bytes. Raises CudaError."""
        handle = _Handle()
        with self.current():
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def write(self, address: int, data: bytes) -> None:
        """Copy a few bytes into the GPU's memory. Raises CudaError."""
        with self.current():
            _call("cuMemcpyHtoD_v2", address, data, len(data))
            _call("cuStreamSynchronize", None)  # so far it may be on its way

    def read(self, address: int, size_bytes: int) -> bytes:
        """A few bytes of the GPU's memory. Raises CudaError."""
        target = ctypes.create_string_buffer(size_bytes)
        with self.current():
            _call("cuMemcpyDtoH_v2", target, address, size_bytes)
        return target.raw

    def copy_to_host(self, copies: Sequence[tuple[int, Buffer]]) -> None:
        """Fill host memory from the GPU's, through pinned memory by DMA. Waits until all is there; others run meanwhile.

        Args:
            copies: an address, and writable memory of as many bytes as are to come from there.

        Raises:
            CudaError: the GPU refused; the memory holds nothing usable.
        """
        with self._lane() as lane:
            lane.to_host(copies)

    def copy_from_host(self, copies: Sequence[tuple[int, Buffer]]) -> None:
        """Fill the GPU's memory from the host's, in the same way.

        Args:
            copies: an address, and memory, writable, whose bytes are to go there.

        Raises:
            CudaError: the GPU refused; its memory holds nothing usable there.
        """
        with self._lane() as lane:
            lane.from_host(copies)

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._lanes.get()
        try:
            with self.current():
                if lane is None:
                    lane = _Lane()
                yield lane
        finally:
            self._lanes.put(lane)

    # ---- memory of other processes

    def import_memory(self, handle: bytes, size_bytes: int, on_closed: Callable[[], None]) -> DeviceMapping:
        """Open what another process has exported.

        Args:
            handle: its name.
            size_bytes: bytes of it that may be used.
            on_closed: called once, right after it was closed, in the thread that dropped the last view.

        Raises:
            CudaError: this process may not, or the GPU is another one that it cannot reach.
        """
        if len(handle) != HANDLE_BYTES:
            raise CudaError(f"a name of exported memory has {HANDLE_BYTES} bytes; got {len(handle)}")
        raw = _Handle.from_buffer_copy(handle)
        with self.current():
            address = _made(ctypes.c_uint64, "cuIpcOpenMemHandle_v2", raw, _LAZY_ENABLE_PEER_ACCESS)
        return DeviceMapping(self, address, size_bytes, on_closed)

    def close_memory(self, address: int) -> None:
        """Close what was opened. Raises CudaError."""
        with self.current():
            _call("cuIpcCloseMemHandle", address)


class _Lane:
    """Two stages of pinned memory on a stream of its own: DMA uses one while the other is filled or emptied. For one thread."""

    def __init__(self) -> None:
        self._stream = _made(ctypes.c_void_p, "cuStreamCreate", _STREAM_NON_BLOCKING)
        self._stages = [_made(ctypes.c_void_p, "cuMemHostAlloc", STAGE_BYTES, _HOST_ALLOC_PORTABLE) for _ in range(2)]
        self._events = [_made(ctypes.c_void_p, "cuEventCreate", _EVENT_BLOCKING_SYNC_NO_TIMING) for _ in range(2)]

    def to_host(self, copies: Sequence[tuple[int, Buffer]]) -> None:
        """See :meth:`Device.copy_to_host`."""
        filled: list[tuple[int, int, int]] | None = None
        number = 0
        try:
            for number, portion in enumerate(_portions(copies)):
                stage = self._stages[number % 2]
                for source, _, offset, size in portion:
                    _call("cuMemcpyDtoHAsync_v2", stage + offset, source, size, self._stream)
                _call("cuEventRecord", self._events[number % 2], self._stream)
                self._empty(number - 1, filled)
                filled = [(target, offset, size) for _, target, offset, size in portion]
            self._empty(number, filled)
        except CudaError:
            _call("cuStreamSynchronize", self._stream)  # nothing may be under way when the stages are used again
            raise

    def from_host(self, copies: Sequence[tuple[int, Buffer]]) -> None:
        """See :meth:`Device.copy_from_host`."""
        number = -1
        try:
            for number, portion in enumerate(_portions(copies)):
                stage, event = self._stages[number % 2], self._events[number % 2]
                if number > 1:
                    _call("cuEventSynchronize", event)
                for target, source, offset, size in portion:
                    ctypes.memmove(stage + offset, source, size)
                    _call("cuMemcpyHtoDAsync_v2", target, stage + offset, size, self._stream)
                _call("cuEventRecord", event, self._stream)
            if number >= 0:
                _call("cuEventSynchronize", self._events[number % 2])
        except CudaError:
            _call("cuStreamSynchronize", self._stream)
            raise

    def _empty(self, number: int, filled: Sequence[tuple[int, int, int]] | None) -> None:
        if filled is None:
            return
        _call("cuEventSynchronize", self._events[number % 2])
        for target, offset, size in filled:
            ctypes.memmove(target, self._stages[number % 2] + offset, size)


def _portions(copies: Sequence[tuple[int, Buffer]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """(address on the GPU, address on the host, offset in the stage, bytes), as much at a time as a stage holds."""
    portion: list[tuple[int, int, int, int]] = []
    used = 0
    for address, buffer in copies:
        size = memoryview(buffer).nbytes
        target = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if size else 0
        done = 0
        while done < size:
            part = min(size - done, STAGE_BYTES - used)
            portion.append((address + done, target + done, used, part))
            done, used = done + part, used + part
            if used == STAGE_BYTES:
                yield portion
                portion, used = [], 0
    if portion:
        yield portion


class DeviceView:
    """A range of opened memory; as long as it or any slice of it lives, the memory stays open.

    Attributes:
        address: on the GPU, for kernels and copies of this process.
        nbytes: length.
        obj: what keeps the memory open, as that of a memoryview does.
    """

    __slots__ = ("address", "nbytes", "obj")

    def __init__(self, obj: object, address: int, nbytes: int) -> None:
        self.obj = obj
        self.address = address
        self.nbytes = nbytes

    def __getitem__(self, part: slice) -> DeviceView:
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise ValueError("only whole ranges of GPU memory can be named")
        return DeviceView(self.obj, self.address + start, max(0, stop - start))


class _Opened:
    """Is there for as long as somebody may use the memory."""


class DeviceMapping:
    """Memory of another process, as :class:`~kvtierd.memory.SharedMapping` is for host memory."""

    def __init__(self, device: Device, address: int, size_bytes: int, on_closed: Callable[[], None]) -> None:
        self.size_bytes = size_bytes
        self.device = device
        opened = _Opened()
        weakref.finalize(opened, _close, device, address, on_closed).atexit = False
        self._view: DeviceView | None = DeviceView(opened, address, size_bytes)

    @property
    def view(self) -> DeviceView:
        """All of it. Raises ValueError after :meth:`release`."""
        if self._view is None:
            raise ValueError("the memory has been released")
        return self._view

    def release(self) -> None:
        """Close it: at once when nobody holds a view, else when the last view goes away."""
        self._view = None


def _close(device: Device, address: int, on_closed: Callable[[], None]) -> None:
    try:
        device.close_memory(address)
    except CudaError as e:
        log.error("memory of another process cannot be closed, and counts as open for as long as this one lives: %s", e)
        return
    on_closed()


def find_devices() -> list[Device]:
    """All GPUs that this process may see. Makes no context. Raises CudaError when there is no working driver."""
    return [Device(n) for n in range(_made(ctypes.c_int, "cuDeviceGetCount"))]
