"""The HBM tier's memory: extents on GPUs, which engines on the same GPUs open, and the way from there to CPU memory and back.

The core decides which extents there are and keeps their sum on each GPU within the capacity. Nothing is made on a GPU before the
first engine that is on it has joined: then the process gets a context there. On top of the capacity a GPU gives the context, which
takes some hundred MiB, and one piece of memory with random bytes, by which an engine shows that it can open what is exported.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Final

from typing_extensions import Buffer

from kvtierd.config import HbmConfig
from kvtierd.cuda import PIECE_BYTES, CudaError, Device, find_devices
from kvtierd.errors import StartupError
from kvtierd.model import FIRST_DEVICE_EXTENT, Result, round_up, slot_extent, slot_index
from kvtierd.tiers.base import BlockIo

log = logging.getLogger(__name__)

SECRET_BYTES: Final = 32


class HbmPool:
    """All memory of the HBM tier. Thread-safe, as long as each extent is made and freed by one caller.

    Args:
        devices: the GPUs; their places in this order are what the core calls them by.
    """

    path: Final = "cudaipc"

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        self._lock = threading.Lock()
        self._secrets: dict[int, tuple[bytes, bytes]] = {}
        """By place: what its probe contains, and the name that it is exported by."""
        self._extents: dict[int, tuple[Device, int, int]] = {}
        """GPU, address and bytes of a slot."""

    @classmethod
    def find(cls, config: HbmConfig) -> HbmPool:
        """Find the configured GPUs. Makes nothing on them. Raises StartupError that names the fix."""
        try:
            seen = find_devices()
        except CudaError as e:
            raise StartupError(
                f"hbm.capacity is set, but no GPU can be used: {e}; give the daemon access to the GPUs (in containers "
                "--gpus all), or set hbm.capacity to 0"
            ) from e
        chosen = [_named(seen, name) for name in dict.fromkeys(config.devices)] if config.devices else seen
        small = next((d for d in chosen if d.total_bytes < config.capacity), None)
        if small is not None:
            raise StartupError(f"hbm.capacity is more than the {small.total_bytes} bytes of {small.uuid}; lower it")
        return cls(list(dict.fromkeys(chosen)))

    def place_of(self, uuid: str) -> int | None:
        """The place of a GPU; None when it has no pool."""
        return next((place for place, device in enumerate(self.devices) if device.uuid == uuid), None)

    def probe(self, place: int) -> tuple[bytes, bytes]:
        """What a process has to find to be given memory of a GPU, and the name that it opens for that.

        Makes the context when it is the first, which takes a moment. Raises CudaError.
        """
        with self._lock:
            known = self._secrets.get(place)
            if known is None:
                device = self.devices[place]
                device.open()
                address = device.allocate(PIECE_BYTES)
                secret = secrets.token_bytes(SECRET_BYTES)
                device.write(address, secret)
                known = self._secrets[place] = secret, device.export(address)
                log.info("%s serves engines", device.uuid)
            return known

    # ---- extents

    def create(self, extent_id: int, place: int, slot_bytes: int, slot_count: int) -> None:
        """Make an extent, all zeros. The caller keeps the sum within the capacity. Raises CudaError."""
        assert extent_id >= FIRST_DEVICE_EXTENT
        assert extent_id not in self._extents
        device = self.devices[place]
        address = device.allocate(round_up(slot_bytes * slot_count, PIECE_BYTES))
        self._extents[extent_id] = device, address, slot_bytes

    def has_extent(self, extent_id: int) -> bool:
        """True for an extent that was made and not freed."""
        return extent_id in self._extents

    def export(self, extent_id: int) -> bytes:
        """The name that processes open an extent by. Raises KeyError, CudaError."""
        device, address, _ = self._extents[extent_id]
        return device.export(address)

    def free(self, extent_id: int) -> None:
        """Give an extent back, which no process has open any more. Raises KeyError, CudaError: then it is still there."""
        device, address, _ = self._extents[extent_id]
        device.free(address)
        del self._extents[extent_id]

    def address(self, slot: int) -> tuple[Device, int]:
        """Where a slot is. Raises KeyError when its extent does not exist."""
        device, address, slot_bytes = self._extents[slot_extent(slot)]
        return device, address + slot_index(slot) * slot_bytes

    # ---- as a store

    def read(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Fill the blocks' buffers from GPU memory, by DMA. One result a block; blocks, and is called from worker threads."""
        return self._copy(blocks, Device.copy_to_host, "read")

    def write(self, blocks: Sequence[BlockIo]) -> list[Result]:
        """Fill GPU memory from the blocks' buffers, in the same way."""
        return self._copy(blocks, Device.copy_from_host, "written")

    def _copy(self, blocks: Sequence[BlockIo], copy: Callable[[Device, list[tuple[int, Buffer]]], None], verb: str) -> list[Result]:
        copies: dict[Device, list[tuple[int, BlockIo, int]]] = {}
        for block in blocks:
            for shard, slot in enumerate(block.slots):
                device, address = self.address(slot)
                copies.setdefault(device, []).append((address, block, shard))
        failed: set[int] = set()
        for device, some in copies.items():
            try:
                copy(device, [(address, block.buffers[shard]) for address, block, shard in some])
            except CudaError as e:
                log.error("%d blocks cannot be %s on %s: %s", len(some), verb, device.uuid, e)
                failed.update(id(block) for _, block, _ in some)
        return [Result.IO_ERROR if id(block) in failed else Result.OK for block in blocks]

    def forget(self, blocks: Sequence[BlockIo]) -> None:
        """Nothing is recorded of GPU memory."""


def _named(devices: Sequence[Device], name: str) -> Device:
    for device in devices:
        if name in (device.uuid, str(device.ordinal)):
            return device
    known = ", ".join(f"{device.ordinal} ({device.uuid})" for device in devices) or "none"
    raise StartupError(f"hbm.devices names {name!r}, but the daemon may see these GPUs: {known}")
