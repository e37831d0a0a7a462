"""Goal: a block with a life is gone when that is over, on every tier, in a running daemon and in one that starts later.

Method: real daemons and clients. Lives that must end in a test are short and waited for; those that must not are long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvtierd.client import AsyncClient, Client
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.v1 import admin_pb2 as admin
from kvtierd.v1 import kvtier_pb2 as pb
from tests.daemon.conftest import namespace
from tests.daemon.test_restart import SIZE, content, load_all
from tests.daemon.test_roundtrip import to_nvme_only

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
SHORT_S, LONG_S = 1.0, 600.0
GIVE_UP_S = 30.0


def some_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def save(client: Client, keys: list[bytes], ttl_s: float | None) -> None:
    result = client.save(keys, [content(k) for k in keys], wait_s=10, ttl_s=ttl_s)
    assert result.saved + result.held == len(keys), result


def until_gone(client: Client, keys: list[bytes]) -> None:
    until_s = time.monotonic() + GIVE_UP_S
    while client.lookup(keys, each=True).held:
        assert time.monotonic() < until_s
        time.sleep(0.05)


def ends(daemon: DaemonProcess) -> dict[bytes, float | None]:
    """Seconds until each block expires."""
    with daemon.admin() as stub:
        blocks = stub.ListBlocks(admin.ListBlocksRequest(page_size=1000)).blocks
    return {b.key: b.expires_in_s if b.HasField("expires_in_s") else None for b in blocks}


@pytest.mark.parametrize("below", [False, True])
def test_a_block_expires_and_its_story_says_so(make_daemon: MakeDaemon, make_client: MakeClient, below: bool) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE)
    mortal, long, forever = some_keys(3)
    save(client, [forever], None)
    save(client, [long], LONG_S)
    save(client, [mortal], SHORT_S)
    if below:
        to_nvme_only(daemon)
    until_gone(client, [mortal])
    assert load_all(client, [mortal, long, forever]) == {1, 2}
    assert client.prefetch([mortal], 1.0).held == 0
    found = ends(daemon)
    assert found[forever] is None and 0 < (found[long] or 0) <= LONG_S
    until_s = time.monotonic() + GIVE_UP_S
    with daemon.admin() as stub:
        while stub.GetStory(admin.GetStoryRequest(key=mortal)).events[-1].why != "expired":
            assert time.monotonic() < until_s, "a miss at once, forgotten by the next tick"
    save(client, [mortal], None)
    assert load_all(client, [mortal]) == {0}


@pytest.mark.parametrize("clean", [False, True])
def test_a_life_goes_on_over_a_restart(make_daemon: MakeDaemon, make_client: MakeClient, clean: bool) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE)
    mortal, long, forever, later, saved_again = groups = [some_keys(2) for _ in range(5)]
    for keys, ttl_s in zip(groups, (2 * SHORT_S, LONG_S, None, LONG_S / 4, LONG_S), strict=True):
        save(client, keys, ttl_s)
    over_s = time.time() + 2 * SHORT_S
    save(client, later, LONG_S)
    to_nvme_only(daemon)
    save(client, saved_again, None)
    client.evict(some_keys(1))  # brings what waits into the journal
    client.close()
    if clean:
        assert daemon.stop() == 0
    else:
        daemon.kill()
    time.sleep(max(over_s - time.time(), 0.0) + 0.05)
    daemon.start()
    client = make_client(daemon, SIZE)
    assert client.lookup(mortal, each=True).held == 0
    kept = long + forever + later + saved_again
    assert load_all(client, mortal + kept) == set(range(2, 10))
    found = ends(daemon)
    assert found.keys() == set(kept)
    assert all(found[k] is None for k in forever + saved_again)
    assert all(LONG_S / 2 < (found[k] or 0) <= LONG_S for k in long + later)
    save(client, mortal, SHORT_S)
    until_gone(client, mortal)


def test_a_daemon_that_starts_before_the_end_keeps_to_it(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE)
    keys = some_keys(4)
    save(client, keys, 4.0)
    client.close()
    assert daemon.stop() == 0
    daemon.start()
    until_gone(make_client(daemon, SIZE), keys)


@pytest.mark.parametrize("way", ["save", "reserve", "save_bytes", "bytes_only"])
def test_every_way_to_save_takes_a_life(make_daemon: MakeDaemon, make_client: MakeClient, way: str) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE, bytes_only=way == "bytes_only")
    keys = some_keys(2)
    for ttl_s in (LONG_S, LONG_S / 2):  # the second is held, and shortens nothing
        if way == "reserve":
            with client.reserve(keys, ttl_s=ttl_s) as r:
                for index in r.granted:
                    r.views(index)[0][:] = content(keys[index]).tobytes()
                r.commit()
        else:
            call = client.save_bytes if way == "save_bytes" else client.save
            assert call(keys, [content(k) for k in keys], ttl_s=ttl_s).rejected == {}
        assert all(LONG_S / 2 < (end or 0) <= LONG_S for end in ends(daemon).values())
    assert len(ends(daemon)) == 2


async def test_the_asyncio_client_takes_a_life(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    async with AsyncClient(namespace(SIZE), daemon.address, require=True, timeout_s=20.0) as client:
        one, two, three = ([k] for k in some_keys(3))
        await client.save(one, [content(one[0])], ttl_s=LONG_S)
        await client.save_bytes(two, [content(two[0])], ttl_s=LONG_S)
        async with await client.reserve(three, ttl_s=LONG_S) as r:
            await r.commit()
        assert all(end is not None for end in ends(daemon).values())
        assert await client.evict(one + two + three, tenant="nobody") == 0
        assert await client.evict(one + two + three) == 3


def test_a_pinned_block_expires_and_its_memory_stays(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    daemon = make_daemon()
    client = make_client(daemon, SIZE)
    keys = some_keys(1)
    save(client, keys, 3 * SHORT_S)
    pin = client.pin(keys, 600.0)
    assert pin.pinned == 1
    with client.fetch(keys) as fetched:
        views = dict(fetched)
        until_gone(client, keys)
        assert np.array_equal(np.frombuffer(views[0][0], np.uint8), content(keys[0])), "who has it may finish"
        assert fetched.intact
    assert daemon.status().tiers[0].used_bytes == SIZE
    until_s = time.monotonic() + GIVE_UP_S
    with daemon.admin() as stub:
        while [(p.tier, p.evicted) for p in stub.ListPins(admin.ListPinsRequest()).pins] != [(pb.TIER_CPU, True)]:
            assert time.monotonic() < until_s
    assert pin.unpin()
    assert daemon.status().tiers[0].used_bytes == 0
