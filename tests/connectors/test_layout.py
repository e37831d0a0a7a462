"""Goal: bytes of a block are found for every form of KV cache, and what is not known for sure is refused with advice.

Method: caches of all forms made with torch; where a block's bytes lie is compared with torch's own indexing, element by element.
"""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here: run make test-vllm")

from dataclasses import dataclass, replace  # noqa: E402

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvtierd.connectors.vllm.layout import UnsupportedLayoutError, worker_layout  # noqa: E402
from tests.connectors import kv_forms as forms  # noqa: E402
from tests.connectors.kv_forms import BLOCK_DIMS, BLOCKS, FORMS, KERNEL_BLOCKS, NAMES, Cache, vllm_config  # noqa: E402


def places(layout: Any, group: int, block: int) -> list[tuple[int, int]]:
    return [
        (r.storage.untyped_storage().data_ptr(), r.offset_bytes + block * r.block_stride_bytes + i)
        for r in layout.regions[group]
        for i in range(r.run_bytes)
    ]


def layout_of(cache: Cache, **changes: Any) -> Any:
    return worker_layout(cache.config, cache.tensors, vllm_config=vllm_config(**changes))


def refusal(cache: Cache, **changes: Any) -> str:
    with pytest.raises(UnsupportedLayoutError) as caught:
        layout_of(cache, **changes)
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_of_every_block_are_those_that_torch_indexes(form: str) -> None:
    cache = FORMS[form]("cpu")
    layout = layout_of(cache)
    for group in range(len(layout.groups)):
        for block in range(BLOCKS):
            expected = forms.slot_places(cache, group, block, BLOCK_DIMS.get(form, 0), KERNEL_BLOCKS.get(form, 1))
            assert places(layout, group, block) == expected
        assert layout.groups[group].block_bytes == len(expected)


@pytest.mark.parametrize(
    ("form", "runs"),
    [
        ("kv_first", [512, 512] * 3),
        ("block_first", [1024] * 3),
        ("heads_outermost", [512, 512] * 3),
        ("kernel_blocks", [512, 512] * 3),
        ("kv_first_by_block", [1024] * 3),
        ("padded", [256] * 3),
        ("layers_in_block", [3072]),
        ("layers_in_head", [3072]),
        ("layers_outermost", [512] * 6),
    ],
)
def test_runs_are_as_long_as_they_can_be(form: str, runs: list[int]) -> None:
    assert forms.run_bytes(layout_of(FORMS[form]("cpu")), 0) == runs


@settings(max_examples=150)
@given(
    st.permutations(range(5)),
    st.tuples(*(st.integers(1, n) for n in (3, 5, 3, 4, 3))),
    st.integers(0, 3),
    st.sampled_from([torch.uint8, torch.float16, torch.float32]),
)
def test_any_order_of_layer_block_head_token_and_content(order: list[int], shape: tuple[int, ...], lead: int, dtype: Any) -> None:
    """The newer engines' form with every order of dimensions in memory, also those that no engine uses."""
    layers, blocks, heads, tokens, size = shape
    page = heads * tokens * size * dtype.itemsize
    flat = forms.space((lead * 4) + layers * blocks * page)
    whole = forms.permuted(flat[lead * 4 :], dtype, shape, order)
    spec = PublishedSpec.make(tokens, heads, size * dtype.itemsize, dtype)
    names = [f"layer{n}" for n in range(layers)]
    cache = Cache(forms.config(blocks, (names, spec)), {name: whole[n] for n, name in enumerate(names)}, [flat])
    layout = layout_of(cache)
    seen = set()
    for block in range(blocks):
        own = places(layout, 0, block)
        assert own == forms.slot_places(cache, 0, block)
        seen.update(own)
    assert len(seen) == layers * blocks * page
    assert sum(forms.run_bytes(layout, 0)) == layout.groups[0].block_bytes == layers * page


@dataclass(frozen=True)
class FullAttentionSpec:
    """Stand-in for the newer engines' spec, which publishes the shape of a page."""

    block_size: int
    num_heads: int
    state_content_size_bytes: int
    dtype: Any
    max_tp_shards: int | None = None

    @staticmethod
    def make(tokens: int, heads: int, content_bytes: int, dtype: Any) -> FullAttentionSpec:
        return FullAttentionSpec(tokens, heads, content_bytes, dtype)

    def get_num_kernel_states(self, kernel_block_size: int) -> int:
        return kernel_block_size

    @property
    def unpadded_page_size_bytes(self) -> int:
        return self.num_heads * self.block_size * self.state_content_size_bytes


PublishedSpec = FullAttentionSpec


def test_a_published_form_is_not_ambiguous_where_sizes_coincide() -> None:
    spec = PublishedSpec(2, 2, 4, torch.float16)
    flat = forms.space(2 * spec.unpadded_page_size_bytes)
    cache = Cache(forms.config(2, (["a"], spec)), {"a": flat.view(torch.float16).view(2, 2, 2, 2)}, [flat])
    assert places(layout_of(cache), 0, 1) == forms.slot_places(cache, 0, 1)
    turned = {"a": flat.view(torch.float16).view(2, 1, 4, 2)}
    assert "no dimension counts its 2 blocks" in refusal(Cache(cache.config, turned))


def test_what_a_group_says_about_itself() -> None:
    cache = forms.overlaid_groups()
    full, window = layout_of(cache).groups
    assert (full.index, full.kind, full.window, full.num_layers, full.block_tokens) == (0, "full", 0, 3, 16)
    assert (window.index, window.kind, window.window, window.num_layers) == (1, "swa", 64, 2)
    assert (full.kv_dtype, full.replicated) == ("bfloat16", False)
    assert pickle.loads(pickle.dumps(full)) == full
    local = forms.ChunkedLocalAttentionSpec(forms.TOKENS, forms.HEADS, forms.SIZE, forms.BF16)
    cache = forms.packed()
    cache.config.kv_cache_groups[0].kv_cache_spec = local
    (group,) = layout_of(cache).groups
    assert (group.kind, group.window) == ("chunked_local", 128)


def test_mla_is_the_same_on_all_ranks_of_a_tensor_parallel_group() -> None:
    assert layout_of(forms.mla(), tp_size=2).groups[0].replicated
    assert not layout_of(forms.packed(), tp_size=2).groups[0].replicated
    cache = forms.packed()
    cache.config.kv_tp_replicas = 2
    assert layout_of(cache, tp_size=2).groups[0].replicated
    assert not layout_of(cache, tp_size=4).groups[0].replicated


@pytest.mark.parametrize(
    ("quant", "cache_dtype", "name"),
    [(None, "auto", "uint8"), ("FP8_PER_TENSOR", "fp8", "fp8_e4m3"), ("FP8_PER_TENSOR", "fp8_e5m2", "fp8_e5m2")],
)
def test_bytes_in_a_tensor_of_uint8_have_the_type_that_the_engine_says(quant: str | None, cache_dtype: str, name: str) -> None:
    cache = forms.fp8()
    group = cache.config.kv_cache_groups[0]
    group.kv_cache_spec = replace(group.kv_cache_spec, kv_quant_mode=quant and SimpleNamespace(name=quant))
    assert layout_of(cache, cache_dtype=cache_dtype).groups[0].kv_dtype == name


# ---- the description


def module(backend: str = "FLASH_ATTN", **scales: float) -> Any:
    return SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: backend), isa="vec", **scales)


def description(cache: Cache, **changes: Any) -> str:
    return str(layout_of(cache, **changes).groups[0].description)


def test_the_description_does_not_tell_where_bytes_lie() -> None:
    spec = forms.FullAttentionSpec(4, 2, 8, torch.bfloat16)
    texts = set()
    for blocks, lead in ((3, 0), (3, 128), (11, 0)):
        page = spec.real_page_size_bytes
        flat = forms.space(lead + 2 * blocks * page)
        whole = flat[lead:].view(torch.bfloat16).view(2, blocks, 2, 4, 2, 8)
        texts.add(description(Cache(forms.config(blocks, (["a", "b"], spec)), {"a": whole[0], "b": whole[1]})))
    assert len(texts) == 1


def test_whatever_changes_the_meaning_of_a_byte_changes_the_description() -> None:
    plain = vllm_config(layers={name: module() for name in NAMES})
    texts = [
        worker_layout(c.config, c.tensors, vllm_config=plain).groups[0].description for c in (f("cpu") for f in FORMS.values())
    ]
    # These differ from others only in where the bytes lie; a block's bytes are the same, in the same order.
    same = dict.fromkeys(("overlaid_groups", "layers_in_block", "heads_outermost", "layers_outermost"), "packed")
    same |= {"kv_first": "block_first", "kv_first_by_block": "block_first", "padded": "mla"}
    by_form = dict(zip(FORMS, texts, strict=True))
    for form, other in same.items():
        assert by_form.pop(form) == by_form[other]
    assert len(set(by_form.values())) == len(by_form)


def test_layers_backend_instruction_set_and_scales_are_in_the_description() -> None:
    def text(cache: Cache, layers: dict[str, Any], cache_dtype: str = "fp8") -> str:
        group = cache.config.kv_cache_groups[0]
        group.kv_cache_spec = replace(group.kv_cache_spec, kv_quant_mode=SimpleNamespace(name="FP8_PER_TENSOR"))
        config = vllm_config(cache_dtype=cache_dtype, layers=layers)
        return str(worker_layout(cache.config, cache.tensors, vllm_config=config).groups[0].description)

    def layers(**changes: Any) -> dict[str, Any]:
        return {name: module(**changes) for name in NAMES}

    other_isa = layers(_k_scale_float=0.5)
    other_isa[NAMES[1]].isa = "amx"
    renamed = forms.fp8()
    renamed.tensors = {f"x.{name}": tensor for name, tensor in renamed.tensors.items()}
    renamed.config.kv_cache_groups[0].layer_names = list(renamed.tensors)
    texts = [
        text(forms.fp8(), layers(_k_scale_float=0.5)),
        text(forms.fp8(), layers(_k_scale_float=0.5, _v_scale_float=0.5)),
        text(forms.fp8(), layers(_k_scale_float=math.nextafter(0.5, 1))),
        text(forms.fp8(), layers(_k_scale_float=0.5, backend="FLASHINFER")),
        text(forms.fp8(), layers(_k_scale_float=0.5), "fp8_e5m2"),
        text(forms.fp8(), other_isa),
        text(renamed, {f"x.{name}": module(_k_scale_float=0.5) for name in NAMES}),
    ]
    assert len(set(texts)) == len(texts)
    assert text(forms.fp8(), layers(_k_scale_float=0.5)) == texts[0]


# ---- layers that share


def test_a_layer_that_uses_the_cache_of_another_is_copied_once() -> None:
    cache = forms.packed()
    cache.tensors["model.layers.9.attn"] = cache.tensors[NAMES[1]]
    outside = layout_of(cache)
    assert outside.groups[0].block_bytes == layout_of(forms.packed()).groups[0].block_bytes
    cache.config.kv_cache_groups[0].layer_names.append("model.layers.9.attn")
    inside = layout_of(cache)
    assert inside.groups[0].block_bytes == outside.groups[0].block_bytes
    assert [layer.name for layer in inside.layers[0]] == NAMES
    assert inside.groups[0].description != outside.groups[0].description


def test_a_layer_in_no_group_with_bytes_of_its_own_is_refused() -> None:
    cache = forms.packed()
    cache.tensors["drafter"] = cache.tensors[NAMES[0]].clone()
    assert "layer drafter has a KV cache but is in no KV cache group" in refusal(cache)


def test_layers_of_one_group_that_share_bytes_are_refused() -> None:
    spec = forms.FullAttentionSpec(4, 2, 8, torch.bfloat16)
    page = spec.real_page_size_bytes
    flat = forms.space(8 * page).view(torch.bfloat16)
    shape, strides = (4, 2, 4, 16), (page // 2, 64, 16, 1)

    def cache(offset_bytes: int, stride: int = page // 2) -> Cache:
        second = flat.as_strided(shape, (stride, *strides[1:]), offset_bytes // 2)
        return Cache(forms.config(4, (["a", "b"], spec)), {"a": flat.as_strided(shape, strides), "b": second})

    layout_of(cache(4 * page))
    for offset_bytes in (2, page, page + 2, 3 * page, 4 * page - 2):
        assert "share bytes" in refusal(cache(offset_bytes))
    assert "share bytes" in refusal(cache(page, stride=page))  # another stride, so it is not even looked at closely


# ---- what is refused


def test_states_that_are_no_list_of_tokens_are_refused() -> None:
    cache = forms.packed()

    @dataclass(frozen=True)
    class MambaSpec:
        block_size: int = 16

    cache.config.kv_cache_groups[0].kv_cache_spec = MambaSpec()
    assert "KV cache group 0 is of MambaSpec" in refusal(cache)
    cache = forms.packed()
    cache.tensors[NAMES[1]] = [cache.tensors[NAMES[1]]]  # type: ignore[assignment]
    assert f"the KV cache of layer {NAMES[1]} is a list, not one tensor" in refusal(cache)
    del cache.tensors[NAMES[1]]
    assert f"the KV cache of layer {NAMES[1]} is missing" in refusal(cache)


def test_a_subclass_of_a_known_spec_is_not_known() -> None:
    class SinkFullAttentionSpec(forms.FullAttentionSpec):
        pass

    cache = forms.packed()
    cache.config.kv_cache_groups[0].kv_cache_spec = SinkFullAttentionSpec(16, 2, 8, torch.bfloat16)
    assert "SinkFullAttentionSpec" in refusal(cache)


def test_a_group_of_mixed_kinds_is_refused() -> None:
    cache = forms.packed()
    specs = dict.fromkeys(NAMES, cache.config.kv_cache_groups[0].kv_cache_spec)
    cache.config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=16, kv_cache_specs=specs)
    assert layout_of(cache).groups[0] == layout_of(forms.packed()).groups[0]
    specs[NAMES[2]] = forms.SlidingWindowSpec(16, 2, 8, torch.bfloat16)
    assert "FullAttentionSpec, SlidingWindowSpec" in refusal(cache)
    for number, name in enumerate(NAMES):
        specs[name] = forms.SlidingWindowSpec(16, 2, 8, torch.bfloat16, sliding_window=32 * (number + 1))
    assert "differ in window" in refusal(cache)


@pytest.mark.parametrize("mode", ["INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD", "TURBOQUANT_4BIT_NC", "SOMETHING_NEW"])
def test_scales_beside_the_page_are_refused(mode: str) -> None:
    cache = forms.fp8()
    group = cache.config.kv_cache_groups[0]
    group.kv_cache_spec = replace(group.kv_cache_spec, kv_quant_mode=SimpleNamespace(name=mode))
    assert mode in refusal(cache) and "--kv-cache-dtype" in refusal(cache)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"calculate_kv_scales": True}, "turn it off"),
    ],
)
def test_engines_whose_blocks_mean_something_else_are_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(forms.packed(), **changes)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("group", {"enable_kv_transfer": False}),
        ("group", {"host_resident": True}),
        ("config", {"hisparse_host_num_blocks": 4}),
        ("config", {"num_blocks": 0}),
        ("config", {"kv_cache_groups": []}),
        ("group", {"layer_names": []}),
    ],
)
def test_groups_that_are_not_to_be_cached_are_refused(where: str, what: dict[str, Any]) -> None:
    cache = forms.packed()
    vars(cache.config.kv_cache_groups[0] if where == "group" else cache.config).update(what)
    assert "run this model without the connector" in refusal(cache) or "turn HiSparse off" in refusal(cache)


@pytest.mark.parametrize("flag", ["non_causal", "prefix_cacheable"])
def test_blocks_that_depend_on_later_tokens_are_refused(flag: str) -> None:
    cache = forms.packed()
    spec = cache.config.kv_cache_groups[0].kv_cache_spec
    object.__setattr__(spec, flag, flag == "non_causal")
    assert "depend on more than the tokens up to their end" in refusal(cache)


@pytest.mark.parametrize("num_blocks", [BLOCKS - 1, BLOCKS + 1, 2 * BLOCKS])
def test_the_number_of_blocks_must_agree(num_blocks: int) -> None:
    cache = forms.packed()
    cache.config.num_blocks = num_blocks
    assert f"not {num_blocks} blocks of 1024 bytes" in refusal(cache)


def test_two_dimensions_that_may_count_blocks_are_refused() -> None:
    spec = forms.FullAttentionSpec(16, 2, 8, torch.bfloat16)
    flat = forms.space(2 * spec.real_page_size_bytes)
    for shape in ((2, 2, 16, 2, 8), (2, 4, 8, 2, 8)):
        cache = Cache(forms.config(2, (["a"], spec)), {"a": flat.view(torch.bfloat16).view(shape)}, [flat])
        assert "more than one dimension may count its 2 blocks" in refusal(cache)
    cache = Cache(forms.config(2, (["a"], spec)), {"a": flat.view(torch.bfloat16).view(1, 16, 4, 16)}, [flat])
    assert "no dimension counts its 2 blocks" in refusal(cache)


@pytest.mark.parametrize("strides", [(0, 128, 16, 1), (256, 128, 8, 1), (256, 0, 16, 1), (128, 64, 16, 1), (256, 128, 16, 0)])
def test_elements_that_share_bytes_are_refused(strides: tuple[int, ...]) -> None:
    spec = forms.FullAttentionSpec(8, 2, 8, torch.bfloat16)
    view = forms.space(1 << 16).view(torch.bfloat16).as_strided((4, 2, 8, 16), strides)
    assert "overlap" in refusal(Cache(forms.config(4, (["a"], spec)), {"a": view}))


def test_a_cache_in_scattered_elements_is_refused_before_it_is_walked() -> None:
    spec = forms.MLAAttentionSpec(1024, 1, 128, torch.uint8)
    view = forms.space(3 * 2 * 131072).as_strided((3, 1024, 128), (2 * 131072, 256, 2))
    assert "scattered over more than 65536 pieces" in refusal(Cache(forms.config(3, (["a"], spec)), {"a": view}))
