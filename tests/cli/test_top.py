"""Goal: top shows what happened between two looks, survives hostile names, restarts and pauses of the daemon.

Method: rates and quantiles on made-up scrapes with answers worked out by hand; the command against a fake admin service that
gives one scrape after the other.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import Result

from kvtierd.cli.rates import Window, parse
from kvtierd.errors import DaemonUnavailableError
from kvtierd.v1 import admin_pb2

Kvtierd = Callable[..., Result]
top_module = importlib.import_module("kvtierd.cli.top")

HISTOGRAM = """
# TYPE t_seconds histogram
t_seconds_bucket{{path="shm",le="0.1"}} {a}
t_seconds_bucket{{path="shm",le="0.2"}} {b}
t_seconds_bucket{{path="shm",le="+Inf"}} {c}
t_seconds_count{{path="shm"}} {c}
t_seconds_sum{{path="shm"}} 1
"""


def window(before: str, after: str, seconds: float = 2.0) -> Window:
    return Window(parse(before, 10.0), parse(after, 10.0 + seconds))


# ---- rates


def test_a_rate_is_over_the_time_between_the_scrapes_and_all_that_has_the_labels() -> None:
    before = '# TYPE n counter\nn_total{a="x",b="1"} 10\nn_total{a="x",b="2"} 5\nn_total{a="y",b="1"} 7\n'
    after = '# TYPE n counter\nn_total{a="x",b="1"} 14\nn_total{a="x",b="2"} 5\nn_total{a="y",b="1"} 107\n'
    seen = window(before, after)
    assert seen.rate("n_total", a="x") == 2.0
    assert seen.count("n_total") == 104.0
    assert seen.rate("absent_total") == 0.0


def test_a_daemon_that_started_anew_counts_from_zero() -> None:
    assert window("# TYPE n counter\nn_total 1000\n", "# TYPE n counter\nn_total 6\n").count("n_total") == 6.0
    seen = window(HISTOGRAM.format(a=50, b=60, c=60), HISTOGRAM.format(a=0, b=4, c=4))
    assert seen.quantile("t_seconds", 0.5) == pytest.approx(0.15)


@pytest.mark.parametrize(
    "share, counts, expected",
    [
        (0.5, (10, 10, 10), 0.05),  # half of the way through the only bucket
        (0.5, (5, 10, 10), 0.1),
        (0.75, (5, 10, 10), 0.15),
        (0.99, (0, 0, 10), 0.2),  # beyond the last bound nothing is known
        (0.5, (0, 0, 0), None),
    ],
)
def test_quantiles(share: float, counts: tuple[int, int, int], expected: float | None) -> None:
    before, after = HISTOGRAM.format(a=3, b=3, c=3), HISTOGRAM.format(a=3 + counts[0], b=3 + counts[1], c=3 + counts[2])
    found = window(before, after).quantile("t_seconds", share, path="shm")
    assert found == (expected if expected is None else pytest.approx(expected))


def test_quantiles_of_what_there_is_not() -> None:
    assert window(HISTOGRAM.format(a=1, b=1, c=1), HISTOGRAM.format(a=9, b=9, c=9)).quantile("t_seconds", 0.5, path="grpc") is None
    assert window("", "").quantile("t_seconds", 0.5) is None


# ---- the command


def scrape(hits: int = 0, saved: int = 0, tenant: str = "acme", failures: int = 0, ready: int = 1) -> str:
    return f"""
# TYPE kvtierd_ready gauge
kvtierd_ready {ready}
# TYPE kvtierd_draining gauge
kvtierd_draining 0
# TYPE kvtierd_sessions gauge
kvtierd_sessions 3
# TYPE kvtierd_blocks gauge
kvtierd_blocks 1234
# TYPE kvtierd_tier_capacity_bytes gauge
kvtierd_tier_capacity_bytes{{tier="cpu"}} 1073741824
kvtierd_tier_capacity_bytes{{tier="hbm"}} 0
# TYPE kvtierd_tier_used_bytes gauge
kvtierd_tier_used_bytes{{tier="cpu"}} 536870912
# TYPE kvtierd_tenant_blocks gauge
kvtierd_tenant_blocks{{tenant="{tenant}"}} 12
# TYPE kvtierd_hits counter
kvtierd_hits_total{{tenant="{tenant}",tier="cpu"}} {hits}
# TYPE kvtierd_misses counter
kvtierd_misses_total{{tenant="{tenant}"}} {hits // 3}
# TYPE kvtierd_saved_bytes counter
kvtierd_saved_bytes_total{{tenant="{tenant}",path="shm"}} {saved}
# TYPE kvtierd_moved_blocks counter
kvtierd_moved_blocks_total{{direction="demote",src="cpu",dst="nvme"}} {hits}
kvtierd_moved_blocks_total{{direction="promote",src="nvme",dst="cpu"}} 0
# TYPE kvtierd_rejections counter
kvtierd_rejections_total{{reason="busy"}} {hits}
# TYPE kvtierd_checksum_failures counter
kvtierd_checksum_failures_total {failures}
"""


def answers(*texts: str) -> Callable[[Any], admin_pb2.GetMetricsResponse]:
    left: Iterator[str] = iter(texts)
    return lambda _request: admin_pb2.GetMetricsResponse(text=next(left))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(top_module.time, "sleep", lambda _s: None)
    monkeypatch.setattr(top_module.time, "monotonic", lambda: 2.0 * next(clock))


def test_one_look(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetMetrics"] = answers(scrape(), scrape(hits=30, saved=4 << 20, failures=2))
    result = kvtierd("top", "--address", admin.address, "--count", 1)
    assert result.exit_code == 0, result.output
    for part in (
        "1,234 blocks",
        "512 MiB of 1.0 GiB",
        "██████████░",
        "acme",
        "75 %",
        "2.0 MiB/s",
        "cpu → nvme",
        "refused: busy 30",
    ):
        assert part in result.output, part
    assert "2 copies failed verification" in result.output
    assert "hbm " not in result.output.splitlines()[3], "a tier that is not there has no row"
    assert "nvme → cpu" not in result.output, "an edge that never moved anything has no row"


def test_json_is_one_object_a_line_for_each_look(admin: Any, kvtierd: Kvtierd) -> None:
    admin.answers["GetMetrics"] = answers(scrape(), scrape(hits=30), scrape(hits=90))
    lines = kvtierd("top", "--address", admin.address, "--count", 2, "--json").output.splitlines()
    first, second = map(json.loads, lines)
    assert (first["tenants"][0]["hit_ratio"], first["tiers"][0]["hits_per_s"]) == (0.75, 15.0)
    assert second["tiers"][0]["hits_per_s"] == 30.0
    assert first["latencies"]["lookup"] == {"count": 0, "p50_s": None, "p99_s": None}
    assert first["rejections"] == {"busy": 30}


def test_names_of_tenants_cannot_steer_the_terminal(admin: Any, kvtierd: Kvtierd) -> None:
    evil = "\x1b[2J[red]x"
    admin.answers["GetMetrics"] = answers(scrape(tenant=evil), scrape(hits=3, tenant=evil))
    output = kvtierd("top", "--address", admin.address, "--count", 1).output
    assert "\x1b" not in output
    assert "?[2J[red]x" in output


def test_a_daemon_that_goes_away_is_waited_for(admin: Any, kvtierd: Kvtierd, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = top_module._scrape, iter(range(10))

    def sometimes(daemon: Any) -> Any:
        if next(calls) == 1:
            raise DaemonUnavailableError("nobody is there")
        return real(daemon)

    monkeypatch.setattr(top_module, "_scrape", sometimes)
    admin.answers["GetMetrics"] = answers(scrape(hits=90), scrape(hits=6, ready=0))
    result = kvtierd("top", "--address", admin.address, "--count", 1)
    assert "nobody is there; waiting for it" in result.output
    assert "not ready" in result.output
    assert result.exit_code == 0


def test_nobody_there_at_first_is_an_error(kvtierd: Kvtierd, short_dir: Any) -> None:
    result = kvtierd("top", "--address", short_dir / "none.sock", "--count", 1)
    assert result.exit_code == 3
    assert "no daemon at" in result.output


@pytest.mark.parametrize("command", [["top"], ["status", "--watch"]])
@pytest.mark.parametrize("every", ["0s", "199ms"])
def test_looks_without_a_pause_are_refused(admin: Any, kvtierd: Kvtierd, command: list[str], every: str) -> None:
    result = kvtierd(*command, "--address", admin.address, "--every", every)
    assert result.exit_code == 2
    assert f"'{every}' is too short; write at least 200ms" in result.output
    assert admin.requests == []


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_look_that_is_ended_gives_the_terminal_back(admin: Any, number: signal.Signals, code: int) -> None:
    """Whoever ends it: the first screen comes back, and the cursor."""
    admin.answers["GetMetrics"] = admin_pb2.GetMetricsResponse(text=scrape())
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvtierd", "--address", admin.address, "top", "--every", "200ms"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(theirs)
        seen = b""
        while b"tenant" not in seen:  # it draws
            seen += os.read(ours, 65536)
        process.send_signal(number)
        with contextlib.suppress(OSError):  # EIO: nobody has the terminal any more
            while got := os.read(ours, 65536):
                seen += got
    os.close(ours)
    assert process.returncode == code
    for on, off in ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h")):
        assert seen.count(on) >= 1 and seen.rindex(off) > seen.rindex(on)
    assert b"Traceback" not in seen
