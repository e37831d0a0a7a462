"""Goal: tracing costs nothing while it is off, says what is missing, and keeps no spans of loads that are long over.

Method: the parts alone, with a provider whose spans are kept in memory, and a fresh interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtierd import tracing
from kvtierd.config import TracingConfig, load_config
from kvtierd.core.settings import CoreConfig
from kvtierd.core.tickets import ReadTicket
from kvtierd.core.tier_core import TierCore
from kvtierd.errors import ConfigError, StartupError
from kvtierd.model import Namespace
from kvtierd.service import spans as spans_module
from kvtierd.service.spans import ReadSpans, open_exporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def kept() -> Iterator[InMemorySpanExporter]:
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracing.enable(provider)
    yield spans
    tracing.disable()


def test_nothing_is_imported_while_it_is_off() -> None:
    code = (
        "import sys, kvtierd.client, kvtierd.service.server\n"
        "print([m for m in ('opentelemetry', 'zmq', 'msgspec') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_off_means_off() -> None:
    assert not tracing.on
    with tracing.span("a", PARENT) as span:
        assert span is tracing.NO_SPAN
        assert span.traceparent == tracing.traceparent() == ""
        span.set(a=1)
    span.end("error")
    call = object
    assert tracing.carried(call) is call


@pytest.mark.parametrize("missing", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"])
def test_without_the_extra_the_start_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(StartupError, match=r'is not installed; pip install "kvtierd\[otel\]", or unset tracing.endpoint'):
        open_exporter(TracingConfig(endpoint="http://127.0.0.1:4317"))


@pytest.mark.parametrize("flags", [{"tracing.endpoint": "127.0.0.1:4317"}, {"tracing.protocol": "udp"}, {"tracing.sample": 1}])
def test_configuration_that_cannot_be(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="tracing"):
        load_config(env={}, flags=flags)


@pytest.mark.parametrize("parent", ["", "x" * 55, "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "a" * 10_000])
def test_a_parent_that_is_none_is_no_error(parent: str, kept: InMemorySpanExporter) -> None:
    tracing.begin("a", parent).end()
    (span,) = kept.get_finished_spans()
    assert span.parent is None


def test_spans_of_tickets_that_ended_unnoticed_are_found(kept: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads whose sessions end while nobody waits for them close without a last step."""
    monkeypatch.setattr(spans_module, "PRUNE_AT", 4)
    core = TierCore(CoreConfig(capacity_bytes=(0, 1 << 20, 0), extent_bytes=(4096, 4096, 4096)))
    realm, _ = core.open_realm("t", Namespace(shard_bytes=(4096,)))
    session = core.attach(1, realm)
    reads = ReadSpans()
    tickets: list[ReadTicket] = []
    for n in range(20):
        ticket = ReadTicket(n, session, realm, False, False, 1.0, [None], bytearray(1), bytes(1))
        reads.begin(ticket, PARENT)
        ticket.closed = True
        tickets.append(ticket)
        assert len(reads._open) <= 4
    for ticket in tickets:
        reads.end(ticket)
        reads.end(ticket)
    assert len(kept.get_finished_spans()) == 20
