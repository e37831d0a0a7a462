"""Goal: blocks go into slots and back byte for byte, and nothing else is touched, on the CPU.

Method: caches of all forms full of random bytes; what a slot must contain is read element by element through torch's indexing.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here: run make test-vllm")

from dataclasses import replace  # noqa: E402
from types import SimpleNamespace  # noqa: E402

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvtierd.connectors.vllm.copying import CpuBlockCopier, batches, make_copier, self_test, stretches  # noqa: E402
from kvtierd.connectors.vllm.layout import Region, UnsupportedLayoutError, WorkerLayout, worker_layout  # noqa: E402
from tests.connectors import kv_forms as forms  # noqa: E402
from tests.connectors.kv_forms import BLOCKS, FORMS, Cache, vllm_config  # noqa: E402


def never() -> bool:
    return False


def made(form: str) -> tuple[Cache, WorkerLayout, CpuBlockCopier]:
    cache = FORMS[form]("cpu")
    layout = worker_layout(cache.config, cache.tensors, vllm_config=vllm_config())
    copier = make_copier(layout)
    assert isinstance(copier, CpuBlockCopier)
    return cache, layout, copier


@pytest.mark.parametrize("form", FORMS)
def test_a_slot_holds_the_bytes_of_its_blocks_in_order_and_only_them(form: str) -> None:
    cache, layout, copier = made(form)
    before = [flat.clone() for flat in cache.spaces]
    for group, seen in enumerate(layout.groups):
        own = forms.all_places(form, cache, group)
        slots = [bytearray(b"\x5a" * (3 * seen.block_bytes + 100)) for _ in range(2)]
        chosen = [[5, 0, 1], [-1, 6, -1]]
        copier.save(group, [(memoryview(slot), ids) for slot, ids in zip(slots, chosen, strict=True)], copier.fence())
        for slot, ids in zip(slots, chosen, strict=True):
            skipped = b"\x5a" * seen.block_bytes
            expected = b"".join(skipped if b < 0 else forms.read_places(cache, own[b]) for b in ids)
            assert bytes(slot) == expected + b"\x5a" * 100
    assert all(torch.equal(flat, old) for flat, old in zip(cache.spaces, before, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_loading_writes_the_wanted_blocks_and_no_other_byte(form: str) -> None:
    cache, layout, copier = made(form)
    for group, seen in enumerate(layout.groups):
        own = forms.all_places(form, cache, group)
        contents = random.Random(group).randbytes(3 * seen.block_bytes)
        before = [flat.clone() for flat in cache.spaces]
        assert copier.load(group, [(memoryview(contents), [3, -1, 4])], copier.fence(), never) == 1
        assert forms.read_places(cache, own[3]) == contents[: seen.block_bytes]
        assert forms.read_places(cache, own[4]) == contents[2 * seen.block_bytes :]
        written = {*own[3], *own[4]}
        for flat, old in zip(cache.spaces, before, strict=True):
            changed = (flat != old).nonzero().flatten().tolist()
            assert {(flat.untyped_storage().data_ptr(), place) for place in changed} <= written


@pytest.mark.parametrize("form", ["packed", "layers_outermost", "overlaid_groups"])
def test_a_cancelled_load_ends_between_chunks(form: str) -> None:
    cache, layout, copier = made(form)
    block_bytes = layout.groups[0].block_bytes
    contents = [random.Random(n).randbytes(block_bytes) for n in range(4)]
    own = forms.all_places(form, cache, 0)
    untouched = forms.read_places(cache, own[2]), forms.read_places(cache, own[3])
    asked = iter([False, False, True])
    assert copier.load(0, [(memoryview(c), [n]) for n, c in enumerate(contents)], None, lambda: next(asked)) == 2
    assert [forms.read_places(cache, own[n]) for n in range(2)] == contents[:2]
    assert (forms.read_places(cache, own[2]), forms.read_places(cache, own[3])) == untouched
    assert copier.load(0, [(memoryview(contents[0]), [0])], None, lambda: True) == 0
    assert copier.load(0, [], None, never) == 0


@pytest.mark.parametrize("ids", [[BLOCKS], [0, -2], [BLOCKS - 1, BLOCKS], [1 << 40], [-(1 << 40)]])
def test_ids_that_are_no_blocks_are_refused(ids: list[int]) -> None:
    cache, layout, copier = made("layers_outermost")
    slot = memoryview(bytearray(2 * layout.groups[0].block_bytes))
    before = [flat.clone() for flat in cache.spaces]
    with pytest.raises(ValueError, match="are not all among the engine's 7 blocks"):
        copier.save(0, [(slot, ids)], None)
    with pytest.raises(ValueError, match="are not all among the engine's 7 blocks"):
        copier.load(0, [(slot, [i for i in ids if i])], None, never)
    assert all(torch.equal(flat, old) for flat, old in zip(cache.spaces, before, strict=True))


def test_a_view_that_is_too_short_is_refused() -> None:
    _, layout, copier = made("packed")
    view = memoryview(bytearray(2 * layout.groups[0].block_bytes - 1))
    with pytest.raises(ValueError, match="does not hold 2 blocks"):
        copier.save(0, [(view, [0, 1])], None)
    with pytest.raises(ValueError, match="does not hold 2 blocks"):
        copier.load(0, [(view, [0, 1])], None, never)


def test_views_of_slots_are_let_go() -> None:
    """An extent is unmapped when its last view goes; a copier must not keep one."""
    _, layout, copier = made("packed")
    memory = bytearray(layout.groups[0].block_bytes)
    copier.save(0, [(memoryview(memory), [1])], None)
    copier.load(0, [(memoryview(memory), [1])], None, never)
    memory.append(0)  # BufferError while there is a view


def test_a_save_and_a_load_at_the_same_time() -> None:
    cache, layout, copier = made("layers_in_head")
    block_bytes = layout.groups[0].block_bytes
    own = forms.all_places("layers_in_head", cache, 0)
    kept = b"".join(forms.read_places(cache, own[b]) for b in (0, 1, 2))
    fresh = random.Random(1).randbytes(3 * block_bytes)
    wrong: list[str] = []

    def save() -> None:
        for _ in range(200):
            slot = memoryview(bytearray(3 * block_bytes))
            copier.save(0, [(slot, [0, 1, 2])], None)
            if bytes(slot) != kept:
                wrong.append("saved")

    thread = threading.Thread(target=save)
    thread.start()
    for _ in range(200):
        if copier.load(0, [(memoryview(fresh), [6, 4, 5])], None, never) != 1:
            wrong.append("loaded")
    thread.join()
    assert not wrong
    assert b"".join(forms.read_places(cache, own[b]) for b in (6, 4, 5)) == fresh


# ---- few operations


@given(st.lists(st.integers(-1, 20), max_size=30))
def test_stretches_name_every_block_once(ids: list[int]) -> None:
    named = [(place + n, first + n) for place, first, count in stretches(ids, 21) for n in range(count)]
    assert named == [(place, block) for place, block in enumerate(ids) if block >= 0]


def test_consecutive_blocks_are_one_stretch() -> None:
    assert list(stretches([3, 4, 5, -1, 6, 9], 10)) == [(0, 3, 3), (4, 6, 1), (5, 9, 1)]


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 2]), st.sampled_from([64, 96])), min_size=1, max_size=20))
def test_batches_hold_every_region_in_order(wanted: list[tuple[int, int, int]]) -> None:
    storages = [torch.empty(4096, dtype=torch.uint8) for _ in range(2)]
    regions = [Region(storages[offset % 2], offset, stride, 4 * run) for offset, run, stride in wanted]
    listed, slot_offset = [], 0
    for batch in batches(regions):
        assert batch.slot_offset == slot_offset
        for n in range(batch.count):
            listed.append((batch.storage, batch.offset_bytes + n * batch.step_bytes, batch.block_stride_bytes, batch.run_bytes))
        slot_offset += batch.count * batch.run_bytes
    assert [(id(s), *rest) for s, *rest in listed] == [
        (id(r.storage), r.offset_bytes, r.block_stride_bytes, r.run_bytes) for r in regions
    ]


def test_many_small_runs_are_one_batch() -> None:
    """80 layers of 8 heads, all blocks of a head together: 640 runs a block, one numpy operation."""
    spec = forms.FullAttentionSpec(16, 8, 4, forms.BF16)
    flat = forms.space(80 * 3 * spec.real_page_size_bytes)
    whole = forms.permuted(flat, forms.BF16, (80, 3, 8, 16, 8), (0, 2, 1, 3, 4))
    names = [f"layer{n}" for n in range(80)]
    config = forms.config(3, (names, spec))
    layout = worker_layout(config, {name: whole[n] for n, name in enumerate(names)}, vllm_config=vllm_config())
    assert len(layout.regions[0]) == 640
    assert [(b.count, b.run_bytes) for b in batches(layout.regions[0])] == [(640, 256)]


# ---- the test at the start of the engine


@pytest.mark.parametrize("form", FORMS)
def test_the_self_test_passes_and_leaves_everything_as_it_was(form: str) -> None:
    cache, layout, copier = made(form)
    before = [flat.clone() for flat in cache.spaces]
    self_test(layout, copier, cache.tensors)
    assert all(torch.equal(flat, old) for flat, old in zip(cache.spaces, before, strict=True))


def test_a_cache_made_in_inference_mode_is_copied_outside_of_it() -> None:
    with torch.inference_mode():
        cache, layout, copier = made("packed")
        self_test(layout, copier, cache.tensors)
    slot = bytearray(layout.groups[0].block_bytes)
    copier.save(0, [(memoryview(slot), [2])], copier.fence())
    assert copier.load(0, [(memoryview(slot), [3])], copier.fence(), never) == 1
    own = forms.all_places("packed", cache, 0)
    assert forms.read_places(cache, own[3]) == forms.read_places(cache, own[2]) == bytes(slot)
    self_test(layout, copier, cache.tensors)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_the_self_test_does_with_few_blocks(num_blocks: int) -> None:
    spec = forms.MLAAttentionSpec(15, 1, 8, forms.BF16)  # 15 tokens, so that only one dimension may count two blocks
    flat = forms.space(num_blocks * spec.real_page_size_bytes)
    cache = Cache(forms.config(num_blocks, (["a"], spec)), {"a": flat.view(forms.BF16).view(num_blocks, 15, 8)})
    layout = worker_layout(cache.config, cache.tensors, vllm_config=vllm_config())
    self_test(layout, make_copier(layout), cache.tensors)


def _shifted(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    return (replace(regions[0], offset_bytes=regions[0].offset_bytes + 2), *regions[1:])


def _other_stride(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    return tuple(replace(r, block_stride_bytes=r.block_stride_bytes - 2) for r in regions)


def _twice_the_same(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    return (*regions[:-1], regions[0])


def _short(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    return (replace(regions[0], run_bytes=regions[0].run_bytes - 1), *regions[1:])


@pytest.mark.parametrize("mistake", [_shifted, _other_stride, _twice_the_same, _short])
@pytest.mark.parametrize("form", ["kv_first", "heads_first_in_block", "overlaid_groups", "layers_outermost"])
def test_the_self_test_finds_a_layout_that_is_wrong(form: str, mistake: Any) -> None:
    cache, layout, _ = made(form)
    wrong = replace(layout, regions=(mistake(layout.regions[0]), *layout.regions[1:]))
    before = {name: tensor.clone() for name, tensor in cache.tensors.items()}
    with pytest.raises(UnsupportedLayoutError, match="out and back in changed block"):
        self_test(wrong, make_copier(wrong), cache.tensors)
    if mistake is not _other_stride:  # what a wrong layout writes beside the blocks under test cannot be put back
        assert all(torch.equal(cache.tensors[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)


def test_the_self_test_finds_a_copier_that_writes_past_the_block() -> None:
    cache, layout, _ = made("packed")

    class Sloppy(CpuBlockCopier):
        def save(self, group: int, chunks: Any, fence: object | None) -> None:
            super().save(group, chunks, fence)
            for view, _ in chunks:
                view[layout.groups[group].block_bytes] = 0

    with pytest.raises(UnsupportedLayoutError, match="take more than"):
        self_test(layout, Sloppy(layout), cache.tensors)


def test_devices_without_a_copier_are_refused() -> None:
    _, layout, _ = made("packed")
    with pytest.raises(UnsupportedLayoutError, match="not of meta"):
        make_copier(replace(layout, device=torch.device("meta")))


def test_a_copier_has_nothing_to_do_for_mapped_memory_of_a_cpu() -> None:
    _, _, copier = made("packed")
    mapping: Any = SimpleNamespace()
    copier.on_mapped(1, mapping)
    copier.on_revoked(1, mapping)
    copier.close()
    assert copier.fence() is None
