"""OpenTelemetry spans, for client, connector and daemon. Off until :func:`enable`, and then nothing of OpenTelemetry is imported.

A span's parent is a W3C ``traceparent`` that came in a message or request, else the current span of the thread or task. Whether a
trace is recorded is for whoever begins it to say; spans of one that is not cost next to nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TRACEPARENT_CHARS: Final = 55
"""Length of a ``traceparent`` of version 00."""
_KEY: Final = "traceparent"

on = False
"""Whether spans are made; read it before anything that costs."""
_tracer: Any = None


class Span:
    """One span, or with None in its place nothing. Any thread may end it."""

    __slots__ = ("_span",)

    def __init__(self, span: Any = None) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        """What a message carries so that spans elsewhere become children of this one; "" for nothing."""
        return "" if self._span is None else _traceparent(self._span)

    def set(self, **attributes: Any) -> None:
        """Note something; names get the prefix ``kvtierd.``."""
        if self._span is not None:
            self._span.set_attributes({f"kvtierd.{name}": value for name, value in attributes.items()})

    def end(self, error: str = "") -> None:
        """End it, well or with an error. The first call counts."""
        if self._span is not None:
            if error:
                from opentelemetry.trace import Status, StatusCode

                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end()


NO_SPAN: Final = Span()


def enable(provider: Any = None) -> None:
    """Make spans from now on.

    Args:
        provider: OpenTelemetry's ``TracerProvider``; None for the one that the program has set, or will set.

    Raises:
        ImportError: OpenTelemetry is not installed; ``pip install "kvtierd[otel]"``.
    """
    from opentelemetry import trace

    from kvtierd import __version__

    global on, _tracer
    _tracer = trace.get_tracer("kvtierd", __version__, provider)
    on = True


def disable() -> None:
    """Make no spans any more."""
    global on
    on = False


def begin(name: str, parent: str = "", *, ago_s: float = 0.0, **attributes: Any) -> Span:
    """Begin a span that the caller ends.

    Args:
        name: what is done.
        parent: a traceparent; "" for the current span. One that is malformed counts as none.
        ago_s: how long ago it began.
        attributes: as for :meth:`Span.set`.
    """
    if not on:
        return NO_SPAN
    made = Span(_tracer.start_span(name, _context(parent), start_time=time.time_ns() - int(ago_s * 1e9)))
    made.set(**attributes)
    return made


@contextlib.contextmanager
def span(name: str, parent: str = "", **attributes: Any) -> Iterator[Span]:
    """A span around a block of code, in which it is the current one. Errors pass through and are noted."""
    made = begin(name, parent, **attributes)
    if made is NO_SPAN:
        yield made
        return
    from opentelemetry import trace

    try:
        with trace.use_span(made._span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield made
    except BaseException as e:
        made.end(f"{type(e).__name__}: {e}")
        raise
    made.end()


def current() -> Span:
    """The current span, to note something of it; nothing where it is not recorded."""
    if not on:
        return NO_SPAN
    from opentelemetry import trace

    found = trace.get_current_span()
    return Span(found) if found.is_recording() else NO_SPAN


def traceparent() -> str:
    """The current span's; "" where there is none or nothing is traced."""
    if not on:
        return ""
    from opentelemetry import trace

    return _traceparent(trace.get_current_span())


def carried(call: Callable[[], T]) -> Callable[[], T]:
    """The same call for another thread, where the current span stays the current one."""
    return functools.partial(contextvars.copy_context().run, call) if on else call


def traced(name: str, told: Callable[[object], dict[str, Any]]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Put a span around each call of a function, with what ``told`` says of its result; a mere comparison while it is off."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if not on:
                return function(*args, **kwargs)
            with span(name) as made:
                result = function(*args, **kwargs)
                made.set(**told(result))
                return result

        return call

    return decorate


def _traceparent(span: Any) -> str:
    known = span.get_span_context()
    return f"00-{known.trace_id:032x}-{known.span_id:016x}-{known.trace_flags:02x}" if known.is_valid else ""


def _context(parent: str) -> Any:
    if len(parent) != TRACEPARENT_CHARS:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({_KEY: parent})
