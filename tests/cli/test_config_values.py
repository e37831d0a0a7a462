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
CHOICES = {
    key: typing.get_args(info.annotation) for key, info in field_paths() if typing.get_origin(info.annotation) is typing.Literal
}
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
        ("tenants", {"": {}}, "printable"),
        ("tenants", {"x" * 129: {}}, "printable"),
        ("tenants", {"my team": {}}, "has no spaces"),
        ("tenants", {"team/..": {}}, "is no path"),
        ("tenants", {"..": {}}, "is no path"),
        ("tenants", {"/team": {}}, "is no path"),
        ("tenants", {"a//b": {}}, "is no path"),
        ("tenants", {"other": {}}, "the metrics call the sum of all tenants without a label of their own so"),
        ("nvme.folders", ["/a", "/b", "/a"], "names a folder twice"),
        ("cpu.keep", "memory", 'write "systemd", a folder\'s absolute path, or ""'),
        ("tracing.endpoint", "collector:4317", '"http://127.0.0.1:4317"'),
        ("hbm.capacity", "1MiB", "below 2MiB"),
    ],
)
def test_a_refusal_says_what_is_allowed(key: str, value: object, part: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(key, value)
    assert key in str(error.value)
    assert part in str(error.value)


def test_no_refusal_is_a_regular_expression() -> None:
    assert not [key for key, info in field_paths() if any(getattr(m, "pattern", None) for m in info.metadata)]
    assert {"nvme.io", "log.level", "tenants.NAME.scope"} <= set(CHOICES)


@pytest.mark.parametrize("key", CHOICES)
@pytest.mark.parametrize("value", ["publik", "", 3, ["lru"]])
def test_a_choice_is_told_in_words(key: str, value: object) -> None:
    """Goal: who misspells a choice is told what they wrote, and all that may be written."""
    with pytest.raises(ConfigError) as error:
        load(key, value)
    words = str(error.value).removeprefix(key.replace(".NAME.", ".acme.") + ": ")
    assert words.startswith(f"{value!r} is not possible; write ")
    assert all(f'"{choice}"' in words for choice in CHOICES[key])


@pytest.mark.parametrize("name", ["a", "default", "others", "Other", "a.b", "org/team", "...", "größe", "名", "x" * 128])
def test_most_names_are_good(name: str) -> None:
    assert list(load("tenants", {name: {}}).tenants) == [name]


PREMIUM = {"class": "premium"}
TIERS = {"cpu": {"capacity": "64MiB"}, "nvme": {"capacity": "64MiB"}}


@pytest.mark.parametrize(
    "tenants, parts",
    [
        (
            {"a": PREMIUM | {"cpu_reserve": "32MiB", "cpu_quota": "16MiB"}},
            ["tenants.a", "cpu_quota (16MiB)", "cpu_reserve (32MiB)"],
        ),
        ({"a": PREMIUM | {"cpu_reserve": "32MiB", "cpu_quota": "49%"}}, ["raise the quota or lower the reserve"]),
        ({"a": PREMIUM | {"nvme_reserve": "10%", "nvme_quota": 0}}, ["nvme_quota (0)", "nvme_reserve (10%)"]),
        ({n: PREMIUM | {"cpu_reserve": "40MiB"} for n in "ab"}, ["80MiB in all", "64MiB", "lower cpu_reserve", "set for a, b"]),
        ({n: PREMIUM | {"nvme_reserve": "20%"} for n in "abcdef"}, ["lower nvme_reserve", "a, b, c, d, e and 1 more"]),
        ({"a": PREMIUM | {"nvme_reserve": "64MiB"}}, ["it has 62MiB for blocks"]),
        ({"a": PREMIUM | {"hbm_reserve": 1}}, ["no HBM tier", "leave hbm_reserve out", "set for a"]),
    ],
)
def test_limits_that_cannot_hold_together_are_refused(tenants: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(env={}, flags=TIERS | {"tenants": tenants})
    for part in parts:
        assert part in str(error.value)


def test_limits_on_hbm_are_checked_as_far_as_its_size_is_known() -> None:
    """Method: two GPUs that are named, then as many as there are."""
    both = {n: PREMIUM | {"hbm_reserve": "3GiB"} for n in "ab"}
    two = {"hbm.capacity": "2GiB", "hbm.devices": ["0", "1"]}
    with pytest.raises(ConfigError, match="the reserves on HBM would be 6GiB in all, and it has 4GiB"):
        load_config(env={}, flags=two | {"tenants": both})
    unknown = {"hbm.capacity": "2GiB"}
    load_config(env={}, flags=unknown | {"tenants": both})
    load_config(env={}, flags=unknown | {"tenants": {"a": PREMIUM | {"hbm_reserve": "50%", "hbm_quota": "2GiB"}}})
    for reserve, quota in (("50%", "40%"), ("2GiB", "1GiB")):
        with pytest.raises(ConfigError, match=r"hbm_quota .* is less than hbm_reserve"):
            load_config(env={}, flags=unknown | {"tenants": {"a": PREMIUM | {"hbm_reserve": reserve, "hbm_quota": quota}}})


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
        if key in CHOICES:
            continue
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
