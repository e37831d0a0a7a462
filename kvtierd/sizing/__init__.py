"""How many bytes of KV cache a model's tokens take, and what tiers of which size make of that. Pure: no engine, no I/O."""

from kvtierd.sizing.plan import Drive, Holding, Layout, Loading, drive_wear, holding, layout_of, loading, needed_bytes
from kvtierd.sizing.shape import DTYPES, Layers, ModelShape, model_shape

__all__ = [
    "DTYPES", "Drive", "Holding", "Layers", "Layout", "Loading", "ModelShape", "drive_wear", "holding", "layout_of", "loading",
    "model_shape", "needed_bytes",
]  # fmt: skip
