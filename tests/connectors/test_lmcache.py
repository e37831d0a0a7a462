"""Goal: LMCache's configuration means the same here, nothing of it is dropped silently, and the documentation says so truthfully.

Method: ``lmcache_0_5_6.json`` holds the names (and for the engine's keys the defaults) that LMCache 0.5.6 itself reads; the table
is compared with it, and every source is translated and read back with the daemon's own configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtierd.config import Config
from kvtierd.connectors import lmcache
from kvtierd.connectors.lmcache import LmcacheConfigError, read_config_file, translate
from kvtierd.connectors.lmcache_keys import CONNECTOR, ENGINE, EXTRA, REQUEST, SERVER, TABLES, VARIABLES, Effect, docs_tables, find
from kvtierd.connectors.vllm.settings import Settings, read_settings
from kvtierd.errors import ConfigError

NAMES: dict[str, Any] = json.loads(Path(__file__).with_name("lmcache_0_5_6.json").read_text())
DOCS = Path(__file__).parents[2] / "docs" / "lmcache.md"
GIB = 1 << 30


def daemon(translation: lmcache.Translation) -> Config:
    return Config.model_validate(translation.daemon)


def from_server(*arguments: str, extra: Mapping[str, object] | None = None) -> lmcache.Translation:
    return translate(extra or {}, {}, {}, server_arguments=arguments)


# The table


@pytest.mark.parametrize(
    "table, names",
    [
        (ENGINE, [*NAMES["engine"], *NAMES["deprecated"]]),
        (SERVER, list(NAMES["server"])),
        (CONNECTOR, NAMES["connector"]),
        (VARIABLES, NAMES["variables"]),
        (REQUEST, NAMES["request"]),
    ],
    ids=["engine", "server", "connector", "variables", "request"],
)
def test_every_key_of_lmcache_has_a_row_and_no_row_is_invented(table: tuple[Any, ...], names: list[str]) -> None:
    assert [name for name in names if find(table, name) is None] == []
    exact = {name for row in table for name in row.names if not name.endswith("*")}
    assert exact <= {*names, "ec"}
    patterns = [name for row in table for name in row.names if name.endswith("*") and name not in ("ec_*", "LMCACHE_CONTROLLER_*")]
    assert [p for p in patterns if not any(name.startswith(p[:-1]) for name in names)] == []


def test_no_key_has_two_rows() -> None:
    for _, table in TABLES:
        names = [name for row in table for name in row.names]
        assert len(names) == len(set(names))


def test_arguments_take_as_many_values_as_lmcache_s() -> None:
    forms = {name: row.form for row in SERVER for name in row.names}
    assert forms == NAMES["server"]


def test_every_used_key_is_read() -> None:
    """A row says "used" only for a key that the reader names, and the other way round."""
    read = set(lmcache._SETTINGS)
    by_hand = {
        "max_local_cpu_size",
        "local_cpu",
        "local_disk",
        "max_local_disk_size",
        "enable_lazy_memory_allocator",
        "extra_config",
    }
    by_hand |= {f"lmcache.mp.{n}" for n in ("host", "port", "server_urls", "mq_timeout", "autostart.server_args")}
    used = {name for table in (ENGINE, CONNECTOR) for row in table if row.effect is Effect.USED for name in row.names}
    assert used == read | by_hand


def test_the_documentation_holds_the_table() -> None:
    text = DOCS.read_text()
    assert "\n".join(docs_tables()).strip() in text, (
        "put the lines of kvtierd.connectors.lmcache_keys.docs_tables() into docs/lmcache.md"
    )
    assert not any("|" in row.text for _, table in TABLES for row in table)


def test_texts_of_the_table_name_keys_that_exist() -> None:
    settings = {f"kvtierd.{name}" for name in Settings.__dataclass_fields__}
    requests = {"kvtierd.tenant", "kvtierd.ttl", "kvtierd.skip_save", "kvtierd.max_save_tokens"}
    sections = {name: set(info.annotation.model_fields) for name, info in Config.model_fields.items() if name != "tenants"}  # type: ignore[union-attr]
    for _, table in TABLES:
        for row in table:
            words = row.text.replace(",", " ").replace(":", " ").replace(";", " ").replace(")", " ").replace("(", " ").split()
            for word in words:
                section, dot, key = word.partition(".")
                if section == "kvtierd" and dot:
                    assert word in settings | requests, row
                elif dot and section in sections:
                    assert key in sections[section], row


# Engine keys


def test_lmcache_s_own_defaults_ask_for_nothing() -> None:
    """A file that spells every default out gives no warning, and sizes as without the file."""
    result = translate({}, {}, NAMES["engine"])
    assert result.warnings == []
    assert daemon(result).cpu.capacity == 5 * GIB
    assert daemon(result).nvme.capacity == 0
    settings, warnings = read_settings({f"lmcache.{k}": v for k, v in NAMES["engine"].items()}, {})
    assert warnings == []
    assert settings == Settings(chunk_tokens=256, lookup_timeout_ms=3000, load_timeout_ms=10_000)


def test_nothing_given_says_nothing() -> None:
    assert translate({}, {}) == lmcache.Translation({}, {}, [])
    assert translate({"kvtierd.gate": False, "other": 1}, {"HOME": "/root"}).settings == {"kvtierd.gate": False}


def test_what_lmcache_s_defaults_give_the_daemon() -> None:
    assert translate({}, {}, {"chunk_size": 16}).daemon == translate({}, {}, NAMES["engine"]).daemon == lmcache.DEFAULT_DAEMON


def test_an_in_process_file() -> None:
    file = {
        "chunk_size": 128,
        "local_cpu": True,
        "max_local_cpu_size": 40,
        "local_disk": "file:///mnt/nvme0/lm/, /mnt/nvme1",
        "max_local_disk_size": 200.5,
        "save_decode_cache": True,
        "min_retrieve_tokens": 512,
        "lookup_timeout_ms": 1000,
        "blocking_timeout_secs": 5,
        "enable_lazy_memory_allocator": True,
    }
    result = translate({}, {}, file, ranks=2)
    assert result.warnings == []
    assert result.settings == {
        "kvtierd.chunk_tokens": 128,
        "kvtierd.save_decode": True,
        "kvtierd.min_hit_tokens": 512,
        "kvtierd.lookup_timeout_ms": 1000,
        "kvtierd.load_timeout_ms": 5000.0,
    }
    config = daemon(result)
    assert config.cpu.capacity == 80 * GIB and config.cpu.prefault is False
    assert config.nvme.capacity == 401 * GIB
    assert config.nvme.folders == [Path("/mnt/nvme0/lm/kvtierd"), Path("/mnt/nvme1/kvtierd")]


def test_sources_count_in_lmcache_s_order(tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 16\nmin_retrieve_tokens: 16\nsave_decode_cache: true\nlookup_timeout_ms: 16\n")
    environ = {
        "LMCACHE_CONFIG_FILE": str(path),
        "LMCACHE_MIN_RETRIEVE_TOKENS": " '32' ",
        "LMCACHE_SAVE_DECODE_CACHE": "0",
        "LMCACHE_LOOKUP_TIMEOUT_MS": "32",
        "LMCACHE_BLOCKING_TIMEOUT_SECS": "",
    }
    extra = {"lmcache.save_decode_cache": "true", "lmcache.lookup_timeout_ms": 64, "kvtierd.lookup_timeout_ms": 128}
    assert translate(extra, environ).settings == {
        "kvtierd.chunk_tokens": 16,
        "kvtierd.min_hit_tokens": 32,
        "kvtierd.save_decode": True,
        "kvtierd.lookup_timeout_ms": 128,
    }
    assert translate(extra, environ, {}).settings.get("kvtierd.chunk_tokens") is None, "a given file replaces the variable's"


@pytest.mark.parametrize("name", sorted(n for row in ENGINE if row.effect is Effect.MISSING for n in row.names if n != "ec_*"))
def test_a_key_without_counterpart_is_one_warning_from_every_source(name: str) -> None:
    for result, label in (
        (translate({}, {}, {name: "x"}), name),
        (translate({f"lmcache.{name}": "x"}, {}), f"lmcache.{name}"),
        (translate({}, {f"LMCACHE_{name.upper()}": "x"}), f"LMCACHE_{name.upper()}"),
    ):
        if name == "ec" and label.startswith("LMCACHE_"):
            continue  # LMCache itself has no such variable
        assert len(result.warnings) == 1
        assert result.warnings[0].startswith(f"{label}: no counterpart; ")
    assert translate({}, {}, {name: False}).warnings == translate({}, {}, {name: None}).warnings == []


def test_unknown_keys_are_warnings_with_a_suggestion() -> None:
    result = translate({"lmcache.chunk_sise": 1, "lmcache.mp.hots": "x"}, {"LMCACHE_NONSENSE": "1"}, {"save_decode_cach": True})
    assert result.settings == {}
    assert result.warnings == [
        "save_decode_cach: LMCache 0.5.6 has no such key; did you mean save_decode_cache?",
        "lmcache.chunk_sise: LMCache 0.5.6 has no such key; did you mean chunk_size?",
        "lmcache.mp.hots: LMCache 0.5.6 has no such key; did you mean lmcache.mp.host?",
    ]


@pytest.mark.parametrize(
    "key, value, allowed",
    [
        ("chunk_size", 0, "whole number from 1"),
        ("chunk_size", "many", "whole number from 1"),
        ("chunk_size", True, "whole number"),
        ("chunk_size", 2.5, "whole number"),
        ("save_decode_cache", "perhaps", "true or false"),
        ("max_local_cpu_size", -1, "number from 0"),
        ("max_local_cpu_size", float("nan"), "number from 0"),
        ("max_local_disk_size", "5GB", "number from 0"),
        ("lookup_timeout_ms", 0, "from 1 to"),
        ("blocking_timeout_secs", 10**400, "from 0.01 to 3600"),
        ("local_disk", True, "path of a folder"),
        ("local_cpu", [], "true or false"),
        ("extra_config", "{", "table of keys"),
        ("extra_config", [1], "table of keys"),
    ],
)
def test_a_value_that_cannot_be_used_names_the_key_as_it_was_written(key: str, value: object, allowed: str) -> None:
    for extra, file, label in (({}, {key: value}, key), ({f"lmcache.{key}": value}, {}, f"lmcache.{key}")):
        with pytest.raises(LmcacheConfigError) as error:
            translate(extra, {}, file)
        assert str(error.value).startswith(label) and allowed in str(error.value)
        assert isinstance(error.value, ConfigError) and isinstance(error.value, ValueError)


def test_sizes_that_switch_a_tier_off() -> None:
    no_memory = translate({}, {}, {"max_local_cpu_size": 0})
    assert "cpu" not in no_memory.daemon and "cpu.capacity" in no_memory.warnings[0]
    only_disk = translate({}, {}, {"local_cpu": False, "local_disk": "/d", "max_local_disk_size": 1})
    assert daemon(only_disk).nvme.capacity == GIB and "stay in CPU memory" in only_disk.warnings[0]
    for file in ({"local_disk": "/d"}, {"max_local_disk_size": 9}):
        half = translate({}, {}, file)
        assert daemon(half).nvme.capacity == 0 and "has no effect" in half.warnings[0]


def test_one_saving_rank_is_not_multiplied() -> None:
    file = {"max_local_cpu_size": 2, "local_disk": "/d", "max_local_disk_size": 3}
    first = translate({}, {}, file | {"extra_config": {"save_only_first_rank": True}}, ranks=8)
    assert (daemon(first).cpu.capacity, daemon(first).nvme.capacity) == (2 * GIB, 3 * GIB)
    larger = translate({}, {"LMCACHE_EXTRA_CONFIG": '{"first_rank_max_local_cpu_size": 7}'}, file, ranks=8)
    assert (daemon(larger).cpu.capacity, daemon(larger).nvme.capacity) == (7 * GIB, 24 * GIB)
    with pytest.raises(LmcacheConfigError, match="0 worker processes"):
        translate({}, {}, file, ranks=0)


def test_keys_inside_extra_config() -> None:
    content = {
        "use_odirect": True,
        "nixl_pool_size": 5,
        "s3_region": "eu",
        "enable_nixl_storage": False,
        "valkey_password": "hunter2",
    }
    warnings = translate({}, {}, {"extra_config": content}).warnings
    assert [line.partition(":")[0] for line in warnings] == ["extra_config.s3_region", "extra_config.valkey_password"]
    assert "hunter2" not in str(warnings)
    assert all(find(EXTRA, name) is not None for name in ("anything", "a.b"))


# Connector keys and variables


def test_multiprocess_connector_keys() -> None:
    extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 5555, "lmcache.mp.save_decode_cache": True}
    extra |= {"lmcache.mp.eager_prefetch": False, "lmcache.mp.heartbeat_interval": 5.0, "lmcache.mp.mp_transfer_mode": "auto"}
    result = translate(extra, {})
    assert result == lmcache.Translation({"kvtierd.save_decode": True, "kvtierd.prefetch": False}, {}, [])


def test_mq_timeout_lowers_waits_and_never_raises_them() -> None:
    assert translate({"lmcache.mp.mq_timeout": 300.0}, {}).settings == {}
    assert translate({"lmcache.mp.mq_timeout": "10"}, {}).settings == {"kvtierd.load_timeout_ms": 10_000.0}
    low = {"lmcache.mp.mq_timeout": 1, "lmcache.lookup_timeout_ms": 500}
    assert translate(low, {}).settings == {
        "kvtierd.lookup_timeout_ms": 500,
        "kvtierd.load_timeout_ms": 1000.0,
        "kvtierd.save_timeout_ms": 1000.0,
    }
    own = Settings()
    assert {
        f"kvtierd.{k}": getattr(own, k) for k in ("lookup_timeout_ms", "load_timeout_ms", "save_timeout_ms")
    } == lmcache.WAITS_MS
    read_settings({"lmcache.mp.mq_timeout": 0.001}, {})


@pytest.mark.parametrize(
    "host",
    ["localhost", "tcp://127.0.0.1", "grpc://localhost", "grpc+unix:///run/x.sock", "ipc:///x", "[::1]", "::1", "tcp://0.0.0.0"],
)
def test_a_loopback_host_is_the_default_socket(host: str) -> None:
    assert translate({"lmcache.mp.host": host, "lmcache.mp.port": 5555}, {}) == lmcache.Translation()


def test_another_host_is_a_warning_unless_the_daemon_is_named() -> None:
    for key, value in (
        ("lmcache.mp.host", "tcp://node7"),
        ("lmcache.mp.server_urls", ["node7:5555"]),
        ("lmcache.mp.server_urls", "grpc://node7:5555"),
    ):
        warnings = translate({key: value}, {}).warnings
        assert len(warnings) == 1
        assert warnings[0].startswith(f"{key}: node7 may be another host") and "kvtierd.address" in warnings[0]
        assert translate({key: value, "kvtierd.address": "unix:/run/k.sock"}, {}).warnings == []
        assert translate({key: value}, {"KVTIERD_ADDRESS": "unix:/run/k.sock"}).warnings == []
    two = translate({"lmcache.mp.server_urls": "localhost:1, localhost:2"}, {}).warnings
    assert len(two) == 1 and "one daemon serves all workers" in two[0]


@pytest.mark.parametrize("name", sorted(n for row in CONNECTOR if row.effect is Effect.MISSING for n in row.names))
def test_connector_keys_without_counterpart(name: str) -> None:
    assert [line.split("; ")[0] for line in translate({name: 1}, {}).warnings] == [f"{name}: no counterpart"]
    assert translate({name: False}, {}).warnings == translate({name: None}, {}).warnings == []


def test_variables() -> None:
    environ = {"LMCACHE_FORCE_SKIP_SAVE": "0", "LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"}
    result = translate({}, environ)
    assert result.settings == {"kvtierd.role": "load"}, "any text counts in LMCache, also 0"
    assert daemon(result).log.level == "warning" and result.warnings == []
    warned = translate({}, {"LMCACHE_LOG_LEVEL": "loud", "LMCACHE_RESP_HOST": "h", "LMCACHE_EC_CHUNK_SIZE": "1"}).warnings
    assert [line.partition(":")[0] for line in warned] == ["LMCACHE_EC_CHUNK_SIZE", "LMCACHE_RESP_HOST", "LMCACHE_LOG_LEVEL"]


# Arguments of LMCache's server


def test_server_sizes() -> None:
    result = from_server(
        "--l1-size-gb=60", "--eviction-policy", "LRU", "--chunk-size", "512", "--no-l1-use-lazy", "--http-port", "9000",
        "--l2-adapter", '{"type": "fs_native", "base_path": "/a", "max_capacity_gb": 100, "eviction": {"eviction_policy": "LRU"}}',
        "--l2-adapter", '{"type": "fs_native", "base_path": "/b/", "max_capacity_gb": 0.5}',
    )  # fmt: skip
    assert result.warnings == []
    assert result.settings == {"kvtierd.chunk_tokens": 512}
    config = daemon(result)
    assert config.cpu.capacity == 60 * GIB and config.cpu.prefault is True
    assert config.nvme.capacity == 100 * GIB + GIB // 2
    assert config.nvme.folders == [Path("/a/kvtierd"), Path("/b/kvtierd")]
    assert config.server.metrics == "127.0.0.1:9000"


def test_server_pools_and_slabs() -> None:
    pools = ['{"type": "DRAM", "tag": "a", "size_gb": 2}', '{"type": "DRAM", "tag": "b", "size_gb": 3}']
    pools += [
        '{"type": "GDS", "tag": "c", "size_gb": 10, "path": "/g"}',
        '{"type": "DEVDAX", "tag": "d", "size_gb": 1, "path": "/dev/dax0"}',
    ]
    result = from_server(*[word for pool in pools for word in ("--l1-manager", pool)])
    assert daemon(result).cpu.capacity == 5 * GIB
    assert (daemon(result).nvme.capacity, daemon(result).nvme.folders) == (10 * GIB, [Path("/g/kvtierd")])
    assert len(result.warnings) == 1 and "'DEVDAX'" in result.warnings[0]
    slab = from_server("--gds-l1-path", "/g", "--l1-size-gb", "8")
    assert slab.daemon == {"nvme": {"capacity": "8GiB", "folders": ["/g/kvtierd"]}}


def test_server_without_disk_uses_none_and_without_limit_says_so() -> None:
    assert daemon(from_server("--l1-size-gb", "8")).nvme.capacity == 0
    unlimited = from_server("--l1-size-gb", "8", "--l2-adapter", '{"type": "fs", "base_path": "/a"}')
    assert unlimited.daemon["nvme"] == {"folders": ["/a/kvtierd"]}
    assert len(unlimited.warnings) == 1 and "nvme.capacity" in unlimited.warnings[0]
    remote = from_server("--l2-adapter", '{"type": "s3", "secret": "hunter2"}')
    assert len(remote.warnings) == 1 and "'s3'" in remote.warnings[0] and "hunter2" not in remote.warnings[0]


def test_server_sizes_replace_the_engine_s() -> None:
    adapter = '{"type": "fs_native", "base_path": "/a", "max_capacity_gb": 4}'
    extra = {
        "lmcache.max_local_cpu_size": 1,
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": f"--l1-size-gb 6 --l2-adapter '{adapter}'",
    }
    result = translate(extra, {}, {"local_disk": "/old", "max_local_disk_size": 9})
    assert (daemon(result).cpu.capacity, daemon(result).nvme.capacity) == (6 * GIB, 4 * GIB)
    assert daemon(result).nvme.folders == [Path("/a/kvtierd")]
    assert [line.split("; ")[0] for line in result.warnings] == ["lmcache.mp.autostart: no counterpart"]


@pytest.mark.parametrize("name", sorted(n for row in SERVER if row.effect is Effect.MISSING for n in row.names))
def test_server_arguments_without_counterpart(name: str) -> None:
    words = [name] if NAMES["server"][name] in ("flag", "switch") else [name, "x"]
    warnings = from_server(*words).warnings
    assert [line.split("; ")[0] for line in warnings] == [f"{name}: no counterpart"]


@pytest.mark.parametrize("name", sorted(n for row in SERVER if row.effect is Effect.IGNORED for n in row.names))
def test_server_arguments_that_are_ignored(name: str) -> None:
    words = [name] if NAMES["server"][name] in ("flag", "switch") else [name, "5"]
    assert from_server(*words) == lmcache.Translation()


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--l1-size-gb"], "expected one argument"),
        (["--l1-size-gb", "x"], "--l1-size-gb (GB) is a number"),
        (["--chunk-size", "1.5"], "--chunk-size is a whole number"),
        (["--http-port", "70000"], "--http-port is a whole number from 1 to 65535"),
        (["--l2-adapter", "{'password': 1}"], "--l2-adapter is a JSON object"),
        (["--l2-adapter", "[1]"], "--l2-adapter is a JSON object"),
        (["--l2-adapter", '{"type": "fs"}'], "base_path is the path of a folder"),
        (["--l1-manager", '{"type": "DRAM"}'], "size_gb (GB) is a number"),
    ],
)
def test_server_arguments_that_cannot_be_used(arguments: list[str], text: str) -> None:
    with pytest.raises(LmcacheConfigError) as error:
        from_server(*arguments)
    assert text in str(error.value) and "password" not in str(error.value)


def test_unknown_server_arguments_are_warnings() -> None:
    assert from_server("--frobnicate=secret", "--l1-size-gb", "2").warnings == [
        "--frobnicate: the server of LMCache 0.5.6 has no such argument"
    ]
    with pytest.raises(LmcacheConfigError, match=r"server_args is a text"):
        translate({"lmcache.mp.autostart.server_args": ["--port", "1"]}, {})
    with pytest.raises(LmcacheConfigError, match=r"server_args: No closing quotation"):
        translate({"lmcache.mp.autostart.server_args": "'"}, {})


# The file


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.yaml"
    with pytest.raises(LmcacheConfigError, match=r"cannot read LMCache's configuration .*No such file"):
        translate({}, {"LMCACHE_CONFIG_FILE": str(path)})
    for content, text in (
        (b"a: [", "not valid YAML"),
        (b"- 1\n", "no table of keys"),
        (b"1: 2\n", "no table of keys"),
        (b"\xff\xfe\xfd", "not valid YAML"),
        (b"a: " + b"x" * (1 << 20), "larger than 1 MiB"),
        (b"!!python/object/apply:os.getcwd []", "not valid YAML"),
    ):
        path.write_bytes(content)
        with pytest.raises(LmcacheConfigError, match=text):
            read_config_file(path)
    path.write_bytes(b"")
    assert read_config_file(path) == {}
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(LmcacheConfigError, match="PyYAML"):
        read_config_file(path)
