"""Spans of what the connector does for a request, where vLLM traces (``--otlp-traces-endpoint``): in the request's own trace, whose
headers vLLM keeps, and otherwise in one that the request's first lookup begins."""

from __future__ import annotations

import logging
from typing import Any

from kvtierd import tracing

log = logging.getLogger("vllm.kvtierd")


def follow(vllm_config: Any) -> None:
    """Make spans in this process if vLLM does. They go where vLLM's go: to the provider that it has set."""
    endpoint = getattr(getattr(vllm_config, "observability_config", None), "otlp_traces_endpoint", None)
    if not endpoint or tracing.on:
        return
    try:
        tracing.enable()
    except ImportError as e:
        log.warning("kvtierd: no spans are made, as %s is not installed", e.name)


def parent_of(request: Any) -> str:
    """The traceparent that came with a request; "" for none."""
    headers = getattr(request, "trace_headers", None) if tracing.on else None
    return str(headers.get("traceparent", "")) if headers else ""
