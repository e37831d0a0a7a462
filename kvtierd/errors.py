"""The closed set of error reasons and the exceptions that carry them.

Names equal ``kvtierd.v1.ErrorReason`` without its prefix, so a reason reads the same in a Python exception, in a
``google.rpc.ErrorInfo`` and in a metric label. This module imports nothing of kvtierd, so that every layer may use it.
"""

from __future__ import annotations

from enum import IntEnum


class Reason(IntEnum):
    """Why something was refused, failed or is missing. Values equal ``kvtierd.v1.ErrorReason``."""

    UNSPECIFIED = 0
    BAD_REQUEST = 1
    BAD_KEY = 2
    TOO_MANY_KEYS = 3
    PROTOCOL_VERSION = 4
    UNKNOWN_LAYOUT = 5
    LAYOUT_MISMATCH = 6
    UNKNOWN_SESSION = 7
    UNKNOWN_TICKET = 8
    PERMISSION = 9
    BUSY = 10
    QUOTA = 11
    TOO_LARGE = 12
    LIMIT = 13
    DRAINING = 14
    DEADLINE = 15
    IO = 16
    CORRUPT = 17
    NOT_FOUND = 18
    OVERLOADED = 19
    INTERNAL = 20


class KvtierdError(Exception):
    """Base of every error that kvtierd raises on purpose. The text says what happened and what to do."""


class RequestError(KvtierdError):
    """A request that cannot be served, with its reason and, where one is known, how long to wait before it is tried again."""

    def __init__(self, reason: Reason, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s


class ConfigError(KvtierdError):
    """Configuration that does not make sense. The text names the key and the fix."""


class StartupError(KvtierdError):
    """The daemon cannot start: a folder, a socket, memory or a port cannot be had. The text names the fix."""


class DaemonUnavailableError(KvtierdError):
    """The client found no daemon within its deadline. Callers treat it as "no cache"."""
