"""Goal: what an operator is given works: metrics that promtool accepts, rules that fire when they should, panels with data.

Method: Debian's promtool on the live endpoint and on the rules with their unit tests; a real Prometheus scrapes a daemon under
load, and every query of the dashboard and every recording rule has to return samples. Queries about engines, which do not run
here, must parse and name metrics that the connector has.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtierd.client import Client
from kvtierd.connectors import __path__ as connectors_path
from kvtierd.model import Namespace
from kvtierd.testing.daemon import DaemonProcess

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "kvtierd.json"
BLOCK = 256 << 10
QUIET: dict[str, str] = {}
"""Panels without data on a daemon like this one, and why."""


def run(*command: object, stdin: str | None = None) -> str:
    done = subprocess.run(
        [str(c) for c in command], input=stdin, capture_output=True, text=True, check=False, timeout=120, cwd=RULES.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Server:
    """A Prometheus on loopback that scrapes one daemon each second."""

    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{query}: {e.read().decode()}") from e

    def query(self, expr: str) -> list[Any]:
        found: list[Any] = self.get("/api/v1/query", query=expr)["result"]
        return found


def work(daemon: DaemonProcess, stop: threading.Event) -> None:
    """Saves more than memory holds, and loads both what is held and what is not."""
    namespace = Namespace(shard_bytes=(BLOCK,), model="observed")
    with Client(namespace, daemon.address, require=True, timeout_s=10) as client:
        number = 0
        while not stop.wait(0.02):
            keys = [b"%08d" % (number + i) * 4 for i in range(8)]
            client.save(keys, [bytearray(BLOCK) for _ in keys], wait_s=1)
            old = [b"%08d" % max(0, number - 400 + i) * 4 for i in range(4)]
            client.prefetch(old, 1.0)
            client.lookup(keys + old)
            client.load(keys, [bytearray(BLOCK) for _ in keys])
            client.load(old, [bytearray(BLOCK) for _ in old], each=True)
            client.load([b"absent--" * 4], [bytearray(BLOCK)])
            number += 8


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    port = free_port()
    made = DaemonProcess(
        tmp_path_factory.mktemp("daemon"),
        {
            "cpu": {"capacity": "32MiB"},
            "server": {"metrics": f"127.0.0.1:{port}"},
            "nvme": {"capacity": "512MiB"},
            "tenants": {"default": {"class": "premium", "cpu_quota": "24MiB", "cpu_reserve": "25%"}},
        },
    ).start()
    stop = threading.Event()
    worker = threading.Thread(target=work, args=(made, stop))
    worker.start()
    yield made
    stop.set()
    worker.join(30)
    made.kill()


@pytest.fixture(scope="module")
def prometheus(tools: Path, daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    target = daemon.config["server"]["metrics"]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "kvtierd", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [
        tools / "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([str(c) for c in command], stdout=log, stderr=log)
    server = Server(port)
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                if len(server.query("count_over_time(kvtierd_ready[1m]) > 12")):
                    break
            except OSError:
                pass
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.5)
        yield server
    finally:
        process.terminate()
        process.wait(30)


# ---- promtool


def test_the_live_metrics_follow_the_conventions(tools: Path, daemon: DaemonProcess) -> None:
    with urllib.request.urlopen(f"http://{daemon.config['server']['metrics']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "kvtierd_ready 1.0" in text
    own = "\n".join(line for line in text.splitlines() if re.match(r"(# \w+ )?kvtierd_", line)) + "\n"
    run(tools / "promtool", "check", "metrics", stdin=own)


def test_the_rules_pass_their_unit_tests(tools: Path) -> None:
    run(tools / "promtool", "check", "rules", RULES)
    run(tools / "promtool", "test", "rules", RULES.parent / "rules_test.yaml")
    run(tools / "promtool", "check", "config", RULES.parent / "prometheus.yaml")


def test_every_alert_has_a_unit_test_says_how_bad_it_is_and_what_to_do() -> None:
    tested = yaml.safe_load((RULES.parent / "rules_test.yaml").read_text())["tests"]
    fired = {c["alertname"] for t in tested for c in t.get("alert_rule_test", []) if c.get("exp_alerts")}
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["alert"] in fired
                assert rule["labels"]["severity"] in ("info", "warning", "critical")
                assert rule["annotations"]["summary"]
                assert rule["annotations"]["description"].endswith(".")


# ---- a real Prometheus


def queries() -> list[tuple[str, str]]:
    """Title of each panel and each of its queries, with the dashboard's variables filled in."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"]
            for name, value in (("$__rate_interval", "10s"), ("$job", ".*"), ("$instance", ".*"), ("$engine", ".*")):
                expr = expr.replace(name, value)
            assert "$" not in expr, f"{panel['title']} uses a variable that is not filled in"
            found.append((panel["title"], expr))
    return found


@pytest.mark.parametrize("title, expr", queries())
def test_every_panel_has_data(title: str, expr: str, prometheus: Server) -> None:
    if "vllm:" in expr:
        prometheus.query(expr)  # parses
        stats = (Path(connectors_path[0]) / "vllm" / "stats.py").read_text()
        for name in re.findall(r"vllm:kvtierd_(\w+)", expr):
            assert f'"{name.removesuffix("_total")}"' in stats, f"the connector has no metric {name}"
        return
    until = time.monotonic() + 20
    while not (found := prometheus.query(expr)) and title not in QUIET and time.monotonic() < until:
        time.sleep(0.5)
    assert bool(found) == (title not in QUIET), expr
    assert all(sample["value"][1] != "NaN" for sample in found) or "histogram_quantile" in expr or "/ sum" in expr
    if "histogram_quantile" in expr:
        assert any(sample["value"][1] != "NaN" for sample in found), f"nothing was ever measured for {expr}"


def test_every_recording_rule_gives_samples(prometheus: Server) -> None:
    quiet: set[str] = set()
    until = time.monotonic() + 60  # each group is evaluated every 30 s
    while "unknown" in json.dumps(groups := prometheus.get("/api/v1/rules")["groups"]) and time.monotonic() < until:
        time.sleep(0.5)
    for group in groups:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
            if rule["type"] == "recording" and rule["name"] not in quiet:
                until = time.monotonic() + 20
                while not (found := prometheus.query(rule["name"])) and time.monotonic() < until:
                    time.sleep(0.5)
                assert found, rule["name"]


def test_no_alert_fires_for_a_daemon_that_is_well(prometheus: Server) -> None:
    firing = {a["labels"]["alertname"] for a in prometheus.get("/api/v1/alerts")["alerts"] if a["state"] == "firing"}
    assert firing == set()
