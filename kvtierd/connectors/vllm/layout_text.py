"""What the bytes of a slot mean, as canonical text. Engines compare it (hashed into a namespace) before they exchange bytes.

Anything that changes the meaning of a byte changes the text: layers and their order, data type, quantisation and its scales,
shape of a block and the order of its dimensions in memory, attention backend, and the instruction set where the engine packs
by it. What only says where the bytes lie (number of blocks, offsets, padding) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from kvtierd.connectors.vllm.layout import Run
    from kvtierd.connectors.vllm.layout_layer import Layer

FORMAT: Final = 1
"""Version of the text and of the order of bytes in a slot."""

_DTYPES: Final = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}
_SPEC_FIELDS: Final = (
    "block_size",
    "num_kv_heads",
    "head_size",
    "head_size_v",
    "cache_dtype_str",
    "model_version",
    "compress_ratio",
    "tokens_per_state",
    "num_head_slots",
    "state_content_bytes",
    "cache_role",
)
"""Fields of a spec that say what a page contains, as far as a spec has them."""
_SCALES: Final = ("_k_scale_float", "_v_scale_float", "_k_scale", "_v_scale")


def quant_mode(spec: Any) -> str:
    """Name of a spec's quantisation mode; NONE where the spec knows none."""
    mode = getattr(spec, "kv_quant_mode", None)
    return "NONE" if mode is None else str(getattr(mode, "name", mode))


def dtype_name(layer: Layer, vllm_config: Any) -> str:
    """The name of ``kvtierd.model.DTYPE_BYTES`` for a layer; engines keep fp8 in tensors of uint8."""
    if quant_mode(layer.spec) == "FP8_PER_TENSOR":
        cache_dtype = str(getattr(layer.spec, "cache_dtype_str", None) or vllm_config.cache_config.cache_dtype)
        return "fp8_e5m2" if "e5m2" in cache_dtype else "fp8_e4m3" if "ds_mla" not in cache_dtype else "uint8"
    return _DTYPES.get(layer.tensor.dtype, "uint8")


def describe(kind: str, window: int, layers: Sequence[Layer], runs: Sequence[Run], vllm_config: Any) -> str:
    """Canonical text of the format of a slot's bytes of one group on one rank. ``runs`` are in the order of a slot."""
    context = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    cache_dtype = getattr(vllm_config.cache_config, "cache_dtype", "auto")
    lines = [f"kvtierd vllm layout {FORMAT}", f"kind={kind} window={window} cache_dtype={cache_dtype} padding=none"]
    for number, layer in enumerate(layers):
        if layer.same_as is not None:
            lines.append(f"layer {number} {layer.name} same-as {layer.same_as}")
            continue
        lines.append(f"layer {number} {layer.name} {_page(layer)} {_producer(layer, context.get(layer.name))}")
    return "\n".join([*lines, f"order {_order(runs)}"])


def _page(layer: Layer) -> str:
    """Content and order of one layer's part of a block."""
    spec = layer.spec
    fields = " ".join(f"{name}={_plain(getattr(spec, name))}" for name in _SPEC_FIELDS if getattr(spec, name, None) is not None)
    shape = "x".join(str(size) for size, _ in layer.dims)
    # Dimensions of size 1 move no bytes, whatever their stride is.
    moving = [number for number, (size, _) in enumerate(layer.dims) if size > 1]
    order = ",".join(str(number) for number in sorted(moving, key=lambda number: -layer.dims[number][1]))
    return (
        f"spec={type(spec).__name__} {fields} quant={quant_mode(spec)} dtype={layer.tensor.dtype} "
        f"kernel_blocks={layer.blocks.kernel_blocks} shape={shape} memory_order={order}"
    )


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))


def _producer(layer: Layer, module: Any) -> str:
    """What writes the page: the backend decides how it packs K and V, and scales are part of the meaning of quantised bytes."""
    backend = getattr(module, "attn_backend", None)
    name = backend.get_name() if backend is not None else "unknown"
    parts = [f"backend={name}"]
    if layer.tensor.device.type == "cpu":  # CPU kernels pack by instruction set
        parts.append(f"isa={getattr(module, 'isa', None) or _instruction_set()}")
    if quant_mode(layer.spec) != "NONE":
        scales = [f"{key}={_number(getattr(module, key))}" for key in _SCALES if getattr(module, key, None) is not None]
        parts.append(f"scales={','.join(scales) or 'unknown'}")
    return " ".join(parts)


def _instruction_set() -> str:
    """Of this processor, where the engine does not say which one its kernels use."""
    tiles = torch.cpu._is_amx_tile_supported() if hasattr(torch.cpu, "_is_amx_tile_supported") else False
    return f"{torch.backends.cpu.get_cpu_capability()}{'+tiles' if tiles else ''}"


def _number(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "/".join(float(x).hex() for x in value.detach().float().flatten().tolist())
    return float(value).hex()


def _order(runs: Sequence[Run]) -> str:
    """The order of runs in a slot: one word for the usual one, else every run by name."""
    places = [(run.layer, run.piece) for run in runs]
    if places == sorted(places):
        return "by-layer"
    if [(piece, layer) for layer, piece in places] == sorted((piece, layer) for layer, piece in places):
        return "by-piece"
    return " ".join(f"{layer}.{piece}" for layer, piece in places)
