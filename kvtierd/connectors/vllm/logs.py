"""Log lines that clients can bring about at any rate, each kind at most once a minute."""

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
