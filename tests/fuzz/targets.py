"""All fuzz targets by name, and the corpus of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.fuzz.files import FolderTarget, slot_header, slot_seeds
from tests.fuzz.kept import KeptTarget
from tests.fuzz.rpcs import PacketTarget, RpcTarget, StreamTarget
from tests.fuzz.texts import TomlTarget, YamlTarget

CORPUS: Final = Path(__file__).parent / "corpus"


class _Slot:
    """The pure target for header pages."""

    seeds = staticmethod(slot_seeds)

    def __init__(self, _folder: Path) -> None:
        pass

    def __call__(self, data: bytes) -> None:
        slot_header(data)


TARGETS: Final[dict[str, Callable[[Path], Any]]] = {
    "log": partial(FolderTarget, name="log"),
    "slot": _Slot,
    "pool": partial(FolderTarget, name="pool.json"),
    "tenants": partial(FolderTarget, name="tenants.json"),
    "budget": partial(FolderTarget, name="budget.json"),
    "kept": KeptTarget,
    "toml": TomlTarget,
    "yaml": YamlTarget,
    "rpc": RpcTarget,
    "stream": StreamTarget,
    "packet": PacketTarget,
}
"""Made with a folder of its own. Called with bytes; raises what is a fault. ``close`` where there is something to end."""


def corpus_of(name: str) -> list[bytes]:
    """Inputs worth trying first, in the order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
