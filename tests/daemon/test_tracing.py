"""Goal: a load is one trace, from the caller's span over the client's to the daemon's, with each batch that is read for it; and
where nobody traces there are no spans.

Method: a client whose spans are kept in memory, and a real daemon that exports its own to a collector in the test.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from kvtierd import tracing
from kvtierd.client import AsyncClient, Client
from kvtierd.model import Namespace
from kvtierd.testing.daemon import DaemonProcess

KIB64 = 64 << 10
WAIT_S = 30.0
KEYS = [n.to_bytes(32, "big") for n in range(8)]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent, over gRPC or HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resource: dict[str, str] = {}

    def Export(self, request: Any, context: Any) -> Any:
        for part in request.resource_spans:
            self.resource = {a.key: a.value.string_value for a in part.resource.attributes}
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def named(self, name: str, count: int = 1) -> list[Any]:
        """Spans of a name, once there are so many."""
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            found = [span for span in self.spans if span.name == name]
            if len(found) >= count:
                return found
            time.sleep(0.05)
        pytest.fail(f"no {name} among {sorted(span.name for span in self.spans)}")


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def over_grpc(collector: Collector) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"http://127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture
def over_http(collector: Collector) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = collector.Export(otlp.ExportTraceServiceRequest.FromString(body), None).SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    server.shutdown()
    thread.join()
    server.server_close()


class Program:
    """A program that traces: its tracer, and the spans that have ended, its own and the client's."""

    def __init__(self, provider: TracerProvider, spans: InMemorySpanExporter) -> None:
        self.tracer = provider.get_tracer("program")
        self._spans = spans

    def ended(self, name: str) -> Any:
        (span,) = [s for s in self._spans.get_finished_spans() if s.name == name]
        return span

    def clear(self) -> None:
        self._spans.clear()


def tracing_program(**options: Any) -> Program:
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False, **options)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracing.enable(provider)
    return Program(provider, spans)


@pytest.fixture
def program() -> Iterator[Program]:
    yield tracing_program()
    tracing.disable()


def told(span: Any) -> dict[str, int | str]:
    """Attributes of a span that a collector was sent, without their prefix."""
    return {a.key.removeprefix("kvtierd."): a.value.string_value or a.value.int_value for a in span.attributes}


def blocks() -> list[bytearray]:
    return [bytearray(KIB64) for _ in KEYS]


def on_nvme_only(client: Client, daemon: DaemonProcess) -> None:
    """Save the blocks, and have them in no memory."""
    assert client.save(KEYS, [bytes([k[-1]]) * KIB64 for k in KEYS]).complete
    assert daemon.stop() == 0
    daemon.start()
    until_s = time.monotonic() + WAIT_S
    while not client.status.attached and time.monotonic() < until_s:
        time.sleep(0.05)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_load_is_one_trace(
    protocol: str, request: pytest.FixtureRequest, collector: Collector, program: Program,
    make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client],
) -> None:  # fmt: skip
    endpoint = request.getfixturevalue(f"over_{protocol}")
    daemon = make_daemon(tracing={"endpoint": endpoint, "protocol": protocol})
    client = make_client(daemon, KIB64)
    on_nvme_only(client, daemon)
    program.clear()
    collector.spans.clear()
    with program.tracer.start_as_current_span("request"):
        assert client.lookup(KEYS).held == 8
        assert client.load(KEYS, blocks()).loaded == 8
    caller, load, lookup = program.ended("request"), program.ended("kvtierd.load"), program.ended("kvtierd.lookup")
    assert load.parent.span_id == lookup.parent.span_id == caller.context.span_id
    assert load.attributes["kvtierd.loaded_nvme"] == 8

    (served,) = collector.named("kvtierd.daemon.load")
    reads = collector.named("kvtierd.daemon.read_nvme")
    (looked,) = collector.named("kvtierd.daemon.lookup")
    trace = caller.context.trace_id.to_bytes(16, "big")
    assert {span.trace_id for span in (served, looked, *reads)} == {trace}
    assert served.parent_span_id == load.context.span_id.to_bytes(8, "big")
    assert looked.parent_span_id == lookup.context.span_id.to_bytes(8, "big")
    assert {read.parent_span_id for read in reads} == {served.span_id}
    told_of = told(served)
    assert told_of["keys"] == told_of["on_nvme"] == told_of["ready"] == 8
    assert told_of["tenant"] == "default"
    assert told(looked) == {"tenant": "default", "keys": 8, "held": 8, "on_nvme": 8}
    assert sum(a.value.int_value for read in reads for a in read.attributes if a.key == "kvtierd.blocks") == 8
    for read in reads:
        assert load.start_time <= read.start_time_unix_nano <= read.end_time_unix_nano <= served.end_time_unix_nano
    assert collector.resource["service.name"] == "kvtierd"
    assert not any(key.hex().encode() in span.SerializeToString() or key in span.SerializeToString()
                   for key in KEYS for span in collector.spans), "no keys"  # fmt: skip


def test_saves_prefetches_and_bytes_in_messages(
    over_grpc: str, collector: Collector, program: Program,
    make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client],
) -> None:  # fmt: skip
    daemon = make_daemon(tracing={"endpoint": over_grpc})
    client = make_client(daemon, KIB64)
    on_nvme_only(client, daemon)
    for name in ("save", "commit"):
        assert collector.named(f"kvtierd.daemon.{name}")
    remote = make_client(daemon, KIB64, bytes_only=True)
    program.clear()
    with program.tracer.start_as_current_span("request"):
        assert client.prefetch(KEYS[:4], 10.0, wait=True).ready == 4
        assert remote.load(KEYS, blocks()).loaded == 8
        assert remote.save([bytes([9]) * 32], [bytes(KIB64)]).complete
    (prefetch,) = collector.named("kvtierd.daemon.prefetch")
    assert prefetch.parent_span_id == program.ended("kvtierd.prefetch").context.span_id.to_bytes(8, "big")
    assert collector.named("kvtierd.daemon.read_nvme")[0].parent_span_id == prefetch.span_id
    (load,) = collector.named("kvtierd.daemon.load")
    assert load.parent_span_id == program.ended("kvtierd.load").context.span_id.to_bytes(8, "big")
    (save,) = collector.named("kvtierd.daemon.savebytes")
    assert save.parent_span_id == program.ended("kvtierd.save").context.span_id.to_bytes(8, "big")


def test_every_call_tells_its_tenant_and_what_became_of_its_keys(
    over_grpc: str, collector: Collector, program: Program,
    make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client],
) -> None:  # fmt: skip
    daemon = make_daemon(tracing={"endpoint": over_grpc})
    client = make_client(daemon, KIB64, tenant="acme")
    remote = make_client(daemon, KIB64, bytes_only=True, tenant="acme")
    with program.tracer.start_as_current_span("request"):
        assert client.save(KEYS[:3], blocks()[:3]).complete
        assert client.save(KEYS, blocks()).saved == 5
        assert client.load(KEYS, blocks()).loaded == 8
        assert remote.save([KEYS[0], bytes([7]) * 32], blocks()[:2]).complete
        assert client.evict(KEYS[:2]) == 2
    acme = {"tenant": "acme"}
    saves = [told(span) for span in collector.named("kvtierd.daemon.save", 2)]
    assert saves == [acme | {"keys": 3, "granted": 3}, acme | {"keys": 8, "granted": 5, "held": 3}]
    assert [told(span) for span in collector.named("kvtierd.daemon.commit", 2)] == [acme | {"blocks": 3}, acme | {"blocks": 5}]
    assert told(collector.named("kvtierd.daemon.savebytes")[0]) == acme | {"keys": 2, "granted": 1, "held": 1}
    assert told(collector.named("kvtierd.daemon.evict")[0]) == acme | {"evicted": 2}


def test_no_spans_where_nobody_traces_and_where_a_trace_is_not_sampled(
    over_grpc: str, collector: Collector, make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client]
) -> None:
    """The daemon exports on its way out what it has; then everything has been sent."""
    daemon = make_daemon(tracing={"endpoint": over_grpc})
    client = make_client(daemon, KIB64)
    assert client.save(KEYS, blocks()).complete
    assert client.load(KEYS, blocks()).loaded == 8
    unsampled = tracing_program(sampler=ParentBased(ALWAYS_OFF))
    try:
        with unsampled.tracer.start_as_current_span("request"):
            assert client.load(KEYS, blocks()).loaded == 8
        sampled = tracing_program()
        with sampled.tracer.start_as_current_span("request"):
            assert client.lookup(KEYS).held == 8
    finally:
        tracing.disable()
    client.close()
    assert daemon.stop() == 0
    assert [span.name for span in collector.spans] == ["kvtierd.daemon.lookup"]


def test_an_asynchronous_client_keeps_the_parent(make_daemon: Callable[..., DaemonProcess], program: Program) -> None:
    daemon = make_daemon()

    async def run() -> None:
        async with AsyncClient(Namespace(shard_bytes=(KIB64,)), daemon.address, require=True, timeout_s=20.0) as client:
            with program.tracer.start_as_current_span("request"):
                await client.save(KEYS, blocks())

    asyncio.run(run())
    assert program.ended("kvtierd.save").parent.span_id == program.ended("request").context.span_id


def test_an_error_ends_the_span_and_a_dead_collector_hurts_nobody(
    program: Program, make_daemon: Callable[..., DaemonProcess], make_client: Callable[..., Client]
) -> None:
    daemon = make_daemon(tracing={"endpoint": "http://127.0.0.1:1"})
    client = make_client(daemon, KIB64)
    with pytest.raises(ValueError, match="32 bytes"):
        client.load([b"short"], [bytearray(KIB64)])
    assert not program.ended("kvtierd.load").status.is_ok
    program.clear()
    assert client.save(KEYS, blocks()).complete
    assert client.load(KEYS, blocks()).loaded == 8
    assert program.ended("kvtierd.load").attributes["kvtierd.loaded"] == 8
    client.close()
    assert daemon.stop() == 0
