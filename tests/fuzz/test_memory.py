"""Goal: no file makes the daemon take memory in proportion to what the file claims.

Method: a child process may have little more than it has after its imports, and then reads files of a terabyte that is not there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MORE_BYTES = 256 << 20
PROGRAM = """
import resource, sys
from pathlib import Path
from kvtierd.config import load_config
from kvtierd.connectors.lmcache import read_config_file
from kvtierd.errors import ConfigError
from tests.fuzz.files import FolderTarget, config_of, fill
from kvtierd.tiers.nvme import NvmeStore
import yaml
folder, name = Path(sys.argv[1]), sys.argv[2]
fill(folder)
with (folder / name).open("ab") as f:
    f.truncate(1 << 40)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
if name.startswith("config"):
    try:
        (load_config if name.endswith("toml") else read_config_file)(folder / name)
    except ConfigError as e:
        assert "larger than" in str(e), e
else:
    store = NvmeStore.open(config_of(folder))
    store.recover()
    store.load_tenants()
    store.load_budget()
    store.close()
"""


@pytest.mark.parametrize("name", [
    "journal-2.kvj", "snapshot-2.kvs", "pool.json", "realms.log", "tenants.json", "budget.json", "config.toml", "config.yaml",
])  # fmt: skip
def test_a_file_of_a_terabyte(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "nvme"), name, str(MORE_BYTES)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
