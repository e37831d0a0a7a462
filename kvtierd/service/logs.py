"""Log lines of the daemon: text for people, or one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys

from kvtierd.config import LogConfig


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC seconds), level, logger, message and, with an exception, its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record."""
        line = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            line["exc"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(config: LogConfig) -> None:
    """Send the daemon's log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.json_lines else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    for noisy in ("aiohttp.access", "asyncio", "grpc._cython.cygrpc"):
        logging.getLogger(noisy).setLevel("WARNING")
