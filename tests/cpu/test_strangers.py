"""Goal: whoever connects to the descriptor socket and says nothing keeps nobody out.

Method: more silent connections than there are places for, before, between and after those that join.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtierd.service import fdpass, logs
from kvtierd.service.peers import Peers
from kvtierd.v1 import fdpass_pb2 as pb
from tests.cpu.tools import Daemon, Raw, until

Connect = Callable[[], Raw]


def test_strangers_that_say_nothing_keep_nobody_out(daemon: Daemon, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdpass, "MAX_STRANGERS", 2)
    strangers = [raw() for _ in range(7)]
    member = raw()
    assert member.join(b"token-1").HasField("joined")
    for stranger in strangers[:5]:
        assert stranger.receive()[0].error.reason == "LIMIT", "the oldest go first"
        assert stranger.ended
    assert strangers[6].join(b"token-1").HasField("joined"), "the newest may still join"


def test_a_stranger_whose_join_has_come_is_not_dropped(daemon: Daemon, raw: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fdpass, "MAX_STRANGERS", 1)
    member = raw()
    until(lambda: daemon.connections == 1)
    connection = daemon.server._connections[1]

    def join_and_oust() -> None:
        # The packet and the next connection arrive in one turn of the event loop.
        member.send(join=pb.Join(session=b"token-1", shard=-1, numa_node=-1))
        daemon.server._oust_stranger()

    daemon.call(join_and_oust)
    assert connection.joined
    assert member.receive()[0].HasField("joined")


def test_of_several_users_the_one_with_the_most_strangers_makes_place(
    daemon: Daemon, raw: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fdpass, "MAX_STRANGERS", 3)
    first, *others = raw(), raw(), raw()
    until(lambda: daemon.connections == 3)
    daemon.server._connections[1].uid = 4711
    daemon.server._peers = Peers(0o666)
    raw()
    assert others[0].receive()[0].error.reason == "LIMIT"
    assert first.join(b"token-1").HasField("joined")


def test_nobody_fills_the_log(
    daemon: Daemon, raw: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packets that are none, or join twice: a line of each kind now and then, which says how many there were."""
    member = raw()
    assert member.join(b"token-1").HasField("joined")
    for _ in range(50):
        stranger = raw()
        stranger.sock.send(b"\xff\xff\xff")
        assert stranger.receive()[0].error.reason == "BAD_REQUEST"
    member.send(join=pb.Join(session=b"token-1", shard=-1, numa_node=-1))
    assert member.receive()[0].error.reason == "BAD_REQUEST"
    lines = [r.getMessage() for r in caplog.records if "on the descriptor socket" in r.getMessage()]
    assert len(lines) == 2, "one of strangers, and one of an engine, which they do not hide"
    assert "of session" in lines[1]
    monkeypatch.setattr(logs, "EVERY_S", 0.0)
    last = raw()
    last.sock.send(b"\xff\xff\xff")
    assert last.receive()[0].error.reason == "BAD_REQUEST"
    assert "49 more since the last such line" in caplog.text
