"""Goal: advice names the reason of a low hit rate and nothing else, and a gain that is promised comes true.

Method: figures of known situations; a real daemon that is too small for what a client uses again and again, asked and then
enlarged; an engine's metrics from a small server.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvtierd.advice import Engine, Figures, findings
from kvtierd.cli import cli
from kvtierd.client import Client
from kvtierd.errors import ConfigError, DaemonUnavailableError
from kvtierd.model import Namespace
from kvtierd.testing.daemon import DaemonProcess

Kvtierd = Callable[..., Result]
GIB = 1 << 30
advise_module = importlib.import_module("kvtierd.cli.advise")
GOOD = Figures(
    cpu_bytes=10 * GIB,
    nvme_bytes=100 * GIB,
    distances={GIB: 8000.0},
    cold=2000.0,
    found=8000.0,
    added=2000.0,
    continued=900.0,
    new=100.0,
    sessions=1,
)


def said(figures: Figures) -> str:
    return "\n".join(f"{f.level}: {f.what}; {f.do}" for f in findings(figures))


def test_a_good_hit_rate_gets_no_advice() -> None:
    assert said(GOOD) == "good: 80% of the blocks that engines asked for were found: good; "


@pytest.mark.parametrize(("found", "words"), [(7000.0, "good"), (4000.0, "usual"), (3990.0, "low"), (0.0, "low")])
def test_bands(found: float, words: str) -> None:
    assert words in findings(replace(GOOD, found=found, added=10_000.0 - found))[0].what


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"distances": {GIB: 3000.0, 150 * GIB: 5000.0}}, ["50% of the uses", "2 times nvme.capacity would hit about +50% more"]),
        ({"distances": {GIB: 3000.0, 300 * GIB: 5000.0}}, ["4 times nvme.capacity"]),
        ({"distances": {GIB: 3000.0, 3000 * GIB: 5000.0}}, ["after more than 8 times nvme.capacity"]),
        ({"nvme_bytes": 0, "distances": {GIB: 3000.0, 15 * GIB: 5000.0}}, ["2 times cpu.capacity", "add NVMe"]),
        ({"distances": {GIB: 3000.0, 15 * GIB: 5000.0}}, ["30% of the uses fit into CPU memory", "twice cpu.capacity", "+50%"]),
        ({"new": 900.0, "continued": 100.0}, ["note: 90% of the requests", "never seen", "cache_salt"]),
        ({"new": 900.0, "continued": 100.0, "found": 1.0}, ["look: 90% of the requests"]),
        ({"lost": 900.0, "continued": 100.0, "new": 0.0}, ["held once", "TTL"]),
        ({"rejected": {"busy": 900.0, "quota": 100.0}}, ["33% of the blocks to save got no room", "'busy'", "free_target"]),
        ({"rejected": {"quota": 900.0}}, ["'quota'", "raise the tenant's quota"]),
        ({"evicted": {"ttl": 300.0, "pressure": 100.0}}, ["75% of what the last tier forgot"]),
        ({"not_admitted": 1500.0}, ["NVMe did not take 1500 blocks"]),
        ({"engine": Engine(prompt_tokens=3000.0, prompts=10.0), "block_tokens": 256}, ["300 tokens on average", "chunk_tokens"]),
        (
            {"engine": Engine(local_queries=100.0, local_hits=20.0, external_queries=80.0, external_hits=40.0)},
            ["has 20% of the prompt tokens; of the others 50% came from here"],
        ),
        ({"engine": Engine(local_queries=100.0)}, ["asked no external cache", "docs/vllm.md"]),
        ({"engine": Engine(adapters=3, prompts=9.0)}, ["3 LoRA adapters"]),
        ({"sessions": 0, "found": 0.0, "added": 0.0}, ["no engine is attached"]),
        ({"found": 10.0, "added": 10.0}, ["only 20 blocks", "too few"]),
    ],
)
def test_each_reason_is_named(change: dict[str, object], words: list[str]) -> None:
    text = said(replace(GOOD, **change))  # type: ignore[arg-type]
    assert all(word in text for word in words), text
    reasons = text.count("\n") + 1 - text.startswith(("good", "note: 80%", "look: 0%"))
    assert reasons == 1, text


# ---- a real daemon


def test_a_gain_that_is_promised_comes_true(tmp_path: Path) -> None:
    """A client uses 1,900 blocks of 16 KiB in turn, 30 MiB; memory has 16 MiB, and LRU finds none of them again."""
    size, keys = 16 << 10, [hashlib.sha256(str(n).encode()).digest() for n in range(1900)]  # the same sample each time
    daemon = DaemonProcess(tmp_path, {"cpu": {"capacity": "16MiB", "prefault": False}, "nvme": {"capacity": "0"}}).start()

    def use(rounds: int) -> dict[str, object]:
        buffer = bytearray(size)
        with Client(Namespace((size,), block_tokens=16), daemon.address, require=True) as client:
            for _ in range(rounds):
                for start in range(0, len(keys), 50):
                    chunk = keys[start : start + 50]
                    client.load(chunk, [buffer] * 50)
                    client.save(chunk, [buffer] * 50)
        result = CliRunner().invoke(cli, ["advise", "--address", daemon.address, "--json"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.output))

    try:
        small = use(4)
        advice = " ".join(f["do"] for f in small["findings"])  # type: ignore[attr-defined]
        assert isinstance(small["hit_ratio"], float) and small["hit_ratio"] < 0.1
        assert "times cpu.capacity would hit about +7" in advice, small
        daemon.stop()
        daemon.config["cpu"]["capacity"] = "48MiB"
        daemon.start()
        large = use(4)
        assert isinstance(large["hit_ratio"], float) and large["hit_ratio"] > 0.7
        shown = CliRunner().invoke(cli, ["advise", "--address", daemon.address], catch_exceptions=False).output
        assert "good" in shown and "uses of blocks that a cache of a size would hit" in shown
    finally:
        daemon.kill()


def test_a_fresh_daemon_has_no_figures(kvtierd_daemon: DaemonProcess) -> None:
    result = CliRunner().invoke(cli, ["advise", "--address", kvtierd_daemon.address], catch_exceptions=False)
    assert "no engine is attached" in result.output


@pytest.fixture
def kvtierd_daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path).start()
    yield daemon
    daemon.kill()


METRICS = """
# TYPE vllm:request_prompt_tokens histogram
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 4
vllm:request_prompt_tokens_count{engine="0"} 4
vllm:request_prompt_tokens_sum{engine="0"} 80
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} 100
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 25
# TYPE vllm:external_prefix_cache_queries counter
vllm:external_prefix_cache_queries_total{engine="0"} 75
# TYPE vllm:external_prefix_cache_hits counter
vllm:external_prefix_cache_hits_total{engine="0"} 15
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.0
"""


@pytest.fixture
def engine() -> Iterator[tuple[str, list[str]]]:
    """An address that answers with what is in the list."""
    answers = [METRICS]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answers[0].encode())

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics", answers
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_engines_metrics_are_read(engine: tuple[str, list[str]], kvtierd_daemon: DaemonProcess) -> None:
    with Client(Namespace((4096,), block_tokens=256), kvtierd_daemon.address, require=True) as client:
        for _ in range(4):
            keys = [os.urandom(32) for _ in range(60)]
            client.save(keys, [bytes(4096)] * 60)
        result = CliRunner().invoke(
            cli, ["advise", "--address", kvtierd_daemon.address, "--vllm", engine[0]], catch_exceptions=False
        )
    assert "prompts have 20 tokens on average, a block 256" in " ".join(result.output.split())
    assert "has 25% of the prompt tokens; of the others 20% came from here" in " ".join(result.output.split())
    assert "2 LoRA adapters" in result.output


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        ("file:///etc/passwd", ConfigError, "write http://"),
        ("http://127.0.0.1:1/metrics", DaemonUnavailableError, "cannot be read"),
        ("http://localhost:port/metrics", ConfigError, "nonnumeric port"),
        ("http://local host/metrics", ConfigError, "write http://"),
    ],
)
def test_an_engine_that_cannot_be_asked_is_said(url: str, error: type[Exception], words: str) -> None:
    result = CliRunner().invoke(cli, ["advise", "--vllm", url])
    assert result.exit_code in (2, 3) and words in result.output


def test_what_is_no_metrics_is_said(engine: tuple[str, list[str]]) -> None:
    engine[1][0] = "<html>"
    result = CliRunner().invoke(cli, ["advise", "--vllm", engine[0]])
    assert result.exit_code == 2 and "does not answer with metrics" in result.output


@pytest.mark.parametrize("answer", ["no HTTP at all\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nlength\r\n"])
def test_what_is_no_http_is_said(answer: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        result = CliRunner().invoke(cli, ["advise", "--vllm", f"http://127.0.0.1:{server.getsockname()[1]}/metrics"])
        thread.join()
    assert result.exit_code == 2 and "does not answer with metrics" in result.output


def test_an_answer_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then: no time-out of a socket ends that."""
    monkeypatch.setattr(advise_module, "TIMEOUT_S", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while not over.wait(0.1):
                    connection.sendall(b"#")

        thread = threading.Thread(target=serve)
        thread.start()
        result = CliRunner().invoke(cli, ["advise", "--vllm", f"http://127.0.0.1:{server.getsockname()[1]}/metrics"])
        assert thread.is_alive(), "it had not ended"
        over.set()
        thread.join()
    assert result.exit_code == 3 and "no end of its answer within 0.5 s" in result.output


def test_an_answer_that_is_too_long_is_refused(engine: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise_module, "MAX_METRICS_BYTES", 1 << 20)
    engine[1][0] = METRICS + "# more\n" * (1 << 18)
    result = CliRunner().invoke(cli, ["advise", "--vllm", engine[0]])
    assert result.exit_code == 2 and "more than 1 MiB" in result.output


@pytest.mark.parametrize("answer", ["", "kvtierd_blocks 1\n"])
def test_metrics_of_something_else_are_said(engine: tuple[str, list[str]], answer: str) -> None:
    engine[1][0] = answer
    result = CliRunner().invoke(cli, ["advise", "--vllm", engine[0]])
    assert result.exit_code == 2 and "not with metrics of vLLM" in result.output


@pytest.mark.parametrize("uses", [Figures(0, 0), Figures(0, 0, sessions=1), GOOD])
def test_what_the_engine_says_is_told_however_little_the_daemon_was_used(uses: Figures) -> None:
    asked = Engine(prompts=4.0, prompt_tokens=4000.0, local_queries=4000.0)
    assert "look: the engine has asked no external cache" in said(replace(uses, engine=asked))
    assert "note: the engine has had no request" in said(replace(uses, engine=Engine()))
