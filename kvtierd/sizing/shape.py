"""What a model's ``config.json`` says about its KV cache.

The names in it are those of Hugging Face's configurations. What is not known for sure is refused: a size that is quietly wrong
would be worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtierd.errors import ConfigError

__all__ = ["DTYPES", "Layers", "ModelShape", "model_shape"]

DTYPES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of an element by the name of vLLM's ``--kv-cache-dtype``; fp8_ds_mla comes on top, for MLA alone."""
PACKED: Final = "fp8_ds_mla"
PACKED_ROW: Final = (512, 64)
"""The one latent size and rotary size that fp8_ds_mla is made for."""
PACKED_ROW_BYTES: Final = 656
"""512 elements of 1 byte, 4 scales of 4 bytes, 64 rotary elements of 2 bytes."""
INDEX_QUANT_BLOCK: Final = 128
"""Elements that share a scale of 4 bytes in the indexer's cache of DeepSeek-V3.2."""
INNER: Final = ("text_config", "llm_config", "language_config")
"""Where configurations of multimodal models have their language model."""
DEFAULTS: Final[dict[str, dict[str, int]]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256, "num_key_value_heads": 4, "num_attention_heads": 8, "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    "qwen3": {"head_dim": 128},
}  # fmt: skip
"""What configurations of these model types may leave out."""
STATEFUL: Final = (
    "mamba_d_state", "ssm_cfg", "ssm_state_size", "hybrid_override_pattern", "full_attention_interval", "linear_num_value_heads",
    "attn_layer_period", "attn_layer_indices", "block_types",
)  # fmt: skip
"""Keys of models with layers that keep a state in place of KV."""
MAX_LAYERS: Final = 10_000


@dataclass(frozen=True)
class Layers:
    """Layers of one kind.

    Attributes:
        kind: "full", "swa" (sliding window), "chunked" (attention within chunks of tokens) or "mla".
        count: how many.
        window: tokens that a token looks back, itself included, or those of an attention chunk; 0 for all.
    """

    kind: str
    count: int
    window: int = 0


@dataclass(frozen=True)
class ModelShape:
    """What decides on the bytes of a model's KV cache.

    Attributes:
        name: ``model_type``, or the first of ``architectures``.
        attention: "MHA", "GQA", "MQA" or "MLA".
        layers: the layers that have KV of their own, by kind.
        kv_heads: of the whole model; 1 for MLA.
        heads: query heads of the whole model; 0 where the configuration does not say.
        head_elements: elements of one token, head and layer: keys and values, or MLA's latent with its rotary part.
        index_bytes: bytes of one token and layer that a sparse attention's indexer keeps beside that.
        packable: whether fp8_ds_mla fits.
        dtype: what ``auto`` stands for, one of DTYPES or fp8_ds_mla.
    """

    name: str
    attention: str
    layers: tuple[Layers, ...]
    kv_heads: int
    heads: int
    head_elements: int
    index_bytes: int
    packable: bool
    dtype: str

    @property
    def num_layers(self) -> int:
        """Layers that have KV of their own."""
        return sum(layers.count for layers in self.layers)

    def head_bytes(self, dtype: str) -> int:
        """Bytes of one token, head and layer, the indexer's included.

        Args:
            dtype: one of DTYPES, fp8_ds_mla or "auto".

        Raises:
            ConfigError: no such type, or one that this model's cache cannot have.
        """
        if dtype == "auto":
            dtype = self.dtype
        if dtype == PACKED or (dtype.startswith("fp8") and self.index_bytes):  # sparse attention takes no other fp8
            if not self.packable:
                raise ConfigError(f"{PACKED} is for MLA with kv_lora_rank 512 and qk_rope_head_dim 64; use fp8 with this model")
            return PACKED_ROW_BYTES + self.index_bytes
        if dtype not in DTYPES:
            raise ConfigError(f"{dtype!r} is no type of a KV cache that is known here; use auto, {PACKED}, {', '.join(DTYPES)}")
        return self.head_elements * DTYPES[dtype] + self.index_bytes


def model_shape(config: object) -> ModelShape:
    """Read a model's configuration, as ``json.load`` gives it.

    Raises:
        ConfigError: it is none, lacks something, or describes a cache that is not known; says what and what to do.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"a model's config.json is a JSON object, not {_kind_of(config)}")
    text = _inner(config)
    text = {**DEFAULTS.get(str(text.get("model_type")), {}), **{k: v for k, v in text.items() if v is not None}}
    name = _name(config)
    _check_supported(text, name)
    count = _number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if count > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers is {count}, more than any model has; is this a model's config.json?")
    heads = _number(text, "num_attention_heads", "n_head", "n_heads", default=0)
    dtype = _dtype(config, text)
    if "kv_lora_rank" in text:
        rank, rope = _number(text, "kv_lora_rank"), _number(text, "qk_rope_head_dim")
        index = _number(text, "index_head_dim", default=0)
        index_bytes = index + -(-index // INDEX_QUANT_BLOCK) * 4
        packable = (rank, rope) == PACKED_ROW
        return ModelShape(name, "MLA", (Layers("mla", count),), 1, heads, rank + rope, index_bytes, packable, dtype)
    kv_heads = _kv_heads(text)
    attention = "MQA" if kv_heads == 1 and heads != 1 else "GQA" if kv_heads != heads else "MHA"
    layers = _layers(text, count)
    return ModelShape(name, attention, layers, kv_heads, heads, 2 * _head_dim(text, heads), 0, False, dtype)


def _name(config: Mapping[str, Any]) -> str:
    """What to call the model: one line, whatever the file says."""
    architectures = config.get("architectures")
    name = config.get("model_type") or (architectures[0] if isinstance(architectures, list) and architectures else "?")
    return "".join(c if c.isprintable() else "?" for c in str(name))[:80]


def _kind_of(value: object) -> str:
    return {list: "a list", str: "a text", type(None): "null", bool: "true or false"}.get(type(value), "a number")


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in INNER:
        if isinstance(inner := config.get(key), Mapping):
            return inner
    return config


def _check_supported(text: Mapping[str, Any], name: str) -> None:
    if text.get("is_encoder_decoder"):
        raise ConfigError(
            f"{name} is an encoder-decoder: its cross-attention depends on more than the tokens before, nothing to cache"
        )
    if stateful := [key for key in STATEFUL if key in text]:
        raise ConfigError(
            f"{name} has layers that keep a state in place of KV ({stateful[0]} is set); kvtierd does not cache those"
        )
    if "compress_ratios" in text:
        raise ConfigError(f"{name} compresses its KV by layer (compress_ratios is set); that is not known here yet")


def _number(text: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The first of the keys that is there: a whole number above 0."""
    for key in keys:
        if key in text:
            value = text[key]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{key} is {value!r:.80} in the model's configuration; it has to be a whole number above 0")
            return value
    if default is None:
        also = f" (or {', '.join(keys[1:])})" if keys[1:] else ""
        raise ConfigError(f"the model's configuration has no {keys[0]}{also}; is this the config.json of a language model?")
    return default


def _kv_heads(text: Mapping[str, Any]) -> int:
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        return _number(text, "multi_query_group_num", default=1)
    return _number(
        text,
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "multi_query_group_num",
        "num_attention_heads",
        "n_head",
        "n_heads",
    )


def _head_dim(text: Mapping[str, Any], heads: int) -> int:
    if "head_dim" in text or "kv_channels" in text:
        return _number(text, "head_dim", "kv_channels")
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    if not heads or hidden % heads:
        raise ConfigError(
            f"the model's configuration has no head_dim, and hidden_size {hidden} is no multiple of its {heads} heads; add head_dim"
        )
    return hidden // heads


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """What vLLM takes for ``--kv-cache-dtype auto``."""
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    if isinstance(quantization, Mapping):
        scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
        if isinstance(scheme, Mapping):
            scheme = "fp8" if (scheme.get("num_bits"), scheme.get("type"), scheme.get("dynamic")) == (8, "float", False) else None
        if str(scheme).lower() == "fp8":
            return "fp8"
    name = str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    name = name.removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "bfloat16"  # vLLM runs float32 weights in 16 bits


# ---- which layers look back how far


def _layers(text: Mapping[str, Any], count: int) -> tuple[Layers, ...]:
    """The layers with KV of their own; the last ``num_kv_shared_layers`` use that of others."""
    shared = text.get("num_kv_shared_layers") or 0
    if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared < count:
        raise ConfigError(f"num_kv_shared_layers is {shared!r:.80}, of {count} layers; it has to be a whole number below that")
    kinds = _kinds(text, count)[: count - shared]
    limit = _number(text, "max_position_embeddings", default=1 << 62)
    windows = {"full": 0}
    for kind, key in (("swa", "sliding_window"), ("chunked", "attention_chunk_size")):
        if kind in kinds:
            window = _number(text, key)
            windows[kind] = window if window < limit else 0
    kinds = [kind if windows[kind] else "full" for kind in kinds]
    return tuple(Layers(kind, kinds.count(kind), windows[kind]) for kind in ("full", "swa", "chunked") if kind in kinds)


def _kinds(text: Mapping[str, Any], count: int) -> list[str]:
    if "layer_types" in text:
        return _named_kinds(text["layer_types"], count)
    if "attention_chunk_size" in text:
        return _chunked_kinds(text, count)
    window = "sliding_window" in text and text.get("use_sliding_window", True) is not False
    if not window:
        return ["full"] * count
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if key in text:
            every = _number(text, key)
            return ["full" if (i + 1) % every == 0 else "swa" for i in range(count)]
    first = _number(text, "max_window_layers", default=0) if "use_sliding_window" in text else 0
    return ["swa" if i >= first else "full" for i in range(count)]


def _named_kinds(names: object, count: int) -> list[str]:
    known = {"full_attention": "full", "sliding_attention": "swa", "chunked_attention": "chunked"}
    if not isinstance(names, list) or len(names) < count:
        raise ConfigError(f"layer_types has to name the kind of each of the {count} layers")
    if strange := [name for name in names[:count] if name not in known]:
        raise ConfigError(
            f"layer_types has {strange[0]!r:.80}, which keeps no KV as {', '.join(known)} do; kvtierd does not cache such models"
        )
    return [known[name] for name in names[:count]]


def _chunked_kinds(text: Mapping[str, Any], count: int) -> list[str]:
    """Llama 4: layers with rotary positions attend within chunks, the others to all."""
    rotary = text.get("no_rope_layers") or []
    if not isinstance(rotary, list) or (rotary and len(rotary) < count):
        raise ConfigError(f"no_rope_layers has to say of each of the {count} layers whether it has rotary positions")
    if not rotary:
        every = _number(text, "no_rope_layer_interval", default=4)
        rotary = [(i + 1) % every for i in range(count)]
    return ["chunked" if rotary[i] else "full" for i in range(count)]
