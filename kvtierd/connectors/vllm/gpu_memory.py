"""Host memory that a CUDA device copies from and to: registered when an extent is mapped, let go before it is unmapped."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

from kvtierd.memory import SharedMapping, can_populate

REGISTER_BYTES: Final = 64 << 20
"""Host memory is registered in pieces that end at multiples of this address: a call holds up what the engine launches meanwhile,
and one for very much memory fails. The driver refuses a copy over the border of two registrations, so copies are cut there too."""
FAULT_IN_BYTES: Final = 16 << 20
FAULT_IN_THREADS: Final = 8
_PORTABLE: Final = 1

log = logging.getLogger("vllm.kvtierd")


class HostMemory:
    """Registrations of one process with one device. Thread-safe.

    Args:
        device: a CUDA device.
        on_error: called after a registration failed; the error stays with the thread, and the next kernel that it launches
            reports it. May raise RuntimeError.
    """

    def __init__(self, device: torch.device, on_error: Callable[[], None]) -> None:
        self._device = device
        self._on_error = on_error
        self._lock = threading.Lock()
        self._told = False
        self.gate = Gate()
        self.registered: dict[int, list[int]] = {}
        """Start of each mapping, and the addresses of its pieces. Under the lock."""

    def register(self, extent_id: int, mapping: SharedMapping) -> None:
        """Register an extent. Where that fails, copies go through the driver's own buffers, and are slower."""
        runtime: Any = torch.cuda.cudart()
        done: list[int] = []
        address, end = mapping.address, mapping.address + mapping.size_bytes
        with torch.cuda.device(self._device), _Pages(mapping) as pages:
            while address < end:
                size = min(end, border(address)) - address
                pages.wait(address + size - mapping.address)
                error = runtime.cudaHostRegister(address, size, _PORTABLE)
                if int(error) != 0:
                    _unregister(done)
                    self._not_pinned(extent_id, mapping.size_bytes, runtime.cudaGetErrorString(error))
                    return
                done.append(address)
                address += size
        with self._lock:
            self.registered[mapping.address] = done

    def _not_pinned(self, extent_id: int, size_bytes: int, why: str) -> None:
        with suppress(RuntimeError):
            self._on_error()
        if self._told:
            return
        self._told = True
        log.warning(
            "kvtierd: %d MiB of extent %d could not be pinned (%s): KV blocks are copied several times slower. Raise the limit of "
            "locked memory (ulimit -l unlimited; in containers --ulimit memlock=-1)",
            size_bytes >> 20,
            extent_id,
            why,
        )

    def unregister(self, mapping: SharedMapping) -> None:
        """Take the registration of an extent back, between two portions of a copy.

        Raises:
            RuntimeError: the device does not let go of the memory, so it must stay mapped.
        """
        with self._lock:
            addresses = self.registered.pop(mapping.address, [])
        if addresses:
            with self.gate.alone(), torch.cuda.device(self._device):
                _unregister(addresses)

    def close(self) -> None:
        """Let go of everything. Raises as :meth:`unregister` does."""
        with self._lock:
            left, self.registered = self.registered, {}
        with self.gate.alone(), torch.cuda.device(self._device):
            for addresses in left.values():
                _unregister(addresses)


def border(address: int) -> int:
    """Where the piece of host memory that holds ``address`` ends."""
    return (address // REGISTER_BYTES + 1) * REGISTER_BYTES


def _unregister(addresses: list[int]) -> None:
    runtime: Any = torch.cuda.cudart()
    errors = [error for error in map(runtime.cudaHostUnregister, addresses) if int(error) != 0]
    if errors:
        raise RuntimeError(f"memory could not be unregistered from the device: {runtime.cudaGetErrorString(errors[0])}")


class _Pages:
    """Enters a mapping's pages into this process's page table by several threads, ahead of who registers them: registering would do
    it by one, several times slower."""

    def __init__(self, mapping: SharedMapping) -> None:
        self._pool = ThreadPoolExecutor(FAULT_IN_THREADS, thread_name_prefix="kvtierd-pin")
        size = mapping.size_bytes if can_populate() else 0
        starts = range(0, size, FAULT_IN_BYTES)
        self._done = deque(self._pool.submit(mapping.populate, start, min(FAULT_IN_BYTES, size - start)) for start in starts)
        self._so_far = 0

    def wait(self, end: int) -> None:
        """Wait until the pages up to here are there, or cannot be."""
        while self._done and self._so_far < end:
            self._so_far += FAULT_IN_BYTES
            if error := self._done.popleft().exception():  # registering then says so too
                log.debug("kvtierd: pages of an extent could not be faulted in: %s", error)

    def __enter__(self) -> _Pages:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


class Gate:
    """Copies are inside together; who takes memory away is alone, and before copies that come later."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = 0

    @property
    def wanted(self) -> bool:
        """Somebody waits to be alone."""
        return self._alone > 0

    def enter(self) -> None:
        """Begin to copy."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._inside += 1

    def leave(self) -> None:
        """No copy is under way any more."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def let_pass(self) -> None:
        """Between copies, none of them under way: let those who wait to be alone have their turn."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._alone)
            self._inside += 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no copy is inside."""
        with self._changed:
            self._alone += 1
            try:
                self._changed.wait_for(lambda: not self._inside)
                yield
            finally:
                self._alone -= 1
                self._changed.notify_all()
