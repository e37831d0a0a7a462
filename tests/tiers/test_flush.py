"""Goal: when a flush returns, every removal that was recorded before it is in the journal.

Method: hold one thread's write of them in the engine, and flush from another meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Buffer

from kvtierd.model import slot_id
from kvtierd.tiers.base import BlockIo, Result
from kvtierd.tiers.io_engine import ThreadEngine

from .conformance import block, key_of, realm_of, slot_bytes_for
from .nvme_tools import config_for, open_store

SIZE = 5000


class HeldEngine(ThreadEngine):
    """Stops at the next write, once told to, until it may go on."""

    def __init__(self) -> None:
        self.hold = False
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        if self.hold:
            self.hold = False
            self.reached.set()
            assert self.go_on.wait(30)
        return super().pwritev(handle, buffers, offset_bytes)


def test_a_flush_waits_for_removals_that_another_thread_is_writing(tmp_path: Path) -> None:
    engine = HeldEngine()
    store, _ = open_store(config_for(tmp_path), engine)
    store.register_realm(realm_of(SIZE))
    store.add_extent(1, slot_bytes_for(SIZE), 8)
    assert store.write([block(realm_of(SIZE), 1, 1, slot_id(1, 0))]) == [Result.OK]
    store.forget([BlockIo(1, key_of(1), 1, (slot_id(1, 0),), [])])
    engine.hold = True
    writer = threading.Thread(target=store.flush)
    writer.start()
    assert engine.reached.wait(30)
    flushed = threading.Event()

    def flush() -> None:
        store.flush()
        flushed.set()

    other = threading.Thread(target=flush)
    other.start()
    assert not flushed.wait(0.2), "the removal is not in the journal yet"
    engine.go_on.set()
    writer.join()
    other.join()
    assert flushed.is_set()
    store.close()
