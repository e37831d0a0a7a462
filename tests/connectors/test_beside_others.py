"""Goal: inside vLLM's ``MultiConnector``, nothing is published of blocks that another connector has only promised to fill.

Method: vLLM's own ``MultiConnector`` and scheduler, a real daemon, and beside kvtierd a connector that promises prefixes which it
never loads. A fresh engine then loads what was published, and each token of it is compared with what it has to be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, ClassVar

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorWorkerMetadata

from kvtierd.connectors.vllm import register
from kvtierd.connectors.vllm.connector import KvtierdConnector
from kvtierd.connectors.vllm.doubt import Doubts
from kvtierd.testing.daemon import DaemonProcess
from tests.connectors.engine_cases import Engines, fresh, right
from tests.connectors.parts import request, state
from tests.connectors.small_engine import BLOCK, CHUNK, RequestStatus, SmallEngine

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("nothing_is_left_open")]


class Nothing(KVConnectorMetadata):
    """Of the other connector."""


class Other(KVConnectorBase_V1, SupportsHMA):
    """Promises the first tokens of requests by name."""

    promises: ClassVar[dict[str, tuple[int, bool]]] = {}
    """Tokens, and whether they come in the background."""
    failed: ClassVar[set[int]] = set()
    """Blocks that it tells vLLM that it has not filled."""

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens, background = Other.promises.get(request.request_id, (0, False))
        return max(0, tokens - num_computed_tokens), background and tokens > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and not Other.promises[request.request_id][1]:
            Other.failed |= set(blocks.get_block_ids()[0][: Other.promises[request.request_id][0] // BLOCK])

    def build_connector_meta(self, scheduler_output: Any) -> Nothing:
        return Nothing()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


class Inside(KvtierdConnector):
    """kvtierd's part of a worker, given messages as ``MultiConnector`` hands them on, and reporting for the other as well."""

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata.metadata[1])

    def build_connector_worker_meta(self) -> Any:
        own = super().build_connector_worker_meta()
        return None if own is None else MultiKVConnectorWorkerMetadata((None, own))

    def get_kv_connector_stats(self) -> None:
        return None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, Other.failed = Other.failed, set()
        return super().get_block_ids_with_load_errors() | failed


class TwoConnectors(SmallEngine):
    """An engine with the other connector in front of kvtierd."""

    connector_class = Inside

    @staticmethod
    def transfer(extra: dict[str, Any], policy: str) -> KVTransferConfig:
        children = [
            {"kv_connector": "Other", "kv_role": "kv_both"},
            {"kv_connector": "KvtierdConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra},
        ]
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"connectors": children},
        )

    @staticmethod
    def own_connector(connector: Any) -> Any:
        return connector._connectors[1]


@pytest.fixture
def beside(
    tmp_path: Any, model_folder: Any, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., TwoConnectors]]:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    register()
    module = ModuleType("tests_other_connector")
    module.Other = Other  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    KVConnectorFactory.register_connector("Other", module.__name__, "Other")
    monkeypatch.setattr(Other, "promises", {})
    monkeypatch.setattr(Other, "failed", set())
    made: list[TwoConnectors] = []

    def make(**more: Any) -> TwoConnectors:
        made.append(TwoConnectors(model_folder, daemon.address, **more))
        side = made[-1].side
        if side._pools is None:  # an older MultiConnector hands on no layouts
            side.learn({(0, rank.number): rank.connector._worker.rank_layout for rank in made[-1].ranks})
        assert all(client.wait_attached(30) for client in side._pools.clients)
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def nothing_wrong_was_published(engines: Engines, tokens: list[int]) -> int:
    """Tokens that a fresh engine has loaded, all of them right."""
    other = engines()
    other.generate("victim", tokens, 5)
    right(other, "victim")
    return 300 - (other.computed["victim"] - 4)


def test_a_client_goes_away_while_another_connector_loads(beside: Callable[..., TwoConnectors], engines: Engines) -> None:
    tokens = fresh(300)
    engine = beside()
    Other.promises["gone"] = 256, True
    engine.add("gone", tokens)
    engine.until(lambda: engine.requests["gone"].status == RequestStatus.WAITING_FOR_REMOTE_KVS)
    engine.abort("gone")
    for _ in range(20):
        engine.step()
    engine.until(lambda: not engine.side.pending)
    assert nothing_wrong_was_published(engines, tokens) == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_another_connector_fails_within_a_step(
    asynchronous: bool, shared: bool, beside: Callable[..., TwoConnectors], engines: Engines
) -> None:
    """Its blocks are computed anew, over several steps, and so are those of a request that shares them."""
    tokens = fresh(900)
    engine = beside(budget=64 if not shared else 192, asynchronous=asynchronous, blocks=128)
    Other.promises["fails"] = 256, False
    engine.add("fails", tokens)
    if shared:
        engine.add("shares", tokens[:800] + fresh(100))
    engine.until(lambda: engine.computed["fails"] > 0)
    assert engine.wrong, "what attention has read in this step was never there"
    assert engine.side._saves.held == 0
    Other.promises.clear()
    engine.run()
    engine.until(lambda: not engine.side.pending)
    engine.wrong.clear()
    assert nothing_wrong_was_published(engines, tokens[:300]) == 256, "all of it was saved once it was computed"


# ---- the rule alone


def test_doubts() -> None:
    doubts = Doubts(3)
    plain, loaded, sharing, later = (state(request(name)) for name in ("plain", "loaded", "sharing", "later"))
    loaded.local_tokens = sharing.local_tokens = later.local_tokens = CHUNK
    doubts.step([(plain, 0), (sharing, CHUNK), (loaded, 2 * CHUNK)])
    assert [doubts.trusts(s) for s in (plain, sharing, loaded)] == [True, False, False]
    doubts.step([(later, CHUNK)])
    doubts.step([])
    assert [doubts.trusts(s) for s in (later, loaded)] == [False, False]
    loaded.request.status = RequestStatus.FINISHED_ABORTED
    assert not doubts.trusts_ended(loaded)
    loaded.request.status = RequestStatus.FINISHED_STOPPED
    assert doubts.trusts_ended(loaded)
    doubts.step([(own := state(request("own")), 0)])
    own.local_tokens = CHUNK
    assert [doubts.trusts(s) for s in (plain, sharing, loaded, later, own)] == [True] * 5
    doubts.step([(own, CHUNK)])
    assert doubts.trusts(own), "the engine's own blocks"
