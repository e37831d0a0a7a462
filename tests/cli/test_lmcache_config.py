"""Goal: `kvtierd lmcache-config` writes a file that the daemon starts with and a connector setting that the connector reads.

Method: run the command; load its TOML with the daemon's own loader, its JSON with the connector's own reader.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from kvtierd.config import Config, load_config
from kvtierd.connectors.vllm.settings import Settings, read_settings

Kvtierd = Callable[..., Result]
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("LMCACHE_", "KVTIERD_")):
            monkeypatch.delenv(name)


def read_back(result: Result, tmp_path: Path) -> tuple[Config, dict[str, Any]]:
    """The daemon's configuration, and what the comment tells vLLM."""
    assert result.exit_code == 0, result.output
    path = tmp_path / "kvtierd.toml"
    path.write_text(result.stdout)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("#   --kv-transfer-config ")]
    _, text = shlex.split(line.removeprefix("#"))
    return load_config(path, env={}), json.loads(text)


def test_a_file_becomes_toml_and_a_connector_setting(kvtierd: Kvtierd, tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(
        "chunk_size: 64\nsave_decode_cache: true\nmax_local_cpu_size: 1.5\nlocal_disk: /mnt/it's/\n"
        "max_local_disk_size: 7\nremote_url: redis://:hunter2@x\n"
    )
    result = kvtierd("lmcache-config", path, "--ranks", 2)
    config, transfer = read_back(result, tmp_path)
    assert (config.cpu.capacity, config.nvme.capacity) == (3 * GIB, 14 * GIB)
    assert config.nvme.folders == [Path("/mnt/it's/kvtierd")]
    assert transfer == {
        "kv_connector": "KvtierdConnector",
        "kv_connector_module_path": "kvtierd.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kvtierd.chunk_tokens": 64, "kvtierd.save_decode": True},
    }
    assert read_settings(transfer["kv_connector_extra_config"], {}) == (Settings(chunk_tokens=64, save_decode=True), [])
    assert result.stderr.startswith("warning: remote_url: no counterpart; ") and result.stderr.count("\n") == 1
    assert "hunter2" not in result.output


def test_the_environment_and_json(kvtierd: Kvtierd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text("max_local_cpu_size: 2\nchunk_size: 16\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "4")
    monkeypatch.setenv("LMCACHE_CACHE_POLICY", "LFU")
    answer = json.loads(kvtierd("lmcache-config", "--json").stdout)
    assert answer["daemon"] == {"cpu": {"capacity": "4GiB"}, "nvme": {"capacity": 0}}
    assert answer["kv_transfer_config"]["kv_connector_extra_config"] == {"kvtierd.chunk_tokens": 16}
    assert len(answer["warnings"]) == 1 and answer["warnings"][0].startswith("LMCACHE_CACHE_POLICY: ")
    other = tmp_path / "other.yaml"
    other.write_text("chunk_size: 32\n")
    named = json.loads(kvtierd("lmcache-config", other, "--json").stdout)
    assert named["kv_transfer_config"]["kv_connector_extra_config"] == {"kvtierd.chunk_tokens": 32}, "FILE replaces the variable's"


def test_vllm_s_present_setting_is_changed_and_no_more(kvtierd: Kvtierd, tmp_path: Path) -> None:
    present = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_producer",
        "kv_rank": 3,
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.save_decode_cache": True,
            "discard_partial_chunks": False,
            "kvtierd.gate": False,
            "backends": ["x"],
        },
    }
    result = kvtierd(
        "lmcache-config", "--kv-transfer-config", json.dumps(present), "--server-args", "--l1-size-gb 60 --eviction-policy LRU"
    )
    config, transfer = read_back(result, tmp_path)
    assert result.stderr == ""
    assert (config.cpu.capacity, config.nvme.capacity) == (60 * GIB, 0)
    assert transfer == {
        "kv_connector": "KvtierdConnector",
        "kv_connector_module_path": "kvtierd.connectors.vllm",
        "kv_role": "kv_producer",
        "kv_rank": 3,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backends": ["x"], "kvtierd.save_decode": True, "kvtierd.gate": False},
    }


def test_one_of_several_connectors(kvtierd: Kvtierd) -> None:
    """Only LMCache's becomes kvtierd's, and the others stay as they are."""
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"backends": ["UCX"]}}
    lmcache = {
        "kv_connector": "LMCacheConnectorV1Dynamic",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_connector_v1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.chunk_size": 64, "lmcache.max_local_cpu_size": 3},
    }
    present = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "engine_id": "e",
        "kv_connector_extra_config": {"connectors": [nixl, lmcache], "other": 1},
    }
    result = kvtierd("lmcache-config", "--kv-transfer-config", json.dumps(present), "--json")
    answer = json.loads(result.stdout)
    assert answer["warnings"] == []
    assert answer["daemon"]["cpu"] == {"capacity": "3GiB"}
    ours = {"kv_connector": "KvtierdConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"kvtierd.chunk_tokens": 64}}
    assert answer["kv_transfer_config"] == {
        **present,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [nixl, ours], "other": 1},
    }
    again = kvtierd("lmcache-config", "--kv-transfer-config", json.dumps(answer["kv_transfer_config"]), "--json")
    assert json.loads(again.stdout)["kv_transfer_config"] == answer["kv_transfer_config"]


def test_a_configuration_without_sizes_leaves_the_daemon_s_defaults(kvtierd: Kvtierd, tmp_path: Path) -> None:
    text = '{"kv_connector_extra_config": {"lmcache.mp.port": 5555}}'
    result = kvtierd("lmcache-config", "--kv-transfer-config", text)
    config, transfer = read_back(result, tmp_path)
    assert config == load_config(None, env={})
    assert "defaults are in force" in result.stdout
    assert "kv_connector_extra_config" not in transfer


def test_warnings_never_steer_the_terminal(kvtierd: Kvtierd, tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text('"chunk\\e[2Jsize": 1\n')
    result = kvtierd("lmcache-config", path)
    assert result.exit_code == 0 and "\x1b" not in result.output and "warning: chunk?[2Jsize" in result.stderr


@pytest.mark.parametrize(
    "args, text",
    [
        ([], "nothing to translate"),
        (["/no/such.yaml"], "cannot read LMCache's configuration"),
        (["--kv-transfer-config", "{"], "--kv-transfer-config is not valid JSON"),
        (["--kv-transfer-config", "[]"], "--kv-transfer-config is a JSON object"),
        (["--kv-transfer-config", '{"kv_connector_extra_config": 1}'], "kv_connector_extra_config is a JSON object"),
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "'NixlConnector', which is not LMCache's"),
        (["--kv-transfer-config", '{"kv_connector": "MultiConnector"}'], "connectors inside MultiConnector is a list"),
        (
            ["--kv-transfer-config", '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{}]}}'],
            "0 of the connectors inside MultiConnector are LMCache's, not one",
        ),
        (["--server-args", "'"], "--server-args: No closing quotation"),
        (["--server-args", "--l1-size-gb lots"], "--l1-size-gb (GB) is a number"),
        (["--server-args", "--l1-size-gb 0.0001"], "cpu.capacity is below 1MiB"),
        (["--server-args", "", "--ranks", "0"], "--ranks"),
    ],
)
def test_wrong_use_says_what_to_do(kvtierd: Kvtierd, args: list[str], text: str) -> None:
    result = kvtierd("lmcache-config", *args)
    assert result.exit_code == 2
    assert text in result.stderr and "Traceback" not in result.output
    assert result.stdout == ""


def test_without_a_yaml_library_the_error_names_it(kvtierd: Kvtierd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "lmcache.yaml"
    path.touch()
    result = kvtierd("lmcache-config", path)
    assert result.exit_code == 2 and "PyYAML" in result.stderr
    assert kvtierd("lmcache-config", "--server-args", "--l1-size-gb 1").exit_code == 0
