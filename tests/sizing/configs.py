"""The parts of public models' config.json that are about their KV cache, as those files have them."""

from __future__ import annotations

from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "vocab_size": 128256, "intermediate_size": 14336, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                     "rope_type": "llama3"},
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "intermediate_size": 28672}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 32, "num_hidden_layers": 32, "max_position_embeddings": 4096, "torch_dtype": "float16",
    "vocab_size": 32000, "intermediate_size": 11008, "rms_norm_eps": 1e-05,
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 36, "head_dim": 128, "max_position_embeddings": 40960, "max_window_layers": 36,
    "sliding_window": None, "use_sliding_window": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
    "intermediate_size": 12288,
}  # fmt: skip
QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28, "max_window_layers": 28, "intermediate_size": 3072,
}  # fmt: skip
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "num_attention_heads": 64,
    "num_key_value_heads": 4, "num_hidden_layers": 94, "head_dim": 128, "max_position_embeddings": 40960, "max_window_layers": 94,
    "sliding_window": None, "use_sliding_window": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16", "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 2048,
}  # fmt: skip
GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {"model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
                    "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27, "model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
}  # fmt: skip
GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_hidden_layers": 36, "layer_types": ["sliding_attention", "full_attention"] * 18,
    "sliding_window": 128, "max_position_embeddings": 131072, "vocab_size": 201088, "intermediate_size": 2880,
    "num_local_experts": 128, "num_experts_per_tok": 4,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
}  # fmt: skip
GPT_OSS_20B = GPT_OSS_120B | {
    "num_hidden_layers": 24, "layer_types": ["sliding_attention", "full_attention"] * 12, "num_local_experts": 32,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "max_position_embeddings": 32768, "sliding_window": 4096,
    "torch_dtype": "bfloat16", "vocab_size": 32000, "intermediate_size": 14336,
}  # fmt: skip
LLAMA_4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16",
    "text_config": {"model_type": "llama4_text", "attention_chunk_size": 8192, "head_dim": 128, "hidden_size": 5120,
                    "num_attention_heads": 40, "num_key_value_heads": 8, "num_hidden_layers": 48, "no_rope_layers": [],
                    "max_position_embeddings": 10485760},
}  # fmt: skip
FALCON_7B = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
    "num_hidden_layers": 32, "multi_query": True, "new_decoder_architecture": False, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
