"""The command ``kvtierd lmcache-config``: from LMCache's configuration to the daemon's and the connector's."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import tomli_w

from kvtierd.cli.options import json_option
from kvtierd.cli.output import clean, print_json
from kvtierd.config import load_config
from kvtierd.connectors.lmcache import Translation, read_config_file, translate
from kvtierd.errors import ConfigError

__all__ = ["lmcache_config"]


@click.command("lmcache-config")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--kv-transfer-config",
    "transfer_text",
    metavar="JSON",
    help="What vLLM is given now; the answer keeps what is not LMCache's.",
)
@click.option("--server-args", "server_text", metavar="TEXT", help="Arguments of `lmcache server`, in one text.")
@click.option(
    "--ranks",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Worker processes of engines on this host: sizes of LMCache's file are for each of them, the daemon's for the host.",
)
@json_option("Write JSON: daemon, kv_transfer_config and warnings.")
def lmcache_config(file: Path | None, transfer_text: str | None, server_text: str | None, ranks: int, as_json: bool) -> None:
    """Turn LMCache's configuration into kvtierd's.

    Reads LMCache's YAML FILE (or the one that LMCACHE_CONFIG_FILE names), LMCACHE_* variables over it, and the options. Writes
    the daemon's configuration as TOML, and in comments above it what to give vLLM. Keys without a counterpart are warnings on
    standard error.

    \b
    kvtierd lmcache-config lmcache.yaml --ranks 4 > kvtierd.toml
    kvtierd lmcache-config --server-args "--l1-size-gb 60 --eviction-policy LRU" > kvtierd.toml
    """
    transfer = _transfer(transfer_text)
    extra = _extra(_part_of_lmcache(transfer))
    has_variable = any(name.startswith("LMCACHE_") for name in os.environ)
    if file is None and not extra and server_text is None and not has_variable:
        raise click.UsageError("nothing to translate: name LMCache's YAML file, or see --help for its other sources")
    try:
        arguments = shlex.split(server_text or "")
    except ValueError as e:
        raise ConfigError(f"--server-args: {e}") from e
    content = None if file is None else read_config_file(file)
    result = translate(extra, os.environ, content, server_arguments=arguments, ranks=ranks)
    _check(result.daemon)
    answer = _new_transfer(transfer, result)
    if as_json:
        print_json({"daemon": result.daemon, "kv_transfer_config": answer, "warnings": result.warnings})
    else:
        click.echo(_toml(result.daemon, answer), nl=False)
    for line in result.warnings:
        click.echo(f"warning: {clean(line)}", err=True)


def _transfer(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"--kv-transfer-config is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError("--kv-transfer-config is a JSON object, as vLLM takes it")
    return value


def _extra(part: Mapping[str, Any]) -> dict[str, Any]:
    extra = part.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ConfigError("--kv-transfer-config: kv_connector_extra_config is a JSON object")
    return extra


def _part_of_lmcache(transfer: dict[str, Any]) -> dict[str, Any]:
    """Where in vLLM's setting LMCache's connector is: all of it, or one of the connectors inside MultiConnector."""
    name = transfer.get("kv_connector")
    if name is None or _is_known(transfer):
        return transfer
    if name != "MultiConnector":
        raise ConfigError(
            f"--kv-transfer-config: kv_connector is {name!r:.80}, which is not LMCache's; to use kvtierd beside it, "
            "put both into the connectors of vLLM's MultiConnector"
        )
    parts = _extra(transfer).get("connectors")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ConfigError("--kv-transfer-config: connectors inside MultiConnector is a list of JSON objects")
    found: list[dict[str, Any]] = [part for part in parts if _is_known(part)]
    if len(found) != 1:
        raise ConfigError(f"--kv-transfer-config: {len(found)} of the connectors inside MultiConnector are LMCache's, not one")
    return found[0]


def _is_known(part: Mapping[str, Any]) -> bool:
    """Whether a setting names a connector of LMCache's, or ours already."""
    return str(part.get("kv_connector")).startswith(("LMCache", "Kvtierd"))


def _check(daemon: Mapping[str, Any]) -> None:
    """Whether the daemon would start with it. Raises ConfigError."""
    flags = {f"{section}.{key}": value for section, table in daemon.items() for key, value in table.items()}
    load_config(None, env={}, flags=flags)


def _new_transfer(transfer: dict[str, Any], result: Translation) -> dict[str, Any]:
    """The ``--kv-transfer-config`` with kvtierd's connector. What is not LMCache's stays."""
    part = _part_of_lmcache(transfer)
    whole = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **transfer}
    if part is transfer:
        return _new_part(whole, result, {"kv_connector_module_path": "kvtierd.connectors.vllm"})
    extra = _extra(transfer)
    # By name alone: MultiConnector does not find the figures of a connector that has a module path.
    connectors = [_new_part(one, result, {}) if one is part else one for one in extra["connectors"]]
    return {**whole, "kv_connector_extra_config": {**extra, "connectors": connectors}}


def _new_part(part: Mapping[str, Any], result: Translation, path: Mapping[str, str]) -> dict[str, Any]:
    """One connector's setting, of kvtierd's connector."""
    dropped = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
    answer = {"kv_connector": "KvtierdConnector", **path, **{k: v for k, v in part.items() if k not in dropped}}
    others = {key: value for key, value in _extra(part).items() if not key.startswith(("lmcache.", "kvtierd."))}
    others = {key: value for key, value in others.items() if key not in ("discard_partial_chunks", "skip_last_n_tokens")}
    if others or result.settings:
        answer["kv_connector_extra_config"] = {**others, **result.settings}
    return answer


def _toml(daemon: Mapping[str, Any], transfer: Mapping[str, Any]) -> str:
    lines = [
        "# The daemon's configuration, from LMCache's. Start it with: kvtierd serve --config FILE",
        "# Give vLLM, in place of LMCache's connector:",
        f"#   --kv-transfer-config {shlex.quote(json.dumps(transfer))}",
    ]
    if not daemon:
        lines.append("# LMCache's configuration names no sizes, so the daemon's defaults are in force: `kvtierd config`.")
    return "\n".join([*lines, "", tomli_w.dumps(daemon).strip()]).rstrip() + "\n"
