"""Goal: the KV caches that the installed vLLM really makes are read right.

Method: vLLM's own functions place and view caches (whichever the installed version has), for every physical layout, kernel block
size, padding and overlay of groups; where the bytes of each block lie is compared with torch's indexing, element by element, and
blocks go out and back in.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here: run make test-vllm")
interface = pytest.importorskip("vllm.v1.kv_cache_interface", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm.copying import make_copier, self_test  # noqa: E402
from kvtierd.connectors.vllm.layout import UnsupportedLayoutError, worker_layout  # noqa: E402
from tests.connectors import kv_forms as forms  # noqa: E402
from tests.connectors.kv_forms import Cache  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
BLOCKS = 5
PUBLISHES = hasattr(interface, "create_kv_cache_views")
"""Newer versions publish the shape of a page; older ones leave it to attention backends."""
newer = pytest.mark.skipif(not PUBLISHES, reason="this vLLM leaves the shape to attention backends")
older = pytest.mark.skipif(PUBLISHES, reason="this vLLM publishes the shape of a page")
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def full(block_size: int = 16, heads: int = 2, size: int = 8, dtype: Any = torch.bfloat16, **changes: Any) -> Any:
    return interface.FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=size, dtype=dtype, **changes)


def window(block_size: int = 16, heads: int = 2, size: int = 8, dtype: Any = torch.bfloat16, **changes: Any) -> Any:
    return interface.SlidingWindowSpec(
        block_size=block_size, num_kv_heads=heads, head_size=size, dtype=dtype, sliding_window=64, **changes
    )


def latent(block_size: int = 16, size: int = 24, dtype: Any = torch.bfloat16, **changes: Any) -> Any:
    return interface.MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=size, dtype=dtype, **changes)


def groups(*wanted: tuple[int, Any]) -> list[Any]:
    """Groups of (number of layers, spec), or of a mapping to specs by layer."""
    made, first = [], 0
    for count, spec in wanted:
        names = [f"model.layers.{n}.attn" for n in range(first, first + count)]
        first += count
        if isinstance(spec, list):
            spec = interface.UniformTypeKVCacheSpecs(
                block_size=spec[0].block_size, kv_cache_specs=dict(zip(names, spec, strict=True))
            )
        made.append(interface.KVCacheGroupSpec(names, spec))
    return made


def check(cache: Cache, num_blocks: int, ratio: int = 1, block_dim: int = 0) -> Any:
    """Where each byte lies, a round trip of every block, and nothing else touched."""
    layout = worker_layout(cache.config, cache.tensors, vllm_config=forms.vllm_config())
    copier = make_copier(layout)
    order = random.Random(7).sample(range(num_blocks), num_blocks)
    for group, seen in enumerate(layout.groups):
        own = {b: forms.slot_places(cache, group, b, block_dim, ratio) for b in range(num_blocks)}
        contents = b"".join(forms.read_places(cache, own[b]) for b in order)
        slot = memoryview(bytearray(len(contents)))
        assert seen.block_bytes * num_blocks == len(contents)
        copier.save(group, [(slot, order)], copier.fence())
        assert bytes(slot) == contents
        before = [flat.clone() for flat in cache.spaces]
        moved = order[1:] + order[:1]
        assert copier.load(group, [(slot, moved)], copier.fence(), lambda: False) == 1
        assert b"".join(forms.read_places(cache, own[b]) for b in moved) == contents
        inside = {place for places in own.values() for place in places}
        for flat, old in zip(cache.spaces, before, strict=True):
            changed = (flat != old).nonzero().flatten().tolist()
            assert {(flat.untyped_storage().data_ptr(), place) for place in changed} <= inside
    before = [flat.clone() for flat in cache.spaces]
    self_test(layout, copier, cache.tensors)
    assert all(torch.equal(flat, old) for flat, old in zip(cache.spaces, before, strict=True))
    return layout


# ---- versions that publish the shape


def placed(made: list[Any], layout_name: str, kernel_sizes: list[int] | None = None) -> Cache:
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    layout = KVCacheLayout[layout_name]
    engine = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=BLOCKS, prefix_cache_retention_interval=None
        ),
    )
    config = kv_cache_utils.get_kv_cache_config_from_groups(engine, made, 1 << 24)
    assert config.num_blocks == BLOCKS
    tensors = allocate_kv_cache(config, torch.device("cpu"), layout, kernel_sizes)
    flat = forms.space(0).set_(next(iter(tensors.values())).untyped_storage())
    flat.copy_(forms.space(flat.numel(), 3))
    return Cache(config, tensors, [flat])


@newer
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32])
def test_one_group_in_every_layout(layout_name: str, dtype: Any) -> None:
    layout = check(placed(groups((3, full(dtype=dtype))), layout_name), BLOCKS)
    runs = {"LBHNC": 3, "LBNHC": 3, "LHBNC": 6}.get(layout_name, 1)
    assert len(layout.regions[0]) == runs


@newer
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_groups_over_each_other_in_every_layout(layout_name: str) -> None:
    layout = check(placed(groups((3, full()), (2, window()), (3, window())), layout_name), BLOCKS)
    assert [(g.kind, g.num_layers) for g in layout.groups] == [("full", 3), ("swa", 2), ("swa", 3)]


@newer
@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("kernel_size", [16, 32])
def test_kernel_blocks_smaller_than_blocks(layout_name: str, kernel_size: int) -> None:
    made = groups((2, full(block_size=64)))
    if layout_name.startswith("B"):
        with pytest.raises(ValueError, match="cannot be split"):  # vLLM does not make such a cache either
            placed(made, layout_name, [kernel_size])
        return
    if layout_name == "LHBNC":
        with pytest.raises(ValueError, match="cannot be split"):
            placed(made, layout_name, [kernel_size])
        return
    check(placed(made, layout_name, [kernel_size]), BLOCKS, ratio=64 // kernel_size)


@newer
@pytest.mark.parametrize("layout_name", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_latent_pages(layout_name: str) -> None:
    layout = check(placed(groups((3, latent(max_tp_shards=1))), layout_name), BLOCKS)
    assert (layout.groups[0].kind, layout.groups[0].replicated) == ("mla", True)


@newer
@pytest.mark.parametrize("layout_name", ["LBNHC", "BLNHC"])
def test_padded_pages(layout_name: str) -> None:
    spec = latent(alignment=1024)
    assert spec.page_size_bytes > spec.unpadded_page_size_bytes
    layout = check(placed(groups((3, spec)), layout_name), BLOCKS)
    assert layout.groups[0].block_bytes == 3 * spec.unpadded_page_size_bytes


@newer
@pytest.mark.parametrize("layout_name", ["LBNHC", "BLNHC"])
def test_layers_with_pages_of_different_size_in_one_group(layout_name: str) -> None:
    specs = [latent(size=24), latent(size=8, dtype=torch.uint8), latent(size=24)]
    layout = check(placed(groups((3, specs)), layout_name), BLOCKS)
    assert layout.groups[0].block_bytes == 16 * (48 + 8 + 48)
    assert layout.groups[0].kv_dtype == "uint8"


@newer
def test_kv_heads_of_different_size() -> None:
    check(placed(groups((2, full(head_size_v=4))), "LBNHC"), BLOCKS)


@newer
def test_scales_in_every_token_are_refused() -> None:
    spec = full(dtype=torch.int8, kv_quant_mode=interface.KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=24)
    cache = placed(groups((2, spec)), "LBNHC")
    with pytest.raises(UnsupportedLayoutError, match="INT8_PER_TOKEN_HEAD"):
        worker_layout(cache.config, cache.tensors, vllm_config=forms.vllm_config())


# ---- versions in which a backend gives the shape


def reshaped(made: list[Any], backend: Any, kernel_sizes: list[int]) -> Cache:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    raw, tensors = {}, []
    for group in made:
        for name, spec in zip(group.layer_names, [group.kv_cache_spec] * len(group.layer_names), strict=True):
            raw[name] = forms.space(BLOCKS * spec.page_size_bytes, len(raw)).view(torch.int8)
            tensors.append(interface.KVCacheTensor(size=raw[name].numel(), shared_by=[name]))
    views = [
        SimpleNamespace(kv_cache_spec=g.kv_cache_spec, backend=backend, kv_cache_group_id=n, layer_names=g.layer_names)
        for n, g in enumerate(made)
    ]
    runner = SimpleNamespace(
        _kv_cache_spec_attn_group_iterator=lambda: iter(views),
        runner_only_attn_layers=set(),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    config = interface.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=made)
    caches = GPUModelRunner._reshape_kv_cache_tensors(runner, raw, kernel_sizes)
    return Cache(config, caches, [flat.view(torch.uint8) for flat in raw.values()])


def backends() -> dict[str, Any]:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    return {"cpu": CPUAttentionBackend, "flash": FlashAttentionBackend, "triton": TritonAttentionBackend, "mla": TritonMLABackend}


@older
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("backend", ["cpu", "flash", "triton"])
@pytest.mark.parametrize("kernel_size", [16, 64])
def test_shapes_of_backends(backend: str, order: str, kernel_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import utils

    utils.set_kv_cache_layout(order)
    try:
        cache = reshaped(groups((2, full(block_size=64)), (1, window(block_size=64))), backends()[backend], [kernel_size] * 2)
    finally:
        utils.set_kv_cache_layout(None)
    check(cache, BLOCKS, ratio=64 // kernel_size)


@older
def test_latent_pages_of_a_backend() -> None:
    layout = check(reshaped(groups((3, latent())), backends()["mla"], [16]), BLOCKS)
    assert (layout.groups[0].kind, layout.groups[0].replicated) == ("mla", True)


@older
def test_padded_latent_pages_of_a_backend() -> None:
    spec = latent(alignment=1024)
    layout = check(reshaped(groups((3, spec)), backends()["mla"], [16]), BLOCKS)
    assert layout.groups[0].block_bytes == 3 * spec.real_page_size_bytes < 3 * spec.page_size_bytes


@older
def test_shape_with_scales_of_every_token_is_refused() -> None:
    spec = full(dtype=torch.int8, kv_quant_mode=interface.KVQuantMode.INT8_PER_TOKEN_HEAD)
    tensor = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8).view(BLOCKS, -1)
    config = interface.KVCacheConfig(BLOCKS, [], [interface.KVCacheGroupSpec(["a"], spec)])
    with pytest.raises(UnsupportedLayoutError, match="INT8_PER_TOKEN_HEAD"):
        worker_layout(config, {"a": tensor}, vllm_config=forms.vllm_config())


# ---- both


@pytest.mark.parametrize("name", ["MambaSpec", "CrossAttentionSpec", "EncoderOnlyAttentionSpec", "SinkFullAttentionSpec"])
def test_specs_of_other_caches_are_refused(name: str) -> None:
    if name == "MambaSpec":
        spec = interface.MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))
        tensors: dict[str, Any] = {"a": [torch.zeros(BLOCKS, 4)]}
    else:
        spec = getattr(interface, name)(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
        tensors = {"a": torch.zeros(BLOCKS, 2, 16, 16, dtype=torch.bfloat16)}
    config = interface.KVCacheConfig(BLOCKS, [], [interface.KVCacheGroupSpec(["a"], spec)])
    with pytest.raises(UnsupportedLayoutError, match=f"KV cache group 0 is of {name}"):
        worker_layout(config, tensors, vllm_config=forms.vllm_config())
