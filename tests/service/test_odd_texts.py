"""Goal: whatever text people or their tools put into a configuration, it is taken, or refused with a line that says why.

Method: texts that once ended the program, took all memory, or came back in an error as long as they were.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.config import load_config
from kvtierd.connectors.lmcache import LmcacheConfigError, read_config_file, translate
from kvtierd.connectors.params import request_settings
from kvtierd.errors import ConfigError
from kvtierd.units import shown

MANY = "9" * 5000


@pytest.mark.parametrize("text", [
    f"a = {MANY}", f"[cpu]\ncapacity = {MANY}", f"[cpu]\ncapacity = 0x{'f' * 5000}", "a = " + "[" * 3000, "a = " + "{a=" * 2000,
    f"[cpu]\ncapacity = '{MANY}'", f"[cpu]\ncapacity = '{MANY}x'", f"[cpu]\ncapacity = '1{'x' * 5000}'", "a." * 3000 + "a = 1",
    "".join(f"key{n} = 1\n" for n in range(5000)), '[server]\nsocket = "a\\u0000b"', '[nvme]\nfolders = ["/a", "\\u0000"]',
    '[tenants."a\\u0000b"]\nclass = "basic"', "[cpu]\ncapacity = [[[1]]]", "\ufffe", "[cpu]\ncapacity = 1979-05-27",
], ids=lambda t: t[:24])  # fmt: skip
def test_odd_toml_is_refused_in_few_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kvtierd.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load_config(path, env={})
    assert 0 < len(str(refused.value)) < 8000


def test_text_of_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kvtierd.toml"
    path.write_bytes(b'[log]\nlevel = "\xff"\n')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(path, env={})


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
"""Lists that are 9 to the 12th long when they are written out."""


@pytest.mark.parametrize("use", [
    "max_local_cpu_size: *a11", "local_disk: *a11", "local_cpu: *a11", "remote_url: *a11", "extra_config: {remote_url: *a11}",
    "extra_config: *a11", "enable_p2p: *a11", f"chunk_size: 0x{'f' * 5000}", f"remote_url: 0x{'f' * 5000}",
    f"extra_config: {{0x{'f' * 5000}: 1}}", "extra_config: {1: 2}",
])  # fmt: skip
def test_yaml_that_grows_when_it_is_shown(tmp_path: Path, use: str) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(BOMB + use + "\n")
    try:
        told = translate({}, {}, read_config_file(path)).warnings
    except LmcacheConfigError as e:
        told = [str(e)]
    name = use.split(":")[0]
    told = [line for line in told if name in line]
    assert told and max(map(len, told)) < 400, "it is refused, or said to have no counterpart"


def test_values_are_shown_in_few_words_whatever_they_are() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    wide = {str(n): [n] * 1000 for n in range(1000)}
    for value in (deep, wide, 10**5000, [10**5000], "x" * 10**6, b"x" * 10**6, {"a": deep}):
        assert len(shown(value)) <= 80
    assert (shown("a'b\n"), shown(5), shown(None), shown([1, "x"])) == ('"a\'b\\n"', "5", "None", "[1, 'x']")
    with pytest.raises(ValueError, match=r"kvtierd\.ttl is a number"):
        request_settings({"kvtierd.ttl": deep})
