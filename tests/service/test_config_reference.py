"""Goal: docs/configuration.md is what the code makes, on every machine, and says of each key what may be written.

Method: compare the page with one made now, and with one made under other variables; look each key up in it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtierd.config import Config, field_paths
from kvtierd.service.config_reference import PLACES, reference

DOC = Path(__file__).parents[2] / "docs" / "configuration.md"


def rows() -> dict[str, list[str]]:
    """Cells of each key: default, value, text."""
    found, section = {}, ""
    for line in reference().splitlines():
        if head := re.fullmatch(r"## `\[(.+)\]`", line):
            section = head[1]
        elif row := re.fullmatch(r"\| `(\w+)` \| (.*) \|", line):
            found[f"{section}.{row[1]}"] = re.split(r" (?<!\\)\| ", row[2])
    return found


def test_the_page_is_up_to_date() -> None:
    assert DOC.read_text() == reference(), "run make docs"


def test_the_page_does_not_depend_on_who_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference()
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere/cache")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/elsewhere/run")
    assert reference() == before
    assert str(Config().server.socket).startswith("/elsewhere")
    assert set(PLACES) <= {key for key, _ in field_paths()}


def test_every_key_says_its_default_its_values_and_what_it_is() -> None:
    found = rows()
    assert list(found) == [key for key, _ in field_paths()]
    for key, cells in found.items():
        assert len(cells) == 3, key
        assert all(cells), key


@pytest.mark.parametrize(
    "key, default, values",
    [
        ("cpu.capacity", '`"1GiB"`', "size"),
        ("cpu.ttl", '`"10min"`', 'duration or `"never"`'),
        ("nvme.ttl", '`"never"`', 'duration or `"never"`'),
        ("nvme.io", '`"auto"`', '`"auto"`, `"threads"`, `"kvikio"`'),
        ("nvme.depth", "`8`", "whole number from 2 to 256"),
        ("server.max_ticket_share", "`0.5`", "number above 0 to 1"),
        ("server.socket_mode", "`0o600`", "permissions"),
        ("server.listen", "not set", "text"),
        ("server.tls_cert", "not set", "path"),
        ("nvme.folders", PLACES["nvme.folders"], "list of paths"),
        ("log.json_lines", "`false`", "`true` or `false`"),
    ],
)
def test_values(key: str, default: str, values: str) -> None:
    assert rows()[key][:2] == [default, values]
