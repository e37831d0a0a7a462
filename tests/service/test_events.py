"""Goal: a router follows what the daemon holds by the KV events alone, loses nothing without seeing it, and slows nobody.

Method: the real publisher on real sockets, with subscribers that decode with vLLM's own structs; the changes are made up.
"""

from __future__ import annotations

import asyncio
import socket
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import zmq
from prometheus_client import CollectorRegistry

from kvtierd.config import Config, EventsConfig, load_config
from kvtierd.core.realm import Realm
from kvtierd.core.settings import CoreConfig
from kvtierd.core.stats import Change
from kvtierd.core.tier_core import TierCore
from kvtierd.errors import ConfigError, StartupError
from kvtierd.model import Namespace, Tier
from kvtierd.runtime.wallclock import WallClock
from kvtierd.service import event_publisher
from kvtierd.service.event_publisher import EventPublisher
from kvtierd.service.events import MAX_KEYS
from kvtierd.service.metrics import Metrics
from tests.service.subscriber import WAIT_MS, AllBlocksCleared, BlockRemoved, BlockStored, Subscriber

CLOCK = WallClock(time.monotonic)
SPACE = Namespace(shard_bytes=(4096,), model="m", block_tokens=256)


def keys(*numbers: int) -> list[bytes]:
    return [n.to_bytes(32, "big") for n in numbers]


@pytest.fixture
def realm() -> Realm:
    core = TierCore(CoreConfig(capacity_bytes=(0, 1 << 20, 1 << 20), extent_bytes=(4096, 4096, 8192)))
    return core.open_realm("t", SPACE)[0]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


Make = Callable[..., EventPublisher]


@pytest.fixture
async def make(tmp_path: Path, metrics: Metrics) -> AsyncIterator[Make]:
    made: list[EventPublisher] = []

    def make(**options: object) -> EventPublisher:
        config = EventsConfig(
            endpoint=f"ipc://{tmp_path}/e.sock", replay_endpoint=f"ipc://{tmp_path}/r.sock", topic="kv", **options
        )  # type: ignore[arg-type]
        publisher = EventPublisher(config, 0o660, metrics, CLOCK)
        made.append(publisher)
        publisher.open()
        return publisher

    yield make
    for publisher in made:
        await publisher.close()


@pytest.fixture
def subscribe(tmp_path: Path) -> Iterator[Callable[..., Subscriber]]:
    made: list[Subscriber] = []

    def subscribe(**options: int) -> Subscriber:
        subscriber = Subscriber(f"ipc://{tmp_path}/e.sock", f"ipc://{tmp_path}/r.sock", b"kv", **options)
        made.append(subscriber)
        return subscriber

    yield subscribe
    for subscriber in made:
        subscriber.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition did not come true within 20 s")


async def meet(publisher: EventPublisher, subscriber: Subscriber) -> None:
    """Publish until the subscriber, which connects in the background, gets something."""
    for _ in range(2000):
        publisher.publish([])
        publisher._send([{"type": "AllBlocksCleared"}])
        if subscriber.take(5):
            while subscriber.take(20):
                pass
            return
    pytest.fail("the subscriber got nothing")


def change(realm: Realm, tier: Tier, readable: bool, *numbers: int) -> list[Change]:
    return [Change(realm, key, tier, readable) for key in keys(*numbers)]


async def test_a_subscriber_is_told_in_order_with_what_vllm_tells(
    make: Make, subscribe: Callable[..., Subscriber], realm: Realm, metrics: Metrics
) -> None:
    publisher, subscriber = make(), subscribe()
    await meet(publisher, subscriber)
    publisher.publish(
        [
            *change(realm, Tier.CPU, True, 1, 2, 3),
            *change(realm, Tier.NVME, True, 1),
            *change(realm, Tier.CPU, False, 1),
            *change(realm, Tier.CPU, True, 1),
        ]
    )
    stored, down, gone, again = subscriber.take()
    assert stored == BlockStored(keys(1, 2, 3), None, [], 256, None, "CPU", None, locality="LOCAL", ownership="kvtierd")
    assert (type(down), down.medium, down.block_hashes) == (BlockStored, "STORAGE", keys(1))
    assert gone == BlockRemoved(keys(1), "CPU", locality="LOCAL", ownership="kvtierd")
    assert isinstance(again, BlockStored)
    assert subscriber.held == {"CPU": set(keys(1, 2, 3)), "STORAGE": set(keys(1))}
    assert metrics.totals()["kvtierd_kv_events_total"] >= 6
    assert metrics.totals()["kvtierd_kv_event_overflows_total"] == 0


async def test_many_changes_are_cut_into_messages(make: Make, subscribe: Callable[..., Subscriber], realm: Realm) -> None:
    publisher, subscriber = make(), subscribe()
    await meet(publisher, subscriber)
    publisher.publish(change(realm, Tier.CPU, True, *range(2 * MAX_KEYS + 1)))
    assert [len(subscriber.take()[0].block_hashes) for _ in range(3)] == [MAX_KEYS, MAX_KEYS, 1]
    assert subscriber.numbers == list(range(subscriber.numbers[0], subscriber.numbers[-1] + 1))


async def test_what_was_missed_can_be_asked_for(make: Make, subscribe: Callable[..., Subscriber], realm: Realm) -> None:
    publisher = make()
    for n in range(50):
        publisher.publish(change(realm, Tier.CPU, True, n))
    publisher.publish(change(realm, Tier.CPU, False, 7))
    serving = asyncio.create_task(publisher.serve_replays())
    late = subscribe()
    events = await asyncio.to_thread(late.ask, 0)
    assert len(events) == 51
    assert late.held == {"CPU": set(keys(*range(50))) - set(keys(7))}
    assert await asyncio.to_thread(late.ask, late.numbers[-1]) == events[-1:], "from a number on"
    assert await asyncio.to_thread(late.ask, late.numbers[-1] + 5) == [], "from one that has not come yet"
    serving.cancel()


async def test_only_so_much_is_kept_and_what_is_not_shows(make: Make, subscribe: Callable[..., Subscriber], realm: Realm) -> None:
    publisher = make(buffer=20_000)
    for n in range(1000):
        publisher.publish(change(realm, Tier.CPU, True, n))
    assert publisher._past_bytes <= 20_000
    assert publisher._past_bytes == sum(map(len, publisher._past))
    serving = asyncio.create_task(publisher.serve_replays())
    late = subscribe()
    events = await asyncio.to_thread(late.ask, 0)
    assert 10 < len(events) < 200
    assert events[-1].block_hashes == keys(999)
    assert late.numbers[0] > publisher._next_seq - 1000, "the gap"
    serving.cancel()


async def test_a_long_replay_waits_for_its_subscriber_and_for_nobody_else(
    make: Make, subscribe: Callable[..., Subscriber], realm: Realm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More messages than queues take: nothing of the replay is lost though its reader is slow, and others are served meanwhile."""
    monkeypatch.setattr(event_publisher, "QUEUE_MESSAGES", 10)
    monkeypatch.setattr(event_publisher, "POLL_S", 0.001)
    publisher = make()
    for n in range(300):
        publisher.publish(change(realm, Tier.CPU, True, *range(n * MAX_KEYS, (n + 1) * MAX_KEYS)))
    serving = asyncio.create_task(publisher.serve_replays())
    slow, quick = subscribe(), subscribe()
    slow.request(0)
    await until(lambda: len(publisher._replays) == 1)
    assert len(await asyncio.to_thread(quick.ask, publisher._next_seq - 1)) == 1
    assert publisher._replays, "the slow one is not through"
    assert len(await asyncio.to_thread(slow.answer)) == 300
    assert slow.numbers == list(range(publisher._next_seq - 300, publisher._next_seq))
    serving.cancel()


async def test_a_replay_that_nobody_takes_is_dropped(
    make: Make, subscribe: Callable[..., Subscriber], realm: Realm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "QUEUE_MESSAGES", 10)
    publisher = make()
    for n in range(300):
        publisher.publish(change(realm, Tier.CPU, True, *range(n * MAX_KEYS, (n + 1) * MAX_KEYS)))
    serving = asyncio.create_task(publisher.serve_replays())
    stuck = subscribe()
    stuck.request(0)
    stuck.replay.send_multipart((b"no", b"request", b"at", b"all"))
    gone = subscribe()
    gone.request(0)
    await until(lambda: len(publisher._replays) == 2)
    gone.close()
    monkeypatch.setattr(event_publisher, "STUCK_S", 0.2)
    await until(lambda: not publisher._replays)
    assert not serving.done()
    serving.cancel()


async def test_a_request_without_end_is_cut_off(make: Make, subscribe: Callable[..., Subscriber], realm: Realm) -> None:
    """A frame that is too large costs its sender the connection, and nobody else anything."""
    publisher = make()
    publisher.publish(change(realm, Tier.CPU, True, 1))
    serving = asyncio.create_task(publisher.serve_replays())
    rude, other = subscribe(), subscribe()
    cut_off = rude.replay.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    rude.replay.send_multipart((b"", bytes(event_publisher.MAX_REQUEST_BYTES + 1)))
    assert await asyncio.to_thread(cut_off.poll, WAIT_MS)
    rude.replay.disable_monitor()
    cut_off.close(linger=0)
    assert len(await asyncio.to_thread(other.ask, 0)) == 1
    serving.cancel()


async def test_a_slow_subscriber_loses_messages_that_are_counted_and_others_none(
    make: Make, subscribe: Callable[..., Subscriber], realm: Realm, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One subscriber reads nothing until its queues are full; another reads on."""
    monkeypatch.setattr(event_publisher, "QUEUE_MESSAGES", 20)
    publisher, quick, slow = make(), subscribe(), subscribe(rcvhwm=1)
    await meet(publisher, quick)
    await meet(publisher, slow)
    while quick.take(50):
        pass
    quick.numbers.clear()
    first = publisher._next_seq
    for n in range(200):
        publisher.publish(change(realm, Tier.CPU, True, *range(n * MAX_KEYS, (n + 1) * MAX_KEYS)))
        assert quick.take()
    assert metrics.totals()["kvtierd_kv_event_overflows_total"] == 1
    assert quick.numbers == list(range(first, first + 200))
    slow.numbers.clear()
    while slow.take(200):
        pass
    last = slow.numbers[-1]
    assert slow.numbers == list(range(first, last + 1)), "the first ones were in its queue"
    assert last < first + 199
    publisher.publish(change(realm, Tier.CPU, False, 0))
    assert slow.take()
    assert slow.numbers[-1] == first + 200, "the gap shows"
    serving = asyncio.create_task(publisher.serve_replays())
    await asyncio.to_thread(slow.ask, last + 1)
    assert slow.held == {"CPU": set(keys(*range(1, 200 * MAX_KEYS)))}
    serving.cancel()


async def test_a_new_start_begins_with_what_is_held_and_with_higher_numbers(
    make: Make, subscribe: Callable[..., Subscriber], metrics: Metrics
) -> None:
    """A subscriber that lives through a restart asks from the number on that it expects, and is right again."""
    before = make()
    before.publish([])
    await before.close()
    after = make()
    core = TierCore(CoreConfig(capacity_bytes=(0, 1 << 20, 1 << 26), extent_bytes=(4096, 4096, 1 << 26)))
    realm, _ = core.open_realm("t", SPACE)
    core.recover_extent(1, 8192, 4096)
    core.recover_blocks(
        0.0, [(realm.realm_id, key, i + 1, (1 << 32 | i,), float("inf")) for i, key in enumerate(keys(*range(2500)))]
    )
    core.recovered(3000, 2)
    await after.announce(core.state)
    assert core.state.changes == []
    serving = asyncio.create_task(after.serve_replays())
    router = subscribe()
    router.held = {"CPU": set(keys(1, 5000))}
    events = await asyncio.to_thread(router.ask, before._next_seq)
    assert isinstance(events[0], AllBlocksCleared)
    assert router.held == {"STORAGE": set(keys(*range(2500)))}
    assert router.numbers[0] >= before._next_seq
    serving.cancel()


async def test_a_stop_says_that_nothing_is_held(make: Make, subscribe: Callable[..., Subscriber], realm: Realm) -> None:
    publisher, subscriber = make(), subscribe()
    await meet(publisher, subscriber)
    publisher.publish(change(realm, Tier.CPU, True, 1))
    await publisher.close()
    assert isinstance(subscriber.take()[0], BlockStored)
    assert isinstance(subscriber.take()[0], AllBlocksCleared)
    assert subscriber.held == {}


async def test_sockets_have_permissions_and_are_taken_once(make: Make, tmp_path: Path, metrics: Metrics) -> None:
    publisher = make()
    assert stat.S_IMODE((tmp_path / "e.sock").stat().st_mode) == 0o660
    second = EventPublisher(EventsConfig(endpoint=f"ipc://{tmp_path}/e.sock"), 0o600, metrics, CLOCK)
    with pytest.raises(StartupError, match=r"another kvtierd has the socket of KV events .*set events.endpoint to another path"):
        second.open()
    await second.close()
    await publisher.close()
    assert not (tmp_path / "e.sock").exists()


async def test_tcp_on_loopback(metrics: Metrics, realm: Realm) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        publisher = EventPublisher(EventsConfig(endpoint=endpoint), 0o600, metrics, CLOCK)
        with pytest.raises(StartupError, match=rf"cannot listen on {endpoint}: .*; set events.endpoint to another place"):
            publisher.open()
        await publisher.close()
    publisher = EventPublisher(EventsConfig(endpoint=endpoint), 0o600, metrics, CLOCK)
    publisher.open()
    subscriber = Subscriber(endpoint)
    await meet(publisher, subscriber)
    publisher.publish(change(realm, Tier.NVME, True, 1))
    assert subscriber.take()[0].block_hashes == keys(1)
    subscriber.close()
    await publisher.close()


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_without_the_extra_the_start_says_what_to_install(
    missing: str, tmp_path: Path, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    publisher = EventPublisher(EventsConfig(endpoint=f"ipc://{tmp_path}/e.sock"), 0o600, metrics, CLOCK)
    with pytest.raises(StartupError, match=rf'{missing} is not installed; pip install "kvtierd\[events\]", or unset'):
        publisher.open()


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ({"endpoint": "tcp://0.0.0.0:5557"}, "other machines can reach tcp://0.0.0.0:5557; name a loopback address, or set"),
        ({"endpoint": "tcp://*:5557"}, "other machines can reach"),
        ({"endpoint": "ipc:///a", "replay_endpoint": "tcp://10.0.0.1:5558"}, "other machines can reach tcp://10.0.0.1:5558"),
        ({"endpoint": "tcp://localhost:5557"}, "write the IP address to listen on"),
        ({"endpoint": "tcp://127.0.0.1"}, 'write "host:port"'),
        ({"endpoint": "ipc://relative"}, "is no endpoint; write"),
        ({"endpoint": "127.0.0.1:5557"}, "is no endpoint; write"),
        ({"endpoint": ""}, "is no endpoint; write"),
        ({"replay_endpoint": "ipc:///a"}, "no events are published; set events.endpoint too"),
        ({"endpoint": "ipc:///a", "replay_endpoint": "ipc:///a"}, "are the same"),
    ],
)
def test_endpoints_that_cannot_be(events: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(env={}, flags={f"events.{key}": value for key, value in events.items()})
    assert told in str(error.value)
    assert "events" in str(error.value)


@pytest.mark.parametrize(
    "events",
    [
        {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5558", "insecure": "true"},
        {"endpoint": "tcp://[::1]:5557"},
        {"endpoint": "tcp://127.8.0.1:5557"},
    ],
)
def test_endpoints_that_can_be(events: dict[str, str]) -> None:
    assert load_config(env={f"KVTIERD_EVENTS_{key.upper()}": value for key, value in events.items()}).events.endpoint
    assert Config().events.endpoint is None, "off by default"
