"""What the descriptor server may give to whom: the runtime's sessions and the core's extents."""

from __future__ import annotations

import logging

from kvtierd.core.slots import Extent
from kvtierd.cuda import CudaError
from kvtierd.errors import Reason, RequestError
from kvtierd.model import FIRST_DEVICE_EXTENT, KEY_BYTES, MAX_KEYS_PER_CALL, Tier
from kvtierd.runtime import Runtime
from kvtierd.runtime.sessions import MAX_PROCESSES, Attached
from kvtierd.service.fdconnection import ExtentInfo, JoinGrant

log = logging.getLogger(__name__)


class RuntimeAuthority:
    """Implements :class:`~kvtierd.service.fdconnection.Authority` over a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._rt = runtime

    def join(self, session: bytes, shard: int, pins_memory: bool, numa_node: int, pid: int, uid: int, conn_id: int) -> JoinGrant:
        """Let a process into its session. Raises RequestError to refuse."""
        attached = self._rt.sessions.by_token(session)
        shards = len(attached.namespace.shard_bytes)
        if shard >= shards:
            raise RequestError(Reason.BAD_REQUEST, f"shard {shard} of a namespace that has {shards}, counted from 0")
        if len(attached.processes) >= MAX_PROCESSES:
            raise RequestError(Reason.LIMIT, f"session {attached.session_id} has {MAX_PROCESSES} processes already")
        attached.processes.add(conn_id)
        if numa_node >= 0:
            attached.nodes[shard] = numa_node
        what = "pins memory" if pins_memory else "pins no memory"
        who = f"pid {pid} of user {uid}"
        log.debug("%s joined session %d as shard %d (NUMA node %d, %s)", who, attached.session_id, shard, numa_node, what)
        theirs = [i for i, e in self._rt.core.state.pools[Tier.CPU].extents.items() if self._may_map(attached, e, shard)]
        return JoinGrant(self._rt.boot_epoch, attached.namespace.slot_bytes, attached.session_id, theirs)

    def may_map(self, session_id: int, extent_id: int, shard: int) -> ExtentInfo | None:
        """An extent of one of the session's realms, of the process's shard."""
        attached = self._rt.sessions.by_id(session_id)
        tier = Tier.HBM if extent_id >= FIRST_DEVICE_EXTENT else Tier.CPU
        extent = self._rt.core.state.pools[tier].extents.get(extent_id)
        if attached is None or attached.barred or extent is None or not self._may_map(attached, extent, shard):
            return None
        if tier is Tier.HBM:
            return self._device_extent(extent)
        return ExtentInfo(extent.size_bytes, extent.slot_bytes, extent.group.shard, self._rt.cpu.fd(extent_id))

    def _device_extent(self, extent: Extent) -> ExtentInfo | None:
        hbm = self._rt.hbm
        if hbm is None or not hbm.has_extent(extent.extent_id):
            return None
        try:
            handle = hbm.export(extent.extent_id)
        except CudaError as e:
            log.error("extent %d of GPU memory cannot be exported: %s", extent.extent_id, e)
            return None
        return ExtentInfo(extent.size_bytes, extent.slot_bytes, extent.group.shard, -1, handle)

    def device_joined(self, session_id: int, conn_id: int, shard: int, uuid: str) -> None:
        """A process has named its GPU: without an HBM tier that does not matter."""
        attached = self._rt.sessions.by_id(session_id)
        if attached is not None and self._rt.devices is not None:
            self._rt.devices.joined(attached, conn_id, shard, uuid)

    def device_proved(self, session_id: int, conn_id: int, content: bytes, error: str) -> None:
        """A process tells what it has read of a GPU's memory."""
        attached = self._rt.sessions.by_id(session_id)
        if attached is None:
            raise RequestError(Reason.UNKNOWN_SESSION, "the session has ended; attach again")
        if self._rt.devices is not None:
            self._rt.devices.proved(attached, conn_id, content, error)

    def probe(self, session_id: int, tenant: str, key: bytes, count: int) -> bool:
        """Whether a load would find its first block."""
        attached = self._rt.sessions.by_id(session_id)
        if attached is None:
            raise RequestError(Reason.UNKNOWN_SESSION, "the session has ended; attach again")
        if len(key) != KEY_BYTES:
            raise RequestError(Reason.BAD_KEY, f"a key takes {KEY_BYTES} bytes; got {len(key)}")
        return self._rt.probe(attached, tenant, key, min(count, MAX_KEYS_PER_CALL))

    def _may_map(self, attached: Attached, extent: Extent, shard: int) -> bool:
        """True for an extent that a session's process for this shard (-1: for all) may map."""
        return shard in (-1, extent.group.shard) and self._may_see(attached, extent.group.realm_id)

    def _may_see(self, attached: Attached, realm_id: int) -> bool:
        """True for a realm that a session acts for, and for one whose blocks such a realm finds because both are shared."""
        if realm_id in attached.realm_ids:
            return True
        realms = self._rt.core.state.realms
        realm = realms.get(realm_id)
        return (
            realm is not None
            and realm.shared
            and any((own := realms.get(i)) is not None and own.index is realm.index for i in attached.realm_ids)
        )

    def unmapped(self, conn_id: int, extent_ids: list[int]) -> None:
        """Nothing to do: the server itself keeps track of who holds what."""

    def process_gone(self, session_id: int, conn_id: int) -> None:
        """A process has died or closed; the last one ends its session."""
        attached = self._rt.sessions.by_id(session_id)
        if attached is not None:
            attached.processes.discard(conn_id)
            if self._rt.devices is not None:
                self._rt.devices.gone(attached, conn_id)
            self._rt.end_if_over(attached)

    def extent_released(self, extent_id: int) -> None:
        """See the protocol."""
        self._rt.runner.extent_released(extent_id)
