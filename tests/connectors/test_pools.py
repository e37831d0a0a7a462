"""Goal: an engine whose ranks cannot share memory with one daemon is refused with the reason, before anything is promised.

Method: layouts of ranks as workers tell them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.async_scheduler", reason="vLLM is not installed here: run make test-vllm")

from kvtierd.client import BreakerState
from kvtierd.connectors.vllm import pools
from kvtierd.connectors.vllm.layout import UnsupportedLayoutError
from kvtierd.connectors.vllm.metadata import RankLayout
from kvtierd.connectors.vllm.pools import Pools
from kvtierd.connectors.vllm.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports


def test_ranks_of_several_hosts_are_refused() -> None:
    layouts = {(0, 0): RankLayout((), host=pools.host_identity()), (0, 1): RankLayout((), host="faraway 123")}
    with pytest.raises(UnsupportedLayoutError, match=r"rank \(0, 1\) runs on the host faraway .* keep tensor"):
        Pools(SimpleNamespace(), layouts, Settings(), "e")


def test_clients_show_the_token_of_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    plan = SimpleNamespace(namespaces=[object(), object()])
    monkeypatch.setattr(pools, "resolve_hashing", lambda _config: ("sha256", True))
    monkeypatch.setattr(pools, "engine_plan", lambda *_: plan)
    monkeypatch.setattr(pools, "Client", lambda *_, **options: made.append(options))
    config = SimpleNamespace(model_config=SimpleNamespace(model="m"), device_config=SimpleNamespace(device_type="cpu"))
    for text, shown in ((str(tmp_path / "t"), str(tmp_path / "t")), ("", None)):
        made.clear()
        Pools(config, {}, Settings(token_file=text), "e")
        assert [options["token_file"] for options in made] == [shown, shown], "None: the variable's"


CONTAINER = f"another-container {pools.host_identity().partition(' ')[2]}"


@pytest.mark.parametrize("host", ["", pools.host_identity(), CONTAINER])
def test_ranks_of_this_host_are_not(host: str) -> None:
    pools._check_hosts({(0, 0): RankLayout((), host=host)})


def test_the_worst_breaker_counts() -> None:
    made: Any = Pools.__new__(Pools)
    made.clients = [SimpleNamespace(status=SimpleNamespace(breaker=state)) for state in (BreakerState.CLOSED, BreakerState.OPEN)]
    assert made.breaker == 2
    made.clients[1].status.breaker = BreakerState.HALF_OPEN
    assert made.breaker == 1
    made.clients.pop()
    assert made.breaker == 0
