"""Goal: no key takes a value that cannot be: each refusal names the key and what may be written instead.

Method: every key of the configuration, found from its fields, against numbers that no key can mean; then single keys.
"""

from __future__ import annotations

import math
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from kvtierd.config import Config, Group, User, field_paths, load_config
from kvtierd.errors import ConfigError
from kvtierd.service.config_text import config_toml
from kvtierd.units import Share

NUMBERS = [key for key, info in field_paths() if not {int, float}.isdisjoint(typing.get_args(info.annotation) or [info.annotation])]
NEVER_A_NUMBER = [math.nan, math.inf, -math.inf, -1, -0.5, 10**400, 1e308, 2**63, True, "nan", "inf", "-1", "1e400", "9" * 5000, ""]


def load(key: str, value: object) -> Config:
    """The configuration with one key set, as a file would."""
    return load_config(env={}, flags={key.replace(".NAME.", ".acme."): value})


def test_every_kind_of_number_is_found() -> None:
    assert {"cpu.capacity", "cpu.ttl", "cpu.free_target", "nvme.depth", "server.socket_mode", "tenants.NAME.cpu_ttl"} <= set(
        NUMBERS
    )
    assert not {"cpu.prefault", "nvme.io", "server.listen"} & set(NUMBERS)


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("value", NEVER_A_NUMBER, ids=lambda v: str(v)[:8])
def test_no_number_is_absurd(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        load(key, value)
    text = str(error.value)
    assert text.startswith(key.replace(".NAME.", ".acme.") + ": "), text
    assert any(word in text for word in ("write", "lies between", "is a number with a unit")), text
    assert len(text) < 300, "the value is shortened"


@pytest.mark.parametrize("key", [key for key in NUMBERS if key.endswith("ttl")])
def test_no_ttl_is_spelled_never(key: str) -> None:
    config = load(key, "never")
    section: Any = config.tenants["acme"] if key.startswith("tenants") else getattr(config, key.split(".")[0])
    # A tenant's own says so, where it would otherwise have the tier's.
    assert getattr(section, key.rpartition(".")[2]) == ("never" if key.startswith("tenants") else None)
    with pytest.raises(ConfigError, match='"never"'):
        load(key, -1)


@pytest.mark.parametrize(
    "key, value, part",
    [
        ("server.listen", "0.0.0.0:99999", "between 1 and 65535"),
        ("server.listen", "0.0.0.0:0", "between 1 and 65535"),
        ("server.listen", "0.0.0.0", "host:port"),
        ("server.listen", "::1:9460", "[::1]"),
        ("server.metrics", "127.0.0.1:" + "9" * 5000, "between 1 and 65535"),
        ("server.metrics", "9464", "host:port"),
        ("server.max_deadline", "2d", "up to 1 day"),
        ("server.max_deadline", 0, "above 0"),
        ("server.socket_mode", "9z", "octal"),
        ("server.socket_mode", 0o1777, "octal"),
        ("cpu.free_target", 1, "from 0 to 0.9"),
        ("nvme.depth", 2.5, "whole number from 2 to 256"),
        ("server.max_ticket_share", 0, "above 0 up to 1"),
        ("tenants", {"a\nb": {}}, "printable"),
        ("hbm.capacity", "1MiB", "below 2MiB"),
    ],
)
def test_a_refusal_says_what_is_allowed(key: str, value: object, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(key, value)
    assert key in str(error.value)
    assert part in str(error.value)


@pytest.mark.parametrize("text", ['["/a", "/b"]', "/a::/b", ":/a", "", " "])
def test_a_list_is_separated_by_colons(text: str) -> None:
    with pytest.raises(ConfigError, match=r"KVTIERD_NVME_FOLDERS.*separate folders by ':'"):
        load_config(env={"KVTIERD_NVME_FOLDERS": text})


def test_variables_are_read_like_flags() -> None:
    config = load_config(env={"KVTIERD_NVME_FOLDERS": "/a:/b", "KVTIERD_SERVER_SOCKET_MODE": "0660", "KVTIERD_NVME_DEPTH": "16"})
    assert (config.nvme.folders, config.server.socket_mode, config.nvme.depth) == ([Path("/a"), Path("/b")], 0o660, 16)
    with pytest.raises(ConfigError, match="octal"):
        load_config(env={"KVTIERD_SERVER_SOCKET_MODE": "rw"})


def test_the_largest_values_are_written_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text('[nvme]\ncapacity = "1EiB"\n[cpu]\nttl = "3650d"\n'.replace("1EiB", "1048576TiB"))
    config = load_config(file, env={})
    assert config.nvme.capacity == 1 << 60
    file.write_text(config_toml(config))
    assert load_config(file, env={}) == config


def test_types_of_keys_are_those_that_are_checked() -> None:
    simple = {int, float, bool, str, Path, Share, User, Group, typing.Literal["never"]}
    for key, info in field_paths():
        kinds = set(typing.get_args(info.annotation)) - {types.NoneType} or {info.annotation}
        assert kinds <= simple, f"{key}: a new kind of value needs a check of its own"


def test_whole_numbers_may_be_floats_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("[server]\nsocket_mode = 432.0\n[nvme]\ndepth = 16.0\n")
    config = load_config(file, env={})
    assert (config.server.socket_mode, config.nvme.depth) == (0o660, 16), "Helm writes every number as a float"
    file.write_text("[server]\nsocket_mode = 432.5\n")
    with pytest.raises(ConfigError, match="octal"):
        load_config(file, env={})


def test_a_file_without_end_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("cpu = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(path, env={})
