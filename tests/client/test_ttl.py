"""Goal: a life of blocks reaches the daemon in every call that saves, and one that cannot be is refused before anything is sent.

Method: the fake daemon's requests are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvtierd.client import AsyncClient, Client
from kvtierd.client.saving import wire_ttl_ms
from kvtierd.model import MAX_TTL_S
from kvtierd.v1 import kvtier_pb2 as pb
from tests.client.conftest import NAMESPACE, some_blocks, some_keys
from tests.client.fake_daemon import FakeDaemon

BAD = [0, 0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf"), MAX_TTL_S * 1.001, 1e300]


@pytest.fixture
def sent(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """``ttl_ms`` of each Save that the daemon got."""
    seen: list[int] = []
    real = daemon._on_save

    def on_save(session: Any, request: pb.SaveRequest, reply: Any) -> None:
        seen.append(request.ttl_ms)
        real(session, request, reply)

    monkeypatch.setattr(daemon, "_on_save", on_save)
    return seen


def test_the_wire_has_whole_milliseconds_and_never_none_for_some() -> None:
    assert [wire_ttl_ms(s) for s in (None, 1e-9, 0.001, 0.0011, 2, MAX_TTL_S)] == [0, 1, 1, 2, 2000, int(MAX_TTL_S * 1000)]


@pytest.mark.parametrize("ttl_s", BAD)
def test_a_life_that_cannot_be_is_refused(client: Client, sent: list[int], ttl_s: float) -> None:
    keys, blocks = some_keys(1), some_blocks(1)
    for call in (
        lambda: client.save(keys, blocks, ttl_s=ttl_s),
        lambda: client.save_bytes(keys, blocks, ttl_s=ttl_s),
        lambda: client.reserve(keys, ttl_s=ttl_s),
    ):
        with pytest.raises(ValueError, match="ttl_s must be above 0 and at most 315360000 seconds"):
            call()
    assert sent == []
    assert client.lookup(keys).held == 0


def test_a_life_is_sent(client: Client, sent: list[int]) -> None:
    keys, blocks = some_keys(2), some_blocks(2)
    client.save(keys[:1], blocks[:1])
    client.save(keys[:1], blocks[:1], ttl_s=1.5)
    client.reserve(keys[1:], ttl_s=60).close()
    assert sent == [0, 1500, 60_000]


def test_every_part_of_a_large_save_has_the_life(daemon: FakeDaemon, connect: Callable[..., Client], sent: list[int]) -> None:
    daemon.limits.max_keys = 2
    client = connect()
    assert client.save(some_keys(5), some_blocks(5), ttl_s=3).saved == 5
    assert sent == [3000, 3000, 3000]


async def test_the_asyncio_client_refuses_it_too(daemon: FakeDaemon, sent: list[int]) -> None:
    async with AsyncClient(NAMESPACE, daemon.address, timeout_s=5, require=True) as client:
        with pytest.raises(ValueError, match="ttl_s"):
            await client.save(some_keys(1), some_blocks(1), ttl_s=-1)
        assert (await client.save(some_keys(1), some_blocks(1), ttl_s=2)).saved == 1
    assert sent == [2000]


def test_evict_acts_for_the_tenant_that_is_named(client: Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants: list[str] = []
    real = daemon._on_evict

    def on_evict(session: Any, request: pb.EvictRequest, reply: Any) -> None:
        tenants.append(request.tenant)
        real(session, request, reply)

    monkeypatch.setattr(daemon, "_on_evict", on_evict)
    client.evict(some_keys(1), tenant="acme")
    client.evict()
    assert tenants == ["acme", ""]
