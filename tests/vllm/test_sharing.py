"""Goal: engines share blocks where they may, and never where they must not.

Method: a first engine process computes and saves prompts under salts, tenants, models and adapters; a second, fresh one asks
for the same tokens under others. Hits are counted in tokens, so "none" is exactly zero.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtierd.testing.daemon import DaemonProcess
from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import Report, llm_arguments, prompts, transfer_config
from tests.vllm.steps import FORGET, MAX_TOKENS, Baseline, barrier, blocks_of, engine, generate, settle

A, B, C, E = (prompts(2, 200, 0, seed=seed) for seed in (201, 203, 205, 207))


def salted(wanted: list[dict[str, Any]], salt: str) -> list[dict[str, Any]]:
    return [prompt | {"salt": salt} for prompt in wanted]


def owned(wanted: list[dict[str, Any]], **params: Any) -> list[dict[str, Any]]:
    return [prompt | {"kv_transfer_params": params} for prompt in wanted]


@pytest.fixture(scope="module")
def daemon(module_daemons: Daemons) -> DaemonProcess:
    return module_daemons()


@pytest.fixture(scope="module")
def adapters(models: Path) -> dict[str, str]:
    """Two LoRA adapters of the llama: files as PEFT writes them."""
    import torch
    from safetensors.torch import save_file

    made = {}
    for name, seed in (("first", 1), ("second", 2)):
        folder = models / f"adapter-{name}"
        folder.mkdir()
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for layer in range(2):
            for projection, width in (("q_proj", 128), ("v_proj", 64)):
                prefix = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, 128, generator=generator)
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, 8, generator=generator)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        made[name] = str(folder)
    return made


def engines_of(models: Path, daemon: DaemonProcess, adapters: dict[str, str], steps: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The engines that both processes run."""
    transfer = transfer_config(daemon.address, tenant="house", salt_tenants={"salt-of-lab": "lab"})
    lora = {"enable_lora": True, "max_lora_rank": 8}
    made = {
        "llama": llm_arguments(models / "llama", transfer),
        "other": llm_arguments(models / "llama-other", transfer),
        "lora": llm_arguments(models / "llama", transfer, **lora),
    }
    return [engine(name, made[name], *steps[name]) for name in steps]


def with_adapter(adapters: dict[str, str], name: str) -> dict[str, Any]:
    return {"lora": {"name": name, "id": 1 + list(adapters).index(name), "path": adapters[name]}}


@pytest.fixture(scope="module")
def first(models: Path, daemon: DaemonProcess, adapters: dict[str, str], module_engines: Engines) -> Report:
    """Saves."""
    steps = {
        "llama": [
            generate("salted", salted(A, "x")),
            generate("tenant", owned(B, **{"kvtierd.tenant": "research"})),
            generate("lab", salted(C, "salt-of-lab")),
            generate("not saved", owned(E, **{"kvtierd.skip_save": True})),
            settle(daemon, blocks=36),
        ],
        "lora": [generate("adapter", A, **with_adapter(adapters, "first")), settle(daemon, blocks=48)],
    }
    return module_engines.run(engines_of(models, daemon, adapters, steps), fresh=True)


@pytest.fixture(scope="module")
def second(models: Path, daemon: DaemonProcess, adapters: dict[str, str], first: Report, module_engines: Engines) -> Report:
    """Asks. Each question is asked of an engine that has forgotten what it computed itself."""
    questions = {
        "no salt": A,
        "other salt": salted(A, "y"),
        "salt": salted(A, "x"),
        "no tenant": B,
        "other tenant": owned(B, **{"kvtierd.tenant": "sales"}),
        "tenant": owned(B, **{"kvtierd.tenant": "research"}),
        "tenant of lmcache": owned(B, **{"lmcache.tag.tenant": "research"}),
        "not loaded": owned(B, **{"kvtierd.tenant": "research", "kvtierd.skip_load": True}),
        "lab": salted(C, "salt-of-lab"),
        "not saved": E,
    }
    asked = []
    for name, wanted in questions.items():
        # What is asked without a hit is not saved, or the next question would find it.
        kept = [w | {"kv_transfer_params": w.get("kv_transfer_params", {}) | {"kvtierd.skip_save": True}} for w in wanted]
        asked += [generate(name, kept), FORGET]
    steps = {
        "llama": asked,
        "other": [generate("other weights", salted(A, "x"))],
        "lora": [
            generate("other adapter", A, **with_adapter(adapters, "second")),
            FORGET,
            generate("adapter", A, **with_adapter(adapters, "first")),
            FORGET,
            generate("no adapter", owned(A, **{"kvtierd.skip_save": True})),
        ],
    }
    return module_engines.run(engines_of(models, daemon, adapters, steps), fresh=True)


@pytest.mark.parametrize("question", ["no salt", "other salt", "no tenant", "other tenant", "not loaded", "not saved"])
def test_no_hit_across(second: Report, question: str) -> None:
    assert second["llama"].cached(question) == [0, 0]


@pytest.mark.parametrize("question", ["salt", "tenant", "tenant of lmcache", "lab"])
def test_hit_within(second: Report, question: str) -> None:
    assert second["llama"].cached(question) == [192, 192]


def test_salt_and_tenant_change_no_token(first: Report, second: Report) -> None:
    asked = second["llama"]
    assert first["llama"].tokens("salted") == asked.tokens("salt") == asked.tokens("no salt") == asked.tokens("other salt")
    assert first["llama"].tokens("tenant") == asked.tokens("tenant") == asked.tokens("no tenant")


def test_blocks_belong_to_their_tenants(first: Report, daemon: DaemonProcess) -> None:
    """A and the adapter's blocks are the connector's own tenant's; B and C were billed to others, E to nobody."""
    counted = Counter(block.tenant for block in blocks_of(daemon))
    assert counted["research"] == counted["lab"] == 12
    assert set(counted) == {"house", "research", "lab"}


def test_other_weights_of_the_same_shape_share_nothing(first: Report, second: Report) -> None:
    assert second["other"].cached("other weights") == [0, 0]
    assert second["other"].tokens("other weights") != first["llama"].tokens("salted")


def test_adapters_share_nothing(first: Report, second: Report) -> None:
    asked = second["lora"]
    assert asked.cached("other adapter") == [0, 0]
    assert asked.cached("no adapter") == [0, 0]
    assert asked.cached("adapter") == [192, 192]
    assert asked.tokens("adapter") == first["lora"].tokens("adapter")
    assert asked.tokens("adapter") != asked.tokens("other adapter") != asked.tokens("no adapter")


def test_replicas_find_what_the_other_computed_meanwhile(
    models: Path, daemons: Daemons, engines: Engines, baseline: Baseline
) -> None:
    """Two processes of one model at the same time on one daemon, in turns."""
    daemon = daemons()
    llm = llm_arguments(models / "llama", transfer_config(daemon.address))
    steps = [generate("A", A), settle(daemon, blocks=12), barrier("A"), generate("B", B)]
    one = engines.start([engine("one", llm, *steps)])
    one.wait_for("A")
    steps = [generate("A", A), generate("B", B), settle(daemon, blocks=24), barrier("B")]
    two = engines.start([engine("two", llm, *steps)])
    two.wait_for("B")
    one.go()
    ended = one.finish().only
    two.go()
    other = two.finish().only
    expected = baseline(llm, A + B, MAX_TOKENS)
    assert ended.tokens("A") + ended.tokens("B") == expected
    assert other.tokens("A") + other.tokens("B") == expected
    assert (ended.cached("A"), other.cached("A"), other.cached("B"), ended.cached("B")) == ([0, 0], [192, 192], [0, 0], [192, 192])


def test_reset_forgets_what_was_saved(models: Path, daemons: Daemons, engines: Engines) -> None:
    """As after new weights were put in: what this engine saved before is not found any more, what it saves now is."""
    daemon = daemons()
    steps = [
        generate("save", A),
        settle(daemon, blocks=12),
        {"do": "reset_connector", "name": "reset"},
        generate("after", A),
        settle(daemon, "settle again", blocks=24),
        FORGET,
        generate("again", A),
    ]
    llm = llm_arguments(models / "llama", transfer_config(daemon.address))
    done = engines.run([engine("engine", llm, *steps)]).only
    assert done.results["reset"] is True
    assert done.cached("after") == [0, 0]
    assert done.cached("again") == [192, 192]
    assert done.tokens("save") == done.tokens("after") == done.tokens("again")
