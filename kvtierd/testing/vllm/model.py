"""Makes tiny models with random weights that real engines load: seeded, so that every run and machine has the same ones.

    python -m kvtierd.testing.vllm.model FOLDER NAME=ARCHITECTURE[:SEED]...

Weights are drawn wide enough for greedy output to be varied: with a narrow distribution a tiny model repeats one token, and
a wrong KV block would go unnoticed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
FIRST_TOKEN = 3  # below it are padding, begin and end
HEADS = 4
HEAD_SIZE = 32
MAX_TOKENS = 4096
SEED = 1234
ARCHITECTURES = ("llama", "repeating", "qwen3", "gemma3", "deepseek", "bloom")
WIDE = "wide"


def make_model(folder: Path, architecture: str, seed: int = SEED, layers: int = 2) -> Path:
    """Write configuration, weights and tokenizer. A folder that is complete is left alone. Needs torch and transformers.

    Args:
        folder: where to.
        architecture: one of ``ARCHITECTURES``, or ``WIDE``: a llama large enough for prompts to take their time. gemma3 has
            layers with a sliding window and layers without, so that the engine makes two KV cache groups; repeating is a llama
            with so narrow weights that it often repeats itself, as guesses from what came before need; deepseek has multi-head
            latent attention; bloom has attention biased by distance (ALiBi), so that even exchanging two blocks of one prompt
            changes its output, which with rotated keys it does not.
        seed: other seeds give other weights of the same shape.
        layers: number of layers.
    """
    done = folder / "complete"
    if done.exists():
        return folder
    import torch
    import transformers

    torch.manual_seed(seed)
    model = _causal_model(transformers, architecture, layers).to(torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(folder, safe_serialization=True)
    _write_tokenizer(transformers, folder)
    done.touch()
    return folder


def _causal_model(transformers: Any, architecture: str, layers: int) -> Any:
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": HEADS * HEAD_SIZE,
        "intermediate_size": 2 * HEADS * HEAD_SIZE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    if architecture in ("llama", "repeating"):
        common["initializer_range"] = 0.3 if architecture == "llama" else 0.05
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common))
    if architecture == WIDE:
        sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8, "num_attention_heads": 12, "head_dim": 64}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common | sizes | {"initializer_range": 0.05}))
    if architecture == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common))
    if architecture == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * layers
        config = transformers.Gemma3TextConfig(
            **common, sliding_window=64, layer_types=kinds[:layers], query_pre_attn_scalar=HEAD_SIZE
        )
        return transformers.Gemma3ForCausalLM(config)
    if architecture == "deepseek":
        return transformers.DeepseekV2ForCausalLM(_latent_attention_config(transformers, common))
    if architecture == "bloom":
        config = transformers.BloomConfig(
            vocab_size=VOCABULARY,
            hidden_size=HEADS * HEAD_SIZE,
            n_layer=layers,
            n_head=HEADS,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            initializer_range=0.8,  # its embedding is the output layer too, and repeats its input where it is narrower
        )
        return transformers.BloomForCausalLM(config)
    raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")


def _latent_attention_config(transformers: Any, common: dict[str, Any]) -> Any:
    """Dense layers only: what is wanted of DeepSeek is its attention. The latent sizes are those that CPU kernels know."""
    del common["head_dim"]
    common["num_key_value_heads"] = HEADS
    return transformers.DeepseekV2Config(
        **common,
        first_k_dense_replace=common["num_hidden_layers"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=64,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )


def _write_tokenizer(transformers: Any, folder: Path) -> None:
    """One token a byte, and unused ones up to the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"<unused{n}>" for n in range(len(tokens), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={text: n for n, text in enumerate(tokens)}, merges=[], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=MAX_TOKENS
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)


def main() -> None:
    """Make the models that the command line names."""
    for wanted in sys.argv[2:]:
        name, _, what = wanted.partition("=")
        architecture, _, seed = what.partition(":")
        make_model(Path(sys.argv[1]) / name, architecture, int(seed) if seed else SEED)


if __name__ == "__main__":
    main()
