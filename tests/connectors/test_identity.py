"""Goal: engines share blocks exactly when those mean the same to both.

Method: whatever may differ between two engines is changed alone, and the namespaces are compared; the plan of blocks is compared
with sums done by hand.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed here: run make test-vllm")
pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.connectors.vllm import identity
from kvtierd.connectors.vllm.identity import GroupPlan, engine_plan
from kvtierd.connectors.vllm.layout import GroupLayout, UnsupportedLayoutError
from kvtierd.connectors.vllm.metadata import Rank, RankLayout
from kvtierd.connectors.vllm.settings import Settings
from kvtierd.connectors.weights import local_weights

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports
MIB = 1 << 20
FULL = GroupLayout(0, "full", 16, 0, 16 * 4096, 2, "bfloat16", False, "full")
WINDOW = GroupLayout(1, "swa", 16, 64, 16 * 4096, 2, "bfloat16", False, "window")
LATENT = GroupLayout(0, "mla", 16, 0, 16 * 4096, 2, "bfloat16", True, "latent")


class HfConfig:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def config(tp: int = 1, pp: int = 1, **hf: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, decode_context_parallel_size=1),
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            dtype="bfloat16",
            quantization=None,
            seed=0,
            max_model_len=4096,
            hf_overrides={},
            hf_text_config=HfConfig(**({"rope_theta": 1.0, "transformers_version": "5"} | hf)),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False, sliding_window=None),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        speculative_config=None,
    )


def layouts(*groups: GroupLayout, tp: int = 1, pp: int = 1) -> dict[Rank, RankLayout]:
    return {(p, t): RankLayout(groups) for p in range(pp) for t in range(tp)}


CHUNKS_OF_64 = Settings(chunk_tokens=64)


def namespace(engine: Any, settings: Settings = CHUNKS_OF_64, *groups: GroupLayout, algorithm: str = "a") -> str:
    sizes = {"tp": engine.parallel_config.tensor_parallel_size, "pp": engine.parallel_config.pipeline_parallel_size}
    return repr(engine_plan(engine, layouts(*(groups or (FULL,)), **sizes), settings, algorithm).namespaces)


# ---- what is in the namespace


def change(path: str, value: Any) -> Any:
    made = config()
    *way, last = path.split(".")
    target = made
    for name in way:
        target = getattr(target, name)
    setattr(target, last, value)
    return made


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.model", "org/other"),
        ("model_config.revision", "v2"),
        ("model_config.dtype", "float16"),
        ("model_config.quantization", "fp8"),
        ("model_config.hf_overrides", {"a": 1}),
        ("model_config.code_revision", "v2"),
        ("model_config.hf_text_config.rope_theta", 2.0),
        ("cache_config.cache_dtype", "fp8"),
        ("cache_config.sliding_window", 128),
        ("lora_config", SimpleNamespace()),
        ("speculative_config", SimpleNamespace(method="eagle", draft_model_config=None)),
        ("load_config.load_format", "dummy"),
        ("parallel_config.tensor_parallel_size", 2),
        ("parallel_config.pipeline_parallel_size", 2),
    ],
)
def test_what_sets_engines_apart(path: str, value: Any) -> None:
    assert namespace(change(path, value)) != namespace(config())


@pytest.mark.parametrize(
    ("path", "value"),
    [("model_config.seed", 1), ("model_config.max_model_len", 8192), ("model_config.hf_text_config.transformers_version", "6")],
)
def test_what_does_not(path: str, value: Any) -> None:
    assert namespace(change(path, value)) == namespace(config())


def test_layout_chunk_algorithm_and_revision_set_engines_apart() -> None:
    base = namespace(config())
    assert namespace(config(), Settings(chunk_tokens=64), replace(FULL, description="other")) != base
    assert namespace(config(), Settings(chunk_tokens=128)) != base
    assert namespace(config(), algorithm="b") != base
    assert namespace(config(), Settings(chunk_tokens=64, revision="v")) != base


@pytest.mark.parametrize("where", ["scaling", "parameters", "top"])
def test_models_that_turn_positions_by_the_longest_request(where: str) -> None:
    """Their KV differs between an engine that takes requests beyond the original length and one that does not."""
    rope: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    hf: dict[str, Any] = {"scaling": {"rope_scaling": rope}, "parameters": {"rope_parameters": rope}}.get(
        where, {"original_max_position_embeddings": 4096}
    )
    short, longer, longest = config(**hf), config(**hf), config(**hf)
    longer.model_config.max_model_len, longest.model_config.max_model_len = 8192, 16384
    assert namespace(short) != namespace(longer)
    assert namespace(longer) == namespace(longest)


# ---- weights in a folder


def weights(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def test_other_weights_in_the_same_folder_are_another_model(tmp_path: Path) -> None:
    """A tuned model is often saved with the same shapes, and with the same embedding in front."""
    engine = config()
    same = bytes(3 * MIB)
    engine.model_config.model = weights(tmp_path / "m", same)
    before = namespace(engine)
    assert namespace(engine) == before
    weights(tmp_path / "m", same[: 2 * MIB] + b"\1" * MIB)
    assert namespace(engine) != before


def test_times_and_other_files_do_not_matter(tmp_path: Path) -> None:
    place = weights(tmp_path / "m", b"x" * 1000)
    found = local_weights(place)
    (tmp_path / "m" / "README.md").write_text("hello")
    (tmp_path / "m" / "model.safetensors").touch()
    assert local_weights(place) == found
    assert local_weights(weights(tmp_path / "copy", b"x" * 1000)) == found


def test_small_empty_and_missing_weights(tmp_path: Path) -> None:
    one, other = weights(tmp_path / "a", b""), weights(tmp_path / "b", b"1")
    assert local_weights(one) != local_weights(other)
    assert local_weights(str(tmp_path / "none")) == ""
    assert local_weights(str(tmp_path / "b" / "model.safetensors")) != ""


# ---- weights from elsewhere

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(identity.log, "warning", lambda text, *values: found.append(text % values))
    return found


def repository(cache: Path, commit: str, name: str = "org/model") -> None:
    """The main branch of a repository, as Hugging Face's library keeps it."""
    place = cache / ("models--" + name.replace("/", "--"))
    for folder in (place / "refs", place / "snapshots" / commit):
        folder.mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)


def test_a_branch_of_the_hub_that_moves(tmp_path: Path, warned: list[str]) -> None:
    engine = config()
    engine.load_config.download_dir = str(tmp_path)
    repository(tmp_path, OLD)
    before = namespace(engine)
    assert OLD in before
    repository(tmp_path, NEW)
    assert namespace(engine) not in (before, namespace(config()))
    engine.model_config.revision = NEW
    assert namespace(engine) == namespace(change("model_config.revision", NEW)), "a commit is a commit"
    assert len(warned) == 1, "of the engine without a snapshot, and without a revision that is a commit"


def test_the_commit_that_the_configuration_came_from(warned: list[str]) -> None:
    one, other = config(), config()
    one.model_config.hf_config, other.model_config.hf_config = SimpleNamespace(_commit_hash=OLD), SimpleNamespace(_commit_hash=NEW)
    assert namespace(one) != namespace(other)
    assert not warned


def test_weights_that_nothing_names(tmp_path: Path, warned: list[str]) -> None:
    named, dummy, bucket = config(), change("load_config.load_format", "dummy"), config()
    namespace(named, Settings(chunk_tokens=64, revision="v"))
    namespace(dummy)
    assert not warned
    namespace(config())
    bucket.model_config.model = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    namespace(bucket)
    (tmp_path / "model.safetensors").touch()
    bucket.model_config.model_weights = "s3://bucket/model"
    namespace(bucket)
    assert [text.split(":")[1].strip() for text in warned] == [
        "nothing names the weights of org/model",
        f"nothing names the weights of {tmp_path}",
        f"nothing names the weights of {tmp_path}",
    ]


def test_weights_that_cannot_be_read(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: str) -> str:
        raise PermissionError("no")

    monkeypatch.setattr(identity, "name_weights", broken)
    namespace(config())
    assert ["cannot be read" in text for text in warned] == [True, False]


def test_other_weights_of_the_draft_model(tmp_path: Path) -> None:
    """Its layers have KV too."""
    engine = config()
    draft = SimpleNamespace(model=weights(tmp_path / "d", b"1"), revision=None)
    engine.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
    before = namespace(engine)
    weights(tmp_path / "d", b"2")
    assert namespace(engine) != before


# ---- blocks


def test_the_smallest_chunk_of_four_mebibytes_a_rank() -> None:
    def tokens(block_bytes: int, **settings: Any) -> int:
        return engine_plan(config(), layouts(replace(FULL, block_bytes=block_bytes)), Settings(**settings), "a").chunk_tokens

    assert tokens(16 * 16384) == 256
    assert tokens(16 * 32768) == 128
    assert tokens(16 * 100) == 256
    assert tokens(16 * 20000) == 224  # 210 tokens, rounded up to blocks
    assert tokens(8 * MIB) == 16
    assert tokens(16 * 4096, chunk_tokens=48) == 48
    with pytest.raises(UnsupportedLayoutError, match="multiple of 16"):
        tokens(16 * 4096, chunk_tokens=40)
    with pytest.raises(UnsupportedLayoutError, match=r"lower kvtierd\.chunk_tokens"):
        tokens(1 << 32, chunk_tokens=64)


@pytest.mark.parametrize(
    ("window", "block", "tokens"),
    [(1024, 16, 256), (128, 16, 128), (100, 16, 96), (8, 16, 16), (64, 48, 48)],
)
def test_a_chunk_is_no_wider_than_a_window(window: int, block: int, tokens: int, warned: list[str]) -> None:
    """What has left a window while the rest of its chunk is computed cannot be saved."""
    groups = [replace(g, block_tokens=block, block_bytes=block * 4096) for g in (FULL, replace(WINDOW, window=window))]
    made = layouts(*groups)
    assert engine_plan(config(), made, Settings(revision="v"), "a").chunk_tokens == tokens
    assert engine_plan(config(), made, Settings(revision="v", chunk_tokens=tokens), "a").chunk_tokens == tokens
    assert not warned
    wider = 4 * tokens * (window // tokens or 1)
    assert engine_plan(config(), made, Settings(revision="v", chunk_tokens=wider), "a").chunk_tokens == wider
    assert len(warned) == 1
    assert f"make it {max(block, window // block * block)}." in warned[0]


def test_groups_of_the_same_size_share_a_pool() -> None:
    plan = engine_plan(config(), layouts(FULL, WINDOW), Settings(chunk_tokens=64), "a")
    assert [g.pool for g in plan.groups] == [0, 0]
    assert plan.selective
    other = engine_plan(config(), layouts(FULL, replace(WINDOW, block_bytes=16 * 64)), Settings(chunk_tokens=64), "a")
    assert [g.pool for g in other.groups] == [0, 1]
    assert [n.shard_bytes for n in other.namespaces] == [(4 * 16 * 4096,), (4 * 16 * 64,)]


def test_shards_of_ranks() -> None:
    plan = engine_plan(config(2, 2), layouts(FULL, tp=2, pp=2), Settings(chunk_tokens=64), "a")
    assert plan.namespaces[0].shard_bytes == (4 * 16 * 4096,) * 4
    assert (plan.ranks, plan.shards(plan.groups[0]), plan.replicated) == (4, 4, (False,))
    latent = engine_plan(config(2, 2), layouts(LATENT, tp=2, pp=2), Settings(chunk_tokens=64), "a")
    assert (latent.ranks, latent.shards(latent.groups[0]), latent.replicated) == (4, 2, (True,))


def test_ranks_that_are_missing_or_cannot_be_served() -> None:
    with pytest.raises(UnsupportedLayoutError, match="expected"):
        engine_plan(config(2), layouts(FULL), Settings(), "a")
    broken = layouts(FULL, tp=2) | {(0, 1): RankLayout((), "no such layout")}
    with pytest.raises(UnsupportedLayoutError, match=r"rank \(0, 1\): no such layout"):
        engine_plan(config(2), broken, Settings(), "a")


@pytest.mark.parametrize(
    ("kind", "window", "hit", "first"),
    [
        ("full", 0, 100, 0),
        ("swa", 64, 100, 37),
        ("swa", 64, 10, 0),
        ("chunked_local", 64, 130, 128),
        ("chunked_local", 64, 128, 128),
    ],
)
def test_first_token_that_a_hit_needs(kind: str, window: int, hit: int, first: int) -> None:
    assert GroupPlan(0, kind, 16, window, 4, 0).first_needed(hit) == first


def test_a_config_is_not_changed() -> None:
    engine = config()
    before = copy.deepcopy(engine)
    namespace(engine)
    assert engine.model_config.hf_text_config.to_dict() == before.model_config.hf_text_config.to_dict()
