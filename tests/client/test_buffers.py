"""Goal: keys and buffers are accepted in all documented forms without copies, and wrong ones are refused with the sizes in the
text. Method: each form is checked for equal bytes and for shared memory. A class with torch's interface stands for torch."""

from __future__ import annotations

import array
import sys
import types
from typing import Any

import numpy as np
import pytest

from kvtierd.client.buffers import block_views, byte_view, count_keys, pack_keys
from tests.client.conftest import some_keys


def test_all_forms_of_keys_pack_to_the_same_bytes() -> None:
    keys = some_keys(3)
    packed = b"".join(keys)
    assert pack_keys(packed) is packed
    rows = np.frombuffer(packed, np.uint8).reshape(3, 32)
    for form in (keys, tuple(keys), bytearray(packed), memoryview(packed), rows):
        assert pack_keys(form) == packed
    assert count_keys(packed) == 3
    assert pack_keys([]) == b""


@pytest.mark.parametrize("keys", [b"x" * 31, [b"x" * 32, b"x" * 31], [b"x" * 16, b"x" * 48], np.zeros(33, np.uint8)])
def test_keys_of_another_length_are_refused(keys: Any) -> None:
    with pytest.raises(ValueError, match="32"):
        pack_keys(keys)


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(8),
        memoryview(bytearray(8)),
        array.array("d", [0.0]),
        np.zeros(2, np.float32),
        np.zeros((2, 2), np.int16),
        np.zeros(1, np.complex64),
    ],
)
def test_views_share_the_buffers_memory(buffer: Any) -> None:
    view = byte_view(buffer, writable=True)
    assert view.nbytes == 8
    view[:] = 255
    assert bytes(memoryview(buffer).cast("B")) == b"\xff" * 8


def test_a_numpy_dtype_without_buffer_protocol_works() -> None:
    """bfloat16 of ml_dtypes and datetimes have no buffer format."""
    times = np.zeros(2, "datetime64[s]")
    byte_view(times, writable=True)[:] = 1
    assert times.view(np.int64)[0] == 0x0101010101010101


@pytest.mark.parametrize("buffer", [np.zeros((4, 4))[:, 1], np.zeros((4, 4)).T, memoryview(bytearray(8))[::2], 7, "text"])
def test_what_is_not_contiguous_memory_is_refused(buffer: Any) -> None:
    with pytest.raises(ValueError):
        byte_view(buffer)


@pytest.mark.parametrize("buffer", [b"12345678", np.frombuffer(b"12345678", np.uint8)])
def test_read_only_buffers_are_refused_for_loads_only(buffer: Any) -> None:
    assert byte_view(buffer).nbytes == 8
    with pytest.raises(ValueError, match="read-only"):
        byte_view(buffer, writable=True)


class Tensor:
    """What is used of a torch tensor."""

    def __init__(self, data: Any, device: str = "cpu", contiguous: bool = True) -> None:
        self.data = data
        self.device = types.SimpleNamespace(type=device)
        self._contiguous = contiguous

    def untyped_storage(self) -> None:
        raise AssertionError("only its presence is looked at")

    def is_contiguous(self) -> bool:
        return self._contiguous

    def detach(self) -> Tensor:
        return self

    def reshape(self, size: int) -> Tensor:
        return Tensor(self.data.reshape(size))

    def view(self, dtype: Any) -> Tensor:
        assert dtype == "torch.uint8"
        return Tensor(self.data.view(np.uint8))

    def numpy(self) -> Any:
        assert self.data.dtype == np.uint8, "numpy knows no bfloat16"
        return self.data


def test_tensors_go_through_a_view_as_uint8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(uint8="torch.uint8"))  # type: ignore[arg-type]
    data = np.zeros((2, 2), np.uint16)
    byte_view(Tensor(data), writable=True)[:] = 1
    assert (data == 257).all()
    with pytest.raises(ValueError, match="CPU memory"):
        byte_view(Tensor(data, device="cuda"))
    with pytest.raises(ValueError, match="contiguous"):
        byte_view(Tensor(data, contiguous=False))


@pytest.mark.parametrize(
    "rows", [np.zeros((3, 8), np.uint8), np.zeros((3, 2, 2), np.int16), np.zeros((3, 8, 2), np.uint8)[:, :, 0]]
)
def test_rows_of_an_array_are_blocks(rows: Any) -> None:
    """The last one is strided: its rows are no contiguous memory."""
    if not rows.flags.c_contiguous:
        with pytest.raises(ValueError, match="contiguous"):
            block_views(rows, 3, (8,))
        return
    blocks = block_views(rows, 3, (8,), writable=True)
    assert [len(b) for b in blocks] == [1, 1, 1]
    blocks[1][0][:] = 1
    assert [bool(row.any()) for row in rows] == [False, True, False]
    with pytest.raises(ValueError, match="the namespace has 9 bytes; the buffer has 8"):
        block_views(rows, 3, (9,))
    rows.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        block_views(rows, 3, (8,), writable=True)


def test_blocks_take_one_buffer_a_key_or_one_a_shard() -> None:
    shards = block_views([(bytearray(8), bytearray(4)), [bytearray(8), bytearray(4)]], 2, (8, 4))
    assert [[v.nbytes for v in block] for block in shards] == [[8, 4], [8, 4]]


@pytest.mark.parametrize(
    "buffers, count, text",
    [
        ([bytearray(8)], 2, "2 keys need 2 buffers; got 1"),
        ([bytearray(8)], 1, "2 shards; got 1"),
        ([(bytearray(8), bytearray(5))], 1, "key 0, shard 1: the namespace has 4 bytes; the buffer has 5"),
    ],
)
def test_wrong_counts_and_sizes_are_named(buffers: Any, count: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        block_views(buffers, count, (8, 4))
