"""Goal: ``kvtierd size`` and the engine agree: bytes of a token, groups, and how far layers look back.

Method: vLLM reads the same config.json files, and its own classes are asked for heads, sizes and KV cache groups.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtierd.sizing import layout_of, model_shape
from tests.sizing import configs

torch = pytest.importorskip("torch")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="needs vLLM")
utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
readers = pytest.importorskip("vllm.transformers_utils.config")
convertors = pytest.importorskip("vllm.transformers_utils.model_arch_config_convertor")

BLOCK_TOKENS = 16
MODELS = [name for name in vars(configs) if name.isupper() and name not in ("DEEPSEEK_V32", "GPT2")]
"""Without one that needs a GPU's packed cache, and one whose heads vLLM names otherwise."""


def read(name: str, folder: Path) -> tuple[Any, Any]:
    """A model's configuration as vLLM reads it: whole, and its language model's."""
    (folder / "config.json").write_text(json.dumps(getattr(configs, name)))
    config = readers.get_config(folder, trust_remote_code=False)
    return config, readers.get_hf_text_config(config)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 8])
def test_bytes_of_a_token(name: str, tp: int, tmp_path: Path) -> None:
    config, text = read(name, tmp_path)
    arch = convertors.MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, convertors.ModelArchConfigConvertorBase)(
        config, text
    ).convert()
    if arch.total_num_attention_heads % tp:
        pytest.skip(f"vLLM does not split {arch.total_num_attention_heads} heads over {tp} ranks")
    page = {"block_size": BLOCK_TOKENS, "head_size": arch.head_size, "dtype": torch.bfloat16}
    if arch.is_deepseek_mla:
        spec = interface.MLAAttentionSpec(num_kv_heads=1, **page)
    else:  # as ModelConfig.get_num_kv_heads has it
        spec = interface.FullAttentionSpec(num_kv_heads=max(1, arch.total_num_kv_heads // tp), **page)
    layout = layout_of(model_shape(getattr(configs, name)), tp=tp)
    assert arch.total_num_hidden_layers == layout.shape.num_layers
    assert spec.page_size_bytes * layout.shape.num_layers == layout.rank_bytes_per_token * BLOCK_TOKENS


@pytest.mark.parametrize("name", ["GEMMA3_27B", "GEMMA3_4B", "GPT_OSS_120B", "GPT_OSS_20B"])
def test_groups(name: str) -> None:
    shape = model_shape(getattr(configs, name))
    head = {"block_size": BLOCK_TOKENS, "num_kv_heads": shape.kv_heads, "head_size": 128, "dtype": torch.bfloat16}
    specs: dict[str, Any] = {}
    for layers in shape.layers:
        for number in range(layers.count):
            window = layers.window
            specs[f"{layers.kind}.{number}"] = (
                interface.SlidingWindowSpec(**head, sliding_window=window) if window else interface.FullAttentionSpec(**head)
            )
    groups = utils._get_kv_cache_groups_uniform_page_size(specs)
    assert sorted(len(g.layer_names) for g in groups) == sorted(g.count for g in layout_of(shape).groups)


@pytest.mark.parametrize("name", ["GEMMA3_27B", "GEMMA3_4B", "GPT_OSS_120B", "QWEN3_8B", "LLAMA_8B"])
def test_how_far_layers_look_back(name: str, tmp_path: Path) -> None:
    _, text = read(name, tmp_path)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    by_kind = {layers.kind: layers for layers in model_shape(getattr(configs, name)).layers}
    assert kinds.count("full_attention") == by_kind["full"].count
    if "swa" in by_kind:
        assert kinds.count("sliding_attention") == by_kind["swa"].count
        assert text.sliding_window == by_kind["swa"].window
