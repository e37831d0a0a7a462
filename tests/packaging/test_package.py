"""Goal: what is installed is complete, small and typed, and importing it loads no GPU package.

Method: source distribution and wheel are built from this tree and their members listed; imports run in an own interpreter
whose loaded modules are looked at, with a meta path hook that also catches a GPU package that is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GPU_PACKAGES = ("torch", "cupy", "kvikio")

WATCH = """
import importlib.abc, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {gpu!r}:
            print("imported", name)
        return None

sys.meta_path.insert(0, Watch())
import {module}
print("done", {module}.__name__)
"""


def build(target: str, folder: Path) -> Path:
    """Build "wheel" or "sdist" into a folder with the build backend itself, which needs no network."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=100,
    )
    [path] = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


def test_wheel_holds_the_package_and_the_protocol(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kvtierd").rglob("*.py*") if "__pycache__" not in p.parts}
    assert {name for name in sources if not name.endswith(".pyc")} <= names
    protos = list((ROOT / "proto").rglob("*.proto"))
    assert len(protos) >= 3
    for proto in protos:
        assert wheel.read(proto.relative_to(ROOT / "proto").as_posix()) == proto.read_bytes()
    assert "kvtierd/py.typed" in names
    strangers = {name for name in names if not name.startswith(("kvtierd/", f"kvtierd-{PROJECT['version']}.dist-info/"))}
    assert not strangers


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"kvtierd-{PROJECT['version']}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "kvtierd = kvtierd.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    plain = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert len(plain) == len(PROJECT["dependencies"])
    gpu = [r for r in plain if r.startswith((*GPU_PACKAGES, "nvidia"))]
    assert not gpu
    unbounded = [r for r in plain if "<" not in r or ">=" not in r]
    assert not unbounded


def test_sdist_can_be_tested(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "LICENSE", "README.md", "Makefile", "buf.yaml", "proto/baseline.binpb", "deploy/kvtierd.toml"}
    assert wanted <= names
    assert "tests/packaging/test_package.py" in names


@pytest.mark.parametrize("module", ["kvtierd", "kvtierd.cli", "kvtierd.client", "kvtierd.service", "kvtierd.tiers"])
def test_import_loads_no_gpu_package(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WATCH.format(gpu=GPU_PACKAGES, module=module)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.splitlines() == [f"done {module}"]
