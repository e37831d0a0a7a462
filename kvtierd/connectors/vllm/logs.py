"""Log lines: where they go, and those that clients can bring about at any rate, each kind at most once a minute."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

EVERY_S: Final = 60.0

log = logging.getLogger("vllm.kvtierd")
_last_s: dict[str, float] = {}
"""By format, of which there are few. Two threads at once may say a thing twice, no more."""


def warn_rarely(text: str, *args: Any) -> None:
    """Warn, unless the same ``text`` (before its ``args``) was said within the last minute."""
    now = time.monotonic()
    if now - _last_s.get(text, -EVERY_S) >= EVERY_S:
        _last_s[text] = now
        log.warning(text + " (said at most once a minute)", *args)


def share_handlers() -> None:
    """Have kvtierd's own loggers, the client's for one, write where vLLM's write, unless the program has set up logging for all."""
    own, engine = logging.getLogger("kvtierd"), logging.getLogger("vllm")
    if own.handlers or logging.getLogger().handlers or not engine.handlers:
        return
    own.handlers[:] = engine.handlers
    own.setLevel(engine.getEffectiveLevel())
    own.propagate = False
