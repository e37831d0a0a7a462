"""Goal: commands without a daemon work: help and completion without imports, configuration in and out, serve's flags.

Method: run the commands; read what they wrote back with the configuration itself; a stand-in for the server's run().
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import kvtierd.cli as cli_module
from kvtierd.config import Config, field_paths, load_config
from kvtierd.demo.trace import default_trace
from kvtierd.service.config_text import config_toml, reference_toml

Kvtierd = Callable[..., Result]


def test_help_imports_no_command() -> None:
    code = (
        "import sys\nfrom kvtierd.cli import cli\n"
        "try: cli.main(['--help'], prog_name='kvtierd')\nexcept SystemExit: pass\n"
        "bad = {'grpc', 'rich', 'aiohttp', 'prometheus_client', 'numpy', 'kvtierd.cli.demo'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("serve", "status", "doctor", "evict", "pin", "unpin", "blocks", "story", "drain", "checkpoint", "config", "demo"):
        assert f"\n  {name} " in done.stdout


def test_a_daemon_starts_without_what_it_may_not_need() -> None:
    """Goal: a start is quick. The client, tables for terminals and the HTTP server take a third of it where they are imported."""
    code = (
        "import sys, kvtierd.cli.local, kvtierd.service.server\n"
        "print({'rich', 'aiohttp', 'kvtierd.client', 'kvtierd.cli.connection'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stdout + done.stderr


@pytest.mark.parametrize("name", [n for n in cli_module._COMMANDS if n not in ("demo", "bench")])
def test_every_command_has_help(kvtierd: Kvtierd, name: str) -> None:
    result = kvtierd(name, "--help")
    assert result.exit_code == 0, result.output
    assert f"Usage: kvtierd {name}" in result.output


def test_a_command_that_is_not_installed_says_so(kvtierd: Kvtierd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli_module._COMMANDS, "demo", ("kvtierd.cli.no_such_module:demo", ""))
    result = kvtierd("demo")
    assert result.exit_code == 1
    assert "not part of this installation" in result.output


def test_unknown_command(kvtierd: Kvtierd) -> None:
    assert kvtierd("frobnicate").exit_code == 2
    result = kvtierd("statsu")
    assert result.exit_code == 2
    assert "did you mean 'status'" in result.output


def test_help_says_how_lists_are_written(kvtierd: Kvtierd) -> None:
    for name in ("serve", "config"):
        assert "nvme.folders=/mnt/a:/mnt/b" in kvtierd(name, "--help").output.replace("\n", "")


@pytest.mark.parametrize(
    "args, code", [(["config"], 0), (["config", "--json", "--reference"], 2), (["evict"], 2), (["status", "--address", "/no/x"], 3)]
)
def test_main_exits_with_the_code(args: list[str], code: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli_module.main(args)
    assert exit_info.value.code == code
    assert "Traceback" not in capfd.readouterr().err


def test_a_closed_pipe_is_no_traceback() -> None:
    code = "from kvtierd.cli import main\nmain(['config', '--reference'])"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(kvtierd: Kvtierd, shell: str) -> None:
    result = kvtierd("completion", shell)
    assert result.exit_code == 0
    assert f"_KVTIERD_COMPLETE={shell}_complete" in result.output
    binary = shutil.which(shell)
    if binary is not None:
        done = subprocess.run([binary, "-n"], input=result.output, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_completion_of_command_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("_KVTIERD_COMPLETE", "bash_complete"), ("COMP_WORDS", "kvtierd ch"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        cli_module.main([])
    assert "checkpoint" in capsys.readouterr().out


# ---- configuration


def test_config_reads_back_to_the_same_values(kvtierd: Kvtierd, tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(
        '[hbm]\nttl = "never"\n[cpu]\ncapacity = "1.5GiB"\nttl = "never"\n[nvme]\nttl = 2.5\nfolders = ["/a b", "/ü\\"q"]\n'
        '[server]\nsocket_mode = 0o660\nmetrics = ""\nmax_deadline = "90s"\n'
        '[tenants."a.b"]\ncpu_quota = "10MiB"\ncpu_ttl = "1h"\n[log]\njson_lines = true\n'
    )
    result = kvtierd("config", "--config", file)
    assert result.exit_code == 0, result.output
    again = tmp_path / "b.toml"
    again.write_text(result.output)
    expected = load_config(file, env={})
    assert expected.cpu.ttl is None
    assert expected.tenants["a.b"].cpu_ttl == 3600
    assert load_config(again, env={}) == expected


def test_default_configuration_reads_back() -> None:
    config = Config()
    assert Config.model_validate(tomllib.loads(config_toml(config))) == config


def test_reference_names_every_key_once_and_is_the_default(kvtierd: Kvtierd) -> None:
    text = reference_toml()
    assert kvtierd("config", "--reference").output.startswith("# kvtierd configuration")
    lines = text.splitlines()
    for path, info in field_paths():
        assert f"# {info.description}" in text, path
    assert sum(line.startswith("#") and " = " in line and not line.startswith("# ") for line in lines) == len(list(field_paths()))
    assert Config.model_validate(tomllib.loads(text)) == Config(), "all is commented out"
    # With the keys uncommented (but those without a value) it still is the default, but for the tenant of the example.
    live = "\n".join(
        line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in lines if "# not set" not in line
    )
    config = Config.model_validate(tomllib.loads(live))
    assert config.model_copy(update={"tenants": {}}) == Config()


def test_config_json_and_set(kvtierd: Kvtierd) -> None:
    result = kvtierd(
        "config", "--json", "--set", "cpu.capacity=2GiB", "--set", "nvme.folders=/a:/b", "--set", "server.socket_mode=0660"
    )
    data = json.loads(result.output)
    assert data["cpu"]["capacity"] == 2 << 30
    assert data["nvme"]["folders"] == ["/a", "/b"]
    assert data["server"]["socket_mode"] == 0o660


@pytest.mark.parametrize(
    "args, part",
    [
        (("--set", "cpu.capacity"), "KEY=VALUE"),
        (("--set", "cpu.capacty=1GiB"), "did you mean cpu.capacity"),
        (("--set", "nonsense=1"), "not a key"),
        (("--set", "server.socket_mode=9z"), "octal"),
        (("--set", "cpu.capacity=many"), "cpu.capacity"),
        (("--set", "nvme.folders=/a::/b"), "separate folders by ':'"),
        (("--set", 'nvme.folders=["/a"]'), "looks like TOML"),
        (("--set", "cpu.ttl=-1"), "cpu.ttl"),
        (("--running", "--set", "cpu.capacity=1GiB"), "--set has no effect here"),
        (("--reference", "--set", "cpu.capacity=1GiB"), "--set has no effect here"),
        (("--config", "/no/such/file.toml"), "cannot read"),
    ],
)
def test_bad_configuration_is_code_2(kvtierd: Kvtierd, args: tuple[str, ...], part: str) -> None:
    result = kvtierd("config", *args)
    assert result.exit_code == 2
    assert part in result.output


# ---- serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """A stand-in for the daemon that only takes its configuration and exits with 7."""
    seen: list[Config] = []

    def run(config: Config) -> int:
        seen.append(config)
        return 7

    module = types.ModuleType("kvtierd.service.server")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvtierd.service.server", module)
    return seen


def test_serve_hands_flags_over_the_file(kvtierd: Kvtierd, served: list[Config], tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[cpu]\ncapacity = "2GiB"\nfree_target = 0.3\n')
    result = kvtierd(
        "serve", "--config", file, "--cpu-capacity", "3GiB", "--nvme-folder", "/a", "--nvme-folder", "/b", "--metrics", "",
        "--socket", "/run/x.sock", "--log-level", "debug", "--set", "server.max_sessions=5",
    )  # fmt: skip
    assert result.exit_code == 7, result.output
    (config,) = served
    assert config.cpu.capacity == 3 << 30
    assert config.cpu.free_target == 0.3
    assert config.nvme.folders == [Path("/a"), Path("/b")]
    assert config.server.metrics == ""
    assert config.server.socket == Path("/run/x.sock")
    assert config.server.max_sessions == 5
    assert config.log.level == "debug"


def test_serve_check_starts_nothing(kvtierd: Kvtierd, served: list[Config]) -> None:
    result = kvtierd("serve", "--check")
    assert result.exit_code == 0
    assert "kvtierd doctor" in result.output
    assert kvtierd("serve", "--check", "--cpu-capacity", "1B").exit_code == 2
    assert served == []


@pytest.mark.parametrize("command", [["serve", "--check"], ["serve"], ["doctor"], ["config"]])
def test_limits_of_tenants_are_part_of_every_check(
    kvtierd: Kvtierd, served: list[Config], tmp_path: Path, command: list[str]
) -> None:
    """A quota below its reserve was fine for `serve --check` and the doctor, and kept `serve` from starting with status 1."""
    file = tmp_path / "a.toml"
    file.write_text('[tenants.a]\nclass = "premium"\ncpu_reserve = "20%"\ncpu_quota = "10%"\n')
    result = kvtierd(*command, "--config", file)
    assert result.exit_code == 2
    assert "cpu_quota (10%) is less than cpu_reserve (20%); raise the quota or lower the reserve" in result.output
    assert served == []


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", [["config"], ["completion", "bash"], ["--help"], ["replay", str(default_trace()), "--capacity", "5%"]]
)
def test_a_full_disk_under_the_output_is_one_line(words: list[str], unbuffered: str) -> None:
    command, env = [sys.executable, "-m", "kvtierd", *words], os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "Error: cannot write all of the output: No space left on device; free some, or write elsewhere\n"
