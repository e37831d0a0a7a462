"""GPUs for tests on a machine without any: a stand-in for the CUDA driver whose memory is shared memory of the host.

Processes load it in the place of the driver, so that all of the code above it runs as it does over a real one. Needs a C compiler.
"""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path
from typing import Final

from kvtierd.testing.faults.disk import compiler

SOURCE: Final = Path(__file__).with_name("driver.c")


class FakeGpus:
    """A driver with some GPUs.

    Args:
        work: a folder for the library and what steers it.
        count: GPUs.
        size_bytes: memory of each.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """

    def __init__(self, work: Path, count: int = 1, size_bytes: int = 1 << 30) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.library = work / "libcuda.so.1"
        self._faults = work / "faults"
        self._faults.mkdir()
        self._ids = [uuid.uuid5(uuid.NAMESPACE_OID, str(n)) for n in range(count)]
        self.uuids = [f"GPU-{n}" for n in self._ids]
        self._size_bytes = size_bytes
        _build(self.library)

    def environment(self, *seen: int) -> dict[str, str]:
        """Variables of a process that may see these GPUs; all when none is named."""
        ids = [self._ids[n] for n in seen] or self._ids
        return {
            "LD_LIBRARY_PATH": str(self.library.parent),
            "FAKE_CUDA_DEVICES": ",".join(n.hex for n in ids),
            "FAKE_CUDA_BYTES": str(self._size_bytes),
            "FAKE_CUDA_FAULTS": str(self._faults),
        }

    def fail(self, function: str, wait_ms: int = 0) -> None:
        """From now on a function of the driver fails in all processes, or takes so long."""
        (self._faults / function).write_text(str(wait_ms))

    def heal(self, function: str) -> None:
        """It works again."""
        (self._faults / function).unlink()


def _build(library: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("a stand-in for the CUDA driver needs a C compiler: install gcc")
    command = [found, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{SOURCE} cannot be built: {done.stderr[-2000:]}")
