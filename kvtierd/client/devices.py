"""GPU memory of the daemon's, in a process of an engine: whether it can be opened, and opening it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvtierd.cuda import CudaError, DeviceMapping
from kvtierd.errors import Reason, RequestError
from kvtierd.v1 import fdpass_pb2 as pb

log = logging.getLogger(__name__)

MAX_PROBE_BYTES: Final = 4096
NO_DEVICE: Final = "this process has named no GPU"


class Importer(Protocol):
    """Opens GPU memory of other processes: :class:`kvtierd.cuda.Device`."""

    uuid: str

    def import_memory(self, handle: bytes, size_bytes: int, on_closed: Callable[[], None]) -> DeviceMapping:
        """See :meth:`kvtierd.cuda.Device.import_memory`."""

    def read(self, address: int, size_bytes: int) -> bytes:
        """See :meth:`kvtierd.cuda.Device.read`."""


def prove(device: Importer | None, probe: pb.DeviceProbe) -> pb.DeviceProof:
    """Open and read what the daemon has exported, and answer with that, or with the reason why it cannot be done."""
    try:
        if device is None:
            raise CudaError(NO_DEVICE)
        if probe.size_bytes > MAX_PROBE_BYTES:
            raise CudaError(f"the daemon asks for {probe.size_bytes} bytes of its memory")
        mapping = device.import_memory(probe.handle, probe.size_bytes, lambda: None)
        content = device.read(mapping.view.address, probe.size_bytes)
        mapping.release()
    except CudaError as e:
        log.warning("GPU memory of the daemon cannot be opened, so blocks go to CPU memory: %s", e)
        return pb.DeviceProof(error=str(e))
    return pb.DeviceProof(content=content)


def open_extent(device: Importer | None, info: pb.Extent, on_closed: Callable[[], None]) -> DeviceMapping:
    """Open an extent of GPU memory; ``on_closed`` is called here too when that fails. Raises RequestError LIMIT."""
    try:
        if device is None:
            raise CudaError(NO_DEVICE)
        return device.import_memory(info.device_handle, info.size_bytes, on_closed)
    except CudaError as e:
        on_closed()
        raise RequestError(Reason.LIMIT, f"extent {info.id} of GPU memory cannot be opened: {e}") from e
