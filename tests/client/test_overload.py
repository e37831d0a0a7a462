"""Goal: a call that an overloaded daemon refuses waits as long as it was told and is made again, within its deadline and no longer.
Method: the fake daemon refuses the first calls of each kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvtierd.client import AsyncClient, BreakerState, Client, Reason
from kvtierd.client.deadline import Deadline
from kvtierd.client.transport import RETRY_SPREAD, pause_s
from kvtierd.errors import RequestError
from tests.client.conftest import NAMESPACE, empty_blocks, equal, some_blocks, some_keys
from tests.client.fake_daemon import FakeDaemon

Connect = Callable[..., Client]
KEYS, BLOCKS = some_keys(2), some_blocks(2)
AN_HOUR_MS = 3_600_000


def fetched(client: Client) -> list[Any]:
    with client.fetch(KEYS) as fetch:
        return [bytes(views[0]) for _, views in fetch]


def reserved(client: Client) -> list[int]:
    with client.reserve(some_keys(2, first=5)) as reservation:
        return reservation.granted


def loaded(client: Client) -> bool:
    targets = empty_blocks(2)
    return client.load(KEYS, targets).loaded == 2 and equal(targets, BLOCKS)


def prefetched(client: Client) -> int:
    prefetch = client.prefetch(KEYS, 1)
    prefetch.cancel()
    return prefetch.held


CALLS: dict[str, tuple[Callable[[Client], Any], Any]] = {
    "lookup": (lambda c: c.lookup(KEYS).held, 2),
    "save": (lambda c: c.save(some_keys(2, first=9), BLOCKS).saved, 2),
    "load": (loaded, True),
    "prefetch": (prefetched, 2),
    "pin": (lambda c: c.pin(KEYS, 1).pinned, 2),
    "save_bytes": (lambda c: c.save_bytes(some_keys(2, first=9), BLOCKS).saved, 2),
    "load_bytes": (lambda c: c.load_bytes(KEYS).loaded, 2),
    "load in place": (fetched, [b.tobytes() for b in BLOCKS]),
    "save in place": (reserved, [0, 1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_calls_are_made_again(connect: Connect, daemon: FakeDaemon, name: str) -> None:
    client, (call, wanted) = connect(), CALLS[name]
    kind = name.split()[0]
    assert client.save(KEYS, BLOCKS).saved == 2
    before = daemon.calls[kind]
    daemon.overloads[kind] = 2
    assert call(client) == wanted
    assert daemon.calls[kind] == before + 3
    assert client.status.breaker is BreakerState.CLOSED


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("patient", [True, False])
def test_who_is_told_to_wait_beyond_his_deadline_or_does_not_wait_is_answered_at_once(
    connect: Connect, daemon: FakeDaemon, name: str, patient: bool
) -> None:
    client, (call, wanted) = connect(patient=patient, timeout_s=600.0), CALLS[name]
    kind = name.split()[0]
    client.save(KEYS, BLOCKS)
    before = daemon.calls[kind]
    daemon.overloads[kind] = 1
    daemon.retry_after_ms = AN_HOUR_MS if patient else 1
    assert call(client) != wanted
    assert daemon.calls[kind] == before + 1
    assert client.status.breaker is BreakerState.CLOSED


def test_looking_does_not_wait(connect: Connect, daemon: FakeDaemon) -> None:
    client = connect(timeout_s=600.0)
    client.save(KEYS, BLOCKS)
    daemon.overloads["load"] = 1
    with client.fetch(KEYS) as fetch:
        assert fetch.poll(60.0) == []
        assert (fetch.done, fetch.reason) == (True, Reason.OVERLOADED)
    assert daemon.calls["load"] == 1


async def test_a_call_that_waits_can_be_cancelled(daemon: FakeDaemon) -> None:
    async with AsyncClient(NAMESPACE, daemon.address, timeout_s=2 * AN_HOUR_MS / 1000) as client:
        assert await client.wait_attached(5.0)
        assert (await client.save(KEYS, BLOCKS)).saved == 2
        daemon.overloads["load"] = 1
        assert (await client.load(KEYS, empty_blocks(2))).loaded == 2
        assert daemon.calls["load"] == 2
        daemon.overloads["load"], daemon.retry_after_ms = 1, AN_HOUR_MS
        call = asyncio.ensure_future(client.load(KEYS, empty_blocks(2)))
        await asyncio.to_thread(daemon.until, lambda: daemon.calls["load"] == 3)
        await asyncio.sleep(0.05)
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert daemon.calls["load"] == 3


def test_pauses_are_spread_and_end_before_the_deadline() -> None:
    refusal = RequestError(Reason.OVERLOADED, "", retry_after_s=1.0)
    pauses = [pause_s(refusal, Deadline(10.0)) for _ in range(100)]
    assert 1.0 <= min(pauses) < max(pauses) < 1.0 + RETRY_SPREAD
    assert all(1.0 <= pause_s(refusal, Deadline(1.2)) < 1.2 for _ in range(100))
    assert pause_s(refusal, Deadline(0.9)) == 0.0
    assert pause_s(RequestError(Reason.LIMIT, ""), Deadline(10.0)) == 0.0, "who is not told when does not try again"
