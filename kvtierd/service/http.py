"""A small HTTP server for ``/metrics``, ``/healthz`` and ``/readyz``.

``/healthz`` answers 200 whenever the event loop runs: restart the daemon when it does not. ``/readyz`` answers 200 only when
all of the daemon runs, else 503 with the reason. The text of ``/metrics`` is written in a worker thread, one scrape at a
time, so that a scrape does not hold up the event loop.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler
from prometheus_client.exposition import choose_encoder

from kvtierd.config import parse_address
from kvtierd.errors import ConfigError, StartupError
from kvtierd.service.metrics import Metrics

__all__ = ["MetricsServer", "parse_listen"]

_log = logging.getLogger(__name__)
_requests_log = logging.getLogger(f"{__name__}.requests")
"""aiohttp's word on requests."""

MAX_WAITING_SCRAPES: Final = 8
"""Scrapes in progress or waiting; more are answered 503 at once."""
MAX_REQUESTS: Final = 256
"""Requests in progress over all paths; more are answered 503 at once."""
SHUTDOWN_S: Final = 2.0
"""Longest wait for open requests when the server closes."""


def _tell_no_nonsense(record: logging.LogRecord) -> bool:
    """A filter: bytes that are no HTTP are answered, and no error of the daemon's."""
    if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
        _log.debug("no HTTP: %s", str(record.exc_info[1]).replace("\n", " "))
        return False
    return True


_requests_log.addFilter(_tell_no_nonsense)


def parse_listen(text: str) -> tuple[str | None, int]:
    """Host and port of ``host:port``, ``[v6]:port`` or ``:port`` (host None: all interfaces).

    Raises:
        ConfigError: when it is none of these.
    """
    try:
        host, port = parse_address(text, least_port=0)
    except ValueError as e:
        raise ConfigError(str(e)) from None
    return host or None, port


class MetricsServer:
    """Serves one daemon's metrics and health on ``address``.

    Args:
        address: ``host:port``; port 0 takes a free one, see :attr:`port`.
        metrics: what to show; :meth:`Metrics.refresh` is called on the event loop before each scrape.
        ready: tells (ready, why not); cheap, called on the event loop.

    Raises:
        ConfigError: for an address that cannot be parsed.
    """

    def __init__(self, address: str, metrics: Metrics, ready: Callable[[], tuple[bool, str]]) -> None:
        self._host, self._port = parse_listen(address)
        self._address = address
        self._metrics = metrics
        self._ready = ready
        self._runner: web.AppRunner | None = None
        self._scrapes = 0
        self._requests = 0

    @property
    def port(self) -> int:
        """The port in use once started."""
        return self._port

    async def start(self) -> None:
        """Listen.

        Raises:
            StartupError: when the address cannot be had.
        """
        app = web.Application(middlewares=[self._limit])
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/", self._index)
        runner = web.AppRunner(app, access_log=None, logger=_requests_log, shutdown_timeout=SHUTDOWN_S, handle_signals=False)
        await runner.setup()
        site = web.TCPSite(runner, self._host, self._port)
        try:
            await site.start()
        except (OSError, OverflowError) as e:
            await runner.cleanup()
            number = e.errno if isinstance(e, OSError) else None
            why = os.strerror(number) if number in errno.errorcode and number is not None else str(e)
            raise StartupError(
                f"cannot listen on {self._address} for metrics: {why}; "
                'set server.metrics to a free address of this host, or to "" to switch it off'
            ) from e
        self._runner = runner
        self._port = runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening and end what is open. May be called twice, and before :meth:`start`."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._requests >= MAX_REQUESTS:
            return web.Response(status=503, text="too many requests\n", headers={"Connection": "close"})
        self._requests += 1
        try:
            return await handler(request)
        finally:
            self._requests -= 1

    async def _metrics_text(self, request: web.Request) -> web.Response:
        if self._scrapes >= MAX_WAITING_SCRAPES:
            return web.Response(status=503, text="too many scrapes\n")
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        self._scrapes += 1
        try:
            body = await self._metrics.text(encoder)
        except Exception:
            _log.exception("cannot write the metrics")
            return web.Response(status=500, text="cannot write the metrics; the daemon's log has the details\n")
        finally:
            self._scrapes -= 1
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready, why = self._ready()
        return web.Response(status=200 if ready else 503, text="ok\n" if ready else f"not ready: {why}\n")

    async def _index(self, _request: web.Request) -> web.Response:
        return web.Response(text="kvtierd: /metrics /healthz /readyz\n")
