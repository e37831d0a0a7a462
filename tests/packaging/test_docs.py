"""Goal: what the pages tell people to type works: commands, configuration, programs, links, and the names of keys and metrics.

Method: every code block of every page is looked at by what it is. Commands of kvtierd are parsed by the command line itself, which
does nothing then; targets of make must be there; configuration is loaded; programs run, one after the other as a reader would run
them, against a daemon that is started for it. What belongs to others (docker, helm, systemctl) is checked for the files that it
names, the servers of vLLM and SGLang for the JSON of their arguments.
"""

from __future__ import annotations

import grp
import importlib
import json
import pwd
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml
from click.testing import CliRunner

from kvtierd.cli import cli
from kvtierd.config import field_paths, load_config
from kvtierd.connectors.sglang import settings as sglang
from kvtierd.connectors.vllm.settings import read_settings
from kvtierd.service import metrics_reference
from kvtierd.testing.daemon import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("loadtest/*.md")])
OTHERS = {"docker", "helm", "kubectl", "systemctl", "systemd-analyze", "journalctl", "curl", "pip", "openssl", "vllm"}
OTHERS |= {
    "python3",
    "bash",
    "chmod",
    "mount",
    "rm",
    "cd",
    ".",
    "tr",
    "sha256sum",
    "cat",
    "df",
    "grep",
    "sudo",
    "useradd",
    "install",
}
STAND_INS = {"KEY": "ab" * 32, "HOST:PORT": "localhost:9460", "TICKET": "7", "SHELL": "bash", "SECONDS": "5"}
"""What a reader puts in the place of some words; the others are names or files, and stay as they are."""
SECTIONS = "hbm|cpu|nvme|policy|server|log|events|tracing"


class Block(NamedTuple):
    """A code block: which page, its first line there, its language and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    found, inside, language, begin = [], None, "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            if inside is None:
                inside, language, begin = [], line.strip()[3:], number + 1
            else:
                found.append(Block(page, begin, language, "\n".join(inside) + "\n"))
                inside = None
        elif inside is not None:
            inside.append(line)
        elif line.startswith("    kvtierd "):
            found.append(Block(page, number, "bash", line))
    assert inside is None, f"{page}: a code block without an end"
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(*languages: str) -> Any:
    chosen = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=[block.where for block in chosen])


def commands(text: str) -> list[list[str]]:
    """Words of each command of a script; what follows a pipe is one of its own, and where output goes is left out."""
    text = re.sub(r"(?:^|(?<=\s))#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>\n")
    lexer.commenters = ""
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    found: list[list[str]] = [[]]
    skip = False
    for word in lexer:
        if set(word) <= set("|&;\n"):
            found.append([])
        elif set(word) <= set("<>"):
            skip = True
        elif skip:
            skip = False
        else:
            found[-1].append(word)
    words = [[w for w in command if w] for command in found]
    return [command[next((i for i, w in enumerate(command) if "=" not in w), 0) :] for command in words if command]


def told(block: Block) -> list[list[str]]:
    """Commands of a block, if it holds any."""
    first = block.text.split()[0] if block.text.split() else ""
    if block.language == "bash" or (not block.language and (first in OTHERS or first in ("kvtierd", "make"))):
        return commands(block.text)
    return []


SCRIPTS = [block for block in BLOCKS if told(block)]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[list[str]], str]:
    """Parses a command of kvtierd as the command line does, and does nothing. Returns what is wrong with it."""
    monkeypatch.setattr(click.Command, "invoke", lambda self, ctx: None)
    monkeypatch.chdir(tmp_path)

    def run(words: list[str]) -> str:
        for word in words:
            if word in ("FILE", "TRACE") or (word.endswith((".toml", ".yaml", ".json")) and "/" not in word):
                Path(word).touch()
        result = CliRunner().invoke(cli, [STAND_INS.get(word, word) for word in words], env={"HOME": str(tmp_path)})
        return "" if result.exit_code == 0 else result.output + repr(result.exception)

    return run


@pytest.mark.parametrize("block", SCRIPTS, ids=[block.where for block in SCRIPTS])
def test_commands_are_ones_that_there_are(block: Block, parse: Callable[[list[str]], str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in told(block):
        name = Path(words[0]).name
        if name == "kvtierd":
            assert not (wrong := parse(words[1:])), f"{words}: {wrong}"
        elif name == "make":
            for word in words[1:]:
                variable, given, _ = word.partition("=")
                wanted = rf"^{variable} [?]?:?=|\$\({variable}\)|\$\(if \$\({variable}\)" if given else rf"^{word}:"
                assert re.search(wanted, makefile, re.MULTILINE), word
        else:
            assert name in OTHERS or (ROOT / words[0]).exists(), f"what is {words[0]!r}?"
            paths = [w for w in words if re.match(r"(?:\./)?(deploy|helm|loadtest|tests|docs)/", w)]
            assert not [path for path in paths if not (ROOT / path).exists()], words
        if "--kv-transfer-config" in words:
            transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
            assert transfer["kv_connector"] == "KvtierdConnector"
            read_settings(transfer.get("kv_connector_extra_config", {}), {})
        if "--hicache-storage-backend-extra-config" in words:
            extra = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
            assert extra["class_name"] in importlib.import_module(extra["module_path"]).__all__
            sglang.read_settings(extra)


@blocks("toml")
def test_configuration_can_be_loaded(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pwd.getpwnam", lambda name: pwd.getpwuid(0) if name in ("vllm",) else pytest.fail(name))
    monkeypatch.setattr("grp.getgrnam", lambda name: grp.getgrgid(0) if name in ("inference",) else pytest.fail(name))
    path = tmp_path / "kvtierd.toml"
    path.write_text(block.text)
    if "[tokens." in block.text:
        from kvtierd.runtime.tokens import read_grants

        assert read_grants(path)
    else:
        load_config(path, env={})


@blocks("yaml", "json")
def test_yaml_can_be_read(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict), "tests/helm renders those that are values of a chart"


def test_every_language_is_looked_at() -> None:
    assert {block.language for block in BLOCKS} <= {"", "bash", "toml", "yaml", "json", "python"}


PROGRAMS = sorted({block.page for block in BLOCKS if block.language == "python"})


@pytest.mark.parametrize("page", PROGRAMS, ids=[page.name for page in PROGRAMS])
def test_programs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = DaemonProcess(tmp_path).start()
    monkeypatch.setenv("KVTIERD_ADDRESS", daemon.address)
    names: dict[str, Any] = {"__name__": "a_page"}
    try:
        for block in blocks_of(page):
            if block.language == "python":
                exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
        if client := names.get("client"):
            client.close()
    finally:
        assert daemon.stop() == 0


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_what_is_named_in_passing_is_there(page: Path) -> None:
    """Links, and in `code`: commands of kvtierd with their options, targets of make, keys of the configuration, metrics."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wrong: list[str] = []
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://")) and not (page.parent / target).exists():
            wrong.append(f"link to {target}")
    ctx = click.Context(cli)
    keys = {key for key, _ in field_paths()} | {"server.tls_*"}
    metrics = set(re.findall(r"kvtierd_\w+", metrics_reference.reference()))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for code in (" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)):
        words = code.split()
        if words[0] == "kvtierd" and len(words) > 1 and re.fullmatch(r"[a-z-]+", words[1]):
            command = cli.get_command(ctx, words[1])
            if isinstance(command, click.Group) and len(words) > 2 and words[2] in command.commands:
                command = command.commands[words[2]]
            known = {opt for p in (command.params if command else []) for opt in (*p.opts, *p.secondary_opts)}
            known |= {opt for p in cli.params for opt in p.opts} | {"--help"}
            wrong += [code for word in words if word.startswith("--") and word.partition("=")[0] not in known]
        elif words[0] == "make":
            wrong += [code for word in words[1:] if "=" not in word and word not in targets]
        elif re.fullmatch(rf"(?:{SECTIONS})\.[a-z_]+", code) and not code.endswith((".enable", ".toml")):
            wrong += [code] if code not in keys else []
        wrong += [name for name in re.findall(r"(?<!vllm:)\bkvtierd_[a-z_]+(?=[{`\s]|$)", code) if not known_metric(name, metrics)]
    assert not wrong


def test_operating_names_every_alarm() -> None:
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())["groups"]
    alarms = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    assert set(re.findall(r"^\| `(Kvtierd\w+)` \|", (ROOT / "docs" / "operating.md").read_text(), re.MULTILINE)) == alarms


def known_metric(name: str, metrics: set[str]) -> bool:
    return name in metrics or re.sub(r"_(bucket|sum|count)$", "", name) in metrics
