"""Goal: what ``kv_connector_extra_config`` says is understood, or refused at the start with a text that names key and remedy.

Method: every key with a good and with bad values, of the types that JSON has and of those that shells make of them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvtierd.connectors.vllm.settings import Settings, read_settings

DEFAULTS = Settings()


def read(**settings: Any) -> Settings:
    return read_settings({f"kvtierd.{name}": value for name, value in settings.items()}, {})[0]


def test_nothing_said() -> None:
    assert read_settings({}, {}) == (DEFAULTS, [])
    assert DEFAULTS.saves
    assert DEFAULTS.loads


@pytest.mark.parametrize(
    ("name", "value", "understood"),
    [
        ("address", "unix:/run/k.sock", "unix:/run/k.sock"),
        ("tenant", "a", "a"),
        ("chunk_tokens", 256, 256),
        ("chunk_tokens", "512", 512),
        ("lookup_timeout_ms", 1.5, 1.5),
        ("load_timeout_ms", "100", 100.0),
        ("save_timeout_ms", 1, 1.0),
        ("save_decode", True, True),
        ("save_decode", "false", False),
        ("gate", "0", False),
        ("prefetch", "True", True),
        ("min_hit_tokens", 0, 0),
        ("max_loads", 4096, 4096),
        ("max_held_fraction", 0.5, 0.5),
        ("salt_tenants", {"s": "t"}, {"s": "t"}),
        ("revision", "v2", "v2"),
        ("role", "load", "load"),
        ("request_params", False, False),
    ],
)
def test_good_values(name: str, value: Any, understood: Any) -> None:
    assert getattr(read(**{name: value}), name) == understood


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("address", 5),
        ("chunk_tokens", -1),
        ("chunk_tokens", 1.5),
        ("chunk_tokens", True),
        ("chunk_tokens", "many"),
        ("lookup_timeout_ms", 0),
        ("lookup_timeout_ms", float("nan")),
        ("load_timeout_ms", float("inf")),
        ("save_timeout_ms", None),
        ("save_decode", "maybe"),
        ("save_decode", 1),
        ("max_loads", 0),
        ("max_loads", 10**400),
        ("tenant", "x" * 129),
        ("tenant", "a\nb"),
        ("tenant", "other"),
        ("salt_tenants", {"s": "a b"}),
        ("salt_tenants", {"s": "x" * 129}),
        ("revision", "\ud800"),
        ("address", "localhost:5555"),
        ("address", "nonsense"),
        ("max_held_fraction", 1.0),
        ("salt_tenants", "s=t"),
        ("salt_tenants", {"s": 1}),
        ("role", "neither"),
        ("role", None),
    ],
)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"kvtierd.{name}[ :]"):
        read(**{name: value})


@pytest.mark.parametrize("extra", [["kvtierd.gate"], "kvtierd.gate=0", 5, {1: 2}])
def test_what_is_no_table_of_settings_is_refused(extra: Any) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config maps names"):
        read_settings(extra, {})


def test_an_unknown_key_has_a_hint() -> None:
    with pytest.raises(ValueError, match=r"did you mean kvtierd\.chunk_tokens"):
        read(chunk_token=1)
    with pytest.raises(ValueError, match=r"known: kvtierd\.address"):
        read(zzz=1)


def test_keys_of_others_are_left_alone() -> None:
    assert read_settings({"other": 1, "connectors": []}, {})[0] == DEFAULTS


def test_own_keys_go_before_those_of_lmcache() -> None:
    settings, _ = read_settings({"lmcache.chunk_size": 512, "kvtierd.chunk_tokens": 256}, {})
    assert settings.chunk_tokens == 256


@pytest.mark.parametrize(("role", "saves", "loads"), [("both", True, True), ("save", True, False), ("load", False, True)])
def test_roles(role: str, saves: bool, loads: bool) -> None:
    assert (read(role=role).saves, read(role=role).loads) == (saves, loads)


@pytest.mark.parametrize(
    ("kv_role", "role"), [("kv_both", "both"), ("kv_producer", "save"), ("kv_consumer", "load"), (None, "both")]
)
def test_the_engine_s_role_decides_where_nothing_else_does(kv_role: str | None, role: str) -> None:
    assert read_settings({}, {}, kv_role)[0].role == role
    assert read_settings({}, {"LMCACHE_FORCE_SKIP_SAVE": "1"}, kv_role)[0].role == "load"
    assert read_settings({"kvtierd.role": "both"}, {"LMCACHE_FORCE_SKIP_SAVE": "1"}, kv_role)[0].role == "both"


@pytest.mark.parametrize(
    ("extra", "environ", "named"),
    [
        ({"lmcache.chunk_size": 256}, {}, ""),
        ({"lmcache.max_local_cpu_size": 5.0, "lmcache.max_local_disk_size": 0}, {}, ""),
        ({"lmcache.max_local_cpu_size": 60}, {}, "cpu.capacity"),
        ({}, {"LMCACHE_MAX_LOCAL_CPU_SIZE": "60"}, "cpu.capacity"),
        ({}, {"LMCACHE_LOCAL_DISK": "/d", "LMCACHE_MAX_LOCAL_DISK_SIZE": "9"}, "nvme.capacity, nvme.folders"),
        ({}, {"LMCACHE_LOG_LEVEL": "debug"}, "log.level"),
        ({"lmcache.enable_lazy_memory_allocator": True}, {}, "cpu.prefault"),
        ({"lmcache.mp.autostart.server_args": "--l1-size-gb 60 --http-port 1"}, {}, "cpu.capacity, server.metrics"),
    ],
)
def test_what_only_the_daemon_could_give_is_named(extra: dict[str, Any], environ: dict[str, str], named: str) -> None:
    """An engine cannot, so a size that LMCache would keep to is not dropped without a word."""
    warnings = read_settings(extra, environ)[1]
    assert len(warnings) == bool(named)
    if named:
        assert f"sets what here is {named}: " in warnings[0]
        assert "kvtierd lmcache-config" in warnings[0]


def test_every_number_has_limits() -> None:
    for f in fields(Settings):
        if f.type in ("int", "float"):
            with pytest.raises(ValueError, match=f"from .* to .*{-1}"):
                read(**{f.name: -1})


def test_the_variable_for_the_address_is_checked_too() -> None:
    with pytest.raises(ValueError, match=r"\$KVTIERD_ADDRESS\) is a socket on the engine's own host"):
        read_settings({}, {"KVTIERD_ADDRESS": "node7:5555"})
    read_settings({"kvtierd.address": "/run/k.sock"}, {"KVTIERD_ADDRESS": "node7:5555"})
