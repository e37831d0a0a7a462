"""Goal: every call of the client does what it says while the daemon is well. Method: a fake daemon in this process; it asserts
that each ticket is used once and by its own session, and its fixture that none is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtierd.client import Client, DaemonUnavailableError, Namespace, Reason, RequestError, Tier, default_address
from kvtierd.v1 import kvtier_pb2 as pb
from tests.client.conftest import NAMESPACE, SHARD_BYTES, empty_blocks, equal, some_blocks, some_keys
from tests.client.fake_daemon import FakeDaemon

Connect = Callable[..., Client]


def test_what_is_saved_is_loaded(client: Client) -> None:
    keys, blocks, targets = some_keys(5), some_blocks(5), empty_blocks(5)
    saved = client.save(keys, blocks)
    assert (saved.saved, saved.held, saved.complete) == (5, 0, True)
    loaded = client.load(keys, targets)
    assert (loaded.loaded, loaded.indexes, loaded.by_tier, loaded.reason) == (5, frozenset(range(5)), {Tier.CPU: 5}, None)
    assert equal(blocks, targets)


def test_a_save_takes_two_calls_and_a_load_one_that_is_waited_for(client: Client, daemon: FakeDaemon) -> None:
    daemon.calls.clear()
    client.save(some_keys(2), some_blocks(2))
    assert daemon.calls == {"save": 1, "commit": 1}
    client.load(some_keys(2), empty_blocks(2))
    daemon.until(lambda: daemon.calls["release"] == 1)
    assert daemon.calls == {"save": 1, "commit": 1, "load": 1, "release": 1}


def test_blocks_that_are_here_are_held_and_not_copied(client: Client) -> None:
    client.save(some_keys(2), some_blocks(2))
    again = client.save(some_keys(3), some_blocks(3, seed=1))
    assert (again.saved, again.held) == (1, 2)
    targets = empty_blocks(3)
    client.load(some_keys(3), targets)
    assert equal(targets[:2], some_blocks(2))
    assert equal(targets[2:], some_blocks(3, seed=1)[2:])


def test_a_load_stops_at_the_first_miss_unless_it_takes_each(client: Client) -> None:
    keys = some_keys(5)
    blocks = some_blocks(5)
    client.save([keys[i] for i in (0, 1, 3)], [blocks[i] for i in (0, 1, 3)])
    prefix = client.load(keys, empty_blocks(5))
    assert (prefix.loaded, prefix.indexes, prefix.reason) == (2, frozenset([0, 1]), Reason.NOT_FOUND)
    targets = empty_blocks(5)
    each = client.load(keys, targets, each=True)
    assert (each.loaded, each.indexes, each.reason) == (3, frozenset([0, 1, 3]), Reason.NOT_FOUND)
    assert all(np.array_equal(targets[i], blocks[i]) for i in (0, 1, 3))


def test_lookup(client: Client) -> None:
    keys = some_keys(4)
    client.save([keys[0], keys[2]], some_blocks(2))
    assert client.lookup(keys).held == 1
    each = client.lookup(b"".join(keys), each=True)
    assert (each.held, each.tiers, each.reason) == (2, b"\2\0\2\0", None)


def test_several_shards_and_sizes_that_are_no_whole_pages(connect: Connect) -> None:
    client = connect(Namespace(shard_bytes=(5000, 1, 12288)))
    rng = np.random.default_rng(1)
    blocks = [[rng.integers(0, 256, n, dtype=np.uint8) for n in (5000, 1, 12288)] for _ in range(3)]
    targets = [[np.zeros(n, np.uint8) for n in (5000, 1, 12288)] for _ in range(3)]
    assert client.save(some_keys(3), blocks).saved == 3
    assert client.load(some_keys(3), targets).loaded == 3
    assert all(equal(a, b) for a, b in zip(blocks, targets, strict=True))


def test_nothing_asked_nothing_done(client: Client, daemon: FakeDaemon) -> None:
    daemon.calls.clear()
    assert client.lookup([]).held == client.lookup(b"").held == 0
    assert client.save([], []).complete
    assert client.load([], []).loaded == 0
    assert client.evict([]) == 0
    assert client.prefetch([], 1).held == 0
    assert client.pin([], 1).pinned == 0
    with client.reserve([]) as reservation, client.fetch([]) as fetch:
        assert reservation.granted == list(fetch) == []
        assert reservation.commit() == 0
    assert not daemon.calls


def test_wrong_buffers_raise_before_anything_is_sent(client: Client, daemon: FakeDaemon) -> None:
    daemon.calls.clear()
    with pytest.raises(ValueError, match=f"{SHARD_BYTES} bytes; the buffer has 7"):
        client.save(some_keys(2), [*some_blocks(1), b"1234567"])
    with pytest.raises(ValueError, match="read-only"):
        client.load(some_keys(1), [bytes(SHARD_BYTES)])
    with pytest.raises(ValueError, match="32"):
        client.lookup(b"short")
    assert not daemon.calls


class TestSplitting:
    """Calls are split by the number of keys and by a quarter of the bytes that tickets may hold."""

    @pytest.fixture
    def daemon(self, folder: Path) -> Iterator[FakeDaemon]:
        fake = FakeDaemon(folder, max_keys=8, max_ticket_bytes=12 * SHARD_BYTES).start()
        yield fake
        fake.kill()
        assert not fake.failures

    def test_saves_and_loads_are_split(self, client: Client, daemon: FakeDaemon) -> None:
        keys, blocks, targets = some_keys(20), some_blocks(20), empty_blocks(20)
        assert client.save(keys, blocks).saved == 20
        assert daemon.calls["save"] == daemon.calls["commit"] == 7
        assert client.load(keys, targets).loaded == 20
        assert daemon.calls["load"] == 7
        assert equal(blocks, targets)
        assert client.lookup(keys).held == 20
        assert daemon.calls["lookup"] == 3

    def test_a_miss_in_an_early_part_ends_a_prefix_load(self, client: Client, daemon: FakeDaemon) -> None:
        keys = some_keys(20)
        client.save(keys[:4] + keys[5:], some_blocks(19))
        assert client.load(keys, empty_blocks(20)).loaded == 4
        assert daemon.calls["load"] <= 3
        assert client.load(keys, empty_blocks(20), each=True).loaded == 19
        assert client.lookup(keys).held == 4
        assert client.lookup(keys, each=True).held == 19

    def test_the_next_part_is_asked_for_while_this_one_is_copied(self, client: Client, daemon: FakeDaemon) -> None:
        order: list[str] = []
        daemon.on_call = order.append
        client.save(some_keys(6), some_blocks(6))
        assert order == ["save", "save", "commit", "commit"]

    def test_prefetch_is_split_and_reservations_are_not(self, client: Client) -> None:
        keys = some_keys(10)
        client.save(keys, some_blocks(10))
        handle = client.prefetch(keys, 5)
        assert (handle.held, handle.ready, handle.done) == (10, 0, False)
        handle.cancel()
        with pytest.raises(RequestError) as error:
            client.reserve(keys)
        assert error.value.reason is Reason.TOO_MANY_KEYS
        with pytest.raises(RequestError, match="at most 8"):
            client.fetch(keys)


class TestRetries:
    def test_blocks_that_are_busy_are_tried_again_while_the_caller_waits(self, client: Client, daemon: FakeDaemon) -> None:
        keys = some_keys(3)
        daemon.outcomes = {
            keys[0]: [pb.SAVE_OUTCOME_BUSY, pb.SAVE_OUTCOME_LIMIT],
            keys[2]: [pb.SAVE_OUTCOME_IN_PROGRESS],
        }
        result = client.save(keys, some_blocks(3), wait_s=5)
        assert (result.saved, result.complete) == (3, True)
        assert daemon.calls["save"] == 3

    def test_without_waiting_they_are_rejected(self, client: Client, daemon: FakeDaemon) -> None:
        keys = some_keys(3)
        daemon.outcomes = {keys[0]: [pb.SAVE_OUTCOME_BUSY], keys[1]: [pb.SAVE_OUTCOME_QUOTA]}
        result = client.save(keys, some_blocks(3))
        assert (result.saved, dict(result.rejected)) == (1, {"BUSY": 1, "QUOTA": 1})
        assert daemon.calls["save"] == 1

    def test_waiting_ends(self, client: Client, daemon: FakeDaemon) -> None:
        daemon.outcomes = {some_keys(1)[0]: [pb.SAVE_OUTCOME_BUSY] * 1000}
        assert client.save(some_keys(1), some_blocks(1), wait_s=0.05).rejected == {"BUSY": 1}
        assert 1 < daemon.calls["save"] < 1000

    def test_blocks_evicted_while_they_were_filled_are_counted(self, client: Client, daemon: FakeDaemon) -> None:
        daemon.outcomes_of_commit = [1]
        result = client.save(some_keys(3), some_blocks(3))
        assert (result.saved, dict(result.rejected)) == (1, {"EVICTED": 2})


class TestZeroCopy:
    def test_reserve_fill_commit(self, client: Client) -> None:
        keys, blocks, targets = some_keys(4), some_blocks(4), empty_blocks(4)
        client.save(keys[1:2], blocks[1:2])
        with client.reserve(keys) as r:
            assert r.outcomes == ["GRANTED", "HELD", "GRANTED", "GRANTED"]
            assert r.granted == [0, 2, 3]
            for index in r.granted:
                assert len(r.slots(index)) == 1
                (view,) = r.views(index)
                view[:] = blocks[index].tobytes()
                view.release()
            assert r.commit([3, 0]) == 2
            with pytest.raises(KeyError):
                r.views(3)
            assert r.commit() == 1
            assert r.commit() == 0
        assert client.load(keys, targets).loaded == 4
        assert equal(blocks, targets)

    def test_what_is_not_committed_is_returned(self, client: Client, daemon: FakeDaemon) -> None:
        with client.reserve(some_keys(3)) as r:
            r.commit([1])
        daemon.until(lambda: daemon.calls["abort"] == 1 and not daemon.tickets)
        assert client.lookup(some_keys(3), each=True).tiers == b"\0\2\0"
        with pytest.raises(KeyError):
            r.views(0)

    def test_an_exception_in_the_block_returns_everything(self, client: Client, daemon: FakeDaemon) -> None:
        with pytest.raises(ZeroDivisionError), client.reserve(some_keys(2)):
            _ = 1 / 0
        daemon.until(lambda: not daemon.tickets)
        assert client.lookup(some_keys(2)).held == 0

    def test_fetch_gives_blocks_as_they_become_readable(self, client: Client, daemon: FakeDaemon) -> None:
        keys, blocks = some_keys(3), some_blocks(3)
        client.save(keys, blocks)
        gate = daemon.gates[keys[1]] = threading.Event()
        with client.fetch(keys) as f:
            iterator = iter(f)
            index, (view,) = next(iterator)
            assert index == 0
            assert bytes(view) == blocks[0].tobytes()
            assert not f.done
            assert f.poll() == []
            gate.set()
            rest = {i: bytes(v[0]) for i, v in iterator}
            assert rest == {1: blocks[1].tobytes(), 2: blocks[2].tobytes()}
            assert (f.done, f.reason, f.intact) == (True, None, True)
            assert f.tiers == {0: Tier.CPU, 1: Tier.NVME, 2: Tier.CPU}
            f.release([0])
            with pytest.raises(KeyError):
                f.slots(0)
            view.release()
        assert not f.intact

    def test_fetch_can_be_polled(self, client: Client, daemon: FakeDaemon) -> None:
        keys = some_keys(2)
        client.save(keys, some_blocks(2))
        gate = daemon.gates[keys[1]] = threading.Event()
        with client.fetch(keys) as f:
            assert f.poll(5) == [0]
            assert f.poll(0.01) == []
            gate.set()
            assert f.poll(5) == [1]
            assert f.poll(5) == []
            assert f.done

    def test_a_fetch_left_early_gives_its_blocks_back(self, client: Client, daemon: FakeDaemon) -> None:
        client.save(some_keys(3), some_blocks(3))
        with client.fetch(some_keys(3)) as f:
            for _ in f:
                break
        f.close()
        assert list(f) == []
        daemon.until(lambda: not daemon.tickets)

    def test_forgetting_to_close_is_warned_about_and_frees_nothing_under_a_view(self, client: Client, daemon: FakeDaemon) -> None:
        client.save(some_keys(1), some_blocks(1))
        session = client._link.session
        assert session is not None
        for make, kind in ((client.fetch, "Fetch"), (client.reserve, "Reservation")):
            held: list[Any] = [make(some_keys(1, first=len(kind) % 5))]
            with pytest.warns(ResourceWarning, match=kind):
                held.clear()
        client.lookup(some_keys(1))
        assert daemon.calls["release"] == daemon.calls["abort"] == 0
        for _ in range(2):
            session.leave()  # what closing would have done
        daemon.tickets.clear()


class TestControl:
    def test_prefetch_waits_when_asked(self, client: Client, daemon: FakeDaemon) -> None:
        client.save(some_keys(2), some_blocks(2))
        for wait in (False, True):
            handle = client.prefetch(some_keys(3), 5, wait=wait, request_id="r")
            assert (handle.held, handle.ready, handle.done, handle.reason) == (2, 2 * wait, wait, None)
            handle.cancel()
            handle.cancel()
        daemon.until(lambda: daemon.calls["cancel"] == 2)

    def test_evict(self, client: Client) -> None:
        client.save(some_keys(5), some_blocks(5))
        assert client.evict(some_keys(2)) == 2
        assert client.evict() == 3
        assert client.evict() == 0

    def test_pin(self, client: Client, daemon: FakeDaemon) -> None:
        client.save(some_keys(2), some_blocks(2))
        pin = client.pin(some_keys(3), expires_s=60)
        assert pin.pinned == 2
        assert pin.unpin()
        assert not pin.unpin()
        assert not daemon.tickets

    def test_state(self, client: Client, daemon: FakeDaemon) -> None:
        status = client.status
        assert (status.attached, status.boot_epoch, status.daemon_version, status.error) == (True, 1, "fake", "")
        assert client.session_token in daemon.sessions
        assert client.descriptor_socket == str(daemon.fd_path)
        daemon.event(pb.Event(kind=pb.Event.KIND_DRAINING))
        client.lookup(some_keys(1))  # its reply comes after the event
        assert client.status.draining


class TestBytes:
    @pytest.fixture(params=[1000, 5 << 20])
    def size(self, request: pytest.FixtureRequest) -> int:
        size: int = request.param
        return size

    def test_bytes_in_messages(self, connect: Connect, size: int) -> None:
        client = connect(Namespace(shard_bytes=(size, 3)))
        blocks = [[b, b[:3].copy()] for b in some_blocks(3, size=size)]
        assert client.save_bytes(some_keys(3), blocks).saved == 3
        assert client.save_bytes(some_keys(3), blocks).held == 3
        got = client.load_bytes(some_keys(4))
        assert (got.loaded, got.reason) == (3, Reason.NOT_FOUND)
        assert got.blocks == {i: [b.tobytes(), c.tobytes()] for i, (b, c) in enumerate(blocks)}

    def test_a_session_without_shared_memory_saves_and_loads_too(self, connect: Connect, daemon: FakeDaemon) -> None:
        client = connect(bytes_only=True)
        assert not daemon.connections
        blocks, targets = some_blocks(3), empty_blocks(3)
        assert client.save(some_keys(3), blocks).saved == 3
        assert client.load(some_keys(3), targets).loaded == 3
        assert equal(blocks, targets)
        result = client.load(some_keys(5, first=1), empty_blocks(5), each=True)
        assert (result.loaded, result.indexes, result.reason) == (2, frozenset([0, 1]), Reason.NOT_FOUND)


def test_large_blocks_with_helpers(connect: Connect) -> None:
    size = 3 << 20
    client = connect(Namespace(shard_bytes=(size,)), copy_threads=3)
    blocks, targets = some_blocks(8, size=size), empty_blocks(8, size=size)
    assert client.save(some_keys(8), blocks).saved == 8
    assert client.load(some_keys(8), targets).loaded == 8
    assert equal(blocks, targets)


def test_many_threads_share_one_client(client: Client, daemon: FakeDaemon) -> None:
    """Half of the keys are shared by all threads, so that they meet in IN_PROGRESS and HELD."""

    def work(number: int) -> None:
        for turn in range(10):
            keys = some_keys(2, first=turn * 2) + some_keys(2, first=1000 + number * 100 + turn * 2)
            blocks = some_blocks(2, seed=turn) + some_blocks(2, seed=1000 + number * 100 + turn)
            result = client.save(keys, blocks, wait_s=5)
            assert result.complete, result
            targets = empty_blocks(4)
            assert client.load(keys, targets).loaded == 4
            assert equal(blocks, targets)
            client.evict(keys[2:])

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, n) for n in range(8)]:
            future.result()


def test_two_namespaces_do_not_see_each_other(connect: Connect) -> None:
    one, other = connect(), connect(Namespace(shard_bytes=(SHARD_BYTES,), model="another"))
    one.save(some_keys(1), some_blocks(1))
    assert other.lookup(some_keys(1)).held == 0


def test_a_contradicting_namespace_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match="shards"):
        Client(Namespace(shard_bytes=()), "unix:/nowhere/k.sock")


def test_the_address_comes_from_the_variable_or_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.delenv("KVTIERD_ADDRESS", raising=False)
    monkeypatch.delenv("KVTIERD_SERVER_SOCKET", raising=False)
    assert default_address() == "unix:/run/user/7/kvtierd/kvtierd.sock"
    monkeypatch.setenv("KVTIERD_ADDRESS", "host:1")
    assert default_address() == "host:1"


def test_require_waits_for_the_daemon_and_raises_without_one(daemon: FakeDaemon, folder: Path) -> None:
    with Client(NAMESPACE, daemon.address, require=True, timeout_s=5) as client:
        assert client.status.attached
    with pytest.raises(DaemonUnavailableError, match="kvtierd serve"):
        Client(NAMESPACE, folder / "none.sock", require=True, timeout_s=0.1)
