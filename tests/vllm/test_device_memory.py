"""Goal: an engine whose blocks are kept in GPU memory gives the tokens that it gives without, whatever becomes of that memory.

Method: a daemon and real engines over a stand-in for the CUDA driver (``kvtierd.testing.cuda``); the daemon dies, and GPU memory is
refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.testing.cuda import FakeGpus
from kvtierd.testing.daemon import DaemonProcess
from tests.vllm.conftest import Daemons, Engines
from tests.vllm.runner import llm_arguments, prompts, transfer_config
from tests.vllm.steps import FORGET, MAX_TOKENS, Baseline, barrier, engine, generate, settle

MODULE = {"name": "DeviceConnector", "module": "tests.vllm.device_connector"}
HBM = {"capacity": "64MiB", "ttl": "never"}


@pytest.fixture
def gpus(tmp_path: Path) -> FakeGpus:
    return FakeGpus(tmp_path / "gpu")


def made(daemons: Daemons, gpus: FakeGpus) -> DaemonProcess:
    daemon = daemons(start=False, hbm=HBM)
    daemon.environment = gpus.environment()
    return daemon.start()


def test_gpu_memory_comes_and_goes(models: Path, daemons: Daemons, engines: Engines, baseline: Baseline, gpus: FakeGpus) -> None:
    daemon = made(daemons, gpus)
    warm, asked = prompts(1, 100, 0, seed=5), prompts(3, 200, 0, seed=71)
    llm = llm_arguments(models / "llama", transfer_config(daemon.address, **MODULE))
    steps = [
        generate("warm", warm),  # from then on the worker has joined
        settle(daemon),
        generate("save", asked),
        settle(daemon, "saved", blocks=21),
        FORGET,
        generate("load", asked),
        barrier("refuse"),
    ]
    refused = [generate("load", asked), barrier("kill"), FORGET, generate("alone", asked)]
    process = engines.start([engine("one", llm, *steps), engine("two", llm, *refused)], environment=gpus.environment())
    process.wait_for("refuse")
    gpus.fail("cuIpcOpenMemHandle_v2")
    process.go()
    process.wait_for("kill")
    assert "cuIpcOpenMemHandle_v2" in daemon.status().sessions[0].no_device
    daemon.kill()
    process.go()
    report = process.finish()
    plain = baseline(llm, asked, MAX_TOKENS)
    one, two = report["one"], report["two"]
    assert [one.tokens("save"), one.tokens("load"), two.tokens("load"), two.tokens("alone")] == [plain] * 4
    assert one.cached("load") == two.cached("load") == [192] * 3
    assert one.metric("load", "vllm:kvtierd_hit_tokens{tier=hbm}") == 3 * 192
    assert two.metric("load", "vllm:kvtierd_hit_tokens{tier=cpu}") >= 3 * 192, "the first engine's end has brought them down"
