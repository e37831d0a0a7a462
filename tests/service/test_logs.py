"""Goal: what takes too long is told, without filling the log.

Method: the log's own lines under a clock that the test moves; one real daemon whose limit is below what any call takes.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from kvtierd.client import Client
from kvtierd.config import LogConfig
from kvtierd.model import Namespace
from kvtierd.service import logs
from kvtierd.service.logs import EVERY_S, SlowLog
from kvtierd.testing.daemon import DaemonProcess


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    return now


def test_only_what_is_slow_is_told_with_its_time(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowLog(1.0)
    slow.check("Load", 0.99)
    assert not caplog.records
    slow.check("Load", 1.5, "8 blocks")
    assert caplog.messages == ["slow: Load took 1.50 s (8 blocks)"]
    assert caplog.records[0].levelno == logging.WARNING


def test_each_kind_is_told_now_and_then_and_what_was_left_out_is_counted(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowLog(1.0)
    for _ in range(5):
        slow.check("Load", 2.0)
    slow.check("Save", 2.0)
    assert caplog.messages == ["slow: Load took 2.00 s", "slow: Save took 2.00 s"]
    clock[0] += EVERY_S
    slow.check("Load", 3.0)
    assert caplog.messages[2:] == ["slow: Load took 3.00 s; 4 more since the last such line"]
    clock[0] += EVERY_S
    slow.check("Load", 3.0)
    assert caplog.messages[3:] == ["slow: Load took 3.00 s"]


def test_a_limit_of_zero_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    SlowLog(0.0).check("Load", 1e9)
    assert not caplog.records


def test_a_daemon_tells_slow_calls_and_moves(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, {"cpu": {"capacity": "8MiB", "ttl": "0.1s"}, "log": {"slow": 1e-9}}).start()
    try:
        with Client(Namespace(shard_bytes=(1 << 20,)), daemon.address, require=True) as client:
            keys = [b"%032d" % n for n in range(4)]
            client.save(keys, [bytes(1 << 20)] * 4)
            client.lookup(keys)
            client.lookup(keys)  # a client that leaves may take its last call along before it is counted
        assert daemon.stop() == 0
    finally:
        daemon.kill()
    text = daemon.log()
    assert "slow: Lookup took" in text
    assert "slow: moving blocks from cpu to nvme took" in text
    assert "slow: Attach" not in text, "a session lasts as long as its client wants"


def test_a_caller_that_leaves_while_grpc_sends_its_answer_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def tell(error: Exception) -> None:
        try:
            raise error
        except Exception:
            logging.getLogger("grpc._cython.cygrpc").exception("Unexpected exception")

    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.set_up_logging(LogConfig(level="debug"))
    root.addHandler(caplog.handler)
    try:
        tell(cygrpc.ExecuteBatchError('Failed "execute_batch"'))
        tell(ValueError("a fault of ours"))
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
    assert [r.levelname for r in caplog.records] == ["DEBUG", "ERROR"]
    assert "given up" in caplog.messages[0] and "Traceback" in caplog.text and "execute_batch" not in caplog.text
