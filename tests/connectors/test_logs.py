"""Goal: what kvtierd says inside an engine comes out as the engine's own lines do, once, and not at any rate.

Method: the real logging module with handlers that remember; the clock is the test's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from kvtierd.connectors.vllm import logs
from kvtierd.connectors.vllm.logs import share_handlers, warn_rarely


class Remembers(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def engine() -> Iterator[Remembers]:
    """vLLM's logger with a handler, and nothing at the root, as in an engine's process."""
    own, vllm, root = (logging.getLogger(name) for name in ("kvtierd", "vllm", ""))
    before = [(x, x.handlers[:], x.level, x.propagate) for x in (own, vllm, root)]
    handler = Remembers()
    own.handlers[:], root.handlers[:] = [], []
    vllm.handlers[:] = [handler]
    vllm.setLevel("INFO")
    vllm.propagate = False
    yield handler
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_the_clients_lines_come_out_once_as_the_engines_do(engine: Remembers) -> None:
    logging.getLogger().handlers[:] = []  # pytest has put its own there
    share_handlers()
    share_handlers()
    logging.getLogger("kvtierd.client").info("attached")
    logging.getLogger("kvtierd.client").debug("too much")
    assert engine.lines == ["attached"]


def test_a_program_that_has_set_up_logging_keeps_it(engine: Remembers) -> None:
    mine = Remembers()
    logging.getLogger().addHandler(mine)
    share_handlers()
    logging.getLogger("kvtierd.client").warning("no KV cache for now")
    assert (mine.lines, engine.lines) == (["no KV cache for now"], [])


def test_what_clients_bring_about_is_said_once_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    monkeypatch.setattr(logs, "_last_s", {})
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.WARNING, "vllm.kvtierd"):
        for name in ("a", "b"):
            warn_rarely("kvtierd: %s is wrong", name)
        warn_rarely("kvtierd: another thing")
        now[0] += logs.EVERY_S
        warn_rarely("kvtierd: %s is wrong", "c")
    said = [m.removesuffix(" (said at most once a minute)") for m in caplog.messages]
    assert said == ["kvtierd: a is wrong", "kvtierd: another thing", "kvtierd: c is wrong"]
