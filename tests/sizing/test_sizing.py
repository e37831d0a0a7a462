"""Goal: bytes per token and what follows from them are right for real models, and what is not known is refused.

Method: config.json files as the models have them; the expected bytes are written out by hand, factor by factor.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.errors import ConfigError
from kvtierd.sizing import Layout, drive_wear, holding, layout_of, loading, model_shape, needed_bytes
from tests.sizing import configs

GIB = 1 << 30
KV = 2
BF16 = 2
QWEN3_WINDOW = configs.QWEN3_8B | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28}


def quantized(scheme: dict[str, Any]) -> dict[str, Any]:
    """A model whose weights bring a type for the KV cache along."""
    return configs.LLAMA_8B | {"quantization_config": {"kv_cache_scheme": scheme}}


@pytest.mark.parametrize(
    "config, attention, expected",
    [
        (configs.LLAMA_2_7B, "MHA", KV * 32 * 128 * BF16 * 32),  # 524,288
        (configs.LLAMA_8B, "GQA", KV * 8 * 128 * BF16 * 32),  # 131,072
        (configs.LLAMA_70B, "GQA", KV * 8 * 128 * BF16 * 80),  # 327,680
        (configs.QWEN3_8B, "GQA", KV * 8 * 128 * BF16 * 36),
        (configs.QWEN3_06B, "GQA", KV * 8 * 128 * BF16 * 28),  # its heads are larger than hidden_size / heads
        (configs.QWEN3_235B, "GQA", KV * 4 * 128 * BF16 * 94),
        (configs.DEEPSEEK_V3, "MLA", (512 + 64) * BF16 * 61),  # 70,272
        (configs.DEEPSEEK_V32, "MLA", ((512 + 64) * BF16 + 128 + 4) * 61),
        (configs.GEMMA3_27B, "GQA", KV * 16 * 128 * BF16 * 62),
        (configs.GEMMA3_4B, "GQA", KV * 4 * 256 * BF16 * 34),  # by the defaults of its class
        (configs.GPT_OSS_120B, "GQA", KV * 8 * 64 * BF16 * 36),
        (configs.GPT_OSS_20B, "GQA", KV * 8 * 64 * BF16 * 24),
        (configs.MISTRAL_7B, "GQA", KV * 8 * 128 * BF16 * 32),
        (configs.LLAMA_4_SCOUT, "GQA", KV * 8 * 128 * BF16 * 48),
        (configs.FALCON_7B, "MQA", KV * 1 * 64 * BF16 * 32),
        (configs.GPT2, "MHA", KV * 12 * 64 * BF16 * 12),
    ],
    ids=lambda v: v["architectures"][0] if isinstance(v, dict) else None,
)
def test_bytes_per_token(config: dict[str, Any], attention: str, expected: int) -> None:
    shape = model_shape(config)
    assert shape.attention == attention
    assert layout_of(shape).bytes_per_token == expected


@pytest.mark.parametrize(
    "config, expected",
    [
        (configs.LLAMA_8B, [("full", 32, 0)]),
        (configs.DEEPSEEK_V3, [("mla", 61, 0)]),  # without the layer for speculation
        (configs.GEMMA3_27B, [("full", 10, 0), ("swa", 52, 1024)]),
        (configs.GEMMA3_4B, [("full", 5, 0), ("swa", 29, 1024)]),
        (configs.GPT_OSS_120B, [("full", 18, 0), ("swa", 18, 128)]),
        (configs.MISTRAL_7B, [("swa", 32, 4096)]),
        (configs.MISTRAL_7B | {"sliding_window": 32768}, [("full", 32, 0)]),  # no shorter than the context
        (configs.MISTRAL_7B | {"sliding_window": None}, [("full", 32, 0)]),
        (QWEN3_WINDOW, [("full", 28, 0), ("swa", 8, 4096)]),
        (configs.LLAMA_4_SCOUT, [("full", 12, 0), ("chunked", 36, 8192)]),
        (configs.LLAMA_8B | {"num_kv_shared_layers": 12}, [("full", 20, 0)]),
    ],
)
def test_layers_by_how_far_they_look_back(config: dict[str, Any], expected: list[tuple[str, int, int]]) -> None:
    assert [(layers.kind, layers.count, layers.window) for layers in model_shape(config).layers] == expected


@pytest.mark.parametrize(
    "config, dtype, expected",
    [
        (configs.LLAMA_8B, "fp8", 65_536),
        (configs.LLAMA_8B, "fp8_e5m2", 65_536),
        (configs.LLAMA_8B, "float32", 262_144),
        (configs.DEEPSEEK_V3, "fp8", 576 * 61),
        (configs.DEEPSEEK_V3, "fp8_ds_mla", 656 * 61),
        (configs.DEEPSEEK_V32, "fp8", (656 + 132) * 61),  # sparse attention packs
        (configs.DEEPSEEK_V32, "bfloat16", (1152 + 132) * 61),
        (quantized({"num_bits": 8, "type": "float", "dynamic": False}), "auto", 65_536),
        (quantized({"num_bits": 8, "type": "float", "dynamic": True}), "auto", 131_072),
        (configs.LLAMA_8B | {"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "auto", 65_536),
        (configs.LLAMA_8B | {"torch_dtype": "float32"}, "auto", 131_072),  # vLLM runs it in 16 bits
    ],
)
def test_types(config: dict[str, Any], dtype: str, expected: int) -> None:
    assert layout_of(model_shape(config), dtype=dtype).bytes_per_token == expected


@pytest.mark.parametrize(
    "config, tp, rank, all_ranks",
    [
        (configs.LLAMA_70B, 8, 40_960, 327_680),  # a KV head a rank
        (configs.LLAMA_70B, 16, 40_960, 655_360),  # two ranks have each KV head
        (configs.DEEPSEEK_V3, 8, 70_272, 70_272),  # every rank has all; kept once
        (configs.QWEN3_235B, 8, 48_128, 385_024),
    ],
)
def test_ranks(config: dict[str, Any], tp: int, rank: int, all_ranks: int) -> None:
    layout = layout_of(model_shape(config), tp=tp)
    assert (layout.rank_bytes_per_token, layout.bytes_per_token) == (rank, all_ranks)


@pytest.mark.parametrize(
    "config, tp, block_tokens, chunk",
    [
        (configs.LLAMA_8B, 1, 16, 32),  # 4 MiB / 128 KiB
        (configs.LLAMA_8B, 4, 16, 128),
        (configs.LLAMA_70B, 8, 16, 112),  # 4 MiB / 40,960 = 102.4
        (configs.DEEPSEEK_V3, 8, 64, 64),
        (configs.GPT_OSS_120B, 8, 16, 128),  # no wider than the window
        (configs.GEMMA3_27B, 1, 16, 64),  # the smallest of its groups has 8 layers
        (configs.GPT2, 1, 16, 128),
        (configs.FALCON_7B, 1, 16, 256),  # at most
    ],
)
def test_tokens_of_a_block(config: dict[str, Any], tp: int, block_tokens: int, chunk: int) -> None:
    assert layout_of(model_shape(config), tp=tp, block_tokens=block_tokens).chunk_tokens == chunk


def test_groups_are_those_of_vllm() -> None:
    assert [g.count for g in layout_of(model_shape(configs.GEMMA3_27B)).groups] == [10, 9, 9, 9, 9, 8, 8]
    assert [g.count for g in layout_of(model_shape(configs.GPT_OSS_120B)).groups] == [18, 18]
    assert [g.count for g in layout_of(model_shape(configs.LLAMA_4_SCOUT)).groups] == [12, 12, 12, 12]
    # 13 and 12 layers are one group each, not one and two
    types = {"num_hidden_layers": 25, "layer_types": (["sliding_attention", "full_attention"] * 13)[:25]}
    assert [g.count for g in layout_of(model_shape(configs.GPT_OSS_20B | types)).groups] == [12, 13]


# ---- tiers


def test_a_tier_holds_whole_blocks() -> None:
    layout = layout_of(model_shape(configs.LLAMA_8B))
    assert layout.slot_bytes() == 4 << 20
    assert holding(layout, 64 * GIB, 8192, nvme=False).tokens == 64 * GIB // 131_072 == 524_288
    assert holding(layout, 64 * GIB, 8192, nvme=False).contexts == 64
    # a header page for each slot on NVMe: 16,384 slots of 4 MiB are 16,368 with it
    assert holding(layout, 64 * GIB, 8192, nvme=True).tokens == 16_368 * 32
    assert holding(layout, 1 << 20, 8192, nvme=False) == holding(layout, 0, 8192, nvme=False)
    for nvme in (False, True):
        size = needed_bytes(layout, 100, 8200, nvme=nvme)
        assert holding(layout, size, 8200, nvme=nvme).contexts == 100
        assert holding(layout, size - 1, 8200, nvme=nvme).contexts == 99


def test_sizes_are_rounded_to_pages() -> None:
    layout = layout_of(model_shape(configs.DEEPSEEK_V3), dtype="fp8", block_tokens=1)
    raw = layout.chunk_tokens * 576 * 61
    assert layout.slot_bytes() == -(-raw // 4096) * 4096 > raw


def test_a_window_is_loaded_for_the_next_token_alone() -> None:
    layout = layout_of(model_shape(configs.GPT_OSS_120B))
    a_layer = KV * 8 * 64 * BF16
    assert layout.chunk_tokens == 128
    # 18 layers for all 8,192 tokens; of the windows tokens 8,065 to 8,191, which lie in one block
    assert layout.loaded_bytes(8192) == 18 * a_layer * 8192 + 18 * a_layer * 128
    assert layout.loaded_bytes(8192 + 127) == layout.loaded_bytes(8192), "a part of a block is computed"
    assert layout.loaded_bytes(100) == 0
    full = layout_of(model_shape(configs.LLAMA_8B))
    assert full.loaded_bytes(8192) == 8192 * full.bytes_per_token


def test_an_attention_chunk_begins_anew() -> None:
    layout = layout_of(model_shape(configs.LLAMA_4_SCOUT), tp=8)
    a_layer = KV * 8 * 128 * BF16
    chunk = layout.chunk_tokens
    assert 8192 % chunk == 0
    assert layout.loaded_bytes(8192) == 12 * a_layer * 8192, "the next token sees nothing of its chunk yet"
    assert layout.loaded_bytes(8192 + chunk) == 12 * a_layer * (8192 + chunk) + 36 * a_layer * chunk


def test_loading_against_computing() -> None:
    layout = layout_of(model_shape(configs.LLAMA_8B))
    load = loading(layout, 16_384, 50e9, 6e9)
    assert load.bytes == 16_384 * 131_072 == 2 * GIB
    assert load.seconds == pytest.approx(0.35791, rel=1e-4)
    assert load.break_even_tokens_per_s == pytest.approx(6e9 / 131_072)
    assert loading(layout, 16_384, 50e9).seconds == pytest.approx(2 * GIB / 50e9)
    assert loading(layout, 16_384, 3e9, 6e9).seconds == pytest.approx(2 * GIB / 3e9), "the slower link"
    assert loading(layout, 1, 6e9).break_even_tokens_per_s == 0


def test_what_is_kept_once_is_copied_to_every_rank() -> None:
    layout = layout_of(model_shape(configs.DEEPSEEK_V3), tp=8)
    load = loading(layout, 6400, 50e9, 50e9)
    assert load.bytes == 6400 * 70_272
    assert load.seconds == pytest.approx(8 * load.bytes / 50e9)
    split = layout_of(model_shape(configs.LLAMA_70B), tp=8)
    assert loading(split, 11_200, 50e9).seconds == pytest.approx(11_200 * 327_680 / 50e9)


def test_wear() -> None:
    layout = layout_of(model_shape(configs.LLAMA_8B))
    wear = drive_wear(layout, 2e9, 7_680 * 10**9, 1.0)
    blocks = 62_500_000  # of 32 tokens
    assert wear.written_bytes_per_day == blocks * ((4 << 20) + 4096)
    assert wear.drive_writes_per_day == pytest.approx(34.17, rel=1e-3)
    assert not wear.fits
    assert wear.budget_bytes_per_day == 7_680 * 10**9
    assert drive_wear(layout, 5e7, 7_680 * 10**9, 1.0).fits


# ---- what is refused


@pytest.mark.parametrize(
    "config, text",
    [
        ([], "is a JSON object, not a list"),
        (None, "not null"),
        ({}, "has no num_hidden_layers"),
        ({"num_hidden_layers": 2}, "has no num_key_value_heads"),
        ({"num_hidden_layers": 2, "num_key_value_heads": 2}, "has no hidden_size"),
        ({"num_hidden_layers": 2, "num_key_value_heads": 2, "hidden_size": 64}, "add head_dim"),
        (configs.LLAMA_8B | {"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        (configs.LLAMA_8B | {"num_hidden_layers": 0}, "whole number above 0"),
        (configs.LLAMA_8B | {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (configs.LLAMA_8B | {"num_hidden_layers": 10**9}, "more than any model has"),
        (configs.LLAMA_8B | {"num_attention_heads": 31}, "hidden_size 4096 is no multiple of its 31 heads"),
        (configs.LLAMA_8B | {"num_kv_shared_layers": 32}, "num_kv_shared_layers is 32, of 32 layers"),
        (configs.LLAMA_8B | {"is_encoder_decoder": True}, "encoder-decoder"),
        (configs.LLAMA_8B | {"mamba_d_state": 16}, "mamba_d_state is set"),
        (configs.LLAMA_8B | {"compress_ratios": [1]}, "compress_ratios is set"),
        (configs.DEEPSEEK_V3 | {"qk_rope_head_dim": None}, "has no qk_rope_head_dim"),
        (configs.GPT_OSS_20B | {"layer_types": ["full_attention"]}, "of each of the 24 layers"),
        (configs.GPT_OSS_20B | {"layer_types": ["linear_attention"] * 24}, "'linear_attention'"),
        (configs.GPT_OSS_20B | {"sliding_window": None}, "has no sliding_window"),
        (configs.LLAMA_8B | {"attention_chunk_size": 8, "no_rope_layers": [1]}, "no_rope_layers has to say"),
    ],
)
def test_a_configuration_that_is_not_known_is_refused(config: object, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        layout_of(model_shape(config))
    assert text in str(error.value)


@pytest.mark.parametrize(
    "config, options, text",
    [
        (configs.LLAMA_8B, {"dtype": "int4"}, "use auto, fp8_ds_mla, bfloat16"),
        (configs.LLAMA_8B, {"dtype": "fp8_ds_mla"}, "use fp8 with this model"),
        (configs.DEEPSEEK_V3 | {"kv_lora_rank": 256}, {"dtype": "fp8_ds_mla"}, "kv_lora_rank 512"),
        (configs.LLAMA_8B, {"tp": 3}, "32 heads with 8 KV heads cannot be split over 3 ranks"),
        (configs.LLAMA_8B | {"num_key_value_heads": 6, "num_attention_heads": 24, "head_dim": 128}, {"tp": 4}, "over 4 ranks"),
        (configs.LLAMA_2_7B, {"block_tokens": 16384}, "lower --block-tokens"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(config: object, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        layout_of(model_shape(config), **options)
    assert text in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MODELS = [config for name, config in vars(configs).items() if name.isupper()]
KEYS = sorted(
    {key for config in MODELS for key in (*config, *config.get("text_config", {}))} | {"num_kv_shared_layers", "layer_types"}
)


@given(st.sampled_from(MODELS), st.sampled_from(KEYS), JSON, st.integers(1, 64))
@settings(max_examples=300, derandomize=True)
def test_no_configuration_breaks_it(config: dict[str, Any], key: str, value: object, tp: int) -> None:
    """One key has another value: there is an answer above 0, or a text of one line."""
    inner = config.get("text_config", config)
    changed = {**inner, key: value}
    outcome = _size({**config, "text_config": changed} if inner is not config else changed, tp)
    if isinstance(outcome, str):
        assert outcome.isprintable()
        assert 10 < len(outcome) < 400
    else:
        assert outcome.bytes_per_token > 0
        assert outcome.slot_bytes() % 4096 == 0
        assert outcome.loaded_bytes(1 << 20) <= (1 << 20) * outcome.bytes_per_token


def _size(config: dict[str, Any], tp: int) -> Layout | str:
    try:
        return layout_of(model_shape(config), tp=tp)
    except ConfigError as e:
        return str(e)


def test_the_name_is_one_line() -> None:
    assert model_shape(configs.LLAMA_8B | {"model_type": None}).name == "LlamaForCausalLM"
    assert model_shape(configs.LLAMA_8B | {"model_type": None, "architectures": 5}).name == "?"
    assert model_shape(configs.LLAMA_8B | {"model_type": "\x1b[31m" + "x" * 200}).name == "?[31m" + "x" * 75
