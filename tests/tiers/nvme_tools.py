"""What tests of the NVMe store share: configurations, a crash without a close, and bytes changed behind the store's back."""

from __future__ import annotations

import glob
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvtierd.config import NvmeConfig
from kvtierd.tiers.base import Recovered
from kvtierd.tiers.io_engine import IoEngine
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.record import Entry

MIB = 1 << 20


def config_for(*folders: Path, capacity: int = 256 * MIB, **more: Any) -> NvmeConfig:
    """A small tier that works wherever the tests run."""
    return NvmeConfig(capacity=capacity, folders=list(folders), reserve=0, allow_volatile=True, **more)


def open_store(config: NvmeConfig, engine: IoEngine | None = None, **more: Any) -> tuple[NvmeStore, Recovered]:
    store = NvmeStore.open(config, engine=engine, **more)
    return store, store.recover()


def crash(store: NvmeStore) -> None:
    """What the kernel does for a killed process: close descriptors and drop the locks. Nothing is written."""
    store._table._deleter.shutdown(wait=True)
    for segment in list(store._table._open.values()):
        store._engine.close(segment.handle)
    for folder in store._folders:
        store._journals[id(folder)].close()
        folder.release()
    # A fixture may still close the store: by then nothing of it is left.
    store._table._open.clear()
    store._folders.clear()


def segment_path(folder: Path, extent_id: int) -> str:
    (path,) = glob.glob(str(folder / f"segment-{extent_id}-*.kv"))
    return path


def flip(path: str, offset: int) -> None:
    """Turn one bit of a file."""
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 0x10]))
        f.flush()
        os.fsync(f.fileno())


async def chunks_of(*chunks: list[Entry]) -> AsyncIterator[list[Entry]]:
    for chunk in chunks:
        yield chunk
