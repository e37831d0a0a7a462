"""Goal: the connector fits vLLM's scheduler as vLLM's own tests see it: failed loads, errors, aborted and finished requests.

Method: vLLM's tests, fetched beside the environment by ``install.sh`` and not part of this project, run with kvtierd's connector
wherever they name none. They drive the real scheduler and say themselves which blocks failed, so they check the contract
between connector and scheduler rather than copies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from kvtierd.testing.vllm.environment import engine_environment
from tests.vllm.conftest import Daemons

UPSTREAM = Path(os.environ.get("KVTIERD_VLLM_TESTS") or Path(sys.prefix) / "upstream")
FILES = {
    "test_kv_load_failure_recovery": 10,
    "test_invalid_blocks_correctness": 3,
    "test_error_propagation": 2,
    "test_cache_pollution_prevention": 1,
    "test_kv_connector_lifecycle": 1,
    "test_multi_connector": 20,
}
"""Files and the least number of tests that pass in each."""
NEEDS_ITS_MODEL = "test_multi_example_connector_consistency"
"""Counts the blocks of a text as the tokenizer of a model that is not here cuts it."""


def test_scheduler_contract(models: Path, daemons: Daemons, tmp_path: Path) -> None:
    folder = UPSTREAM / "tests/v1/kv_connector/unit"
    assert folder.is_dir(), f"vLLM's tests are not in {UPSTREAM}: run make test-vllm, or name their folder in KVTIERD_VLLM_TESTS"
    daemon = daemons()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    result = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "upstream_plugin",
                "-p",
                "no:cacheprovider",
                "-c",
                str(tmp_path / "pytest.ini"),
            ),
            *("--rootdir", str(UPSTREAM), f"--junitxml={tmp_path / 'results.xml'}", "-k", f"not {NEEDS_ITS_MODEL}"),
            *(str(folder / f"{name}.py") for name in FILES),
        ],
        cwd=UPSTREAM,
        env=engine_environment()
        | {
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTHONSAFEPATH": "",
            "KVTIERD_UPSTREAM_MODEL": str(models / "llama"),
            "KVTIERD_UPSTREAM_ADDRESS": daemon.address,
            "KVTIERD_UPSTREAM_COUNT": str(tmp_path / "count"),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    cases = ET.parse(tmp_path / "results.xml").getroot().iter("testcase")
    passed = [case.get("classname", "") for case in cases if len(case) == 0]
    for name, least in FILES.items():
        assert sum(name in classname for classname in passed) >= least, f"{name}:\n{result.stdout[-3000:]}"
    ours = [classname for classname in passed if "test_multi_connector" not in classname]  # most of which take others
    assert int((tmp_path / "count").read_text()) >= len(ours) / 2, "the tests made hardly any connector of kvtierd"
