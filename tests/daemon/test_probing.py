"""Goal: a probe tells without waiting whether a load would find anything, and never holds its caller up.

Method: a real daemon; its process is stopped and killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtierd.client import Client, ExtentMap, Prober
from kvtierd.client.probing import MAX_OPEN
from kvtierd.errors import Reason, RequestError
from kvtierd.model import KEY_BYTES, MAX_KEYS_PER_CALL
from kvtierd.testing.daemon import DaemonProcess
from tests.daemon.conftest import MIB

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]
KEYS = [bytes([n]) * KEY_BYTES for n in range(8)]


@pytest.fixture
def daemon(make_daemon: MakeDaemon) -> DaemonProcess:
    return make_daemon()


@pytest.fixture
def client(daemon: DaemonProcess, make_client: MakeClient) -> Client:
    return make_client(daemon)


@pytest.fixture
def prober(client: Client) -> Iterator[Prober]:
    assert client.descriptor_socket
    made = Prober(client.descriptor_socket, client.session_token)
    yield made
    made.close()


def save(client: Client, keys: list[bytes], tenant: str = "") -> None:
    with client.reserve(keys, tenant=tenant) as reservation:
        reservation.commit()


def wait(prober: Prober, number: int | None) -> bool:
    assert number is not None
    until_s = time.monotonic() + 10
    while (answer := prober.answer(number)) is None:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    return answer


def misses(client: Client, daemon: DaemonProcess, tenant: str = "default") -> int:
    return sum(t.misses for t in daemon.status().tenants if t.tenant == tenant)


def test_says_what_is_held(client: Client, prober: Prober) -> None:
    save(client, KEYS[:2])
    numbers = [prober.ask(key, 1) for key in KEYS[:4]]
    assert [wait(prober, number) for number in reversed(numbers)] == [False, False, True, True]
    client.evict(KEYS[:1])
    assert not wait(prober, prober.ask(KEYS[0], 1))


def test_other_tenants_blocks_are_not_seen(client: Client, prober: Prober) -> None:
    save(client, KEYS[:1], tenant="a")
    assert wait(prober, prober.ask(KEYS[0], 1, "a"))
    assert not wait(prober, prober.ask(KEYS[0], 1))
    assert not wait(prober, prober.ask(KEYS[0], 1, "never heard of"))


def test_what_others_share_is_not_taken_for_absent(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    """Of a tenant that has saved nothing yet, too."""
    daemon = make_daemon("shared", tenants={name: {"scope": "shared"} for name in ("a", "b")})
    client = make_client(daemon, tenant="a")
    save(client, KEYS[:1])
    assert client.descriptor_socket
    prober = Prober(client.descriptor_socket, client.session_token)
    try:
        assert wait(prober, prober.ask(KEYS[0], 1, "b"))
        assert not wait(prober, prober.ask(KEYS[0], 1, "c"))
    finally:
        prober.close()
    reader = make_client(daemon, tenant="b")
    assert reader.descriptor_socket
    extents = ExtentMap(reader.descriptor_socket, reader.session_token)
    try:
        assert len(extents.existing) == 1, "what it may map of others is told as well"
        extents.map(extents.existing)
    finally:
        extents.close()


def test_a_load_that_is_not_made_counts_as_missed(client: Client, prober: Prober, daemon: DaemonProcess) -> None:
    save(client, KEYS[:1])
    for key, count in ((KEYS[0], 7), (KEYS[1], 5), (KEYS[2], 0)):
        wait(prober, prober.ask(key, count))
    assert misses(client, daemon) == 5
    wait(prober, prober.ask(KEYS[1], 2**32 - 1))
    assert misses(client, daemon) == 5 + MAX_KEYS_PER_CALL, "no more than one load can ask for"


def test_an_answer_is_given_once_and_an_unwanted_one_never(prober: Prober) -> None:
    unwanted, number = prober.ask(KEYS[0], 1), prober.ask(KEYS[1], 1)
    assert unwanted is not None and number is not None
    prober.forget(unwanted)
    assert wait(prober, number) is False
    assert prober.answer(number) is None
    assert prober.answer(unwanted) is None
    prober.forget(number)  # again, which changes nothing
    assert wait(prober, prober.ask(KEYS[2], 1)) is False


def test_a_daemon_that_hangs_is_not_waited_for(prober: Prober, daemon: DaemonProcess) -> None:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        numbers = [prober.ask(KEYS[0], 1) for _ in range(MAX_OPEN + 5)]
        assert [number is None for number in numbers] == [False] * MAX_OPEN + [True] * 5
        assert all(prober.answer(number) is None for number in numbers if number is not None)
        assert time.monotonic() - began_s < 5, "each of these would wait for ever"
        for number in numbers[:-5]:
            assert number is not None
            prober.forget(number)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    until_s = time.monotonic() + 10
    while (number := prober.ask(KEYS[0], 1)) is None:
        assert time.monotonic() < until_s, "room comes back once the answers are here"
        time.sleep(0.01)
    assert wait(prober, number) is False


def test_ends_with_the_daemon(prober: Prober, daemon: DaemonProcess) -> None:
    number = prober.ask(KEYS[0], 1)
    assert wait(prober, number) is False
    daemon.kill()
    until_s = time.monotonic() + 10
    while not prober.closed:
        assert prober.ask(KEYS[0], 1) is None or time.monotonic() < until_s
    assert prober.ask(KEYS[0], 1) is None


def test_keys_that_are_none_end_the_connection(prober: Prober) -> None:
    assert prober.ask(b"short", 1) is not None
    until_s = time.monotonic() + 10
    while not prober.closed:
        assert time.monotonic() < until_s
        prober.answer(1)
        time.sleep(0.001)


def test_needs_a_session(client: Client) -> None:
    assert client.descriptor_socket
    with pytest.raises(RequestError) as refused:
        Prober(client.descriptor_socket, b"x" * 16)
    assert refused.value.reason is Reason.UNKNOWN_SESSION


def test_what_exists_is_told_to_who_joins(client: Client, make_extents: Callable[[], tuple[int, ...]]) -> None:
    assert make_extents() == ()
    buffers = [np.zeros(MIB, np.uint8)]
    client.save(KEYS[:1], [buffers])
    (extent,) = make_extents()
    assert extent > 0


@pytest.fixture
def make_extents(client: Client) -> Callable[[], tuple[int, ...]]:
    def make() -> tuple[int, ...]:
        assert client.descriptor_socket
        extents = ExtentMap(client.descriptor_socket, client.session_token)
        try:
            extents.map(extents.existing)
            assert extents.mapped_extents == set(extents.existing)
            return extents.existing
        finally:
            extents.close()

    return make
