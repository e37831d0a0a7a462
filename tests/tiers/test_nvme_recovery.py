"""Goal: whatever ends the daemon, a restart finds what was stored and nothing else.

Method: write, crash (descriptors closed, nothing flushed) at each step, open again and compare; files damaged in between.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtierd.model import NO_END, slot_id
from kvtierd.testing.faulty_io import Fault, FaultyEngine
from kvtierd.tiers.base import BlockIo, Recovered, RecoveredExtent, Result
from kvtierd.tiers.io_engine import ThreadEngine
from kvtierd.tiers.nvme import NvmeStore
from kvtierd.tiers.record import RECORD_BYTES, Entry, pack_record

from .conformance import assert_held, block, key_of, realm_of, slot_bytes_for
from .nvme_tools import chunks_of, config_for, crash, flip, open_store

SIZE = 5000
SLOT = slot_bytes_for(SIZE)
REALM = realm_of(SIZE)


def entry(name: object, generation: int, *slots: int) -> Entry:
    return 1, key_of(name), generation, slots, NO_END


def started(folder: Path, *names: int) -> NvmeStore:
    """A new store with blocks: name n at slot n with generation n + 1."""
    store, _ = open_store(config_for(folder))
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 64)
    assert set(store.write([block(REALM, n, n + 1, slot_id(1, n)) for n in names])) <= {Result.OK}
    return store


def forget(store: NvmeStore, name: object, generation: int, *slots: int) -> None:
    store.forget([BlockIo(1, key_of(name), generation, slots, [])])


def names_of(recovered: Recovered, among: int = 100) -> list[int]:
    known = {key_of(n): n for n in range(among)}
    return [known[key] for _, key, *_ in recovered.blocks]


def journals(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.kv[js]"))


def test_an_empty_folder_recovers_nothing(tmp_path: Path) -> None:
    store, recovered = open_store(config_for(tmp_path))
    assert (recovered.realms, recovered.extents, list(recovered.blocks)) == ([], [], [])
    assert (recovered.next_generation, recovered.next_extent_id) == (1, 1)
    store.close()


@pytest.mark.parametrize("clean", [True, False])
def test_blocks_realms_and_extents_are_back(tmp_path: Path, clean: bool) -> None:
    store = started(tmp_path, 3, 1, 2)
    if clean:
        store.close()
    else:
        crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert recovered.realms == [REALM]
    assert recovered.extents == [RecoveredExtent(1, SLOT, 64)]
    assert (recovered.next_generation, recovered.next_extent_id) == (5, 2)
    assert list(recovered.blocks) == [entry(n, n + 1, slot_id(1, n)) for n in (1, 2, 3)]
    for n in (1, 2, 3):
        assert_held(again, REALM, n, n + 1, slot_id(1, n))
    again.close()


def test_a_killed_process_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.tiers.test_nvme_recovery import started, block, REALM, slot_id\n"
        "store = started(Path(sys.argv[1]))\n"
        "for n in range(64):\n"
        "    store.write([block(REALM, n, n + 1, slot_id(1, n))])\n"
        "    print(n, flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        answered = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        answered += [int(line) for line in process.stdout.read().splitlines() if line]
    store, recovered = open_store(config_for(tmp_path))
    held = names_of(recovered)
    assert set(answered) <= set(held)
    for n in held:
        assert_held(store, REALM, n, n + 1, slot_id(1, n))
    store.close()


def test_removals_count_after_a_flush_or_the_next_write(tmp_path: Path) -> None:
    store = started(tmp_path, 0, 1, 2)
    forget(store, 0, 1, slot_id(1, 0))
    store.flush()
    forget(store, 1, 2, slot_id(1, 1))
    assert store.write([block(REALM, 3, 4, slot_id(1, 3))]) == [Result.OK]
    forget(store, 2, 3, slot_id(1, 2))
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [2, 3], "the last removal was in memory only"
    again.close()


def test_a_removal_of_another_generation_removes_nothing(tmp_path: Path) -> None:
    store = started(tmp_path, 0)
    assert store.write([block(REALM, 0, 9, slot_id(1, 5))]) == [Result.OK]
    forget(store, 0, 1, slot_id(1, 0))
    store.close()
    again, recovered = open_store(config_for(tmp_path))
    assert list(recovered.blocks) == [entry(0, 9, slot_id(1, 5))]
    again.close()


def test_a_slot_stored_again_holds_the_later_generation_whatever_the_order(tmp_path: Path) -> None:
    store = started(tmp_path, 0)
    assert store.write([block(REALM, 1, 7, slot_id(1, 0))]) == [Result.OK]
    crash(store)
    with open(tmp_path / "journal-1.kvj", "r+b") as f:
        raw = f.read()
        f.seek(64)
        f.write(raw[64 + RECORD_BYTES :] + raw[64 : 64 + RECORD_BYTES])
    again, recovered = open_store(config_for(tmp_path))
    assert list(recovered.blocks) == [entry(1, 7, slot_id(1, 0))]
    again.close()


def test_of_two_copies_of_one_block_the_newer_is_kept(tmp_path: Path) -> None:
    store = started(tmp_path, 0, 1)
    assert store.write([block(REALM, 0, 50, slot_id(1, 9))]) == [Result.OK]
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert list(recovered.blocks) == [entry(1, 2, slot_id(1, 1)), entry(0, 50, slot_id(1, 9))]
    again.close()


@pytest.mark.parametrize("cut", [1, 40, 63])
def test_a_torn_tail_is_cut_off_and_writing_goes_on_behind_it(tmp_path: Path, cut: int) -> None:
    crash(started(tmp_path, 0, 1))
    path = tmp_path / "journal-1.kvj"
    os.truncate(path, path.stat().st_size - cut)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0]
    assert again.write([block(REALM, 7, 8, slot_id(1, 7))]) == [Result.OK]
    crash(again)
    last, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0, 7]
    last.close()


@pytest.mark.parametrize("tail", [b"\0" * 4096, random.Random(7).randbytes(100)], ids=["zeros", "noise"])
def test_rubbish_at_the_tail_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    crash(started(tmp_path, 0, 1))
    with open(tmp_path / "journal-1.kvj", "ab") as f:
        f.write(tail)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0, 1]
    assert (tmp_path / "journal-1.kvj").stat().st_size == 64 + 2 * RECORD_BYTES
    again.close()


def test_a_damaged_record_in_the_middle_costs_its_block_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crash(started(tmp_path, 0, 1, 2))
    flip(str(tmp_path / "journal-1.kvj"), 64 + RECORD_BYTES + 20)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0, 2]
    assert "1 records in the middle are damaged" in caplog.text
    again.close()


def test_records_that_point_nowhere_are_left_out(tmp_path: Path) -> None:
    store = started(tmp_path, 0)
    journal = next(iter(store._journals.values()))
    key = key_of(1)
    for record in (
        pack_record(key, 100, slot_id(1, 64), 1, 0, 1),  # behind the extent's end
        pack_record(key, 101, slot_id(9, 0), 1, 0, 1),  # no such extent
        pack_record(key, 102, slot_id(1, 3), 5, 0, 1),  # no such realm
        pack_record(key, 103, slot_id(1, 4), 1, 0, 2),  # a shard too many
        pack_record(key, 104, slot_id(1, 5), 1, 1, 1),  # not a shard of one
    ):
        journal.append(record)
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0]
    assert (recovered.next_generation, recovered.next_extent_id) == (105, 10)
    again.close()


def test_incomplete_blocks_of_several_shards_are_left_out(tmp_path: Path) -> None:
    realm = realm_of(SIZE, SIZE, SIZE)
    store, _ = open_store(config_for(tmp_path))
    store.register_realm(realm)
    store.add_extent(1, SLOT, 64)
    for n in range(4):
        assert store.write([block(realm, n, n + 1, *(slot_id(1, 3 * n + s) for s in (2, 0, 1)))]) == [Result.OK]
    # Block 1 loses one slot to a newer block's shard, and that block loses another of its own.
    journal = next(iter(store._journals.values()))
    journal.append(pack_record(key_of(9), 9, slot_id(1, 4), 1, 0, 3) + pack_record(key_of(9), 9, slot_id(1, 30), 1, 2, 3))
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert list(recovered.blocks) == [entry(n, n + 1, *(slot_id(1, 3 * n + s) for s in (2, 0, 1))) for n in (0, 2, 3)]
    again.close()


def test_dropped_extents_are_gone_and_their_numbers_not_used_again(tmp_path: Path) -> None:
    store = started(tmp_path, 0)
    store.add_extent(2, SLOT, 4)
    assert store.write([block(REALM, 1, 2, slot_id(2, 0))]) == [Result.OK]
    store.drop_extent(2)
    store.close()
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0]
    assert [e.extent_id for e in recovered.extents] == [1]
    assert recovered.next_extent_id == 3
    again.close()


def test_a_lost_pool_file_is_taken_from_the_other_folder(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a", tmp_path / "b")
    store, _ = open_store(config)
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 4)
    assert store.write([block(REALM, 0, 1, slot_id(1, 0))]) == [Result.OK]
    store.close()
    (tmp_path / "a" / "pool.json").write_text("{")
    again, recovered = open_store(config)
    assert names_of(recovered) == [0]
    assert recovered.realms == [REALM]
    again.close()
    assert (tmp_path / "a" / "pool.json.damaged-1").exists()
    assert (tmp_path / "a" / "pool.json").read_bytes() == (tmp_path / "b" / "pool.json").read_bytes()


async def test_a_snapshot_replaces_older_journals(tmp_path: Path) -> None:
    store = started(tmp_path, *range(10))
    forget(store, 4, 5, slot_id(1, 4))
    listed = [entry(n, n + 1, slot_id(1, n)) for n in range(10) if n != 4]
    assert await store.checkpoint(chunks_of(listed[:5], listed[5:])) == 9
    assert journals(tmp_path) == ["journal-1.kvj", "journal-2.kvj", "snapshot-2.kvs"]
    assert await store.checkpoint(chunks_of(listed)) == 9
    assert journals(tmp_path) == ["journal-2.kvj", "journal-3.kvj", "snapshot-3.kvs"]
    assert not store.needs_snapshot()
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [n for n in range(10) if n != 4]
    assert recovered.next_generation == 11
    again.close()


async def test_numbers_are_not_given_out_twice_although_their_records_are_gone(tmp_path: Path) -> None:
    store = started(tmp_path, 0, 40)
    store.add_extent(7, SLOT, 1)
    store.drop_extent(7)
    forget(store, 40, 41, slot_id(1, 40))
    for _ in range(3):
        await store.checkpoint(chunks_of([entry(0, 1, slot_id(1, 0))]))
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert (recovered.next_generation, recovered.next_extent_id) == (42, 8)
    assert names_of(recovered) == [0]
    again.close()


async def test_what_happens_while_a_snapshot_is_written_is_not_lost(tmp_path: Path) -> None:
    """A block is stored, one is removed after it was listed, one is replaced after it was listed."""
    store = started(tmp_path, 0, 1, 2)

    async def listing() -> object:
        yield [entry(0, 1, slot_id(1, 0)), entry(1, 2, slot_id(1, 1)), entry(2, 3, slot_id(1, 2))]
        forget(store, 1, 2, slot_id(1, 1))
        forget(store, 2, 3, slot_id(1, 2))
        assert store.write([block(REALM, 5, 6, slot_id(1, 2)), block(REALM, 6, 7, slot_id(1, 6))]) == [Result.OK] * 2

    await store.checkpoint(listing())  # type: ignore[arg-type]
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0, 5, 6]
    again.close()


async def test_a_block_whose_completion_the_lister_had_not_seen_is_not_lost(tmp_path: Path) -> None:
    store = started(tmp_path, 0, 1)
    await store.checkpoint(chunks_of([entry(0, 1, slot_id(1, 0))]))
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0, 1]
    again.close()


@pytest.mark.parametrize("step", ["begun", "half", "renamed", "snapshot gone", "one journal gone"])
def test_a_crash_at_any_step_of_a_snapshot_loses_nothing(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = started(tmp_path, 0, 1)
    kept = entry(0, 1, slot_id(1, 0))

    def snapshot(entries: list[Entry]) -> None:
        files = store.begin_snapshot()
        for folder, data in store.pack_entries(entries).items():
            with open(files[folder], "ab") as f:
                f.write(data)
        store.commit_snapshot(files)

    snapshot([kept, entry(1, 2, slot_id(1, 1))])
    forget(store, 1, 2, slot_id(1, 1))
    assert store.write([block(REALM, 2, 3, slot_id(1, 2))]) == [Result.OK]
    snapshot([kept, entry(2, 3, slot_id(1, 2))])
    entries = [kept, entry(2, 3, slot_id(1, 2))]
    if step in ("begun", "half"):
        files = store.begin_snapshot()
        if step == "half":
            (data,) = store.pack_entries(entries).values()
            Path(files[str(tmp_path)]).write_bytes(data[:70])
    else:
        allowed = {"renamed": 0, "snapshot gone": 1, "one journal gone": 2}[step]
        done: list[str] = []
        real = os.unlink

        def unlink(path: str) -> None:
            if len(done) == allowed:
                raise OSError(5, "crash")
            done.append(path)
            real(path)

        with monkeypatch.context() as patch:
            patch.setattr("os.unlink", unlink)
            if step == "one journal gone":
                snapshot(entries)
            else:
                with pytest.raises(OSError, match="crash"):
                    snapshot(entries)
    assert store.write([block(REALM, 3, 4, slot_id(1, 3))]) == [Result.OK]
    crash(store)
    for _ in range(2):
        again, recovered = open_store(config_for(tmp_path))
        assert names_of(recovered) == [0, 2, 3]
        assert not list(tmp_path.glob("*.tmp"))
        crash(again)


async def test_a_snapshot_that_fails_leaves_the_former_state(tmp_path: Path) -> None:
    store = started(tmp_path, 0, 1)

    async def broken() -> object:
        yield [entry(0, 1, slot_id(1, 0))]
        raise OSError(28, "no room")

    with pytest.raises(OSError, match="no room"):
        await store.checkpoint(broken())  # type: ignore[arg-type]
    assert journals(tmp_path) == ["journal-1.kvj", "journal-2.kvj"]
    assert not list(tmp_path.glob("*.tmp"))
    assert await store.checkpoint(chunks_of([entry(0, 1, slot_id(1, 0)), entry(1, 2, slot_id(1, 1))])) == 2
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0, 1]
    again.close()


@pytest.mark.parametrize("step", ["listing", "syncing", "done"])
async def test_snapshots_that_cannot_be_deleted_never_pile_up(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Method: nothing can be deleted, and several snapshots come as far as that; then all is well again."""
    store = started(tmp_path, 0)
    listed = [entry(0, 1, slot_id(1, 0))]

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    async def listing() -> AsyncIterator[list[Entry]]:
        yield listed
        if step == "listing":
            broken()

    assert await store.checkpoint(chunks_of(listed)) == 1
    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", broken)
        if step == "syncing":
            patch.setattr("kvtierd.tiers.folder.Folder.sync", broken)
        for _ in range(4):
            with pytest.raises(OSError, match="broken"):
                await store.checkpoint(listing())
    assert len(list(tmp_path.glob("snapshot-*"))) == 2
    assert await store.checkpoint(chunks_of(listed)) == 1
    assert len(list(tmp_path.glob("snapshot-*"))) == 1
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [0]
    again.close()


async def test_a_cancelled_snapshot_cleans_up_and_the_next_one_works(tmp_path: Path) -> None:
    store = started(tmp_path, 0)
    listed = asyncio.Event()

    async def stuck() -> object:
        yield [entry(0, 1, slot_id(1, 0))]
        listed.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(store.checkpoint(stuck()))  # type: ignore[arg-type]
    await listed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not list(tmp_path.glob("*.tmp"))
    assert await store.checkpoint(chunks_of([entry(0, 1, slot_id(1, 0))])) == 1
    store.close()


async def test_two_snapshots_asked_for_at_once_are_written_one_after_the_other(tmp_path: Path) -> None:
    store = started(tmp_path, 0)
    listed = [entry(0, 1, slot_id(1, 0))]
    assert await asyncio.gather(*(store.checkpoint(chunks_of(listed)) for _ in range(3))) == [1, 1, 1]
    assert journals(tmp_path) == ["journal-3.kvj", "journal-4.kvj", "snapshot-4.kvs"]
    store.close()


def test_a_removal_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    engine = FaultyEngine(ThreadEngine())
    started(tmp_path, 0, 1).close()
    store, _ = open_store(config_for(tmp_path), engine)
    forget(store, 0, 1, slot_id(1, 0))
    engine.inject(Fault.ENOSPC, write=True, path_part="journal-")
    with pytest.raises(OSError, match="injected"):
        store.flush()
    store.flush()
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [1]
    again.close()


def test_a_slot_that_is_being_overwritten_no_longer_counts_for_its_former_block(tmp_path: Path) -> None:
    """The removal reaches the journal before the data is touched, so a crash in between finds no block that is half gone."""
    engine = FaultyEngine(ThreadEngine())
    started(tmp_path, 0, 1).close()
    store, _ = open_store(config_for(tmp_path), engine)
    forget(store, 0, 1, slot_id(1, 0))
    engine.inject(Fault.EIO, write=True)
    assert store.write([block(REALM, 2, 3, slot_id(1, 0))]) == [Result.IO_ERROR]
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [1]
    again.close()


def test_what_a_failed_journal_write_left_does_not_count(tmp_path: Path) -> None:
    engine = FaultyEngine(ThreadEngine())
    started(tmp_path, 9).close()
    store, _ = open_store(config_for(tmp_path), engine)
    engine.inject(Fault.SHORT, write=True, path_part="journal-")
    engine.inject(Fault.ENOSPC, write=True, path_part="journal-")
    assert set(store.write([block(REALM, n, 20 + n, slot_id(1, n)) for n in range(4)])) == {Result.NO_SPACE}
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == [9]
    again.close()


@pytest.mark.parametrize("fault", [Fault.SHORT, Fault.TORN])
def test_a_journal_write_that_stops_within_a_record(tmp_path: Path, fault: Fault) -> None:
    """A short write goes on; a torn one that claims success costs its own records and those after it stay readable."""
    engine = FaultyEngine(ThreadEngine())
    store, _ = open_store(config_for(tmp_path), engine)
    store.register_realm(REALM)
    store.add_extent(1, SLOT, 64)
    engine.inject(fault, write=True, path_part="journal-")
    for n in range(3):
        assert store.write([block(REALM, n, n + 1, slot_id(1, n))]) == [Result.OK]
    crash(store)
    again, recovered = open_store(config_for(tmp_path))
    assert names_of(recovered) == ([0, 1, 2] if fault is Fault.SHORT else [1, 2])
    again.close()


def test_a_hundred_thousand_blocks_recover_quickly_and_in_order(tmp_path: Path) -> None:
    """The records are written without their payload: recovery reads journals only."""
    count = 100_000
    realm = realm_of(4096)
    store, _ = open_store(config_for(tmp_path, capacity=1 << 30))
    store.register_realm(realm)
    store.add_extent(1, 8192, count)
    assert store.write([block(realm, 0, 1, slot_id(1, 0))]) == [Result.OK]
    journal = next(iter(store._journals.values()))
    journal.append(b"".join(pack_record(g.to_bytes(32, "little"), g, slot_id(1, g - 1), 1, 0, 1) for g in range(2, count + 1)))
    crash(store)
    again, recovered = open_store(config_for(tmp_path, capacity=1 << 30))
    assert [g for _, _, g, *_ in recovered.blocks] == list(range(1, count + 1))
    again.close()


def test_an_older_copy_whose_removal_was_lost_never_comes_back(tmp_path: Path) -> None:
    store = started(tmp_path, 0)
    # As after a power cut that took the removal of the first copy.
    assert store.write([block(REALM, 0, 7, slot_id(1, 5))]) == [Result.OK]
    crash(store)
    store, recovered = open_store(config_for(tmp_path))
    assert list(recovered.blocks) == [entry(0, 7, slot_id(1, 5))], "the newest counts"
    forget(store, 0, 7, slot_id(1, 5))
    store.flush()
    crash(store)
    store, recovered = open_store(config_for(tmp_path))
    assert list(recovered.blocks) == []
    store.close()
