"""Target over what was kept of CPU memory: any index, with and without a checksum that fits, beside memory that is right."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import xxhash

from kvtierd.tiers.keeper import INDEX
from tests.cpu.test_kept import Daemon


class KeptTarget:
    """A core takes over; it holds the blocks that were left, or none, and every invariant."""

    def __init__(self, folder: Path) -> None:
        memory = Path("/dev/shm")
        self._base = Path(tempfile.mkdtemp(prefix="kvtierd-fuzz-", dir=folder if memory in folder.parents else memory))
        first = Daemon(self._base / "template")
        first.save(range(4))
        assert first.leave() == 4

    def seeds(self) -> list[bytes]:
        """The index that was left, with its checksum and to be given one."""
        raw = (self._base / "template" / INDEX).read_bytes()
        text = raw.partition(b"\n")[2]
        return [b"\0" + raw, b"\1" + text, b"\1" + b"[" * 3000, b'\1{"format_version": 1, "realms": [5, [], {}]}']

    def __call__(self, data: bytes) -> None:
        """Try one input."""
        folder = self._base / "at-work"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._base / "template", folder)
        mended = data[:1] == b"\1"
        raw = xxhash.xxh3_128_hexdigest(data[1:]).encode() + b"\n" + data[1:] if mended else data[1:]
        (folder / INDEX).write_bytes(raw)
        daemon = Daemon(folder)
        try:
            daemon.take()
            daemon.core.check()
            if not mended:  # an index that somebody has written anew may call a block by another's name
                daemon.held()
        finally:
            daemon.end()

    def close(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self._base)
