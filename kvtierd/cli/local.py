"""Commands that need no running daemon: serve, config, completion."""

from __future__ import annotations

import signal
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from kvtierd.cli.options import Settings, admin_options, config_option, json_option
from kvtierd.cli.output import print_json
from kvtierd.config import field_paths, value_of
from kvtierd.errors import ConfigError
from kvtierd.service.config_text import config_json, config_toml, reference_toml
from kvtierd.v1 import admin_pb2

__all__ = ["completion", "config", "serve"]

_KEYS = frozenset(key for key, _ in field_paths())


def _parse_set(pairs: tuple[str, ...]) -> dict[str, object]:
    """Flags of ``--set KEY=VALUE``; keys that do not exist are left to the configuration, which has a suggestion."""
    flags: dict[str, object] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"--set {pair!r}: write KEY=VALUE, for example --set cpu.capacity=2GiB")
        if key not in _KEYS and "." not in key:
            raise ConfigError(f"--set {pair!r}: {key} is not a key; 'kvtierd config --reference' lists them")
        try:
            flags[key] = value_of(key, text)
        except ValueError as e:
            raise ConfigError(f"--set {key}: {e}") from None
    return flags


_set_option = click.option(
    "--set",
    "pairs",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any key of the configuration, for example cpu.capacity=2GiB; may be repeated. "
    "A list is separated by colons: nvme.folders=/mnt/a:/mnt/b.",
)


@click.command()
@config_option
@_set_option
@click.option("--socket", "socket_path", type=click.Path(path_type=Path), help="Unix socket of the gRPC API.")
@click.option("--cpu-capacity", metavar="SIZE", help="Bytes of CPU memory, for example 8GiB.")
@click.option("--nvme-capacity", metavar="SIZE", help="Bytes on NVMe; 0 switches it off.")
@click.option("--nvme-folder", "folders", multiple=True, type=click.Path(path_type=Path), help="Folder on NVMe; one a device.")
@click.option("--metrics", metavar="HOST:PORT", help='Address of /metrics; "" switches it off.')
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Least level that is written.")
@click.option("--check", is_flag=True, help="Only check the configuration, then exit; `kvtierd doctor` checks the machine.")
@click.pass_context
def serve(
    ctx: click.Context,
    pairs: tuple[str, ...],
    socket_path: Path | None,
    cpu_capacity: str | None,
    nvme_capacity: str | None,
    folders: tuple[Path, ...],
    metrics: str | None,
    log_level: str | None,
    check: bool,
) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    Works without any configuration: 1 GiB of CPU memory, 4 GiB on disk in the user's cache folder.
    """
    flags = _parse_set(pairs) | {
        key: value
        for key, value in {
            "server.socket": socket_path,
            "cpu.capacity": cpu_capacity,
            "nvme.capacity": nvme_capacity,
            "nvme.folders": list(folders) or None,
            "server.metrics": metrics,
            "log.level": log_level,
        }.items()
        if value is not None
    }
    loaded = ctx.ensure_object(Settings).load(flags)
    if check:
        click.echo("the configuration is fine; whether this machine is, 'kvtierd doctor' checks (with the same --config)")
        return
    from kvtierd.service.server import run

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the daemon itself listens to it, and after that
    ctx.exit(run(loaded))


@click.command()
@admin_options
@_set_option
@json_option("Write JSON: sizes in bytes, durations in seconds.")
@click.option("--reference", is_flag=True, help="Every key with description, default and variable.")
@click.option("--running", is_flag=True, help="What the running daemon was started with, instead.")
@click.pass_context
def config(ctx: click.Context, pairs: tuple[str, ...], as_json: bool, reference: bool, running: bool) -> None:
    """Show the configuration that `serve` would use here, as TOML.

    It is made from defaults, the file, KVTIERD_* variables and --set, in rising order.
    """
    if as_json + reference + running > 1:
        raise click.UsageError("--json, --reference and --running exclude each other")
    if pairs and (running or reference):
        other = "--running shows what the daemon was started with" if running else "--reference shows the defaults"
        raise click.UsageError(f"--set has no effect here: {other}; leave one of the two out")
    settings = ctx.ensure_object(Settings)
    if reference:
        click.echo(reference_toml(), nl=False)
    elif running:
        with settings.connect() as daemon:
            answer = daemon.call(daemon.stub.GetConfig, admin_pb2.GetConfigRequest())
        click.echo(answer.toml, nl=not answer.toml.endswith("\n"))
    else:
        loaded = settings.load(_parse_set(pairs))
        if as_json:
            print_json(config_json(loaded))
        else:
            click.echo(config_toml(loaded), nl=False)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Write the completion script of a shell.

    \b
    bash: kvtierd completion bash > ~/.local/share/bash-completion/completions/kvtierd
    zsh:  kvtierd completion zsh > "${fpath[1]}/_kvtierd"
    fish: kvtierd completion fish > ~/.config/fish/completions/kvtierd.fish
    """
    from kvtierd.cli import cli

    found = get_completion_class(shell)
    assert found is not None, f"click has no completion for {shell}"
    complete = found(cli, {}, "kvtierd", "_KVTIERD_COMPLETE")
    # Without a check of the shell's own version: the script may be written on another machine than it is for.
    click.echo(complete.source_template % complete.source_vars())
