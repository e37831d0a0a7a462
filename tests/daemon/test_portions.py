"""Goal: a prefix loses its end first also when it is saved in several calls, and what a call may say of the request is checked.

Method: a daemon with room for 16 blocks; clients that save a chain in portions; then other blocks come one by one.
"""

import os
from collections.abc import Callable

import pytest

from kvtierd.client import Client, Reason, RequestError
from kvtierd.testing.daemon import DaemonProcess
from tests.daemon.conftest import MIB

BLOCK = MIB // 4
ROOM = 16

MakeDaemon = Callable[..., DaemonProcess]
MakeClient = Callable[..., Client]


def small(make_daemon: MakeDaemon, make_client: MakeClient) -> Client:
    cpu = {"capacity": "4MiB", "extent": "1MiB", "prefault": False}
    return make_client(make_daemon(cpu=cpu, nvme={"capacity": "0"}), BLOCK)


def fill(client: Client, count: int) -> None:
    for _ in range(count):
        assert client.save([os.urandom(32)], [bytes(BLOCK)]).saved == 1


def test_one_save_that_takes_several_calls(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    client = small(make_daemon, make_client)
    keys = [os.urandom(32) for _ in range(10)]
    assert client.save(keys, [bytes(BLOCK)] * 10).saved == 10
    fill(client, ROOM - 10 + 4)
    assert client.lookup(keys).held == 6


def test_reservations_of_one_request(make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    client = small(make_daemon, make_client)
    keys = [os.urandom(32) for _ in range(9)]
    for first in range(0, 9, 3):
        before = keys[:first] if first == 6 else []
        with client.reserve(keys[first : first + 3], before=before, matched=0) as reservation:
            assert reservation.commit() == 3
    fill(client, ROOM - 9 + 4)
    assert client.lookup(keys).held == 5


@pytest.mark.parametrize("before", [b"x" * 31, b"x" * 33])
def test_malformed_keys_before(before: bytes, make_daemon: MakeDaemon, make_client: MakeClient) -> None:
    client = small(make_daemon, make_client)
    with pytest.raises(ValueError, match="32 bytes"):
        client.reserve([os.urandom(32)], before=before)
    with pytest.raises(ValueError, match="number of blocks"):
        client.reserve([os.urandom(32)], matched=-1)


def test_too_many_keys_together(make_daemon: MakeDaemon, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client refuses them, and the daemon those of a client that does not."""
    client = small(make_daemon, make_client)
    before = os.urandom(32 * 65_536)
    with pytest.raises(RequestError, match="at most 65536") as refused:
        client.reserve([os.urandom(32)], before=before)
    assert refused.value.reason is Reason.TOO_MANY_KEYS
    monkeypatch.setattr(client._link._session, "max_keys", 1 << 30)
    with pytest.raises(RequestError, match="1 keys and 65536 before them") as refused:
        client.reserve([os.urandom(32)], before=before)
    assert refused.value.reason is Reason.TOO_MANY_KEYS
    with client.reserve([os.urandom(32)], before=before[32:], timeout_s=20) as reservation:
        assert reservation.granted == [0]


@pytest.mark.parametrize("bytes_only", [False, True])
def test_all_that_a_load_does_not_get_counts_as_missed(make_daemon: MakeDaemon, make_client: MakeClient, bytes_only: bool) -> None:
    """Also where it takes several calls, and the first of them has met the end of what is held."""
    daemon = make_daemon(cpu={"capacity": "4MiB", "extent": "1MiB", "prefault": False}, nvme={"capacity": "0"})
    client = make_client(daemon, BLOCK, bytes_only=bytes_only)
    keys = [os.urandom(32) for _ in range(40)]
    assert client.save(keys[:1], [bytes(BLOCK)]).saved == 1

    def counted(name: str) -> float:
        return daemon.status().counters[name]

    others = [os.urandom(32) for _ in range(40)]
    for asked, expected in ((keys, (1, 39)), (keys, (2, 78)), (others, (2, 118)), (keys[:2], (3, 119))):
        assert client.load(asked, [bytearray(BLOCK) for _ in asked]).loaded == (asked[0] == keys[0])
        assert client.lookup(keys[:1]).held == 1  # what was posted before it has been served
        assert (counted("kvtierd_hits_total"), counted("kvtierd_misses_total")) == expected
