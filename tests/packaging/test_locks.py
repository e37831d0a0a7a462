"""Goal: the locks of the container images fit what the project asks for, name one version of each package, and every file by hash.

Method: locks and pyproject.toml are read; nothing is resolved or fetched. `make lock` makes the locks again.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "docker" / "locks"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
FOR_ENGINES = {"torch"}
"""What GPU extras name for connectors; the daemon needs none of it."""


def locked(name: str) -> dict[str, str]:
    """Versions of a lock by package. Each has hashes, and there is nothing else in it."""
    lines = (LOCKS / f"{name}.txt").read_text().replace("\\\n", " ").splitlines()
    pins: dict[str, str] = {}
    for line in lines:
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==([\w.!+]+)((?:\s+--hash=sha256:[0-9a-f]{64})+)", line.strip())
        assert match, f"{name}.txt holds more than pinned packages: {line[:80]}"
        assert match[1] not in pins
        pins[match[1]] = match[2]
    return pins


@pytest.mark.parametrize("variant", ["cpu", "cuda12", "cuda13", "build"])
def test_a_lock_fits_what_is_asked_for(variant: str) -> None:
    pins = locked(variant)
    if variant == "build":
        wanted = [line for line in (LOCKS / "build.in").read_text().splitlines() if not line.startswith("#")]
        wanted += PYPROJECT["build-system"]["requires"]
    else:
        extras = PROJECT["optional-dependencies"]
        wanted = [*PROJECT["dependencies"], *extras["events"], *extras["otel"], *extras["encryption"], *extras.get(variant, [])]
    for text in wanted:
        need = Requirement(text)
        name = canonicalize_name(need.name)
        if name in FOR_ENGINES:
            assert name not in pins
            continue
        assert name in pins, f"{variant}.txt lacks {need}; run: make lock"
        assert need.specifier.contains(pins[name]), f"{variant}.txt has {name} {pins[name]}, and not {need}; run: make lock"


def test_only_gpu_images_hold_gpu_packages() -> None:
    def gpu(variant: str) -> set[str]:
        return {name for name in locked(variant) if name.startswith(("cu", "nvidia-", "kvikio", "libkvikio", "torch", "triton"))}

    assert not gpu("cpu")
    assert {"kvikio-cu12", "nvidia-cuda-runtime-cu12"} <= gpu("cuda12")
    assert {"kvikio-cu13", "nvidia-cuda-runtime"} <= gpu("cuda13")
    assert not any(name.endswith("cu12") for name in gpu("cuda13")) and not any(name.endswith("cu13") for name in gpu("cuda12"))


def test_the_image_can_be_built_from_what_docker_is_shown() -> None:
    """What the Dockerfile's scripts and the wheel read is let through by .dockerignore."""
    shown = re.findall(r"^!(.*)$", (ROOT / "deploy" / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / path).exists() for path in shown)
    wheel = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["only-include"], *wheel["force-include"], "pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]]
    needed += ["deploy/docker/install.sh", "deploy/docker/locks/build.txt"]
    missing = [path for path in needed if not any(path == there or path.startswith(f"{there}/") for there in shown)]
    assert not missing
