"""A worker of vLLM for CPUs whose pipeline stages run without compilation, for tests."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class StageWorker(CPUWorker):
    """vLLM makes a later stage's input buffers in its warm-up, which it leaves out where nothing is compiled: made here instead."""

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's, and make the buffers."""
        runner: Any = self.model_runner
        if runner.intermediate_tensors is None and self.parallel_config.pipeline_parallel_size > 1:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return super().compile_or_warm_up_model()
