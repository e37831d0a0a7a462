"""Goal: client processes map exactly their memory and give it back when asked and only when nobody uses it.

Method: the real client against the real server and pool, both in this process.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtierd.client import extents as extents_module
from kvtierd.client.extents import ExtentMap
from kvtierd.errors import DaemonUnavailableError, Reason, RequestError
from kvtierd.memory import PAGE_BYTES, SharedMapping, create_memfd, filled_ranges
from kvtierd.model import slot_id
from kvtierd.v1 import fdpass_pb2 as pb
from tests.cpu.tools import SLOT, SLOTS, Daemon, page_bytes_of, until

MakeMap = Callable[..., ExtentMap]


# ---- mapping


def test_both_sides_see_the_same_bytes(daemon: Daemon, extent_map: MakeMap) -> None:
    extent_id = daemon.extent()
    extents = extent_map()
    assert (extents.boot_epoch, extents.slot_bytes) == (77, (SLOT, SLOT))
    extents.view(slot_id(extent_id, 3), 5)[:] = b"hello"
    assert bytes(daemon.pool.view(slot_id(extent_id, 3))[:5]) == b"hello"
    daemon.pool.view(slot_id(extent_id, 4))[:2] = b"ho"
    assert bytes(extents.view(slot_id(extent_id, 4), 2)) == b"ho"
    assert len(extents.view(slot_id(extent_id, 0))) == SLOT
    assert extents.mapped_extents == {extent_id}


def test_a_view_never_reaches_into_another_slot(daemon: Daemon, extent_map: MakeMap) -> None:
    extent_id = daemon.extent()
    extents = extent_map()
    for slot, length in ((0, SLOT + 1), (0, -1), (SLOTS, 1), (SLOTS, None)):
        with pytest.raises(ValueError, match="slots of"):
            extents.view(slot_id(extent_id, slot), length)


def test_slots_side_by_side_have_one_view(daemon: Daemon, extent_map: MakeMap) -> None:
    extent_id = daemon.extent()
    extents = extent_map()
    view = extents.view(slot_id(extent_id, 2), count=3)
    assert len(view) == 3 * SLOT
    view[SLOT : SLOT + 5] = b"hello"
    assert bytes(daemon.pool.view(slot_id(extent_id, 3))[:5]) == b"hello"
    assert len(extents.view(slot_id(extent_id, SLOTS - 2), 2 * SLOT - 1, 2)) == 2 * SLOT - 1
    for slot, length, count in ((0, 2 * SLOT + 1, 2), (SLOTS - 1, None, 2), (0, SLOT + 1, 1)):
        with pytest.raises(ValueError, match="slots of"):
            extents.view(slot_id(extent_id, slot), length, count)


@pytest.mark.parametrize(
    ("slots", "length", "most", "expected"),
    [
        ([(0, 0), (0, 1), (0, 2)], SLOT, 99 * SLOT, [(0, 3)]),
        ([(0, 0), (0, 1), (0, 2)], SLOT, 2 * SLOT, [(0, 2), (2, 3)]),
        ([(0, 0), (0, 1), (0, 2)], SLOT, 1, [(0, 1), (1, 2), (2, 3)]),
        ([(0, 0), (0, 1), (0, 2)], SLOT - 1, 99 * SLOT, [(0, 1), (1, 2), (2, 3)]),
        ([(0, 2), (0, 1), (0, 1), (0, 2)], SLOT, 99 * SLOT, [(0, 1), (1, 2), (2, 4)]),
        ([(0, 5), (1, 6), (1, 7), (0, 8)], SLOT, 99 * SLOT, [(0, 1), (1, 3), (3, 4)]),
        ([(0, 0)], SLOT, 99 * SLOT, [(0, 1)]),
        ([], SLOT, 99 * SLOT, []),
    ],
)
def test_stretches_are_slots_side_by_side_that_are_used_whole(
    daemon: Daemon, extent_map: MakeMap, slots: list[tuple[int, int]], length: int, most: int, expected: list[tuple[int, int]]
) -> None:
    wanted = [daemon.extent(), daemon.extent()]
    extents = extent_map()
    extents.map(wanted)
    ids = np.array([slot_id(wanted[extent], index) for extent, index in slots], np.int64)
    assert extents.stretches(ids, length, most) == expected


def test_extents_are_mapped_once_and_no_descriptor_stays(daemon: Daemon, extent_map: MakeMap) -> None:
    wanted = [daemon.extent() for _ in range(12)]
    extents = extent_map()
    before = len(os.listdir("/proc/self/fd"))
    extents.map(wanted)
    extents.map(wanted)
    assert daemon.authority.asked == wanted
    assert extents.mapped_extents == set(wanted)
    until(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_many_extents_are_asked_for_in_packets_of_64(daemon: Daemon, extent_map: MakeMap) -> None:
    extents = extent_map()
    with pytest.raises(RequestError) as caught:
        extents.map(range(1000, 1200))
    assert caught.value.reason is Reason.NOT_FOUND
    until(lambda: daemon.authority.asked == list(range(1000, 1200)))


def test_many_threads_share_one_request(daemon: Daemon, extent_map: MakeMap) -> None:
    wanted = [daemon.extent() for _ in range(8)]
    extents = extent_map()
    start = threading.Barrier(8)
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            start.wait()
            for extent_id in wanted:
                extents.view(slot_id(extent_id, number), 8)[:] = number.to_bytes(8, "big")
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted(daemon.authority.asked) == wanted
    assert all(daemon.pool.view(slot_id(e, n))[7] == n for e in wanted for n in range(8))


@pytest.mark.parametrize(("session", "shard"), [(2, 0), (1, 1)], ids=["another session's", "another shard's"])
def test_foreign_extents_are_refused(daemon: Daemon, extent_map: MakeMap, session: int, shard: int) -> None:
    foreign, own = daemon.extent(session, shard), daemon.extent(1, 0)
    extents = extent_map(shard=0)
    for _ in range(2):
        with pytest.raises(RequestError, match=f"extent {foreign}") as caught:
            extents.view(slot_id(foreign, 0), 1)
        assert caught.value.reason is Reason.NOT_FOUND
    extents.view(slot_id(own, 0), 1)


def test_a_wrong_token_is_a_request_error(daemon: Daemon, extent_map: MakeMap) -> None:
    with pytest.raises(RequestError, match="attach again") as caught:
        extent_map(b"guess")
    assert caught.value.reason is Reason.UNKNOWN_SESSION


def test_page_tables_are_filled_for_pages_that_exist_only(daemon: Daemon, extent_map: MakeMap) -> None:
    extent_id = daemon.extent()
    daemon.pool.view(slot_id(extent_id, 2))[:] = b"\x01" * SLOT
    daemon.pool.view(slot_id(extent_id, 9))[:] = b"\x02" * SLOT
    extents = extent_map()
    extents.map([extent_id])
    until(lambda: not extents._filling)
    assert page_bytes_of(daemon.pool.fd(extent_id)) == 2 * SLOT, "pages are for the daemon to make"
    address = extents._mapped[extent_id].mapping.address
    resident = {line.split()[1] for line in mapping_lines(address) if line.startswith("Rss:")}
    assert resident == {str(2 * SLOT // 1024)}


def mapping_lines(address: int) -> list[str]:
    """What the kernel knows about the mapping at an address."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"{address:x}-"))
    return lines[begin + 1 : begin + 24]


def test_filled_ranges_are_the_pages_that_exist_in_pieces() -> None:
    fd = create_memfd("kvtierd-test", 10 * PAGE_BYTES)
    assert list(filled_ranges(fd, 10 * PAGE_BYTES, 1 << 20)) == []
    for page in (1, 2, 3, 9):
        os.pwrite(fd, b"x", page * PAGE_BYTES)
    pieces = [(o // PAGE_BYTES, n // PAGE_BYTES) for o, n in filled_ranges(fd, 10 * PAGE_BYTES, 2 * PAGE_BYTES)]
    assert pieces == [(1, 2), (3, 1), (9, 1)]
    os.close(fd)


# ---- revoking


@pytest.mark.parametrize("pins", [False, True])
def test_a_revoked_extent_is_unmapped_and_confirmed(daemon: Daemon, extent_map: MakeMap, pins: bool) -> None:
    extent_id, kept = daemon.extent(), daemon.extent()
    extents = extent_map(pins_memory=pins)
    extents.map([extent_id, kept])
    daemon.retire(extent_id)
    until(lambda: daemon.authority.unmappings == [(1, [extent_id])])
    until(lambda: daemon.authority.released == [extent_id])
    assert extents.mapped_extents == {kept}
    with pytest.raises(RequestError) as caught:
        extents.view(slot_id(extent_id, 0), 1)
    assert caught.value.reason is Reason.NOT_FOUND
    extents.view(slot_id(kept, 0), 1)


def test_a_view_keeps_revoked_memory_mapped_until_it_goes(daemon: Daemon, extent_map: MakeMap) -> None:
    extent_id, other = daemon.extent(), daemon.extent()
    extents = extent_map(pins_memory=True)
    view = extents.view(slot_id(extent_id, 0))
    part = view[10:20]
    view[10:13] = b"abc"
    del view
    daemon.retire(extent_id)
    until(lambda: extents.mapped_extents == set())
    extents.view(slot_id(other, 0), 1)
    assert bytes(part[:3]) == bytes(3), "its pages are gone, the mapping is not"
    part[:1] = b"x"
    assert daemon.authority.released == []
    del part
    until(lambda: daemon.authority.released == [extent_id])


def test_too_many_lingering_extents_stop_new_ones(daemon: Daemon, extent_map: MakeMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "MAX_LINGERING", 2)
    extents = extent_map()
    views = []
    for _ in range(2):
        extent_id = daemon.extent()
        views.append(extents.view(slot_id(extent_id, 0)))
        daemon.retire(extent_id)
    until(lambda: len(extents._lingering) == 2)
    fresh = daemon.extent()
    with pytest.raises(RequestError, match="drop views") as caught:
        extents.view(slot_id(fresh, 0))
    assert caught.value.reason is Reason.LIMIT
    views.clear()
    until(lambda: not extents._lingering)
    extents.view(slot_id(fresh, 0))


def test_hooks_wrap_the_time_in_which_memory_may_be_used(daemon: Daemon, extent_map: MakeMap) -> None:
    log: list[tuple[str, int, int]] = []
    extent_id, kept = daemon.extent(), daemon.extent()

    def mapped(number: int, mapping: SharedMapping) -> None:
        log.append(("mapped", number, mapping.size_bytes))

    def revoked(number: int, mapping: SharedMapping) -> None:
        assert mapping_lines(mapping.address), "still mapped"
        assert (1, [number]) not in daemon.authority.unmappings
        log.append(("revoked", number, mapping.size_bytes))

    extents = extent_map(pins_memory=True, on_mapped=mapped, on_revoked=revoked)
    for number in (extent_id, kept):
        extents.view(slot_id(number, 0))
        assert log[-1] == ("mapped", number, SLOT * SLOTS), "before the first view"
    daemon.retire(extent_id)
    until(lambda: daemon.authority.released == [extent_id])
    extents.close()
    assert log[2:] == [("revoked", extent_id, SLOT * SLOTS), ("revoked", kept, SLOT * SLOTS)]


def test_an_extent_that_cannot_be_registered_is_not_used(daemon: Daemon, extent_map: MakeMap) -> None:
    def mapped(_number: int, _mapping: SharedMapping) -> None:
        raise RuntimeError("cudaErrorMemoryAllocation")

    extent_id = daemon.extent()
    extents = extent_map(pins_memory=True, on_mapped=mapped)
    with pytest.raises(RequestError, match="cudaErrorMemoryAllocation"):
        extents.view(slot_id(extent_id, 0))
    until(lambda: daemon.authority.unmappings == [(1, [extent_id])])
    assert daemon.holders(extent_id) == set()
    assert not extents.closed


def test_an_extent_that_stays_registered_is_never_confirmed(
    daemon: Daemon, extent_map: MakeMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents_module.log, "disabled", True)  # a captured record would keep the frame, and so the mapping

    def revoked(number: int, _mapping: SharedMapping) -> None:
        if number == 1:
            raise RuntimeError("cudaErrorHostMemoryNotRegistered")

    stuck, fine = daemon.extent(), daemon.extent()
    extents = extent_map(pins_memory=True, on_revoked=revoked)
    extents.map([stuck, fine])
    daemon.retire(stuck, fine)
    until(lambda: daemon.authority.released == [fine])
    gc.collect()
    assert daemon.holders(stuck) == {1}
    extents.close()
    until(lambda: daemon.authority.released == [fine, stuck])


def test_a_process_without_descriptors_says_so(daemon: Daemon, extent_map: MakeMap, monkeypatch: pytest.MonkeyPatch) -> None:
    extent_id = daemon.extent()
    extents = extent_map(pins_memory=True)
    receive = extents._socket.receive

    def lossy() -> Any:
        packet = receive()
        packet.close()  # the kernel drops what finds no room
        return packet

    with monkeypatch.context() as patched:
        patched.setattr(extents._socket, "receive", lossy)
        with pytest.raises(RequestError, match="limit of open files"):
            extents.view(slot_id(extent_id, 0))
    until(lambda: daemon.holders(extent_id) == set())
    extents.view(slot_id(extent_id, 0))


def test_an_extent_shorter_than_announced_is_never_mapped(
    daemon: Daemon, extent_map: MakeMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent_id = daemon.extent()
    monkeypatch.setattr(daemon.pool, "size_bytes", lambda _number: SLOT * SLOTS + PAGE_BYTES)
    with pytest.raises(RequestError, match="not as large"):
        extent_map().view(slot_id(extent_id, 0))


# ---- loss


def test_a_daemon_that_does_not_read_fails_the_request_and_the_next_one_asks_again(
    daemon: Daemon, extent_map: MakeMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [daemon.extent() for _ in range(3)]
    extents = extent_map()

    def deaf(_request: pb.DescriptorRequest, _until_s: float) -> None:
        raise DaemonUnavailableError("the daemon does not read from the descriptor socket")

    with monkeypatch.context() as patched:
        patched.setattr(extents._socket, "send", deaf)
        with pytest.raises(DaemonUnavailableError, match="does not read"):
            extents.map([*wanted, *range(1000, 1100)])
    extents.map(wanted)
    assert extents.mapped_extents == set(wanted)
    assert not extents._pending


def test_loss_of_the_daemon_is_told_and_ends_waiting(tmp_path: Path) -> None:
    """A daemon that joins and then says nothing, until it dies."""
    path = tmp_path / "s"
    lost = threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        silent: list[socket.socket] = []

        def serve() -> None:
            connection, _ = listener.accept()
            connection.recv(4096)
            connection.send(pb.DescriptorResponse(joined=pb.Joined(boot_epoch=1)).SerializeToString())
            silent.append(connection)

        server = threading.Thread(target=serve)
        server.start()
        extents = ExtentMap(path, b"t", timeout_s=0.05, on_lost=lost.set)
        server.join()
        with pytest.raises(DaemonUnavailableError, match="in time"):
            extents.view(slot_id(1, 0))
        failures: list[Exception] = []

        def wait() -> None:
            try:
                extents.map([1], timeout_s=20)
            except DaemonUnavailableError as e:
                failures.append(e)

        waiter = threading.Thread(target=wait)
        waiter.start()
        silent[0].close()
        waiter.join(10)
        assert "closed" in str(failures[0]) or "failed" in str(failures[0])
        assert lost.wait(10)
        assert extents.closed
        with pytest.raises(DaemonUnavailableError):
            extents.view(slot_id(1, 0))
        extents.close()


def test_after_a_loss_views_stay_and_the_process_counts_as_alive(daemon: Daemon, extent_map: MakeMap) -> None:
    """Hanging up must not look like this process's death: it may still be copying."""
    extent_id = daemon.extent()
    extents = extent_map(pins_memory=True)
    view = extents.view(slot_id(extent_id, 0))
    connection = daemon.server._connections[1]
    daemon.call(daemon.server._dismiss, connection, RequestError(Reason.OVERLOADED, "does not read"))
    until(lambda: extents.closed)
    with pytest.raises(DaemonUnavailableError, match="does not read"):
        extents.view(slot_id(extent_id, 0))
    view[:4] = b"late"
    assert bytes(daemon.pool.view(slot_id(extent_id, 0))[:4]) == b"late"
    assert daemon.authority.gone == []
    extents.close()
    until(lambda: daemon.authority.gone == [(1, 1)])


def test_no_daemon(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailableError, match="no daemon on"):
        ExtentMap(tmp_path / "none", b"t")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        began_s = time.monotonic()
        with pytest.raises(DaemonUnavailableError, match=r"within 0.05 s"):
            ExtentMap(tmp_path / "mute", b"t", timeout_s=0.05)
        assert time.monotonic() - began_s < 5


def test_close_is_final_idempotent_and_keeps_views(daemon: Daemon, extent_map: MakeMap) -> None:
    lost: list[int] = []
    extent_id = daemon.extent()
    extents = extent_map(on_lost=lambda: lost.append(1))
    view = extents.view(slot_id(extent_id, 0))
    extents.close()
    extents.close()
    assert extents.closed
    until(lambda: daemon.authority.gone == [(1, 1)])
    view[:1] = b"x"
    with pytest.raises(DaemonUnavailableError, match="closed"):
        extents.view(slot_id(extent_id, 0))
    assert lost == []


def test_close_from_a_hook_does_not_wait_for_itself(daemon: Daemon, extent_map: MakeMap) -> None:
    extent_id = daemon.extent()
    extents: ExtentMap = extent_map(on_revoked=lambda _number, _mapping: extents.close())
    extents.map([extent_id])
    daemon.retire(extent_id)
    until(lambda: daemon.authority.gone == [(1, 1)])
    extents._thread.join()
