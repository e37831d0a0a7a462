"""Goal: bytes reach the file whole whatever an engine moves at a time, and the engine asked for is the one used.

Method: engines that move little or nothing; a stand-in for kvikio, which needs a GPU's driver, and kvikio where there is one.
"""

from __future__ import annotations

import mmap
import os
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typing_extensions import Buffer

from kvtierd.config import NvmeConfig
from kvtierd.errors import StartupError
from kvtierd.tiers import io_engine
from kvtierd.tiers.io_engine import KvikioEngine, ThreadEngine, choose_engine, read_all, write_all

MIB = 1 << 20


class Trickle(ThreadEngine):
    """Moves at most ``step`` bytes a call."""

    def __init__(self, step: int) -> None:
        self.step = step

    def _cut(self, buffers: Sequence[Buffer], offset_bytes: int) -> list[memoryview]:
        assert offset_bytes % 4096 == 0, "direct I/O takes whole pages only"
        left, cut = self.step, []
        for view in map(memoryview, buffers):
            cut.append(view[:left])
            left -= len(cut[-1])
        return [v for v in cut if len(v)]

    def pwritev(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        return super().pwritev(handle, self._cut(buffers, offset_bytes), offset_bytes) if self.step else 0

    def preadv(self, handle: int, buffers: Sequence[Buffer], offset_bytes: int) -> int:
        return super().preadv(handle, self._cut(buffers, offset_bytes), offset_bytes) if self.step else 0


def pages(*sizes: int) -> list[memoryview]:
    return [memoryview(mmap.mmap(-1, size)) for size in sizes]


def assert_goes_round(engine: ThreadEngine, handle: int, offset_bytes: int, *sizes: int) -> None:
    """Random bytes in buffers of these sizes are written and read again."""
    out, back = pages(*sizes), pages(*sizes)
    for view in out:
        view[:] = os.urandom(len(view))
    write_all(engine, handle, list(out), offset_bytes)
    assert read_all(engine, handle, list(back), offset_bytes) == sum(sizes)
    assert [bytes(v) for v in back] == [bytes(v) for v in out]


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "f").touch()
    return str(tmp_path / "f")


@pytest.mark.parametrize("step", [4096, 5000, 12288, MIB])
def test_short_transfers_go_on_at_the_right_place(path: str, step: int) -> None:
    engine = Trickle(step)
    handle = engine.open(path, direct=False)
    assert_goes_round(engine, handle, 4096, 4096, 20480, 4096, 8192)
    assert Path(path).read_bytes()[:4096] == bytes(4096)
    engine.close(handle)


def test_more_buffers_than_one_call_takes(path: str) -> None:
    engine = ThreadEngine()
    handle = engine.open(path, direct=False)
    all_pages = pages(4096 * 3000)[0]
    all_pages[:] = os.urandom(len(all_pages))
    parts = [all_pages[i : i + 4096] for i in range(0, len(all_pages), 4096)]
    write_all(engine, handle, parts, 0)
    assert Path(path).read_bytes() == bytes(all_pages)
    engine.close(handle)


def test_a_device_that_takes_nothing_is_an_error_not_a_loop(path: str) -> None:
    engine = Trickle(0)
    handle = engine.open(path, direct=False)
    with pytest.raises(OSError, match="accepts no bytes"):
        write_all(engine, handle, pages(4096), 0)
    assert read_all(engine, handle, pages(4096), 0) == 0
    engine.close(handle)


def test_reading_past_the_end_returns_whole_pages_only(path: str) -> None:
    Path(path).write_bytes(b"x" * 10_000)
    engine = ThreadEngine()
    handle = engine.open(path, direct=False)
    assert read_all(engine, handle, pages(4096, 8192), 0) == 8192
    engine.close(handle)


class FakeCuFile:
    """kvikio.CuFile as far as it is used here: futures over plain calls, on several threads."""

    opened: ClassVar[list[FakeCuFile]] = []
    broken = ""

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r+"
        self.fd = os.open(path, os.O_RDWR)
        self.threads = ThreadPoolExecutor(2)
        self.closed = False
        self.calls = 0
        FakeCuFile.opened.append(self)

    def _start(self, call: Callable[..., int], array: Any, size: int, offset: int) -> Any:
        self.calls += 1
        assert array.nbytes == size
        if FakeCuFile.broken == "start":
            raise RuntimeError("cuFile says no")
        future = self.threads.submit(call, self.fd, [memoryview(array)], offset)

        def get() -> int:
            if FakeCuFile.broken:
                future.exception()
                raise RuntimeError("cuFile says no")
            return future.result()

        return types.SimpleNamespace(get=get)

    def pwrite(self, array: Any, size: int, offset: int) -> Any:
        return self._start(os.pwritev, array, size, offset)

    def pread(self, array: Any, size: int, offset: int) -> Any:
        return self._start(os.preadv, array, size, offset)

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.fd)
        self.closed = True


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    settings: dict[str, object] = {}
    module, defaults = types.ModuleType("kvikio"), types.ModuleType("kvikio.defaults")
    module.CuFile = FakeCuFile  # type: ignore[attr-defined]
    defaults.set = settings.update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvikio", module)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", defaults)
    monkeypatch.setattr(FakeCuFile, "opened", [])
    monkeypatch.setattr(FakeCuFile, "broken", "")
    return settings


def test_kvikio_moves_large_buffers_and_leaves_small_ones_to_the_plain_calls(path: str, kvikio: dict[str, object]) -> None:
    engine = KvikioEngine(5)
    assert kvikio["num_threads"] == 5
    handle = engine.open(path, direct=True)
    (file,) = FakeCuFile.opened
    assert_goes_round(engine, handle, 8192, 4096, 2 * MIB, 4096)
    assert file.calls == 2
    write_all(engine, handle, pages(4096, 8192), 0)
    assert file.calls == 2
    engine.close(handle)
    assert file.closed


@pytest.mark.gpu
def test_the_real_kvikio_moves_the_same_bytes(path: str) -> None:
    pytest.importorskip("kvikio", reason="kvikio is not installed here")
    engine = choose_engine(NvmeConfig(io="kvikio"))
    handle = engine.open(path, direct=True)
    assert_goes_round(engine, handle, 8192, 4096, 3 * MIB, 4096)
    past = pages(4 * MIB)
    assert read_all(engine, handle, list(past), 3 * MIB) == 16384, "the file ends there"
    engine.close(handle)


def test_kvikio_reading_past_the_end_stops_there(path: str, kvikio: dict[str, object]) -> None:
    engine = KvikioEngine(2)
    handle = engine.open(path, direct=True)
    write_all(engine, handle, pages(4096, MIB), 0)
    assert read_all(engine, handle, pages(4096, 2 * MIB, 4096), 0) == MIB + 4096
    engine.close(handle)


@pytest.mark.parametrize("when", ["start", "end"])
def test_what_kvikio_fails_to_move_goes_the_plain_way(
    path: str, kvikio: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    """Goal: no block is lost, the end of a file is no error, and an error is the kernel's own."""
    engine = KvikioEngine(2)
    handle = engine.open(path, direct=True)
    monkeypatch.setattr(FakeCuFile, "broken", when)
    out, back = pages(4096, MIB, MIB), pages(4096, MIB, 3 * MIB)
    for view in out:
        view[:] = os.urandom(len(view))
    write_all(engine, handle, list(out), 0)
    assert read_all(engine, handle, list(back), 0) == 4096 + 2 * MIB
    assert b"".join(back)[: 4096 + 2 * MIB] == b"".join(out)
    assert caplog.text.count("moved by plain calls") == (when == "end")
    monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        write_all(engine, handle, pages(4096, MIB), 0)
    engine.close(handle)


def test_kvikio_leaves_files_without_direct_io_alone(path: str, kvikio: dict[str, object]) -> None:
    engine = KvikioEngine(2)
    handle = engine.open(path, direct=False)
    assert FakeCuFile.opened == []
    engine.close(handle)


@pytest.mark.parametrize("io, cuda, found", [
    ("auto", False, "threads"), ("auto", True, "threads"), ("threads", True, "threads"), ("kvikio", True, "kvikio"),
])  # fmt: skip
def test_the_engine_that_fits_is_chosen(
    io: str, cuda: bool, found: str, kvikio: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        assert name == "libcuda.so.1"
        if not cuda:
            raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(io_engine.ctypes, "CDLL", load)
    assert choose_engine(NvmeConfig(io=io)).name == found


def test_kvikio_asked_for_by_name_and_missing_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(io_engine.ctypes, "CDLL", load)
    with pytest.raises(StartupError, match=r'libcuda.*cuda12.*nvme.io = "threads"'):
        choose_engine(NvmeConfig(io="kvikio"))
