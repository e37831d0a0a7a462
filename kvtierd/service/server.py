"""The daemon: puts runtime, sockets and metrics together, supervises its tasks, and shuts down in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from typing import Any, Final

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvtierd import __version__, tracing
from kvtierd.config import Config, ServerConfig
from kvtierd.core.stats import StatsSnapshot
from kvtierd.errors import ConfigError, StartupError
from kvtierd.model import Tier
from kvtierd.runtime import Runtime
from kvtierd.service.admin import AdminServicer
from kvtierd.service.admission import Admission
from kvtierd.service.authority import RuntimeAuthority
from kvtierd.service.calls import Calls
from kvtierd.service.certificates import Certificates
from kvtierd.service.door import Door
from kvtierd.service.event_publisher import EventPublisher
from kvtierd.service.fdpass import DescriptorServer
from kvtierd.service.handlers import HandlerServer
from kvtierd.service.kvtier import KvTierServicer, add_to_server
from kvtierd.service.logs import SlowLog, set_up_logging
from kvtierd.service.metrics import Metrics, watch_loop_lag
from kvtierd.service.peers import Peers
from kvtierd.service.socketpath import SocketPath
from kvtierd.service.spans import ReadSpans, open_exporter
from kvtierd.tiers.cpu import check_limits
from kvtierd.tiers.keeper import open_keeper
from kvtierd.transfer.executor import MoveReport
from kvtierd.v1 import admin_pb2, admin_pb2_grpc, kvtier_pb2

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES: Final = 8 << 20
"""Largest gRPC message; 65,536 keys take 2 MiB."""
STREAM_WINDOW_BYTES: Final = 16 << 10
STOP_GRACE_S: Final = 1.0


class Daemon:
    """One running daemon."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics(tenants=config.tenants)
        self._slow = SlowLog(config.log.slow)
        self._spans = ReadSpans()
        self._admission = Admission(config.server.max_concurrent_calls)
        self.runtime: Runtime
        self._certificates: Certificates | None = None  # kept until the end: gRPC does not
        self._peers = Peers(config.server.socket_mode, config.server.allow_users, config.server.allow_groups)
        self._socket = SocketPath(
            config.server.socket, socket.SOCK_STREAM, key="server.socket", name="gRPC socket", peers=self._peers, private=True
        )
        self.stopping = asyncio.Event()
        self.failure: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._up = False

    def ready(self) -> tuple[bool, str]:
        """Whether the daemon serves, and why not."""
        if self.failure is not None:
            return False, f"a task ended: {self.failure}"
        if not self._up:
            return False, "starting"
        return (False, "draining") if self.stopping.is_set() else (True, "ready")

    @property
    def hangs(self) -> bool:
        """Whether a thread will not end."""
        runtime: Runtime | None = getattr(self, "runtime", None)
        return runtime is not None and runtime.hangs

    def snapshot(self) -> StatsSnapshot:
        """All figures at this moment; also brings the metrics' states up to date."""
        runtime = self.runtime
        self.metrics.draining(runtime.core.state.draining)
        self.metrics.prefaulted(runtime.cpu.prefaulted_bytes, runtime.cpu.huge_page_bytes)
        for tier, paths in runtime.io_paths().items():
            self.metrics.io_paths(tier, paths)
        if runtime.nvme is not None:
            io = runtime.nvme.counters
            self.metrics.nvme_totals(io.written_bytes, io.read_bytes, io.write_calls, io.read_calls)
            self.metrics.folders(runtime.nvme.folder_errors(), runtime.nvme.health())
        return runtime.core.snapshot(runtime.now())

    async def serve(self) -> int:
        """Run until a signal or a failure. Returns the exit status. Raises StartupError when it cannot start."""
        config = self.config
        # From the first moment on: in a container nobody else would, and what a start takes over from memory is to be kept again.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._asked_to_stop)
        keeper = open_keeper(config.cpu.keep, config.cpu.capacity)
        check_limits(config.cpu.capacity, held=keeper.held_bytes() if keeper else 0)
        async with contextlib.AsyncExitStack() as stack:
            self._socket.claim()
            stack.callback(self._socket.release)
            self.runtime = Runtime(config, keeper=keeper)
            # Health is answered from the start, so that a long recovery is not taken for a hang.
            await self._start_http(stack)
            self._open_tracing(stack)
            events = self._open_events(stack)
            gc.disable()  # recovery makes millions of objects that all stay
            await self.runtime.start()
            stack.push_async_callback(self.runtime.stop)
            state = self.runtime.core.state
            self.metrics.bind(self, self.ready, state.counts, state.limits)
            self.runtime.runner.on_moves = self._count_moves
            self.runtime.on_checkpoint = self.metrics.checkpoint
            if events is not None:
                self.runtime.runner.on_changes = events.publish
                await events.announce(self.runtime.core.state)
                self._supervise("KV events", events.serve_replays())
            authority = RuntimeAuthority(self.runtime)
            descriptors = DescriptorServer(config.server.fd_socket, self._peers, authority)
            await descriptors.start()
            stack.push_async_callback(descriptors.close)
            self.runtime.runner.revoker = descriptors
            if self.runtime.devices is not None:
                self.runtime.devices.send_probe = descriptors.probe_device
            self.runtime.on_barred = descriptors.turn_away
            servicer = await self._start_grpc(stack)
            if self.runtime.nvme is not None:
                self.metrics.nvme_engine(self.runtime.nvme.engine_name, encrypted=self.runtime.nvme.encrypted)
            _calm_gc()
            self._supervise("journal", self.runtime.flush_forever())
            self._supervise("loop lag", watch_loop_lag(self.metrics))
            self._supervise("admission", self._admission.watch())
            if self.runtime.direct is not None:
                self._supervise("direct moves", self.runtime.direct.watch())
            if self.runtime.tokens is not None:
                self._supervise("tokens", self.runtime.tokens.watch(self.runtime.review_sessions))
            self._up = True
            log.info("kvtierd %s serves on %s", __version__, config.server.socket)
            await self.stopping.wait()
            await self._drain()
            for task in [*self._tasks, *servicer.streams]:
                task.cancel()
        return 1 if self.failure is not None else 0

    async def _start_http(self, stack: contextlib.AsyncExitStack) -> None:
        if not self.config.server.metrics:
            return
        from kvtierd.service.http import MetricsServer  # a fifth of the time of a start

        server = MetricsServer(self.config.server.metrics, self.metrics, self.ready)
        await server.start()
        stack.push_async_callback(server.close)

    def _open_events(self, stack: contextlib.AsyncExitStack) -> EventPublisher | None:
        config = self.config
        if config.events.endpoint is None:
            return None
        events = EventPublisher(config.events, config.server.socket_mode, self.metrics, self.runtime.wall)
        stack.push_async_callback(events.close)
        events.open()
        return events

    def _open_tracing(self, stack: contextlib.AsyncExitStack) -> None:
        if self.config.tracing.endpoint is None:
            return
        provider = open_exporter(self.config.tracing)
        stack.push_async_callback(asyncio.to_thread, provider.shutdown)
        tracing.enable(provider)

    async def _start_grpc(self, stack: contextlib.AsyncExitStack) -> KvTierServicer:
        limits = self.config.server
        tokens = self.runtime.tokens
        server = grpc.aio.server(
            maximum_concurrent_rpcs=limits.max_concurrent_calls + limits.max_sessions,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                # A stream's window stays small: what is sent faster than it is served waits at its sender. A message that is
                # larger gets the room it needs when it is read.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
            ],
        )
        calls = Calls(self.runtime, self.metrics, self._slow, self._spans, self._admission)
        servicer = KvTierServicer(self.runtime, calls, self.metrics)
        ours = HandlerServer(server, None if tokens is None else Door(tokens, limits.unix_tokens, self.metrics))
        add_to_server(servicer, ours)
        admin_pb2_grpc.add_KvTierAdminServiceServicer_to_server(AdminServicer(self.runtime, self.metrics, self.config), ours)
        names = [pb2.DESCRIPTOR.services_by_name[n].full_name for pb2, n in _SERVICES]
        checker = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(checker, server)
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        self._certificates = _add_ports(server, limits, self._socket)
        if self._certificates is not None:
            self._supervise("certificates", self._certificates.watch())
        await server.start()
        self._socket.publish()
        for name in ["", *names]:
            await checker.set(name, health_pb2.HealthCheckResponse.SERVING)

        async def stop() -> None:
            await checker.enter_graceful_shutdown()
            await server.stop(STOP_GRACE_S)

        stack.push_async_callback(stop)
        return servicer

    # ---- supervision

    def _asked_to_stop(self) -> None:
        if not self._up:
            log.info("asked to stop: the start is finished first")
        self.stopping.set()

    def _supervise(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (task.exception() is None and self.runtime.nvme is None):
            return
        self.failure = task.exception() or RuntimeError(f"the task {task.get_name()!r} returned")
        log.critical("the task %r ended; the daemon stops", task.get_name(), exc_info=task.exception())
        self.stopping.set()

    async def _drain(self) -> None:
        """Tell clients, take nothing new, and write down what exists only in memory."""
        timeout_s = self.config.server.drain_timeout
        log.info("draining for at most %.0f s", timeout_s)
        self.runtime.stopping = True
        for attached in self.runtime.sessions:
            if attached.on_event is not None:
                attached.on_event("the daemon is shutting down")
        left = await self.runtime.drain(timeout_s, resume=False)
        if not left:
            log.info("drained: nothing is left that is only in memory")
        else:
            log.warning("%d bytes were not written to NVMe in time and are lost", left)

    def _count_moves(self, report: MoveReport) -> None:
        metrics = self.metrics
        self._spans.moved(report)
        metrics.queue_wait(report.priority.name.lower(), report.waited_s)
        metrics.move_seconds(report.src_tier, report.dst_tier, report.took_s)
        edge = f"moving blocks from {report.src_tier.name.lower()} to {report.dst_tier.name.lower()}"
        detail = f"{len(report.results)} blocks, {report.waited_s:.2f} s of it in the queue"
        self._slow.check(edge, report.took_s + report.waited_s, detail)
        reads = report.dst_tier is Tier.CPU or report.src_tier is Tier.NVME
        device = report.src_tier if reads else report.dst_tier
        for _, result in report.results:
            if result.value == "corrupt" and reads:
                metrics.checksum_failure()
            elif result.value == "corrupt":
                metrics.io_error(report.src_tier, "read")
            elif result.value != "ok":
                metrics.io_error(device, "read" if reads else "write")


_SERVICES: Final = ((kvtier_pb2, "KvTierService"), (admin_pb2, "KvTierAdminService"))


def _calm_gc() -> None:
    """Keep the collector off the index: millions of live objects without cycles would only cost pauses."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 1_000_000)
    gc.enable()


def _add_ports(server: grpc.aio.Server, config: ServerConfig, place: SocketPath) -> Certificates | None:
    """Listen. Returns the certificates of the TCP port, which must be kept as long as the server is."""
    old = os.umask(0o177)
    try:
        # When it ends, gRPC removes whatever is at the path that it was given.
        server.add_insecure_port(f"unix:{place.private()}")
    except RuntimeError as e:
        raise StartupError(f"cannot listen on {config.socket}: {e}") from e
    finally:
        os.umask(old)
    if config.listen is None:
        return None
    if config.token_file is None and config.tls_client_ca is None:
        log.warning(
            "whoever reaches %s may act for every tenant and use the admin API; set server.token_file or server.tls_client_ca",
            config.listen,
        )
    try:
        if config.tls_cert and config.tls_key:
            certificates = Certificates(config.tls_cert, config.tls_key, config.tls_client_ca)
            server.add_secure_port(config.listen, certificates.credentials)
            return certificates
        exposed = ", and whoever sees its packets has the tokens" if config.token_file else ""
        log.warning("listening on %s without TLS%s", config.listen, exposed)
        server.add_insecure_port(config.listen)
    except ConfigError as e:
        raise StartupError(f"cannot listen on {config.listen}: {e}") from e
    except RuntimeError as e:
        raise StartupError(f"cannot listen on {config.listen}: {e}; is the port in use?") from e
    return None


def run(config: Config) -> int:
    """Run the daemon in this process until SIGTERM or SIGINT. Returns the exit status.

    Raises:
        StartupError: it cannot start; the text says what to do.
    """
    set_up_logging(config.log)
    os.umask(0o077)  # what it writes to disk tells of all tenants; sockets are given their permissions one by one
    daemon = Daemon(config)
    try:
        status = uvloop.run(daemon.serve())
    except KeyboardInterrupt:
        status = 130
    except StartupError as e:
        if not daemon.hangs:
            raise
        log.critical("%s", e)
        status = 1
    if daemon.hangs:  # its thread, and those of kvikio, would be waited for
        log.warning("a transfer between GPU memory and NVMe still hangs; the daemon ends without it")
        logging.shutdown()
        os._exit(status)
    return status


__all__ = ["Daemon", "run"]
