"""Prints, for pip, the lowest version of each package that the package needs, as its bounds have it, and what its tests need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OF_TESTS = re.compile(r"PyYAML|cryptography|hypothesis|msgspec|opentelemetry-|pytest|pyzmq")


def lowest(requirement: str) -> str:
    """``name>=1.2,<3`` as ``name==1.2``. Raises ValueError for a requirement without a lower bound."""
    found = re.fullmatch(r"([\w-]+)>=([\w.]+)(,.*)?", requirement)
    if found is None:
        raise ValueError(f"{requirement} has no lower bound: write it as name>=version,<version")
    return f"{found[1]}=={found[2]}"


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print("\n".join(map(lowest, project["dependencies"])))
    print("\n".join(filter(OF_TESTS.match, project["optional-dependencies"]["dev"])))
