"""The ways of running an engine in one process that the tests go through, each with and without kvtierd."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.vllm.runner import MODULE, instruction_sets, llm_arguments, prompts, transfer_config, vllm_version


@dataclass(frozen=True)
class Case:
    """One way of running an engine.

    Attributes:
        model: architecture.
        llm: arguments of ``vllm.LLM`` besides the common ones.
        settings: connector keys without their prefix.
        prompts: what is asked.
        max_tokens: generated for each prompt.
        at_once: all prompts together instead of one after the other.
        held: prompt tokens that a fresh engine must find for each prompt; None where that depends on the schedule.
        since: oldest vLLM that the case is run with. Older ones cannot recover a failed load of several KV cache groups, so that
            the connector keeps nothing there, and have no latent attention on CPUs.
        needs: what the processor must have one of. vLLM refuses fp8 without; its latent attention without tiles takes no prefix
            from a cache, and gives other tokens for a prompt that is cut elsewhere.
        connector: "module" (by module path), "name" (through the entry point) or "multi" (the second of a MultiConnector).
    """

    model: str = "llama"
    llm: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    prompts: list[dict[str, Any]] = field(default_factory=prompts)
    max_tokens: int = 16
    at_once: bool = False
    held: int | None = 192
    since: tuple[int, int] = (0, 23)
    needs: frozenset[str] = frozenset()
    connector: str = "module"

    def generate(self, name: str, wanted: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The step that asks."""
        asked = self.prompts if wanted is None else wanted
        return {"do": "generate", "name": name, "prompts": asked, "one_by_one": not self.at_once, "max_tokens": self.max_tokens}

    def arguments(self, models: Path, address: str = "", folder: Path | None = None) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``; without an address no connector."""
        transfer = self._transfer(address, folder) if address else None
        return llm_arguments(models / self.model, transfer, **self.llm)

    def _transfer(self, address: str, folder: Path | None) -> dict[str, Any]:
        ours = transfer_config(address, module=MODULE if self.connector == "module" else None, **self.settings)
        if self.connector != "multi":
            return ours
        assert folder is not None
        # The other one saves files and is asked last, so that all hits come from the first.
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
        }
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours, other]},
        }


EVERY = {
    "llama": Case(),
    "bfloat16": Case(llm={"dtype": "bfloat16"}),
    "fp8": Case(llm={"kv_cache_dtype": "fp8"}, needs=frozenset({"avx512", "tiles"})),
    "qwen3": Case("qwen3"),
    "gemma3": Case("gemma3", prompts=prompts(2, 300, 192), held=288, since=(0, 32)),
    "bloom": Case("bloom"),
    "latent": Case("deepseek", llm={"dtype": "bfloat16"}, since=(0, 32), needs=frozenset({"tiles"})),
    "chunked_prefill": Case(llm={"max_num_batched_tokens": 128}, prompts=prompts(2, 900, 512, seed=11), held=896),
    "preempted": Case(
        llm={"num_gpu_blocks_override": 24, "max_model_len": 512},
        prompts=prompts(6, 200, 0, seed=13),
        max_tokens=60,
        at_once=True,
        held=None,
    ),
    "automatic_chunks": Case(settings={"chunk_tokens": 0}, prompts=prompts(2, 600, 512, seed=17), held=512),
    "several_blocks": Case(settings={"chunk_tokens": 96}, prompts=prompts(2, 330, 200, seed=19), held=288),
    "by_name": Case(connector="name", prompts=prompts(seed=23)),
    "multi_connector": Case(connector="multi", prompts=prompts(seed=29)),
}

CASES = {
    name: case
    for name, case in EVERY.items()
    if case.since <= vllm_version() and (not case.needs or case.needs & instruction_sets())
}
"""Those that the installed vLLM is run with on this processor."""
