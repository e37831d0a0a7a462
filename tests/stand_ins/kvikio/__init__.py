"""Stands in for kvikio over the stand-in for the CUDA driver, whose GPU memory is memory of the process: so much as kvtierd calls.

FAKE_KVIKIO_FAULTS is a folder: as long as it has a file "pread" or "pwrite", such transfers do what that says: "fail", "short",
"corrupt", "slow" or "hang", this last for as long as the file is there.
"""

import ctypes
import enum
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__version__ = "0"


class CompatMode(enum.IntEnum):
    OFF = 0
    ON = 1
    AUTO = 2


class _Future:
    def __init__(self, future):
        self.get = future.result


def _fault(what):
    try:
        return (Path(os.environ["FAKE_KVIKIO_FAULTS"]) / what).read_text()
    except (KeyError, FileNotFoundError):
        return ""


class CuFile:
    threads = ThreadPoolExecutor(4)

    def __init__(self, path, flags):
        assert flags == "r+"
        self._fd = os.open(path, os.O_RDWR)

    def close(self):
        os.close(self._fd)
        self._fd = -1

    def pwrite(self, buffer, size, offset):
        return _Future(self.threads.submit(self._move, "pwrite", os.pwritev, buffer, size, offset))

    def pread(self, buffer, size, offset):
        return _Future(self.threads.submit(self._move, "pread", os.preadv, buffer, size, offset))

    def _move(self, what, call, buffer, size, offset):
        face = buffer.__cuda_array_interface__
        assert face["shape"] == (size,) and face["typestr"] == "|u1" and size % 4096 == offset % 4096 == 0
        while (fault := _fault(what)) == "hang":
            time.sleep(0.01)
        if fault == "slow":
            time.sleep(1.0)
        if fault == "fail":
            raise RuntimeError("cuFile error")
        memory = memoryview((ctypes.c_char * size).from_address(face["data"][0])).cast("B")
        if fault == "corrupt" and what == "pwrite":
            memory = memoryview(bytearray(memory))
            memory[100] ^= 1
        moved = call(self._fd, [memory[: size - 4096 * (fault == "short")]], offset)
        if fault == "corrupt":
            memory[100] ^= 1
        return moved
