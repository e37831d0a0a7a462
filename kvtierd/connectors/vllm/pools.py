"""The engine's connection to the daemon: one client for each pool, made once the ranks' layouts are known."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from kvtierd.client import BreakerState, Client, Prober
from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.vllm.hashes import resolve_hashing
from kvtierd.connectors.vllm.host import host_identity, same_host
from kvtierd.connectors.vllm.identity import EnginePlan, engine_plan
from kvtierd.connectors.vllm.joining import JOIN_TIMEOUT_S
from kvtierd.connectors.vllm.layout import UnsupportedLayoutError
from kvtierd.connectors.vllm.metadata import Rank, RankLayout, SessionInfo
from kvtierd.connectors.vllm.settings import Settings
from kvtierd.errors import KvtierdError

BREAKER: Final = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)

log = logging.getLogger("vllm.kvtierd")


class Pools:
    """Plan and clients of one engine.

    Args:
        vllm_config: of the engine.
        layouts: of every rank.
        settings: of the connector.
        engine_id: for the daemon's status.

    Raises:
        UnsupportedLayoutError: the engine cannot be served.
        ValueError: the daemon's address is malformed.
    """

    def __init__(self, vllm_config: Any, layouts: Mapping[Rank, RankLayout], settings: Settings, engine_id: str) -> None:
        _check_hosts(layouts)
        algorithm, self.hashes_usable = resolve_hashing(vllm_config)
        self.plan: EnginePlan = engine_plan(vllm_config, layouts, settings, algorithm)
        self._told: dict[int, bytes] = {}
        self._probers: dict[int, Prober] = {}
        self._joining: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False
        name = f"vllm {vllm_config.model_config.model} {engine_id}"
        on_gpu = vllm_config.device_config.device_type not in ("cpu", "")
        self.clients = [
            Client(
                namespace,
                settings.address or None,
                settings.tenant,
                settings.lookup_timeout_ms / 1000,
                name[:64],
                pins_memory=on_gpu,
                token_file=settings.token_file or None,
                patient=False,  # an engine computes in the time that it would wait
            )
            for namespace in self.plan.namespaces
        ]

    @property
    def attached(self) -> bool:
        """Whether every client has a session that works."""
        return all(client.status.attached for client in self.clients)

    @property
    def breaker(self) -> int:
        """The worst of the clients' circuit breakers: 0 closed, 1 half open, 2 open."""
        return max(BREAKER.index(client.status.breaker) for client in self.clients)

    @property
    def reachable(self) -> bool:
        """Whether calls go to the daemon: it is attached, or the very first attach is under way."""
        return all(client.status.breaker is BreakerState.CLOSED for client in self.clients)

    def new_sessions(self) -> list[SessionInfo]:
        """Sessions that began since the last call, for the workers to join."""
        fresh = []
        for pool, client in enumerate(self.clients):
            token, socket = client.session_token, client.descriptor_socket
            if token and socket and self._told.get(pool) != token:
                self._told[pool] = token
                fresh.append(SessionInfo(pool, token, socket, self.plan.replicated[pool]))
        return fresh

    def prober(self, pool: int, calls: Background) -> Prober | None:
        """What probes of a pool go through; None while there is none. Joins one in the background for each new session."""
        client = self.clients[pool]
        token, socket = client.session_token, client.descriptor_socket
        prober = self._probers.get(pool)
        if prober is not None and (prober.closed or prober.session != token):
            del self._probers[pool]
            prober.close()
            prober = None
        if prober is None and token and socket and self._joining.get(pool) != token:
            self._joining[pool] = token  # tried once for each session: without it lookups take a little longer
            calls.submit(partial(self._join, pool, token, socket))
        return prober

    def _join(self, pool: int, token: bytes, socket: str) -> None:
        """In the background."""
        try:
            prober = Prober(socket, token, JOIN_TIMEOUT_S)
        except KvtierdError as e:
            log.debug("kvtierd: probes of pool %d cannot be made: %s", pool, e)
            return
        with self._lock:
            if not self._closed:
                self._probers[pool] = prober
                return
        prober.close()

    def close(self) -> None:
        """End the sessions."""
        with self._lock:
            self._closed = True
        for prober in self._probers.values():
            prober.close()
        for client in self.clients:
            client.close()


def _check_hosts(layouts: Mapping[Rank, RankLayout]) -> None:
    here = host_identity()
    for rank, layout in sorted(layouts.items()):
        if layout.host and not same_host(layout.host, here):
            raise UnsupportedLayoutError(
                f"rank {rank} runs on the host {layout.host} and the engine's scheduler on {here} (name and boot id); a daemon "
                "shares memory with processes of its own host only, so keep tensor and pipeline parallel ranks on one host"
            )
