"""Goal: the files in deploy/ fit this version of the daemon.

Method: the example configuration is loaded as it is and once more with each commented-out key switched on, and its values
are compared with the defaults that its first line promises; the unit file and the Dockerfile are read for what they say
about paths and users.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtierd import __version__
from kvtierd.config import Config, field_paths, load_config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "kvtierd.toml"
COMMENTED = re.compile(r"^#(\[[a-z.]+\]|[a-z_]+ = .*)$")


def all_keys_on() -> str:
    """The example with every commented-out key and table in force."""
    return "\n".join(match[1] if (match := COMMENTED.match(line)) else line for line in EXAMPLE.read_text().splitlines())


def test_example_loads_and_holds_the_defaults() -> None:
    assert load_config(EXAMPLE, env={}) == Config()


def test_example_with_every_key_on_loads(tmp_path: Path) -> None:
    path = tmp_path / "all.toml"
    path.write_text(all_keys_on())
    config = load_config(path, env={})
    assert len(config.nvme.folders) == 2
    assert config.tenants["research"].nvme_ttl == 7 * 86400
    assert config.server.listen == "0.0.0.0:9460"


def test_example_names_every_key() -> None:
    seen, table = set(), ""
    for line in all_keys_on().splitlines():
        if match := re.match(r"\[([a-z.]+)\]", line):
            table = match[1].replace("tenants.research", "tenants.NAME")
        elif match := re.match(r"([a-z_]+) = ", line):
            seen.add(f"{table}.{match[1]}")
    assert seen == {key for key, _ in field_paths()}


def test_unit_file_gives_the_daemon_its_default_places(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    text = (ROOT / "deploy" / "systemd" / "kvtierd.service").read_text()
    unit.read_string(text)
    service = unit["Service"]
    assert service["Type"] == "exec"
    assert service["User"] == "kvtierd"
    environment = dict(line.split("=", 2)[1:] for line in text.splitlines() if line.startswith("Environment="))
    monkeypatch.setenv("XDG_RUNTIME_DIR", environment["XDG_RUNTIME_DIR"])
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    config = Config()
    assert config.server.socket.parent == Path("/run") / service["RuntimeDirectory"]
    assert config.nvme.folders[0].parent == Path("/var/cache") / service["CacheDirectory"]
    assert float(service["TimeoutStopSec"].removesuffix("s")) > config.server.drain_timeout
    assert "Environment=KVTIERD_CONFIG=/etc/kvtierd/kvtierd.toml" in text
    places = " ".join(f"{name}={environment[name]}" for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"))
    page = (ROOT / "docs" / "operating.md").read_text()
    doctor = [line for line in page.splitlines() if "kvtierd doctor --config" in line]
    assert doctor and all(line.startswith(f"{places} kvtierd doctor") for line in doctor), "the doctor looks where the unit does"
    assert f"KVTIERD_ADDRESS=unix:{config.server.socket}" in page


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
@pytest.mark.parametrize("options", [False, True])
def test_systemd_takes_the_unit_and_finds_it_locked_down(tmp_path: Path, options: bool) -> None:
    """As it is, and with each option that it offers switched on."""
    text = (ROOT / "deploy" / "systemd" / "kvtierd.service").read_text()
    if options:
        text, count = re.subn(r"^#(?=[A-Z]\w+=)", "", text, flags=re.MULTILINE)
        assert count >= 4
    unit = tmp_path / "kvtierd.service"
    unit.write_text(text.replace("/opt/kvtierd/bin/kvtierd", shutil.which("true") or ""))
    for command in (["verify"], ["security", "--offline=yes", "--no-pager", "--threshold=20"]):
        result = subprocess.run(["systemd-analyze", *command, str(unit)], capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr
        if command == ["verify"]:
            assert not result.stderr


def test_dockerfile_runs_unprivileged_with_known_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    last_stage = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001:10001$", last_stage, re.MULTILINE)
    health = re.search(r'CMD \["python3", "-c", "(.*)"\]', last_stage)
    assert health is not None
    assert "http://127.0.0.1:9464/healthz" in health[1]
    variables = dict(re.findall(r"\b(KVTIERD_\w+|XDG_\w+)=(\S+)", last_stage))
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, variables.pop(name))
    config = load_config(env=variables)
    volumes = re.search(r"^VOLUME \[(.*)\]$", last_stage, re.MULTILINE)
    assert volumes is not None
    assert {str(config.server.socket.parent), str(config.nvme.folders[0].parent)} == set(re.findall(r'"([^"]+)"', volumes[1]))
    assert config.server.metrics == "0.0.0.0:9464"
    assert f'image.version="{__version__}"' in last_stage


def test_readme_names_every_page() -> None:
    readme = (ROOT / "README.md").read_text()
    missing = [page.name for page in sorted((ROOT / "docs").glob("*.md")) if f"](docs/{page.name})" not in readme]
    assert not missing
