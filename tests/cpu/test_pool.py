"""Goal: the CPU tier's memory is sized, sealed, faulted in and given back as promised, and never exceeds its capacity.

Method: real memfds of this process are counted by the pages that the kernel says they have, not by the pool's own books; races
with the prefaulting threads are made certain by holding a chunk in the middle, or likely by seeded sequences of operations.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.config import CpuConfig
from kvtierd.errors import StartupError
from kvtierd.memory import HUGE_PAGE_BYTES, SEALS, SharedMapping, can_gather, create_memfd
from kvtierd.model import slot_id
from kvtierd.tiers import cpu, prefault
from kvtierd.tiers.cpu import CpuPool
from tests.cpu.tools import MIB, memfd_page_bytes, memfds, page_bytes_of, until

SLOT = 64 << 10


def make_pool(
    capacity: str = "8MiB", extent: str = "1MiB", prefault: bool = True, threads: int = 2, huge_pages: bool = True
) -> CpuPool:
    config = CpuConfig(capacity=capacity, extent=extent, prefault=prefault, prefault_threads=threads, huge_pages=huge_pages)
    pool = CpuPool(config)
    pool.start()
    return pool


@pytest.fixture
def pool() -> Iterator[CpuPool]:
    made = make_pool()
    yield made
    made.close()


@pytest.fixture
def bare() -> Iterator[CpuPool]:
    made = make_pool(prefault=False)
    yield made
    made.close()


def test_an_extent_has_its_exact_size_and_no_pages_yet(bare: CpuPool) -> None:
    bare.create(1, SLOT, 5)
    assert os.fstat(bare.fd(1)).st_size == bare.size_bytes(1) == 5 * SLOT
    assert bare.reserved_bytes == 5 * SLOT
    assert memfd_page_bytes() == 0
    assert not os.get_inheritable(bare.fd(1))


def test_slots_are_disjoint_writable_and_shared(bare: CpuPool) -> None:
    bare.create(7, SLOT, 3)
    for index in range(3):
        view = bare.view(slot_id(7, index))
        assert len(view) == SLOT
        view[:] = bytes([index + 1]) * SLOT
    assert os.pread(bare.fd(7), 3 * SLOT, 0) == b"\x01" * SLOT + b"\x02" * SLOT + b"\x03" * SLOT


def test_what_does_not_exist_is_a_bug(bare: CpuPool) -> None:
    bare.create(1, SLOT, 2)
    with pytest.raises(KeyError):
        bare.view(slot_id(2, 0))
    with pytest.raises(AssertionError):
        bare.view(slot_id(1, 2))
    with pytest.raises(AssertionError):
        bare.create(1, SLOT, 2)
    with pytest.raises(AssertionError, match="capacity"):
        bare.create(2, MIB, 8)
    with pytest.raises(AssertionError, match="whole pages"):
        bare.create(2, 100, 1)


def huge_page_ranges(mapping: SharedMapping) -> list[tuple[int, int]]:
    """Parts (offset, length) of a mapping for which huge pages were asked for, from the kernel's own list."""
    found, inside = [], None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(x, 16) - mapping.address for x in match.groups())
            inside = (start, end - start) if 0 <= start < mapping.size_bytes else None
        elif inside and line.startswith("VmFlags:") and "hg" in line.split():
            found.append(inside)
    return found


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages to ask for")
def test_huge_pages_are_asked_for_but_never_reach_beyond_the_end() -> None:
    region = prefault.Region(create_memfd("kvtierd-test", 7 * MIB), 7 * MIB)
    try:
        assert huge_page_ranges(region.mapping) == [(0, 6 * MIB)]
        region.cut(3 * MIB + SLOT)
        assert huge_page_ranges(region.mapping) == [(0, 2 * MIB)]
        region.mapping.populate(0, region.size_bytes)
        assert page_bytes_of(region.fd) == region.size_bytes
    finally:
        region.close()


def huge_bytes(mapping: SharedMapping) -> int:
    """Bytes of a mapping that this process has mapped as huge pages of shared memory, from the kernel's own list."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            inside = 0 <= int(match[1], 16) - mapping.address < mapping.size_bytes
        elif inside and line.startswith("ShmemPmdMapped:"):
            total += int(line.split()[1]) * 1024
    return total


def test_a_mapping_starts_where_a_huge_page_can_start() -> None:
    for size in (4096, SLOT, HUGE_PAGE_BYTES, 5 * MIB):
        region = prefault.Region(create_memfd("kvtierd-test", size), size)
        assert region.mapping.address % HUGE_PAGE_BYTES == 0
        region.mapping.view[:] = b"\x07" * size
        assert os.pread(region.fd, size, 0) == b"\x07" * size
        region.close()


def test_mapping_takes_no_more_addresses_than_bytes() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * 4096

    fd = create_memfd("kvtierd-test", 64 * MIB)
    before = mapped()
    mappings = [SharedMapping(fd, 64 * MIB) for _ in range(32)]
    assert mapped() - before < 32 * 65 * MIB
    for mapping in mappings:
        mapping.release()
    gc.collect()
    assert mapped() - before < 64 * MIB
    os.close(fd)


gathers = pytest.mark.skipif(not can_gather(), reason="this kernel gathers no huge pages of shared memory (Linux 6.1)")


@gathers
def test_memory_is_gathered_in_huge_pages_whatever_the_kernels_setting_is() -> None:
    pool = make_pool(capacity="9MiB", extent="9MiB")
    try:
        until(lambda: pool.prefaulted_bytes == 9 * MIB)
        pool.create(1, MIB, 9)
        assert pool.huge_page_bytes == 8 * MIB
        assert huge_bytes(pool._extents[1].region.mapping) == 8 * MIB
        other = SharedMapping(pool.fd(1), 9 * MIB)  # as a client maps it
        assert not any(other.view)
        assert huge_bytes(other) == 8 * MIB
    finally:
        pool.close()


def test_huge_pages_can_be_left_off() -> None:
    pool = make_pool(capacity="8MiB", extent="8MiB", huge_pages=False)
    try:
        until(lambda: pool.prefaulted_bytes == 8 * MIB)
        assert pool.huge_page_bytes == 0
    finally:
        pool.close()


@pytest.mark.parametrize("number, asked", [(errno.ENOMEM, prefault.MAX_REFUSALS), (errno.EAGAIN, 40)])
def test_memory_without_a_free_huge_page_is_faulted_in_small_ones(
    number: int, asked: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def refuse(self: SharedMapping, offset: int) -> None:
        calls.append(offset)
        raise OSError(number, "refused")

    monkeypatch.setattr(SharedMapping, "gather", refuse)
    monkeypatch.setattr(prefault, "can_gather", lambda: True)
    pool = make_pool(capacity="80MiB", extent="40MiB", threads=1)
    try:
        until(lambda: pool.prefaulted_bytes == 80 * MIB)
        assert len(calls) == asked
        assert pool.huge_page_bytes == 0
        assert ("small pages: [Errno 12] refused" in caplog.text) == (number == errno.ENOMEM)
    finally:
        pool.close()


@gathers
def test_a_cut_waits_for_a_huge_page_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that one would put pages behind the end, and nobody would count them."""
    inside, go_on = threading.Event(), threading.Event()
    gather = SharedMapping.gather

    def slow(self: SharedMapping, offset: int) -> None:
        inside.set()
        assert go_on.wait(20)
        gather(self, offset)

    monkeypatch.setattr(SharedMapping, "gather", slow)
    pool = make_pool(capacity="2MiB", extent="2MiB", threads=1)
    try:
        assert inside.wait(20)
        creating = threading.Thread(target=pool.create, args=(1, SLOT, 20))  # in the middle of the huge page
        creating.start()
        creating.join(0.05)
        assert creating.is_alive(), "it waits for the chunk"
        go_on.set()
        creating.join()
        assert page_bytes_of(pool.fd(1)) == 20 * SLOT
        until(lambda: pool.prefaulted_bytes == 2 * MIB)
        assert memfd_page_bytes() == 2 * MIB
    finally:
        go_on.set()
        pool.close()


@pytest.mark.parametrize("populates", [True, False], ids=["huge pages", "old kernel"])
def test_a_cut_waits_for_no_chunk_before_the_end(populates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for those that would be begun meanwhile."""
    some, go_on = threading.Semaphore(0), threading.Event()

    def slow(*_: object) -> None:
        assert go_on.is_set() or some.acquire(timeout=20)

    monkeypatch.setattr(SharedMapping, "gather", slow)
    monkeypatch.setattr(prefault, "allocate", slow)
    monkeypatch.setattr(prefault, "can_gather", lambda: populates)
    monkeypatch.setattr(prefault, "can_populate", lambda: populates)
    asked: list[int] = []
    prefaulter = prefault.Prefaulter(2, huge_pages=True, refill=lambda: asked.append(1) is not None)
    region = prefault.Region(create_memfd("kvtierd-test", 64 * MIB), 64 * MIB)
    prefaulter.start()
    try:
        prefaulter.add(region, urgent=True)
        until(lambda: region.adding == [2 * MIB, 4 * MIB])
        prefaulter.cut(region, 33 * MIB)
        assert region.adding == [2 * MIB, 4 * MIB], "it did not wait for these"
        cutting = threading.Thread(target=prefaulter.cut, args=(region, 3 * MIB))
        cutting.start()
        until(lambda: region.size_bytes == 3 * MIB)
        some.release()
        some.release()
        cutting.join(20)
        assert not cutting.is_alive()
        assert region.next_offset <= 6 * MIB, "nothing behind the new end was begun"
    finally:
        go_on.set()
        some.release()
        some.release()
        prefaulter.close()
        region.close()


@pytest.mark.parametrize("size", [0, SLOT, 4 * SLOT, 100 * SLOT])
def test_nobody_can_change_the_size(bare: CpuPool, size: int) -> None:
    bare.create(1, SLOT, 2)
    copy = os.dup(bare.fd(1))
    try:
        assert fcntl.fcntl(copy, fcntl.F_GET_SEALS) & SEALS == SEALS
        if size != 2 * SLOT:
            with pytest.raises(PermissionError):
                os.ftruncate(copy, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(PermissionError):
            os.posix_fallocate(copy, 2 * SLOT, SLOT)
        bare.view(slot_id(1, 1))[:1] = b"x"
    finally:
        os.close(copy)


def test_a_taken_blank_is_sealed_at_its_new_size(pool: CpuPool) -> None:
    until(lambda: pool.prefaulted_bytes == 8 * MIB)
    pool.create(1, 3 * SLOT, 5)
    assert os.fstat(pool.fd(1)).st_size == 15 * SLOT
    assert page_bytes_of(pool.fd(1)) == 15 * SLOT, "it was faulted in"
    with pytest.raises(PermissionError):
        os.ftruncate(pool.fd(1), MIB)


def test_the_whole_capacity_is_faulted_in_ahead(pool: CpuPool) -> None:
    until(lambda: pool.prefaulted_bytes == 8 * MIB)
    assert memfd_page_bytes() == pool.blank_bytes == 8 * MIB
    assert pool.reserved_bytes == 0


def test_a_capacity_that_is_no_multiple_of_the_extent_is_used_up() -> None:
    pool = make_pool(capacity=str(5 * MIB + 12_345))
    try:
        until(lambda: pool.prefaulted_bytes == 5 * MIB + 12_288)
        assert memfd_page_bytes() == 5 * MIB + 12_288
    finally:
        pool.close()


def test_an_extent_larger_than_any_blank_takes_their_room(pool: CpuPool) -> None:
    until(lambda: pool.prefaulted_bytes == 8 * MIB)
    pool.create(1, 3 * MIB, 1)
    assert memfd_page_bytes() <= 8 * MIB
    until(lambda: pool.prefaulted_bytes == 8 * MIB)
    assert pool.blank_bytes == 5 * MIB


def test_a_small_extent_does_not_cut_a_large_blank_down(pool: CpuPool) -> None:
    until(lambda: pool.prefaulted_bytes == 8 * MIB)
    pool.create(1, SLOT, 1)
    assert pool.blank_bytes == 8 * MIB - SLOT


def test_retired_memory_is_gone_at_once_and_counts_until_it_is_released(pool: CpuPool) -> None:
    until(lambda: pool.prefaulted_bytes == 8 * MIB)
    pool.create(1, MIB, 1)
    pool.view(slot_id(1, 0))[:6] = b"secret"
    other = os.dup(pool.fd(1))
    pool.retire(1)
    try:
        assert page_bytes_of(other) == 0
        assert os.pread(other, 6, 0) == bytes(6)
        assert pool.reserved_bytes == MIB
        assert pool.blank_bytes == 7 * MIB, "its room is not used while a device may hold its pages"
    finally:
        os.close(other)
    pool.released(1)
    until(lambda: pool.prefaulted_bytes == 8 * MIB)
    assert pool.reserved_bytes == 0


def test_another_extent_never_shows_old_bytes(pool: CpuPool) -> None:
    pool.create(1, MIB, 8)
    for index in range(8):
        pool.view(slot_id(1, index))[:] = b"\xff" * MIB
    pool.retire(1)
    pool.released(1)
    pool.create(2, MIB, 8)
    assert not any(any(pool.view(slot_id(2, index))) for index in range(8))


def test_a_view_outlives_its_extent(bare: CpuPool) -> None:
    bare.create(1, SLOT, 2)
    view = bare.view(slot_id(1, 1))
    view[:1] = b"x"
    bare.retire(1)
    gc.collect()
    assert view[0] == 0
    view[:1] = b"y"  # nobody else's memory
    bare.close()
    assert view[0] == ord("y")


def test_retiring_waits_for_a_chunk_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the chunk would put pages back right after they were punched out, and nobody would count them."""
    inside, go_on = threading.Event(), threading.Event()
    populate = SharedMapping.populate

    def slow(self: SharedMapping, offset: int, length: int) -> None:
        if threading.current_thread().name.startswith("kvtierd-prefault"):
            inside.set()
            assert go_on.wait(20)
        populate(self, offset, length)

    monkeypatch.setattr(SharedMapping, "populate", slow)
    pool = make_pool(capacity="1MiB", threads=1)
    try:
        assert inside.wait(20)
        pool.create(1, MIB, 1)  # the blank that is being worked on
        other = os.dup(pool.fd(1))
        retiring = threading.Thread(target=pool.retire, args=(1,))
        retiring.start()
        retiring.join(0.05)
        assert retiring.is_alive(), "it waits for the chunk"
        go_on.set()
        retiring.join()
        assert page_bytes_of(other) == 0
        os.close(other)
    finally:
        go_on.set()
        pool.close()


def test_a_chunk_never_puts_pages_behind_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    populate = SharedMapping.populate

    def slow(self: SharedMapping, offset: int, length: int) -> None:
        if threading.current_thread().name.startswith("kvtierd-prefault"):
            inside.set()
            assert go_on.wait(20)
        populate(self, offset, length)

    monkeypatch.setattr(SharedMapping, "populate", slow)
    pool = make_pool(capacity="2MiB", extent="2MiB", threads=1, huge_pages=False)
    try:
        assert inside.wait(20)
        pool.create(1, SLOT, 20)
        go_on.set()
        until(lambda: page_bytes_of(pool.fd(1)) == 20 * SLOT)
        until(lambda: pool.prefaulted_bytes == 2 * MIB, "the rest becomes a blank")
        assert memfd_page_bytes() == 2 * MIB
    finally:
        go_on.set()
        pool.close()


@pytest.mark.parametrize("huge_pages, populates", [(True, True), (False, True), (True, False)], ids=["huge", "small", "old kernel"])
@pytest.mark.parametrize("seed", range(4))
def test_the_capacity_holds_whatever_happens(seed: int, huge_pages: bool, populates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents come, are written to and go while threads fault in: pages of all memfds together stay within the capacity."""
    monkeypatch.setattr(prefault, "can_populate", lambda: populates)
    rng = random.Random(seed)
    capacity = 24 * MIB
    pool = make_pool(capacity=str(capacity), extent="4MiB", huge_pages=huge_pages)
    live: dict[int, tuple[int, int]] = {}
    retiring: dict[int, int] = {}
    retired: list[int] = []
    try:
        for extent_id in range(1, 120):
            room = capacity - sum(size * count for size, count in live.values()) - sum(retiring.values())
            slot_bytes = rng.choice([4096, SLOT, 3 * SLOT, MIB, 5 * MIB])
            count = min(rng.choice([1, 4 * MIB // slot_bytes or 1, 17]), room // slot_bytes)
            if count and rng.random() < 0.7:
                pool.create(extent_id, slot_bytes, count)
                live[extent_id] = (slot_bytes, count)
                pool.view(slot_id(extent_id, rng.randrange(count)))[:] = b"\x5a" * slot_bytes
            elif live:
                victim = rng.choice(list(live))
                retired.append(os.dup(pool.fd(victim)))
                pool.retire(victim)
                retiring[victim] = live[victim][0] * live.pop(victim)[1]
            if retiring and rng.random() < 0.5:
                done = rng.choice(list(retiring))
                del retiring[done]
                pool.released(done)
            assert pool.reserved_bytes == sum(s * c for s, c in live.values()) + sum(retiring.values())
            assert pool.reserved_bytes + pool.blank_bytes <= capacity
            for _ in range(3):
                assert memfd_page_bytes() <= capacity
        for extent_id in retiring:
            pool.released(extent_id)
        if populates:
            until(lambda: pool.prefaulted_bytes > capacity - 4 * MIB, "all but less than an extent is faulted in at the end")
        assert all(page_bytes_of(fd) == 0 for fd in retired), "no retired extent got pages back"
        assert memfd_page_bytes() <= capacity
    finally:
        for fd in retired:
            os.close(fd)
        pool.close()


def test_extents_may_be_retired_in_another_thread() -> None:
    pool = make_pool(capacity="16MiB")
    try:
        for extent_id in range(1, 100):
            pool.create(extent_id, MIB, 4)
            pool.view(slot_id(extent_id, 3))[:] = b"\x01" * MIB
            if extent_id > 1:
                retiring = threading.Thread(target=pool.retire, args=(extent_id - 1,))
                retiring.start()
                pool.create(1000 + extent_id, MIB, 1)
                pool.retire(1000 + extent_id)
                pool.released(1000 + extent_id)
                retiring.join()
                pool.released(extent_id - 1)
            assert pool.reserved_bytes == 4 * MIB
            assert memfd_page_bytes() <= 16 * MIB
    finally:
        pool.close()


def test_faulting_in_never_changes_content() -> None:
    for _ in range(20):
        pool = make_pool(capacity="4MiB", extent="4MiB")
        pool.create(1, MIB, 4)
        for index in range(4):
            pool.view(slot_id(1, index))[:] = bytes([index + 1]) * MIB
        until(lambda pool=pool: pool.prefaulted_bytes == 4 * MIB)  # type: ignore[misc]
        assert all(bytes(pool.view(slot_id(1, index))) == bytes([index + 1]) * MIB for index in range(4))
        pool.close()


def test_faulting_in_stops_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(self: SharedMapping, offset: int, length: int) -> None:
        raise OSError(12, "no memory")

    monkeypatch.setattr(SharedMapping, "populate", full)
    monkeypatch.setattr(prefault, "can_populate", lambda: True)
    pool = make_pool(capacity="2MiB")
    try:
        until(lambda: "stopped: " in caplog.text)
        pool.create(1, MIB, 2)
        pool.view(slot_id(1, 0))[:1] = b"x"
        assert pool.prefaulted_bytes == 0
    finally:
        pool.close()


def test_closing_during_the_prefault_leaves_nothing() -> None:
    pool = make_pool(capacity="512MiB", extent="64MiB", threads=4)
    pool.create(1, MIB, 3)
    pool.close()
    pool.close()
    assert not list(memfds())


def test_a_failed_create_changes_nothing(bare: CpuPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(cpu, "seal", fail)
        with pytest.raises(OSError, match="too many"):
            bare.create(1, SLOT, 1)
    assert bare.reserved_bytes == 0
    assert not list(memfds())
    bare.create(1, SLOT, 1)


def test_blanks_are_taken_from_the_wanted_numa_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[int] = []

    def prefer(self: SharedMapping, node: int) -> bool:
        nodes.append(node)
        return True

    monkeypatch.setattr(SharedMapping, "prefer_node", prefer)
    monkeypatch.setattr(cpu, "_numa_nodes", lambda: [0, 1])
    pool = make_pool(capacity="4MiB", threads=1)
    try:
        until(lambda: pool.prefaulted_bytes == 4 * MIB)
        assert sorted(nodes) == [0, 0, 1, 1]
        for extent_id in (1, 2, 3):
            pool.create(extent_id, MIB, 1, numa_node=1)
        assert nodes[4:5] == [1], "the third one is made fresh on its node"
        assert memfd_page_bytes() <= 4 * MIB
    finally:
        pool.close()


def test_memory_of_a_node_is_preferred_where_the_kernel_lets_us(bare: CpuPool) -> None:
    bare.create(1, SLOT, 1)
    mapping = SharedMapping(bare.fd(1), SLOT)
    assert mapping.prefer_node(1023) is False, "no such node"
    assert mapping.prefer_node(-1) is mapping.prefer_node(1 << 20) is False, "no node at all"
    mapping.release()


def test_too_few_descriptors_are_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 300))
    with pytest.raises(StartupError, match="1024 extents, but this process may open 300 files"):
        make_pool(capacity="1GiB", extent="1MiB", prefault=False)


def test_numa_nodes_are_read_from_the_system(tmp_path: Path) -> None:
    path = tmp_path / "has_memory"
    assert cpu._numa_nodes(path) == [0]
    path.write_text("0-1,4\n")
    assert cpu._numa_nodes(path) == [0, 1, 4]


def test_pages_that_the_kernel_keeps_count_until_the_last_process_has_gone(
    bare: CpuPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_fd: int, _size_bytes: int) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr("kvtierd.tiers.cpu.punch", refuse)
    bare.create(1, 4096, 4)
    assert bare.has_extent(1)
    bare.retire(1)
    assert not bare.has_extent(1)
    assert bare.reserved_bytes == 4 * 4096
    assert "extent 1 keeps its pages" in caplog.text
    bare.released(1)
    assert bare.reserved_bytes == 0
