"""Goal: what the connector does for a request is in the request's trace: lookup and load on the scheduler's side, and each
rank's copy; where vLLM does not trace there are no spans.

Method: vLLM's own scheduler and a real daemon (``small_engine``), with a provider whose spans are kept in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvtierd import tracing
from kvtierd.connectors.vllm.traces import follow
from tests.connectors.engine_cases import Engines, fresh, right, save

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nothing_is_left_open")]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracing.enable(provider)
    yield kept
    tracing.disable()


def named(spans: InMemorySpanExporter, name: str) -> list[Any]:
    return [span for span in spans.get_finished_spans() if span.name == name]


@pytest.mark.parametrize("headers", [{"traceparent": f"00-{TRACE}-{PARENT}-01"}, None])
def test_a_load_is_one_trace_over_scheduler_and_workers(
    engines: Engines, spans: InMemorySpanExporter, headers: dict[str, str] | None
) -> None:
    tokens = fresh()
    engine = save(engines, tokens, tp=2)
    spans.clear()
    engine.generate("again", tokens, trace_headers=headers)
    right(engine, "saved", "again")
    assert engine.computed["again"] < len(tokens), "it was loaded"
    (lookup,), (load,) = named(spans, "kvtierd.scheduler.lookup"), named(spans, "kvtierd.scheduler.load")
    copies = named(spans, "kvtierd.worker.load")
    if headers:
        assert format(lookup.context.trace_id, "032x") == TRACE
        assert format(lookup.parent.span_id, "016x") == format(load.parent.span_id, "016x") == PARENT
    else:
        assert lookup.parent is None, "the lookup begins a trace"
        assert load.parent.span_id == lookup.context.span_id
    assert {copy.parent.span_id for copy in copies} == {load.context.span_id}
    assert {copy.context.trace_id for copy in copies} == {load.context.trace_id} == {lookup.context.trace_id}
    assert sorted(copy.attributes["kvtierd.rank"] for copy in copies) == ["(0, 0)", "(0, 1)"]
    assert all(copy.attributes["kvtierd.bytes"] > 0 and not copy.status.description for copy in copies)
    (fetch,) = named(spans, "kvtierd.fetch")
    assert fetch.parent.span_id == lookup.context.span_id
    assert load.start_time >= lookup.start_time


def test_a_load_that_fails_says_so(engines: Engines, spans: InMemorySpanExporter) -> None:
    tokens = fresh()
    engine = save(engines, tokens)
    side = engine.ranks[0].connector._worker

    def fail(*_: object) -> None:
        raise RuntimeError("no copying today")

    spans.clear()
    side._copy = fail
    engine.generate("again", tokens)
    del side._copy
    right(engine, "again")
    (copy,), (load,) = named(spans, "kvtierd.worker.load"), named(spans, "kvtierd.scheduler.load")
    assert copy.status.description == "internal: no copying today"
    assert not load.status.is_ok


def test_it_traces_what_vllm_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "on", False)
    follow(SimpleNamespace())
    follow(SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None)))
    assert not tracing.on
    follow(SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint="http://127.0.0.1:4317")))
    assert tracing.on
