"""The shared memory of the fake daemon: memfds as extents, handed out over a real descriptor socket."""

from __future__ import annotations

import array
import os
import queue
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from kvtierd.model import round_up, slot_extent, slot_id, slot_index
from kvtierd.v1 import fdpass_pb2 as fd

SLOTS_PER_EXTENT = 64


@dataclass
class Extent:
    fd: int
    slot_bytes: int
    shard: int
    free: list[int]

    @property
    def size_bytes(self) -> int:
        return self.slot_bytes * SLOTS_PER_EXTENT


@dataclass
class FakeSession:
    token: bytes
    fingerprint: bytes
    shard_bytes: list[int]
    replies: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)

    @property
    def slot_bytes(self) -> list[int]:
        return [round_up(n, 4096) for n in self.shard_bytes]


class FakeMemory:
    """Extents, their slots, and the descriptor socket. The daemon derives from it."""

    boot_epoch: int
    sessions: dict[bytes, FakeSession]
    extents: dict[int, Extent]
    connections: list[socket.socket]
    _threads: list[threading.Thread]
    _running: threading.Event
    _lock: threading.RLock  # type: ignore[valid-type]
    _changed: threading.Condition

    # -- descriptor socket ---------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections.append(connection)
            thread = threading.Thread(target=self._descriptors, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _descriptors(self, connection: socket.socket) -> None:
        try:
            while packet := connection.recv(65536):
                self._running.wait()
                self._packet(connection, fd.DescriptorRequest.FromString(packet))
        except OSError:
            pass
        finally:
            with self._changed:
                if connection in self.connections:
                    self.connections.remove(connection)
                self._changed.notify_all()
            connection.close()

    def _packet(self, connection: socket.socket, request: fd.DescriptorRequest) -> None:
        answer = fd.DescriptorResponse()
        fds: list[int] = []
        with self._lock:
            if request.HasField("join"):
                session = self.sessions.get(request.join.session)
                if session is None:
                    answer.error.reason, answer.error.message = "UNKNOWN_SESSION", "no such session"
                else:
                    answer.joined.boot_epoch = self.boot_epoch
                    answer.joined.slot_bytes.extend(session.slot_bytes)
            elif request.HasField("map"):
                for extent_id in request.map.extents:
                    extent = self.extents.get(extent_id)
                    if extent is None:
                        answer.extents.unknown.append(extent_id)
                        continue
                    fds.append(extent.fd)
                    answer.extents.extents.add(
                        id=extent_id, size_bytes=extent.size_bytes, slot_bytes=extent.slot_bytes, shard=extent.shard
                    )
                answer.extents.SetInParent()
            else:
                return
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            connection.sendmsg([answer.SerializeToString()], ancillary)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _slot(self, shard: int, slot_bytes: int) -> int:
        for extent_id, extent in self.extents.items():
            if extent.shard == shard and extent.slot_bytes == slot_bytes and extent.free:
                return slot_id(extent_id, extent.free.pop())
        extent_id = len(self.extents) + 1
        memfd = os.memfd_create(f"extent-{extent_id}")
        os.ftruncate(memfd, slot_bytes * SLOTS_PER_EXTENT)
        self.extents[extent_id] = Extent(memfd, slot_bytes, shard, list(range(SLOTS_PER_EXTENT))[::-1])
        return self._slot(shard, slot_bytes)

    def _free(self, slots: list[int]) -> None:
        for slot in slots:
            self.extents[slot_extent(slot)].free.append(slot_index(slot))

    def slot_view(self, slot: int, length: int) -> bytes:
        """Bytes of a slot."""
        extent = self.extents[slot_extent(slot)]
        return os.pread(extent.fd, length, slot_index(slot) * extent.slot_bytes)

    def _store(self, slot: int, data: bytes) -> None:
        extent = self.extents[slot_extent(slot)]
        os.pwrite(extent.fd, data, slot_index(slot) * extent.slot_bytes)
