"""Goal: blocks of a CUDA device go into slots and back byte for byte, in order with the engine's work, pinned or not.

Method: caches of all forms in device memory full of random bytes; what a slot must contain is read element by element through
torch's indexing; slots are memfds, as in service.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import gpu_copying, gpu_memory, gpu_staging  # noqa: E402
from kvtierd.connectors.vllm.copying import make_copier, self_test  # noqa: E402
from kvtierd.connectors.vllm.gpu_copying import CudaBlockCopier  # noqa: E402
from kvtierd.connectors.vllm.layout import UnsupportedLayoutError, WorkerLayout, worker_layout  # noqa: E402
from kvtierd.memory import SharedMapping, create_memfd  # noqa: E402
from tests.connectors import kv_forms as forms  # noqa: E402
from tests.connectors.kv_forms import BLOCKS, FORMS, Cache, vllm_config  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
DEVICE = "cuda:0"
MIB = 1 << 20


def never() -> bool:
    return False


def made(form: str) -> tuple[Cache, WorkerLayout, CudaBlockCopier]:
    cache = FORMS[form](DEVICE)
    layout = worker_layout(cache.config, cache.tensors, vllm_config=vllm_config())
    copier = make_copier(layout)
    assert isinstance(copier, CudaBlockCopier)
    return cache, layout, copier


@pytest.fixture
def mapping() -> Iterator[SharedMapping]:
    fd = create_memfd("kvtierd-test", 4 * MIB)
    made = SharedMapping(fd, 4 * MIB)
    os.close(fd)
    yield made
    made.release()


@pytest.fixture(params=["pinned", "pageable"])
def memory(request: pytest.FixtureRequest, mapping: SharedMapping) -> tuple[SharedMapping, bool]:
    return mapping, request.param == "pinned"


@pytest.mark.parametrize("slab_bytes", [gpu_copying.SLAB_BYTES, 1])  # 1: every block is staged alone
@pytest.mark.parametrize("by_kernel", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_slots_hold_the_bytes_of_their_blocks_and_give_them_back(
    form: str, by_kernel: bool, slab_bytes: int, memory: tuple[SharedMapping, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_copying, "SLAB_BYTES", slab_bytes)
    assert gpu_staging._kernels() is not None, "there is no Triton here"
    if not by_kernel:
        monkeypatch.setattr(gpu_staging, "_kernels", lambda: None)
    cache, layout, copier = made(form)
    mapping, pinned = memory
    if pinned:
        copier.on_mapped(1, mapping)
        assert copier._memory.registered
    for group, seen in enumerate(layout.groups):
        own = forms.all_places(form, cache, group)
        size = 3 * seen.block_bytes
        view = mapping.view
        view[: 2 * size + 1] = b"\x5a" * (2 * size + 1)
        chosen = [[5, 0, 1], [-1, 6, -1]]
        slots = [view[:size], view[size : 2 * size]]
        copier.save(group, list(zip(slots, chosen, strict=True)), copier.fence())
        for slot, ids in zip(slots, chosen, strict=True):
            expected = b"".join(b"\x5a" * seen.block_bytes if b < 0 else forms.read_places(cache, own[b]) for b in ids)
            assert bytes(slot) == expected
        assert view[2 * size] == 0x5A
        before = [flat.clone() for flat in cache.spaces]
        contents = random.Random(group).randbytes(2 * size)
        view[: 2 * size] = contents
        assert copier.load(group, [(slots[0], [3, -1, 4]), (slots[1], [-1, -1, 2])], copier.fence(), never) == 2
        step = seen.block_bytes
        for block, place in ((3, 0), (4, 2), (2, 5)):
            assert forms.read_places(cache, own[block]) == contents[place * step : (place + 1) * step]
        written = {*own[2], *own[3], *own[4]}
        for flat, old in zip(cache.spaces, before, strict=True):
            changed = (flat != old).nonzero().flatten().tolist()
            assert {(flat.untyped_storage().data_ptr(), place) for place in changed} <= written
        del view, slots, slot
    copier.on_revoked(1, mapping)
    assert not copier._memory.registered
    copier.close()


@pytest.mark.parametrize("form", FORMS)
def test_the_self_test_passes_and_leaves_everything_as_it_was(form: str) -> None:
    cache, layout, copier = made(form)
    before = [flat.clone() for flat in cache.spaces]
    self_test(layout, copier, cache.tensors)
    assert all(torch.equal(flat, old) for flat, old in zip(cache.spaces, before, strict=True))


def test_the_self_test_finds_a_layout_that_is_wrong() -> None:
    cache, layout, _ = made("layers_outermost")
    wrong = (replace(layout.regions[0][0], offset_bytes=layout.regions[0][0].offset_bytes + 2), *layout.regions[0][1:])
    broken = replace(layout, regions=(wrong,))
    with pytest.raises(UnsupportedLayoutError, match="out and back in changed block"):
        self_test(broken, make_copier(broken), cache.tensors)


def test_a_cache_made_in_inference_mode_is_copied_outside_of_it() -> None:
    with torch.inference_mode():
        cache, layout, copier = made("packed")
    slot = bytearray(layout.groups[0].block_bytes)
    copier.save(0, [(memoryview(slot), [2])], copier.fence())
    assert copier.load(0, [(memoryview(slot), [3])], copier.fence(), never) == 1
    own = forms.all_places("packed", cache, 0)
    assert forms.read_places(cache, own[3]) == forms.read_places(cache, own[2]) == bytes(slot)


# ---- order


def test_a_save_waits_for_what_the_engine_queued_before_the_fence() -> None:
    cache, layout, copier = made("packed")
    slot = bytearray(layout.groups[0].block_bytes)
    for value in range(1, 4):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second on the device, after which the blocks are computed
        for flat in cache.spaces:
            flat.fill_(value)
        copier.save(0, [(memoryview(slot), [1])], copier.fence())
        assert bytes(slot) == bytes([value]) * len(slot)


def test_a_load_waits_for_what_the_engine_queued_before_the_fence() -> None:
    cache, layout, copier = made("packed")
    slot = bytearray(b"\x77" * layout.groups[0].block_bytes)
    torch.cuda._sleep(200_000_000)
    for flat in cache.spaces:
        flat.fill_(1)  # the block's last owner still writes it
    assert copier.load(0, [(memoryview(slot), [1])], copier.fence(), never) == 1
    assert forms.read_places(cache, forms.all_places("packed", cache, 0)[1]) == bytes(slot)


def test_a_cancelled_load_ends_between_chunks() -> None:
    cache, layout, copier = made("layers_outermost")
    own = forms.all_places("layers_outermost", cache, 0)
    contents = [bytearray(random.Random(n).randbytes(layout.groups[0].block_bytes)) for n in range(4)]
    untouched = forms.read_places(cache, own[2]), forms.read_places(cache, own[3])
    asked = iter([False, False, True])
    assert copier.load(0, [(memoryview(c), [n]) for n, c in enumerate(contents)], copier.fence(), lambda: next(asked)) == 2
    assert [forms.read_places(cache, own[n]) for n in range(2)] == [bytes(c) for c in contents[:2]]
    assert (forms.read_places(cache, own[2]), forms.read_places(cache, own[3])) == untouched
    assert copier.load(0, [(memoryview(contents[0]), [0])], copier.fence(), lambda: True) == 0


def test_the_engine_goes_on_behind_what_a_load_has_queued(mapping: SharedMapping) -> None:
    """What its stream computes sees the loaded bytes, though nothing was copied when it was queued."""
    cache, layout, copier = made("packed")
    copier.on_mapped(1, mapping)
    size = layout.groups[0].block_bytes
    contents = random.Random(1).randbytes(2 * size)
    mapping.view[: 2 * size] = contents
    own = forms.all_places("packed", cache, 0)
    marks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for stage in copier._loads._stages:
        with torch.cuda.stream(stage.stream):
            torch.cuda._sleep(10**9)
    chunks = ((mapping.view[n * size : (n + 1) * size], [3 + n]) for n in range(2))
    thread = threading.Thread(target=copier.load, args=(0, chunks, None, never, lambda *told: marks.put(told)))
    thread.start()
    mark, whole = marks.get(timeout=30)
    copier.follow(mark)
    assert whole == 2
    assert not any(event.query() for event in mark), "nothing has been copied"
    seen = [flat.clone() for flat in cache.spaces]
    thread.join(30)
    for flat, copied in zip(cache.spaces, seen, strict=True):
        flat.zero_()
        flat.copy_(copied)
    for n in range(2):
        assert forms.read_places(cache, own[3 + n]) == contents[n * size : (n + 1) * size]
    copier.close()


def test_ids_that_are_no_blocks_and_short_views_are_refused_before_anything_moves() -> None:
    cache, layout, copier = made("packed")
    before = [flat.clone() for flat in cache.spaces]
    slot = memoryview(bytearray(2 * layout.groups[0].block_bytes))
    for ids in ([0, BLOCKS], [-2, 0], [1 << 40]):
        with pytest.raises(ValueError, match="are not all among the engine's 7 blocks"):
            copier.load(0, [(slot, [0, 1]), (slot, ids)], copier.fence(), never)
    with pytest.raises(ValueError, match="does not hold 3 blocks"):
        copier.load(0, [(slot, [0, 1]), (slot, [1, 2, 3])], copier.fence(), never)
    assert all(torch.equal(flat, old) for flat, old in zip(cache.spaces, before, strict=True))


def test_a_save_and_a_load_at_the_same_time_while_extents_come_and_go(mapping: SharedMapping) -> None:
    cache, layout, copier = made("layers_in_head")
    block_bytes = layout.groups[0].block_bytes
    own = forms.all_places("layers_in_head", cache, 0)
    kept = b"".join(forms.read_places(cache, own[b]) for b in (0, 1, 2))
    fresh = random.Random(1).randbytes(3 * block_bytes)
    saved, loaded = mapping.view[: 3 * block_bytes], mapping.view[MIB : MIB + 3 * block_bytes]
    loaded[:] = fresh
    wrong: list[str] = []
    ended = threading.Event()

    def save() -> None:
        try:
            while not ended.is_set():
                saved[:] = bytes(len(saved))
                copier.save(0, [(saved, [0, 1, 2])], copier.fence())
                if bytes(saved) != kept:
                    wrong.append("saved")
        except Exception as e:
            wrong.append(repr(e))

    def load() -> None:
        try:
            while not ended.is_set():
                if copier.load(0, [(loaded, [6, 4, 5])], copier.fence(), never) != 1:
                    wrong.append("loaded")
        except Exception as e:
            wrong.append(repr(e))

    threads = [threading.Thread(target=save), threading.Thread(target=load)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        copier.on_mapped(7, mapping)
        copier.on_revoked(7, mapping)
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert b"".join(forms.read_places(cache, own[b]) for b in (6, 4, 5)) == fresh


# ---- pinning


def test_memory_is_registered_in_pieces(mapping: SharedMapping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "REGISTER_BYTES", MIB)
    _, layout, copier = made("packed")
    copier.on_mapped(1, mapping)
    border = MIB - mapping.address % MIB  # pieces end at round addresses
    pieces = copier._memory.registered[mapping.address]
    assert pieces[:2] == [mapping.address, mapping.address + border] and len(pieces) in (4, 5)
    slot = mapping.view[border - 512 : border - 512 + layout.groups[0].block_bytes]  # over the border of two pieces
    copier.save(0, [(slot, [2])], copier.fence())
    contents = bytes(slot)
    slot[:] = bytes(len(slot))
    assert copier.load(0, [(memoryview(bytearray(contents)), [3])], copier.fence(), never) == 1
    copier.save(0, [(slot, [3])], copier.fence())
    assert bytes(slot) == contents
    copier.close()
    assert not copier._memory.registered


def test_memory_that_cannot_be_registered_is_copied_all_the_same(
    mapping: SharedMapping, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "REGISTER_BYTES", MIB)
    runtime: Any = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(mapping.address + 2 * MIB, MIB, 1)) == 0  # somebody else has a part of it
    cache, layout, copier = made("packed")
    try:
        with caplog.at_level(logging.WARNING, "vllm.kvtierd"):
            copier.on_mapped(1, mapping)
            copier.on_mapped(2, mapping)
        assert len(caplog.records) == 1 and "could not be pinned" in caplog.text
        assert not copier._memory.registered
        slot = mapping.view[: layout.groups[0].block_bytes]
        copier.save(0, [(slot, [4])], copier.fence())
        assert bytes(slot) == forms.read_places(cache, forms.all_places("packed", cache, 0)[4])
    finally:
        assert int(runtime.cudaHostUnregister(mapping.address + 2 * MIB)) == 0
    copier.on_mapped(1, mapping)  # what was registered before the failure was taken back, so all of it works now
    assert len(copier._memory.registered[mapping.address]) >= 4
    copier.on_revoked(1, mapping)


def test_a_revoked_extent_waits_for_the_portion_under_way(mapping: SharedMapping, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, layout, copier = made("packed")
    copier.on_mapped(1, mapping)
    slot = mapping.view[: layout.groups[0].block_bytes]
    slot[:] = bytes(len(slot))
    queued = threading.Event()
    queue = copier._saves.queue

    def queue_and_tell(*args: Any) -> Any:
        event = queue(*args)
        queued.set()
        return event

    monkeypatch.setattr(copier._saves, "queue", queue_and_tell)
    torch.cuda._sleep(1_000_000_000)  # so the copy is queued long before it is done
    saver = threading.Thread(target=copier.save, args=(0, [(slot, [1])], copier.fence()))
    saver.start()
    assert queued.wait(60)
    copier.on_revoked(1, mapping)
    assert bytes(slot) == forms.read_places(cache, forms.all_places("packed", cache, 0)[1])
    saver.join()


def test_a_device_without_room_for_staging_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_copying, "SLAB_BYTES", 1 << 50)
    with pytest.raises(UnsupportedLayoutError, match="lower --gpu-memory-utilization"):
        made("packed")
