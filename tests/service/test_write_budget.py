"""Goal: what is left of the write budget survives a restart, whatever is wrong with its file, and time that passed counts.

Method: the file by itself, the keeper with clocks that stand where the test wants, and a real daemon that is stopped and started.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtierd.client import Client
from kvtierd.core.admission import DAY_S, Admission
from kvtierd.core.realm import Tenant
from kvtierd.model import Namespace
from kvtierd.runtime.restart import KEEP_BUDGET_S, BudgetKeeper
from kvtierd.runtime.wallclock import WallClock
from kvtierd.testing.daemon import DaemonProcess
from kvtierd.tiers.budget_file import NAME, SavedBudget, load_budget, save_budget
from kvtierd.tiers.folder import Folder
from kvtierd.tiers.json_file import checksum
from kvtierd.v1 import admin_pb2

MIB = 1 << 20
TENANT = Tenant("t")


class Clocks:
    """The core's clock and the wall's."""

    def __init__(self, core_s: float, wall_s: float) -> None:
        self.core_s, self.wall_s = core_s, wall_s

    def pass_by(self, seconds: float) -> None:
        self.core_s += seconds
        self.wall_s += seconds

    @property
    def both(self) -> WallClock:
        return WallClock(lambda: self.core_s, lambda: self.wall_s)


class Store:
    """Keeps what is saved."""

    def __init__(self) -> None:
        self.saved: list[SavedBudget] = []

    def save_budget(self, saved: SavedBudget) -> None:
        self.saved.append(saved)


def budget(size: int = 1000) -> Admission:
    return Admission(second_use=False, window_s=1.0, budget_bytes=size)


def keeper(admission: Admission, store: Store, clocks: Clocks, saved: SavedBudget | None = None) -> BudgetKeeper:
    return BudgetKeeper(admission, store, clocks.both, saved)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("left", "ago_s", "expected"),
    [(100.0, 0.0, 100), (100.0, DAY_S / 10, 200), (-500.0, DAY_S / 2, 0), (900.0, DAY_S, 1000), (100.0, -3600.0, 100)],
)
def test_time_that_passed_fills_the_budget_up(left: float, ago_s: float, expected: int) -> None:
    clocks = Clocks(50.0, 1e9)
    admission = budget()
    keeper(admission, Store(), clocks, SavedBudget(left, 1e9 - ago_s))
    assert admission.left_bytes(clocks.core_s) == pytest.approx(expected, abs=1), "a wall clock that was set back adds nothing"


async def test_it_is_written_down_now_and_then_when_it_has_changed() -> None:
    clocks, store, admission = Clocks(50.0, 1e9), Store(), budget()
    kept = keeper(admission, store, clocks)
    admission.spend(clocks.core_s, TENANT, 400)
    await kept.keep()
    assert not store.saved
    clocks.pass_by(KEEP_BUDGET_S)
    await kept.keep()
    await kept.keep(now=True)
    assert store.saved == [SavedBudget(admission.left_bytes(clocks.core_s), clocks.wall_s)]
    admission.spend(clocks.core_s, TENANT, 100)
    await kept.keep(now=True)
    assert len(store.saved) == 2
    await keeper(budget(0), store, clocks).keep(now=True)
    assert len(store.saved) == 2, "nothing to keep without a budget"


def test_the_file(tmp_path: Path) -> None:
    folders = [Folder.claim(tmp_path / name, allow_volatile=True, clock=lambda: 0.0) for name in "ab"]
    assert load_budget(folders) is None
    save_budget(folders, SavedBudget(-5.0, 100.0))
    save_budget(folders[:1], SavedBudget(7.0, 200.0))
    assert load_budget(folders) == SavedBudget(7.0, 200.0)
    for text in ("", "{", "[1]", '{"left_bytes": "x", "at_wall_s": 1}', '{"left_bytes": NaN, "at_wall_s": 1}', '{"left_bytes": 1}'):
        (tmp_path / "a" / NAME).write_text(text)
        assert load_budget(folders) == SavedBudget(-5.0, 100.0), text
    for folder in folders:
        folder.clean_up()
        folder.release()
    assert (tmp_path / "b" / NAME).exists(), "it is one of the folder's own files"
    kept = json.loads((tmp_path / "b" / NAME).read_text())
    assert (kept.pop("checksum"), kept) == (checksum(kept), {"left_bytes": -5.0, "at_wall_s": 100.0})


def test_a_daemon_shows_and_keeps_its_budget(tmp_path: Path) -> None:
    """A budget of 8 MiB; 4 MiB are written; a restart later they are still gone, and so is what a first use would need more."""
    daemon = DaemonProcess(tmp_path / "d", {"nvme": {"write_budget": "8MiB", "admission": "second-use"}})
    try:
        daemon.start()
        with Client(Namespace(shard_bytes=(MIB,)), daemon.address, require=True, timeout_s=20.0) as client:
            assert client.save([bytes([n]) * 32 for n in range(4)], [bytes(MIB)] * 4).saved == 4
        with daemon.admin() as admin:
            assert admin.Drain(admin_pb2.DrainRequest(timeout_s=20.0, resume=True)).dirty_bytes == 0
        counters = daemon.status().counters
        assert counters["nvme_write_budget_bytes"] == 8 * MIB
        left = counters["nvme_write_budget_left_bytes"]
        assert 3.9 * MIB < left <= 4.1 * MIB
        assert counters["kvtierd_nvme_not_admitted_blocks_total"] == 0
        assert daemon.stop() == 0
        daemon.start()
        assert left - 100 <= daemon.status().counters["nvme_write_budget_left_bytes"] <= left + 0.1 * MIB
    finally:
        daemon.kill()
