"""Goal: of folders that come and go, exactly what was there all along is believed, wherever starts are cut off.

Method: seeded sequences of starts over three folders, each with its device, none, a new one or a former one; some starts end at a
rename, unlink or sync that is drawn. A model knows on which device each block is, and which devices were there when blocks were
served last.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtierd.errors import StartupError
from kvtierd.model import slot_id
from kvtierd.tiers import folder
from kvtierd.tiers.base import BlockIo, Recovered, Result
from kvtierd.tiers.nvme import NvmeStore
from tests.tiers.conformance import block, key_of, realm_of, slot_bytes_for
from tests.tiers.nvme_tools import MIB, config_for, crash, open_store

SIZE = 5000
REALM = realm_of(SIZE)
STEPS = 12
CALLS = ("rename", "unlink", "fsync")


class KilledError(StartupError):
    """The end of a start that was cut off; folders are let go of, as the kernel would."""


class Machine:
    """Three folders and their devices; a device is a folder that is moved to where it is mounted."""

    def __init__(self, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.path = tmp_path
        self.mounts = {name: tmp_path / "mnt" / name for name in "abc"}
        (tmp_path / "mnt").mkdir()
        self.devices: dict[str, list[str]] = {name: [] for name in self.mounts}
        self.mounted: dict[str, str] = {}
        self.calls_left: int | None = None
        """Calls until a start is cut off; None for never."""
        self.alive: dict[bytes, str] = {}
        """Where each block is that was served last."""
        self.served: dict[str, str] = {name: self.new_device(name) for name in self.mounts}
        """Devices that were there then."""
        self.sure: dict[str, str] = dict(self.served)
        """Those of them that were there at each start since, too."""
        self.saved = 0
        monkeypatch.setattr(folder, "mount_point_of", lambda path: str(path) if os.path.isdir(path) else "/")
        for name in CALLS:
            monkeypatch.setattr(f"os.{name}", self.counted(getattr(os, name)))

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any, **more: Any) -> Any:
            if self.calls_left is not None:
                if not self.calls_left:
                    raise KilledError
                self.calls_left -= 1
            return call(*args, **more)

        return counts

    def new_device(self, name: str) -> str:
        device = f"{name}{len(self.devices[name])}"
        self.devices[name].append(device)
        (self.path / device).mkdir()
        return device

    def choose(self) -> dict[str, str]:
        """Devices of the next start; one of those that are sure is among them."""
        chosen = {}
        for name in self.mounts:
            what = self.rng.random()
            if what < 0.55 and name in self.served:
                chosen[name] = self.served[name]
            elif what < 0.7:
                chosen[name] = self.rng.choice(self.devices[name])
            elif what < 0.8:
                chosen[name] = self.new_device(name)
        if not self.sure.items() & chosen.items():
            name = self.rng.choice(sorted(self.sure))
            chosen[name] = self.sure[name]
        return chosen

    def step(self, chosen: dict[str, str], calls: int | None) -> None:
        """One start, and what is done with it."""
        for name, device in chosen.items():
            (self.path / device).rename(self.mounts[name])
        self.calls_left = calls
        try:
            store, recovered = open_store(config_for(*self.mounts.values(), capacity=64 * MIB))
        except KilledError:
            self.sure = dict(self.sure.items() & chosen.items())
        else:
            self.calls_left = None
            self.check(recovered, chosen)
            self.work(store, recovered, chosen)
        finally:
            self.calls_left = None
            for name, device in chosen.items():
                self.mounts[name].rename(self.path / device)

    def check(self, recovered: Recovered, chosen: dict[str, str]) -> None:
        self.found = {key: (generation, slots) for _, key, generation, slots, _ in recovered.blocks}
        believed = set(dict(self.served.items() & chosen.items()).values())
        may = {key for key, device in self.alive.items() if device in believed}
        must = {key for key in may if self.alive[key] in self.sure.values()}
        assert must <= self.found.keys() <= may
        self.alive = {key: device for key, device in self.alive.items() if key in self.found}
        self.served, self.sure = dict(chosen), dict(chosen)

    def work(self, store: NvmeStore, recovered: Recovered, chosen: dict[str, str]) -> None:
        if REALM not in recovered.realms:
            store.register_realm(REALM)
        gone = [key for key in self.found if self.rng.random() < 0.3]
        store.forget([BlockIo(REALM.realm_id, key, *self.found[key], ()) for key in gone])
        store.flush()
        for key in gone:
            del self.alive[key]
        for number in range(self.rng.randrange(4)):
            self.saved += 1
            extent = recovered.next_extent_id + number
            store.add_extent(extent, slot_bytes_for(SIZE), 16)
            written = block(REALM, self.saved, recovered.next_generation + number, slot_id(extent, 0))
            assert store.write([written]) == [Result.OK]
            (device,) = [chosen[name] for name in chosen if list(self.mounts[name].glob(f"segment-{extent}-*"))]
            self.alive[key_of(self.saved)] = device
        if self.rng.random() < 0.5:
            store.close()
        else:
            crash(store)


@pytest.mark.parametrize("seed", [15, 18, 23, 26, 30, 87, 139, 155, 185])
def test_folders_that_come_and_go(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, seed, monkeypatch)
    machine.step(machine.served, None)
    for _ in range(STEPS):
        machine.step(machine.choose(), machine.rng.randrange(14) if machine.rng.random() < 0.5 else None)
