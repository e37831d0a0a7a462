"""Goal: whatever happens to the daemon, calls end within their deadlines with "nothing", the client comes back by itself, and
neither side keeps or mixes up anything of a session that has ended. Method: the fake daemon is killed, restarted, hung, woken
and made to refuse; it checks tickets, and sockets are watched for when they close."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtierd.client import BreakerState, Client, DaemonUnavailableError, Reason, RequestError
from kvtierd.client.transport import MAX_CALLS_IN_FLIGHT
from tests.client.conftest import NAMESPACE, empty_blocks, equal, some_blocks, some_keys
from tests.client.fake_daemon import FakeDaemon

Connect = Callable[..., Client]
SLACK_S = 0.5  # a loaded machine


@contextmanager
def within(seconds: float) -> Iterator[None]:
    start = time.monotonic()
    yield
    took = time.monotonic() - start
    assert took < seconds + SLACK_S, f"took {took:.3f} s"


@contextmanager
def in_thread(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a call in a thread; its result is in the list after the block."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as e:
            results.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    yield results
    thread.join(10)
    assert not thread.is_alive()


def all_calls_give_nothing(client: Client, reason: Reason, rejected: str) -> None:
    keys = some_keys(2)
    assert (client.lookup(keys).held, client.lookup(keys).reason) == (0, reason)
    assert client.save(keys, some_blocks(2)).rejected == {rejected: 2}
    loaded = client.load(keys, empty_blocks(2))
    assert (loaded.loaded, loaded.reason) == (0, reason)
    with client.reserve(keys) as reservation:
        assert (reservation.granted, reservation.outcomes, reservation.reason) == ([], [rejected] * 2, reason)
        assert reservation.rejected == {rejected: 2}
        assert reservation.commit() == 0
    with client.fetch(keys) as fetch:
        assert (list(fetch), fetch.reason, fetch.done, fetch.poll()) == ([], reason, True, [])
    prefetch = client.prefetch(keys, 1, wait=True)
    assert (prefetch.held, prefetch.reason, prefetch.done) == (0, reason, True)
    prefetch.cancel()
    assert client.evict() == 0
    pin = client.pin(keys, 1)
    assert (pin.pinned, pin.reason, pin.unpin()) == (0, reason, False)
    assert client.save_bytes(keys, some_blocks(2)).rejected == {rejected: 2}
    assert (client.load_bytes(keys).loaded, client.load_bytes(keys).reason) == (0, reason)


def test_without_a_daemon_every_call_gives_nothing_at_once(folder: Path) -> None:
    with Client(NAMESPACE, folder / "none.sock", timeout_s=5) as client, within(0):
        all_calls_give_nothing(client, Reason.UNSPECIFIED, "UNAVAILABLE")
        status = client.status
        assert not status.attached
        assert "kvtierd serve" in status.error
        assert (client.session_token, client.descriptor_socket) == (b"", "")


def test_a_socket_that_nobody_listens_on_is_no_daemon(daemon: FakeDaemon) -> None:
    daemon.kill()
    daemon.path.touch()
    with Client(NAMESPACE, daemon.address, timeout_s=5) as client, within(1):
        assert client.lookup(some_keys(1)).held == 0
        assert not client.status.attached


def test_a_client_that_was_first_finds_the_daemon_when_it_comes(daemon: FakeDaemon) -> None:
    daemon.kill()
    with Client(NAMESPACE, daemon.address, timeout_s=5) as client:
        assert client.save(some_keys(1), some_blocks(1)).saved == 0
        daemon.start()
        assert client.wait_attached(10)
        assert client.save(some_keys(1), some_blocks(1)).saved == 1


def test_a_killed_daemon_ends_calls_under_way_and_a_new_boot_is_used(client: Client, daemon: FakeDaemon) -> None:
    keys = some_keys(2)
    client.save(keys, some_blocks(2))
    daemon.gates[keys[1]] = threading.Event()
    with in_thread(lambda: client.load(keys, empty_blocks(2), timeout_s=30)) as results:
        daemon.until(lambda: any(t.kind == "load" for t in daemon.tickets.values()))
        daemon.kill()
    assert results[0].loaded <= 1
    assert results[0].reason is Reason.UNSPECIFIED
    daemon.gates[keys[1]].set()
    with within(0):
        all_calls_give_nothing(client, Reason.UNSPECIFIED, "UNAVAILABLE")
    daemon.gates.clear()
    daemon.start()
    assert client.wait_attached(10)
    assert client.status.boot_epoch == 2
    assert client.lookup(keys).held == 0
    blocks, targets = some_blocks(2, seed=5), empty_blocks(2)
    assert client.save(keys, blocks).saved == 2
    assert client.load(keys, targets).loaded == 2
    assert equal(blocks, targets)


def test_tickets_of_an_earlier_boot_are_never_used(client: Client, daemon: FakeDaemon) -> None:
    """The new boot has tickets under the same numbers: using them there would publish what was never filled."""
    keys = some_keys(2)
    reservation = client.reserve(keys)
    client.save(some_keys(1, first=9), some_blocks(1))
    fetch = client.fetch(some_keys(1, first=9))
    handle = client.prefetch(some_keys(1, first=9), 60)
    pin = client.pin(some_keys(1, first=9), 60)
    (view,) = reservation.views(0)
    daemon.kill()
    daemon.start()
    assert client.wait_attached(10)
    with client.reserve(keys) as again, client.reserve(some_keys(3, first=20)), client.reserve(some_keys(3, first=30)):
        before = dict(daemon.calls)
        view[:] = b"x" * len(view)  # memory of the old boot is still mapped, and nobody's any more
        view.release()
        assert reservation.commit() == 0
        assert not fetch.intact
        reservation.close()
        fetch.close()
        handle.cancel()
        assert not pin.unpin()
        client.lookup(keys)
        assert {k: v for k, v in daemon.calls.items() if k != "lookup"} == {k: v for k, v in before.items() if k != "lookup"}
        assert again.commit() == 2


def test_the_descriptor_socket_stays_open_until_the_last_operation_has_left(client: Client, daemon: FakeDaemon) -> None:
    """The daemon takes slots back when that socket closes: it must not while this process may still write into them."""
    reservation = client.reserve(some_keys(1))
    (old,) = daemon.connections
    daemon.end_streams()
    daemon.until(lambda: len(daemon.sessions) == 2)
    assert client.wait_attached(10)
    client.lookup(some_keys(1))
    assert old in daemon.connections
    reservation.views(0)[0][:4] = b"late"
    assert reservation.commit() == 0
    reservation.close()
    daemon.until(lambda: old not in daemon.connections)
    with daemon._lock:
        daemon.tickets.clear()  # what the real daemon does when that socket closes
        daemon.filling.clear()


def test_losing_the_descriptor_socket_alone_makes_a_new_session(client: Client, daemon: FakeDaemon) -> None:
    import socket

    daemon.connections[0].shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 10
    while len(daemon.sessions) < 2 and time.monotonic() < deadline:
        client.save(some_keys(1), some_blocks(1))  # needs a mapping, and so notices
        client.wait_attached(1)
    assert client.save(some_keys(1, first=5), some_blocks(1)).saved == 1
    with daemon._lock:
        daemon.tickets.clear()


def test_a_hanging_daemon_costs_each_call_its_deadline_and_then_nothing(client: Client, daemon: FakeDaemon) -> None:
    daemon.hang()
    for _ in range(3):
        with within(0.1):
            assert client.lookup(some_keys(1), timeout_s=0.1).reason is Reason.DEADLINE
    assert client.status.breaker is not BreakerState.CLOSED
    with within(0):
        for _ in range(20):
            assert client.load(some_keys(1), empty_blocks(1), timeout_s=30).reason is Reason.UNSPECIFIED
    daemon.wake()
    assert client.wait_attached(10)
    assert client.save(some_keys(1), some_blocks(1)).saved == 1


def test_a_daemon_that_hangs_for_long_is_attached_to_anew(client: Client, daemon: FakeDaemon) -> None:
    daemon.hang()
    for _ in range(3):
        client.lookup(some_keys(1), timeout_s=0.01)
    deadline = time.monotonic() + 20
    while client.session_token and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert not client.session_token
    daemon.wake()
    assert client.wait_attached(10)
    assert client.save(some_keys(1), some_blocks(1)).saved == 1


def test_grants_that_come_too_late_are_returned(client: Client, daemon: FakeDaemon) -> None:
    keys = some_keys(4)
    client.save(keys[:1], some_blocks(1))
    daemon.hang()
    assert client.save(keys[1:], some_blocks(3), timeout_s=0.05).rejected == {"DEADLINE": 3}
    assert client.load(keys[:1], empty_blocks(1), timeout_s=0.05).reason is Reason.DEADLINE
    daemon.wake()
    assert client.wait_attached(10)
    daemon.until(lambda: daemon.calls["abort"] == 1 and daemon.calls["release"] == 1 and not daemon.tickets)
    assert client.save(keys[1:], some_blocks(3)).saved == 3
    daemon.hang()
    assert client.prefetch(keys, 60, timeout_s=0.05).reason is Reason.DEADLINE
    assert client.pin(keys, 60, timeout_s=0.05).reason is Reason.DEADLINE
    daemon.wake()
    daemon.until(lambda: daemon.calls["cancel"] == 1 and daemon.calls["unpin"] == 1 and not daemon.tickets)


def test_a_load_past_its_deadline_keeps_what_was_ready(client: Client, daemon: FakeDaemon) -> None:
    keys, blocks, targets = some_keys(3), some_blocks(3), empty_blocks(3)
    client.save(keys, blocks)
    daemon.gates[keys[1]] = threading.Event()
    with within(0.2):
        result = client.load(keys, targets, timeout_s=0.2)
    assert (result.loaded, result.reason) == (1, Reason.DEADLINE)
    assert equal(targets[:1], blocks[:1])
    assert client.status.breaker is BreakerState.CLOSED, "slow flash is no dead daemon"


def test_a_save_past_its_deadline_returns_its_slots(client: Client, daemon: FakeDaemon) -> None:
    """The grant comes, but the deadline has passed by then for the copy."""
    real = daemon.save

    def late(*args: Any) -> Any:
        response = real(*args)
        threading.Event().wait(0.15)
        return response

    daemon.save = late  # type: ignore[method-assign]
    assert client.save(some_keys(2), some_blocks(2), timeout_s=0.1).rejected == {"DEADLINE": 2}
    daemon.until(lambda: daemon.calls["abort"] == 1 and not daemon.tickets)


@pytest.mark.parametrize("reason", [Reason.OVERLOADED, Reason.INTERNAL, Reason.DRAINING, Reason.LIMIT])
def test_refusals_that_pass_are_misses(client: Client, daemon: FakeDaemon, reason: Reason) -> None:
    daemon.errors = dict.fromkeys(("lookup", "save", "load", "prefetch", "pin", "evict"), reason)
    assert client.lookup(some_keys(1)).reason is reason
    assert client.save(some_keys(2), some_blocks(2)).rejected == {reason.name: 2}
    assert client.load(some_keys(1), empty_blocks(1)).reason is reason
    with client.fetch(some_keys(1)) as fetch:
        assert (fetch.poll(5), fetch.reason) == ([], reason)
    assert client.reserve(some_keys(1)).outcomes == [reason.name]
    assert client.prefetch(some_keys(1), 1).reason is reason
    assert client.pin(some_keys(1), 1).reason is reason
    assert client.evict() == 0
    assert client.status.breaker is BreakerState.CLOSED


def test_mistakes_of_the_caller_raise(client: Client, daemon: FakeDaemon) -> None:
    daemon.errors = dict.fromkeys(("lookup", "save", "load"), Reason.PERMISSION)
    for call in (
        lambda: client.lookup(some_keys(1)),
        lambda: client.save(some_keys(1), some_blocks(1)),
        lambda: client.load(some_keys(1), empty_blocks(1)),
        lambda: client.reserve(some_keys(1)),
    ):
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.reason is Reason.PERMISSION


def test_a_refused_commit_counts_as_not_saved(client: Client, daemon: FakeDaemon) -> None:
    daemon.errors = {"commit": Reason.UNKNOWN_TICKET}
    assert client.save(some_keys(2), some_blocks(2)).rejected == {"UNKNOWN_TICKET": 2}
    with client.reserve(some_keys(2, first=5)) as r:
        assert r.commit() == 0
    with daemon._lock:
        daemon.tickets.clear()


def test_a_refused_session_is_told_and_tried_again(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.refuse = Reason.PROTOCOL_VERSION
    with Client(NAMESPACE, daemon.address, timeout_s=5) as client:
        while "PROTOCOL_VERSION" not in client.status.error:
            client.wait_attached(0.01)
        all_calls_give_nothing(client, Reason.PROTOCOL_VERSION, "PROTOCOL_VERSION")
        daemon.refuse = None
        assert client.wait_attached(10)
    assert len([r for r in caplog.records if "PROTOCOL_VERSION" in r.message]) == 1, "said once, not at each attempt"
    daemon.refuse = Reason.PERMISSION
    with pytest.raises(DaemonUnavailableError, match="PERMISSION"):
        Client(NAMESPACE, daemon.address, timeout_s=0.3, require=True)


def test_with_require_calls_raise_when_the_daemon_goes(connect: Connect, daemon: FakeDaemon) -> None:
    client = connect(require=True)
    daemon.kill()
    deadline = time.monotonic() + 5
    while client.status.attached and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    for call in (
        lambda: client.lookup(some_keys(1)),
        lambda: client.save(some_keys(1), some_blocks(1)),
        lambda: client.load(some_keys(1), empty_blocks(1)),
        lambda: client.reserve(some_keys(1)),
        lambda: client.fetch(some_keys(1)),
    ):
        with pytest.raises(DaemonUnavailableError):
            call()


def test_calls_in_flight_are_limited(client: Client, daemon: FakeDaemon) -> None:
    session = client._link.session
    assert session is not None
    from kvtierd.v1 import kvtier_pb2 as pb

    daemon.hang()
    for _ in range(MAX_CALLS_IN_FLIGHT):
        session.stream.begin(pb.AttachRequest(call=pb.Call(lookup=pb.LookupRequest())), "lookup").abandon()
    assert client.lookup(some_keys(1)).reason is Reason.OVERLOADED
    daemon.wake()
    daemon.until(lambda: daemon.calls["lookup"] == MAX_CALLS_IN_FLIGHT)
    while client.lookup(some_keys(1)).reason is Reason.OVERLOADED:
        threading.Event().wait(0.01)


def test_closing_ends_calls_under_way(connect: Connect, daemon: FakeDaemon) -> None:
    client = connect()
    daemon.hang()
    with in_thread(lambda: client.lookup(some_keys(1), timeout_s=60)) as results:
        while not client._link.session or not client._link.session.stream._pending:
            threading.Event().wait(0.01)
        with within(0):
            client.close()
            client.close()
    assert results[0].reason is Reason.UNSPECIFIED
    assert client.lookup(some_keys(1)).held == 0
    assert client.status.error == "the client is closed"


def test_closing_while_attaching_does_not_wait_for_the_daemon(daemon: FakeDaemon) -> None:
    daemon.hang()
    client = Client(NAMESPACE, daemon.address)
    assert client.lookup(some_keys(1), timeout_s=0.1).held == 0
    with within(0):
        client.close()
    daemon.wake()


def test_chaos_of_restarts_never_loads_a_wrong_byte(client: Client, daemon: FakeDaemon) -> None:
    """Threads save and load while the daemon restarts again and again; every block that is reported loaded is right."""
    stop = threading.Event()
    loaded = [0]

    def work(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            keys = some_keys(3, first=number * 1000 + turn % 7 * 3)
            blocks, targets = some_blocks(3, seed=number * 1000 + turn % 7), empty_blocks(3)
            client.save(keys, blocks, timeout_s=1)
            count = client.load(keys, targets, timeout_s=1).loaded
            assert equal(targets[:count], blocks[:count])
            loaded[0] += count
            if not count:
                client.wait_attached(1)

    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        before = loaded[0]
        limit = time.monotonic() + 5
        while loaded[0] < before + 30 and time.monotonic() < limit and not failures:
            threading.Event().wait(0.01)
        daemon.kill()
        daemon.start()
    stop.set()
    for thread in threads:
        thread.join(10)
    assert not failures
    assert loaded[0] >= 150


def test_an_interrupt_during_a_copy_returns_the_slots(client: Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    client.save(some_keys(1), some_blocks(1))
    monkeypatch.setattr("kvtierd.client.copying.np.copyto", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.save(some_keys(3, first=5), some_blocks(3))
    with pytest.raises(KeyboardInterrupt):
        client.load(some_keys(1), empty_blocks(1))
    monkeypatch.undo()
    daemon.until(lambda: not daemon.tickets)
    assert client.save(some_keys(3, first=5), some_blocks(3)).saved == 3


def test_a_forked_child_sees_no_daemon_and_leaves_the_parents_session_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the process id is changed here: a real fork with gRPC's threads is not safe in a test process."""
    parent = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr("kvtierd.client.link.os.getpid", lambda: parent + 1)
        assert client.lookup(some_keys(1)).reason is Reason.UNSPECIFIED
        client.close()
    assert client.save(some_keys(1), some_blocks(1)).saved == 1


def test_a_program_that_does_not_close_its_client_ends_cleanly(daemon: FakeDaemon) -> None:
    program = f"""
from kvtierd.client import Client, Namespace
client = Client(Namespace(shard_bytes=(8192,)), {daemon.address!r}, require=True, timeout_s=10)
assert client.save([bytes(32)], [bytes(8192)]).saved == 1
print("saved")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "saved\n", "")
    daemon.until(lambda: not daemon.connections)


@pytest.mark.parametrize("address", ["k.sock", "somewhere"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="unix:PATH"):
        Client(NAMESPACE, address)
