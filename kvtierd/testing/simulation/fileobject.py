"""What the built-in ``open`` gives, over simulated files."""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtierd.testing.simulation.syscalls import SimOs


class SimFile:
    """As a file object without a buffer: it goes on after a short transfer, as the original does."""

    def __init__(self, system: SimOs, fd: int, offset: int, *, text: bool) -> None:
        self._system = system
        self._fd = fd
        self._offset = offset
        self._text = text

    def __enter__(self) -> SimFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._system.close(self._fd)

    def read(self, size: int = -1) -> Any:
        """Bytes or text from here on."""
        want = self._system.size_of(self._fd) - self._offset
        want = max(want if size < 0 else min(size, want), 0)
        parts = io.BytesIO()
        while want > parts.tell():
            part = self._system.pread(self._fd, want - parts.tell(), self._offset)
            if not part:
                break
            parts.write(part)
            self._offset += len(part)
        raw = parts.getvalue()
        return raw.decode() if self._text else raw

    def write(self, data: Any) -> int:
        """Write bytes or text from here on."""
        raw = data.encode() if self._text else bytes(data)
        left = raw
        while left:
            moved = self._system.pwrite(self._fd, left, self._offset)
            if not moved:
                raise OSError(errno.EIO, "the simulated disk accepts no bytes")
            self._offset += moved
            left = left[moved:]
        return len(data)

    def flush(self) -> None:
        """There is no buffer."""

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd
