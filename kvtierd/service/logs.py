"""Log lines of the daemon: text for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

from kvtierd.config import LogConfig

EVERY_S: Final = 10.0
"""Of each kind of line that others can bring about at most one in this time."""

log = logging.getLogger(__name__)


class Seldom:
    """Keeps lines of which there might be any number down to a few. Used on the event loop."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, int]] = {}
        """Of each kind, of which there are few: when it was last told, and how many were not since."""

    def more(self, kind: str) -> str | None:
        """What to add to a line of a kind: how many there were that were not told. None: do not write this one."""
        now = time.monotonic()
        told_s, silent = self._told.get(kind, (-EVERY_S, 0))
        if now - told_s < EVERY_S:
            self._told[kind] = told_s, silent + 1
            return None
        self._told[kind] = now, 0
        return f"; {silent} more since the last such line" if silent else ""


class SlowLog:
    """Warns of operations that took too long. Used on the event loop.

    Args:
        limit_s: from this long on; 0 for never.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seldom = Seldom()

    def check(self, kind: str, seconds: float, detail: str = "") -> None:
        """Warn if an operation of a kind, of which there are few, was slow."""
        if not self._limit_s or seconds < self._limit_s:
            return
        more = self._seldom.more(kind)
        if more is not None:
            log.warning("slow: %s took %.2f s%s%s", kind, seconds, f" ({detail})" if detail else "", more)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC seconds), level, logger, message, a decision's fields, and an exception's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        line = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        # Fields of a decision (runtime/decisions.py); they take nothing's place.
        line |= {name: value for name, value in getattr(record, "fields", {}).items() if name not in line}
        if record.exc_info:
            line["exc"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def tell_quietly(record: logging.LogRecord) -> bool:
    """A filter for gRPC's logger: what it calls an unexpected exception when a caller leaves while its answer is sent, is none."""
    if record.exc_info and record.exc_info[0] and record.exc_info[0].__name__ == "ExecuteBatchError":
        log.debug("a call was given up while its answer was sent")
        return False
    return True


def set_up_logging(config: LogConfig) -> None:
    """Send the daemon's log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.json_lines else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for noisy in ("aiohttp.access", "asyncio", "grpc._cython.cygrpc"):
        logging.getLogger(noisy).setLevel("WARNING")
    logging.getLogger("grpc._cython.cygrpc").addFilter(tell_quietly)
