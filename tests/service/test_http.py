"""Goal: /metrics, /healthz and /readyz answer rightly, a scrape does not hold up the loop, and address errors are clear.

Method: a real server on a free port and a real HTTP client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvtierd.core.stats import StatsSnapshot
from kvtierd.errors import ConfigError, StartupError
from kvtierd.service import http
from kvtierd.service.http import MetricsServer, parse_listen
from kvtierd.service.metrics import Metrics


class Daemon:
    """What the server asks: readiness and figures; counts and can fail."""

    def __init__(self) -> None:
        self.ready = (False, "CPU pool is starting")
        self.broken = False
        self.snapshot_threads: list[int] = []

    def snapshot(self) -> StatsSnapshot:
        self.snapshot_threads.append(threading.get_ident())
        if self.broken:
            raise RuntimeError("a bug")
        return StatsSnapshot([], [], blocks=len(self.snapshot_threads), sessions=0, tickets=0)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def metrics(daemon: Daemon) -> Metrics:
    found = Metrics(CollectorRegistry())
    found.bind(daemon, ready=lambda: daemon.ready)
    return found


@pytest.fixture
async def server(daemon: Daemon, metrics: Metrics) -> AsyncIterator[MetricsServer]:
    found = MetricsServer("127.0.0.1:0", metrics, lambda: daemon.ready)
    await found.start()
    yield found
    await found.close()


async def get(server: MetricsServer, path: str, method: str = "GET", accept: str = "") -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session:
        headers = {"Accept": accept} if accept else {}
        async with session.request(method, f"http://127.0.0.1:{server.port}{path}", headers=headers) as response:
            return response.status, await response.text(), response.headers["Content-Type"]


async def test_metrics_are_fresh_at_each_scrape(server: MetricsServer, daemon: Daemon) -> None:
    for n in (1, 2):
        status, text, kind = await get(server, "/metrics")
        assert status == 200
        assert kind.startswith("text/plain; version=")
        families = {f.name: f for f in text_string_to_metric_families(text)}
        assert families["kvtierd_blocks"].samples[0].value == n
    assert set(daemon.snapshot_threads) == {threading.get_ident()}, "the daemon is only read on the event loop"


async def test_openmetrics_when_asked(server: MetricsServer) -> None:
    status, text, kind = await get(server, "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


async def test_ready_and_healthy(server: MetricsServer, daemon: Daemon) -> None:
    assert (await get(server, "/healthz"))[:2] == (200, "ok\n")
    assert (await get(server, "/readyz"))[:2] == (503, "not ready: CPU pool is starting\n")
    daemon.ready = (True, "")
    assert (await get(server, "/readyz"))[:2] == (200, "ok\n")
    assert "kvtierd_ready 1.0" in (await get(server, "/metrics"))[1]


async def test_other_paths_and_methods(server: MetricsServer) -> None:
    assert (await get(server, "/nothing"))[0] == 404
    assert (await get(server, "/metrics", "POST"))[0] == 405
    assert (await get(server, "/"))[0] == 200
    assert (await get(server, "/healthz", "HEAD"))[0] == 200


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n",
    ],
)
async def test_what_is_no_http_is_answered_and_no_error(
    server: MetricsServer, nonsense: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(nonsense)
    answer = await reader.readline()
    writer.close()
    assert answer.split()[1] in (b"400", b"405")
    assert (await get(server, "/healthz"))[0] == 200
    assert not caplog.records


async def test_a_bug_in_a_snapshot_is_500_and_not_the_end(
    server: MetricsServer, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.broken = True
    status, text, _ = await get(server, "/metrics")
    assert status == 500
    assert "a bug" not in text
    assert "a bug" in caplog.text
    daemon.broken = False
    assert (await get(server, "/metrics"))[0] == 200


class Slow(Collector):
    """Holds a scrape until it is let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        self.entered.set()
        assert self.go.wait(30)
        return []


async def test_a_slow_scrape_holds_up_nobody_and_more_are_refused(
    server: MetricsServer, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_WAITING_SCRAPES", 1)
    slow = Slow()
    metrics.registry.register(slow)
    first = asyncio.create_task(get(server, "/metrics"))
    try:
        assert await asyncio.to_thread(slow.entered.wait, 30)
        assert (await get(server, "/healthz"))[0] == 200
        assert (await get(server, "/metrics"))[0] == 503
        assert not first.done()
    finally:
        slow.go.set()
    assert (await first)[0] == 200
    assert (await get(server, "/metrics"))[0] == 200


async def test_too_many_requests_are_refused(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_REQUESTS", 0)
    assert (await get(server, "/healthz"))[0] == 503


async def test_a_taken_port_is_a_startup_error(server: MetricsServer, metrics: Metrics) -> None:
    second = MetricsServer(f"127.0.0.1:{server.port}", metrics, lambda: (True, ""))
    with pytest.raises(StartupError, match=r"127\.0\.0\.1:\d+ for metrics: .*in use; set server\.metrics"):
        await second.start()
    await second.close()


async def test_an_address_of_another_host_is_a_startup_error(metrics: Metrics) -> None:
    with pytest.raises(StartupError, match=r"server\.metrics"):
        await MetricsServer("192.0.2.1:0", metrics, lambda: (True, "")).start()


async def test_close_twice_and_unstarted(server: MetricsServer, metrics: Metrics) -> None:
    await server.close()
    await server.close()
    await MetricsServer("127.0.0.1:0", metrics, lambda: (True, "")).close()
    with pytest.raises(aiohttp.ClientConnectorError):
        await get(server, "/healthz")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("[::1]:0", ("::1", 0)),
        (":80", (None, 80)),
        ("host.example:65535", ("host.example", 65535)),
    ],
)
def test_addresses(text: str, expected: tuple[str | None, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:65536", "::1:80", "host:-1", "host:²"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9464|brackets|between 0 and 65535"):
        parse_listen(text)
