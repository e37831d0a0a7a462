"""The daemon's part of traces that clients have begun: their calls, and of a load and prefetch each batch that is read for it.

The daemon begins no trace by itself: a call that names no parent leaves no span.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections import Counter
from typing import Any, Final

import grpc

from kvtierd import __version__, tracing
from kvtierd.config import TracingConfig
from kvtierd.core.tickets import ReadTicket
from kvtierd.errors import StartupError
from kvtierd.model import Tier
from kvtierd.tracing import Span
from kvtierd.transfer.executor import MoveReport

log = logging.getLogger(__name__)

SEND_EVERY_MS: Final = 1000
PRUNE_AT: Final = 256
"""Spans from which on those whose tickets have ended unnoticed are looked for."""
_NOTHING: Final = contextlib.nullcontext(tracing.NO_SPAN)


def open_exporter(config: TracingConfig) -> Any:
    """Where spans go: OpenTelemetry's provider. Close it by its ``shutdown``, which may take seconds, so in a thread.

    Raises:
        StartupError: what it takes is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{config.protocol}.trace_exporter").OTLPSpanExporter
    except ImportError as e:
        raise StartupError(
            f'tracing.endpoint is set, but {e.name} is not installed; pip install "kvtierd[otel]", or unset tracing.endpoint'
        ) from e
    provider = TracerProvider(
        resource=Resource.create({"service.name": "kvtierd", "service.version": __version__}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(exporter(endpoint=config.endpoint), schedule_delay_millis=SEND_EVERY_MS))
    log.info("spans of traced calls go to %s", config.endpoint)
    return provider


def call_span(kind: str, traceparent: str) -> contextlib.AbstractContextManager[Span]:
    """A span around a call; nothing where nobody traces it."""
    return tracing.span(f"kvtierd.daemon.{kind}", traceparent) if tracing.on and traceparent else _NOTHING


def traceparent_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The parent that a call outside of an Attach stream names."""
    if not tracing.on:
        return ""
    return next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")


def found(masks: bytes) -> Counter[str]:
    """How many keys were found on each tier, by their masks."""
    return Counter(next((f"on_{t.name.lower()}" for t in Tier if mask & t.bit), "missing") for mask in masks)


class ReadSpans:
    """Spans of loads and prefetches that are under way. Belongs to the event loop; no more than there are tickets."""

    def __init__(self) -> None:
        self._open: dict[ReadTicket, Span] = {}

    def begin(self, ticket: ReadTicket, traceparent: str) -> None:
        """A load or prefetch has begun."""
        if not (tracing.on and traceparent):
            return
        if len(self._open) >= PRUNE_AT:
            for ended in [t for t in self._open if t.closed]:
                self.end(ended)
        kind = "prefetch" if ticket.prefetch else "load"
        span = self._open[ticket] = tracing.begin(f"kvtierd.daemon.{kind}", traceparent)
        span.set(tenant=ticket.realm.tenant.name, keys=len(ticket.found_on), **found(ticket.found_on))
        self._settle(ticket)

    def moved(self, report: MoveReport) -> None:
        """A batch was read: tell whoever has waited for a part of it."""
        if not self._open:
            return
        waited = Counter(ticket for move, _ in report.results for ticket, _ in move.waiters if ticket in self._open)
        failed = sum(result.value != "ok" for _, result in report.results)
        for ticket, blocks in waited.items():
            child = tracing.begin(
                f"kvtierd.daemon.read_{report.src_tier.name.lower()}",
                self._open[ticket].traceparent,
                ago_s=report.waited_s + report.took_s,
                blocks=blocks,
                batch_blocks=len(report.results),
                queued_s=report.waited_s,
                moved_s=report.took_s,
            )
            child.end(f"{failed} blocks of the batch could not be read" if failed else "")
            self._settle(ticket)

    def _settle(self, ticket: ReadTicket) -> None:
        """A prefetch has ended when nothing is on its way any more; a load when its last step is sent."""
        if ticket.prefetch and (ticket.closed or not ticket.waiting):
            self.end(ticket)

    def end(self, ticket: ReadTicket) -> None:
        """It is over."""
        span = self._open.pop(ticket, None) if self._open else None
        if span is not None:
            span.set(ready=ticket.ready, reason=ticket.reason.name.lower())
            span.end()
