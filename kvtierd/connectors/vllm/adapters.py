"""What the adapters (LoRA) of requests are, beyond their names and paths.

Blocks outlive the engine, and another adapter may be put in the same place or loaded over the one that runs, so the content of its
files is in the keys. Files are looked at in a thread of their own, once more for every request. The engine's thread waits a moment
for that where it has to, and no longer: a request whose adapter is not known yet has no keys.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from blake3 import blake3

from kvtierd.connectors.vllm.background import Background
from kvtierd.connectors.weights import name_weights, stamp

WAIT_S: Final = 0.05
"""Longest that the engine's thread waits for one look; not at all while one that took longer has not ended."""
MAX_ADAPTERS: Final = 4096
MAX_REQUESTS: Final = 4096
NAME_BYTES: Final = 32

log = logging.getLogger("vllm.kvtierd")


@dataclass(frozen=True, slots=True)
class _Adapter:
    """As the engine names it. One that is loaded again under a number of its own is another one."""

    name: str
    path: str
    number: int


@dataclass(slots=True, eq=False)
class _Look:
    """One request's look at its adapter.

    Attributes:
        adapter: which.
        reloads: the engine loads the adapter anew for this request.
        identity: what it is; None while, or because, nobody knows.
        ended: the look.
    """

    adapter: _Adapter
    reloads: bool
    identity: bytes | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class Adapters:
    """Used on the engine's thread only."""

    def __init__(self) -> None:
        self._looks: dict[str, _Look] = {}
        self._known: dict[_Adapter, tuple[object, bytes | None]] = {}
        """Stamp and identity; written by the background thread only."""
        self._thread: Background | None = None
        self._late: _Look | None = None

    def identity(self, request: Any) -> bytes | None:
        """What the request's adapter is: empty for none, None while (or because) that is not known. Does not change while the
        request lasts, other than to None."""
        lora = getattr(request, "lora_request", None)
        if not lora:
            return b""
        look = self._looks.get(request.request_id)
        if look is None:
            while len(self._looks) >= MAX_REQUESTS:
                self._looks.pop(next(iter(self._looks)))
            look = self._looks[request.request_id] = self._look(lora)
        return look.identity

    def confirmed(self, request: Any) -> bytes:
        """As ``identity``, for keys that are about to be used. Where the adapter may have changed since the request began, its KV
        is neither the old one's nor the new one's: it gets a name that nobody looks for."""
        found = self.identity(request)
        if found == b"":
            return found
        if found is None or self._look(request.lora_request).identity != found:
            found = os.urandom(NAME_BYTES)
            self._looks[request.request_id] = replace(self._looks[request.request_id], identity=found)  # the other may still change
        return found

    def forget(self, request_id: str) -> None:
        """The request has gone."""
        self._looks.pop(request_id, None)

    def clear(self) -> None:
        """Look at everything anew: adapters may have been loaded again."""
        self._looks.clear()
        self._known = {}

    def close(self) -> None:
        """End the thread, which may hang in a file system."""
        if self._thread is not None:
            self._thread.close(0.0)

    def _look(self, lora: Any) -> _Look:
        adapter = _Adapter(str(lora.lora_name), str(lora.lora_path), int(getattr(lora, "lora_int_id", 0)))
        look = _Look(adapter, bool(getattr(lora, "load_inplace", False)))
        known = None if look.reloads else self._known.get(adapter)
        if known is not None:
            look.identity = known[1]  # it is looked all the same: files may change without anybody being told
        if self._thread is None:
            self._thread = Background(1, "kvtierd-adapter")
        submitted = self._thread.submit(partial(_run, self._known, look))
        hangs = self._late is not None and not self._late.ended.is_set()
        if submitted and known is None and not hangs and not look.ended.wait(WAIT_S):
            self._late = look
        return look


# ---- in the background


def _run(known: dict[_Adapter, tuple[object, bytes | None]], look: _Look) -> None:
    identity = None
    try:
        identity = _identify(known, look)
    finally:
        look.identity = identity if look.identity in (None, identity) else None
        look.ended.set()


def _identify(known: dict[_Adapter, tuple[object, bytes | None]], look: _Look) -> bytes | None:
    """What an adapter is now; None when other files are in its place than those that the engine has loaded."""
    adapter, mark = look.adapter, _stamp(look.adapter)
    before = known.get(adapter)
    if before is not None and before[0] == mark and (before[1] is not None or not look.reloads):
        return before[1]
    identity: bytes | None = _content(adapter)
    if before is not None and before[1] != identity and not look.reloads:
        identity = None
        log.warning(
            "kvtierd: the files of adapter %s have changed, and the engine may go on with those that it has loaded. Its requests "
            "go without a cache until it is loaded in place or under another number, or the cache is reset.",
            adapter.name,
        )
    if before is None and len(known) >= MAX_ADAPTERS:
        known.pop(next(iter(known)))
    known[adapter] = mark, identity
    return identity


def _stamp(adapter: _Adapter) -> object:
    try:
        return stamp(adapter.path)
    except OSError:
        return None


def _content(adapter: _Adapter) -> bytes:
    why = "there are no weights"
    try:
        found = name_weights(adapter.path)
    except OSError as e:
        found, why = "", str(e)
    if not found:
        log.warning("kvtierd: adapter %s goes by its path %s, for its content is not known: %s", adapter.name, adapter.path, why)
    parts = [part.encode() for part in ("lora", adapter.name, adapter.path, found)]
    return blake3(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()
