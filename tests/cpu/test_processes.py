"""Goal: processes share memory through the daemon, and the daemon knows for certain when one of them has died.

Method: real child processes that are killed, in every state that matters to what they hold.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvtierd.client.extents import ExtentMap
from kvtierd.model import slot_id
from tests.cpu.tools import SLOTS, Daemon, Worker, until

MakeMap = Callable[..., ExtentMap]
MakeWorker = Callable[..., Worker]


def test_processes_share_memory_through_the_daemon(daemon: Daemon, worker: MakeWorker) -> None:
    extent_id = daemon.extent()
    writer, reader = worker(pins=True), worker(shard=0)
    assert writer.ask("write", slot_id(extent_id, 2), "from one process") == "ok"
    assert reader.ask("read", slot_id(extent_id, 2), 16) == "from one process"
    assert {j["pid"] for j in daemon.authority.joins} == {writer.process.pid, reader.process.pid}


def test_a_killed_process_is_gone_and_holds_nothing(daemon: Daemon, worker: MakeWorker) -> None:
    extent_id = daemon.extent()
    victim, survivor = worker(pins=True), worker(pins=True)
    for each in (victim, survivor):
        each.ask("hold", slot_id(extent_id, 0))
    daemon.retire(extent_id)
    assert survivor.ask("drop") == "ok"
    until(lambda: daemon.holders(extent_id) == {1})
    assert (daemon.authority.gone, daemon.authority.released) == ([], [])
    victim.kill()
    until(lambda: daemon.authority.gone == [(1, 1)])
    assert daemon.authority.released == [extent_id]
    assert survivor.ask("mapped") == []


def test_a_killed_process_is_gone_though_it_never_mapped(daemon: Daemon, worker: MakeWorker) -> None:
    victim = worker()
    victim.kill()
    until(lambda: daemon.authority.gone == [(1, 1)])


def test_a_forked_child_keeps_the_process_alive(daemon: Daemon, worker: MakeWorker) -> None:
    """The child has the same mappings and may be copying, so the parent's death alone frees nothing."""
    extent_id = daemon.extent()
    parent = worker()
    parent.ask("write", slot_id(extent_id, 0), "x")
    child = parent.ask("fork")
    parent.kill()
    assert daemon.connections == 1
    assert daemon.authority.gone == []
    os.kill(child, 9)
    until(lambda: daemon.authority.gone == [(1, 1)])


def test_a_worker_sees_its_refusals_as_errors(daemon: Daemon, worker: MakeWorker) -> None:
    foreign = daemon.extent(session_id=2)
    assert worker().ask("read", slot_id(foreign, 0), 4).startswith("RequestError: extent")


def test_extents_come_and_go_under_load(daemon: Daemon, extent_map: MakeMap) -> None:
    """Each extent is written through one map and read through the other while others are being revoked."""
    first, second = extent_map(pins_memory=True), extent_map(pins_memory=True)
    for generation in range(40):
        ids = [daemon.extent() for _ in range(4)]
        for extent_id in ids:
            first.view(slot_id(extent_id, generation % SLOTS), 4)[:] = extent_id.to_bytes(4, "big")
        for extent_id in ids:
            assert bytes(second.view(slot_id(extent_id, generation % SLOTS), 4)) == extent_id.to_bytes(4, "big")
        daemon.retire(*ids)
    until(lambda: len(daemon.authority.released) == 160)
    assert sorted(daemon.authority.released) == sorted(set(daemon.authority.released))
    assert daemon.pool.reserved_bytes == 0
