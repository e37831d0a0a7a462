"""The client's side of the descriptor socket: maps the daemon's memory, and gives it back when the daemon asks.

One connection a process; the kernel closes it when the process dies, which is how the daemon knows. A reader thread takes what
the daemon sends: descriptors that were asked for, and extents that must be unmapped. An extent is unmapped when its last view is
gone, and only then confirmed, so a copy that is still going on never loses its memory. For the same reason the connection stays
open after the daemon has hung up, until :meth:`ExtentMap.close`: up to then this process may be copying.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from kvtierd.client.descriptors import MAX_EXTENTS_PER_PACKET, DescriptorSocket, Signal, refusal
from kvtierd.client.devices import Importer, open_extent, prove
from kvtierd.cuda import DeviceMapping
from kvtierd.errors import DaemonUnavailableError, KvtierdError, Reason, RequestError
from kvtierd.memory import SharedMapping, can_populate, filled_ranges
from kvtierd.model import slot_extent, slot_index
from kvtierd.v1 import fdpass_pb2 as pb

log = logging.getLogger(__name__)

POPULATE_CHUNK_BYTES: Final = 8 << 20
MAX_LINGERING: Final = 1024
"""Revoked extents that are still mapped because somebody holds a view; past this nothing new is mapped."""
MAX_CONFIRMED_PER_PACKET: Final = 1024
CONFIRM_TIMEOUT_S: Final = 1.0

MappingHook = Callable[[int, SharedMapping], None]


class _Extent:
    """One mapped extent. ``view`` keeps the memory mapped as long as this object or any slice lives."""

    __slots__ = ("mapping", "shard", "slot_bytes", "view")

    def __init__(self, mapping: SharedMapping | DeviceMapping, slot_bytes: int, shard: int) -> None:
        self.mapping = mapping
        self.view: Any = mapping.view
        self.slot_bytes = slot_bytes
        self.shard = shard


class ExtentMap:
    """Extents of one session in this process. Thread-safe; a forked child needs one of its own.

    Args:
        descriptor_socket: path from Welcome.
        session: token from Welcome.
        shard: shard whose extents this process maps; -1 for all.
        pins_memory: this process registers mapped memory with a device; the daemon notes it.
        timeout_s: for joining, and for each request.
        numa_node: node of the process's device; -1 when it does not matter.
        on_mapped: called with (extent id, mapping) before the first view of an extent is given out. When it raises, the extent
            is not mapped and its callers get a RequestError.
        on_revoked: called with (extent id, mapping) before an extent is unmapped, to take its registration back. When it raises,
            the extent stays mapped and unconfirmed.
        on_lost: called once when the daemon's side goes away, not for ``close``. All hooks run in the reader thread, but for
            ``on_revoked`` during ``close``, which runs in the caller's. A hook must not ask for views.
        device: opens memory of the GPU that this process copies on; then slots may be in it, and views of these are as ``device``
            makes them. None where this process has no GPU. The hooks for mapped memory hear nothing of it.

    Attributes:
        boot_epoch: boot of the daemon.
        slot_bytes: bytes of one slot of each shard.
        existing: extents that there were for this process when it joined; to map them ahead saves their first users the time.

    Raises:
        DaemonUnavailableError: the daemon does not answer.
        RequestError: the daemon refuses.
    """

    def __init__(
        self,
        descriptor_socket: str | os.PathLike[str],
        session: bytes,
        shard: int = -1,
        pins_memory: bool = False,
        timeout_s: float = 5.0,
        *,
        numa_node: int = -1,
        on_mapped: MappingHook | None = None,
        on_revoked: MappingHook | None = None,
        on_lost: Callable[[], None] | None = None,
        device: Importer | None = None,
    ) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._on_mapped = on_mapped
        self._on_revoked = on_revoked
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._usable: dict[int, _Extent] = {}
        """What ``view`` finds without a lock: nothing once the daemon has gone."""
        self._lock = threading.Lock()
        # Under the lock:
        self._mapped: dict[int, _Extent] = {}
        self._pending: dict[int, Future[_Extent | KvtierdError]] = {}
        self._lost: str | None = None
        self._closing = False
        # The reader's:
        self._filling: deque[tuple[SharedMapping, int, Iterator[tuple[int, int]]]] = deque()
        self._stuck: list[_Extent] = []
        self._last_word = ""
        # Appended to by any thread that drops a last view, so without a lock:
        self._unmapped: deque[int] = deque()
        self._lingering: set[int] = set()
        self._send_lock = threading.Lock()
        self._requests: deque[list[int]] = deque()
        """Extents asked for, one entry a packet, in the order in which the daemon answers."""
        self._signal = Signal()
        join = pb.Join(session=session, shard=shard, pins_memory=pins_memory, numa_node=numa_node)
        if device is not None:
            join.device = device.uuid
        self._socket, joined = DescriptorSocket.join(os.fspath(descriptor_socket), join, timeout_s)
        self.boot_epoch: int = joined.boot_epoch
        self.slot_bytes: tuple[int, ...] = tuple(joined.slot_bytes)
        self.existing: tuple[int, ...] = tuple(joined.extents)
        self._thread = threading.Thread(target=self._read, name="kvtierd-client-extents", daemon=True)
        self._thread.start()

    # ---- views

    @property
    def closed(self) -> bool:
        """True when the daemon's side has gone or after ``close``: views stay readable, but no new ones are given out."""
        return self._lost is not None

    @property
    def mapped_extents(self) -> frozenset[int]:
        """Ids of the extents that are mapped and not revoked."""
        with self._lock:
            return frozenset(self._mapped)

    def view(self, slot: int, length: int | None = None, count: int = 1) -> Any:
        """The first ``length`` bytes of a slot, or of ``count`` slots side by side (all when None), mapped when it is the first of
        its extent.

        A memoryview, or of GPU memory a :class:`~kvtierd.cuda.DeviceView`.

        Raises:
            DaemonUnavailableError: the connection is gone, or the daemon does not answer in time.
            RequestError: NOT_FOUND when the extent was revoked or is not this process's; LIMIT when this process has no room.
            ValueError: the slots are shorter, or beyond the end of their extent.
        """
        extent = self._usable.get(slot_extent(slot)) or self._map([slot_extent(slot)], self._timeout_s)[0]
        slot_bytes = extent.slot_bytes
        start = slot_index(slot) * slot_bytes
        end = start + (slot_bytes * count if length is None else length)
        if not start <= end <= start + slot_bytes * count or end > extent.mapping.size_bytes:
            raise ValueError(f"slot {slot_index(slot)} has no {length} bytes; its extent has slots of {slot_bytes} bytes")
        return extent.view[start:end]

    def stretches(self, slots: npt.NDArray[np.int64], length: int, most_bytes: int) -> list[tuple[int, int]]:
        """Where slots of mapped extents lie side by side, in order: (first, behind the last) of each stretch of them.

        Args:
            slots: (slot,) int64.
            length: bytes that are used of each; less than a slot has leaves a gap, and each slot is a stretch of its own.
            most_bytes: of one stretch, unless a slot alone has more.
        """
        most = max(1, most_bytes // max(1, length))
        begins = np.flatnonzero(np.diff(slots, prepend=-2) != 1).tolist()  # extents are numbered above a slot's index
        found: list[tuple[int, int]] = []
        for begin, end in itertools.pairwise([*begins, len(slots)]):
            extent = self._usable.get(slot_extent(int(slots[begin])))
            step = most if extent is not None and extent.slot_bytes == length else 1
            found.extend((at, min(at + step, end)) for at in range(begin, end, step))
        return found

    def holds(self, extent_ids: Iterable[int]) -> bool:
        """Whether views of all these extents can be given out without asking the daemon."""
        return all(extent_id in self._usable for extent_id in extent_ids)

    def map(self, extent_ids: Iterable[int], timeout_s: float | None = None) -> None:
        """Map extents ahead of their first view, in as few requests as possible. Raises as :meth:`view` does."""
        missing = [extent_id for extent_id in dict.fromkeys(extent_ids) if extent_id not in self._usable]
        if missing:
            self._map(missing, self._timeout_s if timeout_s is None else timeout_s)

    def _map(self, extent_ids: list[int], timeout_s: float) -> list[_Extent]:
        if os.getpid() != self._pid:
            raise DaemonUnavailableError("this process was forked off the one that joined; make an ExtentMap of its own")
        until_s = time.monotonic() + timeout_s
        waits: list[_Extent | Future[_Extent | KvtierdError]] = []
        ask: list[int] = []
        with self._lock:
            if self._lost is not None:
                raise DaemonUnavailableError(self._lost)
            if len(self._lingering) >= MAX_LINGERING:
                raise RequestError(Reason.LIMIT, f"{MAX_LINGERING} revoked extents are still in use here; drop views of them")
            for extent_id in extent_ids:
                known = self._mapped.get(extent_id) or self._pending.get(extent_id)
                if known is None:
                    known = self._pending[extent_id] = Future()
                    ask.append(extent_id)
                waits.append(known)
        try:
            for start in range(0, len(ask), MAX_EXTENTS_PER_PACKET):
                self._ask(ask[start : start + MAX_EXTENTS_PER_PACKET], until_s)
        except DaemonUnavailableError as e:
            self._settle(dict.fromkeys(ask, e))  # whoever waits for one of them may ask again
            raise
        return [wait if isinstance(wait, _Extent) else _outcome(wait, until_s) for wait in waits]

    def _ask(self, extent_ids: list[int], until_s: float) -> None:
        request = pb.DescriptorRequest(map=pb.MapExtents(extents=extent_ids))
        with self._send_lock:
            self._requests.append(extent_ids)  # first, for the answer may come at once
            try:
                self._socket.send(request, until_s)
            except BaseException:
                self._requests.pop()
                raise

    def _settle(self, outcomes: dict[int, _Extent | RequestError | DaemonUnavailableError]) -> None:
        """Publish what was mapped, and answer those who wait."""
        answers = []
        with self._lock:
            for extent_id, outcome in outcomes.items():
                if isinstance(outcome, _Extent):
                    self._mapped[extent_id] = outcome
                    if self._lost is None:
                        self._usable[extent_id] = outcome
                future = self._pending.pop(extent_id, None)
                if future is not None:
                    answers.append((future, outcome))
        for future, outcome in answers:
            future.set_result(outcome)

    # ---- the reader thread

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        poll.register(self._signal.fd, select.POLLIN)
        reason = "the daemon has closed the descriptor socket"
        try:
            while not self._closing:
                # Page tables are filled in between packets; a confirmation that could not be sent is tried again.
                wait_ms = 0 if self._filling else CONFIRM_TIMEOUT_S * 1000 if self._unmapped else None
                ready = {fd for fd, _ in poll.poll(wait_ms)}
                if self._signal.fd in ready:
                    self._signal.clear()
                if self._socket.fileno() in ready and not self._take_packet():
                    break
                self._confirm()
                self._fill_some()
        except (OSError, DecodeError, KvtierdError) as e:
            reason = f"the descriptor socket failed: {e}"
        except Exception as e:  # a bug, but the callers must not wait for ever
            log.exception("the reader of the descriptor socket failed")
            reason = f"the reader of the descriptor socket failed: {e}"
        finally:
            while self._filling:
                os.close(self._filling.popleft()[1])
            self._lose(self._last_word or reason)

    def _take_packet(self) -> bool:
        packet = self._socket.receive()
        try:
            if packet.message is None:
                return False
            kind = packet.message.WhichOneof("message")
            if kind == "extents":
                self._take_extents(packet.message.extents, packet.fds)
            elif kind == "revoked":
                for extent_id in packet.message.revoked.extents:
                    self._revoke(extent_id)
            elif kind == "device_probe":
                self._send(pb.DescriptorRequest(device_proof=prove(self._device, packet.message.device_probe)))
            elif kind == "error":
                error = refusal(packet.message.error)
                self._last_word = f"the daemon refused this process: {error.message}"
                self._settle(dict.fromkeys(self._requests.popleft() if self._requests else [], error))
        finally:
            packet.close()
        return True

    def _take_extents(self, answer: pb.ExtentDescriptors, fds: list[int]) -> None:
        asked = self._requests.popleft() if self._requests else []
        outcomes: dict[int, _Extent | RequestError | DaemonUnavailableError] = {
            extent_id: RequestError(Reason.NOT_FOUND, f"extent {extent_id} is gone, or is not this process's to map")
            for extent_id in asked
        }
        whole = len(fds) == sum(not info.device_handle for info in answer.extents)
        own = iter(fds)
        for info in answer.extents:
            try:
                if info.device_handle:
                    gone = partial(self._memory_gone, info.id)
                    outcomes[info.id] = _Extent(open_extent(self._device, info, gone), info.slot_bytes, info.shard)
                    continue
                if not whole:
                    self._memory_gone(info.id)
                    raise RequestError(Reason.LIMIT, "this process has no descriptors left; raise its limit of open files")
                outcomes[info.id] = self._adopt(info, next(own))
            except RequestError as e:
                outcomes[info.id] = e
        self._settle(outcomes)

    def _adopt(self, info: pb.Extent, fd: int) -> _Extent:
        """Map an extent. Raises RequestError when this process cannot; the daemon gets a confirmation then."""
        extent_id = info.id
        try:
            if os.fstat(fd).st_size < info.size_bytes or not info.slot_bytes:
                raise OSError("its memory is not as large as the daemon says")
            mapping = SharedMapping(fd, info.size_bytes, lambda: self._memory_gone(extent_id))
        except OSError as e:
            self._memory_gone(extent_id)
            raise RequestError(Reason.LIMIT, f"extent {extent_id} cannot be mapped: {e}") from e
        if self._on_mapped is not None:
            try:
                self._on_mapped(extent_id, mapping)
            except Exception as e:
                log.exception("on_mapped failed for extent %d", extent_id)
                mapping.release()
                raise RequestError(Reason.INTERNAL, f"on_mapped failed for extent {extent_id}: {e}") from e
        if can_populate():
            own = os.dup(fd)
            self._filling.append((mapping, own, filled_ranges(own, info.size_bytes, POPULATE_CHUNK_BYTES)))
        return _Extent(mapping, info.slot_bytes, info.shard)

    def _fill_some(self) -> None:
        """Enter one more portion of pages that exist into this process's page table, so that copies take no faults.

        Pages that do not exist are left alone: the daemon makes them, and they are charged to it.
        """
        if not self._filling:
            return
        mapping, fd, chunks = self._filling[0]
        try:
            chunk = next(chunks, None)
            if chunk is not None:
                mapping.populate(*chunk)
                return
        except (OSError, ValueError) as e:
            log.debug("page tables of an extent were not filled: %s", e)  # revoked meanwhile, or no memory for them
        self._filling.popleft()
        os.close(fd)

    def _revoke(self, extent_id: int) -> None:
        with self._lock:
            extent = self._mapped.pop(extent_id, None)
            self._usable.pop(extent_id, None)
        if extent is None:
            self._memory_gone(extent_id)
        elif self._unregister(extent_id, extent):
            self._lingering.add(extent_id)
            extent.mapping.release()
        else:
            self._stuck.append(extent)  # a device may still use it: it stays mapped, and counts with the daemon

    def _unregister(self, extent_id: int, extent: _Extent) -> bool:
        if self._on_revoked is not None and isinstance(extent.mapping, SharedMapping):
            try:
                self._on_revoked(extent_id, extent.mapping)
            except Exception:
                log.exception("on_revoked failed for extent %d", extent_id)
                return False
        return True

    def _memory_gone(self, extent_id: int) -> None:
        """An extent is not mapped any more; called in any thread at any time, so the confirmation is left to the reader."""
        self._unmapped.append(extent_id)
        self._signal.set()

    def _confirm(self) -> None:
        while self._unmapped:
            gone = [self._unmapped.popleft() for _ in range(min(len(self._unmapped), MAX_CONFIRMED_PER_PACKET))]
            self._lingering.difference_update(gone)
            try:
                self._send(pb.DescriptorRequest(unmapped=pb.ExtentsUnmapped(extents=gone)))
            except DaemonUnavailableError:
                self._unmapped.extendleft(reversed(gone))
                return

    def _send(self, request: pb.DescriptorRequest) -> None:
        """From the reader. Raises DaemonUnavailableError when the daemon does not read in time."""
        with self._send_lock:
            self._socket.send(request, time.monotonic() + CONFIRM_TIMEOUT_S)

    # ---- end

    def _lose(self, reason: str) -> None:
        """Nothing can be mapped any more: tell those who wait."""
        with self._lock:
            first = self._lost is None
            self._lost = self._lost or reason
            self._usable = {}
            pending = list(self._pending)
            tell = first and not self._closing
        self._settle({extent_id: DaemonUnavailableError(reason) for extent_id in pending})
        if tell and self._on_lost is not None:
            try:
                self._on_lost()
            except Exception:
                log.exception("on_lost failed")

    def close(self) -> None:
        """Close the connection and unmap. Views that are still held stay readable. May be called again, from any thread.

        To the daemon this is the end of the process: call it when no copy into or out of slots is going on any more.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._lose("this client is closed")
        self._signal.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            extents, self._mapped = self._mapped, {}
        while extents:
            self._give_back(*extents.popitem())  # nothing here refers to it any more when the connection ends
        # The connection ends last: until then the daemon counts this process as one that may be copying.
        self._socket.close()

    def _give_back(self, extent_id: int, extent: _Extent) -> None:
        if os.getpid() == self._pid and not self._unregister(extent_id, extent):
            self._stuck.append(extent)
        else:
            extent.mapping.release()


def _outcome(future: Future[_Extent | KvtierdError], until_s: float) -> _Extent:
    """Wait for an extent. Raises an exception of this thread's own, for several may wait for one extent."""
    try:
        outcome = future.result(max(until_s - time.monotonic(), 0))
    except TimeoutError as e:
        raise DaemonUnavailableError("the daemon did not pass an extent in time") from e
    if isinstance(outcome, _Extent):
        return outcome
    if isinstance(outcome, RequestError):
        raise RequestError(outcome.reason, outcome.message)
    raise DaemonUnavailableError(str(outcome))
