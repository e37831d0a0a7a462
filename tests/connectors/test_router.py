"""Goal: a router that knows an engine's block hashes finds them in the daemon's KV events, by the rules of docs/observability.md.

Method: vLLM's own scheduler saves into a daemon that publishes; what a subscriber is told of is worked out from the hashes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from blake3 import blake3
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.engine_cases import Engines, fresh, right
from tests.connectors.small_engine import BLOCK, CHUNK, NEW
from tests.service.subscriber import Subscriber

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("nothing_is_left_open"),
    pytest.mark.skipif(not NEW, reason="this vLLM's hashes change with every process, so the connector does not use them"),
]


@pytest.fixture
def publishing(tmp_path: Path) -> Iterator[DaemonProcess]:
    events = {"endpoint": f"ipc://{tmp_path}/e.sock", "replay_endpoint": f"ipc://{tmp_path}/r.sock"}
    made = DaemonProcess(tmp_path / "d", {"events": events})
    try:
        yield made.start()
    finally:
        made.kill()


@pytest.fixture
def router(publishing: DaemonProcess, tmp_path: Path) -> Iterator[Subscriber]:
    made = Subscriber(f"ipc://{tmp_path}/e.sock", f"ipc://{tmp_path}/r.sock")
    yield made
    made.close()


@pytest.mark.parametrize("groups", [1, 2])
def test_keys_follow_from_the_engines_hashes(groups: int, engines: Engines, publishing: DaemonProcess, router: Subscriber) -> None:
    engine = engines(publishing.address, groups=groups)
    tokens = fresh()
    engine.generate("r", tokens)
    right(engine, "r")
    last_of_chunk = [bytes(h) for h in engine.requests["r"].block_hashes[CHUNK // BLOCK - 1 :: CHUNK // BLOCK]]
    last_of_chunk = last_of_chunk[: len(tokens) // CHUNK]
    if groups == 1:
        wanted = set(last_of_chunk)
        assert {int.from_bytes(key[-8:], "big") for key in wanted} == {maybe_convert_block_hash(h) for h in last_of_chunk}
    else:
        tails = [b"kvtierd.vllm.v1\0" + group.to_bytes(2, "little") for group in range(groups)]
        wanted = {blake3(h + tail).digest() for h in last_of_chunk for tail in tails}
    stored = []
    until_s = time.monotonic() + 20
    while router.held.get("CPU") != wanted and time.monotonic() < until_s:
        stored += router.ask(router.numbers[-1] + 1 if router.numbers else 0)
        time.sleep(0.05)
    assert router.held["CPU"] == wanted
    assert {event.block_size for event in stored if hasattr(event, "block_size")} == {CHUNK}
