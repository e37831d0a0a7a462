"""Goal: ``kvtierd doctor`` says what the daemon would find about the direct way between GPU memory and NVMe, and by which settings.

Method: the command as a process, over stand-ins for the CUDA driver, kvikio and cupy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtierd.cli.checks_direct import check_direct
from kvtierd.config import Config
from kvtierd.testing.cuda import FakeGpus

STAND_INS = Path(__file__).resolve().parents[1] / "stand_ins"


class Host:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "faults").mkdir()
        (folder / "nvme").mkdir()
        self.environment = FakeGpus(folder / "gpu", size_bytes=128 << 20).environment()
        self.environment |= {"PYTHONPATH": str(STAND_INS), "FAKE_KVIKIO_FAULTS": str(folder / "faults")}

    def doctor(self, gds: str, **environment: str) -> list[dict[str, Any]]:
        (self.folder / "c.toml").write_text(
            '[hbm]\ncapacity = "16MiB"\n[nvme]\nallow_volatile = true\ncapacity = "16MiB"\nreserve = 0\n'
            f'folders = ["{self.folder}/nvme"]\ngds = "{gds}"\n[cpu]\ncapacity = "1MiB"\n[server]\nmetrics = ""\n'
        )
        command = [sys.executable, "-m", "kvtierd", "doctor", "--json", "--config", str(self.folder / "c.toml")]
        env = os.environ | self.environment | environment
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
        return [c for c in json.loads(done.stdout)["checks"] if c["check"] in ("GPU memory to NVMe", "kvikio and cuFile")]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_what_works(host: Host) -> None:
    settings, trial = host.doctor("auto", FAKE_GDS="1", KVIKIO_TASK_SIZE="1048576", CUFILE_ENV_PATH_JSON="/none.json")
    assert "gds_threshold 16384" in settings["found"] and "KVIKIO_TASK_SIZE=1048576" in settings["found"]
    assert "/none.json (not there" in settings["found"]
    assert trial["level"] == "ok" and "by gds" in trial["found"] and "by CPU memory" in trial["found"]
    assert list((host.folder / "nvme").iterdir()) == []


def test_what_does_not(host: Host) -> None:
    alone, _ = host.doctor("auto")
    assert alone["level"] == "ok" and "/run/udev" in alone["found"], "as on any host without it"
    (host.folder / "faults" / "pread").write_text("corrupt")
    for gds, level in (("auto", "warn"), ("on", "error")):
        _, trial = host.doctor(gds, FAKE_GDS="1")
        assert trial["level"] == level and "is not what" in trial["found"] and "cufile.log" in trial["fix"]
    del host.environment["PYTHONPATH"]
    for gds, level in (("auto", "ok"), ("on", "error")):
        missing, _ = host.doctor(gds)
        assert missing["level"] == level and "install kvtierd[cuda12]" in missing["found"]


def test_nothing_is_tried_without_need() -> None:
    assert list(check_direct(Config())) == []
    off = Config.model_validate({"hbm": {"capacity": "16MiB"}, "nvme": {"gds": "off"}})
    assert [f.found for f in check_direct(off)] == ['nvme.gds is "off"']
