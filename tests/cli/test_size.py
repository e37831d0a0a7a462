"""Goal: ``kvtierd size`` says what docs/sizing.md promises, for people and as JSON, and refuses what it cannot know.

Method: run it on real models' configurations; compare with the package's own figures and with the page's examples.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvtierd.config import parse_size
from kvtierd.sizing import layout_of, model_shape, needed_bytes
from tests.sizing import configs

Kvtierd = Callable[..., Result]
PAGE = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()


def write(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def answer(kvtierd: Kvtierd, *args: object) -> dict[str, Any]:
    result = kvtierd("size", *args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_json_has_the_figures(kvtierd: Kvtierd, tmp_path: Path) -> None:
    path = write(tmp_path, configs.LLAMA_70B)
    found = answer(kvtierd, "--model-config", path, "--tp", 8, "--dtype", "fp8", "--tokens", 32768, "--users", 100, "--nvme", "7TB")
    layout = layout_of(model_shape(configs.LLAMA_70B), tp=8, dtype="fp8")
    assert found["model"]["bytes_per_token"] == layout.bytes_per_token == 163_840
    assert found["model"]["rank_bytes_per_token"] == 20_480
    assert found["model"]["block_tokens"] == layout.chunk_tokens
    assert found["tiers"]["cpu"]["capacity_bytes"] == 64 << 30
    assert found["tiers"]["nvme"]["capacity_bytes"] == 7 * 10**12
    assert found["tiers"]["nvme"]["needed_bytes"] == needed_bytes(layout, 100, 32768, nvme=True)
    assert found["tiers"]["cpu"]["load_bytes"] == 32768 // layout.chunk_tokens * layout.chunk_tokens * 163_840
    assert "wear" not in found


def test_text_has_the_same_figures(kvtierd: Kvtierd, tmp_path: Path) -> None:
    write(tmp_path, configs.GPT_OSS_120B)
    result = kvtierd("size", "--model-config", tmp_path, "--users", 10, "--prefill-tokens-per-s", 10_000)  # the folder will do
    assert result.exit_code == 0, result.output
    for part in (
        "gpt_oss: GQA, 18 layers, 18 layers with a window of 128, 8 KV heads, bfloat16, 1 rank",
        "73,728 bytes a token (72.0 KiB on each rank); a block of kvtierd is 128 tokens, 9.0 MiB",
        "a context of 8,192 tokens is kept in 576 MiB",
        "needed",
        "computing a context takes 819 ms",
    ):
        assert part in result.output
    assert "needed" not in kvtierd("size", "--model-config", tmp_path).output


@pytest.mark.parametrize(
    "tokens_per_day, drive, dwpd, verdict",
    [
        ("1e7", "7.68TB", 1, "within the rating of 1 a day"),
        ("2e9", "7.68TB", 3, 'set nvme.write_budget to "21972656MiB" and nvme.admission to "second-use"'),
        ("2e9", "1KiB", 0.001, 'set nvme.write_budget to "1MiB"'),  # 0 would be no limit
    ],
)
def test_wear(kvtierd: Kvtierd, tmp_path: Path, tokens_per_day: str, drive: str, dwpd: float, verdict: str) -> None:
    path = write(tmp_path, configs.LLAMA_8B)
    args = ("--model-config", path, "--tokens-per-day", tokens_per_day, "--drive", drive, "--dwpd", dwpd)
    assert verdict in kvtierd("size", *args).output
    wear = answer(kvtierd, *args)["wear"]
    assert wear["fits"] is ("within" in verdict)
    assert wear["drive_bytes"] == parse_size(drive)


@pytest.mark.parametrize(
    "args, part",
    [
        ((), "Missing option '--model-config'"),
        (("--model-config", "/no/such/file"), "cannot read the model's configuration /no/such/file"),
        (("--model-config", "{folder}/text"), "is not valid JSON"),
        (("--model-config", "{folder}/binary"), "is not valid JSON"),
        (("--model-config", "{folder}/deep"), "is not valid JSON"),
        (("--model-config", "{folder}/list"), "is a JSON object, not a list"),
        (("--model-config", "{folder}/empty"), "is this the config.json of a language model?"),
        (("--model-config", "{folder}/good", "--dtype", "fp9"), "'fp9' is no type of a KV cache"),
        (("--model-config", "{folder}/good", "--tp", 0), "0 is not in the range"),
        (("--model-config", "{folder}/good", "--tp", 7), "cannot be split over 7 ranks"),
        (("--model-config", "{folder}/good", "--cpu", "many"), "is not a size"),
        (("--model-config", "{folder}/good", "--drive", "0"), "more than 0 bytes"),
        (("--model-config", "{folder}/good", "--nvme-gb-per-s", "0"), "write GB/s above 0"),
        (("--model-config", "{folder}/good", "--prefill-tokens-per-s", "nan"), "write tokens/s above 0"),
        (("--model-config", "{folder}/good", "--tokens-per-day", "1", "--nvme", "0"), "name --drive"),
        (("--model-config", "{folder}/good", "--tokens", "31"), "a block of this model has 32 tokens; name a longer context"),
        (("--model-config", "/dev/zero"), "is larger than 16.0 MiB"),
    ],
)
def test_bad_input_is_code_2_and_says_what_to_do(kvtierd: Kvtierd, tmp_path: Path, args: tuple[object, ...], part: str) -> None:
    (tmp_path / "text").write_text("model: llama")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "list").write_text("[]")
    (tmp_path / "empty").write_text("{}")
    (tmp_path / "good").write_text(json.dumps(configs.LLAMA_8B))
    result = kvtierd("size", *(str(a).format(folder=tmp_path) for a in args))
    assert result.exit_code == 2, result.output
    assert part in result.output


# ---- the page


def test_bytes_per_token_on_the_page() -> None:
    rows = re.findall(r"^\| [^|]+ `(\w+)` \|[^|]+\| ([\d,]+) \| ([\d,]+) \|", PAGE, re.M)
    assert len(rows) >= 9
    for name, bf16, fp8 in rows:
        shape = model_shape(getattr(configs, name))
        assert f"{layout_of(shape, dtype='bfloat16').bytes_per_token:,}" == bf16, name
        assert f"{layout_of(shape, dtype='fp8').bytes_per_token:,}" == fp8, name


def test_rates_on_the_page(kvtierd: Kvtierd, tmp_path: Path) -> None:
    tiers = answer(kvtierd, "--model-config", write(tmp_path, configs.LLAMA_8B))["tiers"]
    for tier in ("cpu", "nvme"):
        assert f"{tiers[tier]['break_even_tokens_per_s']:,.0f}" in PAGE


def test_examples_on_the_page(kvtierd: Kvtierd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands below a command is what it writes."""
    write(tmp_path, configs.LLAMA_70B)
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```\n\$ kvtierd (size [^\n]*)\n(.*?)```", PAGE, re.S)
    assert examples
    for command, text in examples:
        result = kvtierd(*shlex.split(command))
        assert [line.rstrip() for line in result.output.splitlines()] == text.splitlines()
